"""Linear in 8-bit floats for torch, with the gradients of x and of the bias; and what makes 8 bits of an x."""

from __future__ import annotations

from typing import Any

import torch

import flashkernel as fk

from ._library import define, direct
from .linear import linear_backward

__all__ = ["linear_fp8", "quantize_fp8_blocks"]

BLOCK = 128


BITS = (torch.float8_e4m3fn, torch.uint8)  # bytes are read as float8


def _dtype(x: Any, out_dtype: Any) -> Any:
    return out_dtype or (torch.bfloat16 if x.dtype in BITS else x.dtype)


def _kernel(
    x: Any, weight: Any, x_scale: Any, weight_scale: Any, bias: Any, activation: str | None, out_dtype: Any
) -> Any:
    return fk.linear_fp8(x, weight, x_scale, weight_scale, bias, activation=activation, out_dtype=out_dtype)


def _fake(
    x: Any, weight: Any, x_scale: Any, weight_scale: Any, bias: Any, activation: str | None, out_dtype: Any
) -> Any:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=_dtype(x, out_dtype))


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.activation, ctx.out_dtype = inputs
    if ctx.needs_input_grad[0] and tensors[0].dtype == torch.float8_e4m3fn:
        raise NotImplementedError(
            "linear_fp8: x in float8_e4m3fn requires a gradient; give x in more bits, which is rounded on the way"
        )
    ctx.save_for_backward(*tensors)


def dequantize_weight(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of a weight that `linear_fp8` takes.

    weight: [out_features, in_features] float8_e4m3fn, or its bits in uint8; scale: as there.
    Returns them in `dtype`, rounded once.
    """
    rows, columns = weight.shape
    weight = weight.view(torch.float8_e4m3fn)
    wide = scale.float()
    if wide.dim() == 2 and wide.shape != (rows, 1):
        if wide.shape[0] != rows:
            wide = wide.repeat_interleave(BLOCK, 0)[:rows]
        if wide.shape[1] != 1:
            wide = wide.repeat_interleave(BLOCK, 1)[:, :columns]
    elif wide.numel() == rows:
        wide = wide.reshape(rows, 1)
    return (weight.float() * wide).to(dtype)


def _grad(ctx: Any, grad_out: Any) -> Any:
    x, weight, x_scale, weight_scale, bias = ctx.saved_tensors
    need_x, *_, need_bias = ctx.needs_input_grad[:5]
    before = None
    if ctx.activation is not None:
        before = _linear_fp8(x, weight, x_scale, weight_scale, bias, None, ctx.out_dtype)
    kind = grad_out.dtype if bias is None else bias.dtype
    wide = dequantize_weight(weight, weight_scale, grad_out.dtype)
    # The product's gradient asks for x's shape and dtype alone where the weight is a constant.
    like = x if x.dtype == grad_out.dtype else grad_out.new_empty(x.shape)
    grad_x, _, grad_bias = linear_backward(grad_out, like, wide, before, ctx.activation, kind, need_x, False, need_bias)
    return grad_x.to(x.dtype) if need_x else None, None, None, None, grad_bias if need_bias else None, None, None


_linear_fp8 = define(
    "linear_fp8(Tensor x, Tensor weight, Tensor? x_scale, Tensor weight_scale, Tensor? bias, str? activation, "
    "ScalarType? out_dtype) -> Tensor",
    _kernel,
    _fake,
    backward=_grad,
    setup_context=_setup,
    constants=("weight", "x_scale", "weight_scale"),
)


def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`flashkernel.linear_fp8` with the gradients of x (of more than 8 bits, as if it were not rounded) and of the
    bias; the weight is a constant.

    Raises NotImplementedError where the weight or a scale requires a gradient.

    >>> import torch, flashkernel.torch as fkt
    >>> x = torch.ones(2, 128, requires_grad=True)
    >>> weight = torch.ones(3, 128).to(torch.float8_e4m3fn)
    >>> fkt.linear_fp8(x, weight, None, torch.full((1, 1), 0.5)).sum().backward()
    >>> x.grad[0, :2].tolist()
    [1.5, 1.5]
    """
    if direct(x, weight, x_scale, weight_scale, bias):
        return _kernel(x, weight, x_scale, weight_scale, bias, activation, out_dtype)
    return _linear_fp8(x, weight, x_scale, weight_scale, bias, activation, out_dtype)


def _quantize(x: Any) -> Any:
    return fk.quantize_fp8_blocks(x)


def _fake_quantize(x: Any) -> Any:
    scales = (*x.shape[:-1], (x.shape[-1] + BLOCK - 1) // BLOCK)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(scales, dtype=torch.float32)


_quantize_fp8_blocks = define("quantize_fp8_blocks(Tensor x) -> (Tensor, Tensor)", _quantize, _fake_quantize)


def quantize_fp8_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`flashkernel.quantize_fp8_blocks`: (elements, scales). No gradient: raises NotImplementedError where one is asked
    for.

    >>> import torch, flashkernel.torch as fkt
    >>> elements, scales = fkt.quantize_fp8_blocks(torch.ones(2, 256))
    >>> elements.dtype, scales.shape
    (torch.float8_e4m3fn, torch.Size([2, 2]))
    """
    if direct(x):
        return fk.quantize_fp8_blocks(x)
    return _quantize_fp8_blocks(x)
