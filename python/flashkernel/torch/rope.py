"""RoPE for torch, by in-kernel sin and cos or from tables; its gradient is the inverse rotation."""

from __future__ import annotations

from typing import Any, overload

import torch

import flashkernel as fk

from ._library import define, dense, direct, empty

__all__ = ["rope", "rope_table"]


def _pair(result: Any, q: Any, k: Any) -> Any:
    return (result, empty(q)) if k is None else result


def _fake(q: Any, k: Any, *_: Any) -> Any:
    return q.new_empty(q.shape), empty(q) if k is None else k.new_empty(k.shape)


def _grads(rotate_back: Any, ctx: Any, grad_q: Any, grad_k: Any) -> Any:
    """Gradients of q and k by `rotate_back(q, k)`, where either gradient may be missing."""
    grad_k = grad_k if ctx.has_k else None
    if grad_q is None:
        return None, None if grad_k is None else rotate_back(grad_k, None)[0]
    result = rotate_back(grad_q, grad_k)
    return result[0], None if grad_k is None else result[1]


def _rope_kernel(
    q: Any,
    k: Any,
    positions: Any,
    inv_freq: Any,
    theta: float,
    rotary_dim: int | None,
    interleaved: bool,
    inverse: bool,
) -> Any:
    return _pair(
        fk.rope(
            dense(q),
            dense(k),
            positions,
            inv_freq=inv_freq,
            theta=theta,
            rotary_dim=rotary_dim,
            interleaved=interleaved,
            inverse=inverse,
        ),
        q,
        k,
    )


def _rope_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, k, positions, inv_freq, ctx.theta, ctx.rotary_dim, ctx.interleaved, ctx.inverse = inputs
    ctx.has_k = k is not None
    ctx.save_for_backward(positions, inv_freq)
    ctx.set_materialize_grads(False)


def _rope_grad(ctx: Any, grad_q: Any, grad_k: Any) -> Any:
    positions, inv_freq = ctx.saved_tensors

    def back(q: Any, k: Any) -> Any:
        return _rope(q, k, positions, inv_freq, ctx.theta, ctx.rotary_dim, ctx.interleaved, not ctx.inverse)

    return *_grads(back, ctx, grad_q, grad_k), None, None, None, None, None, None


_rope = define(
    "rope(Tensor q, Tensor? k, Tensor? positions, Tensor? inv_freq, float theta, SymInt? rotary_dim, bool "
    "interleaved, bool inverse) -> (Tensor, Tensor)",
    _rope_kernel,
    _fake,
    backward=_rope_grad,
    setup_context=_rope_setup,
    constants=("inv_freq",),
)


@overload
def rope(
    q: torch.Tensor,
    k: None = None,
    positions: torch.Tensor | None = None,
    *,
    theta: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    inv_freq: torch.Tensor | None = None,
) -> torch.Tensor: ...


@overload
def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    theta: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    inv_freq: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def rope(
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    *,
    theta: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    inv_freq: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flashkernel.rope` with gradients: rotates q (and k) [batch, heads, seq, head_dim] by their positions."""
    if direct(q, k, inv_freq):
        return fk.rope(
            q,
            k,
            positions,
            theta=theta,
            rotary_dim=rotary_dim,
            interleaved=interleaved,
            inverse=inverse,
            inv_freq=inv_freq,
        )
    q_out, k_out = _rope(q, k, positions, inv_freq, theta, rotary_dim, interleaved, inverse)
    return q_out if k is None else (q_out, k_out)


def _table_kernel(q: Any, k: Any, cos: Any, sin: Any, positions: Any, interleaved: bool, inverse: bool) -> Any:
    return _pair(fk.rope_table(dense(q), dense(k), cos, sin, positions, interleaved=interleaved, inverse=inverse), q, k)


def _table_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, k, cos, sin, positions, ctx.interleaved, ctx.inverse = inputs
    ctx.has_k = k is not None
    ctx.save_for_backward(cos, sin, positions)
    ctx.set_materialize_grads(False)


def _table_grad(ctx: Any, grad_q: Any, grad_k: Any) -> Any:
    cos, sin, positions = ctx.saved_tensors

    def back(q: Any, k: Any) -> Any:
        return _rope_table(q, k, cos, sin, positions, ctx.interleaved, not ctx.inverse)

    return *_grads(back, ctx, grad_q, grad_k), None, None, None, None, None


_rope_table = define(
    "rope_table(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? positions, bool interleaved, bool inverse) "
    "-> (Tensor, Tensor)",
    _table_kernel,
    _fake,
    backward=_table_grad,
    setup_context=_table_setup,
    constants=("cos", "sin"),
)


@overload
def rope_table(
    q: torch.Tensor,
    k: None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    inverse: bool = False,
) -> torch.Tensor: ...


@overload
def rope_table(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    inverse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def rope_table(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    inverse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flashkernel.rope_table` with gradients of q and k (not of the tables)."""
    if direct(q, k, cos, sin):
        return fk.rope_table(q, k, cos, sin, positions, interleaved=interleaved, inverse=inverse)
    q_out, k_out = _rope_table(q, k, cos, sin, positions, interleaved, inverse)
    return q_out if k is None else (q_out, k_out)
