"""What an LSE in float32 has lost where it is far from 0; for flash_attention_backward.py, calls with a bias.

A bias of -3.4e38 (what masks are made of) over a whole row leaves an LSE of -3.4e38, next to which the logarithm of the
number of keys is nothing: exp(score - LSE) is 1 for each of n keys, where it should be 1 / n.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ._attention_tile import modified_scores, visible
from ._device import LOG2_E, dot, load_rows
from ._host import Call, cdiv, device_function, power_of_two
from .flash_attention import strides

LARGE = 4096.0  # an LSE of this size is off by 2^-12, as in the CUDA and CPU kernels


@device_function
def load_lse(where, keep, HAS_BIAS: tl.constexpr):
    """(LSE, rest) of rows: with a bias pairs that _lse_rests made, else LSE alone."""
    lse = tl.load(where, mask=keep, other=0.0)
    rest = tl.zeros_like(lse)
    if HAS_BIAS:
        rest = tl.load(where + 1, mask=keep, other=0.0)
    return lse, rest


@triton.jit
def _lse_rests(
    q_ptr, k_ptr, lse_ptr, pairs_ptr, q_b, q_h, q_t, k_b, k_h, k_t, lse_b, lse_h, lse_t, heads, group, seq_q, seq_k,
    num_blocks, scale, softcap, left, right, bias_ptr, bias_b, bias_h, bias_q, bias_k, slopes_ptr, slopes_b, slopes_h,
    sinks_ptr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_SINKS: tl.constexpr, LARGE: tl.constexpr,
):  # fmt: skip
    """pairs [batch, heads, seq_q, 2]: LSE, and what fp32 has lost of one of LARGE and more: log(sum exp(score - LSE)).

    Of a row that a bias of -3.4e38 hides, say, LSE is -3.4e38, and the logarithm of the number of keys is lost.
    """
    rows = tl.program_id(0) % num_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    h = (tl.program_id(0) // num_blocks % heads).to(tl.int64)
    b = (tl.program_id(0) // num_blocks // heads).to(tl.int64)
    lse = tl.load(lse_ptr + b * lse_b + h * lse_h + rows.to(tl.int64) * lse_t, mask=rows < seq_q, other=0.0)
    large = (tl.abs(lse) >= LARGE) & (tl.abs(lse) < float("inf"))
    rest = tl.zeros_like(lse)
    if tl.max(large.to(tl.int32), 0) > 0:
        dims = tl.arange(0, BLOCK_D)
        q = load_rows(q_ptr + b * q_b + h * q_h, rows, q_t, seq_q, dims, HEAD_DIM, True)
        slope = 0.0
        if HAS_SLOPES:
            slope = tl.load(slopes_ptr + b * slopes_b + h * slopes_h)
        base = tl.where(large, lse, 0.0)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        if HAS_SINKS:
            top = tl.load(sinks_ptr + h) - base
        total = tl.where(top == float("-inf"), 0.0, tl.full([BLOCK_M], 1.0, tl.float32))
        for start in range(0, seq_k, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            k = load_rows(k_ptr + b * k_b + h // group * k_h, cols, k_t, seq_k, dims, HEAD_DIM, True)
            s = dot(q, tl.trans(k), tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)) * scale
            s, _ = modified_scores(
                s, rows, cols, seq_k - seq_q, softcap, bias_ptr + b * bias_b + h * bias_h, bias_q, bias_k, slope,
                seq_q, seq_k, HAS_SOFTCAP, HAS_BIAS, HAS_SLOPES,
            )  # fmt: skip
            seen = visible(rows, cols, seq_k - seq_q, left, right, seq_k, HAS_LEFT, HAS_RIGHT)
            s = tl.where(seen, s - base[:, None], float("-inf"))
            new_top = tl.maximum(top, tl.max(s, 1))
            zero = tl.where(new_top == float("-inf"), 0.0, new_top)
            total = total * tl.exp2((top - zero) * LOG2_E) + tl.sum(tl.exp2((s - zero[:, None]) * LOG2_E), 1)
            top = new_top
        rest = tl.where(large, top + tl.log(total), 0.0)
    where = pairs_ptr + 2 * ((b * heads + h) * seq_q + rows)
    tl.store(where, lse, mask=rows < seq_q)
    tl.store(where + 1, rest, mask=rows < seq_q)


def with_rests(
    call: Call, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, arguments: dict[str, Any], shape: dict[str, int]
) -> torch.Tensor:
    """LSE [batch, heads, seq_q] as a view of the pairs (LSE, rest) that _lse_rests makes: in steps of 2."""
    batch, heads, seq_q, head_dim = q.shape
    pairs = call.empty((batch, heads, seq_q, 2), torch.float32)
    blocks = cdiv(seq_q, shape["BLOCK_M"])
    call.launch(
        _lse_rests, batch * heads * blocks, q_ptr=q, k_ptr=k, lse_ptr=lse, pairs_ptr=pairs, **strides("q", q),
        **strides("k", k), lse_b=lse.stride(0), lse_h=lse.stride(1), lse_t=lse.stride(2), heads=heads,
        group=heads // max(k.shape[1], 1), seq_q=seq_q, seq_k=k.shape[2], num_blocks=blocks, **arguments,
        HEAD_DIM=head_dim, BLOCK_D=power_of_two(head_dim, 16), LARGE=LARGE, **shape,
    )  # fmt: skip
    return pairs[..., 0]
