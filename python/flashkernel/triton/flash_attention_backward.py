"""FlashAttention in Triton, backward: attention_backward, attention_varlen_backward.

The scores are computed again from q, k and LSE. One kernel owns BLOCK_N keys and adds their dK and dV over all queries
that see them, another owns BLOCK_M queries and adds dQ over their keys: no atomics, so the sums are the same bit for
bit on every run. Dao, FlashAttention-2 (2023), Algorithm 2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..attention_options import AttentionOptions
from ._attention_host import (
    Options,
    as_4d,
    dense,
    given_gradients,
    head_blocks,
    options,
    packed,
    tile_shape,
    written_gradients,
)
from ._attention_rests import load_lse, with_rests
from ._attention_tile import modified_scores, visible
from ._device import LOG2_E, dot, load_rows, narrow, store_rows, tile_range, weighted_sum, widen
from ._host import Call, cdiv, device_function, power_of_two
from .flash_attention import sequence, strides


@device_function
def _score_gradients(
    q, k, v, grad, lse, rest, delta, rows, cols, scale, softcap, left, right, bias, bias_q, bias_k, slope, seq_q, seq_k,
    HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """(p, ds, ds before softcap, seen) of a tile [rows, cols]: probabilities, gradients of the modified score and of
    scale * <q, k>.
    """
    zero = tl.full([rows.shape[0], cols.shape[0]], 0.0, tl.float32)
    s = dot(q, tl.trans(k), zero) * scale
    s, capped = modified_scores(
        s, rows, cols, seq_k - seq_q, softcap, bias, bias_q, bias_k, slope, seq_q, seq_k,
        HAS_SOFTCAP, HAS_BIAS, HAS_SLOPES,
    )  # fmt: skip
    distance = s - lse[:, None]
    if HAS_BIAS:
        distance = distance - rest[:, None]
    p = tl.exp2(distance * LOG2_E)
    dp = dot(grad, tl.trans(v), zero)
    ds = p * (dp - delta[:, None])
    seen = s == s
    if IS_MASKED:  # a row without any key has LSE -inf
        seen = visible(rows, cols, seq_k - seq_q, left, right, seq_k, HAS_LEFT, HAS_RIGHT)
        seen = seen & (rows[:, None] < seq_q) & (s != float("-inf")) & (lse[:, None] != float("-inf"))
        p = tl.where(seen, p, 0.0)
        ds = tl.where(seen, ds, 0.0)
    inner = ds
    if HAS_SOFTCAP:
        inner = ds * (1.0 - capped * capped)
        if IS_MASKED:
            inner = tl.where(seen, inner, 0.0)
    return p, ds, inner, seen


@device_function
def _add(weight, seen, x, acc, IS_MASKED: tl.constexpr):
    if IS_MASKED:
        return weighted_sum(narrow(weight, x.dtype), seen, x, acc, True)
    else:
        return dot(narrow(weight, x.dtype), x, acc)


@triton.jit
def _deltas(
    grad_ptr, out_ptr, grad_lse_ptr, delta_ptr, grad_b, grad_h, grad_t, out_b, out_h, out_t, glse_b, glse_h, glse_t,
    heads, seq, num_blocks, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """delta [batch, heads, seq] = rowsum(grad_out * out) - grad_lse: what the softmax takes off each row's
    gradients.
    """
    rows = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    h = (tl.program_id(0) // num_blocks % heads).to(tl.int64)
    b = (tl.program_id(0) // num_blocks // heads).to(tl.int64)
    dims = tl.arange(0, BLOCK_DV)
    grad = load_rows(grad_ptr + b * grad_b + h * grad_h, rows, grad_t, seq, dims, HEAD_DIM_V, True)
    out = load_rows(out_ptr + b * out_b + h * out_h, rows, out_t, seq, dims, HEAD_DIM_V, True)
    delta = tl.sum(widen(grad) * widen(out), 1)
    if grad_lse_ptr is not None:
        where = grad_lse_ptr + b * glse_b + h * glse_h + rows.to(tl.int64) * glse_t
        delta -= tl.load(where, mask=rows < seq, other=0.0)
    tl.store(delta_ptr + (b * heads + h) * seq + rows, delta, mask=rows < seq)


@triton.jit
def _sink_gradients(
    lse_ptr, delta_ptr, sinks_ptr, grad_ptr, lse_b, lse_h, lse_t, batch, heads, seq, BLOCK: tl.constexpr,
    HAS_REST: tl.constexpr,
):  # fmt: skip
    """grad_sink of one head: the sink has weight exp(sink - lse) and no value."""
    h = tl.program_id(0).to(tl.int64)
    sink = tl.load(sinks_ptr + h)
    acc = tl.full([BLOCK], 0.0, tl.float32)
    for b in range(0, batch):
        for start in range(0, seq, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            wide_b = h * 0 + b  # 64 bits
            where = lse_ptr + wide_b * lse_b + h * lse_h + rows.to(tl.int64) * lse_t
            lse = tl.load(where, mask=rows < seq, other=0.0)
            distance = sink - lse
            if HAS_REST:
                distance = distance - tl.load(where + 1, mask=rows < seq, other=0.0)
            delta = tl.load(delta_ptr + (wide_b * heads + h) * seq + rows, mask=rows < seq, other=0.0)
            weight = tl.where(lse == float("-inf"), 0.0, tl.exp2(distance * LOG2_E))
            acc -= tl.where(rows < seq, weight * delta, 0.0)
    tl.store(grad_ptr + h, tl.sum(acc, 0))


@device_function
def _walk_queries(
    begin, end, k, v, dk, dv, q_ptr, q_t, grad_ptr, grad_t, lse_ptr, lse_t, delta_ptr, cols, dims, dims_v,
    scale, softcap, left, right, bias, bias_q, bias_k, slope, seq_q, seq_k,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, IS_MASKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """dk and dv of the keys `cols` plus what the queries [begin, end) give; without IS_MASKED all see all."""
    for start in range(begin, end, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q = load_rows(q_ptr, rows, q_t, seq_q, dims, HEAD_DIM, IS_MASKED)
        grad = load_rows(grad_ptr, rows, grad_t, seq_q, dims_v, HEAD_DIM_V, IS_MASKED)
        lse, rest = load_lse(lse_ptr + rows.to(tl.int64) * lse_t, rows < seq_q, HAS_BIAS)
        delta = tl.load(delta_ptr + rows, mask=rows < seq_q, other=0.0)
        p, _, ds, seen = _score_gradients(
            q, k, v, grad, lse, rest, delta, rows, cols, scale, softcap, left, right, bias, bias_q, bias_k, slope,
            seq_q, seq_k, HAS_SOFTCAP, HAS_BIAS, HAS_SLOPES, HAS_LEFT, HAS_RIGHT, IS_MASKED,
        )  # fmt: skip
        dv = _add(tl.trans(p), tl.trans(seen), grad, dv, IS_MASKED)
        dk = _add(tl.trans(ds), tl.trans(seen), q, dk, IS_MASKED)
    return dk, dv


@triton.jit(do_not_specialize=["seq_q", "seq_k"])
def _key_gradients(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, grad_b, grad_h, grad_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    lse_b, lse_h, lse_t, delta_b, delta_h, heads_kv, group, seq_q, seq_k, total_q, total_k, num_blocks,
    scale, softcap, left, right, bias_ptr, bias_b, bias_h, bias_q, bias_k, slopes_ptr, slopes_b, slopes_h,
    IS_VARLEN: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """dK and dV of BLOCK_N keys of one key head, over all its query heads."""
    block = tl.program_id(0) % num_blocks
    head = (tl.program_id(0) // num_blocks % heads_kv).to(tl.int64)
    b = (tl.program_id(0) // num_blocks // heads_kv).to(tl.int64)
    begin_q = b * 0
    begin_k = b * 0
    if IS_VARLEN:
        begin_q, seq_q = sequence(cu_q_ptr, b, total_q)
        begin_k, seq_k = sequence(cu_k_ptr, b, total_k)
    if block * BLOCK_N < seq_k:
        cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
        dims = tl.arange(0, BLOCK_D)
        dims_v = tl.arange(0, BLOCK_DV)
        k = load_rows(k_ptr + b * k_b + head * k_h + begin_k * k_t, cols, k_t, seq_k, dims, HEAD_DIM, True)
        v = load_rows(v_ptr + b * v_b + head * v_h + begin_k * v_t, cols, v_t, seq_k, dims_v, HEAD_DIM_V, True)
        dk = tl.full([BLOCK_N, BLOCK_D], 0.0, tl.float32)
        dv = tl.full([BLOCK_N, BLOCK_DV], 0.0, tl.float32)
        # Which queries see any of the keys, and which see all of them.
        shift = seq_k - seq_q
        begin = seq_q * 0
        end = seq_q
        inner_begin = begin
        inner_end = seq_q
        if HAS_RIGHT:
            begin = tl.maximum(0, block * BLOCK_N - shift - right)
            inner_begin = block * BLOCK_N + BLOCK_N - 1 - shift - right
        if HAS_LEFT:
            end = tl.minimum(seq_q, block * BLOCK_N + BLOCK_N - shift + left)
            inner_end = tl.minimum(seq_q, block * BLOCK_N - shift + left + 1)
        if HAS_BIAS:
            inner_end = begin
        inner_end = tl.where(block * BLOCK_N + BLOCK_N > seq_k, begin, inner_end)
        first, inner, outer = tile_range(begin, end, inner_begin, inner_end, BLOCK_M)
        for g in range(0, group):
            h = head * group + g
            q_head = q_ptr + b * q_b + h * q_h + begin_q * q_t
            grad_head = grad_ptr + b * grad_b + h * grad_h + begin_q * grad_t
            lse_head = lse_ptr + b * lse_b + h * lse_h + begin_q * lse_t
            delta_head = delta_ptr + b * delta_b + h * delta_h + begin_q
            slope = 0.0
            if HAS_SLOPES:
                slope = tl.load(slopes_ptr + b * slopes_b + h * slopes_h)
            bias = bias_ptr
            if HAS_BIAS:
                bias = bias_ptr + b * bias_b + h * bias_h
            if HAS_RIGHT:
                dk, dv = _walk_queries(
                    first, inner, k, v, dk, dv, q_head, q_t, grad_head, grad_t, lse_head, lse_t, delta_head, cols,
                    dims, dims_v, scale, softcap, left, right, bias, bias_q, bias_k, slope, seq_q, seq_k, HEAD_DIM,
                    HEAD_DIM_V, BLOCK_M, True, HAS_SOFTCAP, HAS_BIAS, HAS_SLOPES, HAS_LEFT, HAS_RIGHT,
                )  # fmt: skip
            if not HAS_BIAS:
                dk, dv = _walk_queries(
                    inner, outer, k, v, dk, dv, q_head, q_t, grad_head, grad_t, lse_head, lse_t, delta_head, cols,
                    dims, dims_v, scale, softcap, left, right, bias, bias_q, bias_k, slope, seq_q, seq_k, HEAD_DIM,
                    HEAD_DIM_V, BLOCK_M, False, HAS_SOFTCAP, HAS_BIAS, HAS_SLOPES, HAS_LEFT, HAS_RIGHT,
                )  # fmt: skip
            dk, dv = _walk_queries(
                outer, end, k, v, dk, dv, q_head, q_t, grad_head, grad_t, lse_head, lse_t, delta_head, cols,
                dims, dims_v, scale, softcap, left, right, bias, bias_q, bias_k, slope, seq_q, seq_k, HEAD_DIM,
                HEAD_DIM_V, BLOCK_M, True, HAS_SOFTCAP, HAS_BIAS, HAS_SLOPES, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
        store_rows(dk_ptr + b * dk_b + head * dk_h + begin_k * dk_t, dk * scale, cols, dk_t, seq_k, dims, HEAD_DIM)
        store_rows(dv_ptr + b * dv_b + head * dv_h + begin_k * dv_t, dv, cols, dv_t, seq_k, dims_v, HEAD_DIM_V)


@device_function
def _walk_keys(
    begin, end, q, grad, lse, rest, delta, dq, k_ptr, k_t, v_ptr, v_t, rows, dims, dims_v,
    scale, softcap, left, right, bias, bias_q, bias_k, slope, seq_q, seq_k,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, IS_MASKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """dq of the queries `rows` plus what the keys [begin, end) give; without IS_MASKED all see all."""
    for start in range(begin, end, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, cols, k_t, seq_k, dims, HEAD_DIM, IS_MASKED)
        v = load_rows(v_ptr, cols, v_t, seq_k, dims_v, HEAD_DIM_V, IS_MASKED)
        _, _, ds, seen = _score_gradients(
            q, k, v, grad, lse, rest, delta, rows, cols, scale, softcap, left, right, bias, bias_q, bias_k, slope,
            seq_q, seq_k, HAS_SOFTCAP, HAS_BIAS, HAS_SLOPES, HAS_LEFT, HAS_RIGHT, IS_MASKED,
        )  # fmt: skip
        dq = _add(ds, seen, k, dq, IS_MASKED)
    return dq


@triton.jit(do_not_specialize=["seq_q", "seq_k"])
def _query_gradients(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr, cu_q_ptr, cu_k_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, grad_b, grad_h, grad_t, dq_b, dq_h, dq_t,
    lse_b, lse_h, lse_t, delta_b, delta_h, heads, group, seq_q, seq_k, total_q, total_k, num_blocks,
    scale, softcap, left, right, bias_ptr, bias_b, bias_h, bias_q, bias_k, slopes_ptr, slopes_b, slopes_h,
    IS_VARLEN: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """dQ of BLOCK_M queries of one head."""
    block = num_blocks - 1 - tl.program_id(0) % num_blocks
    h = (tl.program_id(0) // num_blocks % heads).to(tl.int64)
    b = (tl.program_id(0) // num_blocks // heads).to(tl.int64)
    begin_q = b * 0
    begin_k = b * 0
    if IS_VARLEN:
        begin_q, seq_q = sequence(cu_q_ptr, b, total_q)
        begin_k, seq_k = sequence(cu_k_ptr, b, total_k)
    if block * BLOCK_M < seq_q:
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        dims_v = tl.arange(0, BLOCK_DV)
        q = load_rows(q_ptr + b * q_b + h * q_h + begin_q * q_t, rows, q_t, seq_q, dims, HEAD_DIM, True)
        grad = load_rows(
            grad_ptr + b * grad_b + h * grad_h + begin_q * grad_t, rows, grad_t, seq_q, dims_v, HEAD_DIM_V, True
        )
        where = lse_ptr + b * lse_b + h * lse_h + (begin_q + rows) * lse_t
        # Past the last query: LSE 0 and scores 0 make a gradient of 0 that is not stored.
        lse, rest = load_lse(where, rows < seq_q, HAS_BIAS)
        delta = tl.load(delta_ptr + b * delta_b + h * delta_h + begin_q + rows, mask=rows < seq_q, other=0.0)
        k_ptr += b * k_b + h // group * k_h + begin_k * k_t
        v_ptr += b * v_b + h // group * v_h + begin_k * v_t
        slope = 0.0
        if HAS_SLOPES:
            slope = tl.load(slopes_ptr + b * slopes_b + h * slopes_h)
        if HAS_BIAS:
            bias_ptr += b * bias_b + h * bias_h
        dq = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
        shift = seq_k - seq_q
        begin = seq_k * 0
        end = seq_k
        inner_begin = begin
        inner_end = seq_k
        if HAS_RIGHT:
            end = tl.minimum(seq_k, block * BLOCK_M + BLOCK_M + shift + right)
            inner_end = tl.minimum(seq_k, block * BLOCK_M + 1 + shift + right)
        if HAS_LEFT:
            begin = tl.maximum(0, block * BLOCK_M + shift - left)
            inner_begin = block * BLOCK_M + BLOCK_M - 1 + shift - left
        if HAS_BIAS:
            inner_end = begin
        first, inner, outer = tile_range(begin, end, inner_begin, inner_end, BLOCK_N)
        if HAS_LEFT:
            dq = _walk_keys(
                first, inner, q, grad, lse, rest, delta, dq, k_ptr, k_t, v_ptr, v_t, rows, dims, dims_v, scale, softcap,
                left, right, bias_ptr, bias_q, bias_k, slope, seq_q, seq_k, HEAD_DIM, HEAD_DIM_V, BLOCK_N, True,
                HAS_SOFTCAP, HAS_BIAS, HAS_SLOPES, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
        if not HAS_BIAS:
            dq = _walk_keys(
                inner, outer, q, grad, lse, rest, delta, dq, k_ptr, k_t, v_ptr, v_t, rows, dims, dims_v, scale, softcap,
                left, right, bias_ptr, bias_q, bias_k, slope, seq_q, seq_k, HEAD_DIM, HEAD_DIM_V, BLOCK_N, False,
                HAS_SOFTCAP, HAS_BIAS, HAS_SLOPES, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
        dq = _walk_keys(
            outer, end, q, grad, lse, rest, delta, dq, k_ptr, k_t, v_ptr, v_t, rows, dims, dims_v, scale, softcap,
            left, right, bias_ptr, bias_q, bias_k, slope, seq_q, seq_k, HEAD_DIM, HEAD_DIM_V, BLOCK_N, True,
            HAS_SOFTCAP, HAS_BIAS, HAS_SLOPES, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        store_rows(dq_ptr + b * dq_b + h * dq_h + begin_q * dq_t, dq * scale, rows, dq_t, seq_q, dims, HEAD_DIM)


@triton.jit
def _bias_gradients(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, db_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, grad_b, grad_h, grad_t, lse_b, lse_h, lse_t, delta_b, delta_h,
    db_b, db_h, db_q, db_k, batch, heads, group, seq_q, seq_k, own_heads, blocks_q, blocks_k,
    scale, softcap, left, right, bias_ptr, bias_b, bias_h, bias_q, bias_k, slopes_ptr, slopes_b, slopes_h,
    SUM_B: tl.constexpr, SUM_H: tl.constexpr, SUM_Q: tl.constexpr, SUM_K: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """One tile of the bias's gradient: the scores' gradients, added over every dim that the bias broadcasts (SUM_*)."""
    at = tl.program_id(0)
    block_k = at % blocks_k
    block_q = at // blocks_k % blocks_q
    own_h = at // blocks_k // blocks_q % own_heads
    own_b = at // blocks_k // blocks_q // own_heads
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    acc = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for b in range(own_b if not SUM_B else 0, own_b + 1 if not SUM_B else batch):
        for h in range(own_h if not SUM_H else 0, own_h + 1 if not SUM_H else heads):
            b64 = b + tl.full([], 0, tl.int64)
            h64 = h + tl.full([], 0, tl.int64)
            slope = 0.0
            if HAS_SLOPES:
                slope = tl.load(slopes_ptr + b64 * slopes_b + h64 * slopes_h)
            bias = bias_ptr + b64 * bias_b + h64 * bias_h
            for tile_q in range(block_q if not SUM_Q else 0, block_q + 1 if not SUM_Q else tl.cdiv(seq_q, BLOCK_M)):
                rows = tile_q * BLOCK_M + tl.arange(0, BLOCK_M)
                q = load_rows(q_ptr + b64 * q_b + h64 * q_h, rows, q_t, seq_q, dims, HEAD_DIM, True)
                grad = load_rows(grad_ptr + b64 * grad_b + h64 * grad_h, rows, grad_t, seq_q, dims_v, HEAD_DIM_V, True)
                lse_at = lse_ptr + b64 * lse_b + h64 * lse_h + rows.to(tl.int64) * lse_t
                lse, rest = load_lse(lse_at, rows < seq_q, HAS_BIAS)
                delta = tl.load(delta_ptr + b64 * delta_b + h64 * delta_h + rows, mask=rows < seq_q, other=0.0)
                for tile_k in range(block_k if not SUM_K else 0, block_k + 1 if not SUM_K else tl.cdiv(seq_k, BLOCK_N)):
                    cols = tile_k * BLOCK_N + tl.arange(0, BLOCK_N)
                    k = load_rows(k_ptr + b64 * k_b + h64 // group * k_h, cols, k_t, seq_k, dims, HEAD_DIM, True)
                    v = load_rows(v_ptr + b64 * v_b + h64 // group * v_h, cols, v_t, seq_k, dims_v, HEAD_DIM_V, True)
                    _, ds, _, _ = _score_gradients(
                        q, k, v, grad, lse, rest, delta, rows, cols, scale, softcap, left, right, bias, bias_q, bias_k,
                        slope, seq_q, seq_k, HAS_SOFTCAP, HAS_BIAS, HAS_SLOPES, HAS_LEFT, HAS_RIGHT, True,
                    )  # fmt: skip
                    acc += ds
    rows = block_q * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = block_k * BLOCK_N + tl.arange(0, BLOCK_N)
    keep = (rows[:, None] < seq_q) & (cols[None, :] < seq_k)
    if SUM_Q:
        acc = tl.sum(acc, 0)[None, :] + tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
        keep = keep & (rows[:, None] == 0)
    if SUM_K:
        acc = tl.sum(acc, 1)[:, None] + tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
        keep = keep & (cols[None, :] == 0)
    where = db_ptr + own_b.to(tl.int64) * db_b + own_h.to(tl.int64) * db_h
    where = where + rows.to(tl.int64)[:, None] * db_q + cols.to(tl.int64)[None, :] * db_k
    tl.store(where, narrow(acc, db_ptr.dtype.element_ty), mask=keep)


def _launch_backward(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_lse: torch.Tensor | None,
    chosen: Options,
    cu_seqlens: tuple[torch.Tensor, torch.Tensor] | None = None,
    longest: tuple[int, int] = (0, 0),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """(dq, dk, dv, delta, the kernels' common arguments, whose lse_ptr the sinks' gradient takes, too); tensors
    [batch, heads, seq, head_dim], or views of packed ones.

    lse, grad_lse: [batch, heads, seq_q], for packed sequences [1, heads, total_q].
    """
    batch = q.shape[0] if cu_seqlens is None else cu_seqlens[0].shape[0] - 1
    heads, heads_kv, seq_q, seq_k = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    delta = call.empty((q.shape[0], heads, seq_q), torch.float32)
    blocks = cdiv(seq_q, 16)
    glse = (0, 0, 0) if grad_lse is None else grad_lse.stride()
    call.launch(
        _deltas, q.shape[0] * heads * blocks, grad_ptr=grad, out_ptr=out, grad_lse_ptr=grad_lse, delta_ptr=delta,
        **strides("grad", grad), **strides("out", out), glse_b=glse[0], glse_h=glse[1], glse_t=glse[2], heads=heads,
        seq=seq_q, num_blocks=blocks, HEAD_DIM_V=v.shape[-1], BLOCK_DV=power_of_two(v.shape[-1], 16), BLOCK=16,
    )  # fmt: skip
    packed_or_not = cu_seqlens is not None
    dq, dk, dv = (call.empty(x.shape, x.dtype) for x in (q, k, v))
    if packed_or_not:  # tokens that no sequence owns have gradient 0; every other element is written by a kernel
        for grad_of in (dq, dk, dv):
            call.fill(grad_of, 0.0)
    has_bias = chosen.bias is not None
    shape = tile_shape(call, q.dtype, max(q.shape[-1], v.shape[-1]), has_bias=has_bias, backward=True)
    arguments = chosen.arguments()
    if has_bias:
        lse = with_rests(call, q, k, lse, arguments, shape)
    del arguments["sinks_ptr"], arguments["HAS_SINKS"]
    common = dict(
        q_ptr=q, k_ptr=k, v_ptr=v, grad_ptr=grad, lse_ptr=lse, delta_ptr=delta, **strides("q", q, packed_or_not),
        **strides("k", k, packed_or_not), **strides("v", v, packed_or_not), **strides("grad", grad, packed_or_not),
        lse_b=0 if packed_or_not else lse.stride(0), lse_h=lse.stride(1), lse_t=lse.stride(2),
        delta_b=0 if packed_or_not else delta.stride(0), delta_h=delta.stride(1),
        group=heads // max(heads_kv, 1), seq_q=seq_q, seq_k=seq_k, **arguments, **head_blocks(q, v), **shape,
    )  # fmt: skip
    lengths = dict(
        cu_q_ptr=cu_seqlens[0] if cu_seqlens else None, cu_k_ptr=cu_seqlens[1] if cu_seqlens else None,
        total_q=seq_q, total_k=seq_k, IS_VARLEN=packed_or_not,
    )  # fmt: skip
    blocks = cdiv(longest[1] if packed_or_not else seq_k, shape["BLOCK_N"])
    call.launch(
        _key_gradients, batch * heads_kv * blocks, dk_ptr=dk, dv_ptr=dv, **strides("dk", dk, packed_or_not),
        **strides("dv", dv, packed_or_not), heads_kv=heads_kv, num_blocks=blocks, **common, **lengths,
    )  # fmt: skip
    blocks = cdiv(longest[0] if packed_or_not else seq_q, shape["BLOCK_M"])
    call.launch(
        _query_gradients, batch * heads * blocks, dq_ptr=dq, **strides("dq", dq, packed_or_not), heads=heads,
        num_blocks=blocks, **common, **lengths,
    )  # fmt: skip
    return dq, dk, dv, delta, common


def _launch_sinks(call: Call, chosen: Options, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The sinks' gradient [heads]; lse, delta [batch, heads, seq]."""
    sinks = chosen.sinks
    if sinks is None:
        call.fail("need_sinks=True without sinks")
    result = call.empty(sinks.shape, sinks.dtype)
    call.launch(
        _sink_gradients, lse.shape[1], lse_ptr=lse, delta_ptr=delta, sinks_ptr=sinks, grad_ptr=result,
        lse_b=lse.stride(0), lse_h=lse.stride(1), lse_t=lse.stride(2), batch=lse.shape[0], heads=lse.shape[1],
        seq=lse.shape[2], BLOCK=256, HAS_REST=chosen.bias is not None,
    )  # fmt: skip
    return result


def _launch_bias(call: Call, bias: torch.Tensor, common: dict[str, Any], q: torch.Tensor, seq_k: int) -> torch.Tensor:
    """The gradient of a bias of any shape that broadcasts to [batch, heads, seq_q, seq_k]."""
    batch, heads, seq_q = q.shape[:3]
    result = call.empty(bias.shape, bias.dtype)
    own = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    summed = [mine == 1 for mine in own]
    steps = result.view(own).stride()
    blocks_q = 1 if summed[2] else cdiv(seq_q, common["BLOCK_M"])
    blocks_k = 1 if summed[3] else cdiv(seq_k, common["BLOCK_N"])
    call.launch(
        _bias_gradients, own[0] * own[1] * blocks_q * blocks_k, db_ptr=result, db_b=steps[0], db_h=steps[1],
        db_q=steps[2], db_k=steps[3], batch=batch, heads=heads, own_heads=own[1], blocks_q=blocks_q, blocks_k=blocks_k,
        SUM_B=summed[0], SUM_H=summed[1], SUM_Q=summed[2], SUM_K=summed[3], **common,
    )  # fmt: skip
    return result


def attention_backward(
    grad_out: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    causal: bool = False,
    window: Any = None,
    softcap: float = 0.0,
    scale: float | None = None,
    bias: Any = None,
    mask: Any = None,
    block_mask: Any = None,
    block_size: int | tuple[int, int] = 128,
    alibi_slopes: Any = None,
    alibi: str = "distance",
    sinks: Any = None,
    grad_lse: Any = None,
    need_bias: bool = False,
    need_sinks: bool = False,
    deterministic: bool = True,
    grads: Any = None,
    stream: Any = None,
    dtype: Any = None,
) -> tuple[Any, ...]:
    """Gradients of `attention`, as `flashkernel.attention_backward`; deterministic always.

    grad_out [batch, heads_q, seq_q, head_dim_v], q's dtype; out, lse: what `attention(..., return_lse=True)` gave.

    Returns (grad_q, grad_k, grad_v), then grad_bias and grad_sinks when asked for. Sums are float32; probabilities and
    score gradients are rounded to q's dtype for the products. Raises: as `attention`.

    Source: Dao, FlashAttention-2 (2023), Algorithm 2.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> q = torch.ones(1, 1, 4, 8, device=fk_triton.default_device())
    >>> out, lse = fk_triton.attention(q, q, q, return_lse=True)
    >>> grad_q, grad_k, grad_v = fk_triton.attention_backward(torch.ones_like(out), q, q, q, out, lse)
    >>> round(grad_v[0, 0, 0, 0].item(), 4)
    1.0
    """
    call = Call("attention_backward", stream, dtype)
    shapes = [x.shape for x in (q, k, v) if isinstance(x, torch.Tensor)]
    q4, k4, v4 = dense(call, q, k, v)
    grad4, out4 = as_4d(call, "grad_out", grad_out, q4), as_4d(call, "out", out, q4)
    for name, x in (("grad_out", grad4), ("out", out4)):
        call.shape(name, x, (*q4.shape[:-1], v4.shape[-1]))
    lse3 = call.float32("lse", lse, shapes[0][:-1]).view(q4.shape[:-1])
    grad_lse3 = None if grad_lse is None else call.float32("grad_lse", grad_lse, shapes[0][:-1]).view(q4.shape[:-1])
    call.need(not need_bias or bias is not None, "need_bias=True without a bias")
    call.need(not need_sinks or sinks is not None, "need_sinks=True without sinks")
    others = bias, mask, alibi, block_mask, block_size
    given_options = AttentionOptions(causal, window, softcap, scale, alibi_slopes, sinks, *others)
    chosen = options(call, q4, k4.shape[2], given_options)
    given = given_gradients(call, grads, (q, k, v))
    dq, dk, dv, delta, common = _launch_backward(call, q4, k4, v4, grad4, out4, lse3, grad_lse3, chosen)
    results = written_gradients(call, given, [x.view(shape) for x, shape in zip((dq, dk, dv), shapes, strict=True)])
    if need_bias:
        results.append(_launch_bias(call, bias, common, q4, k4.shape[2]))
    if need_sinks:
        results.append(_launch_sinks(call, chosen, common["lse_ptr"], delta))
    return tuple(results)


def attention_varlen_backward(
    grad_out: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: Any = None,
    softcap: float = 0.0,
    scale: float | None = None,
    alibi_slopes: Any = None,
    alibi: str = "distance",
    sinks: Any = None,
    grad_lse: Any = None,
    need_sinks: bool = False,
    deterministic: bool = True,
    grads: Any = None,
    stream: Any = None,
    dtype: Any = None,
) -> tuple[Any, ...]:
    """Gradients of `attention_varlen`, as `flashkernel.attention_varlen_backward`; lse and grad_lse [heads_q, total_q].

    Returns (grad_q, grad_k, grad_v), then grad_sinks when asked for. Tokens that nobody sees have gradient 0. Raises:
    as `attention`.

    Source: Dao, FlashAttention-2 (2023), Algorithm 2.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> q = torch.ones(5, 1, 8, device=fk_triton.default_device())
    >>> cu = torch.tensor([0, 2, 5], device=q.device)
    >>> out, lse = fk_triton.attention_varlen(q, q, q, cu, cu, 3, 3, return_lse=True)
    >>> [g.shape[0] for g in fk_triton.attention_varlen_backward(out, q, q, q, out, lse, cu, cu, 3, 3)]
    [5, 5, 5]
    """
    call = Call("attention_varlen_backward", stream, dtype)
    q4, k4, v4, cu_seqlens = packed(call, q, k, v, cu_seqlens_q, cu_seqlens_k)
    grad3, out3 = call.floats("grad_out", grad_out, 3, like=q4), call.floats("out", out, 3, like=q4)
    for name, x in (("grad_out", grad3), ("out", out3)):
        call.shape(name, x, (*q.shape[:-1], v4.shape[-1]))
    lse3 = call.float32("lse", lse, (q4.shape[1], q4.shape[2])).unsqueeze(0)
    grad_lse3 = None if grad_lse is None else call.float32("grad_lse", grad_lse, lse.shape).unsqueeze(0)
    call.need(not need_sinks or sinks is not None, "need_sinks=True without sinks")
    given_options = AttentionOptions(causal, window, softcap, scale, alibi_slopes, sinks, alibi=alibi)
    chosen = options(call, q4, k4.shape[2], given_options, batch=cu_seqlens[0].shape[0] - 1)
    grad4, out4 = (x.transpose(0, 1).unsqueeze(0) for x in (grad3, out3))
    given = given_gradients(call, grads, (q, k, v))
    dq, dk, dv, delta, common = _launch_backward(
        call, q4, k4, v4, grad4, out4, lse3, grad_lse3, chosen, cu_seqlens, (max_seqlen_q, max_seqlen_k)
    )
    results = written_gradients(call, given, [x.squeeze(0).transpose(0, 1) for x in (dq, dk, dv)])
    if need_sinks:
        results.append(_launch_sinks(call, chosen, common["lse_ptr"], delta))
    return tuple(results)
