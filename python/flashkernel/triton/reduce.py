"""Reductions in Triton: reduce_sum, reduce_mean, reduce_max, argmax over any axes of any strides.

A program takes BLOCK_ROWS results and a chunk of the elements behind each; where there are too few results to fill the
GPU, a second pass joins the chunks. The order of additions is fixed by the shape and the GPU, so sums are the same on
every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ._device import narrow, offsets, widen
from ._host import Call, cdiv, merge_dims, power_of_two

SUM = tl.constexpr(0)
MAX = tl.constexpr(1)
ARGMAX = tl.constexpr(2)
NO_INDEX = tl.constexpr(2**62)


@triton.jit
def _reduce(
    x_ptr, from_index_ptr, out_ptr, index_ptr, kept, kept_x, kept_out, reduced, reduced_x, rows, n, chunks, chunk,
    divisor,
    KEPT: tl.constexpr, REDUCED: tl.constexpr, KIND: tl.constexpr, IS_LAST: tl.constexpr, HAS_INDICES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """out [rows] (IS_LAST) or [rows, chunks]: x's elements of chunk `program % chunks` reduced, for BLOCK_ROWS rows.

    kept, reduced: sizes of the dims; kept_x, kept_out, reduced_x: their strides. HAS_INDICES: x are maxima of chunks
    whose indices are at from_index_ptr, in the same places.
    """
    at = (tl.program_id(0) % chunks).to(tl.int64)
    row = (tl.program_id(0) // chunks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    x_row = offsets(row, kept, kept_x, KEPT)[:, None]
    if KIND == SUM:
        best = tl.full([BLOCK_ROWS, BLOCK_COLS], 0.0, tl.float32)
    else:
        best = tl.full([BLOCK_ROWS, BLOCK_COLS], float("-inf"), tl.float32)
    index = tl.full([BLOCK_ROWS, BLOCK_COLS], NO_INDEX, tl.int64)
    for start in range(at * chunk, tl.minimum(n, (at + 1) * chunk), BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        keep = (row[:, None] < rows) & (col[None, :] < n)
        where = x_row + offsets(col, reduced, reduced_x, REDUCED)[None, :]
        if KIND == SUM:
            best += widen(tl.load(x_ptr + where, mask=keep, other=0.0))
        else:
            x = widen(tl.load(x_ptr + where, mask=keep, other=float("-inf")))
            better = keep & ((x > best) | ((x != x) & (best == best)))  # a NaN wins, the first one
            if KIND == ARGMAX:
                better = better | (keep & (index == NO_INDEX))
                if HAS_INDICES:
                    index = tl.where(better, tl.load(from_index_ptr + where, mask=keep, other=0), index)
                else:
                    index = tl.where(better, col[None, :].to(tl.int64), index)
            best = tl.where(better, x, best)
    if KIND == SUM:
        value = tl.sum(best, 1) / divisor
    else:
        nans = tl.where(best != best, 1, 0)
        is_nan = tl.max(nans, 1) > 0
        top = tl.max(tl.where(nans == 1, float("-inf"), best), 1)
        value = tl.where(is_nan, float("nan"), top)
        if KIND == ARGMAX:
            wins = tl.where(is_nan[:, None], nans == 1, best == top[:, None])
            index_out = tl.min(tl.where(wins, index, NO_INDEX), 1)
    if IS_LAST:
        where_out = offsets(row, kept, kept_out, KEPT)
        if KIND == ARGMAX:
            tl.store(index_ptr + where_out, index_out, mask=row < rows)
        else:
            tl.store(out_ptr + where_out, narrow(value, out_ptr.dtype.element_ty), mask=row < rows)
    else:
        tl.store(out_ptr + row * chunks + at, value, mask=row < rows)
        if KIND == ARGMAX:
            tl.store(index_ptr + row * chunks + at, index_out, mask=row < rows)


def _axes(call: Call, x: torch.Tensor, axis: Any) -> tuple[int, ...]:
    """Sorted dims from None, an int or several."""
    if axis is None:
        return tuple(range(x.dim()))
    several = axis if isinstance(axis, tuple | list) else (axis,)
    call.need(len(several) > 0, "axis=() reduces nothing; None, or one or several dims is needed")
    found = set()
    for d in several:
        if not isinstance(d, int) or not -x.dim() <= d < x.dim():
            needed = f"None, or one or several of {-x.dim()}..{x.dim() - 1} is needed"
            call.fail(f"axis={axis!r} with x of {x.dim()} dims; {needed}")
        call.need(d % x.dim() not in found, f"axis={axis!r} names a dim twice")
        found.add(d % x.dim())
    return tuple(sorted(found))


def _launch(
    call: Call,
    x: torch.Tensor,
    index: Any,
    out: Any,
    out_index: Any,
    kept: Any,
    reduced: Any,
    kind: int,
    divisor: float,
) -> None:
    """kept: (sizes, x strides, out strides), reduced: (sizes, x strides) of merged dims."""
    rows, n = 1, 1
    for size in kept[0]:
        rows *= size
    for size in reduced[0]:
        n *= size
    if rows == 0:
        return
    if kept[1][-1] == 1 and reduced[1][-1] != 1:  # neighbours in memory are neighbouring results
        block_cols = min(power_of_two(n), 32)
        block_rows = min(power_of_two(rows), 128)
    else:
        block_cols = min(power_of_two(n), 1024)
        block_rows = min(power_of_two(rows), max(1, 2048 // block_cols))
    programs = cdiv(rows, block_rows)
    chunks = max(1, min(cdiv(n, 4 * block_cols), 4 * call.num_multiprocessors // programs))
    chunk = cdiv(cdiv(n, chunks), block_cols) * block_cols
    chunks = cdiv(n, chunk) if n else 1
    is_last = chunks == 1
    parts = None if is_last else call.empty((rows, chunks), torch.float32)
    part_index = call.empty((rows, chunks), torch.int64) if not is_last and kind == ARGMAX.value else None
    call.launch(
        _reduce, programs * chunks, x_ptr=x, from_index_ptr=index, out_ptr=out if is_last else parts,
        index_ptr=out_index if is_last else part_index, kept=kept[0], kept_x=kept[1], kept_out=kept[2],
        reduced=reduced[0], reduced_x=reduced[1], rows=rows, n=n, chunks=chunks, chunk=chunk,
        divisor=divisor if is_last else 1.0, KEPT=len(kept[0]), REDUCED=len(reduced[0]), KIND=kind, IS_LAST=is_last,
        HAS_INDICES=index is not None, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols,
    )  # fmt: skip
    if parts is not None:
        steps = (*(torch.empty(kept[0], device="meta").stride()),)
        joined = (kept[0], tuple(step * chunks for step in steps), kept[2])
        _launch(call, parts, part_index, out, out_index, joined, ((chunks,), (1,)), kind, divisor)


def _run(
    op: str, kind: int, x: Any, axis: Any, keepdims: bool, out: Any, stream: Any, dtype: Any, is_mean: bool = False
) -> torch.Tensor:
    call = Call(op, stream, dtype)
    x = call.floats("x", x, (0, 8), rows=False)
    axes = _axes(call, x, axis)
    kept_dims = [d for d in range(x.dim()) if d not in axes]
    n = 1
    for d in axes:
        n *= x.shape[d]
    if kind != SUM.value:
        call.need(
            n > 0 or any(x.shape[d] == 0 for d in kept_dims), f"{op} over nothing; one element at least is needed"
        )
    squeezed = tuple(x.shape[d] for d in kept_dims)
    full = tuple(1 if d in axes else x.shape[d] for d in range(x.dim()))
    shape = full if keepdims else squeezed
    kind_out = torch.int64 if kind == ARGMAX.value else x.dtype
    if isinstance(out, torch.Tensor):
        if kind_out != torch.int64 and out.dtype == torch.float32:
            kind_out = torch.float32
        shape = full if tuple(out.shape) == full else squeezed if tuple(out.shape) == squeezed else shape
    result = call.output("out", out, shape, kind_out, rows=False)
    steps = result.stride() if len(shape) == len(squeezed) else [result.stride(d) for d in kept_dims]
    kept = merge_dims(squeezed, [x.stride(d) for d in kept_dims], steps)
    reduced = merge_dims([x.shape[d] for d in axes], [x.stride(d) for d in axes])
    if n == 0 and result.numel():
        call.fill(result, float("nan") if is_mean else 0.0)
        return result
    is_index = kind == ARGMAX.value
    _launch(
        call, x, None, None if is_index else result, result if is_index else None, kept, reduced, kind,
        float(n) if is_mean else 1.0,
    )  # fmt: skip
    return result


def sum_rows(call: Call, x: torch.Tensor, out: torch.Tensor) -> None:
    """out [n] = x [m, n] added over m, inside another op's call."""
    kept = merge_dims(out.shape, [x.stride(1)], out.stride())
    _launch(call, x, None, out, None, kept, merge_dims(x.shape[:1], x.stride()[:1]), SUM.value, 1.0)


def reduce_sum(
    x: Any, axis: Any = None, *, keepdims: bool = False, out: Any = None, stream: Any = None, dtype: Any = None
) -> Any:
    """Sum over any set of axes, as `flashkernel.reduce_sum`; float32, float16 or bfloat16, any strides, up to 8 dims.

    out: x's dtype (the default) or float32. Added in float32 in a fixed order. Returns out. Raises: ValueError for
    arguments that don't fit, NotImplementedError for arrays that Triton does not serve.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> fk_triton.reduce_sum(torch.ones(2, 3, device=fk_triton.default_device()), axis=1).tolist()
    [3.0, 3.0]
    """
    return _run("reduce_sum", SUM.value, x, axis, keepdims, out, stream, dtype)


def reduce_mean(
    x: Any, axis: Any = None, *, keepdims: bool = False, out: Any = None, stream: Any = None, dtype: Any = None
) -> Any:
    """Mean over any set of axes, as `flashkernel.reduce_mean`: `reduce_sum` divided by the count; NaN over nothing.

    Returns out. Raises: as `reduce_sum`.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> fk_triton.reduce_mean(torch.arange(4.0, device=fk_triton.default_device())).item()
    1.5
    """
    return _run("reduce_mean", SUM.value, x, axis, keepdims, out, stream, dtype, is_mean=True)


def reduce_max(
    x: Any, axis: Any = None, *, keepdims: bool = False, out: Any = None, stream: Any = None, dtype: Any = None
) -> Any:
    """Maximum over any set of axes, as `flashkernel.reduce_max`; exact, a NaN wins, over nothing ValueError.

    Returns out. Raises: as `reduce_sum`.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> fk_triton.reduce_max(torch.arange(6.0, device=fk_triton.default_device()).view(2, 3), axis=0).tolist()
    [3.0, 4.0, 5.0]
    """
    return _run("reduce_max", MAX.value, x, axis, keepdims, out, stream, dtype)


def argmax(
    x: Any, axis: Any = None, *, keepdims: bool = False, out: Any = None, stream: Any = None, dtype: Any = None
) -> Any:
    """int64 index of the first maximum over any set of axes, as `flashkernel.argmax`: row-major within the reduced
    dims.

    The first NaN wins, if there is one; over nothing ValueError. Returns out. Raises: as `reduce_sum`.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> fk_triton.argmax(torch.tensor([[1.0, 3, 2], [5, 4, 5]], device=fk_triton.default_device()), axis=-1).tolist()
    [1, 0]
    """
    return _run("argmax", ARGMAX.value, x, axis, keepdims, out, stream, dtype)
