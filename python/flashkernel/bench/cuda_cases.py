"""What `flashkernel bench --device cuda` runs: for each group, the shapes, our call, its baselines, FLOP and bytes.

A case is made only when its turn comes, so that memory holds one case's tensors at a time. Inputs are random normal.
Attention: batch x seq = 16384 tokens, heads x head_dim = 2048 (the FlashAttention papers' setting).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import flashkernel as fk

from . import baselines
from .cases import TOLERANCE, _nbytes

__all__ = ["GROUPS", "GpuCase"]

L2_BYTES = 60e6  # the largest L2 of the GPUs served; inputs of memory-bound rows rotate past three times that


@dataclass
class GpuCase:
    group: str
    name: str
    dtype: str
    providers: dict[str, Callable[[int], Any]]  # ours first; each takes the index of an input set
    tolerance: float = 0.0  # on the largest difference from the first baseline, relative to its largest value
    flop: float = 0.0  # of one call
    bytes: float = 0.0  # that one call must read and write
    sets: int = 1
    graph: bool = True
    memory: bool = False  # measure the peak of every provider


def _randn(shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Any:
    torch = baselines.require_torch()
    return torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) * scale


def _sets(bytes_per_call: float) -> int:
    return max(1, min(64, math.ceil(3 * L2_BYTES / max(1.0, bytes_per_call))))


def _attention_flop(batch: int, heads: int, seq_q: int, seq_k: int, dim: int, causal: bool) -> float:
    return 4.0 * batch * heads * seq_q * seq_k * dim * (0.5 if causal else 1.0)


def _sdpa_backends(names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    from torch.nn.attention import SDPBackend

    known = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    for name in names:
        yield f"sdpa_{name}", known[name]


def _forced_sdpa(backend: Any, q: Any, k: Any, v: Any, causal: bool) -> Any:
    from torch.nn.attention import sdpa_kernel

    with sdpa_kernel(backend):
        gqa = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        return baselines.require_torch().nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, **gqa)


def _attention_shapes(quick: bool) -> Iterator[tuple[int, int, int, int, bool]]:
    for dim in (64, 128) if quick else (64, 128, 256):
        for seq in (512, 4096) if quick else (512, 1024, 2048, 4096, 8192, 16384):
            for causal in (False, True):
                yield 16384 // seq, 2048 // dim, seq, dim, causal


def _name(heads: int, seq: int, dim: int, causal: bool) -> str:
    return f"d{dim} seq {seq} heads {heads} {'causal' if causal else 'full'}"


def attention(quick: bool, dtypes: tuple[str, ...] = ("float16",)) -> Iterator[GpuCase]:
    for dtype in dtypes:
        for batch, heads, seq, dim, causal in _attention_shapes(quick):
            q, k, v = (_randn((batch, heads, seq, dim), dtype) for _ in range(3))
            providers: dict[str, Any] = {
                "flashkernel": lambda i, q=q, k=k, v=v, c=causal: fk.attention(q, k, v, causal=c)
            }
            names = ("flash", "cudnn", "efficient") if dtype != "float32" else ("efficient", "math")
            for name, backend in _sdpa_backends(names):
                if name == "sdpa_math" and seq > 2048:
                    continue  # holds every score
                providers[name] = lambda i, b=backend, q=q, k=k, v=v, c=causal: _forced_sdpa(b, q, k, v, c)
            yield GpuCase(
                "attention" if dtype != "float32" else "attention_f32",
                _name(heads, seq, dim, causal),
                dtype,
                providers,
                TOLERANCE[dtype],
                flop=_attention_flop(batch, heads, seq, seq, dim, causal),
                memory=True,
            )


def attention_f32(quick: bool) -> Iterator[GpuCase]:
    yield from attention(quick, ("float32",))


def attention_gqa(quick: bool) -> Iterator[GpuCase]:
    """32 query and 8 kv heads, contiguous and in pages."""
    torch = baselines.require_torch()
    batch, seq, dim = 4, 4096, 128
    q = _randn((batch, 32, seq, dim), "bfloat16")
    k, v = (_randn((batch, 8, seq, dim), "bfloat16") for _ in range(2))
    flop = _attention_flop(batch, 32, seq, seq, dim, True)
    stock = {name: partial(_one, _forced_sdpa, b, q, k, v, True) for name, b in _sdpa_backends(("flash", "cudnn"))}
    ours = partial(_one, partial(fk.attention, causal=True), q, k, v)
    case = partial(GpuCase, "attention_gqa", dtype="bfloat16", tolerance=TOLERANCE["bfloat16"], flop=flop)
    yield case(name="32/8 heads d128 seq 4096 causal", providers={"flashkernel": ours, **stock})
    for page in (256,) if quick else (16, 256):
        k_pages, v_pages, table = _paged(k, v, page)
        lengths = torch.full((batch,), seq, dtype=torch.int32, device="cuda")
        paged = partial(_one, partial(fk.attention_paged, causal=True), q, k_pages, v_pages, table, lengths)
        yield case(name=f"32/8 heads d128 seq 4096 causal, pages of {page}", providers={"flashkernel": paged, **stock})


def _one(function: Callable[..., Any], *arguments: Any) -> Any:
    """Leaves the index of the input set, the last argument, out."""
    return function(*arguments[:-1])


def _next_of(function: Callable[[Any], Any], sets: list[Any], i: int) -> Any:
    return function(sets[i % len(sets)])


def _paged(k: Any, v: Any, page: int) -> tuple[Any, Any, Any]:
    """The pages of k and v [batch, heads, seq, dim] at random places, and their table."""
    torch = baselines.require_torch()
    batch, heads, seq, dim = k.shape
    blocks = seq // page
    order = torch.randperm(batch * blocks, device="cuda")
    pages = []
    for dense in (k, v):
        to = torch.empty((batch * blocks, page, heads, dim), dtype=k.dtype, device="cuda")
        to[order] = dense.transpose(1, 2).reshape(batch * blocks, page, heads, dim)
        pages.append(to)
    return pages[0], pages[1], order.reshape(batch, blocks).to(torch.int32)


def attention_backward(quick: bool) -> Iterator[GpuCase]:
    torch = baselines.require_torch()
    dtype = "float16"
    for batch, heads, seq, dim, causal in _attention_shapes(quick):
        if dim > 128:
            continue
        q, k, v, grad = (_randn((batch, heads, seq, dim), dtype) for _ in range(4))
        out, lse = fk.attention(q, k, v, causal=causal, return_lse=True)
        ours = partial(fk.attention_backward, grad, q, k, v, out, lse, causal=causal)
        providers: dict[str, Any] = {
            "flashkernel": lambda i, f=ours: f(),
            "flashkernel_any_order": lambda i, f=ours: f(deterministic=False),
        }
        for name, backend in _sdpa_backends(("flash", "cudnn")):
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            with torch.enable_grad():
                stock = _forced_sdpa(backend, leaves[0], leaves[1], leaves[2], causal)

            def backward(i: int, stock: Any = stock, leaves: Any = leaves, grad: Any = grad) -> Any:
                return torch.autograd.grad(stock, leaves, grad, retain_graph=True)

            providers[name] = backward
        yield GpuCase(
            "attention_backward",
            _name(heads, seq, dim, causal),
            dtype,
            providers,
            4 * TOLERANCE[dtype],
            flop=2.5 * _attention_flop(batch, heads, seq, seq, dim, causal),
            graph=False,
        )


def decode(quick: bool) -> Iterator[GpuCase]:
    """One new token a sequence over scattered pages; torch's figures are over contiguous K and V."""
    torch = baselines.require_torch()
    dtype, dim = "bfloat16", 128
    shapes = [(1, 1024), (1, 4096), (1, 65536), (8, 1024), (8, 4096), (32, 4096), (128, 4096)]
    for heads_q, heads_kv in [(32, 8)] if quick else [(32, 8), (8, 8), (32, 1)]:
        for batch, length in shapes[:2] if quick else shapes:
            if (heads_q, heads_kv) != (32, 8) and (batch, length) not in ((1, 4096), (32, 4096)):
                continue
            moved = 2.0 * batch * length * heads_kv * dim * 2
            sets = _sets(moved)
            q = _randn((batch, heads_q, 1, dim), dtype)
            dense = [tuple(_randn((batch, heads_kv, length, dim), dtype) for _ in range(2)) for _ in range(sets)]
            lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
            stock = {
                name: lambda i, b=backend, q=q, d=dense: _forced_sdpa(b, q, d[i % len(d)][0], d[i % len(d)][1], False)
                for name, backend in _sdpa_backends(("flash",))
            }
            for page in (256,) if quick else (16, 256):
                paged = [_paged(k, v, page) for k, v in dense]

                def ours(i: int, q: Any = q, paged: Any = paged, lengths: Any = lengths) -> Any:
                    k_pages, v_pages, table = paged[i % len(paged)]
                    return fk.attention_paged(q, k_pages, v_pages, table, lengths)

                yield GpuCase(
                    "decode",
                    f"batch {batch} cache {length} heads {heads_q}/{heads_kv} d{dim} pages of {page}",
                    dtype,
                    {"flashkernel": ours, **stock},
                    TOLERANCE[dtype],
                    bytes=moved,
                    sets=sets,
                )


def linear(quick: bool) -> Iterator[GpuCase]:
    torch = baselines.require_torch()
    for inputs, outputs in [(768, 3072)] if quick else [(768, 3072), (2048, 8192), (4096, 16384)]:
        for rows in (16, 512) if quick else (1, 4, 16, 64, 512, 4096, 16384):
            for dtype in ("float16",) if quick else ("float16", "bfloat16"):
                moved = 2.0 * (rows * inputs + inputs * outputs + rows * outputs)
                sets = _sets(moved)
                x = [_randn((rows, inputs), dtype) for _ in range(sets)]
                weight = [_randn((outputs, inputs), dtype, 1 / math.sqrt(inputs)) for _ in range(sets)]
                bias = _randn((outputs,), dtype)

                def ours(i: int, x: Any = x, w: Any = weight, b: Any = bias) -> Any:
                    return fk.linear(x[i % len(x)], w[i % len(w)], b, activation="gelu_tanh")

                def fused(i: int, x: Any = x, w: Any = weight, b: Any = bias) -> Any:
                    return torch._addmm_activation(b, x[i % len(x)], w[i % len(w)].t(), use_gelu=True)

                def plain(i: int, x: Any = x, w: Any = weight, b: Any = bias) -> Any:
                    return torch.nn.functional.linear(x[i % len(x)], w[i % len(w)], b)

                def eager(i: int, x: Any = x, w: Any = weight, b: Any = bias) -> Any:
                    return baselines.gelu_linear(x[i % len(x)], w[i % len(w)], b)

                yield GpuCase(
                    "linear",
                    f"{rows} x {inputs} -> {outputs}, GELU",
                    dtype,
                    {"flashkernel": ours, "cublaslt_gelu": fused, "eager": eager, "linear_without_gelu": plain},
                    TOLERANCE[dtype],
                    flop=2.0 * rows * inputs * outputs,
                    bytes=moved,
                    sets=sets,
                )


def memory_bound(quick: bool) -> Iterator[GpuCase]:
    """Norms, softmax, RoPE, sums and elementwise ops: bytes per second is what counts."""
    torch = baselines.require_torch()
    functional = torch.nn.functional
    shapes = [(1024, 4096)] if quick else [(32768, 4096), (131072, 1024), (8192, 16384), (1024, 131072)]
    for rows, columns in shapes:
        for dtype in ("bfloat16",) if quick else ("bfloat16", "float32"):
            size = rows * columns * (2.0 if dtype == "bfloat16" else 4.0)
            sets = _sets(2 * size)
            x = [_randn((rows, columns), dtype) for _ in range(sets)]
            weight, bias = (_randn((columns,), dtype) for _ in range(2))

            def torch_rms_norm(t: Any, columns: int = columns, weight: Any = weight) -> Any:
                return functional.rms_norm(t, (columns,), weight, 1e-6)

            def torch_layer_norm(t: Any, columns: int = columns, weight: Any = weight, bias: Any = bias) -> Any:
                return functional.layer_norm(t, (columns,), weight, bias)

            pairs: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], int]] = {
                "rms_norm": (partial(fk.rms_norm, weight=weight, eps=1e-6), torch_rms_norm, 2),
                "layer_norm": (partial(fk.layer_norm, weight=weight, bias=bias), torch_layer_norm, 2),
                "softmax": (fk.softmax, lambda t: torch.softmax(t, -1), 2),
                "sum of rows": (lambda t: fk.reduce_sum(t, -1), lambda t: torch.sum(t, -1), 1),
            }
            if columns == 4096:
                pairs["sum"] = fk.reduce_sum, torch.sum, 1
                pairs["add"] = lambda t: fk.add(t, t), lambda t: torch.add(t, t), 2
            for name, (ours, stock, moved) in pairs.items():
                yield GpuCase(
                    "memory_bound",
                    f"{name} {rows} x {columns}",
                    dtype,
                    {
                        "flashkernel": partial(_next_of, ours, x),
                        "torch": partial(_next_of, stock, x),
                    },
                    10 * TOLERANCE[dtype] if name == "sum" else TOLERANCE[dtype],
                    bytes=moved * size,
                    sets=sets,
                )
    batch, heads, seq, dim = (1, 4, 256, 128) if quick else (4, 32, 4096, 128)
    q, k = (_randn((batch, heads, seq, dim), "bfloat16") for _ in range(2))
    angles = torch.outer(
        torch.arange(seq, device="cuda").float(), 10000.0 ** (-torch.arange(0, dim, 2, device="cuda").float() / dim)
    ).repeat(1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    yield GpuCase(
        "memory_bound",
        f"rope q, k [{batch}, {heads}, {seq}, {dim}]",
        "bfloat16",
        {"flashkernel": lambda i: fk.rope(q, k), "eager": lambda i: baselines.rope(q, k, cos, sin)},
        TOLERANCE["bfloat16"],
        bytes=4.0 * q.numel() * 2,
    )


def norm_backward(quick: bool) -> Iterator[GpuCase]:
    """Reads grad_out and h, writes grad_x; the gradients of the weights come on top."""
    torch = baselines.require_torch()
    functional = torch.nn.functional
    for rows, columns in [(1024, 4096)] if quick else [(131072, 1024), (32768, 4096), (8192, 16384)]:
        for dtype in ("bfloat16",) if quick else ("bfloat16", "float32"):
            x, grad = (_randn((rows, columns), dtype) for _ in range(2))
            weight, bias = (_randn((columns,), dtype) for _ in range(2))
            for name in ("rms_norm", "layer_norm"):
                leaves = [
                    t.clone().requires_grad_() for t in ((x, weight) if name == "rms_norm" else (x, weight, bias))
                ]
                with torch.enable_grad():
                    if name == "rms_norm":
                        stock = functional.rms_norm(leaves[0], (columns,), leaves[1], 1e-6)
                    else:
                        stock = functional.layer_norm(leaves[0], (columns,), *leaves[1:])
                mean = x.float().mean(-1)
                centred = x.float() - (mean[:, None] if name == "layer_norm" else 0.0)
                rstd = torch.rsqrt(centred.square().mean(-1) + (1e-5 if name == "layer_norm" else 1e-6))
                del centred
                ours: Callable[[], Any]
                if name == "rms_norm":
                    ours = partial(fk.rms_norm_backward, grad, x, weight, rstd)
                else:
                    ours = partial(fk.layer_norm_backward, grad, x, weight, mean, rstd)
                yield GpuCase(
                    "norm_backward",
                    f"{name}_backward {rows} x {columns}",
                    dtype,
                    {
                        "flashkernel": partial(_one, ours),
                        "torch": partial(_one, partial(torch.autograd.grad, stock, leaves, grad, retain_graph=True)),
                    },
                    4 * TOLERANCE[dtype],
                    bytes=3.0 * _nbytes(x),
                    graph=False,
                )


def cross_entropy(quick: bool) -> Iterator[GpuCase]:
    """Forward reads the logits once, backward reads and writes them."""
    torch = baselines.require_torch()
    for rows, classes in [(256, 32000)] if quick else [(4096, 32000), (4096, 128256)]:
        for dtype in ("bfloat16",) if quick else ("bfloat16", "float32"):
            logits = _randn((rows, classes), dtype)
            targets = torch.randint(classes, (rows,), device="cuda")
            name = f"{rows} x {classes}"
            yield GpuCase(
                "cross_entropy",
                f"cross_entropy {name}",
                dtype,
                {
                    "flashkernel": partial(_one, fk.cross_entropy, logits, targets),
                    "torch": partial(_one, torch.nn.functional.cross_entropy, logits, targets),
                },
                TOLERANCE[dtype],
                bytes=_nbytes(logits),
            )
            _, lse = fk.cross_entropy(logits, targets, return_lse=True)
            leaf = logits.clone().requires_grad_()
            with torch.enable_grad():
                stock = torch.nn.functional.cross_entropy(leaf.float(), targets)
            one = torch.ones((), device="cuda")
            yield GpuCase(
                "cross_entropy",
                f"cross_entropy_backward {name}",
                dtype,
                {
                    "flashkernel": partial(_one, fk.cross_entropy_backward, one, logits, targets, lse),
                    "torch": partial(_one, partial(torch.autograd.grad, stock, leaf, retain_graph=True)),
                },
                4 * TOLERANCE[dtype],
                bytes=2.0 * _nbytes(logits),
                graph=False,
            )


def ceilings(quick: bool) -> Iterator[GpuCase]:
    """What this GPU reaches: torch's matmul, a copy and a read by kernels. Other rows are a percentage of these."""
    torch = baselines.require_torch()
    size = 1024 if quick else 8192
    a, b = (_randn((size, size), "float16") for _ in range(2))
    yield GpuCase("ceilings", f"matmul {size}", "float16", {"torch": lambda i: torch.matmul(a, b)}, flop=2.0 * size**3)
    count = 2**20 if quick else 2**28
    x, y = (torch.randn(count, device="cuda") for _ in range(2))
    yield GpuCase("ceilings", "copy", "float32", {"torch": lambda i: torch.neg(x, out=y)}, bytes=8.0 * count)
    yield GpuCase("ceilings", "read", "float32", {"torch": lambda i: torch.amax(x)}, bytes=4.0 * count)


GROUPS: dict[str, Callable[[bool], Iterator[GpuCase]]] = {
    "ceilings": ceilings,
    "attention": attention,
    "attention_gqa": attention_gqa,
    "attention_f32": attention_f32,
    "attention_backward": attention_backward,
    "decode": decode,
    "linear": linear,
    "memory_bound": memory_bound,
    "norm_backward": norm_backward,
    "cross_entropy": cross_entropy,
}
