"""Linear with a weight in few bits, for torch, with the gradients of x and of the bias."""

from __future__ import annotations

from typing import Any

import torch

import flashkernel as fk

from ..quantized import dequantize_tensor
from ._library import define, direct
from .linear import linear_backward

__all__ = ["quantized_linear"]


def _kernel(x: Any, weight: Any, scales: Any, zeros: Any, bias: Any, format: str, activation: str | None) -> Any:
    return fk.quantized_linear(x, weight, scales, zeros, bias, format=format, activation=activation)


def _fake(x: Any, weight: Any, scales: Any, zeros: Any, bias: Any, format: str, activation: str | None) -> Any:
    return x.new_empty((*x.shape[:-1], weight.shape[0] * (16 if weight.dim() == 3 else 1)))


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.format, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _grad(ctx: Any, grad_out: Any) -> Any:
    x, weight, scales, zeros, bias = ctx.saved_tensors
    need_x, *_, need_bias = ctx.needs_input_grad[:5]
    before = None
    if ctx.activation is not None:
        before = _quantized_linear(x, weight, scales, zeros, bias, ctx.format, None)
    wide = dequantize_tensor(weight, scales, zeros, ctx.format, x.dtype)
    kind = x.dtype if bias is None else bias.dtype
    grad_x, _, grad_bias = linear_backward(grad_out, x, wide, before, ctx.activation, kind, need_x, False, need_bias)
    return (grad_x if need_x else None, None, None, None, grad_bias if need_bias else None, None, None)


_quantized_linear = define(
    "quantized_linear(Tensor x, Tensor weight, Tensor? scales, Tensor? zeros, Tensor? bias, str format, "
    "str? activation) -> Tensor",
    _kernel,
    _fake,
    backward=_grad,
    setup_context=_setup,
    constants=("weight", "scales", "zeros"),
)


def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    format: str = "int4",
    activation: str | None = None,
) -> torch.Tensor:
    """`flashkernel.quantized_linear` with the gradients of x and of the bias; the weight is a constant.

    Raises NotImplementedError where scales or zeros require a gradient.

    >>> import torch, flashkernel.torch as fkt
    >>> x = torch.ones(2, 32, requires_grad=True)
    >>> weight = torch.full((3, 16), 0x99, dtype=torch.uint8)  # every element is 9
    >>> fkt.quantized_linear(x, weight, torch.full((3, 1), 0.5)).sum().backward()
    >>> x.grad[0, :2].tolist()
    [1.5, 1.5]
    """
    if direct(x, weight, scales, zeros, bias):
        return _kernel(x, weight, scales, zeros, bias, format, activation)
    return _quantized_linear(x, weight, scales, zeros, bias, format, activation)
