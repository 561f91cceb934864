"""FlashAttention in Triton, forward: attention, attention_varlen, merge_states. The gradients are next door.

One program takes BLOCK_M queries of one head and walks the keys that any of them sees, with the scores never leaving
the chip. Tiles that every query sees in full take a loop without masks.
Dao et al., FlashAttention (2022), Algorithm 1; Dao, FlashAttention-2 (2023).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..attention_options import AttentionOptions
from ._attention_host import Options, dense, head_blocks, options, packed, tile_shape
from ._attention_tile import modified_scores, softmax_finish, softmax_step, visible
from ._device import LOG2_E, dot, load_rows, narrow, store_rows, tile_range, widen
from ._host import Call, cdiv, device_function, name_of, power_of_two


@device_function
def _walk(
    begin, end, q, k_ptr, v_ptr, stride_k, stride_v, rows, dims, dims_v, top, total, acc, scale, softcap, left, right,
    bias, bias_q, bias_k, slope, seq_q, seq_k,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, IS_MASKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """The softmax state after the keys [begin, end); without IS_MASKED every row sees all of them."""
    for start in range(begin, end, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, cols, stride_k, seq_k, dims, HEAD_DIM, IS_MASKED)
        s = dot(q, tl.trans(k), tl.full([rows.shape[0], BLOCK_N], 0.0, tl.float32)) * scale
        s, _ = modified_scores(
            s, rows, cols, seq_k - seq_q, softcap, bias, bias_q, bias_k, slope, seq_q, seq_k,
            HAS_SOFTCAP, HAS_BIAS, HAS_SLOPES,
        )  # fmt: skip
        if IS_MASKED:
            s = tl.where(visible(rows, cols, seq_k - seq_q, left, right, seq_k, HAS_LEFT, HAS_RIGHT), s, float("-inf"))
        v = load_rows(v_ptr, cols, stride_v, seq_k, dims_v, HEAD_DIM_V, IS_MASKED)
        top, total, acc = softmax_step(s, v, top, total, acc, IS_MASKED)
    return top, total, acc


@triton.jit(do_not_specialize=["seq_q", "seq_k"])
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, out_b, out_h, out_t, lse_b, lse_h,
    heads, group, seq_q, seq_k, total_q, total_k, num_blocks,
    scale, softcap, left, right, bias_ptr, bias_b, bias_h, bias_q, bias_k, slopes_ptr, slopes_b, slopes_h, sinks_ptr,
    IS_VARLEN: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """q [batch, heads, seq_q, HEAD_DIM] by strides (varlen: [total_q, heads, HEAD_DIM], batch stride 0); see
    `attention`.
    """
    # The last queries of a causal head see the most keys: they start first.
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
        k_ptr += b * k_b + h // group * k_h + begin_k * k_t
        v_ptr += b * v_b + h // group * v_h + begin_k * v_t
        slope = 0.0
        if HAS_SLOPES:
            slope = tl.load(slopes_ptr + b * slopes_b + h * slopes_h)
        if HAS_BIAS:
            bias_ptr += b * bias_b + h * bias_h
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.full([BLOCK_M], 0.0, tl.float32)
        acc = tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32)
        # Which keys any row sees, and which all rows see.
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
        if HAS_BIAS:  # -inf in a bias hides a key
            inner_end = begin
        first, inner, outer = tile_range(begin, end, inner_begin, inner_end, BLOCK_N)
        if HAS_LEFT:
            top, total, acc = _walk(
                first, inner, q, k_ptr, v_ptr, k_t, v_t, rows, dims, dims_v, top, total, acc, scale, softcap, left,
                right, bias_ptr, bias_q, bias_k, slope, seq_q, seq_k, HEAD_DIM, HEAD_DIM_V, BLOCK_N, True,
                HAS_SOFTCAP, HAS_BIAS, HAS_SLOPES, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
        if not HAS_BIAS:
            top, total, acc = _walk(
                inner, outer, q, k_ptr, v_ptr, k_t, v_t, rows, dims, dims_v, top, total, acc, scale, softcap, left,
                right, bias_ptr, bias_q, bias_k, slope, seq_q, seq_k, HEAD_DIM, HEAD_DIM_V, BLOCK_N, False,
                HAS_SOFTCAP, HAS_BIAS, HAS_SLOPES, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
        top, total, acc = _walk(
            outer, end, q, k_ptr, v_ptr, k_t, v_t, rows, dims, dims_v, top, total, acc, scale, softcap, left, right,
            bias_ptr, bias_q, bias_k, slope, seq_q, seq_k, HEAD_DIM, HEAD_DIM_V, BLOCK_N, True,
            HAS_SOFTCAP, HAS_BIAS, HAS_SLOPES, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        sink = 0.0
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + h)
        out, lse = softmax_finish(top, total, acc, sink, HAS_SINKS)
        store_rows(out_ptr + b * out_b + h * out_h + begin_q * out_t, out, rows, out_t, seq_q, dims_v, HEAD_DIM_V)
        if lse_ptr is not None:
            tl.store(lse_ptr + b * lse_b + h * lse_h + begin_q + rows, lse, mask=rows < seq_q)


@device_function
def sequence(cu_ptr, b, total):
    """(first token, length) of sequence b; in bounds whatever the array holds."""
    begin = tl.load(cu_ptr + b).to(tl.int64)
    end = tl.load(cu_ptr + b + 1).to(tl.int64)
    begin = tl.minimum(tl.maximum(begin, 0), total)
    end = tl.minimum(tl.maximum(end, begin), total)
    return begin, (end - begin).to(tl.int32)


@triton.jit
def _merge(
    out_a, lse_a, out_b, lse_b, out, lse, parts, a_t, b_t, out_t, lse_a_t, lse_b_t, lse_t, a_part, lse_part,
    IS_PAIR: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of the attention states a and b, or of `parts` of them in a. A part with LSE -inf counts nothing,
    whatever its output holds.
    """
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    out_a += row * a_t
    lse_a += row * lse_a_t
    top = tl.load(lse_a + row * 0, mask=parts > 0, other=float("-inf"))
    if IS_PAIR:
        y = tl.load(lse_b + row * lse_b_t)
        top = tl.where((top != top) | (y != y), float("nan"), tl.maximum(top, y))
    else:
        for i in range(1, parts):
            y = tl.load(lse_a + i * lse_part)
            top = tl.where((top != top) | (y != y), float("nan"), tl.maximum(top, y))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    value = tl.zeros([BLOCK], tl.float32)
    for i in range(0, parts):
        if IS_PAIR:
            if i == 0:
                x = tl.load(lse_a)
                part = widen(tl.load(out_a + dims, mask=dims < HEAD_DIM, other=0.0))
            else:
                x = tl.load(lse_b + row * lse_b_t)
                part = widen(tl.load(out_b + row * b_t + dims, mask=dims < HEAD_DIM, other=0.0))
        else:
            x = tl.load(lse_a + i * lse_part)
            part = widen(tl.load(out_a + i * a_part + dims, mask=dims < HEAD_DIM, other=0.0))
        weight = tl.exp2((x - base) * LOG2_E)
        total += weight
        value += tl.where(x == float("-inf"), 0.0, part * weight)
    value = value / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * out_t + dims, narrow(value, out.dtype.element_ty), mask=dims < HEAD_DIM)
    tl.store(
        lse + row * lse_t, tl.where(total == 0.0, float("-inf"), base + tl.log(tl.where(total == 0.0, 1.0, total)))
    )


def launch_forward(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    chosen: Options,
    cu_seqlens: tuple[torch.Tensor, torch.Tensor] | None = None,
    max_seqlen_q: int = 0,
) -> None:
    """q, k, v, out [batch, heads, seq, head_dim]; with cu_seqlens views [1, heads, total, head_dim]."""
    batch = q.shape[0] if cu_seqlens is None else cu_seqlens[0].shape[0] - 1
    shape = tile_shape(call, q.dtype, max(q.shape[-1], v.shape[-1]), has_bias=chosen.bias is not None)
    num_blocks = cdiv(q.shape[2] if cu_seqlens is None else max_seqlen_q, shape["BLOCK_M"])
    call.launch(
        _forward,
        num_blocks * batch * q.shape[1],
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        out_ptr=out,
        lse_ptr=lse,
        cu_q_ptr=cu_seqlens[0] if cu_seqlens else None,
        cu_k_ptr=cu_seqlens[1] if cu_seqlens else None,
        **strides("q", q, cu_seqlens),
        **strides("k", k, cu_seqlens),
        **strides("v", v, cu_seqlens),
        **strides("out", out, cu_seqlens),
        lse_b=lse.stride(0) if lse is not None and cu_seqlens is None else 0,
        lse_h=lse.stride(-2) if lse is not None else 0,
        heads=q.shape[1],
        group=q.shape[1] // max(k.shape[1], 1),
        seq_q=q.shape[2],
        seq_k=k.shape[2],
        total_q=q.shape[2],
        total_k=k.shape[2],
        num_blocks=num_blocks,
        IS_VARLEN=cu_seqlens is not None,
        **chosen.arguments(),
        **head_blocks(q, v),
        **shape,
    )


def strides(name: str, x: torch.Tensor, is_varlen: Any = None) -> dict[str, int]:
    """A kernel's stride arguments for x [batch, heads, seq, head_dim]; packed sequences have no batch stride."""
    return {f"{name}_b": 0 if is_varlen else x.stride(0), f"{name}_h": x.stride(1), f"{name}_t": x.stride(2)}


def attention(
    q: Any,
    k: Any,
    v: Any,
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
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    dtype: Any = None,
) -> Any:
    """softmax(scale * q k^T + bias) v, as `flashkernel.attention`; torch tensors, q [batch, heads_q, seq_q, head_dim].

    Head dims 1 to 256, float32, float16 or bfloat16, any strides with a contiguous last dim. Scores and sums are
    float32; probabilities are rounded to the inputs' dtype for the second product.

    Returns out, or (out, lse). Raises: ValueError for arguments that don't fit, NotImplementedError for arrays that
    are not torch tensors on a device that Triton serves.

    Source: Dao, FlashAttention-2 (2023).

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> q = torch.ones(1, 2, 4, 8, device=fk_triton.default_device())
    >>> fk_triton.attention(q, q, q, causal=True).shape
    torch.Size([1, 2, 4, 8])
    """
    call = Call("attention", stream, dtype)
    shape = q.shape if isinstance(q, torch.Tensor) else ()
    q4, k4, v4 = dense(call, q, k, v)
    given_options = AttentionOptions(
        causal, window, softcap, scale, alibi_slopes, sinks, bias, mask, alibi, block_mask, block_size
    )
    chosen = options(call, q4, k4.shape[2], given_options)
    result = call.output("out", out, (*shape[:-1], v4.shape[-1]), q4.dtype)
    lse = call.empty(q4.shape[:-1], torch.float32) if return_lse else None
    out4 = result
    while out4.dim() < 4:
        out4 = out4.unsqueeze(0)
    launch_forward(call, q4, k4, v4, out4, lse, chosen)
    return result if lse is None else (result, lse.view(shape[:-1]))


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
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
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    dtype: Any = None,
) -> Any:
    """`attention` over sequences packed one after another, as `flashkernel.attention_varlen`; q [total_q, heads_q,
    head_dim].

    cu_seqlens_*: int32 or int64 [batch + 1], cumulative lengths; read by the kernel only, so a wrong max_seqlen_q
    leaves the queries past it unwritten instead of raising. lse is [heads_q, total_q].

    Returns out, or (out, lse). Raises: as `attention`.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> q = torch.ones(5, 2, 8, device=fk_triton.default_device())
    >>> cu_seqlens = torch.tensor([0, 2, 5], device=q.device)
    >>> fk_triton.attention_varlen(q, q, q, cu_seqlens, cu_seqlens, 3, 3).shape
    torch.Size([5, 2, 8])
    """
    call = Call("attention_varlen", stream, dtype)
    q4, k4, v4, cu_seqlens = packed(call, q, k, v, cu_seqlens_q, cu_seqlens_k)
    for name, given in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        call.need(given >= 0, f"{name}={given}; 0 or more is needed")
    given_options = AttentionOptions(causal, window, softcap, scale, alibi_slopes, sinks, alibi=alibi)
    chosen = options(call, q4, k4.shape[2], given_options, batch=cu_seqlens[0].shape[0] - 1)
    result = call.output("out", out, (*q.shape[:-1], v4.shape[-1]), q4.dtype)
    lse = call.empty((q4.shape[1], q4.shape[2]), torch.float32) if return_lse else None
    out4 = result.transpose(0, 1).unsqueeze(0)
    launch_forward(call, q4, k4, v4, out4, lse, chosen, cu_seqlens, max_seqlen_q)
    return result if lse is None else (result, lse)


def merge_states(
    out_a: Any,
    lse_a: Any,
    out_b: Any = None,
    lse_b: Any = None,
    *,
    out: Any = None,
    out_dtype: Any = None,
    stream: Any = None,
    dtype: Any = None,
) -> Any:
    """Attention over the union of disjoint sets of keys, as `flashkernel.merge_states`: of a and b, out [..., head_dim]
    of up to 4 dims, or of all parts in out_a [parts, ..., head_dim] and lse_a [parts, ...].

    Returns (out, lse). Raises: ValueError for shapes that don't fit, NotImplementedError for leading dims that no one
    stride can walk.

    Source: Milakov and Gimelshein (2018).

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> a, lse = torch.zeros(1, 4, device=fk_triton.default_device()), torch.zeros(1, device=fk_triton.default_device())
    >>> fk_triton.merge_states(a, lse, a + 1, lse)[0].tolist()
    [[0.5, 0.5, 0.5, 0.5]]
    """
    call = Call("merge_states", stream, dtype)
    is_pair = out_b is not None or lse_b is not None
    a = call.floats("out_a", out_a, (1, 4) if is_pair else (2, 5))
    lse_a = call.float32("lse_a", lse_a, a.shape[:-1])
    first, first_lse = (a, lse_a) if is_pair else (a[0], lse_a[0]) if a.shape[0] else (a.sum(0), lse_a.sum(0))
    if is_pair:
        b = call.floats("out_b", out_b, (1, 4), like=a)
        call.shape("out_b", b, a.shape)
        lse_b = call.float32("lse_b", lse_b, a.shape[:-1])
    else:
        b, lse_b = first, first_lse
    given, given_lse = call.pair("out", out, "a pair (out, lse)")
    wanted = a.dtype
    if out_dtype is not None:
        wanted = call.named_float("out_dtype", out_dtype)
    elif given is not None:
        wanted = call.floats("out", given, a.dim() - (not is_pair)).dtype
    call.need(
        wanted == a.dtype or a.dtype == torch.float32,
        f"out is {name_of(wanted)} but out_a is {name_of(a.dtype)}; out_a's dtype is needed, or parts in float32",
    )
    in_place = ("out_a",) if is_pair else ()
    result = call.output("out", given, first.shape, wanted, may_be=in_place)
    lse = call.output(
        "lse", given_lse, first.shape[:-1], torch.float32, rows=False, may_be=("lse_a",) if is_pair else ()
    )
    if result.numel() == 0 and lse.numel() == 0:
        return result, lse
    rows = {name: call.as_rows(name, x) for name, x in (("out_a", first), ("out_b", b), ("out", result))}
    flat = {
        name: call.as_rows(name, x.unsqueeze(-1)) for name, x in (("lse_a", first_lse), ("lse_b", lse_b), ("lse", lse))
    }
    call.launch(
        _merge, lse.numel(), **rows, **flat, parts=2 if is_pair else a.shape[0], a_t=rows["out_a"].stride(0),
        b_t=rows["out_b"].stride(0), out_t=rows["out"].stride(0), lse_a_t=flat["lse_a"].stride(0),
        lse_b_t=flat["lse_b"].stride(0), lse_t=flat["lse"].stride(0), a_part=a.stride(0), lse_part=lse_a.stride(0),
        IS_PAIR=is_pair, HEAD_DIM=a.shape[-1], BLOCK=power_of_two(a.shape[-1]),
    )  # fmt: skip
    return result, lse
