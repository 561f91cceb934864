"""What FlashKernel is compared with: torch eager and compiled, each backend of SDPA forced, cuBLASLt, our Triton ops.

Eager functions compute the same results as our ops from torch's own. `ours` and `stock` make the providers of a row.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import flashkernel as fk

from ..generate.errors import MissingDependencyError
from .case import OURS, VARIANT, Inputs, Provider, Settings, each

__all__ = [
    "NAMES",
    "compiled",
    "forced_sdpa",
    "optional",
    "ours",
    "ours_by",
    "refuse",
    "require_torch",
    "sdpa_providers",
    "stock",
    "twin",
]

Arguments = tuple[Any, ...]
# Another library's op: the function, and what makes its own arguments of a row's, where that needs anything.
Op = tuple[Callable[..., Any], Callable[[Arguments], Arguments] | None]

# Every provider that a row may have, for --without.
NAMES = {
    "flashkernel": "the library as a caller gets it",
    "eager": "torch's own ops, one after the other",
    "compile": 'the same under torch.compile(mode="max-autotune"); on CUDA without its own graphs: we replay ours',
    "sdpa": "torch's scaled_dot_product_attention, as it chooses (CPU)",
    "sdpa_flash": "SDPA, FlashAttention-2 forced",
    "sdpa_cudnn": "SDPA, cuDNN forced",
    "sdpa_efficient": "SDPA, memory-efficient attention forced",
    "sdpa_math": "SDPA, its formula forced (fp32 only: others are ahead elsewhere)",
    "fa2": "FlashAttention-2 of the package flash_attn, where it is installed (survey)",
    "fa3": "FlashAttention-3, where flash_attn_interface is installed; survey: flash_attn_3 or xformers",
    "fa4": "FlashAttention-4, where flash_attn.cute is installed",
    "fa3_paged": "FlashAttention-3 over pages, where it is installed",
    "fa3_planned": "the same with its scheduler's metadata made beforehand",
    "flashinfer": "FlashInfer's decode over pages on tensor cores, planned beforehand, where flashinfer is installed",
    "flashinfer_cuda_cores": "the same on CUDA cores",
    "flex": "torch's FlexAttention, compiled (survey, for options that no other has; left out with compile)",
    "formula": "attention by its formula in fp32, which others are checked against (survey; not timed)",
    "liger": "Liger's Triton kernels, where liger_kernel is installed",
    "quack": "quack-kernels (CuTe DSL), where quack is installed",
    "cublaslt_gelu": "cuBLASLt with the GELU in its epilogue",
    "matmul": "torch's plain linear, without the activation: what the product alone takes (cuBLAS or oneDNN)",
    "triton": "our Triton kernels, where flashkernel.triton can be imported",
    "naive": "attention_fwd/cuda/generic/naive",
    "tiled": "attention_fwd/cuda/generic/tiled",
    "any_order": "our backward with deterministic=False",
    "torch_op": "flashkernel.torch.attention (doors)",
    "flash_attn_func": "flashkernel.flash_attn's function (doors)",
    "sdpa_door": "flashkernel.torch.scaled_dot_product_attention (doors)",
    "jax": "flashkernel.jax, where its build has it (doors)",
    "tvm_ffi": "the TVM-FFI module that FLASHKERNEL_BENCH_TVM_FFI names (doors)",
    "contiguous": "our attention over contiguous K and V, beside rows over pages",
}


def require_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(
            "bench: torch is what the ops are measured against, and it is not installed; run `pip install torch`"
        ) from error
    return torch


@cache
def optional(module: str) -> Any:
    """The module, or None where it cannot be imported: its rows do not appear then."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # others' modules may fail to import in any way
        if module.startswith("flashkernel.") and not isinstance(error, ImportError):
            raise
        return None


def refuse(reason: str) -> Any:
    """The call of a peer that cannot be made: the runner notes why."""
    raise RuntimeError(reason)


def compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Compiled for one shape at its first call. What was compiled before is forgotten: past eight shapes of the same
    code torch runs the ninth as it is, uncompiled, and says nothing.
    """
    torch = require_torch()
    torch.compiler.reset()
    mode = "max-autotune-no-cudagraphs" if device == "cuda" else "max-autotune"
    result: Callable[..., Any] = torch.compile(lambda *arguments: function(*arguments), mode=mode, dynamic=False)
    return result


def ours(s: Settings, op: Callable[..., Any], sets: Sequence[tuple[Any, ...]], **options: Any) -> Iterator[Provider]:
    """The library's op, and its Triton twin. Arguments and options are those of both."""
    yield Provider("flashkernel", each(op, sets, **options), OURS)
    yield from twin(s, op, sets, **options)


def twin(s: Settings, op: Callable[..., Any], sets: Sequence[tuple[Any, ...]], **options: Any) -> Iterator[Provider]:
    """The op of the same name in flashkernel.triton, on a GPU."""
    found = getattr(_triton(s), op.__name__, None)
    if found is not None:
        yield Provider("triton", each(found, sets, **options), VARIANT)


def ours_by(s: Settings, call: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> Iterator[Provider]:
    """`call(library, *arguments)` by each of the two libraries."""
    yield Provider("flashkernel", each(partial(call, fk), sets), OURS)
    if _triton(s) is not None:
        yield Provider("triton", each(partial(call, _triton(s)), sets), VARIANT)


def _triton(s: Settings) -> Any:
    return optional("flashkernel.triton") if s.cuda and "triton" not in s.without else None


def stock(s: Settings, function: Callable[..., Any], sets: Iterable[tuple[Any, ...]]) -> Iterator[Provider]:
    """torch eager, and compiled unless this is a quick look."""
    sets = list(sets)
    if "eager" not in s.without:
        yield Provider("eager", each(function, sets))
    if "compile" not in s.without and not s.quick:
        yield Provider("compile", each(compiled(function, s.device), sets))


# Attention


def sdpa(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    gqa = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    return require_torch().nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, **gqa)


def attention_eager(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    """The formula, with every score in memory."""
    torch = require_torch()
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)
    if causal:
        seq_q, seq_k = scores.shape[-2:]
        ahead = torch.ones(seq_q, seq_k, dtype=torch.bool, device=q.device).triu(1 + seq_k - seq_q)
        scores = scores.masked_fill(ahead, -torch.inf)
    return torch.softmax(scores.float(), -1).to(q.dtype) @ v


def forced_sdpa(backend: str, q: Any, k: Any, v: Any, causal: bool) -> Any:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    known = {
        "sdpa_flash": SDPBackend.FLASH_ATTENTION,
        "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
        "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
        "sdpa_math": SDPBackend.MATH,
    }
    with sdpa_kernel(known[backend]):
        return sdpa(q, k, v, causal)


def _flash(module: str, q: Any, k: Any, v: Any, causal: bool) -> Any:
    """flash_attn_func of a library that takes [batch, seq, heads, head_dim], which is how these lie in memory."""
    swapped = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    result = optional(module).flash_attn_func(*swapped, causal=causal)
    return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)


def flash_libraries(s: Settings, dtype: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """FlashAttention-3 and -4 where they are installed, as functions of q, k, v [batch, heads, ...] and causal."""
    if s.cuda and dtype != "float32":
        for name, module in (("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute")):
            if name not in s.without and optional(module) is not None:
                yield name, partial(_flash, module)


def sdpa_names(s: Settings, dtype: str) -> list[str]:
    """Backends of SDPA that a row on this device and dtype is compared with."""
    if not s.cuda:
        names = ["sdpa"]
    elif dtype == "float32":
        names = ["sdpa_efficient", "sdpa_math"]
    else:
        names = ["sdpa_cudnn", "sdpa_flash", "sdpa_efficient"]
    return [name for name in names if name not in s.without]


def sdpa_providers(
    s: Settings, dtype: str, sets: Sequence[tuple[Any, Any, Any]], causal: bool, *, libraries: bool = True
) -> Iterator[Provider]:
    """SDPA, each backend forced, and FlashAttention-3 and -4 where they are. sets: of (q, k, v) [batch, heads, ...].

    libraries: those two as well, which want [batch, seq, heads, ...] in memory and would copy anything else.
    """
    scores = float(sets[0][0].shape[0] * sets[0][0].shape[1]) * sets[0][0].shape[2] * sets[0][1].shape[2]
    for name in sdpa_names(s, dtype):
        if name == "sdpa_math" and scores > 2**30:
            continue  # holds every score
        function: Callable[..., Any] = sdpa if name == "sdpa" else partial(forced_sdpa, name)
        yield Provider(name, each(function, [(*qkv, causal) for qkv in sets]))
    for name, function in flash_libraries(s, dtype) if libraries else ():
        yield Provider(name, each(function, [(*qkv, causal) for qkv in sets]))


def merge_states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    torch = require_torch()
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (lse_a - lse).exp()[..., None], (lse_b - lse).exp()[..., None]
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse


# Linear, norms, loss and the rest


def gelu_linear(x: Any, weight: Any, bias: Any) -> Any:
    functional = require_torch().nn.functional
    return functional.gelu(functional.linear(x, weight, bias), approximate="tanh")


def linear(x: Any, weight: Any, bias: Any) -> Any:
    return require_torch().nn.functional.linear(x, weight, bias)


def addmm_gelu(x: Any, weight: Any, bias: Any) -> Any:
    return require_torch()._addmm_activation(bias, x, weight.t(), use_gelu=True)


def linear_backward(grad_out: Any, x: Any, weight: Any) -> Any:
    return grad_out @ weight, grad_out.t() @ x, grad_out.sum(0)


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    return require_torch().nn.functional.layer_norm(x, (x.shape[-1],), weight, bias)


def rms_norm(x: Any, weight: Any) -> Any:
    return require_torch().nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def rms_norm_quantized(x: Any, weight: Any) -> Any:
    """(elements, scales): float8_e4m3fn, a scale a row."""
    torch = require_torch()
    y = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), 1e-6)
    scales = (y.abs().amax(-1) / 448.0).clamp_min(2.0**-100)
    return (y / scales[:, None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scales


def layer_norm_residual(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
    hidden = x + residual
    return layer_norm(hidden, weight, bias), hidden


def rms_norm_residual(x: Any, residual: Any, weight: Any) -> Any:
    hidden = x + residual
    return rms_norm(hidden, weight), hidden


def softmax(x: Any) -> Any:
    return require_torch().softmax(x, -1)


def softmax_backward(grad_out: Any, out: Any) -> Any:
    return require_torch().ops.aten._softmax_backward_data(grad_out, out, -1, out.dtype)


def sum_of_rows(x: Any) -> Any:
    return require_torch().sum(x, -1)


def total(x: Any) -> Any:
    return require_torch().sum(x)


def add(a: Any, b: Any) -> Any:
    return a + b


def swiglu(gate: Any, up: Any) -> Any:
    return require_torch().nn.functional.silu(gate) * up


def swiglu_backward(grad_out: Any, gate: Any, up: Any) -> Any:
    sigmoid = require_torch().sigmoid(gate)
    return grad_out * up * sigmoid * (1 + gate * (1 - sigmoid)), grad_out * gate * sigmoid


def cross_entropy(logits: Any, targets: Any) -> Any:
    return require_torch().nn.functional.cross_entropy(logits, targets)


def cross_entropy_backward(grad_loss: Any, log_probs: Any, targets: Any, rows: Any) -> Any:
    """The two ops that autograd runs. rows: how many there are, as a tensor."""
    aten, mean, nothing_ignored = require_torch().ops.aten, 1, -100
    grad = aten.nll_loss_backward(grad_loss, log_probs, targets, None, mean, nothing_ignored, rows)
    return aten._log_softmax_backward_data(grad, log_probs, -1, log_probs.dtype)


def rope_tables(s: Settings, dtype: str, seq: int, dim: int, theta: float = 10000.0) -> tuple[Any, Any]:
    """cos and sin of the full head dim, as Transformers holds them, of angles in double precision."""
    torch = require_torch()
    steps = torch.arange(0, dim, 2, device=s.device).double()
    angles = torch.outer(torch.arange(seq, device=s.device).double(), theta ** (-steps / dim)).repeat(1, 2)
    return angles.cos().to(getattr(torch, dtype)), angles.sin().to(getattr(torch, dtype))


def rope(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """RoPE as in Transformers: rotate_half with tables of the full head dim, made beforehand."""
    cat = require_torch().cat

    def rotate(x: Any) -> Any:
        half = x.shape[-1] // 2
        return x * cos + cat((-x[..., half:], x[..., :half]), dim=-1) * sin

    return rotate(q), rotate(k)


def rope_as_models_have_it(arguments: Arguments) -> Arguments:
    """Copies of q and k [batch, heads, ...] that lie as [batch, seq, heads, head_dim] in memory."""
    torch = require_torch()
    q, k, *tables = arguments
    q, k = (x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2) for x in (q, k))
    return q, k, *tables


# Pages: [num_pages, page_size, heads, head_dim]


def kv_append(k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Any) -> Any:
    for tokens, pages in ((k, k_pages), (v, v_pages)):
        pages.view(-1, *pages.shape[2:]).index_copy_(0, slots.long(), tokens)
    return k_pages, v_pages


def kv_read(k_pages: Any, v_pages: Any, block_table: Any) -> Any:
    """Sequences that fill their pages."""
    return tuple(pages[block_table.long()].flatten(1, 2) for pages in (k_pages, v_pages))


def kv_copy_pages(k_pages: Any, v_pages: Any, src: Any, dst: Any) -> Any:
    for pages in (k_pages, v_pages):
        pages.index_copy_(0, dst.long(), pages[src.long()])
    return k_pages, v_pages


def paged_attention(q: Any, k_pages: Any, v_pages: Any, block_table: Any, causal: bool = False) -> Any:
    """Gathers the pages, then SDPA."""
    k, v = (x.transpose(1, 2) for x in kv_read(k_pages, v_pages, block_table))
    return sdpa(q, k, v, causal)


def check_block_table(block_table: Any, num_pages: int) -> bool:
    return bool(((block_table >= 0) & (block_table < num_pages)).all())


def autograd(function: Callable[..., Any], inputs: Sequence[Any], grad: Any, others: Sequence[Any] = ()) -> Any:
    """A call of the backward pass alone: of `function` at `inputs` (which get gradients) and `others`."""
    torch = require_torch()
    leaves = [x.clone().requires_grad_() for x in inputs]
    with torch.enable_grad():
        result = function(*leaves, *others)
    return partial(torch.autograd.grad, result, leaves, grad, retain_graph=True)


def inputs(s: Settings, dtype: str) -> Inputs:
    return Inputs(s.device, dtype)


def decode_step(
    tokens: Any, positions: Any, slots: Any, block_table: Any, seq_lens: Any, embedding: Any, norms: Any, qkv: Any,
    out: Any, gate_up: Any, down: Any, head: Any, inv_freq: Any, k_pages: Any, v_pages: Any,
) -> Any:  # fmt: skip
    """Logits of one row of a Llama, an op of torch after the other; keys and values are written to copies."""
    torch = require_torch()
    functional = torch.nn.functional

    def norm(x: Any, weight: Any) -> Any:
        return functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)

    layers, _, _, heads_kv, dim = k_pages.shape
    angles = positions[:, None].double() * inv_freq.double()
    cos, sin = (f(angles).repeat(1, 2)[:, None].to(embedding.dtype) for f in (torch.cos, torch.sin))
    length, x = int(seq_lens[0]), embedding[tokens]
    for layer in range(layers):
        heads = functional.linear(norm(x, norms[2 * layer]), qkv[layer]).reshape(1, -1, dim)
        turned, v = heads[:, :-heads_kv], heads[:, -heads_kv:]
        turned = turned * cos + torch.cat([-turned[..., dim // 2 :], turned[..., : dim // 2]], -1) * sin
        seen = []
        for pages, new in ((k_pages, turned[:, -heads_kv:]), (v_pages, v)):
            rows = pages[layer][block_table[0].long()].flatten(0, 1)[:length].clone()
            rows[length - 1] = new[0]
            seen.append(rows.transpose(0, 1)[None])
        q = turned[:, :-heads_kv].transpose(0, 1)[None]
        mixed = functional.scaled_dot_product_attention(q, *seen, enable_gqa=True)
        x = x + functional.linear(mixed.reshape(1, -1), out[layer])
        gate, up = functional.linear(norm(x, norms[2 * layer + 1]), gate_up[layer]).chunk(2, -1)
        x = x + functional.linear(functional.silu(gate) * up, down[layer])
    return functional.linear(norm(x, norms[-1]), head)
