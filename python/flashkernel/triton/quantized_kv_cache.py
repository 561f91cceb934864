"""8-bit pages in Triton: elements to numbers and back, and the kernels of kv_append and kv_read for such pages.

number = element * scale; an element is x * (1 / scale), rounded to nearest even and saturated, bit for bit what the
library's own kernels store (docs/low_precision.md). float8_e4m3fn is worked out on its bits, as uint8: Triton's
interpreter knows no such numbers, nor do GPUs before 8.9. Called by paged_kv_cache.py and paged_attention.py. OCP,
8-bit Floating Point Specification (2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._device import narrow, widen
from ._host import device_function
from .rope import angles, rotate_heads, table_row

LEAST_SCALE = tl.constexpr(2.0**-100)
LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)


@device_function
def element_value(element, IS_E4M3: tl.constexpr):
    """Elements (uint8 or int8) in float32, exactly."""
    if IS_E4M3:
        code = element.to(tl.int32)
        rest = code & 0x7F
        # Exponent and mantissa in float32's places, biases of 7 and 127; subnormals count steps of 2^-9.
        value = ((rest + (120 << 3)) << 20).to(tl.float32, bitcast=True)
        value = tl.where(rest < 8, rest.to(tl.float32) * 0.001953125, value)
        value = tl.where(rest == 0x7F, float("nan"), value)
        return tl.where(code >= 0x80, -value, value)
    else:
        return element.to(tl.float32)


@device_function
def to_element(x, IS_E4M3: tl.constexpr):
    """float32 x as an element: to nearest even, saturated to 448 or 127. NaN stays, as int8 it is 0."""
    if IS_E4M3:
        magnitude = tl.minimum(tl.abs(x), 448.0)
        bits = magnitude.to(tl.int32, bitcast=True)
        normal = (bits + 0x7FFFF + ((bits >> 20) & 1) - (120 << 23)) >> 20
        # Below 2^-6 steps are 2^-9: float32's last place at 2^14, so that the addition rounds.
        subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        rest = tl.where(magnitude < 0.015625, subnormal, normal)
        rest = tl.where(x == x, rest, 0x7F)
        return (((x.to(tl.int32, bitcast=True) >> 24) & 0x80) | rest).to(tl.uint8)
    else:
        kept = tl.where(x == x, tl.minimum(tl.maximum(x, -127.0), 127.0), 0.0)
        # float32's last place at 1.5 * 2^23 is 1: the addition rounds.
        return ((kept + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@device_function
def _largest(x):
    """(largest magnitude of each row, whether it has a NaN), NaN not counted."""
    return tl.max(tl.where(x == x, tl.abs(x), 0.0), 1), tl.max(tl.where(x == x, 0, 1), 1)


@device_function
def _inverse_scale(largest, has_nan, scale_at, live, IS_E4M3: tl.constexpr, PER_TOKEN: tl.constexpr):
    """1 / scale of rows; a scale of the token's own is worked out and written."""
    if PER_TOKEN:
        largest = tl.minimum(largest, LARGEST_FLOAT)
        scale = tl.div_rn(largest, tl.full(largest.shape, 448.0 if IS_E4M3 else 127.0, tl.float32))
        scale = tl.maximum(scale, LEAST_SCALE)
        if not IS_E4M3:
            scale = tl.where(has_nan > 0, float("nan"), scale)
        tl.store(scale_at, scale, mask=live)
    else:
        scale = tl.load(scale_at, mask=live, other=1.0)
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@device_function
def _store_heads(
    from_ptr, to_ptr, scale_ptr, from_h, to_h, scale_h, heads, IS_E4M3: tl.constexpr, PER_TOKEN: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """One token's heads as elements."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    for start in range(0, heads, BLOCK_HEADS):
        head = (start + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
        keep = (head[:, None] < heads) & (dim < HEAD_DIM)
        x = widen(tl.load(from_ptr + head[:, None] * from_h + dim, mask=keep, other=0.0))
        largest, has_nan = _largest(x)
        inverse = _inverse_scale(largest, has_nan, scale_ptr + head * scale_h, head < heads, IS_E4M3, PER_TOKEN)
        tl.store(to_ptr + head[:, None] * to_h + dim, to_element(x * inverse[:, None], IS_E4M3), mask=keep)


@device_function
def _store_rotated_heads(
    from_ptr, to_ptr, scale_ptr, from_h, to_h, scale_h, heads, cos, sin, IS_E4M3: tl.constexpr,
    PER_TOKEN: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_HEADS: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The same, rotated by RoPE on the way, without a rounding in between."""
    pair = tl.arange(0, BLOCK)[None, :]
    if IS_INTERLEAVED:
        first = 2 * pair
        second = first + 1
    else:
        first = pair
        second = pair + PAIRS
    rest = 2 * PAIRS + tl.arange(0, BLOCK_REST)[None, :]
    for start in range(0, heads, BLOCK_HEADS):
        head = (start + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
        x_at = from_ptr + head[:, None] * from_h
        to_at = to_ptr + head[:, None] * to_h
        turned = (head[:, None] < heads) & (pair < PAIRS)
        kept = (head[:, None] < heads) & (rest < HEAD_DIM)
        a = widen(tl.load(x_at + first, mask=turned, other=0.0))
        b = widen(tl.load(x_at + second, mask=turned, other=0.0))
        c = widen(tl.load(x_at + rest, mask=kept, other=0.0))
        x = a * cos - b * sin
        y = b * cos + a * sin
        largest, has_nan = _largest(x)
        largest_y, has_nan_y = _largest(y)
        largest_c, has_nan_c = _largest(c)
        inverse = _inverse_scale(
            tl.maximum(tl.maximum(largest, largest_y), largest_c), has_nan | has_nan_y | has_nan_c,
            scale_ptr + head * scale_h, head < heads, IS_E4M3, PER_TOKEN,
        )[:, None]  # fmt: skip
        tl.store(to_at + first, to_element(x * inverse, IS_E4M3), mask=turned)
        tl.store(to_at + second, to_element(y * inverse, IS_E4M3), mask=turned)
        tl.store(to_at + rest, to_element(c * inverse, IS_E4M3), mask=kept)


@triton.jit
def append_quantized(
    k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, slots_ptr, positions_ptr, inv_freq_ptr, cos_ptr, sin_ptr, q_ptr,
    q_out_ptr, cos_t, sin_t, table_rows,
    k_scales_ptr, v_scales_ptr, k_scales_p, k_scales_h, k_scales_t, v_scales_p, v_scales_h, v_scales_t,
    k_t, k_h, v_t, v_h, k_pages_p, k_pages_t, k_pages_h, v_pages_p, v_pages_t, v_pages_h, q_t, q_h, q_out_t, q_out_h,
    heads, heads_q, page_size, num_slots,
    HAS_ROPE: tl.constexpr, HAS_Q: tl.constexpr, IS_TABLE: tl.constexpr, LOG2_THETA: tl.constexpr,
    HAS_INV_FREQ: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, COPY_HEADS: tl.constexpr,
    IS_E4M3: tl.constexpr, PER_TOKEN: tl.constexpr,
):  # fmt: skip
    """kv_append: one token into pages of 8 bits."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    if HAS_ROPE:
        position = tl.load(positions_ptr + t).to(tl.int64)
        if IS_TABLE:
            cos, sin = table_row(position, cos_ptr, sin_ptr, cos_t, sin_t, table_rows, PAIRS, BLOCK)
        else:
            cos, sin = angles(position, inv_freq_ptr, LOG2_THETA, PAIRS, BLOCK, HAS_INV_FREQ)
        cos = cos[None, :]
        sin = sin[None, :]
        if HAS_Q:
            rotate_heads(
                q_ptr + t * q_t, q_out_ptr + t * q_out_t, q_h, q_out_h, heads_q, cos, sin, HEAD_DIM, PAIRS, BLOCK,
                BLOCK_REST, BLOCK_HEADS, IS_INTERLEAVED,
            )  # fmt: skip
    if (slot >= 0) & (slot < num_slots):
        page = slot // page_size
        token = slot % page_size
        k_to = k_pages_ptr + page * k_pages_p + token * k_pages_t
        v_to = v_pages_ptr + page * v_pages_p + token * v_pages_t
        k_scale = k_scales_ptr + page * k_scales_p + token * k_scales_t
        v_scale = v_scales_ptr + page * v_scales_p + token * v_scales_t
        if HAS_ROPE:
            _store_rotated_heads(
                k_ptr + t * k_t, k_to, k_scale, k_h, k_pages_h, k_scales_h, heads, cos, sin, IS_E4M3, PER_TOKEN,
                HEAD_DIM, PAIRS, BLOCK, BLOCK_REST, BLOCK_HEADS, IS_INTERLEAVED,
            )  # fmt: skip
        else:
            _store_heads(
                k_ptr + t * k_t, k_to, k_scale, k_h, k_pages_h, k_scales_h, heads, IS_E4M3, PER_TOKEN, HEAD_DIM,
                BLOCK_D, COPY_HEADS,
            )  # fmt: skip
        _store_heads(
            v_ptr + t * v_t, v_to, v_scale, v_h, v_pages_h, v_scales_h, heads, IS_E4M3, PER_TOKEN, HEAD_DIM_V,
            BLOCK_DV, COPY_HEADS,
        )  # fmt: skip


@device_function
def _load_heads(
    from_ptr, scale_ptr, to_ptr, from_h, scale_h, to_h, heads, live_heads, IS_E4M3: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """One token's elements as numbers; heads from live_heads on become zeros."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    for start in range(0, heads, BLOCK_HEADS):
        head = (start + tl.arange(0, BLOCK_HEADS)).to(tl.int64)[:, None]
        keep = (head < heads) & (dim < HEAD_DIM)
        element = tl.load(from_ptr + head * from_h + dim, mask=keep & (head < live_heads), other=0)
        scale = tl.load(scale_ptr + head * scale_h, mask=head < live_heads, other=0.0)
        value = narrow(element_value(element, IS_E4M3) * scale, to_ptr.dtype.element_ty)
        tl.store(to_ptr + head * to_h + dim, value, mask=keep)


@triton.jit(do_not_specialize=["max_seq"])
def read_quantized(
    k_pages_ptr, v_pages_ptr, table_ptr, lens_ptr, k_out_ptr, v_out_ptr, k_pages_p, k_pages_t, k_pages_h,
    v_pages_p, v_pages_t, v_pages_h, table_b, table_p, lens_b, k_out_b, k_out_t, k_out_h, v_out_b, v_out_t, v_out_h,
    k_scales_ptr, v_scales_ptr, k_scales_p, k_scales_h, k_scales_t, v_scales_p, v_scales_h, v_scales_t,
    heads, page_size, num_pages, max_pages, max_seq,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    COPY_HEADS: tl.constexpr, IS_E4M3: tl.constexpr,
):  # fmt: skip
    """kv_read: one token out of pages of 8 bits."""
    b = (tl.program_id(0) // max_seq).to(tl.int64)
    j = (tl.program_id(0) % max_seq).to(tl.int64)
    inside = (j < tl.load(lens_ptr + b * lens_b)) & (j // page_size < max_pages)
    page = tl.load(table_ptr + b * table_b + j // page_size * table_p, mask=inside, other=0).to(tl.int64)
    inside = inside & (page >= 0) & (page < num_pages)
    live = tl.where(inside, heads, 0)
    token = j % page_size
    _load_heads(
        k_pages_ptr + page * k_pages_p + token * k_pages_t, k_scales_ptr + page * k_scales_p + token * k_scales_t,
        k_out_ptr + b * k_out_b + j * k_out_t, k_pages_h, k_scales_h, k_out_h, heads, live, IS_E4M3, HEAD_DIM, BLOCK_D,
        COPY_HEADS,
    )  # fmt: skip
    _load_heads(
        v_pages_ptr + page * v_pages_p + token * v_pages_t, v_scales_ptr + page * v_scales_p + token * v_scales_t,
        v_out_ptr + b * v_out_b + j * v_out_t, v_pages_h, v_scales_h, v_out_h, heads, live, IS_E4M3, HEAD_DIM_V,
        BLOCK_DV, COPY_HEADS,
    )  # fmt: skip


@triton.jit
def copy_scales(
    k_scales_ptr, v_scales_ptr, src_ptr, dst_ptr, src_n, dst_n, k_scales_p, k_scales_h, k_scales_t,
    v_scales_p, v_scales_h, v_scales_t, heads, page_size, num_pages, COPY_HEADS: tl.constexpr,
):  # fmt: skip
    """kv_copy_pages: the scales of one token of a page."""
    i = (tl.program_id(0) // page_size).to(tl.int64)
    token = (tl.program_id(0) % page_size).to(tl.int64)
    src = tl.load(src_ptr + i * src_n).to(tl.int64)
    dst = tl.load(dst_ptr + i * dst_n).to(tl.int64)
    if (src >= 0) & (src < num_pages) & (dst >= 0) & (dst < num_pages):
        for start in range(0, heads, COPY_HEADS):
            head = (start + tl.arange(0, COPY_HEADS)).to(tl.int64)
            k_at = k_scales_ptr + head * k_scales_h + token * k_scales_t
            v_at = v_scales_ptr + head * v_scales_h + token * v_scales_t
            k = tl.load(k_at + src * k_scales_p, mask=head < heads)
            v = tl.load(v_at + src * v_scales_p, mask=head < heads)
            tl.store(k_at + dst * k_scales_p, k, mask=head < heads)
            tl.store(v_at + dst * v_scales_p, v, mask=head < heads)
