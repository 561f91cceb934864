"""linear_cross_entropy whose gradients are worked out with the loss: three products in all, where computing the logits
again takes four.

Used by linear_loss.py. The logits are held whole, or in chunks of rows that are twice the weight's size, and become
their own gradient in place. The gradients wait, unscaled, for the one of the loss.
"""

from __future__ import annotations

from typing import Any

import torch

import flashkernel as fk

from ._library import define, empty

__all__ = ["linear_loss_at_once", "serves", "why_not"]

LEAST_ROWS = 1024  # of a chunk
# Classes that a product for x's gradient adds up at once. More of them, and the blocks of a GPU drift so far apart that
# none finds in L2 what another has read: half as fast from 128256 on.
MOST_CLASSES = 16384


def why_not(class_weights: Any, z_loss: float, softcap: float, reduction: str) -> str | None:
    """What of a call needs its logits again for the gradients; None: nothing."""
    if reduction == "none":
        return "reduction='none', whose rows have gradients of their own"
    named = {"class_weights": class_weights is not None, "z_loss": z_loss != 0, "softcap": softcap != 0}
    return next((name for name, given in named.items() if given), None)


def serves(x: Any, weight: Any, bias: Any, class_weights: Any, z_loss: float, softcap: float, reduction: str) -> bool:
    """Whether gradients are wanted, on a GPU, and can be had with the loss."""
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    return (
        wanted
        and x.device.type == "cuda"
        and not fk.is_invariant()
        and why_not(class_weights, z_loss, softcap, reduction) is None
    )


def _rows_of_a_chunk(x: Any) -> int:
    return max(LEAST_ROWS, 2 * int(x.shape[1]))


def _chunk(
    x: Any, weight: Any, bias: Any, targets: Any, grad: Any, options: dict[str, Any], needs: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """Loss, LSE and gradients of some rows; `grad` is the loss's."""
    classes = weight.shape[0]
    # Rows begin at multiples of 16 bytes, whatever the number of classes.
    logits = x.new_empty(x.shape[0], -(-classes // 8) * 8)[:, :classes]
    fk.linear(x, weight, bias, out=logits)
    loss, lse = fk.cross_entropy(logits, targets, **options, return_lse=True)
    if not any(needs.values()):
        return loss, lse, (None, None, None)
    fk.cross_entropy_backward(grad, logits, targets, lse, **options, out=logits)
    if not needs["need_x"] or classes <= MOST_CLASSES:
        return loss, lse, fk.linear_backward(logits, x, weight, **needs)
    _, grad_weight, grad_bias = fk.linear_backward(logits, x, weight, **{**needs, "need_x": False})
    grad_x = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for some, rows in zip(logits.split(MOST_CLASSES, 1), weight.split(MOST_CLASSES), strict=True):
        grad_x += fk.linear_backward(some, x, rows, need_weight=False, need_bias=False)[0]
    return loss, lse, (grad_x.to(x.dtype), grad_weight, grad_bias)


def _kernel(
    x: Any, weight: Any, targets: Any, bias: Any, ignore_index: int, label_smoothing: float, reduction: str,
    need_x: bool, need_weight: bool, need_bias: bool,
) -> Any:  # fmt: skip
    needs = {"need_x": need_x, "need_weight": need_weight, "need_bias": need_bias}
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    rows, one = _rows_of_a_chunk(x), torch.ones((), dtype=torch.float32, device=x.device)
    if len(x) <= rows:
        loss, lse, (grad_x, grad_weight, grad_bias) = _chunk(x, weight, bias, targets, one, options, needs)
    else:
        if reduction == "mean":
            one = one / (targets != ignore_index).sum()
        options["reduction"] = "sum"
        losses, lses, parts_x = [], [], []
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=x.device) if need_weight else None
        grad_bias = torch.zeros(weight.shape[:1], dtype=torch.float32, device=x.device) if need_bias else None
        for some, their in zip(x.split(rows), targets.split(rows), strict=True):
            part, part_lse, (part_x, part_weight, part_bias) = _chunk(some, weight, bias, their, one, options, needs)
            losses.append(part)
            lses.append(part_lse)
            parts_x.append(part_x)
            if grad_weight is not None:
                grad_weight += part_weight
            if grad_bias is not None:
                grad_bias += part_bias
        loss, lse = torch.stack(losses).sum(), torch.cat(lses)
        loss = loss * one if reduction == "mean" else loss
        grad_x = torch.cat(parts_x) if need_x else None
    return (
        loss,
        lse,
        grad_x if need_x else empty(x),
        grad_weight.to(weight.dtype) if grad_weight is not None else empty(x),
        grad_bias.to(bias.dtype) if grad_bias is not None else empty(x),
    )


def _fake(
    x: Any, weight: Any, targets: Any, bias: Any, ignore_index: int, label_smoothing: float, reduction: str,
    need_x: bool, need_weight: bool, need_bias: bool,
) -> Any:  # fmt: skip
    return (
        x.new_empty((), dtype=torch.float32),
        x.new_empty(x.shape[:1], dtype=torch.float32),
        x.new_empty(x.shape) if need_x else empty(x),
        weight.new_empty(weight.shape) if need_weight else empty(x),
        bias.new_empty(bias.shape) if need_bias else empty(x),
    )


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output[2:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, grad: Any, *_: Any) -> Any:
    if grad is None:
        return (None,) * 10
    wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]
    grad_x, grad_weight, grad_bias = (
        saved * grad.to(saved.dtype) if needed else None
        for saved, needed in zip(ctx.saved_tensors, wanted, strict=True)
    )
    return grad_x, grad_weight, None, grad_bias, *(None,) * 6


linear_loss_at_once = define(
    "linear_cross_entropy_at_once(Tensor x, Tensor weight, Tensor targets, Tensor? bias, SymInt ignore_index, "
    "float label_smoothing, str reduction, bool need_x, bool need_weight, bool need_bias) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _kernel,
    _fake,
    backward=_grad,
    setup_context=_setup,
)
