"""attention_paged in Triton: attention over a paged KV cache, split over the keys so that few queries fill the GPU.

A program takes BLOCK_M rows, each a query of one of the heads that share a key head, and one split of the keys, which
it finds through the block table. A second kernel joins the splits. Split bounds follow from the lengths on the device,
so a captured graph replays with any lengths. Kwon et al., PagedAttention (2023); Dao et al., Flash-Decoding (2023).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..attention_options import AttentionOptions
from ._attention_host import check_shapes, head_blocks, options
from ._attention_tile import modified_scores, softmax_finish, softmax_step, visible
from ._device import LOG2_E, dot, narrow
from ._host import IS_INTERPRETED, Call, cdiv, power_of_two
from ._pages import check_pages, check_table, no_scales, page_arguments
from .flash_attention import sequence
from .quantized_kv_cache import element_value


@triton.jit(do_not_specialize=["seq_q", "num_splits", "max_keys"])
def _decode(
    q_ptr, k_pages_ptr, v_pages_ptr, out_ptr, lse_ptr, table_ptr, lens_ptr, cu_q_ptr,
    q_b, q_h, q_t, k_pages_p, k_pages_t, k_pages_h, v_pages_p, v_pages_t, v_pages_h,
    out_s, out_b, out_h, out_t, lse_s, lse_b, lse_h, table_b, table_p, lens_b,
    heads_kv, group, seq_q, total_q, page_size, num_pages, max_keys, num_blocks, num_splits,
    scale, softcap, left, right, slopes_ptr, slopes_b, slopes_h, sinks_ptr,
    k_scales_ptr, v_scales_ptr, k_scales_p, k_scales_h, k_scales_t, v_scales_p, v_scales_h, v_scales_t,
    IS_QUANTIZED: tl.constexpr, IS_E4M3: tl.constexpr,
    IS_VARLEN: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Rows are query * group + head of the group. With splits out and lse are float32 parts, out_s and lse_s apart."""
    split = tl.program_id(0) % num_splits
    block = tl.program_id(0) // num_splits % num_blocks
    head = (tl.program_id(0) // num_splits // num_blocks % heads_kv).to(tl.int64)
    b = (tl.program_id(0) // num_splits // num_blocks // heads_kv).to(tl.int64)
    begin_q = b * 0
    if IS_VARLEN:
        begin_q, seq_q = sequence(cu_q_ptr, b, total_q)
    seq_k = tl.minimum(tl.maximum(tl.load(lens_ptr + b * lens_b).to(tl.int64), 0), max_keys).to(tl.int32)
    if block * BLOCK_M < seq_q * group:
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        query = row // group
        h = head * group + row % group
        dim = tl.arange(0, BLOCK_D)
        dim_v = tl.arange(0, BLOCK_DV)
        live = query < seq_q
        token = begin_q + query
        q_at = q_ptr + b * q_b + token[:, None] * q_t + h[:, None] * q_h + dim[None, :]
        q = tl.load(q_at, mask=live[:, None] & (dim[None, :] < HEAD_DIM), other=0.0)
        slope = 0.0
        if HAS_SLOPES:
            slope = tl.load(slopes_ptr + b * slopes_b + h * slopes_h, mask=live, other=0.0)[:, None]
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.full([BLOCK_M], 0.0, tl.float32)
        acc = tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32)
        shift = seq_k - seq_q
        begin = seq_k * 0
        end = seq_k
        if HAS_RIGHT:
            end = tl.maximum(0, tl.minimum(seq_k, (block * BLOCK_M + BLOCK_M - 1) // group + 1 + shift + right))
        if HAS_LEFT:
            begin = tl.maximum(0, block * BLOCK_M // group + shift - left) // BLOCK_N * BLOCK_N
        tiles = tl.maximum(end - begin + BLOCK_N - 1, 0) // BLOCK_N
        each = (tiles + num_splits - 1) // num_splits * BLOCK_N
        end = tl.minimum(end, begin + (split + 1) * each)
        begin = begin + split * each
        for start in range(begin, end, BLOCK_N):
            col = start + tl.arange(0, BLOCK_N)
            inside = col < seq_k
            page = tl.load(table_ptr + b * table_b + col // page_size * table_p, mask=inside, other=0).to(tl.int64)
            inside = inside & (page >= 0) & (page < num_pages)
            within = (col % page_size).to(tl.int64)
            k_at = k_pages_ptr + (page * k_pages_p + within * k_pages_t + head * k_pages_h)[:, None] + dim[None, :]
            v_at = v_pages_ptr + (page * v_pages_p + within * v_pages_t + head * v_pages_h)[:, None] + dim_v[None, :]
            k = tl.load(k_at, mask=inside[:, None] & (dim[None, :] < HEAD_DIM), other=0)
            v = tl.load(v_at, mask=inside[:, None] & (dim_v[None, :] < HEAD_DIM_V), other=0)
            if IS_QUANTIZED:
                # Elements are exact in q's dtype; a key's scale goes to its scores, a value's rounds with the value.
                k_scale_at = k_scales_ptr + page * k_scales_p + within * k_scales_t + head * k_scales_h
                v_scale_at = v_scales_ptr + page * v_scales_p + within * v_scales_t + head * v_scales_h
                k_scale = tl.load(k_scale_at, mask=inside, other=0.0)
                v_scale = tl.load(v_scale_at, mask=inside, other=0.0)
                k = narrow(element_value(k, IS_E4M3), q_ptr.dtype.element_ty)
                v = narrow(element_value(v, IS_E4M3) * v_scale[:, None], q_ptr.dtype.element_ty)
                s = dot(q, tl.trans(k), tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)) * k_scale[None, :] * scale
            else:
                s = dot(q, tl.trans(k), tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)) * scale
            s, _ = modified_scores(
                s, query, col, shift, softcap, None, 0, 0, slope, seq_q, seq_k, HAS_SOFTCAP, False, HAS_SLOPES
            )
            seen = visible(query, col, shift, left, right, seq_k, HAS_LEFT, HAS_RIGHT) & inside[None, :]
            s = tl.where(seen, s, float("-inf"))
            top, total, acc = softmax_step(s, v, top, total, acc, True)
        sink = 0.0
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + h, mask=live, other=0.0)
        out, lse = softmax_finish(top, total, acc, sink, HAS_SINKS)
        out_at = out_ptr + split.to(tl.int64) * out_s + b * out_b + token[:, None] * out_t + h[:, None] * out_h
        keep = live[:, None] & (dim_v[None, :] < HEAD_DIM_V)
        tl.store(out_at + dim_v[None, :], narrow(out, out_ptr.dtype.element_ty), mask=keep)
        if lse_ptr is not None:
            tl.store(lse_ptr + split.to(tl.int64) * lse_s + b * lse_b + h * lse_h + token, lse, mask=live)


@triton.jit(do_not_specialize=["num_splits", "tokens"])
def _join(
    parts_ptr, parts_lse_ptr, out_ptr, lse_ptr, sinks_ptr, parts_s, parts_b, parts_h, parts_t, parts_lse_s, parts_lse_b,
    parts_lse_h, out_b, out_h, out_t, lse_b, lse_h, heads, tokens, num_splits,
    HAS_SINKS: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One query's splits joined; a split that saw nothing has LSE -inf and counts nothing."""
    t = (tl.program_id(0) % tokens).to(tl.int64)
    h = (tl.program_id(0) // tokens % heads).to(tl.int64)
    b = (tl.program_id(0) // tokens // heads).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    dim = tl.arange(0, BLOCK_DV)
    lse_at = parts_lse_ptr + split.to(tl.int64) * parts_lse_s + b * parts_lse_b + h * parts_lse_h + t
    lse = tl.load(lse_at, mask=split < num_splits, other=float("-inf"))
    top = tl.max(lse, 0)
    sink = float("-inf")
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + h)
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2((lse - base) * LOG2_E)
    total = tl.sum(weight, 0)
    if HAS_SINKS:
        total += tl.exp2((sink - base) * LOG2_E)
    at = parts_ptr + split.to(tl.int64)[:, None] * parts_s + b * parts_b + h * parts_h + t * parts_t + dim[None, :]
    counts = (split[:, None] < num_splits) & (lse[:, None] != float("-inf")) & (dim[None, :] < HEAD_DIM_V)
    part = tl.load(at, mask=counts, other=0.0)
    value = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    out_at = out_ptr + b * out_b + h * out_h + t * out_t + dim
    tl.store(out_at, narrow(value, out_ptr.dtype.element_ty), mask=dim < HEAD_DIM_V)
    if lse_ptr is not None:
        tl.store(
            lse_ptr + b * lse_b + h * lse_h + t,
            tl.where(total == 0.0, float("-inf"), base + tl.log(tl.where(total == 0.0, 1.0, total))),
        )


def _tile(call: Call, q: torch.Tensor, width: int, rows: int) -> dict[str, int]:
    """A tile of rows as small as the queries allow; 2 x BLOCK_N x head_dim x 2 bytes a stage, 64 KiB at most."""
    if IS_INTERPRETED:
        return {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}
    most = 64 if q.dtype != torch.float32 and width <= 128 else 16
    block_n = 16 if q.dtype == torch.float32 else 64 if width <= 128 else 32
    return {
        "BLOCK_M": min(power_of_two(rows, 16), most),
        "BLOCK_N": block_n,
        "num_warps": 4,
        "num_stages": 2 if call.capability >= 80 else 1,
    }


def attention_paged(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    causal: bool = False,
    window: Any = None,
    softcap: float = 0.0,
    scale: float | None = None,
    alibi_slopes: Any = None,
    alibi: str = "distance",
    sinks: Any = None,
    mask: Any = None,
    return_lse: bool = False,
    check: bool = False,
    kv_scales: Any = None,
    kv_dtype: Any = None,
    out: Any = None,
    stream: Any = None,
    dtype: Any = None,
) -> Any:
    """Attention of q over a paged KV cache, as `flashkernel.attention_paged`; pages [num_pages, page_size, heads_kv,
    head_dim].

    q: [batch, heads_q, seq_q, head_dim], or [total_q, heads_q, head_dim] with cu_seqlens_q; max_seqlen_q
       bounds their lengths (total_q by default, a tighter one is faster).
    block_table int32 [batch, max_pages], seq_lens int32 or int64 [batch]: read by the kernel only. A page id out of
    range is read as no keys. Elements of 8-bit pages (kv_scales, kv_dtype) are exact in q's dtype; values are rounded
    to it once they are multiplied by their scale.

    Returns out, or (out, lse). Raises: ValueError for arguments that don't fit, NotImplementedError for check=True (it
    would wait for the stream; `flashkernel.check_block_table` does that), for a mask and for arrays that Triton does
    not serve.

    Source: Kwon et al., PagedAttention (2023); Dao et al., Flash-Decoding (2023).

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> pages = torch.ones(3, 16, 2, 8, device=fk_triton.default_device())
    >>> table = torch.tensor([[2, 0]], dtype=torch.int32, device=pages.device)
    >>> q = torch.ones(1, 4, 1, 8, device=pages.device)
    >>> fk_triton.attention_paged(q, pages, pages, table, torch.tensor([20], device=pages.device), causal=True).shape
    torch.Size([1, 4, 1, 8])
    """
    call = Call("attention_paged", stream, dtype)
    is_varlen = cu_seqlens_q is not None
    q = call.floats("q", q, 3 if is_varlen else 4)
    k_pages, v_pages, scales = check_pages(call, k_pages, v_pages, kv_scales, kv_dtype)
    call.need(
        scales is not None or k_pages.dtype == q.dtype,
        f"k_pages is {k_pages.dtype} but q is {q.dtype}; they must match",
    )
    if check:
        call.refuse("check=True; the Triton kernels never wait for the stream, check_block_table does")
    q4 = q.transpose(0, 1).unsqueeze(0) if is_varlen else q
    check_shapes(call, q4, k_pages, v_pages, ("k_pages", "v_pages"), head=2)
    table, lens = check_table(call, block_table, seq_lens)
    batch, heads, heads_kv = table.shape[0], q4.shape[1], k_pages.shape[2]
    if is_varlen:
        cu_seqlens_q = call.index("cu_seqlens_q", cu_seqlens_q)
        call.shape("cu_seqlens_q", cu_seqlens_q, (batch + 1,))
        step = cu_seqlens_q.stride(0)
        call.need(batch == 0 or step == 1, f"cu_seqlens_q.strides[0]={step}; 1 is needed")
        longest = q.shape[0] if max_seqlen_q is None else max_seqlen_q  # total_q bounds every length
    else:
        call.need(q.shape[0] == batch, f"q.shape[0]={q.shape[0]} but block_table.shape[0]={batch}; they must match")
        longest = q.shape[2]
    max_keys = table.shape[1] * k_pages.shape[1]
    given_options = AttentionOptions(causal, window, softcap, scale, alibi_slopes, sinks, mask=mask, alibi=alibi)
    chosen = options(call, q4, max_keys, given_options, batch=batch)
    result = call.output("out", out, (*q.shape[:-1], v_pages.shape[3]), q.dtype)
    out4 = result.transpose(0, 1).unsqueeze(0) if is_varlen else result
    lse = call.empty(q4.shape[1:3] if is_varlen else q4.shape[:3], torch.float32) if return_lse else None
    if not result.numel():
        return result if lse is None else (result, lse)
    group = heads // heads_kv
    shape = _tile(call, q, max(q4.shape[3], v_pages.shape[3]), longest * group)
    num_blocks = cdiv(longest * group, shape["BLOCK_M"])
    programs = num_blocks * batch * heads_kv
    # Enough splits for two programs a multiprocessor, each with four tiles of keys at least when all sequences are
    # full.
    most = max(1, cdiv(max_keys, (1 if IS_INTERPRETED else 4) * shape["BLOCK_N"]))
    num_splits = max(1, min(most, 128, 2 * call.num_multiprocessors // max(programs, 1)))
    arguments = chosen.arguments()
    for name in ("bias_ptr", "bias_b", "bias_h", "bias_q", "bias_k", "HAS_BIAS"):
        del arguments[name]
    to, to_lse = out4, lse.view(q4.shape[:3]) if lse is not None else None
    split_steps = (0, 0)
    if num_splits > 1:
        parts = call.empty((num_splits, *out4.shape), torch.float32)
        parts_lse = call.empty((num_splits, *q4.shape[:3]), torch.float32)
        to, to_lse, split_steps = parts[0], parts_lse[0], (parts.stride(0), parts_lse.stride(0))
        arguments["sinks_ptr"], arguments["HAS_SINKS"] = None, False
    no_batch = is_varlen
    call.launch(
        _decode, programs * num_splits, q_ptr=q4, out_ptr=to, lse_ptr=to_lse, table_ptr=table, lens_ptr=lens,
        cu_q_ptr=cu_seqlens_q, q_b=0 if no_batch else q4.stride(0), q_h=q4.stride(1), q_t=q4.stride(2),
        out_s=split_steps[0], out_b=0 if no_batch else to.stride(0), out_h=to.stride(1), out_t=to.stride(2),
        lse_s=split_steps[1], lse_b=0 if no_batch or to_lse is None else to_lse.stride(0),
        lse_h=0 if to_lse is None else to_lse.stride(1), table_b=table.stride(0), table_p=table.stride(1),
        lens_b=lens.stride(0), heads_kv=heads_kv, group=group, seq_q=longest, total_q=q4.shape[2],
        num_pages=k_pages.shape[0], max_keys=max_keys, num_blocks=num_blocks, num_splits=num_splits,
        IS_VARLEN=is_varlen, IS_QUANTIZED=scales is not None, **(no_scales() if scales is None else scales.arguments()),
        **page_arguments(k_pages, v_pages), **head_blocks(q4, v_pages), **arguments, **shape,
    )  # fmt: skip
    if num_splits > 1:
        final = None if lse is None else lse.view(q4.shape[:3])
        call.launch(
            _join, q4.shape[0] * heads * q4.shape[2], parts_ptr=parts, parts_lse_ptr=parts_lse, out_ptr=out4,
            lse_ptr=final, sinks_ptr=chosen.sinks, parts_s=parts.stride(0), parts_b=parts.stride(1),
            parts_h=parts.stride(2), parts_t=parts.stride(3), parts_lse_s=parts_lse.stride(0),
            parts_lse_b=parts_lse.stride(1), parts_lse_h=parts_lse.stride(2), out_b=out4.stride(0),
            out_h=out4.stride(1),
            out_t=out4.stride(2), lse_b=0 if final is None else final.stride(0),
            lse_h=0 if final is None else final.stride(1), heads=heads, tokens=q4.shape[2], num_splits=num_splits,
            HAS_SINKS=chosen.sinks is not None, HEAD_DIM_V=v_pages.shape[3], BLOCK_DV=power_of_two(v_pages.shape[3]),
            BLOCK_S=power_of_two(num_splits),
        )  # fmt: skip
    return result if lse is None else (result, lse)
