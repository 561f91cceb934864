"""A few queries of each sequence over many keys: verification of drafts, the last chunks of prompts."""

from __future__ import annotations

from dataclasses import replace

from ..attention import Attention

__all__ = ["ROWS"]


def _row(model: str, heads: int, heads_kv: int, dim: int, batch: int, keys: int, queries: int) -> Attention:
    return Attention(model, batch, heads, heads_kv, queries, keys, dim, causal=True, page=16)


def _llama(batch: int, keys: int, queries: int) -> Attention:
    return _row("llama-8b", 32, 8, 128, batch, keys, queries)


ROWS = (
    *(_llama(1, 4096, queries) for queries in (2, 4, 8)),
    *(_llama(8, 4096, queries) for queries in (2, 4, 8)),
    _llama(64, 1024, 5),
    *(_llama(1, 8192, queries) for queries in (16, 32, 64, 128)),
    _llama(16, 2048, 16),
    _llama(4, 8192, 64),
    *(_row("llama-1b", 32, 8, 64, batch, 4096, queries) for batch in (1, 8) for queries in (4, 16)),
    *(_row("llama-70b", 64, 8, 128, batch, 4096, 5) for batch in (1, 16)),
    *(_row("gemma2-9b", 16, 8, 256, batch, 4096, 4) for batch in (1, 16)),
    *(_row("gpt2", 12, 12, 64, batch, 1024, 4) for batch in (1, 32)),
    _row("starcoder", 48, 1, 128, 8, 4096, 4),
    _row("phi3-mini", 32, 32, 96, 8, 2048, 4),
    replace(_llama(8, 4096, 4), lse=True),
    replace(_llama(8, 4096, 4), kv8=True),
    replace(_llama(8, 4096, 16), page=1),
)
