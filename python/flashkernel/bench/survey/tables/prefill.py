"""Whole prompts and chunks of them, causal."""

from __future__ import annotations

from dataclasses import replace

from ..attention import Attention

__all__ = ["ROWS"]


def _row(model: str, heads: int, heads_kv: int, dim: int, batch: int, queries: int, keys: int = 0) -> Attention:
    return Attention(model, batch, heads, heads_kv, queries, keys or queries, dim, causal=True)


def _chunk(model: str, heads: int, heads_kv: int, dim: int, batch: int, queries: int, keys: int) -> Attention:
    return replace(_row(model, heads, heads_kv, dim, batch, queries, keys), page=16)


ROWS = (
    *(_row("llama-8b", 32, 8, 128, 1, seq) for seq in (128, 256, 512, 1024, 2048, 4096, 8192, 16384)),
    *(_row("llama-8b", 32, 8, 128, batch, seq) for batch, seq in ((8, 512), (16, 1024), (4, 4096))),
    *(_row("llama-1b", 32, 8, 64, 1, seq) for seq in (128, 512, 1024, 2048, 4096, 8192)),
    *(_row("llama-70b", 64, 8, 128, 1, seq) for seq in (512, 4096)),
    *(_row("gpt2", 12, 12, 64, batch, seq) for batch, seq in ((1, 1024), (32, 128), (8, 1024), (32, 896))),
    *(_row("gemma2-9b", 16, 8, 256, 1, seq) for seq in (1024, 2048, 4096, 16384)),
    *(_row("gemma-2b", 8, 1, 256, batch, seq) for batch, seq in ((1, 2048), (8, 2048))),
    *(_row("gemma4 global", 32, 4, 512, 1, seq) for seq in (1024, 8192)),
    *(_row("phi-2", 32, 32, 80, 1, seq) for seq in (1024, 2048)),
    *(_row("phi3-mini", 32, 32, 96, 1, seq) for seq in (1024, 4096)),
    _row("d112", 16, 4, 112, 1, 4096),
    *(_row("d192", 16, 4, 192, 1, seq) for seq in (1024, 4096)),
    *(_row("qwen2.5-7b", 28, 4, 128, 1, seq) for seq in (512, 4096)),
    *(_row("starcoder", 48, 1, 128, 1, seq) for seq in (512, 4096)),
    _row("d32", 16, 16, 32, 4, 2048),
    *(_chunk("llama-8b", 32, 8, 128, 1, queries, 8192) for queries in (256, 512, 1024, 2048)),
    *(_chunk("llama-8b", 32, 8, 128, 8, queries, 4096) for queries in (256, 512)),
    *(_chunk("llama-1b", 32, 8, 64, 1, queries, 8192) for queries in (512, 2048)),
    *(_chunk("gemma2-9b", 16, 8, 256, 1, queries, 8192) for queries in (512,)),
    replace(_row("llama-8b", 32, 8, 128, 4, 4096), lse=True),
    replace(_row("llama-8b", 32, 8, 128, 8, 512), lse=True),
    replace(_chunk("llama-8b", 32, 8, 128, 1, 512, 8192), kv8=True),
    replace(_row("llama-8b", 32, 8, 128, 1, 1024), dtype="float16"),
)
