"""The functions of `flash_attn_interface` (flash-attn 3) over FlashKernel, with `s_aux`: attention sinks.

Names, arguments, defaults and layouts are the package's. `num_splits`, `pack_gqa`, `sm_margin` and
`scheduler_metadata` say how to use a GPU and are accepted: the kernels here choose for themselves. float8_e4m3fn q, k
and v, with `q_descale`, `k_descale` and `v_descale` [batch, heads_kv], give bfloat16 and no gradients. Refused by name:
float8 over a cache, `qv`, `attention_chunk`. Source: Shah et al., FlashAttention-3 (2024).
"""

from __future__ import annotations

from typing import Any

import torch

import flashkernel as fk

from ..torch._library import dense
from . import _attention as door
from ._cache import attend_pages, token_places, with_cache
from ._errors import ArgumentError
from ._parts_3 import PRIVATE, _flash_attn_backward  # noqa: F401 - `install()` shows them, too

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Window = tuple[int, int]


def _refuse(
    op: str, q: Any, qv: Any, attention_chunk: int, q_descale: Any, k_descale: Any, v_descale: Any, cache: bool = False
) -> bool:
    """Refuses what is not implemented. True: q is of 8 bits."""
    if qv is q_descale is k_descale is v_descale is None and not attention_chunk and q.dtype.itemsize != 1:
        return False  # every call comes here
    if qv is not None:
        raise NotImplementedError(f"{op}: qv is given; queries of the values are not implemented, None is needed")
    if attention_chunk:
        raise NotImplementedError(f"{op}: attention_chunk={attention_chunk}; 0 is needed: chunks are not implemented")
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    if cache:
        door.refuse_fp8(op, q, **scales)
    elif q.dtype.itemsize != 1:
        name = next(name for name, scale in scales.items() if scale is not None)
        raise NotImplementedError(f"{op}: {name} is given but q is {q.dtype}; float8_e4m3fn is needed")
    elif q.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise NotImplementedError(f"{op}: q is {q.dtype}; of 8 bits, float8_e4m3fn or float8_e5m2 is needed")
    return True


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
) -> Any:
    """Attention over [batch, seq, heads, head_dim], with gradients, s_aux's included.

    s_aux: [heads_q], the logit of one more key that has no value; float32, or q's dtype, which is converted.

    Returns out, or (out, lse [batch, heads_q, seq_q]) with return_attn_probs. Raises NotImplementedError for what the
    module's text lists, ValueError for shapes and dtypes that don't fit.

    >>> import torch
    >>> from flashkernel.flash_attn.flash_attn_3_interface import flash_attn_func
    >>> q = torch.ones(1, 3, 4, 8)
    >>> out, lse = flash_attn_func(q, q, q, causal=True, s_aux=torch.zeros(4), return_attn_probs=True)
    >>> lse.shape
    torch.Size([1, 4, 3])
    """
    op = "flash_attn_func"
    eight_bits = _refuse(op, q, qv, attention_chunk, q_descale, k_descale, v_descale)
    sinks = _sinks(s_aux)
    if eight_bits:
        scales = q_descale, k_descale, v_descale
        return door.attention_fp8(
            op, (q, k, v), scales, softmax_scale, causal, window_size, softcap, sinks, return_attn_probs
        )
    return door.attention(
        op, q, k, v, softmax_scale, causal, window_size, softcap, None, sinks, return_attn_probs
    )  # fmt: skip


def _sinks(s_aux: torch.Tensor | None) -> torch.Tensor | None:
    return None if s_aux is None else s_aux.float()


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """The same with one tensor: qkv [batch, seq, 3, heads, head_dim], or [batch, seq, heads_q + 2 * heads_kv, head_dim]
    with num_heads_q. Backward joins the gradients, a copy.

    >>> import torch
    >>> from flashkernel.flash_attn.flash_attn_3_interface import flash_attn_qkvpacked_func
    >>> flash_attn_qkvpacked_func(torch.ones(1, 5, 8, 16), num_heads_q=4).shape
    torch.Size([1, 5, 4, 16])
    """
    op = "flash_attn_qkvpacked_func"
    eight_bits = _refuse(op, qkv, None, attention_chunk, q_descale, k_descale, v_descale)
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif (
        qkv.dim() == 4
        and num_heads_q is not None
        and qkv.shape[2] > num_heads_q
        and (qkv.shape[2] - num_heads_q) % 2 == 0
    ):
        heads_kv = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads_kv, heads_kv], dim=2)
    else:
        raise ArgumentError(
            f"{op}: qkv has shape {list(qkv.shape)}, num_heads_q={num_heads_q}; [batch, seq, 3, heads, head_dim] is "
            "needed, or [batch, seq, heads_q + 2 * heads_kv, head_dim] with num_heads_q"
        )
    if eight_bits:
        scales = q_descale, k_descale, v_descale
        return door.attention_fp8(
            op, (q, k, v), scales, softmax_scale, causal, window_size, softcap, None, return_attn_probs
        )
    return door.attention(
        op, q, k, v, softmax_scale, causal, window_size, softcap, None, None, return_attn_probs
    )  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
) -> Any:
    """Attention of sequences side by side, with gradients.

    q: [total_q, heads_q, head_dim]; k, v: [total_k, heads_kv, *]; cu_seqlens_*: int32 or int64 [batch + 1].
    seqused_q, seqused_k: int32 [batch], how many tokens at the start of each sequence count. The others' rows of out
       are 0, of lse -inf, and of gradients 0. Where a tracer or a transform follows the call, the tokens that count
       are copied and, on a GPU, their number is waited for; kernels bound lengths themselves otherwise.

    Returns out [total_q, heads_q, head_dim_v], or (out, lse [heads_q, total_q]) with return_attn_probs.

    >>> import torch
    >>> from flashkernel.flash_attn.flash_attn_3_interface import flash_attn_varlen_func
    >>> q, starts = torch.ones(5, 2, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> used = torch.tensor([1, 3], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, q, q, starts, starts, 3, 3, seqused_k=used).shape
    torch.Size([5, 2, 8])
    """
    op = "flash_attn_varlen_func"
    eight_bits = _refuse(op, q, qv, attention_chunk, q_descale, k_descale, v_descale)
    sinks = _sinks(s_aux)
    if eight_bits:
        return door.attention_fp8(
            op, (q, k, v), (q_descale, k_descale, v_descale), softmax_scale, causal, window_size, softcap, sinks,
            return_attn_probs,
            (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k),
        )  # fmt: skip
    options = door.options(softmax_scale, causal, window_size, softcap, None, sinks)
    if seqused_q is None and seqused_k is None:
        return door.attention_varlen(
            op, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options, return_attn_probs
        )
    if door.plain(q, k, v, sinks):
        return door.attention_varlen_used(
            op,
            (q, k, v, sinks),
            (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k),
            (softmax_scale, causal, *window_size, softcap),
            return_attn_probs,
        )
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v) + (() if s_aux is None else (s_aux,)))
    if seqused_q is None and seqused_k is not None and not recorded:
        at = torch.arange(max(max_seqlen_k, 1), device=k.device)[None] + cu_seqlens_k[:-1].long()[:, None]
        table = at.clamp_(max=max(k.shape[0] - 1, 0)).to(torch.int32)
        return attend_pages(
            op, q, k[:, None], v[:, None], table, seqused_k, cu_seqlens_q, max_seqlen_q, options, return_attn_probs
        )
    rows_q, starts_q = _used(cu_seqlens_q, seqused_q, q.shape[0])
    rows_k, starts_k = _used(cu_seqlens_k, seqused_k, k.shape[0])
    out, lse = door.attention_varlen(
        op, q[rows_q], k[rows_k], v[rows_k], starts_q, starts_k, max_seqlen_q, max_seqlen_k, options, True
    )
    full = out.new_zeros((q.shape[0], *out.shape[1:])).index_copy(0, rows_q, out)
    if not return_attn_probs:
        return full
    return full, lse.new_full((lse.shape[0], q.shape[0]), float("-inf")).index_copy(1, rows_q, lse)


def _used(cu_seqlens: torch.Tensor, used: torch.Tensor | None, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that count, and cu_seqlens of them alone."""
    if used is None:
        return torch.arange(total, device=cu_seqlens.device), cu_seqlens
    sequence, index = token_places(cu_seqlens, total)
    within = (index < used[sequence]) & (index < cu_seqlens.diff()[sequence])
    starts = torch.zeros_like(cu_seqlens)
    starts[1:] = torch.minimum(used, cu_seqlens.diff()).cumsum(0)
    return within.nonzero()[:, 0], starts


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of sets of keys, from the result over each; sums in float32.

    out_partial: [splits, batch, seq, heads, head_dim], float32 or narrower. lse_partial: float32 [splits, batch, seq,
       heads]. out: written where given. out_dtype: default out_partial's.

    Returns (out [batch, seq, heads, head_dim], lse float32 [batch, seq, heads]). A part with LSE -inf counts nothing.

    >>> import torch
    >>> from flashkernel.flash_attn.flash_attn_3_interface import flash_attn_combine
    >>> parts = torch.tensor([1.0, 3.0]).reshape(2, 1, 1, 1, 1)
    >>> flash_attn_combine(parts, torch.zeros(2, 1, 1, 1))[0].item()
    2.0
    """
    if out_partial.dim() != 5 or lse_partial.shape != out_partial.shape[:-1]:
        raise ArgumentError(
            f"flash_attn_combine: out_partial {list(out_partial.shape)}, lse_partial {list(lse_partial.shape)}; "
            "[splits, batch, seq, heads, head_dim] and [splits, batch, seq, heads] are needed"
        )
    dtype = out_partial.dtype if out_dtype is None else out_dtype
    given = out_partial.new_empty(out_partial.shape[1:], dtype=dtype) if out is None else out
    if dense(given) is given and out_partial.dtype in (torch.float32, given.dtype):
        lse = lse_partial.new_empty(lse_partial.shape[1:])
        fk.merge_states(dense(out_partial), lse_partial, out=(given, lse))
    else:  # narrower parts into another dtype, or an out that no kernel writes: by way of float32
        merged, lse = fk.merge_states(dense(out_partial.float()), lse_partial)
        given.copy_(merged)
    return given, lse


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
) -> Any:
    """Appends k and v to a cache in place and attends over it; no gradients.

    As `flash_attn_with_kvcache` of flash-attn 2, and: page_table is its block_table; with cu_seqlens_q, q is [total_q,
    heads_q, head_dim]; with cu_seqlens_k_new, k and v are [total_new, heads_kv, *]; rotary_seqlens int32 [batch]: where
    the tables' positions begin, instead of cache_seqlens; s_aux: sinks [heads_q].

    Returns out, or with return_softmax_lse (out, lse, and two empty tensors: the package's partial results).

    >>> import torch
    >>> from flashkernel.flash_attn.flash_attn_3_interface import flash_attn_with_kvcache
    >>> pages, table = torch.ones(4, 16, 2, 8), torch.tensor([[2, 0]], dtype=torch.int32)
    >>> flash_attn_with_kvcache(torch.ones(1, 1, 4, 8), pages, pages, page_table=table, cache_seqlens=20).shape
    torch.Size([1, 1, 4, 8])
    """
    op = "flash_attn_with_kvcache"
    _refuse(op, q, qv, attention_chunk, q_descale, k_descale, v_descale, cache=True)
    result = with_cache(
        op,
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        page_table,
        rotary_interleaved,
        door.options(softmax_scale, causal, window_size, softcap, None, _sinks(s_aux)),
        return_softmax_lse,
        cu_seqlens_q,
        cu_seqlens_k_new,
        max_seqlen_q,
        rotary_seqlens,
    )
    if not return_softmax_lse:
        return result
    nothing = torch.empty(0, device=q.device)
    return *result, nothing, nothing


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> None:
    """None: attention over a cache is planned on the device here, so that there is nothing to prepare."""
    return None


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    out_: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    kv_batch_idx: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    seqlens_rotary: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, and two empty tensors: the package's partial results), by whichever public function the call is.

    Keys without cu_seqlens_k that have new ones, a table, lengths, rows or rotary tables are a cache:
    `flash_attn_with_kvcache`, of whose cache_seqlens seqused_k is the name here. With cu_seqlens_q and cu_seqlens_k:
    `flash_attn_varlen_func`. Else `flash_attn_func`. lse is float32 [batch, heads, seq_q], or with cu_seqlens_q
    [heads, total_q].

    out_: written and returned, where no gradient is recorded.
    """
    op, window = "_flash_attn_forward", (window_size_left, window_size_right)
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    given: dict[str, Any] = {
        "softmax_scale": softmax_scale, "causal": causal, "qv": qv, **scales, "window_size": window,
        "attention_chunk": attention_chunk, "softcap": softcap,
    }  # fmt: skip
    parts = k_new, page_table, kv_batch_idx, leftpad_k, rotary_cos
    is_cache = cu_seqlens_k is None and (seqused_k is not None or any(x is not None for x in parts))
    if is_cache:
        if seqused_q is not None:
            raise NotImplementedError(f"{op}: seqused_q over a cache; None is needed")
        out, lse, *_ = flash_attn_with_kvcache(
            q, k, v, k_new, v_new, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_seqlens=seqused_k,
            cache_batch_idx=kv_batch_idx, cache_leftpad=leftpad_k, page_table=page_table, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q, rotary_seqlens=seqlens_rotary,
            rotary_interleaved=rotary_interleaved, return_softmax_lse=True, **given,
        )  # fmt: skip
    elif any(x is not None for x in parts):
        raise NotImplementedError(
            f"{op}: cu_seqlens_k over a cache; None is needed: seqused_k says how many keys count"
        )
    elif (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ArgumentError(f"{op}: one of cu_seqlens_q and cu_seqlens_k is given; both or none are needed")
    elif cu_seqlens_q is not None and cu_seqlens_k is not None:
        if max_seqlen_q is None or max_seqlen_k is None:
            raise ArgumentError(f"{op}: cu_seqlens_q is given; max_seqlen_q and max_seqlen_k are needed, too")
        out, lse = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
            return_attn_probs=True, **given,
        )  # fmt: skip
    elif seqused_q is not None:
        raise NotImplementedError(f"{op}: seqused_q without cu_seqlens_q; None is needed")
    else:
        out, lse = flash_attn_func(q, k, v, return_attn_probs=True, **given)
    if out_ is not None:
        if out.requires_grad:
            raise ArgumentError(f"{op}: out_ is given where a gradient is recorded; None is needed")
        if out_.shape != out.shape or out_.dtype != out.dtype:
            raise ArgumentError(
                f"{op}: out_ is {list(out_.shape)} {out_.dtype}; {list(out.shape)} {out.dtype} is needed"
            )
        out = out_.copy_(out)
    return out, lse, lse.new_empty(0), lse.new_empty(0)
