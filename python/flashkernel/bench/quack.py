"""quack-kernels (CuTe DSL) as peers, where `quack` is installed: the functions under its autograd classes."""

from __future__ import annotations

from typing import Any

from . import baselines
from .baselines import Arguments, Op

__all__ = ["MODULE", "OPS"]

MODULE = "quack.rmsnorm"


def _module(name: str) -> Any:
    return baselines.optional(f"quack.{name}")


def rms_norm(x: Any, weight: Any) -> Any:
    return _module("rmsnorm").rmsnorm_fwd(x, weight, eps=1e-6)[0]


def rms_norm_residual(x: Any, residual: Any, weight: Any) -> Any:
    return _module("rmsnorm").rmsnorm_fwd(x, weight, residual=residual, eps=1e-6)[:2]


def rms_norm_backward(grad_out: Any, x: Any, weight: Any, rstd: Any) -> Any:
    return _module("rmsnorm").rmsnorm_bwd(x, weight, grad_out, rstd)[:2]


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    return _module("rmsnorm").layernorm_fwd(x, weight, bias, eps=1e-5)


def layer_norm_backward(grad_out: Any, x: Any, weight: Any, bias: Any, mean: Any, rstd: Any) -> Any:
    return _module("rmsnorm").layernorm_bwd(x, weight, grad_out, rstd, mean)


def softmax(x: Any) -> Any:
    return _module("softmax").softmax_fwd(x)


def softmax_backward(grad_out: Any, out: Any) -> Any:
    return _module("softmax").softmax_bwd(grad_out, out)


def rope(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    rotate = _module("rotary").apply_rotary
    return tuple(rotate(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))


def cross_entropy(logits: Any, targets: Any) -> Any:
    return _module("cross_entropy").cross_entropy_fwd(logits, targets).mean()


def cross_entropy_backward(grad_loss: Any, logits: Any, targets: Any, lse: Any) -> Any:
    return _module("cross_entropy").cross_entropy_bwd(logits, targets, grad_loss, lse)


def gelu_linear(x: Any, weight: Any, bias: Any) -> Any:
    """Its tuner measures a shape's tiles in the first call."""
    gemm = _module("gemm_interface")
    if gemm is None:
        return baselines.refuse("this quack has no gemm_interface")
    return gemm.gemm_act(x, weight.t(), bias=bias, activation="gelu_tanh_approx", store_preact=False)[1]


def linear(x: Any, weight: Any, bias: Any) -> Any:
    """quack's linear with its tuner's choice of tiles and parts of k, summed in the same order in each run."""
    gemm = _module("gemm_interface")
    if gemm is None:
        return baselines.refuse("this quack has no gemm_interface")
    return gemm.gemm(x, weight.t(), bias=bias, split_k=None)


def _wide_vectors(arguments: Arguments) -> Arguments:
    """LayerNorm takes its weight and bias in float32 alone."""
    return arguments[0], *(x.float() for x in arguments[1:])


def _half_tables(arguments: Arguments) -> Arguments:
    q, k, *tables = baselines.rope_as_models_have_it(arguments)
    return q, k, *(x[:, : x.shape[-1] // 2].contiguous() for x in tables)


def _grad_of_each(arguments: Arguments) -> Arguments:
    """The gradient of a mean over rows, for each of them."""
    grad_loss, logits, *others = arguments
    rows = logits.shape[0]
    return grad_loss.float().expand(rows) / rows, logits, *others


OPS: dict[str, Op] = {
    "rms_norm": (rms_norm, None),
    "rms_norm_residual": (rms_norm_residual, None),
    "rms_norm_backward": (rms_norm_backward, None),
    "layer_norm": (layer_norm, _wide_vectors),
    "layer_norm_backward": (layer_norm_backward, None),
    "softmax": (softmax, None),
    "softmax_backward": (softmax_backward, None),
    "rope": (rope, _half_tables),
    "gelu_linear": (gelu_linear, None),
    "linear": (linear, None),
    "cross_entropy": (cross_entropy, None),
    "cross_entropy_backward": (cross_entropy_backward, _grad_of_each),
}
