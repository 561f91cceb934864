"""Oracle of a decode step: the oracles of its ops, one after another."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flashkernel.reference._common import Float, f64
from flashkernel.reference.attention import attention_paged
from flashkernel.reference.kv_ops import kv_append
from flashkernel.reference.ops import linear, rms_norm, rope, swiglu

__all__ = ["decode_step"]


def decode_step(
    tokens: NDArray[Any],
    positions: NDArray[Any],
    slots: NDArray[Any],
    block_table: NDArray[Any],
    seq_lens: NDArray[Any],
    embedding: ArrayLike,
    norms: ArrayLike,
    qkv_weight: ArrayLike,
    out_weight: ArrayLike,
    gate_up_weight: ArrayLike,
    down_weight: ArrayLike,
    head_weight: ArrayLike,
    inv_freq: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    *,
    eps: float = 1e-5,
    scale: float | None = None,
) -> tuple[Float, Float, Float]:
    """(logits, k_pages, v_pages): nothing is rounded in between, and the pages are copies."""
    x, norm, pages = f64(embedding)[np.asarray(tokens)], f64(norms), (f64(k_pages), f64(v_pages))
    qkv, out, gate_up, down = (f64(weight) for weight in (qkv_weight, out_weight, gate_up_weight, down_weight))
    rows, heads_kv, head_dim = len(x), pages[0].shape[3], pages[0].shape[4]
    heads_q = out.shape[2] // head_dim
    for layer in range(len(qkv)):
        heads = linear(rms_norm(x, norm[2 * layer], eps=eps)[0], qkv[layer])[0].reshape(rows, -1, head_dim)
        q, k, v = np.split(heads, [heads_q, heads_q + heads_kv], axis=1)
        # One token of each row: rows are the batch.
        q, turned = rope(q[:, :, None], k[:, :, None], np.asarray(positions)[:, None], inv_freq=inv_freq)
        assert turned is not None
        for kind, written in zip(
            pages, kv_append(turned[:, :, 0], v, pages[0][layer], pages[1][layer], list(slots)), strict=True
        ):
            kind[layer] = written
        seen, _ = attention_paged(
            q, pages[0][layer], pages[1][layer], block_table, seq_lens, causal=True, scale=scale or head_dim**-0.5
        )
        x = x + linear(seen[:, :, 0].reshape(rows, -1), out[layer])[0]
        gate, up = np.split(linear(rms_norm(x, norm[2 * layer + 1], eps=eps)[0], gate_up[layer])[0], 2, axis=1)
        x = x + linear(swiglu(gate, up), down[layer])[0]
    return linear(rms_norm(x, norm[-1], eps=eps)[0], head_weight)[0], *pages
