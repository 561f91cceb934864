"""The options that every attention op has: their meaning, defaults and checks, and how they are passed on.

Public functions spell the options out, so that a call is checked where it is written and `help` shows them. Behind
those signatures they travel as one `AttentionOptions`: in `flashkernel.torch`, `flashkernel.triton` and
`flashkernel.reference`. The library's own declaration is `flashkernel::AttentionOptions` in attention.hpp; its bindings
read theirs from bindings/attention_options.hpp.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from flashkernel.typing import Window

__all__ = ["AttentionOptions"]

ALIBI = ("distance", "signed", "sqrt")
_WINDOW = "a pair (left, right) of token counts, None for unbounded, is needed"


class AttentionOptions(NamedTuple):
    """Query i of a sequence stands at position i + seq_k - seq_q among its keys.

    Fields are in the order of the signatures, but for those that not every op has (bias, the masks), and `alibi`.
    """

    causal: bool = False
    """A query sees the keys up to its position."""
    window: Window = None
    """(left, right): the most tokens seen on either side of the position; None or -1: all."""
    softcap: float = 0.0
    """A score s becomes softcap * tanh(s / softcap); 0: off."""
    scale: float | None = None
    """The factor of the products of q and k; None: 1 / sqrt(head_dim)."""
    alibi_slopes: Any = None
    """float32 [heads_q] or [batch, heads_q]; adds -slope * |distance of the key from the position| to a score."""
    sinks: Any = None
    """float32 [heads_q]: the score of one more key, which has no value."""
    bias: Any = None
    """Added to the scores after softcap; broadcasts to [batch, heads_q, seq_q, seq_k]."""
    mask: Any = None
    """The bits of `pack_mask`, int32 [batch, heads_q, seq_q, (seq_k + 31) // 32]; the first three dims broadcast.
    Over pages: of the last seq_q keys."""
    alibi: str = "distance"
    """What the slopes are multiplied with: "distance", "signed" or "sqrt"."""
    block_mask: Any = None
    """uint8 or bool [batch or 1, heads_q or 1, blocks of queries, blocks of keys]: which blocks are seen; 2: all of
    the block, whatever `mask` says. Or a flashkernel.masks.BlockMask."""
    block_size: int | tuple[int, int] = 128
    """Tokens of a block of block_mask, or a pair (of queries, of keys)."""

    def keywords(self) -> dict[str, Any]:
        """The options as keywords of an op, without those that are None: not every op has a bias."""
        given = {name: value for name, value in self._asdict().items() if value is not None}
        if self.block_mask is None:
            del given["block_size"]
        return given

    def block_sizes(self) -> tuple[int, int]:
        """Queries and keys of a block."""
        return (self.block_size, self.block_size) if isinstance(self.block_size, int) else self.block_size

    def refusal(self) -> str | None:
        """What is wrong with the numbers among them, as the end of a sentence "op: ..."; None: nothing."""
        if not (math.isfinite(self.softcap) and self.softcap >= 0):
            return f"softcap={float(self.softcap)}; 0 or a positive number is needed"
        if self.scale is not None and not math.isfinite(self.scale):
            return f"scale={float(self.scale)}; a finite number is needed"
        if self.alibi not in ALIBI:
            return f'alibi={self.alibi!r}; "distance", "signed" or "sqrt" is needed'
        if self.window is None:
            return None
        if not isinstance(self.window, tuple | list):
            return f"window={self.window!r}; {_WINDOW}"
        if len(self.window) != 2:
            return f"window has {len(self.window)} entries; {_WINDOW}"
        if any(side is not None and (not isinstance(side, int) or side < -1) for side in self.window):
            return f"window={self.window!r}; {_WINDOW}"
        return None

    def window_sides(self) -> tuple[int, int]:
        """The window with -1 for all tokens of a side."""
        left, right = (None, None) if self.window is None else self.window
        return -1 if left is None else left, -1 if right is None else right

    def sides(self) -> tuple[int | None, int | None]:
        """The most keys seen to the left and to the right of the position, `causal` included; None: all."""
        left, right = self.window_sides()
        if self.causal:
            right = 0 if right < 0 else min(right, 0)
        return None if left < 0 else left, None if right < 0 else right

    def factor(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else float(self.scale)
