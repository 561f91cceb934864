"""A linear with the norm before it and what follows it, for torch, with the gradients of the ops that it stands for."""

from __future__ import annotations

from typing import Any

import torch

import flashkernel as fk

from ._library import define, direct
from .elementwise import _swiglu_backward
from .linear import _linear, linear_backward
from .norm import _layer_norm, _layer_norm_backward, _rms_norm, _rms_norm_backward

__all__ = ["fused_linear"]


def _kernel(
    x: Any,
    weight: Any,
    bias: Any,
    norm_weight: Any,
    norm_bias: Any,
    residual: Any,
    norm: str,
    eps: float,
    activation: str | None,
) -> Any:
    return fk.fused_linear(x, weight, bias, norm_weight, norm_bias, residual, norm=norm, eps=eps, activation=activation)


def _fake(
    x: Any,
    weight: Any,
    bias: Any,
    norm_weight: Any,
    norm_bias: Any,
    residual: Any,
    norm: str,
    eps: float,
    activation: str | None,
) -> Any:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if activation == "swiglu" else 1)))


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.norm, ctx.eps, ctx.activation = inputs
    ctx.save_for_backward(*tensors[:5])


def _grad(ctx: Any, grad_out: Any) -> Any:
    """Through the ops one after the other; what stands between them is computed again."""
    x, weight, bias, norm_weight, norm_bias = ctx.saved_tensors
    need_x, need_weight, need_bias, *need_norm, need_residual = ctx.needs_input_grad[:6]
    h, mean, rstd = x, None, None
    if norm_weight is not None and ctx.norm == "layer":
        h, _, mean, rstd = _layer_norm(x, None, norm_weight, norm_bias, ctx.eps, 0.0)
    elif norm_weight is not None:
        h, _, rstd = _rms_norm(x, None, norm_weight, ctx.eps, 0.0)
    grad, before, activation = grad_out, None, ctx.activation
    if activation is not None:
        before, _ = _linear(h, weight, bias, None, False)
    if activation == "swiglu":
        assert before is not None
        gate, up = before.chunk(2, -1)
        grad = torch.cat(_swiglu_backward(grad_out, gate, up), -1)
        before = activation = None
    of_norm = norm_weight is not None and (need_x or any(need_norm))
    kind = x.dtype if bias is None else bias.dtype
    needs = need_x or of_norm, need_weight, need_bias
    grad_x, grad_weight, grad_bias = linear_backward(grad, h, weight, before, activation, kind, *needs)
    grad_norm: tuple[Any, ...] = (None, None)
    if of_norm and ctx.norm == "layer":
        kind = x.dtype if norm_bias is None else norm_bias.dtype
        grad_x, *grad_norm = _layer_norm_backward(grad_x, x, norm_weight, mean, rstd, None, *need_norm, kind)
    elif of_norm:
        grad_x, grad_norm_weight = _rms_norm_backward(grad_x, x, norm_weight, rstd, None, need_norm[0])
        grad_norm = grad_norm_weight, None
    return (
        grad_x if need_x else None,
        grad_weight if need_weight else None,
        grad_bias if need_bias else None,
        *(grad if needed else None for grad, needed in zip(grad_norm, need_norm, strict=True)),
        grad_out if need_residual else None,
        None,
        None,
        None,
    )


_fused_linear = define(
    "fused_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, Tensor? residual, "
    "str norm, float eps, str? activation) -> Tensor",
    _kernel,
    _fake,
    backward=_grad,
    setup_context=_setup,
)


def fused_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    norm: str = "rms",
    eps: float = 1e-6,
    activation: str | None = None,
    constant_weights: bool = False,
) -> torch.Tensor:
    """activation(norm(x) weight^T + bias) + residual with gradients; `flashkernel.fused_linear` has the arguments.

    constant_weights counts where no gradient is recorded and nothing is traced.

    >>> import torch, flashkernel.torch as fkt
    >>> x, weight = torch.ones(2, 4, requires_grad=True), torch.ones(6, 4)
    >>> fkt.fused_linear(x, weight, norm_weight=torch.ones(4), activation="swiglu").sum().backward()
    >>> x.grad.shape
    torch.Size([2, 4])
    """
    tensors = x, weight, bias, norm_weight, norm_bias, residual
    if direct(*tensors):
        return fk.fused_linear(*tensors, norm=norm, eps=eps, activation=activation, constant_weights=constant_weights)
    return _fused_linear(*tensors, norm, eps, activation)
