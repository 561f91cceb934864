"""`flash_attn.bert_padding`: between padded batches and tokens side by side, by torch's own ops."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of x [rows, ...] by indices [n]."""
    return x.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """[first_axis_dim, ...] with the rows of values [n, ...] at indices [n], which differ, and 0 elsewhere."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The tokens of [batch, seq, ...] that the masks [batch, seq] (bool or int) select, side by side.

    Returns (tokens [total, ...], indices int64 [total], cu_seqlens int32 [batch + 1], max_seqlen, seqused int32
    [batch]). Tokens of unused_mask are laid out but don't count in seqused. Waits for the device.

    >>> import torch
    >>> from flashkernel.flash_attn.bert_padding import unpad_input
    >>> x, mask = torch.arange(6).reshape(2, 3, 1), torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> tokens, indices, cu_seqlens, longest, used = unpad_input(x, mask)
    >>> tokens.flatten().tolist(), cu_seqlens.tolist(), longest
    ([0, 1, 3], [0, 2, 3], 2)
    """
    present = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = present.sum(-1, dtype=torch.int32)
    indices = present.flatten().nonzero()[:, 0]
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, cu_seqlens, longest, attention_mask.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The way back: [batch, seqlen, ...] of tokens [total, ...], 0 where there was none."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
