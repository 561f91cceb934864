"""What `flashkernel bench` runs: for each group, the shapes, our call, torch's call, and the work in FLOP or bytes.

A case is made only when its turn comes, so that memory holds one case's tensors at a time. Inputs are random normal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import flashkernel as fk

from . import baselines
from .memory import last_level_cache_bytes

__all__ = ["GROUPS", "Case"]


@dataclass
class Case:
    group: str
    name: str
    dtype: str
    ours: Callable[[], Any]
    torch: Callable[[], Any]
    tolerance: float = 1e-4  # on the largest difference from torch's result, relative to its largest value
    flop: float = 0.0  # of one call; 0: the row is about bytes
    bytes: float = 0.0  # that one call must read and write
    inner: int = 1  # calls per measurement
    memory: tuple[int, ...] | None = None  # shape of q, k and v whose peak extra memory is measured, with few calls
    # Plain sums over the bytes that one call reads: the limit of a row that is bound by memory, timed in turn with it.
    reads: list[Callable[[], Any]] = field(default_factory=list)


# Two results rounded to the dtype after sums in different orders.
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 4e-3}
ALL = ("float32", "bfloat16", "float16")


def _randn(shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Any:
    torch = baselines.require_torch()
    return (torch.randn(shape) * scale).to(getattr(torch, dtype))


def _nbytes(*tensors: Any) -> float:
    return float(sum(t.numel() * t.element_size() for t in tensors))


def _attention_flop(batch: int, heads: int, seq_q: int, seq_k: int, dim: int, causal: bool) -> float:
    """Two products of 2 * seq_q * seq_k * dim; causal counts the visible half."""
    pairs = seq_q * seq_k - (seq_q * (seq_q - 1) / 2 if causal else 0)
    return 4.0 * batch * heads * pairs * dim


def _attention(group: str, shape: tuple[int, int, int, int], causal: bool, dtype: str, memory: bool = False) -> Case:
    batch, heads, seq, dim = shape
    q, k, v = (_randn(shape, dtype) for _ in range(3))
    return Case(
        group,
        f"{shape} {'causal' if causal else 'full'}",
        dtype,
        partial(fk.attention, q, k, v, causal=causal),
        partial(baselines.sdpa, q, k, v, causal=causal),
        TOLERANCE[dtype],
        flop=_attention_flop(batch, heads, seq, seq, dim, causal),
        memory=shape if memory else None,
    )


def attention(quick: bool) -> Iterator[Case]:
    shapes = [((1, 8, 2048, 64), False), ((1, 8, 2048, 64), True), ((1, 8, 4096, 128), True)]
    for shape, causal in [((1, 2, 256, 64), False), ((1, 2, 256, 64), True)] if quick else shapes:
        for dtype in ALL:
            yield _attention("attention", shape, causal, dtype)


def attention_memory(quick: bool) -> Iterator[Case]:
    """A few calls of long sequences, for their memory: what exceeds the result must not grow with the sequence."""
    for seq in (512,) if quick else (4096, 16384):
        yield _attention("attention_memory", (1, 2 if quick else 8, seq, 64), True, "float32", memory=True)


def attention_backward(quick: bool) -> Iterator[Case]:
    torch = baselines.require_torch()
    shape = (1, 2, 128, 64) if quick else (1, 8, 1024, 64)
    for dtype in ("float32",) if quick else ALL:
        q, k, v, grad = (_randn(shape, dtype) for _ in range(4))
        out, lse = fk.attention(q, k, v, causal=True, return_lse=True)
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        stock = baselines.sdpa(*leaves, causal=True)
        yield Case(
            "attention_backward",
            f"{shape} causal",
            dtype,
            partial(fk.attention_backward, grad, q, k, v, out, lse, causal=True),
            partial(torch.autograd.grad, stock, leaves, grad, retain_graph=True),
            4 * TOLERANCE[dtype],
            # Five products against the forward pass's two.
            flop=2.5 * _attention_flop(shape[0], shape[1], shape[2], shape[2], shape[3], True),
        )


def _rotate(function: Callable[..., Any], arguments: Iterator[tuple[Any, ...]]) -> Callable[[], Any]:
    return lambda: function(*next(arguments))


def decode(quick: bool) -> Iterator[Case]:
    """One new token per sequence over a long cache: contiguous, as torch holds it, and in pages at random places.

    Each call takes the next of several equal caches, twice the last-level cache together: nobody finds there what the
    one before has read.
    """
    torch = baselines.require_torch()
    batch, heads, length, page = (2, 2, 256, 16) if quick else (8, 8, 4096, 256)
    blocks = length // page
    for dim in (64,) if quick else (64, 128):
        for dtype in ALL:
            q = _randn((batch, heads, 1, dim), dtype)
            first = _randn((2, batch, heads, length, dim), dtype)
            copies = 1 if quick else math.ceil(2 * last_level_cache_bytes() / _nbytes(first))
            caches = [first, *(first.clone() for _ in range(copies - 1))]
            dense = cycle((q, *cache) for cache in caches)
            words = cycle((cache.view(torch.float32).reshape(8 * batch, -1), -1) for cache in caches)
            work: dict[str, Any] = {
                "flop": _attention_flop(batch, heads, 1, length, dim, False),
                "bytes": _nbytes(q, q, first),
                "reads": [_rotate(fk.reduce_sum, words), _rotate(torch.sum, words)],
            }
            name = f"batch {batch}, cache {length}, heads {heads}, d {dim}"
            stock = _rotate(baselines.sdpa, dense)
            yield Case("decode", name, dtype, _rotate(fk.attention, dense), stock, TOLERANCE[dtype], **work)

            order = torch.randperm(batch * blocks)
            pages = torch.empty((2, batch * blocks, page, heads, dim), dtype=q.dtype)
            pages[:, order] = first.transpose(2, 3).reshape(pages.shape)
            table = order.reshape(batch, blocks).to(torch.int32)
            lengths = torch.full((batch,), length, dtype=torch.int32)
            pools = [pages, *(pages.clone() for _ in range(copies - 1))]
            paged = cycle((q, *pool, table, lengths) for pool in pools)
            ours = _rotate(fk.attention_paged, paged)
            yield Case("decode", f"{name}, pages of {page}", dtype, ours, stock, TOLERANCE[dtype], **work)


def call_overhead(quick: bool) -> Iterator[Case]:
    """Ops on tensors so small that the call is what takes the time."""
    torch = baselines.require_torch()
    q, k, v = (_randn((1, 1, 1, 16), "float32") for _ in range(3))
    x, weight = _randn((1, 16), "float32"), _randn((16,), "float32")
    pairs = {
        "attention (1, 1, 1, 16)": (partial(fk.attention, q, k, v), partial(baselines.sdpa, q, k, v)),
        "rms_norm (1, 16)": (
            partial(fk.rms_norm, x, weight, eps=1e-6),
            partial(torch.nn.functional.rms_norm, x, (16,), weight, 1e-6),
        ),
    }
    for name, (ours, stock) in pairs.items():
        yield Case("call_overhead", name, "float32", ours, stock, inner=20)


def linear(quick: bool) -> Iterator[Case]:
    shapes = [(1, 768, 3072), (8, 768, 3072), (512, 768, 3072), (512, 4096, 4096)]
    for rows, inputs, outputs in [(8, 64, 256)] if quick else shapes:
        for dtype in ALL:
            x = _randn((rows, inputs), dtype)
            weight = _randn((outputs, inputs), dtype, 1 / math.sqrt(inputs))
            bias = _randn((outputs,), dtype)
            yield Case(
                "linear",
                f"{rows} x {inputs} -> {outputs}, GELU",
                dtype,
                partial(fk.linear, x, weight, bias, activation="gelu_tanh"),
                partial(baselines.gelu_linear, x, weight, bias),
                TOLERANCE[dtype],
                flop=2.0 * rows * inputs * outputs,
                bytes=_nbytes(x, weight, bias) + rows * outputs * x.element_size(),
            )


def norm(quick: bool) -> Iterator[Case]:
    stock_layer_norm = baselines.require_torch().nn.functional.layer_norm
    for rows, features in [(16, 128)] if quick else [(2048, 768), (2048, 4096)]:
        for dtype in ("float32", "bfloat16"):
            x, residual = (_randn((rows, features), dtype) for _ in range(2))
            weight, bias = (_randn((features,), dtype) for _ in range(2))
            rows_of_group = {
                "layer_norm": (
                    partial(fk.layer_norm, x, weight, bias),
                    partial(stock_layer_norm, x, (features,), weight, bias),
                    2,  # tensors of x's size read and written
                ),
                "layer_norm + residual": (
                    partial(fk.layer_norm, x, weight, bias, residual=residual),
                    partial(baselines.layer_norm_residual, x, residual, weight, bias),
                    4,
                ),
                "rms_norm + residual": (
                    partial(fk.rms_norm, x, weight, residual=residual, eps=1e-6),
                    partial(baselines.rms_norm_residual, x, residual, weight),
                    4,
                ),
            }
            for name, (ours, stock, moved) in rows_of_group.items():
                size = f"{name} {rows} x {features}"
                yield Case("norm", size, dtype, ours, stock, TOLERANCE[dtype], bytes=moved * _nbytes(x))


def rope(quick: bool) -> Iterator[Case]:
    torch = baselines.require_torch()
    seq, heads_q, heads_kv, dim = (32, 4, 2, 32) if quick else (2048, 32, 8, 128)
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2).float() / dim)
    angles = torch.outer(torch.arange(seq).float(), frequencies).repeat(1, 2)
    for dtype in ("float32", "bfloat16"):
        q, k = _randn((1, heads_q, seq, dim), dtype), _randn((1, heads_kv, seq, dim), dtype)
        cos, sin = (table.to(q.dtype) for table in (angles.cos(), angles.sin()))
        name = f"seq {seq}, heads {heads_q} and {heads_kv}, d {dim}"
        stock = partial(baselines.rope, q, k, cos, sin)
        yield Case("rope", name, dtype, partial(fk.rope, q, k), stock, TOLERANCE[dtype], bytes=2 * _nbytes(q, k))


def elementwise(quick: bool) -> Iterator[Case]:
    """Reductions, softmax, SwiGLU, residual add and the loss."""
    torch = baselines.require_torch()
    rows, columns = (16, 128) if quick else (2048, 4096)
    for dtype in ("float32", "bfloat16"):
        x, y = (_randn((rows, columns), dtype) for _ in range(2))
        rows_of_group = {
            "softmax": (partial(fk.softmax, x), partial(torch.softmax, x, -1), 2),
            "sum": (partial(fk.reduce_sum, x, -1), partial(torch.sum, x, -1), 1),
            "swiglu": (partial(fk.swiglu, x, y), partial(baselines.swiglu, x, y), 3),
            "add": (partial(fk.add, x, y), partial(torch.add, x, y), 3),
        }
        for name, (ours, stock, moved) in rows_of_group.items():
            size = f"{name} {rows} x {columns}"
            yield Case("elementwise", size, dtype, ours, stock, TOLERANCE[dtype], bytes=moved * _nbytes(x))
    rows, classes = (8, 100) if quick else (512, 32000)
    logits, targets = _randn((rows, classes), "float32"), torch.randint(classes, (rows,))
    ours = partial(fk.cross_entropy, logits, targets)
    stock = partial(torch.nn.functional.cross_entropy, logits, targets)
    yield Case("elementwise", f"cross_entropy {rows} x {classes}", "float32", ours, stock, bytes=_nbytes(logits))


GROUPS: dict[str, Callable[[bool], Iterator[Case]]] = {
    "attention": attention,
    "attention_memory": attention_memory,
    "attention_backward": attention_backward,
    "decode": decode,
    "call_overhead": call_overhead,
    "linear": linear,
    "norm": norm,
    "rope": rope,
    "elementwise": elementwise,
}
