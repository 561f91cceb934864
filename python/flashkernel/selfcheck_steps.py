"""Doctor's cases of a whole decode step, of pages of 4 bits and of block masks. Part of selfcheck.py."""

from __future__ import annotations

from typing import Any

import numpy as np

import flashkernel as fk

from . import reference

__all__ = ["attention_blocks", "attention_paged_int4", "decode_step"]


def attention_blocks(inputs: Any) -> list[tuple[Any, np.ndarray]]:
    """Two heads, of whose blocks of 64 keys some are hidden."""
    (q, q64), (k, k64), (v, v64) = (inputs.randn(1, 2, n, inputs.head_dim) for n in (70, 150, 150))
    blocks = np.array([[[[1, 0, 1], [0, 2, 1]]]], np.uint8)
    out = fk.attention(q, k, v, block_mask=inputs.bytes(blocks), block_size=64, **inputs.options)
    hidden = np.repeat(np.repeat(blocks[0, 0] == 0, 64, 0), 64, 1)[:70, :150]
    bias = np.where(hidden, -np.inf, 0.0)[None, None]
    return [(out, reference.attention(q64, k64, v64, bias=bias)[0])]


def attention_paged_int4(inputs: Any, seq_q: int = 1) -> list[tuple[Any, np.ndarray]]:
    """Pages of two elements a byte, with a scale and a zero for 32 of them."""
    dim, table, lengths = inputs.head_dim, np.array([[2, 0, 3]]), np.array([37])
    q, q64 = inputs.randn(1, 4, seq_q, dim)
    pages, scales, numbers = [], [], []
    for _ in range(2):
        values = inputs.randn(4, 16, 2, dim)[1]
        packed, scale = reference.kv_quantize_int4(values)
        pages.append(inputs.bytes(packed))
        scales.append(inputs.float16(np.moveaxis(scale, 1, 2)))
        numbers.append(reference.kv_numbers(packed, scale, "int4"))
    index = inputs.index(table), inputs.index(lengths)
    kv_scales = scales[0], scales[1]
    out = fk.attention_paged(q, pages[0], pages[1], *index, kv_scales=kv_scales, kv_dtype="int4", **inputs.options)
    return [(out, reference.attention_paged(q64, numbers[0], numbers[1], table, lengths)[0])]


def decode_step(inputs: Any) -> list[tuple[Any, np.ndarray]]:
    """Of a selfcheck.Inputs: two layers; a row of several parts of keys, and one without a sequence."""
    hidden, inner, heads, heads_kv, dim = 96, 160, 4, 2, 64
    lengths, table = [300, 0], [[1, 3, 0, 5, 2], [-1] * 5]
    indices = [[5, 2], [299, 0], [171, -1], table, lengths]

    def weight(*shape: int) -> tuple[Any, np.ndarray]:
        _, values = inputs.randn(*shape)
        array = inputs.rounded(values * shape[-1] ** -0.5)
        return array, inputs.get(array)

    weights = (
        inputs.randn(11, hidden),
        inputs.randn(5, hidden),
        weight(2, (heads + 2 * heads_kv) * dim, hidden),
        weight(2, hidden, heads * dim),
        weight(2, 2 * inner, hidden),
        weight(2, hidden, inner),
        weight(37, hidden),
    )
    frequencies = (10000.0 ** -np.linspace(0, 1, dim // 2)).astype(np.float32)
    (kp, kp64), (vp, vp64) = (inputs.randn(2, 6, 64, heads_kv, dim) for _ in range(2))
    oracle: Any = reference.decode_step  # the weights come as one list
    step: Any = fk.decode_step
    truth = oracle(
        *(np.array(values) for values in indices), *(weight[1] for weight in weights), frequencies, kp64, vp64
    )
    arrays = [inputs.index(values) for values in indices]
    logits = step(*arrays, *(weight[0] for weight in weights), inputs.float32(frequencies), kp, vp, **inputs.options)
    return list(zip((logits, kp, vp), truth, strict=True))
