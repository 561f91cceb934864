"""No mask: encoders of text and speech, vision, diffusion; and queries over another sequence's keys."""

from __future__ import annotations

from ..attention import Attention

__all__ = ["ROWS"]


def _row(model: str, heads: int, dim: int, batch: int, queries: int, keys: int = 0) -> Attention:
    return Attention(model, batch, heads, heads, queries, keys or queries, dim, dtype="float16")


ROWS = (
    *(_row("bert-base", 12, 64, batch, seq) for batch, seq in ((1, 128), (64, 128), (16, 384), (32, 512), (1, 512))),
    *(_row("bert-large", 16, 64, batch, seq) for batch, seq in ((32, 128), (8, 512))),
    *(_row("minilm", 12, 32, batch, seq) for batch, seq in ((64, 128), (256, 64))),
    *(_row("vit-b/16", 12, 64, batch, 197) for batch in (1, 64)),
    *(_row("vit-l/14", 16, 64, batch, 577) for batch in (1, 16)),
    *(_row("siglip-so400m", 16, 72, batch, 729) for batch in (1, 16)),
    _row("vit-h/14", 16, 80, 16, 257),
    *(_row("whisper-large", 20, 64, batch, 1500) for batch in (1, 8)),
    *(_row("whisper-large cross", 20, 64, batch, queries, 1500) for batch, queries in ((8, 1), (8, 128))),
    *(_row("sd1.5", 8, dim, 2, seq) for seq, dim in ((4096, 40), (1024, 80), (256, 160))),
    *(_row("sd1.5 cross", 8, dim, 2, seq, 77) for seq, dim in ((4096, 40), (1024, 80))),
    *(_row("sdxl", heads, 64, 2, seq) for heads, seq in ((10, 4096), (20, 1024))),
    *(_row("sdxl cross", heads, 64, 2, seq, 77) for heads, seq in ((10, 4096), (20, 1024))),
    *(_row("flux", 24, 128, 1, seq) for seq in (1536, 4608)),
    _row("sd3", 24, 64, 2, 4250),
    _row("video dit", 30, 64, 1, 17776),
    *(_row("t5-like cross", 16, 64, 8, queries, keys) for queries, keys in ((64, 4096), (1, 512), (128, 512))),
    _row("perceiver cross", 8, 128, 8, 64, 4096),
    _row("cross", 16, 128, 8, 64, 4096),
    *(_row("paper", 16, 128, 16384 // seq, seq) for seq in (512, 2048, 8192)),
    *(_row("paper", 32, 64, 16384 // seq, seq) for seq in (512, 2048, 8192)),
    *(_row("paper", 8, 256, 16384 // seq, seq) for seq in (512, 2048, 8192)),
)
