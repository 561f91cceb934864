"""Rotary position embedding in Triton: rope (sin and cos in the kernel) and rope_table.

One program takes one token, finds its angles once and rotates all its heads. Angles are float64 turns cut to one turn
before sin and cos: exact to 1e-6 at every position that int32 holds, NaN at others (the host reads none). Su et al.,
RoFormer (2021).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ._device import narrow, widen
from ._host import Call, device_function, name_of, power_of_two

TURN = tl.constexpr(2.0 * math.pi)


@device_function
def angles(
    position, inv_freq_ptr, LOG2_THETA: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_INV_FREQ: tl.constexpr,
):  # fmt: skip
    """(cos, sin) [BLOCK] of position * frequency, for each pair of a head."""
    pair = tl.arange(0, BLOCK)
    if HAS_INV_FREQ:
        frequency = tl.load(inv_freq_ptr + pair, mask=pair < PAIRS, other=0.0).to(tl.float64)
    else:
        frequency = tl.exp2(pair.to(tl.float64) * (-LOG2_THETA / PAIRS))
    in_range = (position >= -2147483648) & (position <= 2147483647)  # beyond, nothing would be left of the precision
    turns = tl.where(in_range, position.to(tl.float64), float("nan")) * (frequency * (1.0 / TURN))
    turns = turns - tl.floor(turns + 0.5)
    angle = (turns * TURN).to(tl.float32)
    return tl.cos(angle), tl.sin(angle)


@device_function
def table_row(position, cos_ptr, sin_ptr, cos_t, sin_t, table_rows, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """(cos, sin) [BLOCK] of a position, from tables; NaN where it is outside of them."""
    pair = tl.arange(0, BLOCK)
    inside = (position >= 0) & (position < table_rows)
    keep = pair < tl.where(inside, PAIRS, 0)
    cos = widen(tl.load(cos_ptr + position * cos_t + pair, mask=keep, other=float("nan")))
    sin = widen(tl.load(sin_ptr + position * sin_t + pair, mask=keep, other=float("nan")))
    return cos, sin


@device_function
def rotate_heads(
    x_ptr, out_ptr, stride_x, stride_out, heads, cos, sin,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotates the heads of one token; elements past the pairs are copied. out may be x."""
    pair = tl.arange(0, BLOCK)
    if IS_INTERLEAVED:
        first = 2 * pair
        second = first + 1
    else:
        first = pair
        second = pair + PAIRS
    for start in range(0, heads, BLOCK_HEADS):
        head = (start + tl.arange(0, BLOCK_HEADS)).to(tl.int64)[:, None]
        keep = (head < heads) & (pair[None, :] < PAIRS)
        a = widen(tl.load(x_ptr + head * stride_x + first[None, :], mask=keep, other=0.0))
        b = widen(tl.load(x_ptr + head * stride_x + second[None, :], mask=keep, other=0.0))
        kind: tl.constexpr = out_ptr.dtype.element_ty
        tl.store(out_ptr + head * stride_out + first[None, :], narrow(a * cos - b * sin, kind), mask=keep)
        tl.store(out_ptr + head * stride_out + second[None, :], narrow(b * cos + a * sin, kind), mask=keep)
        if HEAD_DIM > 2 * PAIRS:
            rest = 2 * PAIRS + tl.arange(0, BLOCK_REST)
            keep = (head < heads) & (rest[None, :] < HEAD_DIM)
            value = tl.load(x_ptr + head * stride_x + rest[None, :], mask=keep)
            tl.store(out_ptr + head * stride_out + rest[None, :], value, mask=keep)


@triton.jit(do_not_specialize=["seq"])
def _rope(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, inv_freq_ptr, positions_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, q_out_b, q_out_h, q_out_t, k_out_b, k_out_h, k_out_t,
    cos_b, cos_t, sin_b, sin_t, positions_b, positions_t, seq, heads_q, heads_k, table_rows,
    LOG2_THETA: tl.constexpr, HAS_INV_FREQ: tl.constexpr, HAS_POSITIONS: tl.constexpr, IS_TABLE: tl.constexpr,
    HAS_K: tl.constexpr, IS_INVERSE: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_HEADS: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One token. Tables: rows by position (cos_b = 0, table_rows rows), or [batch, seq] themselves (table_rows =
    seq).
    """
    t = (tl.program_id(0) % seq).to(tl.int64)
    b = (tl.program_id(0) // seq).to(tl.int64)
    position = t
    if HAS_POSITIONS:
        position = tl.load(positions_ptr + b * positions_b + t * positions_t).to(tl.int64)
    if IS_TABLE:
        pair = tl.arange(0, BLOCK)
        inside = (position >= 0) & (position < table_rows)  # a position past the table gives NaN
        keep = pair < tl.where(inside, PAIRS, 0)
        cos = widen(tl.load(cos_ptr + b * cos_b + position * cos_t + pair, mask=keep, other=float("nan")))
        sin = widen(tl.load(sin_ptr + b * sin_b + position * sin_t + pair, mask=keep, other=float("nan")))
    else:
        cos, sin = angles(position, inv_freq_ptr, LOG2_THETA, PAIRS, BLOCK, HAS_INV_FREQ)
    if IS_INVERSE:
        sin = -sin
    cos = cos[None, :]
    sin = sin[None, :]
    rotate_heads(
        q_ptr + b * q_b + t * q_t, q_out_ptr + b * q_out_b + t * q_out_t, q_h, q_out_h, heads_q, cos, sin,
        HEAD_DIM, PAIRS, BLOCK, BLOCK_REST, BLOCK_HEADS, IS_INTERLEAVED,
    )  # fmt: skip
    if HAS_K:
        rotate_heads(
            k_ptr + b * k_b + t * k_t, k_out_ptr + b * k_out_b + t * k_out_t, k_h, k_out_h, heads_k, cos, sin,
            HEAD_DIM, PAIRS, BLOCK, BLOCK_REST, BLOCK_HEADS, IS_INTERLEAVED,
        )  # fmt: skip


def rotation(call: Call, head_dim: int, rotary_dim: int | None) -> dict[str, int]:
    """The kernels' arguments about which elements turn."""
    rotary = head_dim if rotary_dim is None else rotary_dim
    if rotary_dim is None:
        call.need(head_dim % 2 == 0, f"rotary_dim={head_dim}; an even number up to head_dim={head_dim} is needed")
    call.need(
        2 <= rotary <= head_dim and rotary % 2 == 0,
        f"rotary_dim={rotary}; an even number from 2 to head_dim={head_dim} is needed",
    )
    block = power_of_two(rotary // 2)
    return {
        "HEAD_DIM": head_dim,
        "PAIRS": rotary // 2,
        "BLOCK": block,
        "BLOCK_REST": power_of_two(head_dim - rotary),
        "BLOCK_HEADS": max(1, 1024 // block),  # 4 warps x 32 threads x 8 pairs
    }


def log2_theta(call: Call, theta: float) -> float:
    call.need(math.isfinite(theta) and theta > 0, f"theta={theta}; a positive number is needed")
    return math.log2(theta)


def check_inv_freq(call: Call, name: str, inv_freq: Any, pairs: int) -> Any:
    if inv_freq is None:
        return None
    inv_freq = call.float32(name, inv_freq, (pairs,))
    call.need(pairs == 1 or inv_freq.stride(0) == 1, f"{name}.strides[0]={inv_freq.stride(0)}; 1 is needed")
    return inv_freq


def _heads(call: Call, q: Any, k: Any, out: Any) -> tuple[torch.Tensor, Any, torch.Tensor, Any]:
    """q, k and their outputs, checked."""
    q = call.floats("q", q, 4)
    if k is None:
        return q, None, call.output("q_out", out, q.shape, q.dtype, may_be=("q",)), None
    k = call.floats("k", k, 4, like=q)
    for d in (0, 2, 3):
        call.need(k.shape[d] == q.shape[d], f"k.shape[{d}]={k.shape[d]} but q.shape[{d}]={q.shape[d]}; they must match")
    q_out, k_out = call.pair("out", out, "a pair (q_out, k_out)")
    q_out = call.output("q_out", q_out, q.shape, q.dtype, may_be=("q",))
    return q, k, q_out, call.output("k_out", k_out, k.shape, k.dtype, may_be=("k",))


def _positions(call: Call, positions: Any, q: torch.Tensor) -> tuple[Any, int, int]:
    """(positions, stride over batch, stride over tokens)."""
    if positions is None:
        return None, 0, 0
    positions = call.index("positions", positions, (1, 2))
    needed = (q.shape[2],) if positions.dim() == 1 else (q.shape[0], q.shape[2])
    call.shape("positions", positions, needed)
    return positions, positions.stride(0) if positions.dim() == 2 else 0, positions.stride(-1)


def _launch(call: Call, q: Any, k: Any, q_out: Any, k_out: Any, positions: Any, inverse: bool, **given: Any) -> Any:
    at, positions_b, positions_t = _positions(call, positions, q)
    steps: dict[str, int] = {}
    for name, x in (("q", q), ("k", k), ("q_out", q_out), ("k_out", k_out)):
        for suffix, d in (("b", 0), ("h", 1), ("t", 2)):
            steps[f"{name}_{suffix}"] = 0 if x is None else x.stride(d)
    defaults = dict(
        cos_ptr=None, sin_ptr=None, inv_freq_ptr=None, cos_b=0, cos_t=0, sin_b=0, sin_t=0, table_rows=0,
        LOG2_THETA=0.0, HAS_INV_FREQ=False, IS_TABLE=False,
    )  # fmt: skip
    call.launch(
        _rope, q.shape[0] * q.shape[2], q_ptr=q, k_ptr=k, q_out_ptr=q_out, k_out_ptr=k_out, positions_ptr=at,
        positions_b=positions_b, positions_t=positions_t, seq=q.shape[2], heads_q=q.shape[1],
        heads_k=0 if k is None else k.shape[1], HAS_POSITIONS=at is not None, HAS_K=k is not None, IS_INVERSE=inverse,
        **steps, **{**defaults, **given},
    )  # fmt: skip
    return q_out if k is None else (q_out, k_out)


def rope(
    q: Any,
    k: Any = None,
    positions: Any = None,
    *,
    theta: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    inv_freq: Any = None,
    out: Any = None,
    stream: Any = None,
    dtype: Any = None,
) -> Any:
    """Pairs of q and k rotated by position * theta^(-2p / rotary_dim), as `flashkernel.rope`; q [batch, heads_q, seq,
    head_dim].

    positions: int32 or int64 [seq] or [batch, seq]; None: 0, 1, 2, ... `theta` is compiled into the kernel.

    Returns (q_out, k_out), or q_out when k is None; out may be q and k themselves. Rotated in float32, rounded once.
    Raises: ValueError for arguments that don't fit, NotImplementedError for arrays that Triton does not serve.

    Source: Su et al., RoFormer (2021).

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> q = torch.ones(1, 2, 3, 8, device=fk_triton.default_device())
    >>> torch.allclose(fk_triton.rope(fk_triton.rope(q), inverse=True), q, atol=1e-6)
    True
    """
    call = Call("rope", stream, dtype)
    q, k, q_out, k_out = _heads(call, q, k, out)
    turned = rotation(call, q.shape[3], rotary_dim)
    return _launch(
        call, q, k, q_out, k_out, positions, inverse, LOG2_THETA=log2_theta(call, theta),
        inv_freq_ptr=check_inv_freq(call, "inv_freq", inv_freq, turned["PAIRS"]), HAS_INV_FREQ=inv_freq is not None,
        IS_INTERLEAVED=interleaved, **turned,
    )  # fmt: skip


def rope_table(
    q: Any,
    k: Any,
    cos: Any,
    sin: Any,
    positions: Any = None,
    *,
    interleaved: bool = False,
    inverse: bool = False,
    out: Any = None,
    stream: Any = None,
    dtype: Any = None,
) -> Any:
    """`rope` with cos and sin from tables, as `flashkernel.rope_table`: [max_positions, pairs] or [batch or 1, seq,
    pairs].

    positions: int32 or int64 [seq] or [batch, seq] into 2-D tables; one outside the table gives NaN (the host reads
    none).

    Returns (q_out, k_out), or q_out when k is None. Raises: as `rope`.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> q = torch.ones(1, 2, 3, 8, device=fk_triton.default_device())
    >>> cos, sin = torch.ones(3, 4, device=q.device), torch.zeros(3, 4, device=q.device)
    >>> torch.equal(fk_triton.rope_table(q, None, cos, sin), q)
    True
    """
    call = Call("rope_table", stream, dtype)
    q, k, q_out, k_out = _heads(call, q, k, out)
    cos = call.floats("cos", cos, (2, 3))
    sin = call.floats("sin", sin, (2, 3))
    call.need(sin.dtype == cos.dtype, f"sin is {name_of(sin.dtype)} but cos is {name_of(cos.dtype)}; they must match")
    call.shape("sin", sin, cos.shape)
    is_direct = cos.dim() == 3
    if is_direct:
        call.need(positions is None, "positions with 3-D tables; None is needed")
        call.need(cos.shape[0] in (1, q.shape[0]), f"cos.shape[0]={cos.shape[0]}; 1 or {q.shape[0]} is needed")
        call.need(
            cos.shape[1] == q.shape[2], f"cos.shape[1]={cos.shape[1]} but q.shape[2]={q.shape[2]}; they must match"
        )
    elif positions is None:
        call.need(cos.shape[0] >= q.shape[2], f"cos.shape[0]={cos.shape[0]}; {q.shape[2]} positions or more are needed")
    one = is_direct and cos.shape[0] == 1
    return _launch(
        call, q, k, q_out, k_out, positions, inverse, cos_ptr=cos, sin_ptr=sin,
        cos_b=cos.stride(0) if is_direct and not one else 0, cos_t=cos.stride(-2),
        sin_b=sin.stride(0) if is_direct and not one else 0, sin_t=sin.stride(-2), table_rows=cos.shape[-2],
        IS_TABLE=True, IS_INTERLEAVED=interleaved, **rotation(call, q.shape[3], 2 * cos.shape[-1]),
    )  # fmt: skip
