"""flash-attn 3's functions below its public ones: what Megatron-LM and TransformerEngine call. `_parts.py` has those of
flash-attn 2.
"""

from __future__ import annotations

from typing import Any

import torch

from . import flash_attn_3_interface as public  # which imports this module, at its head
from ._errors import ArgumentError
from ._parts import write_gradients

__all__ = ["PRIVATE"]

PRIVATE = ("_flash_attn_backward", "_flash_attn_forward")
"""What `install()` shows of flash_attn_interface beside its public names."""


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    out_: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    kv_batch_idx: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    seqlens_rotary: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, and two empty tensors: the package's partial results), by whichever public function the call is.

    Keys without cu_seqlens_k that have new ones, a table, lengths, rows or rotary tables are a cache:
    `flash_attn_with_kvcache`, of whose cache_seqlens seqused_k is the name here. With cu_seqlens_q and cu_seqlens_k:
    `flash_attn_varlen_func`. Else `flash_attn_func`. lse is float32 [batch, heads, seq_q], or with cu_seqlens_q
    [heads, total_q].

    out_: written and returned, where no gradient is recorded.
    """
    op, window = "_flash_attn_forward", (window_size_left, window_size_right)
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    given: dict[str, Any] = {
        "softmax_scale": softmax_scale, "causal": causal, "qv": qv, **scales, "window_size": window,
        "attention_chunk": attention_chunk, "softcap": softcap,
    }  # fmt: skip
    parts = k_new, page_table, kv_batch_idx, leftpad_k, rotary_cos
    is_cache = cu_seqlens_k is None and (seqused_k is not None or any(x is not None for x in parts))
    if is_cache:
        if seqused_q is not None:
            raise NotImplementedError(f"{op}: seqused_q over a cache; None is needed")
        out, lse, *_ = public.flash_attn_with_kvcache(
            q, k, v, k_new, v_new, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_seqlens=seqused_k,
            cache_batch_idx=kv_batch_idx, cache_leftpad=leftpad_k, page_table=page_table, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q, rotary_seqlens=seqlens_rotary,
            rotary_interleaved=rotary_interleaved, return_softmax_lse=True, **given,
        )  # fmt: skip
    elif any(x is not None for x in parts):
        raise NotImplementedError(
            f"{op}: cu_seqlens_k over a cache; None is needed: seqused_k says how many keys count"
        )
    elif (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ArgumentError(f"{op}: one of cu_seqlens_q and cu_seqlens_k is given; both or none are needed")
    elif cu_seqlens_q is not None and cu_seqlens_k is not None:
        if max_seqlen_q is None or max_seqlen_k is None:
            raise ArgumentError(f"{op}: cu_seqlens_q is given; max_seqlen_q and max_seqlen_k are needed, too")
        out, lse = public.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
            return_attn_probs=True, **given,
        )  # fmt: skip
    elif seqused_q is not None:
        raise NotImplementedError(f"{op}: seqused_q without cu_seqlens_q; None is needed")
    else:
        out, lse = public.flash_attn_func(q, k, v, return_attn_probs=True, **given)
    if out_ is not None:
        if out.requires_grad:
            raise ArgumentError(f"{op}: out_ is given where a gradient is recorded; None is needed")
        if out_.shape != out.shape or out_.dtype != out.dtype:
            raise ArgumentError(
                f"{op}: out_ is {list(out_.shape)} {out_.dtype}; {list(out.shape)} {out.dtype} is needed"
            )
        out = out_.copy_(out)
    return out, lse, lse.new_empty(0), lse.new_empty(0)


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
