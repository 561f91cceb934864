"""Attention by others, forward and backward, as raw ops: a CUDA graph holds them, and no autograd stands in between.

torch's FlashAttention-2, cuDNN and memory-efficient attention; FlashAttention-3 from flash_attn_3, from xformers, or
from the file that FLASHKERNEL_BENCH_FA3 names; flash_attn; FlashInfer; FlexAttention where torch.compile is let.
What a peer cannot do it refuses in its first call, and the row says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from .. import baselines
from ..case import PEER, Provider, Settings
from ..paged_peers import WORKSPACE
from . import formula

__all__ = ["absent", "providers"]

FEW_QUERIES = 256  # up to here FlashAttention-3 chooses itself into how many parts it cuts the keys

Calls = list[Callable[[], Any]]


@cache
def flash3() -> Any:
    """torch.ops.flash_attn_3, or the reason in words why it is not there."""
    torch = baselines.require_torch()
    places = [os.environ.get("FLASHKERNEL_BENCH_FA3")]
    for package, file in (("flash_attn_3", "_C*.so"), ("xformers", "flash_attn_3/_C*.so")):
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            spec = None
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            places += [str(path) for path in sorted(Path(folder).glob(file))]
    reason = "neither flash_attn_3 nor xformers is installed"
    for place in filter(None, places):
        try:
            beside = Path(place).with_name("libcudart.so.12")
            if beside.is_file():  # a library built for CUDA 12 under a torch of CUDA 13
                ctypes.CDLL(str(beside), mode=ctypes.RTLD_GLOBAL)
            torch.ops.load_library(place)
            if hasattr(torch.ops.flash_attn_3, "fwd"):
                return torch.ops.flash_attn_3
            reason = f"{Path(place).name} has no op flash_attn_3::fwd"
        except (OSError, RuntimeError) as error:
            reason = str(error).splitlines()[0][:160]
    return reason


def absent(s: Settings) -> dict[str, str]:
    """Peers of attention that this environment lacks, with the reason."""
    if not s.cuda:
        return {}
    found = {"fa3": flash3()} if isinstance(flash3(), str) else {}
    for name, module in (("fa2", "flash_attn"), ("flashinfer", "flashinfer")):
        if baselines.optional(module) is None:
            found[name] = f"{module} cannot be imported"
    return found


@contextlib.contextmanager
def _deterministic(on: bool) -> Iterator[None]:
    """torch's own kernels ask this switch; fresh memory is not filled for it."""
    torch = baselines.require_torch()
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def _under(on: bool, call: Callable[[], Any]) -> Any:
    with _deterministic(on):
        return call()


def _swapped(*tensors: Any) -> list[Any]:
    """[batch, seq, heads, dim] views of [batch, heads, seq, dim]; packed tensors as they are."""
    return [x.transpose(1, 2) if x.ndim == 4 else x for x in tensors]


def _result(row: Any, tensors: Any, out: Any, lse: Any) -> Any:
    """The result as our op gives it. A sink is one more term of the softmax's denominator, added here by the LSE."""
    out = out.transpose(1, 2) if out.ndim == 4 else out
    if row.sinks:
        torch = baselines.require_torch()
        sinks = tensors.sinks[None, :, None] if out.ndim == 4 else tensors.sinks[:, None]
        scale = torch.sigmoid(lse - sinks).to(out.dtype)
        out = out * (scale[..., None] if out.ndim == 4 else scale.transpose(0, 1)[..., None])
        lse = torch.logaddexp(lse, sinks.expand_as(lse))
    return (out, lse) if row.lse else out


# FlashAttention-3


def _fa3_options(row: Any, tensors: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "softmax_scale": row.dim**-0.5, "is_causal": row.causal, "window_size_left": row.window[0],
        "window_size_right": 0 if row.causal else row.window[1], "softcap": row.softcap,
    }  # fmt: skip
    if row.lengths:
        longest = max(row.lengths)
        options |= {"cu_seqlens_q": tensors.cu_seqlens, "cu_seqlens_k": tensors.cu_seqlens}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return options


def _fa3(row: Any, tensors: Any) -> Calls:
    ops, options = flash3(), _fa3_options(row, tensors)
    if isinstance(ops, str) or row.bias or row.alibi:
        return [partial(baselines.refuse, ops if isinstance(ops, str) else "takes no bias and no ALiBi")]
    if row.backward:
        calls: Calls = []
        options["deterministic"] = row.deterministic
        forward = {key: value for key, value in options.items() if key != "deterministic"}
        (grad,) = _swapped(tensors.grad)
        for qkv in tensors.sets:
            q, k, v = _swapped(*qkv)
            out, lse = ops.fwd(q, k, v, num_splits=1, **forward)[:2]
            calls.append(partial(_gradients, partial(ops.bwd, grad, q, k, v, out, lse, **options)))
        return calls
    if row.page:
        options |= {"page_table": tensors.table, "seqused_k": tensors.seq_lens}
    options["num_splits"] = 0 if row.page or row.queries <= FEW_QUERIES and row.queries < row.keys else 1

    def call(q: Any, k: Any, v: Any) -> Any:
        return _result(row, tensors, *ops.fwd(q, k, v, **options)[:2])

    kv = tensors.pools if row.page else [tuple(_swapped(k, v)) for _, k, v in tensors.sets]
    return [partial(call, *_swapped(q), *pair) for (q, _, _), pair in zip(tensors.sets, kv, strict=True)]


def _gradients(call: Callable[[], Any]) -> Any:
    return tuple(x.transpose(1, 2) if x.ndim == 4 else x for x in call()[:3])


# torch's three


def _flash2(row: Any, tensors: Any) -> Calls:
    """torch's FlashAttention-2. Beside pages: over the same keys and values without pages."""
    if row.bias or row.alibi or row.softcap:
        return [partial(baselines.refuse, "takes no bias, no ALiBi and no softcap")]
    aten = baselines.require_torch().ops.aten
    bounds: tuple[Any, ...] = (None, None, row.queries, row.keys)
    if row.lengths:
        bounds = (tensors.cu_seqlens, tensors.cu_seqlens, max(row.lengths), max(row.lengths))
    right = 0 if row.causal else row.window[1]
    options: dict[str, Any] = {"scale": row.dim**-0.5}
    if row.window != (-1, -1):
        options |= {"window_size_left": row.window[0], "window_size_right": right}

    def call(q: Any, k: Any, v: Any) -> Any:
        out, lse, *_ = aten._flash_attention_forward(q, k, v, *bounds, 0.0, row.causal, False, **options)
        return _result(row, tensors, out, lse)

    if not row.backward:
        return [partial(call, *_swapped(*qkv)) for qkv in tensors.sets]
    calls: Calls = []
    (grad,) = _swapped(tensors.grad)
    for qkv in tensors.sets:
        q, k, v = _swapped(*qkv)
        out, lse, rng, unused, _ = aten._flash_attention_forward(q, k, v, *bounds, 0.0, row.causal, False, **options)
        arguments = (grad, q, k, v, out, lse, *bounds, 0.0, row.causal, rng, unused)
        call_back = partial(_gradients, partial(aten._flash_attention_backward, *arguments, **options))
        calls.append(partial(_under, row.deterministic, call_back))
    return calls


def _dense_bias(row: Any, tensors: Any) -> list[Any]:
    """[batch, heads, queries, keys] for ops that know no other form."""
    q = tensors.sets[0][0]
    if row.alibi:
        bias = formula.alibi_bias(tensors.slopes, row.queries, row.keys, q.dtype)
        biases = [bias, *(bias.clone() for _ in tensors.sets[1:])]
    else:
        biases = tensors.bias or [None] * len(tensors.sets)
    size = (row.batch, row.heads, row.queries, row.keys)
    return [bias if bias is None else bias.expand(size) for bias in biases]


def _by_bias(kind: str, row: Any, tensors: Any) -> Calls:
    """cuDNN's or the memory-efficient one: [batch, heads, seq, dim], causal from the top left, a dense bias."""
    torch = baselines.require_torch()
    aten, cudnn = torch.ops.aten, kind == "cudnn"
    if row.lengths or row.softcap or row.sinks or row.window != (-1, -1):
        return [partial(baselines.refuse, "takes no packed sequences, no softcap, no sinks and no window")]
    if row.causal and row.queries != row.keys:
        if row.queries > 1:
            return [partial(baselines.refuse, "its causal mask begins at the top left")]
    causal = row.causal and row.queries > 1
    if not cudnn and row.heads != row.heads_kv:
        return [partial(baselines.refuse, "takes no grouped heads")]
    name = f"_scaled_dot_product_{'cudnn' if cudnn else 'efficient'}_attention"
    forward, backward = getattr(aten, name), getattr(aten, f"{name}_backward")
    last = (0.0, causal, False) if cudnn else (0.0, causal)

    def call(q: Any, k: Any, v: Any, bias: Any) -> Any:
        out, lse, *_ = forward(q, k, v, bias, row.lse, *last)
        return (out, lse.reshape(row.batch, row.heads, -1)[..., : row.queries]) if row.lse else out

    def back(q: Any, k: Any, v: Any, bias: Any, *, found: Any) -> Any:
        if cudnn:
            out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = found
            more = (seed, offset, bias, cu_q, cu_k, max_q, max_k, 0.0, causal)
            return backward(tensors.grad, q, k, v, out, lse, *more)
        out, lse, seed, offset = found
        needed = [True, True, True, row.bias]
        grads = backward(tensors.grad, q, k, v, bias, out, lse, seed, offset, 0.0, needed, causal)
        return (*grads[:3], grads[3].sum(0, keepdim=True)) if row.bias else grads[:3]

    sets = [(*qkv, bias) for qkv, bias in zip(tensors.sets, _dense_bias(row, tensors), strict=True)]
    if not row.backward:
        return [partial(call, *one) for one in sets]
    if cudnn and row.bias:
        return [partial(baselines.refuse, "gives no gradient of the bias")]
    found = [forward(*one, True, *last) for one in sets]
    return [
        partial(_under, row.deterministic, partial(back, *one, found=kept))
        for one, kept in zip(sets, found, strict=True)
    ]


# Packages


def _fa2(row: Any, tensors: Any) -> Calls:
    """The package flash_attn: what torch's copy of it leaves out."""
    if row.backward or row.bias or row.page or row.sinks:
        return [partial(baselines.refuse, "is not asked for backward, bias, pages and sinks")]
    library = baselines.optional("flash_attn")
    options = {"causal": row.causal, "window_size": row.window, "softcap": row.softcap}
    options |= {"alibi_slopes": tensors.slopes, "return_attn_probs": True}

    def call(q: Any, k: Any, v: Any) -> Any:
        if row.lengths:
            bounds = (tensors.cu_seqlens, tensors.cu_seqlens, max(row.lengths), max(row.lengths))
            return _result(row, tensors, *library.flash_attn_varlen_func(q, k, v, *bounds, **options)[:2])
        return _result(row, tensors, *library.flash_attn_func(q, k, v, **options)[:2])

    return [partial(call, *_swapped(*qkv)) for qkv in tensors.sets]


def _flashinfer(row: Any, tensors: Any) -> Calls:
    """Over pages, planned beforehand: its wrapper for one query, or that for several."""
    torch = baselines.require_torch()
    library = baselines.optional("flashinfer")
    device = tensors.sets[0][0].device
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
    steps = torch.arange(row.batch + 1, dtype=torch.int32, device=device)
    indices = (steps * tensors.table.shape[1], tensors.table.flatten())
    last = torch.full((row.batch,), row.page, dtype=torch.int32, device=device)
    heads = (row.heads, row.heads_kv, row.dim, row.page)
    q = tensors.sets[0][0]
    options = {"q_data_type": q.dtype, "window_left": row.window[0], "logits_soft_cap": row.softcap or None}
    if row.queries == 1:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(*indices, last, *heads, **options)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(steps * row.queries, *indices, last, *heads, causal=row.causal, **options)

    def call(packed: Any, pool: Any) -> Any:
        out = wrapper.run(packed, pool)
        return out.view(row.batch, row.queries, row.heads, row.dim).transpose(1, 2)

    packed = [x.transpose(1, 2).reshape(-1, row.heads, row.dim) for x, _, _ in tensors.sets]
    return [partial(call, x, pool) for x, pool in zip(packed, tensors.pools, strict=True)]


def _flex(s: Settings, row: Any, tensors: Any) -> Calls:
    """FlexAttention, compiled: where no other has the option."""
    torch = baselines.require_torch()
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    offset = row.keys - row.queries
    left = row.window[0] if row.window[0] >= 0 else row.keys
    right = 0 if row.causal else row.window[1] if row.window[1] >= 0 else row.keys

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j <= i + offset + right) & (j >= i + offset - left)

    def changed(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if row.softcap:
            score = row.softcap * torch.tanh(score / row.softcap)
        if row.alibi:
            score = score - tensors.slopes[h] * (i + offset - j).abs()
        return score

    if row.blocks:
        whole = tensors.blocks.int()
        counts, order = whole.sum(-1).int(), torch.argsort(whole, dim=-1, descending=True, stable=True).int()
        mask = BlockMask.from_kv_blocks(torch.zeros_like(counts), order, counts, order, BLOCK_SIZE=128)
    else:
        mask = create_block_mask(seen, None, None, row.queries, row.keys, device=s.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    changes = changed if row.softcap or row.alibi else None
    options = {"score_mod": changes, "block_mask": mask, "enable_gqa": row.heads != row.heads_kv, "return_lse": True}

    def call(q: Any, k: Any, v: Any) -> Any:
        out, lse = compiled(q, k, v, **options)
        return _result(row, tensors, out.transpose(1, 2), lse)

    return [partial(call, *qkv) for qkv in tensors.sets]


def providers(s: Settings, row: Any, tensors: Any) -> Iterator[Provider]:
    if not s.cuda:
        return
    made: dict[str, Callable[[], Calls]] = {
        "fa3": partial(_fa3, row, tensors),
        "sdpa_flash": partial(_flash2, row, tensors),
        "sdpa_cudnn": partial(_by_bias, "cudnn", row, tensors),
        "sdpa_efficient": partial(_by_bias, "efficient", row, tensors),
    }
    if isinstance(flash3(), str):
        del made["fa3"]
    if baselines.optional("flash_attn") is not None:
        made["fa2"] = partial(_fa2, row, tensors)
    plain = not (row.lse or row.sinks or row.alibi or row.bias)
    if row.page and plain and baselines.optional("flashinfer") is not None:
        made["flashinfer"] = partial(_flashinfer, row, tensors)
    if "compile" not in s.without and not (row.backward or row.lengths or row.page or row.bias):
        if row.softcap or row.sinks or row.alibi or row.blocks:
            made["flex"] = partial(_flex, s, row, tensors)
    if row.blocks:  # the others have none
        made = {name: make for name, make in made.items() if name == "flex"}
    for name, make in made.items():
        if name in s.without:
            continue
        try:
            calls = make()
        except Exception as error:  # others may refuse a shape in any way, while they prepare too
            calls = [partial(baselines.refuse, str(error))]
        yield Provider(name, calls, PEER)
