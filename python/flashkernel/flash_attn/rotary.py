"""`flash_attn.layers.rotary`'s functions over FlashKernel's RoPE from tables. Source: Su et al., RoFormer (2021)."""

from __future__ import annotations

from typing import Any

import torch

import flashkernel as fk
import flashkernel.torch as fkt

from ..torch._library import dense, direct, refuse_transforms
from ._cache import token_places
from ._errors import ArgumentError

__all__ = [
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
]


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """x with the first rotary_dim elements of each head rotated by its position; gradients of x, not of the tables.

    x: [batch, seq, heads, head_dim], or with cu_seqlens [total, heads, head_dim].
    cos, sin: [positions, rotary_dim / 2]; float32, or x's dtype.
    interleaved: pairs (2p, 2p + 1) instead of (p, p + rotary_dim / 2).
    inplace: into x itself, a leaf too, as the package has it.
    seqlen_offsets: int, or [batch]: the position of each sequence's first token.
    max_seqlen: accepted.

    Returns the rotated tensor, x itself with inplace. Raises ValueError for arguments that don't fit; on the CPU also
    for positions outside the tables.

    >>> import torch
    >>> from flashkernel.flash_attn.rotary import apply_rotary_emb
    >>> x, zero, one = torch.ones(1, 1, 1, 4), torch.zeros(3, 2), torch.ones(3, 2)
    >>> apply_rotary_emb(x, zero, one, seqlen_offsets=2).flatten()
    tensor([-1., -1.,  1.,  1.])
    """
    dims = 4 if cu_seqlens is None else 3
    if x.dim() != dims:
        layout = "[batch, seq, heads, head_dim]" if dims == 4 else "[total, heads, head_dim] beside cu_seqlens"
        raise ArgumentError(f"apply_rotary_emb: x has shape {list(x.shape)}; {layout} is needed")
    if inplace:
        return _in_place("apply_rotary_emb", x, [(cos, sin)], interleaved, seqlen_offsets, cu_seqlens, _whole)
    cos, sin, positions = _places("apply_rotary_emb", x, cos, sin, seqlen_offsets, cu_seqlens)
    if direct(x, cos, sin):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        fk.rope_table(_heads_first(dense(x)), None, cos, sin, positions, interleaved=interleaved, out=_heads_first(out))
        return out
    turned = fkt.rope_table(_heads_first(dense(x)), None, cos, sin, positions, interleaved=interleaved)
    return (turned.transpose(1, 2) if dims == 4 else turned[0].transpose(0, 1)).contiguous()


def _heads_first(x: Any) -> Any:
    """[batch, heads, seq, head_dim] of tokens in flash-attn's layouts, a view."""
    return x.transpose(1, 2) if x.dim() == 4 else x.transpose(0, 1)[None]


def _places(op: str, x: Any, cos: Any, sin: Any, offsets: Any, cu_seqlens: Any) -> tuple[Any, Any, Any]:
    """The tables and the positions of x's tokens in them; None: 0, 1, 2, ..."""
    if cos.dtype != sin.dtype or cos.shape != sin.shape:
        raise ArgumentError(
            f"{op}: cos {list(cos.shape)} {cos.dtype} but sin {list(sin.shape)} {sin.dtype}; they must be alike"
        )
    if cu_seqlens is not None:
        sequence, index = token_places(cu_seqlens, x.shape[0])
        return cos, sin, index + (offsets.long()[sequence] if isinstance(offsets, torch.Tensor) else offsets)
    if isinstance(offsets, torch.Tensor):
        return cos, sin, offsets.long()[:, None] + torch.arange(x.shape[1], device=x.device)
    return (cos[offsets:], sin[offsets:], None) if offsets else (cos, sin, None)


def _whole(x: Any) -> tuple[Any, ...]:
    return (x,)


class _InPlace(torch.autograd.Function):
    """Rotates parts of a tensor where they lie, also of a leaf: backward needs the tables alone."""

    @staticmethod
    def forward(ctx: Any, x: Any, parts: Any, interleaved: bool, positions: Any, *tables: Any) -> Any:
        ctx.parts, ctx.interleaved, ctx.positions = parts, interleaved, positions
        ctx.save_for_backward(*tables)
        _turn(parts(x), tables, positions, interleaved, False)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        _turn(ctx.parts(grad), ctx.saved_tensors, ctx.positions, ctx.interleaved, True)
        return grad, None, None, None, *(None for _ in ctx.saved_tensors)


def _turn(parts: Any, tables: Any, positions: Any, interleaved: bool, inverse: bool) -> None:
    for part, cos, sin in zip(parts, tables[::2], tables[1::2], strict=True):
        view = _heads_first(part.detach())
        if direct(view) and view.stride(-1) == 1:
            fk.rope_table(view, None, cos, sin, positions, interleaved=interleaved, inverse=inverse, out=view)
        else:
            view.copy_(fkt.rope_table(dense(view), None, cos, sin, positions, interleaved=interleaved, inverse=inverse))


def _in_place(
    op: str, x: Any, tables: Any, interleaved: bool, offsets: Any, cu_seqlens: Any, parts: Any
) -> torch.Tensor:
    """Rotates `parts(x)`, one pair of tables for each, and returns x."""
    refuse_transforms(op, x, *(table for pair in tables for table in pair))
    if torch.is_grad_enabled() and any(table.requires_grad for pair in tables for table in pair):
        raise NotImplementedError(f"{op}: cos or sin requires a gradient, and this op has none of it; detach it")
    placed: list[Any] = []
    positions = None
    for cos, sin in tables:
        cos, sin, positions = _places(op, parts(x)[0], cos, sin, offsets, cu_seqlens)
        placed += [cos, sin]
    if torch.is_grad_enabled() and x.requires_grad:
        return _InPlace.apply(x, parts, interleaved, positions, *placed)
    _turn(parts(x), placed, positions, interleaved, False)
    return x


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    num_heads_q: int | None = None,
) -> torch.Tensor:
    """Rotates q and k of qkv [batch, seq, 3, heads, head_dim], or [batch, seq, heads_q + 2 * heads_kv, head_dim] with
    num_heads_q, in place, and returns it. cos_k, sin_k: other tables for k.

    >>> import torch
    >>> from flashkernel.flash_attn.rotary import apply_rotary_emb_qkv_
    >>> apply_rotary_emb_qkv_(torch.ones(1, 1, 3, 1, 2), torch.zeros(1, 1), torch.ones(1, 1)).flatten()
    tensor([-1.,  1., -1.,  1.,  1.,  1.])
    """
    if qkv.dim() == 5 and qkv.shape[2] == 3:

        def parts(x: Any) -> tuple[Any, ...]:
            return x[:, :, 0], x[:, :, 1]

    elif qkv.dim() == 4 and num_heads_q is not None:
        heads_qk = num_heads_q + (qkv.shape[2] - num_heads_q) // 2

        def parts(x: Any) -> tuple[Any, ...]:
            return x[:, :, :num_heads_q], x[:, :, num_heads_q:heads_qk]

    else:
        raise ArgumentError(
            f"apply_rotary_emb_qkv_: qkv has shape {list(qkv.shape)}, num_heads_q={num_heads_q}; [batch, seq, 3, "
            "heads, head_dim] is needed, or [batch, seq, heads_q + 2 * heads_kv, head_dim] with num_heads_q"
        )
    tables = (cos, sin), (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
    return _in_place("apply_rotary_emb_qkv_", qkv, tables, interleaved, seqlen_offsets, None, parts)


def apply_rotary_emb_kv_(
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
) -> torch.Tensor:
    """Rotates k of kv [batch, seq, 2, heads, head_dim] in place, and returns it.

    >>> import torch
    >>> from flashkernel.flash_attn.rotary import apply_rotary_emb_kv_
    >>> apply_rotary_emb_kv_(torch.ones(1, 1, 2, 1, 2), torch.zeros(1, 1), torch.ones(1, 1)).flatten()
    tensor([-1.,  1.,  1.,  1.])
    """
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ArgumentError(
            f"apply_rotary_emb_kv_: kv has shape {list(kv.shape)}; [batch, seq, 2, heads, head_dim] is needed"
        )
    return _in_place(
        "apply_rotary_emb_kv_", kv, [(cos, sin)], interleaved, seqlen_offsets, None, lambda x: (x[:, :, 0],)
    )


def apply_rotary_emb_torch(x: Any, cos: Any, sin: Any, interleaved: bool = False) -> Any:
    """The same rotation by torch's own ops, for comparisons: x [batch, seq, heads, head_dim], cos and sin [seq,
    rotary_dim / 2] or [batch, seq, rotary_dim / 2].
    """
    half = cos.shape[-1]
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.split(half, -1)
    turned = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([joined, rest], -1)
