"""SwiGLU, softmax and log-softmax for torch, with their gradients."""

from __future__ import annotations

from typing import Any

import torch

import flashkernel as fk

from ._library import define, direct, no_second_derivative

__all__ = ["log_softmax", "softmax", "swiglu"]


def _swiglu_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_grad(ctx: Any, grad_out: Any) -> Any:
    return _swiglu_backward(grad_out, *ctx.saved_tensors)


_swiglu_backward = define(
    "swiglu_backward(Tensor grad_out, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    lambda grad_out, gate, up: fk.swiglu_backward(grad_out, gate, up),
    lambda grad_out, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
    backward=no_second_derivative("swiglu_backward"),
)
_swiglu = define(
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    lambda gate, up: fk.swiglu(gate, up),
    lambda gate, up: gate.new_empty(gate.shape),
    backward=_swiglu_grad,
    setup_context=_swiglu_setup,
)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, with gradients."""
    if direct(gate, up):
        return fk.swiglu(gate, up)
    return _swiglu(gate, up)


def _define_softmax(name: str, forward: Any, backward: Any) -> Any:
    gradient = define(
        f"{name}_backward(Tensor grad_out, Tensor out, int axis) -> Tensor",
        lambda grad_out, out, axis: backward(grad_out, out, axis),
        lambda grad_out, out, axis: out.new_empty(out.shape),
        backward=no_second_derivative(f"{name}_backward"),
    )

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.axis = inputs[1]
        ctx.save_for_backward(output)

    def grad(ctx: Any, grad_out: Any) -> Any:
        return gradient(grad_out, *ctx.saved_tensors, ctx.axis), None

    return define(
        f"{name}(Tensor x, int axis) -> Tensor",
        lambda x, axis: forward(x, axis),
        lambda x, axis: x.new_empty(x.shape),
        backward=grad,
        setup_context=setup,
    )


_softmax = _define_softmax("softmax", fk.softmax, fk.softmax_backward)
_log_softmax = _define_softmax("log_softmax", fk.log_softmax, fk.log_softmax_backward)


def softmax(x: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """softmax along `axis`, with gradient; a row of -inf only gives 0."""
    if direct(x):
        return fk.softmax(x, axis)
    return _softmax(x, axis)


def log_softmax(x: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """log(softmax) along `axis`, with gradient."""
    if direct(x):
        return fk.log_softmax(x, axis)
    return _log_softmax(x, axis)
