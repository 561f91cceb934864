"""A check of every kernel on this machine in about a second: small random inputs against float64 formulas in NumPy.

Called by `flashkernel doctor`. Each kernel is forced in turn and must accept at least one case of its op. This finds a
broken build, driver or processor feature; the real tests are kernel_conformance and tests_py.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import flashkernel as fk

from .generate.checkpoint import bfloat16_to_float32, float32_to_bfloat16

__all__ = ["CheckResult", "check_kernel", "check_kernels"]

# Largest difference from float64, relative to the result's largest value: a few roundings of the dtype.
TOLERANCE = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


@dataclass(frozen=True)
class CheckResult:
    kernel: str
    passed: bool
    detail: str
    seconds: float


class _Inputs:
    """Random inputs of one dtype on one device, and their exact values in float64."""

    def __init__(self, dtype: str, device: str, head_dim: int = 64):
        self.dtype = dtype
        self.head_dim = head_dim
        self.device = device
        self.options: dict[str, Any] = {"dtype": "bfloat16"} if dtype == "bfloat16" and device == "cpu" else {}
        self._random = np.random.default_rng(0)

    def randn(self, *shape: int) -> tuple[Any, np.ndarray]:
        """(array for the op, its values in float64)."""
        values = self._random.standard_normal(shape).astype(np.float32)
        if self.dtype == "bfloat16":
            bits = float32_to_bfloat16(values)
            return self._put(bits, bfloat16=True), bfloat16_to_float32(bits).astype(np.float64)
        rounded = values.astype(self.dtype)
        return self._put(rounded), rounded.astype(np.float64)

    def int8(self, *shape: int) -> tuple[Any, np.ndarray]:
        values = self._random.integers(-127, 128, shape, dtype=np.int8)
        return self._put(values), values.astype(np.float64)

    def float32(self, values: np.ndarray) -> Any:
        return self._put(values.astype(np.float32))

    def rounded(self, values: np.ndarray) -> Any:
        """Values in the case's dtype, for arguments that an earlier op made."""
        return (
            self._put(float32_to_bfloat16(values), bfloat16=True)
            if self.dtype == "bfloat16"
            else self._put(values.astype(self.dtype))
        )

    def index(self, values: Any) -> Any:
        return self._put(np.asarray(values, dtype=np.int32))

    def _put(self, array: np.ndarray, bfloat16: bool = False) -> Any:
        if self.device == "cpu":
            return array
        import torch

        tensor = torch.from_numpy(array.view(np.int16) if bfloat16 else array)
        return (tensor.view(torch.bfloat16) if bfloat16 else tensor).cuda()

    def get(self, array: Any) -> np.ndarray:
        """Values of a result in float64."""
        if self.device != "cpu":
            return array.double().cpu().numpy()
        if array.dtype == np.uint16:
            return bfloat16_to_float32(array).astype(np.float64)
        return np.asarray(array).astype(np.float64)


# A case gives pairs of (result, expected in float64).
_Pairs = list[tuple[Any, np.ndarray]]
_Case = Callable[[_Inputs], _Pairs]


def _softmax(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(softmax, log of its denominator) along the last axis."""
    top = scores.max(-1, keepdims=True)
    exponentials = np.exp(scores - top)
    total = exponentials.sum(-1, keepdims=True)
    return exponentials / total, (top + np.log(total))[..., 0]


def _probabilities(q: np.ndarray, k: np.ndarray, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        seq_q, seq_k = scores.shape[-2:]
        scores = np.where(np.tri(seq_q, seq_k, seq_k - seq_q, dtype=bool), scores, -np.inf)
    return _softmax(scores)


def _attention(inputs: _Inputs, seq_q: int, seq_k: int, dim: int) -> _Pairs:
    (q, q64), (k, k64), (v, v64) = (
        inputs.randn(1, 4, seq_q, dim),
        inputs.randn(1, 2, seq_k, dim),
        inputs.randn(1, 2, seq_k, dim),
    )
    out, lse = fk.attention(q, k, v, causal=True, return_lse=True, **inputs.options)
    weights, lse64 = _probabilities(q64, k64.repeat(2, axis=1), True)
    return [(out, weights @ v64.repeat(2, axis=1)), (lse, lse64)]


def _attention_paged(inputs: _Inputs) -> _Pairs:
    (q, q64), (k, k64), (v, v64) = inputs.randn(1, 4, 1, 64), inputs.randn(4, 16, 2, 64), inputs.randn(4, 16, 2, 64)
    pages, length = [2, 0, 3], 37
    out = fk.attention_paged(q, k, v, inputs.index([pages]), inputs.index([length]), **inputs.options)
    k64, v64 = (x[pages].reshape(-1, 2, 64)[:length].swapaxes(0, 1).repeat(2, axis=0) for x in (k64, v64))
    return [(out, _probabilities(q64, k64, False)[0] @ v64)]


def _attention_paged_int8(inputs: _Inputs) -> _Pairs:
    """Pages of 8-bit integers with a scale a head."""
    q, q64 = inputs.randn(1, 4, 1, inputs.head_dim)
    (k, k64), (v, v64) = inputs.int8(4, 16, 2, inputs.head_dim), inputs.int8(4, 16, 2, inputs.head_dim)
    scales, pages, length = np.array([0.01, 0.02]), [2, 0, 3], 37
    out = fk.attention_paged(
        q,
        k,
        v,
        inputs.index([pages]),
        inputs.index([length]),
        kv_scales=(inputs.float32(scales), inputs.float32(scales)),
        **inputs.options,
    )
    k64, v64 = (
        (x[pages].reshape(-1, 2, inputs.head_dim)[:length] * scales[:, None]).swapaxes(0, 1).repeat(2, axis=0)
        for x in (k64, v64)
    )
    return [(out, _probabilities(q64, k64, False)[0] @ v64)]


def _attention_bwd(inputs: _Inputs) -> _Pairs:
    dim = inputs.head_dim
    (q, q64), (k, k64), (v, v64), (g, g64) = (inputs.randn(1, 2, 33, dim) for _ in range(4))
    weights, lse = _probabilities(q64, k64, True)
    out = weights @ v64
    scores = weights * (g64 @ v64.swapaxes(-1, -2) - (g64 * out).sum(-1, keepdims=True)) / math.sqrt(dim)
    grads = fk.attention_backward(g, q, k, v, inputs.rounded(out), inputs.float32(lse), causal=True, **inputs.options)
    return list(zip(grads, [scores @ k64, scores.swapaxes(-1, -2) @ q64, weights.swapaxes(-1, -2) @ g64], strict=True))


def _merge_states(inputs: _Inputs) -> _Pairs:
    (a, a64), (b, b64) = inputs.randn(1, 2, 5, 64), inputs.randn(1, 2, 5, 64)
    lse_a, lse_b = np.linspace(-3, 3, 10).reshape(1, 2, 5), np.linspace(2, -2, 10).reshape(1, 2, 5)
    out, lse = fk.merge_states(a, inputs.float32(lse_a), b, inputs.float32(lse_b), **inputs.options)
    weights, total = _softmax(np.stack([lse_a, lse_b], axis=-1))
    return [(out, weights[..., :1] * a64 + weights[..., 1:] * b64), (lse, total)]


def _rope(inputs: _Inputs) -> _Pairs:
    q, q64 = inputs.randn(1, 3, 9, 64)
    angles = np.arange(9)[:, None] * 10000.0 ** (-np.arange(32) / 32)
    a, b = q64[..., :32], q64[..., 32:]
    rotated = np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1
    )
    return [(fk.rope(q, **inputs.options), rotated)]


def _linear(inputs: _Inputs, rows: int = 9) -> _Pairs:
    (x, x64), (w, w64), (bias, bias64) = inputs.randn(rows, 64), inputs.randn(48, 64), inputs.randn(48)
    y = x64 @ w64.T + bias64
    gelu = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    return [(fk.linear(x, w, bias, activation="gelu_tanh", **inputs.options), gelu)]


def _linear_transposed(inputs: _Inputs) -> _Pairs:
    (x, x64), (w, w64) = inputs.randn(9, 64), inputs.randn(64, 48)
    return [(fk.linear(x, w.T, **inputs.options), x64 @ w64)]


def _linear_bwd(inputs: _Inputs) -> _Pairs:
    (g, g64), (x, x64), (w, w64) = inputs.randn(9, 48), inputs.randn(9, 64), inputs.randn(48, 64)
    return list(zip(fk.linear_backward(g, x, w, **inputs.options), [g64 @ w64, g64.T @ x64, g64.sum(0)], strict=True))


def _add(inputs: _Inputs) -> _Pairs:
    (a, a64), (b, b64) = inputs.randn(7, 33), inputs.randn(7, 33)
    return [(fk.add(a, b, **inputs.options), a64 + b64)]


def _swiglu(inputs: _Inputs) -> _Pairs:
    (a, a64), (b, b64) = inputs.randn(7, 33), inputs.randn(7, 33)
    return [(fk.swiglu(a, b, **inputs.options), a64 / (1 + np.exp(-a64)) * b64)]


def _swiglu_bwd(inputs: _Inputs) -> _Pairs:
    (g, g64), (a, a64), (b, b64) = inputs.randn(7, 33), inputs.randn(7, 33), inputs.randn(7, 33)
    s = 1 / (1 + np.exp(-a64))
    return list(
        zip(
            fk.swiglu_backward(g, a, b, **inputs.options),
            [g64 * b64 * s * (1 + a64 * (1 - s)), g64 * a64 * s],
            strict=True,
        )
    )


def _reduce_rows(inputs: _Inputs) -> _Pairs:
    x, x64 = inputs.randn(5, 7, 33)
    options = inputs.options
    return [
        (fk.reduce_sum(x, -1, **options), x64.sum(-1)),
        (fk.reduce_mean(x, **options), x64.mean()),
        (fk.reduce_max(x, -1, **options), x64.max(-1)),
        (fk.argmax(x, -1, **options), x64.argmax(-1).astype(np.float64)),
    ]


def _reduce_scattered(inputs: _Inputs) -> _Pairs:
    """Over axes that do not lie side by side."""
    x, x64 = inputs.randn(5, 7, 33)
    return [(fk.reduce_sum(x, (0, 2), **inputs.options), x64.sum((0, 2)))]


_LONG_ROWS = (2, 40000)  # longer than a block of threads holds
_ROWS_OF_A_CLUSTER = (2, 81920), (2, 140000)  # over 256 KB in fp32, in 16 bits


def _softmax_fwd(inputs: _Inputs, shape: tuple[int, int] = (7, 33)) -> _Pairs:
    x, x64 = inputs.randn(*shape)
    weights, lse = _softmax(x64)
    return [(fk.softmax(x, **inputs.options), weights), (fk.log_softmax(x, **inputs.options), x64 - lse[:, None])]


def _softmax_bwd(inputs: _Inputs, shape: tuple[int, int] = (7, 33)) -> _Pairs:
    (g, g64), (y, y64) = inputs.randn(*shape), inputs.randn(*shape)
    return [
        (fk.softmax_backward(g, y, **inputs.options), y64 * (g64 - (g64 * y64).sum(-1, keepdims=True))),
        (fk.log_softmax_backward(g, y, **inputs.options), g64 - np.exp(y64) * g64.sum(-1, keepdims=True)),
    ]


def _norm(inputs: _Inputs, shape: tuple[int, int] = (7, 64)) -> _Pairs:
    (x, x64), (r, r64), (w, w64), (b, b64) = (
        inputs.randn(*shape),
        inputs.randn(*shape),
        inputs.randn(shape[1]),
        inputs.randn(shape[1]),
    )
    h = x64 + r64
    layer, hidden = fk.layer_norm(x, w, b, residual=r, **inputs.options)
    rms = fk.rms_norm(x, w, **inputs.options)
    layer64 = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-5) * w64 + b64
    return [(layer, layer64), (hidden, h), (rms, x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6) * w64)]


def _norm_bwd(inputs: _Inputs, features: int = 64) -> _Pairs:
    (g, g64), (x, x64), (w, w64) = inputs.randn(7, features), inputs.randn(7, features), inputs.randn(features)
    mean, rstd = x64.mean(-1), 1 / np.sqrt(x64.var(-1) + 1e-5)
    n, gw = (x64 - mean[:, None]) * rstd[:, None], g64 * w64
    grad = rstd[:, None] * (gw - gw.mean(-1, keepdims=True) - n * (gw * n).mean(-1, keepdims=True))
    pairs = list(
        zip(
            fk.layer_norm_backward(g, x, w, inputs.float32(mean), inputs.float32(rstd), **inputs.options),
            [grad, (g64 * n).sum(0), g64.sum(0)],
            strict=False,
        )
    )
    rms = 1 / np.sqrt((x64**2).mean(-1) + 1e-6)
    n = x64 * rms[:, None]
    grad = rms[:, None] * (gw - n * (gw * n).mean(-1, keepdims=True))
    return pairs + list(
        zip(fk.rms_norm_backward(g, x, w, inputs.float32(rms), **inputs.options), [grad, (g64 * n).sum(0)], strict=True)
    )


def _cross_entropy(inputs: _Inputs) -> _Pairs:
    x, x64 = inputs.randn(7, 33)
    targets = np.arange(7) * 4
    loss, lse = fk.cross_entropy(x, inputs.index(targets), reduction="none", return_lse=True, **inputs.options)
    lse64 = _softmax(x64)[1]
    return [(loss, lse64 - x64[np.arange(7), targets]), (lse, lse64)]


def _cross_entropy_bwd(inputs: _Inputs) -> _Pairs:
    x, x64 = inputs.randn(7, 33)
    targets = np.arange(7) * 4
    weights, lse = _softmax(x64)
    grad = fk.cross_entropy_backward(
        inputs.float32(np.ones(7)), x, inputs.index(targets), inputs.float32(lse), reduction="none", **inputs.options
    )
    return [(grad, weights - np.eye(33)[targets])]


def _kv_append(inputs: _Inputs) -> _Pairs:
    (k, k64), (v, v64) = inputs.randn(3, 2, 64), inputs.randn(3, 2, 64)
    (kp, kp64), (vp, vp64) = inputs.randn(2, 16, 2, 64), inputs.randn(2, 16, 2, 64)
    fk.kv_append(k, v, kp, vp, inputs.index([20, -1, 3]), **inputs.options)
    for pages, tokens in ((kp64, k64), (vp64, v64)):
        pages[1, 4], pages[0, 3] = tokens[0], tokens[2]
    return [(kp, kp64), (vp, vp64)]


def _kv_read(inputs: _Inputs) -> _Pairs:
    (kp, kp64), (vp, vp64) = inputs.randn(3, 16, 2, 64), inputs.randn(3, 16, 2, 64)
    k, v = fk.kv_read(kp, vp, inputs.index([[2, 0]]), inputs.index([21]), max_seq=21, **inputs.options)
    return [(out, pages[[2, 0]].reshape(1, 32, 2, 64)[:, :21]) for out, pages in ((k, kp64), (v, vp64))]


def _kv_copy_pages(inputs: _Inputs) -> _Pairs:
    (kp, kp64), (vp, vp64) = inputs.randn(3, 16, 2, 64), inputs.randn(3, 16, 2, 64)
    fk.kv_copy_pages(kp, vp, inputs.index([2]), inputs.index([0]), **inputs.options)
    kp64[0], vp64[0] = kp64[2], vp64[2]
    return [(kp, kp64), (vp, vp64)]


def _find_bad_page(inputs: _Inputs) -> _Pairs:
    table = inputs.index([[2, 0], [1, 7]])
    fk.check_block_table(table, inputs.index([21, 16]), 3, 16)
    try:
        fk.check_block_table(table, inputs.index([21, 17]), 3, 16)
        found = (-1, -1, -1)
    except fk.BlockTableError as error:
        found = (error.sequence, error.slot, error.page)
    return [(inputs.float32(np.array(found)), np.array([1.0, 1.0, 7.0]))]


CASES: dict[str, list[_Case]] = {
    "attention_fwd": [
        lambda inputs: _attention(inputs, 33, 65, inputs.head_dim),
        lambda inputs: _attention(inputs, 1, 65, inputs.head_dim),
        lambda inputs: _attention(inputs, 20, 40, 128),
        _attention_paged,
        _attention_paged_int8,
    ],
    "attention_bwd": [_attention_bwd],
    "merge_states": [_merge_states],
    "rope": [_rope],
    "linear": [
        _linear,
        lambda inputs: _linear(inputs, 2),  # kernels for few rows
        lambda inputs: _linear(inputs, 96),
        _linear_transposed,
    ],
    "linear_bwd": [_linear_bwd],
    "add": [_add],
    "swiglu": [_swiglu],
    "swiglu_bwd": [_swiglu_bwd],
    "reduce": [_reduce_rows, _reduce_scattered],
    "softmax": [_softmax_fwd, *(partial(_softmax_fwd, shape=shape) for shape in (_LONG_ROWS, *_ROWS_OF_A_CLUSTER))],
    "softmax_bwd": [_softmax_bwd, *(partial(_softmax_bwd, shape=shape) for shape in (_LONG_ROWS, *_ROWS_OF_A_CLUSTER))],
    "norm": [_norm, *(partial(_norm, shape=shape) for shape in (_LONG_ROWS, *_ROWS_OF_A_CLUSTER))],
    "norm_bwd": [_norm_bwd, partial(_norm_bwd, features=1024)],
    "cross_entropy": [_cross_entropy],
    "cross_entropy_bwd": [_cross_entropy_bwd],
    "kv_append": [_kv_append],
    "kv_read": [_kv_read],
    "kv_copy_pages": [_kv_copy_pages],
    "find_bad_page": [_find_bad_page],
}


def _error(inputs: _Inputs, pairs: _Pairs) -> float:
    """Largest difference, relative to the largest expected value; inf where a NaN or a shape is wrong."""
    worst = 0.0
    for result, expected in pairs:
        got = inputs.get(result)
        if got.shape != expected.shape or not np.array_equal(np.isnan(got), np.isnan(expected)):
            return math.inf
        worst = max(worst, float(np.abs(got - expected).max() / max(1.0, float(np.abs(expected).max()))))
    return worst


def _calls(kernel_id: str) -> int:
    return next(int(kernel.calls) for kernel in fk.kernels() if kernel.id == kernel_id)


def check_kernel(kernel: Any) -> CheckResult:
    """Runs one available kernel on the cases of its op that it accepts, in each dtype."""
    begin = time.perf_counter()

    def result(passed: bool, detail: str) -> CheckResult:
        return CheckResult(kernel.id, passed, detail, time.perf_counter() - begin)

    if kernel.op not in CASES:
        return result(False, f"no case for the op {kernel.op}")
    bucket = re.search(r"/d(\d+)$", kernel.id)  # an instance serves one head_dim
    head_dim = int(bucket[1]) if bucket else 64
    ran: dict[str, float] = {}
    refusal = ""
    for dtype, tolerance in TOLERANCE.items():
        for case in CASES[kernel.op]:
            inputs = _Inputs(dtype, kernel.device, head_dim)
            try:
                before = _calls(kernel.id)
                with fk.force(kernel.id):
                    error = _error(inputs, case(inputs))
            except NotImplementedError as refused:
                refusal = str(refused)
                continue
            except Exception as failure:  # a broken kernel may raise anything; doctor goes on with the next one
                return result(False, f"{dtype}: {type(failure).__name__}: {failure}")
            if _calls(kernel.id) == before:
                return result(False, f"{dtype}: forced, but another kernel ran")
            ran[dtype] = max(ran.get(dtype, 0.0), error)
            if not error <= tolerance:
                return result(False, f"{dtype}: error {error:.1e}, at most {tolerance:.0e} allowed")
    if not ran:
        return result(False, f"accepts no case: {refusal}")
    return result(True, ", ".join(f"{dtype} {error:.0e}" for dtype, error in ran.items()))


def check_kernels() -> Iterator[CheckResult]:
    """Checks every kernel that this machine can run."""
    for kernel in fk.kernels():
        if kernel.available:
            yield check_kernel(kernel)
