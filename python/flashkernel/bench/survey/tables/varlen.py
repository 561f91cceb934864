"""Sequences of various lengths side by side: packed training, short texts, servers' first steps."""

from __future__ import annotations

import random

from ..attention import Attention

__all__ = ["ROWS"]


def _lengths(count: int, least: int, most: int) -> tuple[int, ...]:
    draw = random.Random(count * least + most)  # the same in every run
    return tuple(draw.randint(least, most) for _ in range(count))


def _row(
    model: str, heads: int, heads_kv: int, dim: int, sizes: tuple[int, int, int], backward: bool = False,
    causal: bool = True,
) -> Attention:  # fmt: skip
    lengths = _lengths(*sizes)
    longest = max(lengths)
    return Attention(
        model, len(lengths), heads, heads_kv, longest, longest, dim, causal=causal, lengths=lengths, backward=backward
    )


SIZES = ((16, 200, 4096), (64, 30, 600), (256, 30, 60))  # count, shortest, longest

ROWS = (
    *(_row("llama-8b", 32, 8, 128, sizes) for sizes in (*SIZES, (4, 2000, 8000))),
    *(_row("llama-1b", 32, 8, 64, sizes) for sizes in SIZES),
    *(_row("gemma2-9b", 16, 8, 256, sizes) for sizes in ((16, 200, 2048),)),
    *(_row("bert", 12, 12, 64, sizes, causal=False) for sizes in ((64, 20, 128), (256, 30, 60), (32, 100, 512))),
    *(_row("vit-packed", 16, 16, 80, sizes, causal=False) for sizes in ((16, 200, 1200),)),
    *(_row("llama-8b", 32, 8, 128, sizes, True) for sizes in ((16, 200, 4096), (64, 30, 600))),
    *(_row("llama-1b", 32, 8, 64, sizes, True) for sizes in ((16, 200, 4096), (64, 30, 600))),
    *(_row("bert", 12, 12, 64, sizes, True, causal=False) for sizes in ((64, 20, 128),)),
)
