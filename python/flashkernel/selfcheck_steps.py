"""Doctor's case of a whole decode step. Part of selfcheck.py."""

from __future__ import annotations

from typing import Any

import numpy as np

import flashkernel as fk

from . import reference

__all__ = ["decode_step"]


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
