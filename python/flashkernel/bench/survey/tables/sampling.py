"""The next token from logits: the largest, and a draw at temperature 0.7 with top-p 0.9."""

from __future__ import annotations

from ..matrices import Argmax, Sample

__all__ = ["ROWS"]

ROWS = (
    *(Argmax(rows, vocabulary) for vocabulary in (50257, 128256) for rows in (1, 8, 32)),
    *(Sample(rows, vocabulary) for vocabulary in (50257, 128256) for rows in (1, 8, 32)),
)
