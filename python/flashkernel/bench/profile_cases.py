"""One representative call for every kernel id: what `flashkernel profile` runs under Nsight Compute.

A kernel is forced by its id, which also tells dtype and head_dim; `small` cuts the sizes, for tests on a CPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import flashkernel as fk

from . import baselines

__all__ = ["OPS", "call_for"]

DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


class Setting:
    """Dtype, head_dim, sizes and random tensors for one kernel id."""

    def __init__(self, kernel: str, device: str, small: bool):
        self.kernel, self.device, self.small = kernel, device, small
        words = kernel.split("/")
        named = next((DTYPES[word] for word in words if word in DTYPES), None)
        # The generic kernels serve all; the CPU's are for fp32 first.
        self.dtype = named or ("float32" if device == "cpu" or words[0].startswith("attention") else "bfloat16")
        bucket = re.search(r"/d(\d+)$", kernel)
        self.dim = int(bucket[1]) if bucket else 64

    def pick(self, large: int, small: int) -> int:
        return small if self.small else large

    def randn(self, *shape: int, dtype: str | None = None) -> Any:
        torch = baselines.require_torch()
        return torch.randn(shape, device=self.device, dtype=getattr(torch, dtype or self.dtype))

    def index(self, values: Any) -> Any:
        torch = baselines.require_torch()
        return torch.as_tensor(values, device=self.device, dtype=torch.int32)


Call = Callable[[], Any]


def _attention_fwd(s: Setting) -> Call:
    if "decode" in s.kernel:  # 32 sequences of 4096 tokens, 32 query and 8 kv heads: two waves of memory traffic
        return _decode(s)
    # The benches' setting, at 4096 tokens: batch x heads x head_dim = 8192. The naive kernel holds every score.
    seq = s.pick(1024 if "naive" in s.kernel or "tiled" in s.kernel else 4096, 48)
    heads = s.pick(max(1, 2048 // s.dim), 2)
    q, k, v = (s.randn(s.pick(2, 1), heads, seq, s.dim) for _ in range(3))
    return lambda: fk.attention(q, k, v)


def _decode(s: Setting) -> Call:
    batch, length, page = s.pick(32, 2), s.pick(4096, 40), s.pick(256, 16)
    pages = -(-length // page)
    q = s.randn(batch, s.pick(32, 4), 1, s.dim)
    k, v = (s.randn(batch * pages, page, s.pick(8, 2), s.dim) for _ in range(2))
    torch = baselines.require_torch()
    table = s.index(torch.randperm(batch * pages).reshape(batch, pages))
    lengths = s.index([length] * batch)
    return lambda: fk.attention_paged(q, k, v, table, lengths)


def _attention_bwd(s: Setting) -> Call:
    seq = s.pick(1024 if "generic" in s.kernel else 4096, 48)
    q, k, v, g = (s.randn(s.pick(2, 1), s.pick(max(1, 2048 // s.dim), 2), seq, s.dim) for _ in range(4))
    out, lse = fk.attention(q, k, v, return_lse=True)
    return lambda: fk.attention_backward(g, q, k, v, out, lse)


def _merge_states(s: Setting) -> Call:
    a, b = (s.randn(s.pick(8, 1), s.pick(32, 2), s.pick(4096, 5), 64) for _ in range(2))
    la, lb = (s.randn(*a.shape[:3], dtype="float32") for _ in range(2))
    return lambda: fk.merge_states(a, la, b, lb)


def _rope(s: Setting) -> Call:
    q, k = (s.randn(s.pick(4, 1), s.pick(32, 2), s.pick(4096, 9), 128) for _ in range(2))
    return lambda: fk.rope(q, k)


def _linear(s: Setting) -> Call:
    few = "few_rows" in s.kernel
    rows, inputs, outputs = (s.pick(x, y) for x, y in ((2 if few else 4096, 2 if few else 9), (4096, 64), (4096, 48)))
    if "generic/tiles" in s.kernel:
        rows = s.pick(1024, 9)
    x, w = s.randn(rows, inputs), s.randn(outputs, inputs) / math.sqrt(inputs)
    bias = s.randn(outputs)
    return lambda: fk.linear(x, w, bias, activation="gelu_tanh")


def _linear_bwd(s: Setting) -> Call:
    size = 1024 if "generic" in s.kernel else 4096
    rows, inputs, outputs = s.pick(size, 9), s.pick(size, 64), s.pick(size, 48)
    g, x, w = s.randn(rows, outputs), s.randn(rows, inputs), s.randn(outputs, inputs)
    return lambda: fk.linear_backward(g, x, w)


def _matrix(s: Setting) -> tuple[int, int]:
    return s.pick(32768, 7), s.pick(4096, 64)


def _add(s: Setting) -> Call:
    a, b = s.randn(*_matrix(s)), s.randn(*_matrix(s))
    return lambda: fk.add(a, b)


def _swiglu(s: Setting) -> Call:
    a, b = s.randn(*_matrix(s)), s.randn(*_matrix(s))
    return lambda: fk.swiglu(a, b)


def _swiglu_bwd(s: Setting) -> Call:
    g, a, b = (s.randn(*_matrix(s)) for _ in range(3))
    return lambda: fk.swiglu_backward(g, a, b)


def _reduce(s: Setting) -> Call:
    x = s.randn(*_matrix(s))
    return lambda: fk.reduce_sum(x, -1)


def _softmax(s: Setting) -> Call:
    x = s.randn(*_matrix(s))
    return lambda: fk.softmax(x)


def _softmax_bwd(s: Setting) -> Call:
    g, y = s.randn(*_matrix(s)), s.randn(*_matrix(s))
    return lambda: fk.softmax_backward(g, y)


def _norm(s: Setting) -> Call:
    x = s.randn(*_matrix(s))
    w = s.randn(x.shape[1])
    return lambda: fk.rms_norm(x, w)


def _norm_bwd(s: Setting) -> Call:
    g, x = s.randn(*_matrix(s)), s.randn(*_matrix(s))
    w, rstd = s.randn(x.shape[1]), s.randn(x.shape[0], dtype="float32").abs()
    return lambda: fk.rms_norm_backward(g, x, w, rstd)


def _logits(s: Setting) -> tuple[Any, Any]:
    rows, classes = s.pick(4096, 7), s.pick(128256, 33)
    return s.randn(rows, classes), s.index([i * 7 % classes for i in range(rows)])


def _cross_entropy(s: Setting) -> Call:
    x, targets = _logits(s)
    return lambda: fk.cross_entropy(x, targets)


def _cross_entropy_bwd(s: Setting) -> Call:
    x, targets = _logits(s)
    _, lse = fk.cross_entropy(x, targets, return_lse=True)
    one = s.randn(1, dtype="float32").reshape(())
    return lambda: fk.cross_entropy_backward(one, x, targets, lse)


def _cache(s: Setting) -> tuple[Any, Any, int]:
    page, pages = 16, s.pick(1024, 3)
    k, v = (s.randn(pages, page, s.pick(8, 2), s.pick(128, 64)) for _ in range(2))
    return k, v, page * pages


def _kv_append(s: Setting) -> Call:
    k_pages, v_pages, slots = _cache(s)
    k, v = (s.randn(slots, *k_pages.shape[2:]) for _ in range(2))
    places = s.index(baselines.require_torch().randperm(slots))
    return lambda: fk.kv_append(k, v, k_pages, v_pages, places)


def _kv_read(s: Setting) -> Call:
    k_pages, v_pages, slots = _cache(s)
    table = s.index(baselines.require_torch().randperm(k_pages.shape[0]))[None]
    lengths = s.index([slots])
    return lambda: fk.kv_read(k_pages, v_pages, table, lengths, max_seq=slots)


def _kv_copy_pages(s: Setting) -> Call:
    k_pages, v_pages, _ = _cache(s)
    half = k_pages.shape[0] // 2
    source, target = s.index(range(half)), s.index(range(half, 2 * half))
    return lambda: fk.kv_copy_pages(k_pages, v_pages, source, target)


def _find_bad_page(s: Setting) -> Call:
    rows, columns = s.pick(1024, 2), s.pick(256, 2)
    table = s.index(baselines.require_torch().arange(rows * columns).reshape(rows, columns))
    lengths = s.index([columns * 16] * rows)
    return lambda: fk.check_block_table(table, lengths, rows * columns, 16)


OPS: dict[str, Callable[[Setting], Call]] = {
    "attention_fwd": _attention_fwd,
    "attention_bwd": _attention_bwd,
    "merge_states": _merge_states,
    "rope": _rope,
    "linear": _linear,
    "linear_bwd": _linear_bwd,
    "add": _add,
    "swiglu": _swiglu,
    "swiglu_bwd": _swiglu_bwd,
    "reduce": _reduce,
    "softmax": _softmax,
    "softmax_bwd": _softmax_bwd,
    "norm": _norm,
    "norm_bwd": _norm_bwd,
    "cross_entropy": _cross_entropy,
    "cross_entropy_bwd": _cross_entropy_bwd,
    "kv_append": _kv_append,
    "kv_read": _kv_read,
    "kv_copy_pages": _kv_copy_pages,
    "find_bad_page": _find_bad_page,
}


def call_for(kernel: str, device: str = "cuda", small: bool = False) -> Call:
    """A call that `kernel`, forced, serves. Its inputs are made now."""
    op = kernel.split("/")[0]
    if op not in OPS:
        raise ValueError(f"profile: no case for the op {op!r}; one of {', '.join(OPS)} is needed")
    return OPS[op](Setting(kernel, device, small))
