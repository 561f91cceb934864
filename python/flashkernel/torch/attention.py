"""Attention for torch: dense and variable-length, with gradients (bias, sinks and LSE included).

Shapes and options are those of `flashkernel.attention` and its siblings. Attention over a cache: kv_cache.py.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

import flashkernel as fk
from flashkernel.attention_options import AttentionOptions
from flashkernel.masks import BlockMask

from ._attention_options import DENSE, NUM_DENSE, NUM_VARLEN, VARLEN, from_schema, to_dense_schema, to_schema
from ._library import autocast, define, dense, direct, empty, like, no_second_derivative

__all__ = ["attention", "attention_varlen", "pack_mask"]

_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"


# --- dense


def _new_out(q: Any, v: Any) -> Any:
    """The output, in q's order of dims where it has q's shape."""
    return like(q) if v.shape[-1] == q.shape[-1] else q.new_empty((*q.shape[:-1], v.shape[-1]))


def _attention_kernel(q: Any, k: Any, v: Any, *options: Any) -> Any:
    return fk.attention(q, k, v, **from_schema(*options), return_lse=True, out=_new_out(q, v))


def _attention_fake(q: Any, k: Any, v: Any, *options: Any) -> Any:
    return _new_out(q, v), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _attention_backward_kernel(
    grad_out: Any,
    grad_lse: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *others: Any,
) -> Any:
    *options, need_bias, need_sinks, deterministic = others
    grads = list(
        fk.attention_backward(
            dense(grad_out),
            q,
            k,
            v,
            out,
            lse,
            grad_lse=dense(grad_lse),
            **from_schema(*options),
            need_bias=need_bias,
            need_sinks=need_sinks,
            deterministic=deterministic,
            grads=(like(q), like(k), like(v)),
        )
    )
    grad_q, grad_k, grad_v, *rest = grads
    grad_bias = rest.pop(0) if need_bias else empty(q)
    return grad_q, grad_k, grad_v, grad_bias, rest.pop(0) if need_sinks else empty(q)


def _attention_backward_fake(grad_out: Any, grad_lse: Any, q: Any, k: Any, v: Any, *others: Any) -> Any:
    bias, sinks = others[2], others[6]
    need_bias, need_sinks = others[-3:-1]
    return (
        like(q),
        like(k),
        like(v),
        bias.new_empty(bias.shape) if need_bias else empty(q),
        sinks.new_empty(sinks.shape) if need_sinks else empty(q),
    )


def _attention_setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, bias, mask, block_mask, alibi_slopes, sinks, *options = inputs
    ctx.save_for_backward(q, k, v, *output, bias, mask, block_mask, alibi_slopes, sinks)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _attention_grad(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    if grad_out is None and grad_lse is None:
        return (None,) * (3 + NUM_DENSE)
    need_bias, need_sinks = ctx.needs_input_grad[3], ctx.needs_input_grad[7]
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grads = _attention_backward(
        grad_out, grad_lse, q, k, v, out, lse, *tensors, *ctx.options, need_bias, need_sinks, True
    )
    of_options = grads[3] if need_bias else None, None, None, None, grads[4] if need_sinks else None
    return *grads[:3], *of_options, *(None,) * (NUM_DENSE - len(of_options))


_attention_backward = define(
    f"attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor "
    f"lse, {DENSE}, "
    "bool need_bias, bool need_sinks, bool deterministic) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _attention_backward_kernel,
    _attention_backward_fake,
    backward=no_second_derivative("attention_backward"),
)
_attention = define(
    f"attention(Tensor q, Tensor k, Tensor v, {DENSE}) -> (Tensor, Tensor)",
    _attention_kernel,
    _attention_fake,
    backward=_attention_grad,
    setup_context=_attention_setup,
    constants=("alibi_slopes",),
)


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    block_mask: torch.Tensor | BlockMask | None = None,
    block_size: int | tuple[int, int] = 128,
    alibi_slopes: torch.Tensor | None = None,
    alibi: str = "distance",
    sinks: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    block_mask: torch.Tensor | BlockMask | None = None,
    block_size: int | tuple[int, int] = 128,
    alibi_slopes: torch.Tensor | None = None,
    alibi: str = "distance",
    sinks: torch.Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    block_mask: torch.Tensor | BlockMask | None = None,
    block_size: int | tuple[int, int] = 128,
    alibi_slopes: torch.Tensor | None = None,
    alibi: str = "distance",
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    block_mask: torch.Tensor | BlockMask | None = None,
    block_size: int | tuple[int, int] = 128,
    alibi_slopes: torch.Tensor | None = None,
    alibi: str = "distance",
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flashkernel.attention` with gradients of q, k, v, bias and sinks, also through the LSE; works under
    torch.compile, and under torch.autocast in its dtype. `mask` is what `pack_mask` gives; `block_mask` a tensor of
    blocks, or a `flashkernel.masks.BlockMask` of tensors on q's device.

    Heads come before seq: [batch, heads, seq, head_dim], as in torch's scaled_dot_product_attention. Tensors in
    flash-attn's order [batch, seq, heads, head_dim] are passed as ``q.transpose(1, 2)``, a view that costs nothing.

    The output's dims lie in memory in q's order, a gradient's in
    its tensor's: views of a projection [batch, seq, heads * dim] join again without a copy.

    >>> import torch, flashkernel.torch as fkt
    >>> q = torch.ones(1, 2, 4, 8, requires_grad=True)
    >>> fkt.attention(q, q, q, causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 2, 4, 8])
    """
    q, k, v = autocast(q, k, v)
    if isinstance(block_mask, BlockMask):
        if mask is not None and block_mask.mask is not None:
            raise ValueError("attention: mask is given, but block_mask has one already")
        mask = block_mask.mask if mask is None else mask
        blocks, block_size, _ = block_mask
    else:
        blocks = block_mask
    if direct(q, k, v, bias, mask, blocks, alibi_slopes, sinks):
        return fk.attention(
            q,
            k,
            v,
            bias=bias,
            mask=mask,
            block_mask=blocks,
            block_size=block_size,
            alibi_slopes=alibi_slopes,
            alibi=alibi,
            sinks=sinks,
            causal=causal,
            window=window,
            softcap=softcap,
            scale=scale,
            return_lse=return_lse,
            out=None if q.is_contiguous() else _new_out(q, v),
        )
    options = AttentionOptions(
        causal, window, softcap, scale, alibi_slopes, sinks, bias, mask, alibi, blocks, block_size
    )
    out, lse = _attention(q, k, v, *to_dense_schema(options))
    return (out, lse) if return_lse else out


# --- packed masks


def _pack_kernel(mask: Any) -> Any:
    return fk.pack_mask(mask)


def _pack_fake(mask: Any) -> Any:
    return mask.new_empty((*mask.shape[:-1], (mask.shape[-1] + 31) // 32), dtype=torch.int32)


_pack = define("pack_mask(Tensor mask) -> Tensor", _pack_kernel, _pack_fake)


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    """`flashkernel.pack_mask`: a bool tensor [..., seq_k] as the bits that `attention` reads, int32
    [..., (seq_k + 31) // 32]; works under torch.compile.

    >>> import torch, flashkernel.torch as fkt
    >>> fkt.pack_mask(torch.tensor([[True, False, True]]))
    tensor([[5]], dtype=torch.int32)
    """
    return fk.pack_mask(mask) if direct(mask) else _pack(mask)


# --- variable length


def _varlen_kernel(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
) -> Any:
    return fk.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        **from_schema(*options),
        return_lse=True,
    )


def _varlen_fake(q: Any, k: Any, v: Any, *options: Any) -> Any:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _varlen_backward_kernel(
    grad_out: Any,
    grad_lse: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *others: Any,
) -> Any:
    *options, need_sinks, deterministic = others
    grads = fk.attention_varlen_backward(
        dense(grad_out),
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        grad_lse=dense(grad_lse),
        **from_schema(*options),
        need_sinks=need_sinks,
        deterministic=deterministic,
    )
    return *grads[:3], grads[3] if need_sinks else empty(q)


def _varlen_backward_fake(grad_out: Any, grad_lse: Any, q: Any, k: Any, v: Any, *others: Any) -> Any:
    sinks, need_sinks = others[7], others[-2]
    grad_sinks = sinks.new_empty(sinks.shape) if need_sinks else empty(q)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_sinks


def _varlen_setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, ctx.max_seqlen_q, ctx.max_seqlen_k, alibi_slopes, sinks, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks)
    ctx.set_materialize_grads(False)


def _varlen_grad(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks = ctx.saved_tensors
    if grad_out is None and grad_lse is None:
        return (None,) * (7 + NUM_VARLEN)
    need_sinks = ctx.needs_input_grad[8]
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grads = _varlen_backward(
        grad_out,
        grad_lse,
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens_q,
        cu_seqlens_k,
        ctx.max_seqlen_q,
        ctx.max_seqlen_k,
        alibi_slopes,
        sinks,
        *ctx.options,
        need_sinks,
        True,
    )
    of_options = None, grads[3] if need_sinks else None
    return *grads[:3], *(None,) * 4, *of_options, *(None,) * (NUM_VARLEN - len(of_options))


_varlen_backward = define(
    f"attention_varlen_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, {_LENGTHS}, "
    f"{VARLEN}, bool need_sinks, bool deterministic) -> (Tensor, Tensor, Tensor, Tensor)",
    _varlen_backward_kernel,
    _varlen_backward_fake,
    backward=no_second_derivative("attention_varlen_backward"),
)
_varlen = define(
    f"attention_varlen(Tensor q, Tensor k, Tensor v, {_LENGTHS}, {VARLEN}) -> (Tensor, Tensor)",
    _varlen_kernel,
    _varlen_fake,
    backward=_varlen_grad,
    setup_context=_varlen_setup,
    constants=("alibi_slopes",),
)


@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    alibi: str = "distance",
    sinks: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    alibi: str = "distance",
    sinks: torch.Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    alibi: str = "distance",
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    alibi: str = "distance",
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flashkernel.attention_varlen` with gradients of q, k, v and sinks, also through the LSE; works under
    torch.compile, and under torch.autocast in its dtype.
    """
    q, k, v = autocast(q, k, v)
    if direct(q, k, v, alibi_slopes, sinks):
        return fk.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            alibi_slopes=alibi_slopes,
            alibi=alibi,
            sinks=sinks,
            causal=causal,
            window=window,
            softcap=softcap,
            scale=scale,
            return_lse=return_lse,
        )
    options = AttentionOptions(causal, window, softcap, scale, alibi_slopes, sinks, alibi=alibi)
    out, lse = _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *to_schema(options))
    return (out, lse) if return_lse else out
