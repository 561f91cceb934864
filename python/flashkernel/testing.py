"""The tolerance rule, shared by tests, bench and `flashkernel doctor`.

NaN and infinity masks must match first. Then a kernel may err twice as much as the framework's own result in the same
dtype, both against float64, plus a rounding floor; and never more than an absolute cap, so that a bad baseline excuses
nothing. The caps hold for results of inputs of unit variance; `scale` says how much larger the results at hand may be.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["CAP", "EPSILON", "assert_close", "bfloat16_bits", "from_bfloat16_bits", "max_error", "to_float64"]

EPSILON = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half the distance from 1 to the next number: the relative error of rounding once."""

CAP = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}
"""Largest error allowed at results of size 1; bfloat16 has 8 times float16's spacing."""


def bfloat16_bits(x: ArrayLike) -> NDArray[np.uint16]:
    """x rounded to bfloat16 (to nearest, ties to even) as uint16 bits."""
    values = np.ascontiguousarray(np.asarray(x), np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    # Rounding may carry a NaN's payload over into infinity: a quiet NaN instead.
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bfloat16_bits(bits: ArrayLike) -> NDArray[np.float32]:
    """float32 values of bfloat16 bits."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_float64(x: Any) -> NDArray[np.float64]:
    """Any array (torch bfloat16 and uint16 bits of NumPy included) as NumPy float64."""
    if hasattr(x, "detach"):
        return np.asarray(x.detach().cpu().double().numpy())
    array = np.asarray(x)
    return (from_bfloat16_bits(array) if array.dtype == np.uint16 else array).astype(np.float64)


def max_error(result: Any, truth: Any) -> float:
    """Largest absolute difference where both are finite; 0 for nothing."""
    a, b = to_float64(result), to_float64(truth)
    with np.errstate(invalid="ignore"):
        difference = np.abs(a - b)
    finite = np.isfinite(a) & np.isfinite(b)
    return float(difference[finite].max(initial=0.0))


def assert_close(
    result: Any, truth: Any, dtype: str, *, baseline: Any = None, scale: float | None = None, what: str = "result"
) -> None:
    """Raise AssertionError unless `result` obeys the tolerance rule.

    truth: float64 oracle. dtype: the result's element type by name.
    baseline: the framework's result in the same dtype. The rule then is err <= 2 * err(baseline) + floor, where the
       floor is two roundings at the size of the truth.
    scale: size of the results, at least 1; by default the truth's own largest magnitude. err <= cap * scale always.
    """
    a, b = to_float64(result), to_float64(truth)
    assert a.shape == b.shape, f"{what}: shape {a.shape}, needed {b.shape}"
    for name, mask in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = mask(a) != mask(b)
        assert not wrong.any(), f"{what}: {name} differs at {wrong.sum()} places, first {tuple(np.argwhere(wrong)[0])}"
    size = float(np.abs(b[np.isfinite(b)]).max(initial=0.0))
    error = max_error(a, b)
    cap = CAP[dtype] * max(1.0, size if scale is None else scale)
    assert error <= cap, f"{what}: error {error:.3g} exceeds the cap {cap:.3g} for {dtype}"
    if baseline is not None:
        theirs = max_error(baseline, b)
        allowed = 2.0 * theirs + 2.0 * EPSILON[dtype] * max(size, EPSILON[dtype])
        assert error <= allowed, f"{what}: error {error:.3g} exceeds {allowed:.3g} (the framework errs by {theirs:.3g})"
