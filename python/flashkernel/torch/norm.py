"""LayerNorm and RMSNorm for torch, with the fused residual add, and their gradients."""

from __future__ import annotations

from typing import Any, overload

import torch

import flashkernel as fk

from ._library import define, dense, direct, empty, no_second_derivative

__all__ = ["RMSNorm", "layer_norm", "layer_norm_quantized", "rms_norm", "rms_norm_quantized"]


def _stats(x: Any) -> Any:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


# --- LayerNorm


def _layer_norm_kernel(x: Any, residual: Any, weight: Any, bias: Any, eps: float, weight_offset: float = 0.0) -> Any:
    out, *rest = fk.layer_norm(
        x, weight, bias, eps=eps, weight_offset=weight_offset, residual=residual, return_stats=True
    )
    return (out, empty(x), *rest) if residual is None else (out, *rest)


def _layer_norm_fake(x: Any, residual: Any, weight: Any, bias: Any, eps: float, weight_offset: float = 0.0) -> Any:
    return x.new_empty(x.shape), empty(x) if residual is None else x.new_empty(x.shape), _stats(x), _stats(x)


def _layer_norm_backward_kernel(
    grad_out: Any,
    h: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    grad_residual_out: Any,
    need_weight: bool,
    need_bias: bool,
    bias_dtype: Any,
    weight_offset: float = 0.0,
) -> Any:
    grad_x, grad_weight, grad_bias = fk.layer_norm_backward(
        dense(grad_out),
        h,
        weight,
        mean,
        rstd,
        grad_residual_out=dense(grad_residual_out),
        weight_offset=weight_offset,
        need_weight=need_weight,
        need_bias=need_bias,
    )
    return (
        grad_x,
        grad_weight.to(weight.dtype) if need_weight else empty(h),
        grad_bias.to(bias_dtype) if need_bias else empty(h),
    )


def _layer_norm_backward_fake(
    grad_out: Any,
    h: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    grad_residual_out: Any,
    need_weight: bool,
    need_bias: bool,
    bias_dtype: Any,
    weight_offset: float = 0.0,
) -> Any:
    features = h.shape[-1:]
    return (
        h.new_empty(h.shape),
        weight.new_empty(features) if need_weight else empty(h),
        h.new_empty(features, dtype=bias_dtype) if need_bias else empty(h),
    )


def _layer_norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, residual, weight, bias, _, ctx.weight_offset = inputs
    _, residual_out, mean, rstd = output
    ctx.has_residual = residual is not None
    ctx.bias_dtype = x.dtype if bias is None else bias.dtype
    ctx.save_for_backward(residual_out if ctx.has_residual else x, weight, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _layer_norm_grad(ctx: Any, grad_out: Any, grad_residual_out: Any, *_: Any) -> Any:
    h, weight, mean, rstd = ctx.saved_tensors
    grad_residual_out = grad_residual_out if ctx.has_residual else None
    if grad_out is None:
        return grad_residual_out, grad_residual_out, None, None, None, None
    need_weight, need_bias = ctx.needs_input_grad[2:4]
    grad_x, grad_weight, grad_bias = _layer_norm_backward(
        grad_out, h, weight, mean, rstd, grad_residual_out, need_weight, need_bias, ctx.bias_dtype, ctx.weight_offset
    )
    return (
        grad_x,
        grad_x if ctx.has_residual else None,
        grad_weight if need_weight else None,
        grad_bias if need_bias else None,
        None,
        None,
    )


_layer_norm_backward = define(
    "layer_norm_backward(Tensor grad_out, Tensor h, Tensor? weight, Tensor mean, Tensor rstd, Tensor? "
    "grad_residual_out, bool need_weight, "
    "bool need_bias, ScalarType bias_dtype, float weight_offset=0.0) -> (Tensor, Tensor, Tensor)",
    _layer_norm_backward_kernel,
    _layer_norm_backward_fake,
    backward=no_second_derivative("layer_norm_backward"),
)
_layer_norm = define(
    "layer_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, float weight_offset=0.0) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _layer_norm_kernel,
    _layer_norm_fake,
    backward=_layer_norm_grad,
    setup_context=_layer_norm_setup,
)


@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    residual: None = None,
) -> torch.Tensor: ...


@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    residual: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm over the last dim, scaled by weight + weight_offset; with `residual`: (layer_norm(x + residual),
    x + residual) in one pass. With gradients. weight, bias: float32, float16 or bfloat16, whatever x is.
    """
    if direct(x, weight, bias, residual):
        return fk.layer_norm(x, weight, bias, eps=eps, weight_offset=weight_offset, residual=residual)
    out, residual_out, _, _ = _layer_norm(x, residual, weight, bias, eps, weight_offset)
    return out if residual is None else (out, residual_out)


# --- RMSNorm


def _rms_norm_kernel(x: Any, residual: Any, weight: Any, eps: float, weight_offset: float = 0.0) -> Any:
    out, *rest = fk.rms_norm(x, weight, eps=eps, weight_offset=weight_offset, residual=residual, return_stats=True)
    return (out, empty(x), *rest) if residual is None else (out, *rest)


def _rms_norm_fake(x: Any, residual: Any, weight: Any, eps: float, weight_offset: float = 0.0) -> Any:
    return x.new_empty(x.shape), empty(x) if residual is None else x.new_empty(x.shape), _stats(x)


def _rms_norm_backward_kernel(
    grad_out: Any, h: Any, weight: Any, rstd: Any, grad_residual_out: Any, need_weight: bool, weight_offset: float = 0.0
) -> Any:
    grad_x, grad_weight = fk.rms_norm_backward(
        dense(grad_out),
        h,
        weight,
        rstd,
        grad_residual_out=dense(grad_residual_out),
        weight_offset=weight_offset,
        need_weight=need_weight,
    )
    return grad_x, grad_weight.to(weight.dtype) if need_weight else empty(h)


def _rms_norm_backward_fake(
    grad_out: Any, h: Any, weight: Any, rstd: Any, grad_residual_out: Any, need_weight: bool, weight_offset: float = 0.0
) -> Any:
    return h.new_empty(h.shape), weight.new_empty(h.shape[-1:]) if need_weight else empty(h)


def _rms_norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, residual, weight, _, ctx.weight_offset = inputs
    _, residual_out, rstd = output
    ctx.has_residual = residual is not None
    ctx.save_for_backward(residual_out if ctx.has_residual else x, weight, rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _rms_norm_grad(ctx: Any, grad_out: Any, grad_residual_out: Any, *_: Any) -> Any:
    h, weight, rstd = ctx.saved_tensors
    grad_residual_out = grad_residual_out if ctx.has_residual else None
    if grad_out is None:
        return grad_residual_out, grad_residual_out, None, None, None
    need_weight = ctx.needs_input_grad[2]
    grad_x, grad_weight = _rms_norm_backward(
        grad_out, h, weight, rstd, grad_residual_out, need_weight, ctx.weight_offset
    )
    return grad_x, grad_x if ctx.has_residual else None, grad_weight if need_weight else None, None, None


_rms_norm_backward = define(
    "rms_norm_backward(Tensor grad_out, Tensor h, Tensor? weight, Tensor rstd, Tensor? grad_residual_out, bool "
    "need_weight, float weight_offset=0.0) -> (Tensor, Tensor)",
    _rms_norm_backward_kernel,
    _rms_norm_backward_fake,
    backward=no_second_derivative("rms_norm_backward"),
)
_rms_norm = define(
    "rms_norm(Tensor x, Tensor? residual, Tensor? weight, float eps, float weight_offset=0.0) -> (Tensor, "
    "Tensor, Tensor)",
    _rms_norm_kernel,
    _rms_norm_fake,
    backward=_rms_norm_grad,
    setup_context=_rms_norm_setup,
)


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: None = None,
) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over the last dim, scaled by weight + weight_offset (1: Gemma's); with `residual`: (rms_norm(x +
    residual), x + residual) in one pass. With gradients. weight: float32, float16 or bfloat16, whatever x is.
    """
    if direct(x, weight, residual):
        return fk.rms_norm(x, weight, eps=eps, weight_offset=weight_offset, residual=residual)
    out, residual_out, _ = _rms_norm(x, residual, weight, eps, weight_offset)
    return out if residual is None else (out, residual_out)


# --- outputs in 8 bits


def _quantized(
    fake: bool, op: str, x: Any, parameters: tuple[Any, ...], residual: Any, scale: Any, options: Any
) -> Any:
    """(elements, scales of the rows, h): an empty tensor for what the call does not have."""
    if fake:
        elements, scales = x.new_empty(x.shape, dtype=options["out_dtype"]), _stats(x)
        h = [] if residual is None else [x.new_empty(x.shape)]
    else:
        elements, scales, *h = getattr(fk, op)(x, *parameters, residual=residual, scale=scale, **options)
    none = x.new_empty(0, dtype=torch.float32)
    return elements, scales if scale is None else none, h[0] if h else empty(x)


def _layer_norm_quantized_op(fake: bool) -> Any:
    def run(
        x: Any,
        residual: Any,
        weight: Any,
        bias: Any,
        scale: Any,
        out_dtype: Any,
        eps: float,
        weight_offset: float = 0.0,
    ) -> Any:
        options = {"out_dtype": out_dtype, "eps": eps, "weight_offset": weight_offset}
        return _quantized(fake, "layer_norm_quantized", x, (weight, bias), residual, scale, options)

    return run


def _rms_norm_quantized_op(fake: bool) -> Any:
    def run(
        x: Any, residual: Any, weight: Any, scale: Any, out_dtype: Any, eps: float, weight_offset: float = 0.0
    ) -> Any:
        options = {"out_dtype": out_dtype, "eps": eps, "weight_offset": weight_offset}
        return _quantized(fake, "rms_norm_quantized", x, (weight,), residual, scale, options)

    return run


_layer_norm_quantized = define(
    "layer_norm_quantized(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? scale, "
    "ScalarType out_dtype, float eps, float weight_offset=0.0) -> (Tensor, Tensor, Tensor)",
    _layer_norm_quantized_op(False),
    _layer_norm_quantized_op(True),
)
_rms_norm_quantized = define(
    "rms_norm_quantized(Tensor x, Tensor? residual, Tensor? weight, Tensor? scale, ScalarType out_dtype, float eps, "
    "float weight_offset=0.0) -> (Tensor, Tensor, Tensor)",
    _rms_norm_quantized_op(False),
    _rms_norm_quantized_op(True),
)


def layer_norm_quantized(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.float8_e4m3fn,
    scale: torch.Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """`flashkernel.layer_norm_quantized`: (elements, scale), then x + residual if residual is given. No gradient:
    raises NotImplementedError where one is asked for.
    """
    if direct(x, weight, bias, residual):
        options: dict[str, Any] = {"out_dtype": out_dtype, "scale": scale, "eps": eps, "weight_offset": weight_offset}
        return fk.layer_norm_quantized(x, weight, bias, residual=residual, **options)
    elements, scales, h = _layer_norm_quantized(x, residual, weight, bias, scale, out_dtype, eps, weight_offset)
    scales = scales if scale is None else scale
    return (elements, scales) if residual is None else (elements, scales, h)


def rms_norm_quantized(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.float8_e4m3fn,
    scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """`flashkernel.rms_norm_quantized`: (elements, scale), then x + residual if residual is given. No gradient, as
    `layer_norm_quantized`.

    >>> import torch, flashkernel.torch as fkt
    >>> elements, scales = fkt.rms_norm_quantized(torch.full((1, 4), 2.0), out_dtype=torch.int8, eps=0.0)
    >>> elements.tolist(), scales.shape
    ([[127, 127, 127, 127]], torch.Size([1]))
    """
    if direct(x, weight, residual):
        options: dict[str, Any] = {"out_dtype": out_dtype, "scale": scale, "eps": eps, "weight_offset": weight_offset}
        return fk.rms_norm_quantized(x, weight, residual=residual, **options)
    elements, scales, h = _rms_norm_quantized(x, residual, weight, scale, out_dtype, eps, weight_offset)
    scales = scales if scale is None else scale
    return (elements, scales) if residual is None else (elements, scales, h)


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dim, by FlashKernel; eps None is 1e-6."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.normalized_shape) != 1:
            raise NotImplementedError(f"RMSNorm: normalized_shape={tuple(self.normalized_shape)}; one dim is needed")
        return rms_norm(x, self.weight, eps=1e-6 if self.eps is None else self.eps)
