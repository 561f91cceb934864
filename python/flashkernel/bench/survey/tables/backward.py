"""Gradients of dense attention at every head dim, in any order and deterministic, beside peers in the same mode."""

from __future__ import annotations

from ..attention import Attention

__all__ = ["ROWS"]

WIDTH = 2048  # heads x head dim


def _row(dim: int, seq: int, causal: bool, deterministic: bool = False, tokens: int = 16384) -> Attention:
    heads = WIDTH // dim
    batch = max(1, tokens // seq)
    return Attention(
        "paper", batch, heads, heads, seq, seq, dim, causal=causal, dtype="float16", backward=True,
        deterministic=deterministic,
    )  # fmt: skip


def _model(model: str, heads: int, heads_kv: int, dim: int, batch: int, seq: int, causal: bool = True) -> Attention:
    return Attention(model, batch, heads, heads_kv, seq, seq, dim, causal=causal, backward=True)


ROWS = (
    *(_row(dim, 4096, causal) for dim in (32, 64, 80, 96, 112, 128, 160, 192, 256) for causal in (True, False)),
    *(_row(dim, 4096, True, True) for dim in (64, 128, 192, 256)),
    *(_row(dim, 512, causal) for dim in (64, 128) for causal in (True, False)),
    *(_row(dim, 16384, True, deterministic) for dim in (64, 128) for deterministic in (False, True)),
    _model("llama-8b", 32, 8, 128, 1, 4096),
    _model("llama-1b", 32, 8, 64, 4, 2048),
    _model("gpt2", 12, 12, 64, 16, 1024),
    _model("gemma2-9b", 16, 8, 256, 1, 4096),
    _model("gemma4 global", 32, 4, 512, 1, 4096),
    _model("bert-base", 12, 12, 64, 64, 128, causal=False),
    _model("vit-b/16", 12, 12, 64, 64, 197, causal=False),
)
