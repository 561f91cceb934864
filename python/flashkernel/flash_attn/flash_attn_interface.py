"""The functions of `flash_attn.flash_attn_interface` (flash-attn 2) over FlashKernel.

Names, arguments, defaults and layouts are the package's, and so is what they mean: `causal` and windows are aligned to
the bottom right, -1 is unbounded on a side of the window, softcap 0 is off. float32 works too, head dims are 1 to 512
with no padding, and everything runs on the CPU as well. `deterministic` is accepted: gradients always are. Source: Dao,
FlashAttention-2 (2023).
"""

from __future__ import annotations

from typing import Any

import torch

from . import _attention as door
from ._cache import attend_pages, with_cache
from ._errors import ArgumentError
from ._parts import (  # noqa: F401 - the package's private names are here, too
    PRIVATE,
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    _wrapped_flash_attn_backward,
    _wrapped_flash_attn_forward,
    _wrapped_flash_attn_varlen_backward,
    _wrapped_flash_attn_varlen_forward,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Window = tuple[int, int]


def _results(result: Any, return_attn_probs: bool) -> Any:
    """With the package's third result, the probabilities that dropout dropped: without dropout, there too, empty."""
    return (*result, result[0].new_empty(0)) if return_attn_probs else result


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention over [batch, seq, heads, head_dim], with gradients; the tensors are read as they lie.

    q: [batch, seq_q, heads_q, head_dim]; k: [batch, seq_k, heads_kv, head_dim]; v: [batch, seq_k, heads_kv,
       head_dim_v]; float32, float16 or bfloat16; heads_q a multiple of heads_kv.
    alibi_slopes: float32 [heads_q] or [batch, heads_q].

    Returns out [batch, seq_q, heads_q, head_dim_v]; with return_attn_probs (out, lse, an empty tensor), lse float32
    [batch, heads_q, seq_q]. A row that sees no key gives 0, and LSE -inf where the package gives +inf. The LSE has
    gradients. Raises NotImplementedError for dropout_p other than 0 and ValueError for shapes and dtypes that don't
    fit.

    >>> import torch
    >>> from flashkernel.flash_attn import flash_attn_func
    >>> q = torch.ones(2, 3, 4, 8)
    >>> flash_attn_func(q, q, q, causal=True).shape
    torch.Size([2, 3, 4, 8])
    """
    if dropout_p:
        door.refuse_dropout("flash_attn_func", dropout_p)
    result = door.attention(
        "flash_attn_func", q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, None, return_attn_probs
    )
    return _results(result, True) if return_attn_probs else result


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with keys and values in one tensor, kv [batch, seq_k, 2, heads_kv, head_dim], read as views;
    backward writes the gradients of k and v and stacks them, a copy.

    >>> import torch
    >>> from flashkernel.flash_attn import flash_attn_kvpacked_func
    >>> flash_attn_kvpacked_func(torch.ones(1, 3, 4, 8), torch.ones(1, 5, 2, 2, 8)).shape
    torch.Size([1, 3, 4, 8])
    """
    if dropout_p:
        door.refuse_dropout("flash_attn_kvpacked_func", dropout_p)
    k, v = _unpacked("flash_attn_kvpacked_func", "kv", kv, 5, 2)
    result = door.attention(
        "flash_attn_kvpacked_func",
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        None,
        return_attn_probs,
    )
    return _results(result, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with queries, keys and values in one tensor, qkv [batch, seq, 3, heads, head_dim], read as
    views; backward writes three gradients and stacks them, a copy.

    >>> import torch
    >>> from flashkernel.flash_attn import flash_attn_qkvpacked_func
    >>> flash_attn_qkvpacked_func(torch.ones(1, 5, 3, 2, 8), causal=True).shape
    torch.Size([1, 5, 2, 8])
    """
    if dropout_p:
        door.refuse_dropout("flash_attn_qkvpacked_func", dropout_p)
    q, k, v = _unpacked("flash_attn_qkvpacked_func", "qkv", qkv, 5, 3)
    result = door.attention(
        "flash_attn_qkvpacked_func",
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        None,
        return_attn_probs,
    )
    return _results(result, return_attn_probs)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Attention of sequences side by side, with gradients; with block_table over pages, without.

    q: [total_q, heads_q, head_dim]; k, v: [total_k, heads_kv, *], or with block_table pages [num_blocks, page_size,
       heads_kv, *] of any page size, and cu_seqlens_k then says how many keys each sequence has in them.
    cu_seqlens_q, cu_seqlens_k: int32 or int64 [batch + 1]; lengths of 0 are fine.

    Returns out [total_q, heads_q, head_dim_v]; with return_attn_probs (out, lse float32 [heads_q, total_q], an empty
    tensor). Raises as `flash_attn_func` does.

    >>> import torch
    >>> from flashkernel.flash_attn import flash_attn_varlen_func
    >>> q, starts = torch.ones(5, 2, 8), torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, q, q, starts, starts, 3, 3, causal=True).shape
    torch.Size([5, 2, 8])
    """
    op = "flash_attn_varlen_func"
    if dropout_p:
        door.refuse_dropout(op, dropout_p)
    options = door.options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    if block_table is None:
        result = door.attention_varlen(
            op, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options, return_attn_probs
        )
    else:
        lengths = cu_seqlens_k.diff()
        result = attend_pages(
            op, q, k, v, block_table, lengths, cu_seqlens_q, max_seqlen_q, options, return_attn_probs
        )  # fmt: skip
    return _results(result, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with kv [total_k, 2, heads_kv, head_dim].

    >>> import torch
    >>> from flashkernel.flash_attn import flash_attn_varlen_kvpacked_func
    >>> starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> flash_attn_varlen_kvpacked_func(torch.ones(5, 4, 8), torch.ones(5, 2, 2, 8), starts, starts, 3, 3).shape
    torch.Size([5, 4, 8])
    """
    op = "flash_attn_varlen_kvpacked_func"
    if dropout_p:
        door.refuse_dropout(op, dropout_p)
    options = door.options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    k, v = _unpacked(op, "kv", kv, 4, 2)
    result = door.attention_varlen(
        op, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options, return_attn_probs
    )
    return _results(result, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with qkv [total, 3, heads, head_dim].

    >>> import torch
    >>> from flashkernel.flash_attn import flash_attn_varlen_qkvpacked_func
    >>> starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> flash_attn_varlen_qkvpacked_func(torch.ones(5, 3, 2, 8), starts, 3).shape
    torch.Size([5, 2, 8])
    """
    op = "flash_attn_varlen_qkvpacked_func"
    if dropout_p:
        door.refuse_dropout(op, dropout_p)
    options = door.options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    q, k, v = _unpacked(op, "qkv", qkv, 4, 3)
    result = door.attention_varlen(
        op, q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, options, return_attn_probs
    )  # fmt: skip
    return _results(result, return_attn_probs)


def _unpacked(op: str, name: str, packed: torch.Tensor, dims: int, parts: int) -> tuple[torch.Tensor, ...]:
    if packed.dim() != dims or packed.shape[-3] != parts:
        layout = f"[{'batch, seq' if dims == 5 else 'total'}, {parts}, heads, head_dim]"
        raise ArgumentError(f"{op}: {name} has shape {list(packed.shape)}; {layout} is needed")
    parts_of: tuple[torch.Tensor, ...] = packed.unbind(-3)
    return parts_of


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Appends k and v to a cache in place and attends over it; no gradients.

    q: [batch, seq_q, heads_q, head_dim].
    k_cache, v_cache: [rows, seq, heads_kv, *], or with block_table [num_blocks, page_size, heads_kv, *] of any page
       size; read where they lie, whatever their strides (the last dim contiguous).
    k, v: [batch, seq_new, heads_kv, *], appended at cache_seqlens (int, or int32 [batch]; without k, None: all).
    rotary_cos, rotary_sin: [positions, rotary_dim / 2]; k, and q, are turned by them. Without causal or a window, all
       queries stand at position cache_seqlens.
    cache_batch_idx: int32 [batch], the row of each sequence, in block_table where there is one.
    cache_leftpad: int32 [batch], the first key of each that is seen.
    block_table: int32 [batch, max_blocks].
    num_splits: accepted; the kernels choose for themselves.

    Returns out [batch, seq_q, heads_q, head_dim_v], or (out, lse float32 [batch, heads_q, seq_q]). Raises ValueError
    for arguments that don't fit, and on the CPU where new tokens don't fit into the cache; on a GPU, which is not
    waited for, those are not written.

    >>> import torch
    >>> from flashkernel.flash_attn import flash_attn_with_kvcache
    >>> cache, new = torch.zeros(1, 16, 2, 8), torch.ones(1, 1, 2, 8)
    >>> out = flash_attn_with_kvcache(new, cache, cache.clone(), new, new, cache_seqlens=3, causal=True)
    >>> cache[0, :5, 0, 0]
    tensor([0., 0., 0., 1., 0.])
    """
    options = door.options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return with_cache(
        "flash_attn_with_kvcache",
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
        block_table,
        rotary_interleaved,
        options,
        return_softmax_lse,
    )
