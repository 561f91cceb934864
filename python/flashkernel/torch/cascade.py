"""Attention over a paged cache of sequences with common prefixes, for torch: inference alone."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

import flashkernel as fk

from ._library import define, direct, refuse_gradient
from .kv_cache import Scales, columns, dtype_name, join_scales, needs_gradient, refuse_tensor_scales, split_scales

__all__ = ["attention_cascade"]


def _kernel(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    prefix_table: Any,
    prefix_lens: Any,
    block_table: Any,
    seq_lens: Any,
    cu_prefix_q: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: int | None,
    k_scales: Any,
    v_scales: Any,
    kv_dtype: str | None,
    sinks: Any,
    causal: bool,
    softcap: float,
    scale: float | None,
) -> Any:
    return fk.attention_cascade(
        q,
        k_pages,
        v_pages,
        prefix_table,
        prefix_lens,
        block_table,
        seq_lens,
        cu_prefix_q=cu_prefix_q,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        causal=causal,
        softcap=softcap,
        scale=scale,
        sinks=sinks,
        return_lse=True,
        kv_scales=join_scales(k_scales, v_scales),
        kv_dtype=kv_dtype,
    )


def _fake(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    prefix_table: Any,
    prefix_lens: Any,
    block_table: Any,
    seq_lens: Any,
    cu_prefix_q: Any,
    cu_seqlens_q: Any,
    *options: Any,
) -> Any:
    lse = q.shape[:-1] if cu_seqlens_q is None else (q.shape[1], q.shape[0])
    width = columns(v_pages, options[3])
    return q.new_empty((*q.shape[:-1], width)), q.new_empty(lse, dtype=torch.float32)


_NO_GRADIENT = (
    "attention_cascade: an argument requires a gradient, and attention over a cache has none; "
    "call it under torch.no_grad() or use attention_varlen"
)
_cascade = define(
    "attention_cascade(Tensor q, Tensor k_pages, Tensor v_pages, Tensor prefix_table, Tensor prefix_lens, "
    "Tensor block_table, Tensor seq_lens, Tensor? cu_prefix_q, Tensor? cu_seqlens_q, SymInt? max_seqlen_q, "
    "Tensor? k_scales, Tensor? v_scales, str? kv_dtype, Tensor? sinks, bool causal, float softcap, float? scale) "
    "-> (Tensor, Tensor)",
    _kernel,
    _fake,
    backward=refuse_gradient(_NO_GRADIENT),
)


@overload
def attention_cascade(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    prefix_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_prefix_q: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    kv_scales: Scales = None,
    kv_dtype: Any = None,
) -> torch.Tensor: ...
@overload
def attention_cascade(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    prefix_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_prefix_q: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: Literal[True],
    kv_scales: Scales = None,
    kv_dtype: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention_cascade(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    prefix_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_prefix_q: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    kv_scales: Scales = None,
    kv_dtype: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def attention_cascade(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    prefix_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_prefix_q: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    kv_scales: Scales = None,
    kv_dtype: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flashkernel.attention_cascade` for inference; works under torch.compile.

    q: [batch, heads_q, seq_q, head_dim], or with cu_seqlens_q [total_q, heads_q, head_dim]; float32, float16, bfloat16.
    k_pages, v_pages: [num_pages, page_size, heads_kv, head_dim or head_dim_v]; q's dtype, or fewer bits with kv_scales.
    prefix_table: int32 [groups, max_prefix_pages]; prefix_lens: int32 or int64 [groups], tokens of each prefix.
    block_table: int32 [batch, max_pages]; seq_lens: int32 or int64 [batch]: what follows the prefix.
    cu_prefix_q: int32 or int64 [groups + 1], the rows of q of each group; None: one group of all.

    Returns out (q's shape with head_dim_v, q's dtype), or (out, lse). Raises NotImplementedError where a gradient is
    needed, ValueError for arguments that don't fit.

    Source: Juravsky et al., Hydragen (2024); Ye et al., FlashInfer (2025).

    >>> import torch, flashkernel.torch as fkt
    >>> pages = torch.ones(4, 16, 2, 8)
    >>> prefix, tokens = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([32])
    >>> table, lengths = torch.tensor([[1], [3]], dtype=torch.int32), torch.tensor([7, 16])
    >>> fkt.attention_cascade(torch.ones(2, 4, 1, 8), pages, pages, prefix, tokens, table, lengths)[1, 0]
    tensor([[1., 1., 1., 1., 1., 1., 1., 1.]])
    """
    k_scales, v_scales = split_scales("attention_cascade", kv_scales)
    tensors = q, k_pages, v_pages, sinks, k_scales, v_scales
    if needs_gradient(*tensors):
        raise NotImplementedError(_NO_GRADIENT)
    arguments = q, k_pages, v_pages, prefix_table, prefix_lens, block_table, seq_lens
    if direct(*tensors):
        return fk.attention_cascade(
            *arguments,
            cu_prefix_q=cu_prefix_q,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            causal=causal,
            softcap=softcap,
            scale=scale,
            sinks=sinks,
            return_lse=return_lse,
            kv_scales=kv_scales,
            kv_dtype=kv_dtype,
        )
    refuse_tensor_scales("attention_cascade", kv_scales)
    out, lse = _cascade(
        *arguments,
        cu_prefix_q,
        cu_seqlens_q,
        max_seqlen_q,
        k_scales,
        v_scales,
        dtype_name(kv_dtype),
        sinks,
        causal,
        softcap,
        scale,
    )
    return (out, lse) if return_lse else out
