"""Multi-head latent attention over a paged cache, for torch: inference alone."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

import flashkernel as fk

from ._library import define, direct, refuse_gradient

__all__ = ["attention_mla_decode"]


def _kernel(
    q: Any, latent_pages: Any, block_table: Any, seq_lens: Any, scale: float, head_dim_v: int, causal: bool
) -> Any:
    return fk.attention_mla_decode(
        q, latent_pages, block_table, seq_lens, scale=scale, head_dim_v=head_dim_v, causal=causal, return_lse=True
    )


def _fake(
    q: Any, latent_pages: Any, block_table: Any, seq_lens: Any, scale: float, head_dim_v: int, causal: bool
) -> Any:
    return q.new_empty((*q.shape[:-1], head_dim_v)), q.new_empty(q.shape[:-1], dtype=torch.float32)


_NO_GRADIENT = (
    "attention_mla_decode: an argument requires a gradient, and attention over a cache has none; "
    "call it under torch.no_grad() or use attention_varlen"
)
_mla = define(
    "attention_mla_decode(Tensor q, Tensor latent_pages, Tensor block_table, Tensor seq_lens, float scale, "
    "int head_dim_v, bool causal) -> (Tensor, Tensor)",
    _kernel,
    _fake,
    backward=refuse_gradient(_NO_GRADIENT),
)


@overload
def attention_mla_decode(
    q: torch.Tensor,
    latent_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    head_dim_v: int = 512,
    causal: bool = False,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def attention_mla_decode(
    q: torch.Tensor,
    latent_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    head_dim_v: int = 512,
    causal: bool = False,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention_mla_decode(
    q: torch.Tensor,
    latent_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    head_dim_v: int = 512,
    causal: bool = False,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def attention_mla_decode(
    q: torch.Tensor,
    latent_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    head_dim_v: int = 512,
    causal: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flashkernel.attention_mla_decode` for inference; works under torch.compile.

    q: [batch, heads_q, seq_q, head_dim]; float32, float16 or bfloat16; head_dim 1 to 576.
    latent_pages: [num_pages, page_size, head_dim], q's dtype; the first head_dim_v columns are the values.
    block_table: int32 [batch, max_pages]; seq_lens: int32 or int64 [batch].
    scale: what scores are multiplied with. causal: query i stands at position i + seq_lens[b] - seq_q.

    Returns out [batch, heads_q, seq_q, head_dim_v], or (out, lse). Raises NotImplementedError where a gradient is
    needed, ValueError for arguments that don't fit.

    Source: DeepSeek-AI, DeepSeek-V2 (2024).

    >>> import torch, flashkernel.torch as fkt
    >>> pages = torch.ones(3, 16, 24)
    >>> table, lengths = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([20])
    >>> fkt.attention_mla_decode(torch.ones(1, 4, 1, 24), pages, table, lengths, scale=0.2, head_dim_v=3)[0, 0]
    tensor([[1., 1., 1.]])
    """
    if torch.is_grad_enabled() and (q.requires_grad or latent_pages.requires_grad):
        raise NotImplementedError(_NO_GRADIENT)
    if direct(q, latent_pages):
        return fk.attention_mla_decode(
            q,
            latent_pages,
            block_table,
            seq_lens,
            scale=scale,
            head_dim_v=head_dim_v,
            causal=causal,
            return_lse=return_lse,
        )
    out, lse = _mla(q, latent_pages, block_table, seq_lens, scale, head_dim_v, causal)
    return (out, lse) if return_lse else out
