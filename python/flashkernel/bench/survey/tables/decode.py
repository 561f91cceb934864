"""One new token of each sequence over pages."""

from __future__ import annotations

from dataclasses import replace

from ..attention import Attention

__all__ = ["ROWS"]


def _row(model: str, heads: int, heads_kv: int, dim: int, batch: int, keys: int, page: int = 16) -> Attention:
    return Attention(model, batch, heads, heads_kv, 1, keys, dim, causal=True, page=page)


LOADS = ((1, 1024), (1, 4096), (1, 32768), (8, 4096), (32, 2048), (128, 2048))

ROWS = (
    *(_row("llama-8b", 32, 8, 128, *load) for load in LOADS),
    *(_row("llama-1b", 32, 8, 64, *load) for load in LOADS),
    *(_row("llama-70b", 64, 8, 128, *load) for load in LOADS[:4]),
    # head dims beside 64 and 128
    *(_row("gemma-2b", 8, 1, 256, *load) for load in ((1, 4096), (32, 2048))),
    *(_row("gemma2-9b", 16, 8, 256, *load) for load in ((1, 4096), (16, 2048), (64, 2048))),
    *(_row("gemma-8/4", 8, 4, 256, *load) for load in ((1, 4096), (16, 2048), (64, 2048))),
    *(_row("gemma4 global", 32, 4, 512, *load) for load in ((1, 4096), (1, 32768), (16, 8192))),
    *(_row("phi-2", 32, 32, 80, *load) for load in ((1, 2048), (16, 2048))),
    *(_row("phi3-mini", 32, 32, 96, *load) for load in ((1, 4096), (16, 2048))),
    *(_row("starcoder-112", 16, 4, 112, *load) for load in ((1, 4096), (16, 2048))),
    *(_row("d192", 16, 4, 192, *load) for load in ((1, 4096), (16, 2048))),
    # one key head for many
    *(_row("starcoder", 48, 1, 128, *load) for load in ((1, 4096), (16, 2048), (64, 2048))),
    *(_row("falcon-7b", 71, 1, 64, *load) for load in ((1, 2048), (16, 2048))),
    _row("128/1", 128, 1, 128, 16, 4096),
    # every head its own keys
    *(_row("gpt2", 12, 12, 64, *load) for load in ((1, 1024), (32, 1024))),
    *(_row("qwen2.5-7b", 28, 4, 128, *load) for load in ((1, 4096), (16, 4096))),
    _row("many", 32, 8, 128, 512, 512),
    _row("many", 32, 8, 128, 1024, 256),
    # the pages of engines
    *(_row("llama-8b", 32, 8, 128, 16, 4096, page) for page in (1, 4, 8, 64, 256)),
    *(_row("llama-1b", 32, 8, 64, 16, 4096, page) for page in (1, 256)),
    # with what a merge needs, and in 8 bits
    *(replace(_row("llama-8b", 32, 8, 128, *load), lse=True) for load in ((1, 4096), (16, 4096))),
    *(replace(_row("llama-8b", 32, 8, 128, *load), kv8=True) for load in ((1, 4096), (16, 4096), (64, 4096))),
    *(replace(_row("llama-1b", 32, 8, 64, *load), kv8=True) for load in ((16, 4096), (64, 4096))),
    *(replace(_row("llama-8b", 32, 8, 128, *load), dtype="float16") for load in ((8, 4096),)),
)
