"""Attention of 8-bit floating point queries, keys and values, for torch: inference alone."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, overload

import torch

import flashkernel as fk

from ._library import define, direct, one_number, refuse_gradient
from .attention import attention, attention_varlen

__all__ = ["attention_fp8"]

_Scale: TypeAlias = torch.Tensor | float | None
_NAMES = ("q_scale", "k_scale", "v_scale", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "causal")


def _kernel(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    *given, left, right, softcap, scale, slopes, alibi, sinks, used_q, used_k, out_dtype = rest
    options = dict(zip(_NAMES, given, strict=True))
    out, lse = fk.attention_fp8(
        q,
        k,
        v,
        **options,
        window=(left, right),
        softcap=softcap,
        scale=scale,
        alibi_slopes=slopes,
        alibi=alibi,
        sinks=sinks,
        seqused_q=used_q,
        seqused_k=used_k,
        return_lse=True,
        out=q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=out_dtype),
    )
    starts = options["cu_seqlens_q"]
    if used_q is not None and starts is not None:  # the op leaves the LSE of the other rows as it was
        token = torch.arange(q.shape[0], device=q.device)
        sequence = torch.searchsorted(starts[1:].long(), token, right=True).clamp_(max=used_q.shape[0] - 1)
        lse.masked_fill_(token - starts.long()[sequence] >= used_q[sequence], float("-inf"))
    return out, lse


def _fake(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    rows = q.shape[:-1] if rest[3] is None else (q.shape[1], q.shape[0])
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=rest[-1]), q.new_empty(rows, dtype=torch.float32)


_NO_GRADIENT = (
    "attention_fp8: an argument requires a gradient, and attention of 8 bits has none; call it under "
    "torch.no_grad(), or call attention"
)
_float8 = define(
    "attention_fp8(Tensor q, Tensor k, Tensor v, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k, bool causal, "
    "SymInt left, SymInt right, float softcap, float? scale, Tensor? alibi_slopes, str alibi, Tensor? sinks, "
    "Tensor? seqused_q, Tensor? seqused_k, ScalarType out_dtype) -> (Tensor, Tensor)",
    _kernel,
    _fake,
    backward=refuse_gradient(_NO_GRADIENT),
)


def _tensor(scale: _Scale, like: torch.Tensor) -> torch.Tensor | None:
    if scale is None or isinstance(scale, torch.Tensor):
        return scale
    return one_number(scale, like)


def _numbers(x: torch.Tensor, scale: _Scale, heads_kv: int, starts: torch.Tensor | None, dtype: Any) -> torch.Tensor:
    """Elements times scales, in 16 bits."""
    numbers = x.to(dtype)
    if scale is None:
        return numbers
    if not isinstance(scale, torch.Tensor) or scale.numel() == 1:
        return numbers * (scale.reshape(()) if isinstance(scale, torch.Tensor) else scale)
    heads = x.shape[1]
    batch = x.shape[0] if starts is None else starts.shape[0] - 1
    factors = scale.expand(batch, heads_kv).repeat_interleave(heads // heads_kv, 1)
    if starts is None:
        return (numbers * factors[:, :, None, None]).to(dtype)
    return (numbers * factors.repeat_interleave(starts.diff(), 0, output_size=x.shape[0])[:, :, None]).to(dtype)


@overload
def attention_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: _Scale = None,
    k_scale: _Scale = None,
    v_scale: _Scale = None,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    alibi: str = "distance",
    sinks: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor: ...
@overload
def attention_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: _Scale = None,
    k_scale: _Scale = None,
    v_scale: _Scale = None,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    alibi: str = "distance",
    sinks: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    return_lse: Literal[True],
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def attention_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: _Scale = None,
    k_scale: _Scale = None,
    v_scale: _Scale = None,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    alibi: str = "distance",
    sinks: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flashkernel.attention_fp8` for inference; works under torch.compile.

    q: [batch, heads_q, seq_q, head_dim]; k, v: [batch, heads_kv, seq_k, *]; float8_e4m3fn, or its bytes. With
       cu_seqlens_q and cu_seqlens_k: [total_q, heads_q, head_dim] and [total_k, heads_kv, *]. Where one of them is
       float8_e5m2, all become 16 bits first, and attention of those runs; seqused_* are not taken then.
    q_scale, k_scale, v_scale: a number, or float32 that broadcasts to [batch, heads_kv]; None: 1.
    max_seqlen_q, max_seqlen_k, causal, window, softcap, scale, alibi_slopes, alibi, sinks, seqused_q, seqused_k: as
       there.
    out_dtype: torch.bfloat16 or torch.float16.

    Returns out, or (out, lse). Rows past seqused_q are 0, and their LSE -inf. Raises NotImplementedError where a
    gradient is needed, ValueError for arguments that don't fit.

    Source: Shah et al., FlashAttention-3 (2024).

    >>> import torch, flashkernel.torch as fkt
    >>> ones = torch.ones(1, 2, 4, 16).to(torch.float8_e4m3fn)
    >>> fkt.attention_fp8(ones, ones, ones, v_scale=0.5)[0, 0, 0, :2]
    tensor([0.5000, 0.5000], dtype=torch.bfloat16)
    """
    tensors = (q, k, v, q_scale, k_scale, v_scale, alibi_slopes, sinks)
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors):
        raise NotImplementedError(_NO_GRADIENT)
    left, right = (-1 if side is None else side for side in window or (None, None))
    scales = q_scale, k_scale, v_scale
    if torch.float8_e5m2 in (q.dtype, k.dtype, v.dtype):
        if seqused_q is not None or seqused_k is not None:
            raise NotImplementedError("attention_fp8: seqused_q or seqused_k is given with float8_e5m2")
        heads_kv = k.shape[1]
        starts = cu_seqlens_q, cu_seqlens_k, cu_seqlens_k
        wide = [_numbers(*each, out_dtype) for each in zip((q, k, v), scales, (heads_kv,) * 3, starts, strict=True)]
        options: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
        options.update(alibi_slopes=alibi_slopes, alibi=alibi, sinks=sinks, return_lse=return_lse)
        if cu_seqlens_q is None or cu_seqlens_k is None:
            result: Any = attention(wide[0], wide[1], wide[2], **options)
        else:
            longest = (q.shape[0] if max_seqlen_q is None else max_seqlen_q,
                       k.shape[0] if max_seqlen_k is None else max_seqlen_k)  # fmt: skip
            result = attention_varlen(wide[0], wide[1], wide[2], cu_seqlens_q, cu_seqlens_k, *longest, **options)
        return result
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    rest = causal, left, right, softcap, scale, alibi_slopes, alibi, sinks, seqused_q, seqused_k, out_dtype
    if direct(*(x for x in tensors if isinstance(x, torch.Tensor))):
        out, lse = _kernel(q, k, v, *scales, *lengths, *rest)
    else:
        out, lse = _float8(q, k, v, *(_tensor(x, q) for x in scales), *lengths, *rest)
    return (out, lse) if return_lse else out
