"""The gradient below the public functions of flash-attn 3, which Megatron-LM and TransformerEngine call. The forward
function of that kind calls the public ones, so it stands with them. `_parts.py` has those of flash-attn 2.
"""

from __future__ import annotations

import torch

from ._errors import ArgumentError
from ._parts import write_gradients

__all__ = ["PRIVATE"]

PRIVATE = ("_flash_attn_backward", "_flash_attn_forward")
"""What `install()` shows of flash_attn_interface beside its public names."""


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    sequed_q: torch.Tensor | None = None,
    sequed_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> torch.Tensor:
    """Writes the gradients of q, k and v into dq, dk and dv; of tokens that are not in use, 0.

    Tensors are [batch, seq, heads, head_dim], or with cu_seqlens_q and cu_seqlens_k [total, heads, head_dim]; sequed_q,
    sequed_k: int32 [batch], how many tokens of each sequence count. softmax_lse as `_flash_attn_forward` gives it, or
    over more keys. Returns an empty tensor, in place of a scratch of the package's.
    """
    op, window, lengths = "_flash_attn_backward", (window_size_left, window_size_right), None
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ArgumentError(f"{op}: one of cu_seqlens_q and cu_seqlens_k is given; both or none are needed")
    if cu_seqlens_q is not None:
        if max_seqlen_q is None or max_seqlen_k is None:
            raise ArgumentError(f"{op}: cu_seqlens_q is given; max_seqlen_q and max_seqlen_k are needed, too")
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sequed_q, sequed_k
    elif sequed_q is not None or sequed_k is not None:
        raise NotImplementedError(f"{op}: sequed_q or sequed_k without cu_seqlens_q; None is needed")
    tensors = dout, q, k, v, out, softmax_lse
    return write_gradients(op, tensors, (dq, dk, dv), softmax_scale, is_causal, window, softcap, None, lengths)
