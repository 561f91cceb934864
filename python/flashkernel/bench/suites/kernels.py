"""Every kernel id of the registry at a representative shape: kernels of one op, dtype and shape stand in one row,
forced in turn beside their baselines. `representative` says which row a kernel belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flashkernel as fk

from ... import selfcheck
from ...selfcheck import samples_of
from .. import baselines
from ..case import DTYPES, OURS, PEER, TOLERANCE, Case, Inputs, Provider, Settings, Work, attention_flop, each, nbytes
from . import decode, fused_linear, linear, linear_fp8, linear_loss, quantized_linear, rows, sampling

__all__ = ["OPS", "Representative", "call_for", "kernels", "representative"]

MODES = (
    "decode",
    "decode_int4",
    "decode_quantized",
    "few_rows",
    "long_rows",
    "quantized_held",
    "quantized_walked",
    "walked",
)
_SHORT = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


@dataclass(frozen=True)
class Representative:
    """The row that a kernel belongs to."""

    op: str  # as kernel ids name it
    mode: str = ""  # what a kernel of the op is for, where there are several: decode, few_rows, ...
    dtype: str = "float32"
    head_dim: int = 0


def representative(kernel_id: str, dtype: str | None = None) -> Representative:
    """From the id alone: `attention_fwd/cuda/sm80/decode/bf16/d128` is decode in bfloat16 at head_dim 128.

    dtype: for ids that name none; left out: float32 on the CPU (AMX: its own types), bfloat16 on CUDA
    for ops bound by memory, float16 for others.
    """
    op, backend, *parts = kernel_id.split("/")
    if op not in OPS and not samples_of(op):
        raise ValueError(f"bench: {kernel_id}: no representative shape for the op {op!r}; suites/kernels.py needs one")
    named = [_SHORT[part] for part in parts if part in _SHORT]
    if named:
        dtype = named[0]
    elif "amx_fp16" in parts:
        dtype = "float16"
    elif "amx" in parts or "amx_stream" in parts:
        dtype = dtype or "bfloat16"
    elif op in ("attention_fp8", "linear_fp8"):  # what their outputs have
        dtype = dtype if dtype in ("float16", "bfloat16") else "bfloat16"
    elif dtype is None:
        matmul = op in ("attention_fwd", "attention_bwd", "linear", "linear_bwd")
        dtype = "float32" if backend == "cpu" else "float16" if matmul else "bfloat16"
    mode = next((part for part in parts if part in MODES), "few_rows" if "amx_stream" in parts else "")
    if op == "attention_fwd" and backend == "cpu" and "widened" in parts[0]:
        mode = "decode_int4"
    if op == "attention_mla_decode" and ("e4m3" in parts or "widened" in parts[0]):
        mode = "e4m3"
    if op == "quantized_linear" and parts[0] in ("amx", "avx512_vnni"):
        mode = "tiles"
    bucket = next((int(part[1:]) for part in parts if re.fullmatch(r"d\d+", part)), 0)
    if op in ("attention_fwd", "attention_bwd"):
        bucket = bucket or (64 if backend == "cpu" else 128)
    return Representative(op, mode, dtype, bucket)


Pair = tuple[Sequence[Callable[[], Any]], Sequence[Provider], dict[str, Any]]
"""Our calls, the peers, and Work's other fields."""


def _decode_quantized(s: Settings, r: Representative) -> Pair:
    """Keys and values of 8 bits with a scale a head; the peers attend over the same values at 16 bits."""
    torch = baselines.require_torch()
    batch, cache, page = s.pick(quick=(2, 256, 16), cpu=(8, 1024, 256), cuda=(32, 4096, 256))
    inputs = Inputs(s.device, r.dtype)
    q = inputs.randn(batch, 32, 1, r.head_dim)
    scale = torch.full((8,), 1 / 64, device=q.device)  # a power of two: what is stored is what the peers get
    k8, v8 = ((inputs.randn(batch, 8, cache, r.head_dim) * 64).to(torch.float8_e4m3fn) for _ in range(2))
    k, v = ((x.to(torch.float32) / 64).to(q.dtype) for x in (k8, v8))
    *pages, table = inputs.paged(k8.view(torch.uint8), v8.view(torch.uint8), page)
    copies = [
        [x.clone().view(torch.float8_e4m3fn) for x in pages]
        for _ in range(inputs.sets(nbytes(k8, v8), from_memory=s.cuda))
    ]
    paged = [(q, *pool, table, inputs.index([cache] * batch)) for pool in copies]
    peers = [*baselines.sdpa_providers(s, r.dtype, [(q, k.clone(), v.clone()) for _ in copies], False)]
    sizes = f"batch {batch}, cache {cache}, 32/8 heads, pages of {page}, e4m3"
    ours = each(fk.attention_paged, paged, kv_scales=(scale, scale))
    return ours, peers, {"read": nbytes(q, k8, v8), "written": nbytes(q), "sizes": sizes}


def _decode_int4(s: Settings, r: Representative) -> Pair:
    """Keys and values of 4 bits with a scale and a zero for 32 of them; the peers attend over the same at 16 bits."""
    torch = baselines.require_torch()
    batch, cache, page = s.pick(quick=(2, 256, 16), cpu=(8, 1024, 256), cuda=(32, 4096, 256))
    inputs, dim = Inputs(s.device, r.dtype), r.head_dim
    q = inputs.randn(batch, 32, 1, dim)
    # Scale 1/8 and zero -1 in every group: 16 bits hold the numbers exactly.
    k4, v4 = (torch.randint(0, 256, (batch, 8, cache, dim // 2), dtype=torch.uint8, device=q.device) for _ in range(2))
    k, v = ((torch.stack([x & 15, x >> 4], -1).flatten(-2).float() / 8 - 1).to(q.dtype) for x in (k4, v4))
    *pages, table = inputs.paged(k4, v4, page)
    scale = torch.tensor([0.125, -1.0], dtype=torch.float16, device=q.device)
    scales = scale.expand(batch * cache // page, 8, page, -(-dim // 32), 2).contiguous()
    copies = [[x.clone() for x in pages] for _ in range(inputs.sets(nbytes(k4, v4), from_memory=s.cuda))]
    paged = [(q, *pool, table, inputs.index([cache] * batch)) for pool in copies]
    peers = [*baselines.sdpa_providers(s, r.dtype, [(q, k.clone(), v.clone()) for _ in copies], False)]
    sizes = f"batch {batch}, cache {cache}, 32/8 heads, pages of {page}, int4"
    ours = each(fk.attention_paged, paged, kv_scales=(scales, scales), kv_dtype="int4")
    return ours, peers, {"read": nbytes(q, k4, v4, scales, scales), "written": nbytes(q), "sizes": sizes}


def _attention_fwd(s: Settings, r: Representative) -> Pair:
    if r.mode == "decode_int4":
        return _decode_int4(s, r)
    if r.mode == "decode_quantized":
        return _decode_quantized(s, r)
    if r.mode == "decode":
        batch, cache, page = s.pick(quick=(2, 256, 16), cpu=(8, 1024, 256), cuda=(32, 4096, 256))
        dim = r.head_dim
        inputs = Inputs(s.device, r.dtype)
        q = inputs.randn(batch, 32, 1, dim)
        k, v = (inputs.randn(batch, 8, cache, dim) for _ in range(2))
        pages = inputs.paged(k, v, page)
        copies = [tuple(x.clone() for x in pages[:2]) for _ in range(inputs.sets(nbytes(k, v), from_memory=s.cuda))]
        paged = [(q, *pool, pages[2], inputs.index([cache] * batch)) for pool in copies]
        dense = [(q, k.clone(), v.clone()) for _ in copies]
        peers = [*baselines.twin(s, fk.attention_paged, paged), *baselines.sdpa_providers(s, r.dtype, dense, False)]
        sizes = f"batch {batch}, cache {cache}, 32/8 heads, pages of {page}"
        return each(fk.attention_paged, paged), peers, {"read": nbytes(q, k, v), "written": nbytes(q), "sizes": sizes}
    batch, heads, seq, dim = _attention_shape(s, r)
    q, k, v = (Inputs(s.device, r.dtype).heads(batch, heads, seq, dim) for _ in range(3))
    peers = [*baselines.twin(s, fk.attention, [(q, k, v)], causal=True)]
    peers += baselines.sdpa_providers(s, r.dtype, [(q, k, v)], True)
    peers += baselines.stock(s, baselines.attention_eager, [(q, k, v, True)])
    work = {"flop": attention_flop(batch, heads, seq, seq, dim, True), "read": nbytes(q, k, v), "written": nbytes(q)}
    return each(fk.attention, [(q, k, v)], causal=True), peers, {**work, "sizes": f"{[*q.shape]} causal"}


def _attention_shape(s: Settings, r: Representative) -> tuple[int, int, int, int]:
    batch, seq, heads = s.pick(quick=(1, 64, 2), cpu=(1, 512, 4), cuda=(2, 4096, max(1, 2048 // r.head_dim)))
    return batch, heads, seq, r.head_dim


def _attention_bwd(s: Settings, r: Representative) -> Pair:
    batch, heads, seq, dim = _attention_shape(s, r)
    q, k, v, grad = (Inputs(s.device, r.dtype).heads(batch, heads, seq, dim) for _ in range(4))
    out, lse = fk.attention(q, k, v, causal=True, return_lse=True)
    arguments = (grad, q, k, v, out, lse)
    peers = [*baselines.twin(s, fk.attention_backward, [arguments], causal=True)]
    for name in [*baselines.sdpa_names(s, r.dtype)][:2]:
        function = baselines.sdpa if name == "sdpa" else partial(baselines.forced_sdpa, name)
        try:
            peers.append(Provider(name, [baselines.autograd(function, (q, k, v), grad, (True,))]))
        except RuntimeError:  # a backend without this shape
            continue
    flop = 2.5 * attention_flop(batch, heads, seq, seq, dim, True)
    work = {"flop": flop, "read": nbytes(*arguments), "written": nbytes(q, k, v), "graph": False}
    return each(fk.attention_backward, [arguments], causal=True), peers, {**work, "sizes": f"{[*q.shape]} causal"}


def _merge_states(s: Settings, r: Representative) -> Pair:
    torch = baselines.require_torch()
    batch, heads, seq, dim = s.pick(quick=(1, 2, 16, 64), cpu=(1, 8, 1024, 64), cuda=(4, 32, 4096, 128))
    a, b = (Inputs(s.device, r.dtype).randn(batch, heads, seq, dim) for _ in range(2))
    lse_a, lse_b = (torch.randn(batch, heads, seq, device=s.device) for _ in range(2))
    sets = [(a, lse_a, b, lse_b)]
    peers = [*baselines.twin(s, fk.merge_states, sets), *baselines.stock(s, baselines.merge_states, sets)]
    return each(fk.merge_states, sets), peers, {
        "read": nbytes(*sets[0]), "written": nbytes(a, lse_a), "sizes": f"{[*a.shape]}",
    }  # fmt: skip


def _mla_decode(s: Settings, r: Representative) -> Pair:
    """DeepSeek's decoding: 64 heads over one latent row a token, beside two matrix products of torch. Rows of 8 bits:
    beside the call over the same numbers in 16 bits, too."""
    torch = baselines.require_torch()
    batch, heads, keys = s.pick(quick=(1, 16, 64), cpu=(1, 16, 1024), cuda=(32, 64, 4096))
    inputs = Inputs(s.device, r.dtype)
    q, pages = inputs.randn(batch, heads, 1, 576), inputs.randn(batch * keys // 64, 64, 576)
    table = inputs.permutation(batch * keys // 64).int().reshape(batch, keys // 64)
    lengths = inputs.index([keys] * batch)
    call, peers = (q, pages, table, lengths), []
    if r.mode == "e4m3":
        narrow = torch.zeros(*pages.shape[:2], 656, dtype=torch.uint8, device=s.device)
        slots, rows = inputs.index(range(batch * keys)), pages.reshape(-1, 576)
        fk.latent_append(rows[:, :512].contiguous(), rows[:, 512:].contiguous(), narrow, slots)
        scales = narrow[..., 512:528].contiguous().view(torch.float32).repeat_interleave(128, -1)
        latent = narrow[..., :512].view(torch.float8_e4m3fn).float() * scales
        pages[..., :512], pages[..., 512:] = latent, narrow[..., 528:].contiguous().view(torch.bfloat16)
        wide = each(fk.attention_mla_decode, [call], scale=192**-0.5)
        peers, call = [Provider("16 bits", wide, PEER)], (q, narrow, table, lengths)
    ours = each(fk.attention_mla_decode, [call], scale=192**-0.5)

    def products(q: Any, pages: Any, table: Any) -> Any:
        latent = pages[table].reshape(batch, keys, 576)
        weights = torch.softmax(torch.matmul(q[:, :, 0], latent.mT).float() * 192**-0.5, -1).to(q.dtype)
        return torch.matmul(weights, latent[..., :512])[:, :, None]

    flop = 2.0 * batch * heads * keys * (576 + 512)
    peers.append(Provider("eager", each(products, [(q, pages, table.long())]), PEER))
    return ours, peers, {"flop": flop, "read": nbytes(*call[:2]), "written": nbytes(q) * 512 // 576,
                         "sizes": f"{batch} x {keys} keys, {heads} heads"}  # fmt: skip


def _latent_append(s: Settings, r: Representative) -> Pair:
    """Rows of DeepSeek's latents into pages of 8 bits; kv_append is the peer that writes them as they are."""
    torch = baselines.require_torch()
    tokens = s.pick(quick=32, cpu=1024, cuda=8192)
    inputs = Inputs(s.device, r.dtype)
    latent, key = inputs.randn(tokens, 512), inputs.randn(tokens, 64)
    pages = torch.zeros(-(-tokens // 64), 64, 656, dtype=torch.uint8, device=s.device)
    wide = inputs.randn(-(-tokens // 64), 64, 1, 576)
    slots = inputs.permutation(tokens)
    calls = each(fk.latent_append, [(latent, key, pages, slots)])
    peer = each(fk.kv_append, [(key[:, None], latent[:, None], wide[..., 512:], wide[..., :512], slots)])
    return calls, [Provider("kv_append", peer, PEER)], {
        "read": nbytes(latent, key), "written": 656 * tokens, "sizes": f"{tokens} tokens",
    }  # fmt: skip


def _attention_fp8(s: Settings, r: Representative) -> Pair:
    """Beside torch's attention of the same numbers in 16 bits."""
    torch = baselines.require_torch()
    dim = r.head_dim or 128
    batch, heads, seq = s.pick(quick=(1, 2, 64), cpu=(1, 8, 1024), cuda=(4, 16, 4096))
    dtype = "float16" if r.dtype == "float16" else "bfloat16"
    inputs = Inputs(s.device, dtype)
    eights = [inputs.randn(batch, heads, seq, dim).to(torch.float8_e4m3fn) for _ in range(3)]
    numbers = [x.to(getattr(torch, dtype)) for x in eights]
    ours = each(fk.attention_fp8, [tuple(eights)], out_dtype=dtype)
    peer = Provider("sdpa, 16 bits", each(torch.nn.functional.scaled_dot_product_attention, [tuple(numbers)]), PEER)
    size = nbytes(*numbers)
    return ours, [peer], {"flop": 4.0 * batch * heads * seq * seq * dim, "read": size // 2, "written": size // 3,
                          "sizes": f"{batch} x {heads} x {seq} x {dim}"}  # fmt: skip


def _of(work: Work, sizes: str) -> Pair:
    """A suite's row: its own providers' calls are forced here, the peers stay."""
    ours = next(p for p in work.providers if p.kind == OURS)
    others = {
        "flop": work.flop, "read": work.read, "written": work.written, "graph": work.graph, "restore": work.restore,
        "valid": work.valid, "sizes": sizes,
    }  # fmt: skip
    return ours.calls, [p for p in work.providers if p.kind != OURS], others


def _linear(s: Settings, r: Representative) -> Pair:
    few = s.pick(quick=(4, 1280, 256), cpu=(4, 768, 3072), cuda=(4, 4096, 16384))
    many = s.pick(quick=(32, 64, 256), cpu=(128, 768, 3072), cuda=(4096, 4096, 4096))
    count, features, outputs = few if r.mode == "few_rows" else many
    return _of(linear.linear_work(s, r.dtype, count, features, outputs), f"{count} x {features} -> {outputs}, GELU")


def _quantized_linear(s: Settings, r: Representative) -> Pair:
    count, features, outputs = s.pick(quick=(4, 256, 128), cpu=(1, 576, 1536), cuda=(1, 4096, 28672))
    tiles = r.mode == "tiles"
    work = quantized_linear.quantized_linear_work(s, r.dtype, count, features, outputs, "q4_0", tiles)
    return _of(work, f"q4_0{' in tiles' if tiles else ''}, {count} x {features} -> {outputs}")


def _linear_fp8(s: Settings, r: Representative) -> Pair:
    few = s.pick(quick=(4, 256, 128), cpu=(1, 576, 1536), cuda=(1, 4096, 16384))
    many = s.pick(quick=(32, 128, 192), cpu=(32, 576, 1536), cuda=(4096, 4096, 4096))
    count, features, outputs = few if r.mode == "few_rows" else many
    work = linear_fp8.linear_fp8_work(s, count, features, outputs, "blocks")
    return _of(work, f"scales of blocks, {count} x {features} -> {outputs}")


def _quantize_fp8(s: Settings, r: Representative) -> Pair:
    count, columns = s.pick(quick=(16, 128), cpu=(512, 1024), cuda=(32768, 4096))
    return _of(linear_fp8.quantize_fp8_work(s, r.dtype, count, columns), f"{count} x {columns}")


def _fused_linear(s: Settings, r: Representative) -> Pair:
    count, features, inner = s.pick(quick=(2, 256, 64), cpu=(1, 576, 1536), cuda=(1, 2048, 8192))
    work = fused_linear.fused_linear_work(s, r.dtype, count, features, inner)
    return _of(work, f"norm, {count} x {features} -> 2 x {inner}, SwiGLU")


def _qkv_append(s: Settings, r: Representative) -> Pair:
    count, features, heads = s.pick(quick=(2, 256, 8), cpu=(1, 576, 9), cuda=(1, 2048, 32))
    work = fused_linear.qkv_append_work(s, r.dtype, count, features, heads)
    return _of(work, f"norm, {count} x {features} -> {heads} + 2 x {fused_linear.HEADS_KV} heads, RoPE")


def _linear_bwd(s: Settings, r: Representative) -> Pair:
    count, features, outputs = s.pick(quick=(32, 64, 128), cpu=(128, 768, 768), cuda=(4096, 4096, 4096))
    return _of(linear.linear_backward_work(s, r.dtype, count, features, outputs), f"{count} x {features} -> {outputs}")


def _matrix(op: Any, what: str = "") -> Callable[[Settings, Representative], Pair]:
    def make(s: Settings, r: Representative) -> Pair:
        count, columns = s.pick(quick=(16, 128), cpu=(512, 1024), cuda=(32768, 4096))
        if r.mode in ("long_rows", "walked"):
            count, columns = s.pick(quick=(2, 262144), cpu=(8, 131072), cuda=(512, 262144))
        return _of(rows.row_work(s, r.dtype, op, count, columns), f"{what}{count} x {columns}")

    return make


def _norm(s: Settings, r: Representative) -> Pair:
    if not r.mode.startswith("quantized"):
        return _matrix(rows.NORMS["rms_norm"], "RMS, ")(s, r)
    count, columns = s.pick(quick=(16, 128), cpu=(512, 1024), cuda=(32768, 4096))
    if r.mode == "quantized_walked":
        count, columns = s.pick(quick=(2, 40000), cpu=(8, 131072), cuda=(512, 262144))
    return _of(rows.norm_quantized_work(s, r.dtype, count, columns), f"RMS to float8, {count} x {columns}")


def _norm_bwd(s: Settings, r: Representative) -> Pair:
    count, columns = s.pick(quick=(16, 128), cpu=(512, 1024), cuda=(32768, 4096))
    if r.mode in ("long_rows", "walked"):
        count, columns = s.pick(quick=(2, 32768), cpu=(8, 131072), cuda=(512, 262144))
    return _of(rows.norm_backward_work(s, r.dtype, "rms_norm", count, columns), f"RMS, {count} x {columns}")


def _cross_entropy(backward: bool, s: Settings, r: Representative) -> Pair:
    count, classes = s.pick(quick=(8, 100), cpu=(64, 32000), cuda=(4096, 128256))
    return _of(rows.cross_entropy_work(s, r.dtype, count, classes, backward), f"{count} x {classes}")


def _linear_cross_entropy(part: str, s: Settings, r: Representative) -> Pair:
    tokens, features, classes = s.pick(quick=(8, 32, 1100), cpu=(64, 256, 32000), cuda=(4096, 2048, 128256))
    work = linear_loss.linear_cross_entropy_work(s, r.dtype, tokens, features, classes, part)
    return _of(work, f"{tokens} x {features} -> {classes}")


def _sample(s: Settings, r: Representative) -> Pair:
    count, classes = s.pick(quick=(4, 1001), cpu=(8, 128256), cuda=(32, 128256))
    named = f"{count} x {classes}, temperature {sampling.TEMPERATURE}, top-p {sampling.TOP_P}"
    return _of(sampling.sample_work(s, r.dtype, count, classes), named)


def _pack_mask(s: Settings, r: Representative) -> Pair:
    count, keys = s.pick(quick=(16, 96), cpu=(4096, 4096), cuda=(32768, 8192))
    return _of(sampling.pack_mask_work(s, count, keys), f"{count} x {keys} keys")


def _rope(s: Settings, r: Representative) -> Pair:
    shape = s.pick(quick=(1, 4, 2, 32, 32), cpu=(1, 8, 8, 512, 64), cuda=(4, 32, 32, 4096, 128))
    batch, heads_q, heads_kv, seq, dim = shape
    return _of(rows.rope_work(s, r.dtype, shape, False), f"[{batch}, {heads_q} and {heads_kv}, {seq}, {dim}]")


def _kv(op: str, s: Settings, r: Representative) -> Pair:
    tokens = s.pick(quick=16, cpu=1024, cuda=16384)
    return _of(decode.kv_work(s, r.dtype, op, tokens, 16), f"{tokens} tokens, 8 heads, d128, pages of 16")


def _decode_step(s: Settings, r: Representative) -> Pair:
    """One row of a decoder; on a GPU of Llama-3.2-1B's sizes, 128 tokens into its text."""
    sizes = s.pick(quick=(2, 64, 2, 1, 96, 101), cpu=(2, 256, 4, 2, 512, 1024), cuda=(16, 2048, 32, 8, 8192, 128256))
    layers, hidden, heads, heads_kv, inner, vocab = sizes
    dim, inputs = 64, Inputs(s.device, r.dtype)

    def weight(*shape: int) -> Any:
        return inputs.randn(*shape) * shape[-1] ** -0.5

    weights = [
        weight(vocab, hidden),
        inputs.randn(2 * layers + 1, hidden),
        weight(layers, (heads + 2 * heads_kv) * dim, hidden),
        weight(layers, hidden, heads * dim),
        weight(layers, 2 * inner, hidden),
        weight(layers, hidden, inner),
        weight(vocab, hidden),
    ]
    pages = [inputs.randn(layers, 9, 16, heads_kv, dim) for _ in range(2)]
    places = [inputs.index([7]), inputs.index([128]), inputs.index([128])]
    table = [inputs.index([[*range(9)]]).int(), inputs.index([129])]
    frequencies = Inputs(s.device, "float32").randn(dim // 2).abs()
    arguments = [(*places, *table, *weights, frequencies, *pages)]
    ours, peers = each(fk.decode_step, arguments), [*baselines.stock(s, baselines.decode_step, arguments)]
    moved = {"read": nbytes(*weights[2:], *pages), "written": nbytes(weights[0][:1])}
    return ours, peers, {**moved, "graph": False, "sizes": f"{layers} layers of {hidden}, {vocab} tokens"}


def _checked(*arguments: Any) -> bool:
    fk.check_block_table(*arguments)  # raises where it finds one
    return True


def _find_bad_page(s: Settings, r: Representative) -> Pair:
    """The check waits for the GPU to answer, so it is not in a graph."""
    batch, blocks = s.pick(quick=(2, 8), cpu=(64, 256), cuda=(128, 1024))
    inputs = Inputs(s.device, "float32")
    table = inputs.permutation(batch * blocks).int().reshape(batch, blocks)
    lengths = inputs.index([blocks * 16] * batch)
    ours = each(_checked, [(table, lengths, batch * blocks, 16)])
    peer = Provider("eager", each(baselines.check_block_table, [(table, batch * blocks)]), PEER)
    return ours, [peer], {"read": nbytes(table, lengths), "graph": False, "sizes": f"{batch} x {blocks} entries"}


OPS: dict[str, Callable[[Settings, Representative], Pair]] = {
    "attention_fwd": _attention_fwd,
    "attention_bwd": _attention_bwd,
    "attention_mla_decode": _mla_decode,
    "latent_append": _latent_append,
    "attention_fp8": _attention_fp8,
    "merge_states": _merge_states,
    "linear": _linear,
    "linear_bwd": _linear_bwd,
    "quantized_linear": _quantized_linear,
    "linear_fp8": _linear_fp8,
    "quantize_fp8_blocks": _quantize_fp8,
    "fused_linear": _fused_linear,
    "qkv_append": _qkv_append,
    "add": _matrix(rows.ELEMENTWISE["add"]),
    "swiglu": _matrix(rows.ELEMENTWISE["swiglu"]),
    "swiglu_bwd": _matrix(rows.ELEMENTWISE["swiglu_backward"]),
    "reduce": _matrix(rows.ELEMENTWISE["sum"], "sums of rows, "),
    "softmax": _matrix(rows.ELEMENTWISE["softmax"]),
    "softmax_bwd": _matrix(rows.ELEMENTWISE["softmax_backward"]),
    "norm": _norm,
    "norm_bwd": _norm_bwd,
    "rope": _rope,
    "sample": _sample,
    "pack_mask": _pack_mask,
    "cross_entropy": partial(_cross_entropy, False),
    "cross_entropy_bwd": partial(_cross_entropy, True),
    "linear_cross_entropy": partial(_linear_cross_entropy, "forward"),
    "linear_cross_entropy_bwd": partial(_linear_cross_entropy, "backward"),
    "kv_append": partial(_kv, "kv_append"),
    "kv_read": partial(_kv, "kv_read"),
    "kv_copy_pages": partial(_kv, "kv_copy_pages"),
    "find_bad_page": _find_bad_page,
    "decode_step": _decode_step,
}


def _of_doctor(s: Settings, r: Representative) -> Pair:
    """Doctor's call of an op that has no row of its own, on larger matrices, beside its twin."""
    rows = s.pick(quick=(16, 128), cpu=(512, 1024), cuda=(32768, 4096))
    inputs = selfcheck.Inputs(r.dtype, s.device, rows=rows, as_torch=True)
    sample = samples_of(r.op)[0](inputs)
    arguments = tuple(array for array, _ in sample.arguments)
    function = getattr(fk, sample.op)
    results = sample.run(inputs)
    moved = {
        "read": nbytes(*(x for x in arguments if hasattr(x, "numel"))),
        "written": nbytes(*(results if isinstance(results, tuple) else (results,))),
    }
    sizes = ", ".join(str([*x.shape]) for x in arguments)
    ours = each(function, [arguments], **sample.options)
    return ours, [*baselines.twin(s, function, [arguments], **sample.options)], {**moved, "sizes": sizes}


def _row(op: str) -> Callable[[Settings, Representative], Pair]:
    return OPS.get(op, _of_doctor)


def _work(s: Settings, r: Representative, ids: Sequence[str]) -> Work:
    calls, peers, fields = _row(r.op)(s, r)
    providers = [Provider(kernel_id, calls, OURS, forced=kernel_id) for kernel_id in ids]
    tolerance = (4 if r.op.endswith("_bwd") else 1) * TOLERANCE[r.dtype]
    return Work([*providers, *peers], tolerance, **fields)


def call_for(kernel_id: str, device: str = "cuda", quick: bool = False) -> Callable[[], Any]:
    """The call of the kernel's row, for a profiler; the caller forces the kernel. Its inputs are made now."""
    row = representative(kernel_id)
    calls, _, _ = _row(row.op)(Settings(device, quick, without=frozenset(baselines.NAMES)), row)
    return calls[0]


def _wanted(s: Settings, kernel_id: str) -> bool:
    return not s.only or "all" in s.only or any((kernel_id + "/").startswith(x.rstrip("/") + "/") for x in s.only)


def kernels(s: Settings) -> Iterator[Case]:
    """Rows of the kernels that this machine can run; with dtypes asked for, each of them for ids that name none."""
    found: dict[Representative, list[str]] = {}
    for kernel in fk.kernels():
        if kernel.device != s.device or not kernel.available or not _wanted(s, kernel.id):
            continue
        for dtype in s.dtypes or (None,):
            row = representative(kernel.id, dtype)
            ids = found.setdefault(row, [])
            if (not s.dtypes or row.dtype in s.dtypes) and kernel.id not in ids:
                ids.append(kernel.id)
    quiet = replace(s, without=s.without | {"naive", "tiled"})
    order = {dtype: i for i, dtype in enumerate(DTYPES)}
    places = {op: i for i, op in enumerate(OPS)}
    for row, ids in sorted(
        found.items(), key=lambda x: (places.get(x[0].op, len(places)), x[0].op, x[0].mode, order[x[0].dtype])
    ):
        if ids:
            name = " ".join(x for x in (row.op, row.mode, f"d{row.head_dim}" if row.head_dim else "") if x)
            shape = {"op": row.op, "mode": row.mode, "head_dim": row.head_dim}
            yield Case("kernels", name, row.dtype, s.device, partial(_work, quiet, row, ids), shape)
