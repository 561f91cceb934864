"""A norm, a linear and what follows it in one op, beside the same by torch: for the rows of kernels.py."""

from __future__ import annotations

import math
from typing import Any

import flashkernel as fk

from .. import baselines
from ..case import OURS, TOLERANCE, Inputs, Provider, Settings, Work, each, nbytes

__all__ = ["fused_linear_work", "qkv_append_work"]

HEADS_KV, DIM, PAGE = 8, 64, 16


def _swiglu(x: Any, weight: Any, norm: Any) -> Any:
    gate, up = baselines.linear(baselines.rms_norm(x, norm), weight, None).chunk(2, -1)
    return baselines.swiglu(gate, up)


def fused_linear_work(s: Settings, dtype: str, rows: int, features: int, inner: int) -> Work:
    """RMSNorm, gate and up, SwiGLU."""
    inputs = Inputs(s.device, dtype)
    x, norm = inputs.randn(rows, features), inputs.randn(features)
    weight = inputs.randn(2 * inner, features, scale=1 / math.sqrt(features))
    copies = [weight.clone() for _ in range(inputs.sets(nbytes(weight), from_memory=s.cuda))]
    ours = [(x, one, None, norm) for one in copies]
    providers = [Provider("flashkernel", each(fk.fused_linear, ours, activation="swiglu"), OURS)]
    providers += baselines.stock(s, _swiglu, [(x, one, norm) for one in copies])
    return Work(providers, 3 * TOLERANCE[dtype], read=nbytes(x, weight, norm), written=rows * inner * x.element_size())


def _append(x: Any, weight: Any, norm: Any, pages: Any, slots: Any, cos: Any, sin: Any) -> Any:
    heads = baselines.linear(baselines.rms_norm(x, norm), weight, None).view(len(x), -1, DIM)
    q, k = baselines.rope(heads[:, : -2 * HEADS_KV], heads[:, -2 * HEADS_KV : -HEADS_KV], cos, sin)
    pages.view(-1, 2, HEADS_KV, DIM)[slots, 0] = k
    pages.view(-1, 2, HEADS_KV, DIM)[slots, 1] = heads[:, -HEADS_KV:]
    return q


def qkv_append_work(s: Settings, dtype: str, rows: int, features: int, heads: int) -> Work:
    """RMSNorm, queries, keys and values, RoPE, and the last two into pages."""
    inputs = Inputs(s.device, dtype)
    x, norm = inputs.randn(rows, features), inputs.randn(features)
    weight = inputs.randn((heads + 2 * HEADS_KV) * DIM, features, scale=1 / math.sqrt(features))
    copies = [weight.clone() for _ in range(inputs.sets(nbytes(weight), from_memory=s.cuda))]
    pages = [inputs.randn(rows, PAGE, HEADS_KV, DIM) for _ in range(2)]
    slots, positions = inputs.index([PAGE * i for i in range(rows)]), inputs.index([7 * i for i in range(rows)])
    rope = {"positions": positions, "theta": 10000.0}
    ours = [(x, one, *pages, slots, None, norm) for one in copies]
    providers = [Provider("flashkernel", each(fk.qkv_append, ours, rope=rope), OURS)]
    table = baselines.rope_tables(s, dtype, 7 * rows, DIM)
    cos, sin = (part[positions.long()][:, None] for part in table)
    both = inputs.randn(rows, PAGE, 2, HEADS_KV, DIM)
    providers += baselines.stock(s, _append, [(x, one, norm, both, slots.long(), cos, sin) for one in copies])
    written = rows * len(weight) * x.element_size()
    return Work(providers, 4 * TOLERANCE[dtype], read=nbytes(x, weight, norm), written=written)
