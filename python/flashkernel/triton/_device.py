"""What the Triton kernels share on the device: widening and rounding, dots, tanh, GELU, ranges of tiles, strides.

Called from inside the kernels. Invariant: all arithmetic is float32 and each result is rounded once, to nearest even.
Where the interpreter differs from compiled code (it truncates to bfloat16 and multiplies bfloat16's bits as integers),
these functions do there what the hardware does.
"""

from __future__ import annotations

import triton.language as tl

from ._host import IS_INTERPRETED, device_function

INTERPRETED = tl.constexpr(IS_INTERPRETED)
LOG2_E = tl.constexpr(1.4426950408889634)


@device_function
def widen(x):
    """x in float32, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@device_function
def narrow(x, dtype: tl.constexpr):
    """float32 x rounded to the dtype, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, bits, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@device_function
def dot(a, b, acc):
    """acc + a b, added in float32; float32 operands are not rounded to TF32."""
    if INTERPRETED:
        return tl.dot(widen(a), widen(b), acc)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@device_function
def weighted_sum(weight, seen, x, acc, IS_SIGNED: tl.constexpr):
    """acc + weight x; an x that is not finite reaches only the rows that see it (0 * NaN would reach all of them).

    weight: x's dtype, 0 where not seen. With IS_SIGNED weights an infinite x gives NaN, else its own infinity.
    """
    wide = widen(x)
    finite = tl.abs(wide) < float("inf")
    acc = dot(weight, tl.where(finite, x, 0.0).to(x.dtype), acc)
    if (
        tl.max(tl.max(tl.where(finite, 0, 1), 1), 0) > 0
    ):  # rare: counts who sees which, in one product of small integers
        rows = tl.where(seen, 1.0, 0.0).to(tl.float16)
        above = tl.where(finite | (wide == float("-inf")), 0.0, 1.0)  # NaN counts on both sides
        below = tl.where(finite | (wide == float("inf")), 0.0, 256.0)  # more than a tile has columns
        counts = tl.dot(rows, (above + below).to(tl.float16), tl.full(acc.shape, 0.0, tl.float32))
        if IS_SIGNED:
            acc = tl.where(counts > 0, float("nan"), acc)
        else:
            acc = tl.where(counts >= 256, acc - float("inf"), acc)
            acc = tl.where(counts % 256 > 0, acc + float("inf"), acc)
    return acc


@device_function
def tanh(x):
    """Relative error 2e-7: an odd polynomial (minimax fit, 3e-9) below 0.6, 1 - 2 / (exp(2 |x|) + 1) above."""
    z = x * x
    small = -0.005905788753 * z + 0.0208053134567
    small = small * z - 0.0537866714261
    small = small * z + 0.133319579655
    small = small * z - 0.333332992608
    small = x + x * z * small
    large = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.6, small, tl.where(x < 0, -large, large))


@device_function
def offsets(index, sizes, strides, DIMS: tl.constexpr):
    """Element offsets (64-bit) of row-major indices into dims of those sizes and strides."""
    total = index.to(tl.int64) * 0
    for d in tl.static_range(DIMS - 1, 0, -1):
        total += (index % sizes[d]).to(tl.int64) * strides[d]
        index = index // sizes[d]
    return total + index.to(tl.int64) * strides[0]


@device_function
def tile_range(begin, end, inner_begin, inner_end, BLOCK: tl.constexpr):
    """Cuts [begin, end) at multiples of BLOCK: (first, inner, outer), where tiles of [inner, outer) lie in the inner
    range and those of [first, inner) and [outer, end) may not.
    """
    first = tl.maximum(begin, 0) // BLOCK * BLOCK
    inner = tl.maximum((tl.maximum(inner_begin, 0) + BLOCK - 1) // BLOCK * BLOCK, first)
    outer = tl.maximum(tl.minimum(inner_end, end), 0) // BLOCK * BLOCK
    is_empty = outer <= inner
    return first, tl.where(is_empty, first, inner), tl.where(is_empty, first, outer)


@device_function
def load_rows(ptr, rows, stride, limit, dims, NUM_DIMS: tl.constexpr, CHECK_ROWS: tl.constexpr):
    """The tile [rows, dims] at ptr; 0 past `limit` rows (when they are checked) and past NUM_DIMS."""
    where = ptr + rows.to(tl.int64)[:, None] * stride + dims[None, :]
    if CHECK_ROWS:
        return tl.load(where, mask=(rows[:, None] < limit) & (dims[None, :] < NUM_DIMS), other=0.0)
    else:
        return tl.load(where, mask=dims[None, :] < NUM_DIMS, other=0.0)


@device_function
def store_rows(ptr, value, rows, stride, limit, dims, NUM_DIMS: tl.constexpr):
    """Writes a float32 tile [rows, dims], rounded."""
    where = ptr + rows.to(tl.int64)[:, None] * stride + dims[None, :]
    value = narrow(value, ptr.dtype.element_ty)
    tl.store(where, value, mask=(rows[:, None] < limit) & (dims[None, :] < NUM_DIMS))
