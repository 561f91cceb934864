"""Bias, ALiBi, windows, sinks, softcap, block masks: forward, and backward where models train with them."""

from __future__ import annotations

from dataclasses import replace

from ..attention import Attention

__all__ = ["ROWS"]


def _row(model: str, heads: int, heads_kv: int, dim: int, batch: int, seq: int) -> Attention:
    return Attention(model, batch, heads, heads_kv, seq, seq, dim, causal=True, dtype="float16")


def _full(model: str, heads: int, dim: int, batch: int, seq: int) -> Attention:
    return replace(_row(model, heads, heads, dim, batch, seq), causal=False)


def _decode(model: str, heads: int, heads_kv: int, dim: int, batch: int, keys: int) -> Attention:
    return Attention(model, batch, heads, heads_kv, 1, keys, dim, causal=True, page=16)


GEMMA = {"softcap": 50.0, "dtype": "bfloat16"}
SPARSE = replace(_full("block mask", 16, 128, 1, 16384), dtype="bfloat16")
MISTRAL = {"window": (4095, 0), "dtype": "bfloat16"}

ROWS = (
    # an additive bias
    replace(_row("bias", 16, 16, 128, 4, 4096), bias=True),
    replace(_row("bias", 16, 16, 128, 4, 1024), bias=True),
    replace(_full("t5-large", 16, 64, 8, 512), bias=True),
    replace(_full("t5-large", 16, 64, 4, 2048), bias=True),
    replace(_full("swin-like", 16, 32, 256, 64), bias=True),
    replace(_full("pair bias", 4, 32, 1, 768), bias=True),
    replace(_full("t5-large", 16, 64, 4, 1024), bias=True, backward=True),
    replace(_full("bias", 8, 64, 2, 4096), bias=True, backward=True),
    # ALiBi
    replace(_row("mpt-7b", 32, 32, 128, 1, 2048), alibi=True),
    replace(_row("alibi", 16, 16, 128, 4, 4096), alibi=True),
    replace(_row("bloom-560m", 16, 16, 64, 8, 2048), alibi=True),
    replace(_full("jina-bert", 12, 64, 8, 2048), alibi=True),
    replace(_row("bloom-560m", 16, 16, 64, 2, 2048), alibi=True, backward=True),
    # windows
    *(replace(_row("mistral-7b", 32, 8, 128, 1, seq), **MISTRAL) for seq in (8192, 16384)),  # type: ignore[arg-type]
    *(replace(_row("window 512", 32, 8, 128, 4, seq), window=(511, 0)) for seq in (2048, 8192)),
    *(replace(_row("gemma3", 8, 4, 256, 1, seq), window=(1023, 0)) for seq in (2048, 8192)),
    *(replace(_full("modernbert", 12, 64, batch, seq), window=(64, 64)) for batch, seq in ((16, 512), (2, 8192))),
    *(replace(_row("window 512", 32, 8, 128, 2, 4096), window=(511, 0), backward=True) for _ in range(1)),
    replace(_full("modernbert", 12, 64, 2, 8192), window=(64, 64), backward=True),
    *(replace(_decode("mistral-7b", 32, 8, 128, b, k), window=(4095, 0)) for b, k in ((1, 8192), (16, 8192))),
    *(replace(_decode("gemma3", 8, 4, 256, b, k), window=(1023, 0)) for b, k in ((1, 8192), (16, 8192))),
    # sinks, with a window in every other layer
    *(replace(_row("gpt-oss", 64, 8, 64, 1, seq), sinks=True, dtype="bfloat16") for seq in (1024, 4096)),
    replace(_row("gpt-oss", 64, 8, 64, 1, 4096), sinks=True, window=(127, 0), dtype="bfloat16"),
    *(replace(_decode("gpt-oss", 64, 8, 64, b, k), sinks=True) for b, k in ((1, 4096), (16, 4096))),
    replace(_decode("gpt-oss", 64, 8, 64, 16, 4096), sinks=True, window=(127, 0)),
    # softcap
    *(replace(_row("gemma2-9b", 16, 8, 256, 1, seq), **GEMMA) for seq in (2048, 4096)),  # type: ignore[arg-type]
    replace(_row("gemma2-27b", 32, 16, 128, 1, 4096), softcap=50.0, dtype="bfloat16"),
    *(replace(_decode("gemma2-9b", 16, 8, 256, b, k), softcap=50.0) for b, k in ((1, 4096), (16, 2048), (64, 2048))),
    replace(_row("grok-like", 48, 8, 128, 1, 4096), softcap=30.0, dtype="bfloat16"),
    replace(_row("gemma2-27b", 32, 16, 128, 1, 4096), softcap=50.0, dtype="bfloat16", backward=True),
    # blocks that are left out
    *(replace(SPARSE, blocks=part) for part in (0.1, 0.25, 0.5)),
    replace(SPARSE, blocks=0.25, dim=64),
    *(replace(SPARSE, blocks=0.25, dim=dim, backward=True) for dim in (64, 128)),
)
