"""Multi-head latent attention over a paged cache, and writing its rows in 8 bits, for torch: inference alone."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

import flashkernel as fk

from ._library import define, direct, empty, one_number, refuse_gradient

__all__ = ["attention_mla_decode", "latent_append"]


def _kernel(
    q: Any,
    latent_pages: Any,
    block_table: Any,
    seq_lens: Any,
    scale: float,
    latent_scale: Any,
    head_dim_v: int,
    causal: bool,
) -> Any:
    return fk.attention_mla_decode(
        q,
        latent_pages,
        block_table,
        seq_lens,
        scale=scale,
        latent_scale=latent_scale,
        head_dim_v=head_dim_v,
        causal=causal,
        return_lse=True,
    )


def _fake(
    q: Any,
    latent_pages: Any,
    block_table: Any,
    seq_lens: Any,
    scale: float,
    latent_scale: Any,
    head_dim_v: int,
    causal: bool,
) -> Any:
    return q.new_empty((*q.shape[:-1], head_dim_v)), q.new_empty(q.shape[:-1], dtype=torch.float32)


_NO_GRADIENT = (
    "attention_mla_decode: an argument requires a gradient, and attention over a cache has none; "
    "call it under torch.no_grad() or use attention_varlen"
)
_mla = define(
    "attention_mla_decode(Tensor q, Tensor latent_pages, Tensor block_table, Tensor seq_lens, float scale, "
    "Tensor? latent_scale, SymInt head_dim_v, bool causal) -> (Tensor, Tensor)",
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
    latent_scale: torch.Tensor | float | None = None,
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
    latent_scale: torch.Tensor | float | None = None,
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
    latent_scale: torch.Tensor | float | None = None,
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
    latent_scale: torch.Tensor | float | None = None,
    head_dim_v: int = 512,
    causal: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flashkernel.attention_mla_decode` for inference; works under torch.compile.

    q: [batch, heads_q, seq_q, head_dim]; float32, float16 or bfloat16; head_dim 1 to 576.
    latent_pages: [num_pages, page_size, head_dim], q's dtype; the first head_dim_v columns are the values. Or rows of 8
       bits (torch.uint8 or torch.float8_e4m3fn): with their own scales (656 columns for DeepSeek), or [num_pages,
       page_size, head_dim] with latent_scale, a number or float32 of one element.
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
            latent_scale=latent_scale,
            head_dim_v=head_dim_v,
            causal=causal,
            return_lse=return_lse,
        )
    one = _one(latent_scale, q)
    out, lse = _mla(q, latent_pages, block_table, seq_lens, scale, one, head_dim_v, causal)
    return (out, lse) if return_lse else out


def _one(scale: torch.Tensor | float | None, like: torch.Tensor) -> torch.Tensor | None:
    """A scale as the ops of torch take it."""
    return one_number(scale, like) if isinstance(scale, float | int) else scale


def _append_kernel(latent: Any, key: Any, latent_pages: Any, slots: Any, latent_scale: Any) -> Any:
    fk.latent_append(latent, key, latent_pages, slots, latent_scale=latent_scale)
    return empty(latent)


def _append_fake(latent: Any, *others: Any) -> Any:
    return empty(latent)


_append = define(
    "latent_append(Tensor latent, Tensor key, Tensor(a!) latent_pages, Tensor slots, Tensor? latent_scale) -> Tensor",
    _append_kernel,
    _append_fake,
)


def latent_append(
    latent: torch.Tensor,
    key: torch.Tensor,
    latent_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    latent_scale: torch.Tensor | float | None = None,
) -> None:
    """`flashkernel.latent_append`: rounds latent rows to 8 bits and writes them in place; works under torch.compile.

    latent: [tokens, rank]; key: [tokens, turned]; float32, float16 or bfloat16.
    latent_pages: torch.uint8 or torch.float8_e4m3fn [num_pages, page_size, rank + 4 * groups + 2 * turned] with scales
       of 128 elements, or [num_pages, page_size, rank + turned] with latent_scale.
    slots: int32 or int64 [tokens]; negative: skipped.

    Raises NotImplementedError where a gradient is needed, ValueError for arguments that don't fit.

    >>> import torch, flashkernel.torch as fkt
    >>> pages = torch.zeros(1, 16, 656, dtype=torch.uint8)
    >>> fkt.latent_append(torch.ones(1, 512), torch.ones(1, 64), pages, torch.tensor([3]))
    >>> pages[0, 3, :512].view(torch.float8_e4m3fn)[:2].float() * pages[0, 3, 512:516].view(torch.float32)
    tensor([1., 1.])
    """
    if torch.is_grad_enabled() and (latent.requires_grad or key.requires_grad):
        raise NotImplementedError(
            "latent_append: an argument requires a gradient, and a cache has none; call it under torch.no_grad()"
        )
    if direct(latent, key, latent_pages):
        fk.latent_append(latent, key, latent_pages, slots, latent_scale=latent_scale)
        return
    _append(latent, key, latent_pages, slots, _one(latent_scale, latent))
