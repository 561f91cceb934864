"""Oracle of the kernels that move keys and values into and out of pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flashkernel.reference._common import Float, f64


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
