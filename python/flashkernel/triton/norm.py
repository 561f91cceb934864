"""layer_norm and rms_norm in Triton, with a fused residual, statistics and gradients.

One program takes one row: two passes over it (mean, then variance) so that a large mean does not cancel. Rows up to
MAX_TILE features stay on the chip. The weights' gradients are added over chunks of rows, then over the chunks, in a
fixed order. Ba, Kiros and Hinton (2016); Zhang and Sennrich (2019).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ._device import narrow, widen
from ._host import Call, cdiv, device_function, power_of_two
from .reduce import sum_rows

MAX_TILE = 16384


@device_function
def _read(x_ptr, residual_ptr, h_ptr, col, n, HAS_RESIDUAL: tl.constexpr):
    """h = x + residual of some columns, rounded to x's dtype and written."""
    h = widen(tl.load(x_ptr + col, mask=col < n, other=0.0))
    if HAS_RESIDUAL:
        rounded = narrow(h + widen(tl.load(residual_ptr + col, mask=col < n, other=0.0)), h_ptr.dtype.element_ty)
        tl.store(h_ptr + col, rounded, mask=col < n)
        h = widen(rounded)
    return h


@device_function
def _write(
    out_ptr, weight_ptr, bias_ptr, value, offset, col, n, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    if HAS_WEIGHT:
        value = value * (widen(tl.load(weight_ptr + col, mask=col < n, other=0.0)) + offset)
    if HAS_BIAS:
        value = value + widen(tl.load(bias_ptr + col, mask=col < n, other=0.0))
    tl.store(out_ptr + col, narrow(value, out_ptr.dtype.element_ty), mask=col < n)


@triton.jit
def _norm(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, h_ptr, mean_ptr, rstd_ptr, x_t, residual_t, out_t, h_t, n, eps,
    weight_offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATS: tl.constexpr,
    IS_RMS: tl.constexpr, IS_ONE_TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_t
    out_ptr += row * out_t
    if HAS_RESIDUAL:
        residual_ptr += row * residual_t
        h_ptr += row * h_t
    else:
        h_ptr = x_ptr
    col = tl.arange(0, BLOCK)
    mean = 0.0
    if IS_ONE_TILE:
        h = _read(x_ptr, residual_ptr, h_ptr, col, n, HAS_RESIDUAL)
        if not IS_RMS:
            mean = tl.sum(h, 0) / n
        centred = tl.where(col < n, h - mean, 0.0)
        variance = tl.sum(centred * centred, 0) / n
        rstd = 1.0 / tl.sqrt_rn(variance + eps)
        _write(out_ptr, weight_ptr, bias_ptr, centred * rstd, weight_offset, col, n, HAS_WEIGHT, HAS_BIAS)
    else:
        total = tl.full([BLOCK], 0.0, tl.float32)
        for start in range(0, n, BLOCK):
            total += _read(x_ptr, residual_ptr, h_ptr, start + col, n, HAS_RESIDUAL)
        if not IS_RMS:
            mean = tl.sum(total, 0) / n
        tl.debug_barrier()  # h, written above, is read by other threads below
        squares = tl.full([BLOCK], 0.0, tl.float32)
        for start in range(0, n, BLOCK):
            h = widen(tl.load(h_ptr + start + col, mask=start + col < n, other=0.0))
            centred = tl.where(start + col < n, h - mean, 0.0)
            squares += centred * centred
        rstd = 1.0 / tl.sqrt_rn(tl.sum(squares, 0) / n + eps)
        for start in range(0, n, BLOCK):
            h = widen(tl.load(h_ptr + start + col, mask=start + col < n, other=0.0))
            _write(
                out_ptr, weight_ptr, bias_ptr, (h - mean) * rstd, weight_offset, start + col, n, HAS_WEIGHT, HAS_BIAS
            )
    if HAS_STATS:
        tl.store(rstd_ptr + row, rstd)
        if not IS_RMS:
            tl.store(mean_ptr + row, mean)


@triton.jit
def _input_gradient(
    grad_ptr, h_ptr, weight_ptr, mean_ptr, rstd_ptr, residual_ptr, out_ptr, grad_t, h_t, residual_t, n, weight_offset,
    HAS_WEIGHT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_RMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """rstd (g - mean(g) - n mean(g n)) + residual's gradient, with g = grad weight and n = (h - mean) rstd."""
    row = tl.program_id(0).to(tl.int64)
    grad_ptr += row * grad_t
    h_ptr += row * h_t
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if not IS_RMS:
        mean = tl.load(mean_ptr + row)
    sums = tl.full([BLOCK], 0.0, tl.float32)
    products = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, n, BLOCK):
        col = start + tl.arange(0, BLOCK)
        g = widen(tl.load(grad_ptr + col, mask=col < n, other=0.0))
        if HAS_WEIGHT:
            g = g * (widen(tl.load(weight_ptr + col, mask=col < n, other=0.0)) + weight_offset)
        h = widen(tl.load(h_ptr + col, mask=col < n, other=0.0))
        sums += g
        products += g * tl.where(col < n, (h - mean) * rstd, 0.0)
    along = tl.sum(products, 0) / n
    level = 0.0
    if not IS_RMS:
        level = tl.sum(sums, 0) / n
    for start in range(0, n, BLOCK):
        col = start + tl.arange(0, BLOCK)
        g = widen(tl.load(grad_ptr + col, mask=col < n, other=0.0))
        if HAS_WEIGHT:
            g = g * (widen(tl.load(weight_ptr + col, mask=col < n, other=0.0)) + weight_offset)
        h = widen(tl.load(h_ptr + col, mask=col < n, other=0.0))
        value = rstd * (g - level - (h - mean) * rstd * along)
        if HAS_RESIDUAL:
            value += widen(tl.load(residual_ptr + row * residual_t + col, mask=col < n, other=0.0))
        tl.store(out_ptr + row * n + col, narrow(value, out_ptr.dtype.element_ty), mask=col < n)


@triton.jit
def _weight_gradients(
    grad_ptr, h_ptr, mean_ptr, rstd_ptr, weight_sums_ptr, bias_sums_ptr, grad_t, h_t, rows, n, rows_each,
    IS_RMS: tl.constexpr, NEED_WEIGHT: tl.constexpr, NEED_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """sums [chunks, n] of grad (h - mean) rstd and of grad, over `rows_each` rows."""
    blocks_n = tl.cdiv(n, BLOCK_N)
    chunk = tl.program_id(0) // blocks_n
    col = tl.program_id(0) % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    weights = tl.full([BLOCK_N], 0.0, tl.float32)
    biases = tl.full([BLOCK_N], 0.0, tl.float32)
    for start in range(chunk * rows_each, tl.minimum(rows, (chunk + 1) * rows_each), BLOCK_M):
        row = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        keep = (row[:, None] < rows) & (col[None, :] < n)
        grad = widen(tl.load(grad_ptr + row[:, None] * grad_t + col[None, :], mask=keep, other=0.0))
        biases += tl.sum(grad, 0)
        if NEED_WEIGHT:
            h = widen(tl.load(h_ptr + row[:, None] * h_t + col[None, :], mask=keep, other=0.0))
            rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
            if not IS_RMS:
                h = h - tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
            weights += tl.sum(tl.where(keep, grad * h * rstd[:, None], 0.0), 0)
    if NEED_WEIGHT:
        tl.store(weight_sums_ptr + chunk.to(tl.int64) * n + col, weights, mask=col < n)
    if NEED_BIAS:
        tl.store(bias_sums_ptr + chunk.to(tl.int64) * n + col, biases, mask=col < n)


def _parameter(call: Call, name: str, p: Any, x: torch.Tensor) -> Any:
    if p is None:
        return None
    p = call.floats(name, p, 1)
    call.shape(name, p, x.shape[-1:])
    return p


def _check_offset(call: Call, weight: Any, offset: float) -> None:
    call.need(math.isfinite(offset), f"weight_offset={offset}; a finite number is needed")
    call.need(offset == 0 or weight is not None, f"weight_offset={offset} but weight is absent; a weight is needed")


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 8 if block <= 8192 else 16


def _forward(
    op: str, x: Any, weight: Any, bias: Any, eps: float, weight_offset: float, residual: Any, return_stats: bool,
    out: Any, residual_out: Any, stream: Any, dtype: Any,
) -> Any:  # fmt: skip
    call = Call(op, stream, dtype)
    is_rms = op == "rms_norm"
    x = call.floats("x", x, (1, 8))
    call.need(math.isfinite(eps) and eps >= 0, f"eps={eps}; 0 or a positive number is needed")
    weight, bias = _parameter(call, "weight", weight, x), _parameter(call, "bias", bias, x)
    _check_offset(call, weight, weight_offset)
    if residual is not None:
        residual = call.floats("residual", residual, x.dim(), like=x)
        call.shape("residual", residual, x.shape)
    else:
        call.need(residual_out is None, "residual_out without residual")
    result = call.output("out", out, x.shape, x.dtype, may_be=("x", "residual"))
    h = None
    if residual is not None:
        h = call.output("residual_out", residual_out, x.shape, x.dtype, may_be=("x", "residual"))
    mean = call.empty(x.shape[:-1], torch.float32) if return_stats and not is_rms else None
    rstd = call.empty(x.shape[:-1], torch.float32) if return_stats else None
    n = x.shape[-1]
    if x.numel():
        x_rows, out_rows = call.as_rows("x", x), call.as_rows("out", result)
        residual_rows = None if residual is None else call.as_rows("residual", residual)
        h_rows = None if h is None else call.as_rows("residual_out", h)
        block = min(power_of_two(n), MAX_TILE)
        call.launch(
            _norm, x_rows.shape[0], x_ptr=x_rows, residual_ptr=residual_rows, weight_ptr=weight, bias_ptr=bias,
            out_ptr=out_rows, h_ptr=h_rows, mean_ptr=mean, rstd_ptr=rstd, x_t=x_rows.stride(0),
            residual_t=0 if residual_rows is None else residual_rows.stride(0), out_t=out_rows.stride(0),
            h_t=0 if h_rows is None else h_rows.stride(0), n=n, eps=float(eps), weight_offset=float(weight_offset),
            HAS_RESIDUAL=residual is not None,
            HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, HAS_STATS=return_stats, IS_RMS=is_rms,
            IS_ONE_TILE=n <= block, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    results = tuple(y for y in (result, h, mean, rstd) if y is not None)
    return results[0] if len(results) == 1 else results


def _backward(
    op: str, grad_out: Any, h: Any, weight: Any, mean: Any, rstd: Any, grad_residual_out: Any,
    weight_offset: float, need_weight: bool, need_bias: bool, stream: Any, dtype: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    call = Call(op, stream, dtype)
    is_rms = op == "rms_norm_backward"
    h = call.floats("h", h, (1, 8))
    grad_out = call.floats("grad_out", grad_out, h.dim(), like=h)
    call.shape("grad_out", grad_out, h.shape)
    weight = _parameter(call, "weight", weight, h)
    _check_offset(call, weight, weight_offset)
    rstd = call.float32("rstd", rstd, h.shape[:-1])
    mean = None if is_rms else call.float32("mean", mean, h.shape[:-1])
    for name, x in (("mean", mean), ("rstd", rstd)):
        call.need(x is None or x.is_contiguous(), f"{name} has strides; a contiguous array is needed")
    if grad_residual_out is not None:
        grad_residual_out = call.floats("grad_residual_out", grad_residual_out, h.dim(), like=h)
        call.shape("grad_residual_out", grad_residual_out, h.shape)
    n = h.shape[-1]
    kind = h.dtype if weight is None else weight.dtype
    grad_x = call.empty(h.shape, h.dtype)
    grad_weight = call.empty((n,), kind) if need_weight and weight is not None else None
    grad_bias = call.empty((n,), kind) if need_bias else None
    if not h.numel():
        for grad in (grad_weight, grad_bias):
            if grad is not None:
                call.fill(grad, 0.0)
        return grad_x, grad_weight, grad_bias
    g, h_rows = call.as_rows("grad_out", grad_out), call.as_rows("h", h)
    extra = None if grad_residual_out is None else call.as_rows("grad_residual_out", grad_residual_out)
    rows = h_rows.shape[0]
    block = min(power_of_two(n), 4096)
    call.launch(
        _input_gradient, rows, grad_ptr=g, h_ptr=h_rows, weight_ptr=weight, mean_ptr=mean, rstd_ptr=rstd,
        residual_ptr=extra, out_ptr=grad_x, grad_t=g.stride(0), h_t=h_rows.stride(0),
        residual_t=0 if extra is None else extra.stride(0), n=n, weight_offset=float(weight_offset),
        HAS_WEIGHT=weight is not None, HAS_RESIDUAL=extra is not None, IS_RMS=is_rms,
        BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    if grad_weight is not None or grad_bias is not None:
        block_m, block_n = 16, min(128, power_of_two(n))
        chunks = max(1, min(cdiv(rows, block_m), cdiv(4 * call.num_multiprocessors, cdiv(n, block_n))))
        weight_sums = None if grad_weight is None else call.empty((chunks, n), torch.float32)
        bias_sums = None if grad_bias is None else call.empty((chunks, n), torch.float32)
        call.launch(
            _weight_gradients, chunks * cdiv(n, block_n), grad_ptr=g, h_ptr=h_rows, mean_ptr=mean, rstd_ptr=rstd,
            weight_sums_ptr=weight_sums, bias_sums_ptr=bias_sums, grad_t=g.stride(0), h_t=h_rows.stride(0), rows=rows,
            n=n, rows_each=cdiv(cdiv(rows, chunks), block_m) * block_m, IS_RMS=is_rms,
            NEED_WEIGHT=grad_weight is not None, NEED_BIAS=grad_bias is not None, BLOCK_M=block_m, BLOCK_N=block_n,
        )  # fmt: skip
        for sums, grad in ((weight_sums, grad_weight), (bias_sums, grad_bias)):
            if sums is not None and grad is not None:
                sum_rows(call, sums, grad)
    return grad_x, grad_weight, grad_bias


def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    residual: Any = None,
    return_stats: bool = False,
    out: Any = None,
    residual_out: Any = None,
    stream: Any = None,
    dtype: Any = None,
) -> Any:
    """(h - mean(h)) / sqrt(var(h) + eps) * (weight + weight_offset) + bias with h = x + residual, as
    `flashkernel.layer_norm`; x [..., features].

    weight, bias: [features], any floating dtype. Returns out; then h if residual is given; then mean and rstd if
    return_stats.
    Raises: ValueError for arguments that don't fit, NotImplementedError for leading dims that no one stride can walk
    and for arrays that Triton does not serve.

    Source: Ba, Kiros and Hinton, Layer Normalization (2016).

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> fk_triton.layer_norm(torch.tensor([[-1.0, 1.0]], device=fk_triton.default_device()), eps=0.0).tolist()
    [[-1.0, 1.0]]
    """
    return _forward(
        "layer_norm", x, weight, bias, eps, weight_offset, residual, return_stats, out, residual_out, stream, dtype
    )


def rms_norm(
    x: Any,
    weight: Any = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Any = None,
    return_stats: bool = False,
    out: Any = None,
    residual_out: Any = None,
    stream: Any = None,
    dtype: Any = None,
) -> Any:
    """h / sqrt(mean(h^2) + eps) * (weight + weight_offset) with h = x + residual, as `flashkernel.rms_norm`; x [...,
    features].

    Returns out; then h if residual is given; then rstd if return_stats. Raises: as `layer_norm`.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> fk_triton.rms_norm(torch.full((1, 4), 2.0, device=fk_triton.default_device()), eps=0.0).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """
    return _forward(
        "rms_norm", x, weight, None, eps, weight_offset, residual, return_stats, out, residual_out, stream, dtype
    )


def layer_norm_backward(
    grad_out: Any,
    h: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    *,
    grad_residual_out: Any = None,
    weight_offset: float = 0.0,
    need_weight: bool = True,
    need_bias: bool = True,
    stream: Any = None,
    dtype: Any = None,
) -> tuple[Any, Any, Any]:
    """Gradients of `layer_norm`, as `flashkernel.layer_norm_backward`: (grad_x, grad_weight, grad_bias), None where
    not asked for.

    Raises: as `layer_norm`.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> device = fk_triton.default_device()
    >>> x, one = torch.tensor([[-1.0, 1.0]], device=device), torch.ones(2, device=device)
    >>> _, mean, rstd = fk_triton.layer_norm(x, one, return_stats=True)
    >>> fk_triton.layer_norm_backward(x, x, one, mean, rstd)[2].tolist()
    [-1.0, 1.0]
    """
    return _backward(
        "layer_norm_backward",
        grad_out,
        h,
        weight,
        mean,
        rstd,
        grad_residual_out,
        weight_offset,
        need_weight,
        need_bias,
        stream,
        dtype,
    )


def rms_norm_backward(
    grad_out: Any,
    h: Any,
    weight: Any,
    rstd: Any,
    *,
    grad_residual_out: Any = None,
    weight_offset: float = 0.0,
    need_weight: bool = True,
    stream: Any = None,
    dtype: Any = None,
) -> tuple[Any, Any]:
    """Gradients of `rms_norm`, as `flashkernel.rms_norm_backward`: (grad_x, grad_weight). Raises: as `layer_norm`.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> x, one = torch.ones(1, 4, device=fk_triton.default_device()), torch.ones(4, device=fk_triton.default_device())
    >>> _, rstd = fk_triton.rms_norm(x, one, eps=0.0, return_stats=True)
    >>> fk_triton.rms_norm_backward(x, x, one, rstd)[1].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    return _backward(
        "rms_norm_backward",
        grad_out,
        h,
        weight,
        None,
        rstd,
        grad_residual_out,
        weight_offset,
        need_weight,
        False,
        stream,
        dtype,
    )[:2]
