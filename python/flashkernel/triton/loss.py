"""cross_entropy and its gradient in Triton, one row a program, without writing the probabilities.

Milakov and Gimelshein (2018) for the running maximum and sum; Szegedy et al. (2016) for label smoothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ._device import narrow, widen
from ._host import Call, power_of_two

REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}


@triton.jit
def _loss(
    logits_ptr, targets_ptr, loss_ptr, lse_ptr, logits_t, targets_t, classes, ignore, smoothing, BLOCK: tl.constexpr
):
    """lse - (1 - smoothing) logits[target] - smoothing mean(logits); 0 where ignored, NaN for a target out of range."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_t
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.full([BLOCK], 0.0, tl.float32)
    plain = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, classes, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = widen(tl.load(logits_ptr + col, mask=col < classes, other=float("-inf")))
        new_top = tl.maximum(top, x)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.exp(x - base)
        top = new_top
        plain += tl.where(col < classes, x, 0.0)
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    log_sum = tl.log(tl.sum(total * tl.exp(top - base), 0))
    target = tl.load(targets_ptr + row * targets_t).to(tl.int64)
    inside = (target >= 0) & (target < classes)
    wanted = widen(tl.load(logits_ptr + target, mask=inside, other=float("nan")))
    # Next to a maximum of 1e6 or -3.4e38 little or nothing is left of the logarithm.
    loss = log_sum + (1.0 - smoothing) * (base - wanted)
    if smoothing > 0:
        origin = tl.where(tl.abs(base) >= 4096.0, base, 0.0)
        if origin != 0.0:  # a sum of logits of this size keeps little of their differences
            plain = tl.full([BLOCK], 0.0, tl.float32)
            for start in range(0, classes, BLOCK):
                col = start + tl.arange(0, BLOCK)
                x = widen(tl.load(logits_ptr + col, mask=col < classes, other=float("-inf")))
                plain += tl.where(col < classes, x - origin, 0.0)
        loss += smoothing * ((base - origin) - tl.sum(plain, 0) / classes)
    tl.store(loss_ptr + row, tl.where(target == ignore, 0.0, loss))
    if lse_ptr is not None:
        tl.store(lse_ptr + row, base + log_sum)


@triton.jit
def _join(
    losses_ptr, targets_ptr, out_ptr, count_ptr, targets_t, rows, ignore, MEAN: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: the sum of the rows' losses, or their mean over the counted rows; count gets how many those are."""
    total = tl.full([BLOCK], 0.0, tl.float32)
    count = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, rows, BLOCK):
        row = (start + tl.arange(0, BLOCK)).to(tl.int64)
        if losses_ptr is not None:
            total += tl.load(losses_ptr + row, mask=row < rows, other=0.0)
        target = tl.load(targets_ptr + row * targets_t, mask=row < rows, other=0).to(tl.int64)
        count += tl.where((row < rows) & (target != ignore), 1.0, 0.0)
    counted = tl.sum(count, 0)
    if losses_ptr is not None:
        value = tl.sum(total, 0)
        if MEAN:
            value = tl.where(counted == 0.0, float("nan"), value / tl.where(counted == 0.0, 1.0, counted))
        tl.store(out_ptr, value)
    if count_ptr is not None:
        tl.store(count_ptr, counted)


@triton.jit
def _gradient(
    grad_ptr, logits_ptr, targets_ptr, lse_ptr, count_ptr, out_ptr, grad_t, logits_t, targets_t, lse_t, out_t, classes,
    ignore, smoothing, MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """w (softmax - target distribution) of one row; 0 where ignored."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(grad_ptr + row * grad_t)
    if MEAN:
        weight = weight / tl.load(count_ptr)
    target = tl.load(targets_ptr + row * targets_t).to(tl.int64)
    counts = target != ignore
    weight = tl.where((target >= 0) & (target < classes), weight, float("nan"))
    lse = tl.load(lse_ptr + row * lse_t)
    rest = tl.where(lse == lse, 0.0, lse)  # what LSE is without, next to its size
    if (tl.abs(lse) >= 4096.0) & (tl.abs(lse) < float("inf")):
        total = tl.full([BLOCK], 0.0, tl.float32)
        for start in range(0, classes, BLOCK):
            col = start + tl.arange(0, BLOCK)
            x = widen(tl.load(logits_ptr + row * logits_t + col, mask=col < classes, other=float("-inf")))
            total += tl.exp(x - lse)
        rest = tl.log(tl.sum(total, 0))
    for start in range(0, classes, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = widen(tl.load(logits_ptr + row * logits_t + col, mask=col < classes, other=0.0))
        value = tl.exp((x - lse) - rest) - smoothing / classes - tl.where(col == target, 1.0 - smoothing, 0.0)
        value = tl.where(counts, weight * value, 0.0)
        tl.store(out_ptr + row * out_t + col, narrow(value, out_ptr.dtype.element_ty), mask=col < classes)


def _arguments(
    call: Call, logits: Any, targets: Any, label_smoothing: float, reduction: str
) -> tuple[torch.Tensor, torch.Tensor, int]:
    logits = call.floats("logits", logits, 2)
    targets = call.index("targets", targets)
    call.shape("targets", targets, logits.shape[:1])
    call.need(0 <= label_smoothing <= 1, f"label_smoothing={label_smoothing}; a number from 0 to 1 is needed")
    call.need(reduction in REDUCTIONS, f"reduction={reduction!r}; 'none', 'sum' or 'mean' is needed")
    call.need(logits.shape[0] == 0 or logits.shape[1] > 0, "logits has no classes; one at least is needed")
    return logits, targets, REDUCTIONS[reduction]


def cross_entropy(
    logits: Any,
    targets: Any,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    return_lse: bool = False,
    stream: Any = None,
    dtype: Any = None,
) -> Any:
    """lse(logits[r]) - logits[r, targets[r]], as `flashkernel.cross_entropy`; logits [rows, classes], targets int32 or
    int64 [rows].

    reduction: "none" (float32 [rows]), "sum" or "mean" over the rows whose target is not ignore_index. A target out of
    range gives NaN: the host reads none.

    Returns loss, or (loss, lse). Computed in float32. Raises: ValueError for arguments that don't fit,
    NotImplementedError for arrays that Triton does not serve.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> logits = torch.zeros(2, 4, device=fk_triton.default_device())
    >>> round(fk_triton.cross_entropy(logits, torch.tensor([1, -100], device=logits.device)).item(), 4)
    1.3863
    """
    call = Call("cross_entropy", stream, dtype)
    logits, targets, kind = _arguments(call, logits, targets, label_smoothing, reduction)
    rows, classes = logits.shape
    losses = call.empty((rows,), torch.float32)
    lse = call.empty((rows,), torch.float32) if return_lse else None
    block = min(power_of_two(classes), 4096)
    call.launch(
        _loss, rows, logits_ptr=logits, targets_ptr=targets, loss_ptr=losses, lse_ptr=lse, logits_t=logits.stride(0),
        targets_t=targets.stride(0), classes=classes, ignore=ignore_index, smoothing=float(label_smoothing),
        BLOCK=block,
        num_warps=8 if block >= 4096 else 4,
    )  # fmt: skip
    loss = losses
    if kind:
        loss = call.empty((), torch.float32)
        call.launch(
            _join, 1, losses_ptr=losses, targets_ptr=targets, out_ptr=loss, count_ptr=None, targets_t=targets.stride(0),
            rows=rows, ignore=ignore_index, MEAN=kind == 2, BLOCK=1024,
        )  # fmt: skip
    return loss if lse is None else (loss, lse)


def cross_entropy_backward(
    grad_loss: Any,
    logits: Any,
    targets: Any,
    lse: Any,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    out: Any = None,
    stream: Any = None,
    dtype: Any = None,
) -> Any:
    """Gradient of `cross_entropy` by the logits, as `flashkernel.cross_entropy_backward`; out may be logits.

    grad_loss: float32, the loss's shape. Returns grad_logits; ignored rows have gradient 0. Raises: as `cross_entropy`.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> logits = torch.zeros(1, 2, device=fk_triton.default_device())
    >>> targets = torch.tensor([1], device=logits.device)
    >>> loss, lse = fk_triton.cross_entropy(logits, targets, return_lse=True)
    >>> [round(g, 4) for g in fk_triton.cross_entropy_backward(torch.ones_like(loss), logits, targets, lse)[0].tolist()]
    [0.5, -0.5]
    """
    call = Call("cross_entropy_backward", stream, dtype)
    logits, targets, kind = _arguments(call, logits, targets, label_smoothing, reduction)
    rows, classes = logits.shape
    if kind and isinstance(grad_loss, torch.Tensor) and tuple(grad_loss.shape) == (1,):
        grad_loss = grad_loss[0]  # a scalar in either form, as in the library
    grad_loss = call.float32("grad_loss", grad_loss, () if kind else (rows,))
    lse = call.float32("lse", lse, (rows,))
    result = call.output("out", out, logits.shape, logits.dtype, may_be=("logits",))
    count = None
    if kind == 2:
        count = call.empty((), torch.float32)
        call.launch(
            _join, 1, losses_ptr=None, targets_ptr=targets, out_ptr=None, count_ptr=count, targets_t=targets.stride(0),
            rows=rows, ignore=ignore_index, MEAN=True, BLOCK=1024,
        )  # fmt: skip
    block = min(power_of_two(classes), 4096)
    call.launch(
        _gradient, rows, grad_ptr=grad_loss, logits_ptr=logits, targets_ptr=targets, lse_ptr=lse, count_ptr=count,
        out_ptr=result, grad_t=0 if kind else grad_loss.stride(0), logits_t=logits.stride(0),
        targets_t=targets.stride(0), lse_t=lse.stride(0), out_t=result.stride(0), classes=classes, ignore=ignore_index,
        smoothing=float(label_smoothing), MEAN=kind == 2, BLOCK=block, num_warps=8 if block >= 4096 else 4,
    )  # fmt: skip
    return result
