"""LayerNorm and RMSNorm for torch, with the fused residual add, and their gradients."""

from __future__ import annotations

from typing import Any, overload

import torch

import flashkernel as fk

from ._library import define, dense, direct, empty, no_second_derivative

__all__ = ["RMSNorm", "layer_norm", "rms_norm"]


def _stats(x: Any) -> Any:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


# --- LayerNorm


def _layer_norm_kernel(x: Any, residual: Any, weight: Any, bias: Any, eps: float) -> Any:
    out, *rest = fk.layer_norm(x, weight, bias, eps=eps, residual=residual, return_stats=True)
    return (out, empty(x), *rest) if residual is None else (out, *rest)


def _layer_norm_fake(x: Any, residual: Any, weight: Any, bias: Any, eps: float) -> Any:
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
) -> Any:
    grad_x, grad_weight, grad_bias = fk.layer_norm_backward(
        dense(grad_out),
        h,
        weight,
        mean,
        rstd,
        grad_residual_out=dense(grad_residual_out),
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
) -> Any:
    features = h.shape[-1:]
    return (
        h.new_empty(h.shape),
        weight.new_empty(features) if need_weight else empty(h),
        h.new_empty(features, dtype=bias_dtype) if need_bias else empty(h),
    )


def _layer_norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, residual, weight, bias, _ = inputs
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
        return grad_residual_out, grad_residual_out, None, None, None
    need_weight, need_bias = ctx.needs_input_grad[2:4]
    grad_x, grad_weight, grad_bias = _layer_norm_backward(
        grad_out, h, weight, mean, rstd, grad_residual_out, need_weight, need_bias, ctx.bias_dtype
    )
    return (
        grad_x,
        grad_x if ctx.has_residual else None,
        grad_weight if need_weight else None,
        grad_bias if need_bias else None,
        None,
    )


_layer_norm_backward = define(
    "layer_norm_backward(Tensor grad_out, Tensor h, Tensor? weight, Tensor mean, Tensor rstd, Tensor? "
    "grad_residual_out, bool need_weight, "
    "bool need_bias, ScalarType bias_dtype) -> (Tensor, Tensor, Tensor)",
    _layer_norm_backward_kernel,
    _layer_norm_backward_fake,
    backward=no_second_derivative("layer_norm_backward"),
)
_layer_norm = define(
    "layer_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, "
    "Tensor, Tensor)",
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
    residual: None = None,
) -> torch.Tensor: ...


@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm over the last dim; with `residual`: (layer_norm(x + residual), x + residual) in one pass. With
    gradients.
    """
    if direct(x, weight, bias, residual):
        return fk.layer_norm(x, weight, bias, eps=eps, residual=residual)
    out, residual_out, _, _ = _layer_norm(x, residual, weight, bias, eps)
    return out if residual is None else (out, residual_out)


# --- RMSNorm


def _rms_norm_kernel(x: Any, residual: Any, weight: Any, eps: float) -> Any:
    out, *rest = fk.rms_norm(x, weight, eps=eps, residual=residual, return_stats=True)
    return (out, empty(x), *rest) if residual is None else (out, *rest)


def _rms_norm_fake(x: Any, residual: Any, weight: Any, eps: float) -> Any:
    return x.new_empty(x.shape), empty(x) if residual is None else x.new_empty(x.shape), _stats(x)


def _rms_norm_backward_kernel(
    grad_out: Any, h: Any, weight: Any, rstd: Any, grad_residual_out: Any, need_weight: bool
) -> Any:
    grad_x, grad_weight = fk.rms_norm_backward(
        dense(grad_out), h, weight, rstd, grad_residual_out=dense(grad_residual_out), need_weight=need_weight
    )
    return grad_x, grad_weight.to(weight.dtype) if need_weight else empty(h)


def _rms_norm_backward_fake(
    grad_out: Any, h: Any, weight: Any, rstd: Any, grad_residual_out: Any, need_weight: bool
) -> Any:
    return h.new_empty(h.shape), weight.new_empty(h.shape[-1:]) if need_weight else empty(h)


def _rms_norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, residual, weight, _ = inputs
    _, residual_out, rstd = output
    ctx.has_residual = residual is not None
    ctx.save_for_backward(residual_out if ctx.has_residual else x, weight, rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _rms_norm_grad(ctx: Any, grad_out: Any, grad_residual_out: Any, *_: Any) -> Any:
    h, weight, rstd = ctx.saved_tensors
    grad_residual_out = grad_residual_out if ctx.has_residual else None
    if grad_out is None:
        return grad_residual_out, grad_residual_out, None, None
    need_weight = ctx.needs_input_grad[2]
    grad_x, grad_weight = _rms_norm_backward(grad_out, h, weight, rstd, grad_residual_out, need_weight)
    return grad_x, grad_x if ctx.has_residual else None, grad_weight if need_weight else None, None


_rms_norm_backward = define(
    "rms_norm_backward(Tensor grad_out, Tensor h, Tensor? weight, Tensor rstd, Tensor? grad_residual_out, bool "
    "need_weight) -> (Tensor, Tensor)",
    _rms_norm_backward_kernel,
    _rms_norm_backward_fake,
    backward=no_second_derivative("rms_norm_backward"),
)
_rms_norm = define(
    "rms_norm(Tensor x, Tensor? residual, Tensor? weight, float eps) -> (Tensor, Tensor, Tensor)",
    _rms_norm_kernel,
    _rms_norm_fake,
    backward=_rms_norm_grad,
    setup_context=_rms_norm_setup,
)


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float = 1e-6, residual: None = None
) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float = 1e-6, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]: ...


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float = 1e-6, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over the last dim; with `residual`: (rms_norm(x + residual), x + residual) in one pass. With
    gradients.
    """
    if direct(x, weight, residual):
        return fk.rms_norm(x, weight, eps=eps, residual=residual)
    out, residual_out, _ = _rms_norm(x, residual, weight, eps)
    return out if residual is None else (out, residual_out)


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dim, by FlashKernel; eps None is 1e-6."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.normalized_shape) != 1:
            raise NotImplementedError(f"RMSNorm: normalized_shape={tuple(self.normalized_shape)}; one dim is needed")
        return rms_norm(x, self.weight, eps=1e-6 if self.eps is None else self.eps)
