"""Linear layers of models at the rows of decoding, verification, chunks and whole prompts."""

from __future__ import annotations

from ..matrices import Linear

__all__ = ["ROWS"]

# model, layer, in_features, out_features, rows
LAYERS = (
    ("llama-1b", "qkv", 2048, 3072, (1, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)),
    ("llama-1b", "o", 2048, 2048, (1, 32, 64, 256, 2048)),
    ("llama-1b", "gate up", 2048, 16384, (1, 16, 64, 128, 512)),
    ("llama-1b", "down", 8192, 2048, (1, 16, 64, 256, 2048)),
    ("llama-1b", "head", 2048, 128256, (1, 8, 32)),
    ("llama-8b", "qkv", 4096, 6144, (1, 8, 64, 256, 1024)),
    ("llama-8b", "gate up", 4096, 28672, (1, 8, 64, 512, 4096)),
    ("llama-8b", "down", 14336, 4096, (1, 8, 64, 256, 1024)),
    ("llama-8b", "head", 4096, 128256, (1, 2, 16)),
    ("llama-70b", "qkv", 8192, 10240, (1, 32, 256)),
    ("llama-70b", "down", 28672, 8192, (1, 32, 256)),
    ("qwen2.5-7b", "qkv", 3584, 4608, (1, 32, 512)),
    ("qwen2.5-7b", "gate up", 3584, 37888, (1, 32, 512)),
    ("gemma2-9b", "o", 4096, 3584, (1, 64, 1024)),
    ("gemma2-9b", "head", 3584, 256000, (1, 16)),
    ("odd vocabulary", "head", 4096, 32003, (1, 64, 256)),
)

ROWS = (
    *(Linear(model, layer, rows, into, out) for model, layer, into, out, counts in LAYERS for rows in counts),
    *(Linear("gpt2", "qkv", rows, 768, 2304, bias=True, dtype="float16") for rows in (1, 32, 1024)),
    *(Linear("gpt2", "up", rows, 768, 3072, bias=True, gelu=True, dtype="float16") for rows in (1, 32, 1024, 8192)),
    *(Linear("gpt2", "head", rows, 768, 50257, dtype="float16") for rows in (1, 32, 128, 1024)),
)
