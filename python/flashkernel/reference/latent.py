"""Oracle of latent rows in 8 bits: what their bytes stand for, and how `flashkernel.latent_append` writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flashkernel.reference._common import Float, f64
from flashkernel.reference.kv_ops import round_to_e4m3
from flashkernel.reference.ops import float8_numbers

__all__ = ["latent_append", "latent_numbers"]


def _float8_bits(numbers: Float) -> NDArray[np.uint8]:
    """Of numbers that float8_e4m3fn has, and NaN."""
    table = float8_numbers(np.arange(127, dtype=np.uint8))
    magnitude = np.abs(numbers)
    bits = np.where(np.isnan(magnitude), 127, np.searchsorted(table, magnitude))
    return (bits | np.where(np.signbit(numbers), 128, 0)).astype(np.uint8)


def latent_numbers(rows: NDArray[np.uint8], columns: int, rank: int, latent_scale: ArrayLike | None = None) -> Float:
    """The numbers [..., columns] of 8-bit latent rows of `attention_mla_decode`, not rounded to a query's dtype.

    rows: bytes [..., rank + 4 * groups + 2 * (columns - rank)] with their own scales, or [..., columns] with one scale.
    """
    if rows.shape[-1] == columns:
        factor = np.float32(1 if latent_scale is None else np.asarray(latent_scale).reshape(()))
        return f64(float8_numbers(rows).astype(np.float32) * factor)
    groups = -(-rank // 128)
    elements = float8_numbers(rows[..., :rank]).astype(np.float32)
    scales = np.ascontiguousarray(rows[..., rank : rank + 4 * groups]).view(np.float32)
    key = np.ascontiguousarray(rows[..., rank + 4 * groups :]).view(np.uint16).astype(np.uint32) << 16
    with np.errstate(invalid="ignore", over="ignore"):
        latent = elements * np.repeat(scales, 128, axis=-1)[..., :rank]
    return f64(np.concatenate([latent, key.view(np.float32)], axis=-1))


def latent_append(
    latent: ArrayLike,
    key: ArrayLike,
    latent_pages: NDArray[np.uint8],
    slots: NDArray[Any],
    *,
    latent_scale: ArrayLike | None = None,
) -> NDArray[np.uint8]:
    """The bytes of `latent_pages` after `flashkernel.latent_append`."""
    values, turned = (np.asarray(f64(x)).astype(np.float32) for x in (latent, key))
    rank, groups = values.shape[1], -(-values.shape[1] // 128)
    grouped = np.shape(latent_pages)[-1] != rank + turned.shape[1]
    if grouped:
        padded = np.zeros((len(values), groups * 128), np.float32)
        padded[:, :rank] = values
        largest = np.fmax.reduce(np.abs(padded.reshape(-1, groups, 128)), axis=-1, initial=0.0)
        largest = np.minimum(largest, np.finfo(np.float32).max)
        scales = np.maximum(largest / np.float32(448), np.finfo(np.float32).tiny).astype(np.float32)
        bits = (turned.view(np.uint32) + 0x7FFF + (turned.view(np.uint32) >> 16 & 1)) >> 16
        bits = np.where(np.isnan(turned), 0x7FC0, bits).astype(np.uint16)
        rest = [scales.view(np.uint8), bits.view(np.uint8).reshape(len(values), -1)]
        factors = np.repeat(scales, 128, axis=1)[:, :rank]
    else:
        values = np.concatenate([values, turned], axis=1)
        rest = []
        factors = np.full(values.shape, 1 if latent_scale is None else np.asarray(latent_scale).reshape(()), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        elements = _float8_bits(round_to_e4m3(values / factors))
    rows = np.concatenate([elements, *rest], axis=1)
    pages = np.array(latent_pages)
    page_size = pages.shape[1]
    for row, slot in zip(rows, np.asarray(slots).tolist(), strict=True):
        if slot >= 0:
            pages[slot // page_size, slot % page_size] = row
    return pages
