"""Oracle of the kernels that move keys and values into and out of pages, and of elements of 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flashkernel.reference._common import Float, f64

__all__ = [
    "kv_append",
    "kv_copy_pages",
    "kv_numbers",
    "kv_quantize",
    "kv_quantize_int4",
    "kv_read",
    "round_to_e4m3",
    "round_to_int8",
]


def round_to_e4m3(x: ArrayLike) -> Float:
    """Numbers as OCP's E4M3 (FN) holds them: nearest even, saturated to +-448; NaN stays."""
    values = f64(x)
    magnitude = np.minimum(np.abs(values), 448.0)
    exponent = np.maximum(np.frexp(np.where(np.isnan(magnitude), 1.0, magnitude))[1] - 1, -6)
    step = np.exp2(exponent - 3.0)
    return np.copysign(np.rint(magnitude / step) * step, values)


def round_to_int8(x: ArrayLike) -> Float:
    """Numbers as int8 holds them: nearest even, saturated to +-127; NaN becomes 0."""
    values = f64(x)
    return np.where(np.isnan(values), 0.0, np.rint(np.clip(values, -127.0, 127.0)))


def kv_quantize(x: ArrayLike, kv_dtype: str, scale: ArrayLike | None = None) -> tuple[Float, Float]:
    """(elements, scale) of rows [..., head_dim]: element * scale is the number.

    scale: broadcast against [...]; None: the largest magnitude of each row over 448 ("float8_e4m3fn") or 127 ("int8").
    Scales, and the quotients that are rounded, are float32 as the kernels' are.
    """
    values = np.asarray(x).astype(np.float32)
    most, round_to = (448.0, round_to_e4m3) if kv_dtype == "float8_e4m3fn" else (127.0, round_to_int8)
    if scale is None:
        with np.errstate(invalid="ignore"):
            largest = np.fmax.reduce(np.abs(values), axis=-1, initial=0.0)
            if kv_dtype == "int8":
                largest = np.where(np.isnan(values).any(-1), np.nan, largest)
            largest = np.minimum(largest, np.finfo(np.float32).max)
            scale = np.maximum((largest.astype(np.float32) / np.float32(most)), np.float32(2.0**-100))
    scales = np.broadcast_to(np.asarray(scale, np.float32), values.shape[:-1])
    with np.errstate(invalid="ignore", over="ignore"):
        return round_to(values * (np.float32(1) / scales)[..., None]), f64(scales)


def kv_quantize_int4(x: ArrayLike) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """(bytes, scales) of rows [..., head_dim]: [..., head_dim / 2] and float16 [..., groups, 2].

    A group is 32 neighbours, which share a scale and a zero. The first of two elements is in a byte's low bits.

    Rounded as kernels do, in float32: zero is the least of a group, scale a fifteenth of its range, both as float16;
    numbers are bounded to +-65024 first. A group with a NaN has a scale and a zero that are NaN, and elements of 0.
    """
    values = np.asarray(x).astype(np.float32)
    dim, groups = values.shape[-1], -(-values.shape[-1] // 32)
    elements = np.zeros(values.shape, np.uint8)
    scales = np.zeros((*values.shape[:-1], groups, 2), np.float16)
    for g in range(groups):
        group = np.clip(values[..., 32 * g : 32 * g + 32], np.float32(-65024), np.float32(65024))
        bad = np.asarray(np.isnan(group).any(-1))
        group = np.where(bad[..., None], np.float32(0), group)
        zero = group.min(-1).astype(np.float16)
        most = np.maximum(group.max(-1) - zero.astype(np.float32), np.float32(0))
        scale = (most * np.float32(1 / 15)).astype(np.float16)
        inverse = np.where(scale > 0, np.float32(1) / np.where(scale > 0, scale, 1).astype(np.float32), np.float32(0))
        steps = (group - zero.astype(np.float32)[..., None]) * inverse[..., None].astype(np.float32)
        elements[..., 32 * g : 32 * g + 32] = np.clip(np.rint(steps), 0, 15)
        scales[..., g, 0], scales[..., g, 1] = np.where(bad, np.nan, scale), np.where(bad, np.nan, zero)
    elements = np.pad(elements, [(0, 0)] * (elements.ndim - 1) + [(0, dim % 2)])
    return (elements[..., ::2] | elements[..., 1::2] << 4).astype(np.uint8), scales


def kv_numbers(packed: ArrayLike, scales: ArrayLike, kv_dtype: str, tensor_scale: float = 1.0) -> Float:
    """The numbers of bytes [..., head_dim / 2] of two 4-bit elements each.

    kv_dtype: "int4" (scales [..., groups, 2]: element * scale + zero, element 0 to 15), or "float4_e2m1fn_x2" (scales
    [..., groups] of 16 neighbours, as numbers: element * scale * tensor_scale).
    """
    pairs = np.asarray(packed, np.uint8)
    elements = np.stack([pairs & 15, pairs >> 4], -1).reshape(*pairs.shape[:-1], -1).astype(np.intp)
    factors = f64(scales)
    if kv_dtype == "int4":
        factors = np.repeat(factors, 32, -2)[..., : elements.shape[-1], :]
        return elements * factors[..., 0] + factors[..., 1]
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = np.concatenate([magnitudes, -magnitudes])[elements]
    return numbers * np.repeat(factors, 16, -1)[..., : elements.shape[-1]] * tensor_scale


def kv_append(
    k: ArrayLike, v: ArrayLike, k_pages: ArrayLike, v_pages: ArrayLike, slots: Sequence[int]
) -> tuple[Float, Float]:
    """Copies of the pages with the tokens written; negative slots are skipped."""
    pages = f64(k_pages), f64(v_pages)
    page_size = pages[0].shape[1]
    for t, slot in enumerate(slots):
        if slot >= 0:
            for page, tokens in zip(pages, (k, v), strict=True):
                page[slot // page_size, slot % page_size] = f64(tokens)[t]
    return pages


def kv_read(
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    block_table: NDArray[Any],
    seq_lens: NDArray[Any],
    max_seq: int | None = None,
) -> tuple[Float, Float]:
    """Sequences gathered from pages; 0 past their lengths."""
    longest = max((int(n) for n in seq_lens), default=0) if max_seq is None else max_seq
    outs = []
    for pages in (np.asarray(k_pages), np.asarray(v_pages)):
        out = np.zeros((len(seq_lens), longest, *pages.shape[2:]))
        for b, length in enumerate(seq_lens):
            for j in range(min(int(length), longest)):
                out[b, j] = pages[block_table[b][j // pages.shape[1]], j % pages.shape[1]]
        outs.append(out)
    return outs[0], outs[1]


def kv_copy_pages(
    k_pages: ArrayLike, v_pages: ArrayLike, src: Sequence[int], dst: Sequence[int]
) -> tuple[Float, Float]:
    """Copies of the pages after pages[dst] = pages[src]."""
    k, v = f64(k_pages), f64(v_pages)
    for s, d in zip(src, dst, strict=True):
        k[d], v[d] = k[s].copy(), v[s].copy()
    return k, v
