"""Cross-entropy for torch, with its gradient."""

from __future__ import annotations

from typing import Any, Literal

import torch

import flashkernel as fk

from ._library import define, dense, direct, no_second_derivative

__all__ = ["cross_entropy"]

Reduction = Literal["none", "sum", "mean"]
_OPTIONS = "SymInt ignore_index, float label_smoothing, str reduction"


def _kernel(logits: Any, targets: Any, ignore_index: int, label_smoothing: float, reduction: Reduction) -> Any:
    return fk.cross_entropy(
        logits,
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
        return_lse=True,
    )


def _fake(logits: Any, targets: Any, ignore_index: int, label_smoothing: float, reduction: Reduction) -> Any:
    rows = logits.new_empty(logits.shape[:1], dtype=torch.float32)
    return torch.empty_like(rows) if reduction == "none" else logits.new_empty((), dtype=torch.float32), rows


def _backward_kernel(
    grad_loss: Any, logits: Any, targets: Any, lse: Any, ignore_index: int, label_smoothing: float, reduction: Reduction
) -> Any:
    return fk.cross_entropy_backward(
        dense(grad_loss),
        logits,
        targets,
        lse,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    logits, targets, *ctx.options = inputs
    ctx.save_for_backward(logits, targets, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, grad_loss: Any, _: Any) -> Any:
    if grad_loss is None:
        return (None,) * 5
    return _backward(grad_loss, *ctx.saved_tensors, *ctx.options), None, None, None, None


_backward = define(
    f"cross_entropy_backward(Tensor grad_loss, Tensor logits, Tensor targets, Tensor lse, {_OPTIONS}) -> Tensor",
    _backward_kernel,
    lambda grad_loss, logits, *_: logits.new_empty(logits.shape),
    backward=no_second_derivative("cross_entropy_backward"),
)
_cross_entropy = define(
    f"cross_entropy(Tensor logits, Tensor targets, {_OPTIONS}) -> (Tensor, Tensor)",
    _kernel,
    _fake,
    backward=_grad,
    setup_context=_setup,
)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> torch.Tensor:
    """Cross-entropy of logits [rows, classes] against class indices [rows], float32, with the gradient of the
    logits.
    """
    if direct(logits):
        return fk.cross_entropy(
            logits, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
        )
    return _cross_entropy(logits, targets, ignore_index, label_smoothing, reduction)[0]
