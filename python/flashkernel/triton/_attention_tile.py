"""The pieces of every Triton attention kernel: a tile's scores, which keys a query sees, one step of online softmax.

Called by flash_attention.py, flash_attention_backward.py and paged_attention.py. Order of operations on a score: scale,
softcap, bias, ALiBi, masks (docs/numerics.md). Scores are natural logarithms; -inf stands for "not seen".
Milakov and Gimelshein (2018); Dao, FlashAttention-2 (2023).
"""

from __future__ import annotations

import triton.language as tl

from ._device import LOG2_E, dot, narrow, tanh, weighted_sum, widen
from ._host import device_function


@device_function
def modified_scores(
    s,
    rows,
    cols,
    shift,
    softcap,
    bias,
    bias_q,
    bias_k,
    slope,
    seq_q,
    seq_k,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """(s, capped) from scaled dots [rows, cols]: softcap, bias and ALiBi. capped is tanh's value, for the gradient.

    rows are query indices and shift = seq_k - seq_q, so that query i stands at key i + shift.
    """
    capped = s
    if HAS_SOFTCAP:
        capped = tanh(s / softcap)
        s = softcap * capped
    if HAS_BIAS:
        where = bias + rows.to(tl.int64)[:, None] * bias_q + cols.to(tl.int64)[None, :] * bias_k
        s += widen(tl.load(where, mask=(rows[:, None] < seq_q) & (cols[None, :] < seq_k), other=0.0))
    if HAS_SLOPES:
        s -= slope * tl.abs((rows[:, None] + shift - cols[None, :]).to(tl.float32))
    return s, capped


@device_function
def visible(rows, cols, shift, left, right, seq_k, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which keys [cols] each query [rows] sees; `left` and `right` count tokens from key row + shift."""
    mask = (cols[None, :] < seq_k) & (rows[:, None] >= 0)
    if HAS_RIGHT:
        mask = mask & (cols[None, :] <= rows[:, None] + shift + right)
    if HAS_LEFT:
        mask = mask & (cols[None, :] >= rows[:, None] + shift - left)
    return mask


@device_function
def softmax_step(s, v, top, total, acc, IS_MASKED: tl.constexpr):
    """One tile of online softmax: new (top, total, acc) with keys of scores s and values v."""
    new_top = tl.maximum(top, tl.max(s, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # exp never sees inf - inf
    p = tl.exp2((s - base[:, None]) * LOG2_E)
    alpha = tl.exp2((top - base) * LOG2_E)
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    if IS_MASKED:
        acc = weighted_sum(narrow(p, v.dtype), s != float("-inf"), v, acc, False)
    else:
        acc = dot(narrow(p, v.dtype), v, acc)
    return new_top, total, acc


@device_function
def softmax_finish(top, total, acc, sink, HAS_SINKS: tl.constexpr):
    """(out, lse) of the rows; a sink joins the denominator only. A row that saw nothing: 0 and -inf (or the sink)."""
    if HAS_SINKS:
        joined = tl.maximum(top, sink)
        base = tl.where(joined == float("-inf"), 0.0, joined)
        factor = tl.exp2((top - base) * LOG2_E)
        total = total * factor + tl.exp2((sink - base) * LOG2_E)
        acc = acc * factor[:, None]
        top = joined
    nothing = total == 0.0
    out = acc / tl.where(nothing, 1.0, total)[:, None]
    base = tl.where(top == float("-inf"), 0.0, top)
    lse = tl.where(nothing, float("-inf"), base + tl.log(tl.where(nothing, 1.0, total)))
    return out, lse
