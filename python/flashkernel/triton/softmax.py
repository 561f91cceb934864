"""softmax and log_softmax in Triton, along one axis of any strides, with their gradients.

A program keeps BLOCK_ROWS rows on the chip when a row fits one tile, else it walks them twice: running maximum and
sum, then the results. Milakov and Gimelshein, Online normalizer calculation for softmax (2018).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ._device import narrow, offsets, widen
from ._host import Call, cdiv, device_function, merge_dims, power_of_two

MAX_TILE = 8192  # 8 warps x 32 threads x 32 floats in registers


@device_function
def _finish(x, base, total, IS_LOG: tl.constexpr):
    """The results of scores x; a row of -inf only gives 0 (log: -inf)."""
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    if IS_LOG:
        return tl.where(nothing, float("-inf"), x - base - tl.log(total))
    else:
        return tl.exp(x - base) / total


@triton.jit
def _softmax(
    x_ptr, out_ptr, sizes, x_strides, out_strides, x_step, out_step, rows, n,
    DIMS: tl.constexpr, IS_LOG: tl.constexpr, IS_ONE_TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Rows are the other dims (sizes, strides), the axis has n elements x_step and out_step apart."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    x_row = x_ptr + offsets(row, sizes, x_strides, DIMS)[:, None]
    out_row = out_ptr + offsets(row, sizes, out_strides, DIMS)[:, None]
    kind: tl.constexpr = out_ptr.dtype.element_ty
    if IS_ONE_TILE:
        col = tl.arange(0, BLOCK_COLS)
        keep = (row[:, None] < rows) & (col[None, :] < n)
        x = widen(tl.load(x_row + col.to(tl.int64)[None, :] * x_step, mask=keep, other=float("-inf")))
        top = tl.max(x, 1)
        base = tl.where(top == float("-inf"), 0.0, top)[:, None]
        total = tl.sum(tl.exp(x - base), 1)[:, None]
        value = narrow(_finish(x, base, total, IS_LOG), kind)
        tl.store(out_row + col.to(tl.int64)[None, :] * out_step, value, mask=keep)
    else:
        top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        total = tl.full([BLOCK_ROWS], 0.0, tl.float32)
        for start in range(0, n, BLOCK_COLS):
            col = start + tl.arange(0, BLOCK_COLS)
            keep = (row[:, None] < rows) & (col[None, :] < n)
            x = widen(tl.load(x_row + col.to(tl.int64)[None, :] * x_step, mask=keep, other=float("-inf")))
            new_top = tl.maximum(top, tl.max(x, 1))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base[:, None]), 1)
            top = new_top
        base = tl.where(top == float("-inf"), 0.0, top)[:, None]
        for start in range(0, n, BLOCK_COLS):
            col = start + tl.arange(0, BLOCK_COLS)
            keep = (row[:, None] < rows) & (col[None, :] < n)
            x = widen(tl.load(x_row + col.to(tl.int64)[None, :] * x_step, mask=keep, other=float("-inf")))
            value = narrow(_finish(x, base, total[:, None], IS_LOG), kind)
            tl.store(out_row + col.to(tl.int64)[None, :] * out_step, value, mask=keep)


@triton.jit
def _softmax_backward(
    grad_ptr, y_ptr, out_ptr, sizes, grad_strides, y_strides, out_strides, grad_step, y_step, out_step, rows, n,
    DIMS: tl.constexpr, IS_LOG: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """out = y (grad - sum(grad y)), or for log_softmax grad - exp(y) sum(grad)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    grad_row = grad_ptr + offsets(row, sizes, grad_strides, DIMS)[:, None]
    y_row = y_ptr + offsets(row, sizes, y_strides, DIMS)[:, None]
    out_row = out_ptr + offsets(row, sizes, out_strides, DIMS)[:, None]
    total = tl.full([BLOCK_ROWS, BLOCK_COLS], 0.0, tl.float32)
    for start in range(0, n, BLOCK_COLS):
        col = (start + tl.arange(0, BLOCK_COLS)).to(tl.int64)[None, :]
        keep = (row[:, None] < rows) & (col < n)
        grad = widen(tl.load(grad_row + col * grad_step, mask=keep, other=0.0))
        if not IS_LOG:
            grad = grad * widen(tl.load(y_row + col * y_step, mask=keep, other=0.0))
        total += grad
    total_row = tl.sum(total, 1)[:, None]
    for start in range(0, n, BLOCK_COLS):
        col = (start + tl.arange(0, BLOCK_COLS)).to(tl.int64)[None, :]
        keep = (row[:, None] < rows) & (col < n)
        grad = widen(tl.load(grad_row + col * grad_step, mask=keep, other=0.0))
        y = widen(tl.load(y_row + col * y_step, mask=keep, other=0.0))
        if IS_LOG:
            value = grad - tl.exp(y) * total_row
        else:
            value = y * (grad - total_row)
        tl.store(out_row + col * out_step, narrow(value, out_ptr.dtype.element_ty), mask=keep)


def _blocks(n: int, rows: int) -> dict[str, int]:
    cols = min(power_of_two(n), MAX_TILE)
    return {
        "BLOCK_COLS": cols,
        "BLOCK_ROWS": min(power_of_two(rows), max(1, 1024 // cols)),
        "num_warps": 8 if cols >= 4096 else 4,
    }


def _axis(call: Call, x: torch.Tensor, axis: int) -> int:
    call.need(
        isinstance(axis, int) and -x.dim() <= axis < x.dim(),
        f"axis={axis!r} with {x.dim()} dims; {-x.dim()}..{x.dim() - 1} is needed",
    )
    return axis % x.dim()


def _others(axis: int, *tensors: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """merge_dims of all dims but one."""
    rest = [d for d in range(tensors[0].dim()) if d != axis]
    return merge_dims([tensors[0].shape[d] for d in rest], *([x.stride(d) for d in rest] for x in tensors))


def _forward(op: str, x: Any, axis: int, out: Any, stream: Any, dtype: Any) -> torch.Tensor:
    call = Call(op, stream, dtype)
    x = call.floats("x", x, (1, 8), rows=False)
    axis = _axis(call, x, axis)
    result = call.output("out", out, x.shape, x.dtype, rows=False, may_be=("x",))
    if not result.numel():
        return result
    sizes, x_strides, out_strides = _others(axis, x, result)
    n, rows = x.shape[axis], x.numel() // x.shape[axis]
    blocks = _blocks(n, rows)
    call.launch(
        _softmax, cdiv(rows, blocks["BLOCK_ROWS"]), x_ptr=x, out_ptr=result, sizes=sizes, x_strides=x_strides,
        out_strides=out_strides, x_step=x.stride(axis), out_step=result.stride(axis), rows=rows, n=n, DIMS=len(sizes),
        IS_LOG=op == "log_softmax", IS_ONE_TILE=n <= MAX_TILE, **blocks,
    )  # fmt: skip
    return result


def _backward(op: str, grad_out: Any, out: Any, axis: int, stream: Any, dtype: Any) -> torch.Tensor:
    call = Call(op, stream, dtype)
    out = call.floats("out", out, (1, 8), rows=False)
    grad_out = call.floats("grad_out", grad_out, (1, 8), like=out, rows=False)
    call.shape("grad_out", grad_out, out.shape)
    axis = _axis(call, out, axis)
    result = call.empty(out.shape, out.dtype)
    if not result.numel():
        return result
    sizes, *strides = _others(axis, grad_out, out, result)
    n, rows = out.shape[axis], out.numel() // out.shape[axis]
    blocks = _blocks(min(n, 2048), rows)
    call.launch(
        _softmax_backward, cdiv(rows, blocks["BLOCK_ROWS"]), grad_ptr=grad_out, y_ptr=out, out_ptr=result, sizes=sizes,
        grad_strides=strides[0], y_strides=strides[1], out_strides=strides[2], grad_step=grad_out.stride(axis),
        y_step=out.stride(axis), out_step=result.stride(axis), rows=rows, n=n, DIMS=len(sizes),
        IS_LOG=op == "log_softmax_backward", **blocks,
    )  # fmt: skip
    return result


def softmax(x: Any, axis: int = -1, *, out: Any = None, stream: Any = None, dtype: Any = None) -> Any:
    """exp(x - max(x)) / sum(exp(x - max(x))) along one axis, as `flashkernel.softmax`; any strides, up to 8 dims.

    Returns out, x's shape and dtype; it may be x. Computed in float32; a row of -inf only gives 0, a NaN makes its row
    NaN.
    Raises: ValueError for arguments that don't fit, NotImplementedError for arrays that Triton does not serve.

    Source: Milakov and Gimelshein (2018).

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> fk_triton.softmax(torch.zeros(4, device=fk_triton.default_device())).tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    return _forward("softmax", x, axis, out, stream, dtype)


def log_softmax(x: Any, axis: int = -1, *, out: Any = None, stream: Any = None, dtype: Any = None) -> Any:
    """x - max(x) - log(sum(exp(x - max(x)))) along one axis, as `flashkernel.log_softmax`. Returns out. Raises: as
    `softmax`.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> round(fk_triton.log_softmax(torch.zeros(4, device=fk_triton.default_device()))[0].item(), 4)
    -1.3863
    """
    return _forward("log_softmax", x, axis, out, stream, dtype)


def softmax_backward(grad_out: Any, out: Any, axis: int = -1, *, stream: Any = None, dtype: Any = None) -> Any:
    """Gradient of `softmax`: out * (grad_out - sum(grad_out * out)), as `flashkernel.softmax_backward`. Raises: as
    `softmax`.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> out = torch.full((2,), 0.5, device=fk_triton.default_device())
    >>> fk_triton.softmax_backward(2 * out - torch.tensor([0.0, 1.0], device=out.device), out).tolist()
    [0.25, -0.25]
    """
    return _backward("softmax_backward", grad_out, out, axis, stream, dtype)


def log_softmax_backward(grad_out: Any, out: Any, axis: int = -1, *, stream: Any = None, dtype: Any = None) -> Any:
    """Gradient of `log_softmax`: grad_out - exp(out) * sum(grad_out), as `flashkernel.log_softmax_backward`. Raises:
    as `softmax`.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> out = torch.zeros(1, device=fk_triton.default_device())
    >>> fk_triton.log_softmax_backward(out + 1, out).tolist()
    [0.0]
    """
    return _backward("log_softmax_backward", grad_out, out, axis, stream, dtype)
