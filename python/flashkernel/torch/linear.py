"""Linear with a fused activation, for torch, with its gradient."""

from __future__ import annotations

from typing import Any

import torch

import flashkernel as fk

from ._library import autocast, define, dense, direct, empty, no_second_derivative

__all__ = ["Linear", "linear"]


def _kernel(x: Any, weight: Any, bias: Any, activation: str | None, save: bool) -> Any:
    """`save`: also the pre-activation, which the gradient of an activation needs."""
    if activation is None or not save:
        return fk.linear(x, weight, bias, activation=activation), empty(x)
    return fk.linear(x, weight, bias, activation=activation, return_preactivation=True)


def _fake(x: Any, weight: Any, bias: Any, activation: str | None, save: bool) -> Any:
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return out, empty(x) if activation is None or not save else torch.empty_like(out)


def _backward_kernel(
    grad_out: Any,
    x: Any,
    weight: Any,
    preactivation: Any,
    activation: str | None,
    bias_dtype: Any,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> Any:
    grads = fk.linear_backward(
        dense(grad_out),
        x,
        weight,
        preactivation,
        activation=activation,
        need_x=need_x,
        need_weight=need_weight,
        need_bias=need_bias,
    )
    grad_x, grad_weight, grad_bias = (empty(x) if grad is None else grad for grad in grads)
    return grad_x, grad_weight, grad_bias.to(bias_dtype) if need_bias else grad_bias


def _backward_fake(
    grad_out: Any,
    x: Any,
    weight: Any,
    preactivation: Any,
    activation: str | None,
    bias_dtype: Any,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> Any:
    return (
        x.new_empty(x.shape) if need_x else empty(x),
        weight.new_empty(weight.shape) if need_weight else empty(x),
        x.new_empty(weight.shape[0], dtype=bias_dtype) if need_bias else empty(x),
    )


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, ctx.activation, _ = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, None if ctx.activation is None else output[1])
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, grad_out: Any, _: Any) -> Any:
    if grad_out is None:
        return None, None, None, None, None
    x, weight, preactivation = ctx.saved_tensors
    need = ctx.needs_input_grad[:3]
    grads = linear_backward(grad_out, x, weight, preactivation, ctx.activation, ctx.bias_dtype or x.dtype, *need)
    return *(grad if needed else None for grad, needed in zip(grads, need, strict=True)), None, None


linear_backward = define(
    "linear_backward(Tensor grad_out, Tensor x, Tensor weight, Tensor? preactivation, str? activation, "
    "ScalarType bias_dtype, bool need_x, "
    "bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor)",
    _backward_kernel,
    _backward_fake,
    backward=no_second_derivative("linear_backward"),
)
_linear = define(
    "linear(Tensor x, Tensor weight, Tensor? bias, str? activation, bool save) -> (Tensor, Tensor)",
    _kernel,
    _fake,
    backward=_grad,
    setup_context=_setup,
)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, activation: str | None = None
) -> torch.Tensor:
    """activation(x weight^T + bias) with gradients; `flashkernel.linear` has the shapes and the activations. Under
    torch.autocast in its dtype.

    >>> import torch, flashkernel.torch as fkt
    >>> weight = torch.ones(3, 4, requires_grad=True)
    >>> fkt.linear(torch.ones(2, 4), weight, activation="gelu_tanh").sum().backward()
    >>> weight.grad.shape
    torch.Size([3, 4])
    """
    x, weight, bias = autocast(x, weight, bias)
    if direct(x, weight, bias):
        return fk.linear(x, weight, bias, activation=activation)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    return _linear(x, weight, bias, activation, save)[0]


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` followed by `activation` (None, "gelu_tanh", "gelu" or "silu") in one kernel."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, activation: str | None = None, **kwargs: Any
    ):
        super().__init__(in_features, out_features, bias, **kwargs)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias, activation=self.activation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}"
