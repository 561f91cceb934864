"""Attention in flash-attn's layouts, over `flashkernel.torch`: dense [batch, seq, heads, head_dim] and variable-length
[total, heads, head_dim].

Called by the functions that carry the package's names. Nothing is copied: tensors go on as strided views, and what the
package's names mean is translated here, once.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

import flashkernel as fk
import flashkernel.torch as fkt
from flashkernel import _C

from ..torch._library import autocast, dense, direct, like
from ._errors import as_both

__all__ = [
    "DENSE",
    "VARLEN",
    "attention",
    "attention_fp8",
    "attention_varlen",
    "attention_varlen_used",
    "options",
    "plain",
    "refuse_dropout",
    "refuse_fp8",
    "shapes",
    "sides",
    "varlen_used_backward",
]


def sides(window_size: Any) -> tuple[int, int] | None:
    """The window as the library takes it: every number below 0 means all tokens of that side."""
    left, right = window_size
    return None if left < 0 and right < 0 else (max(int(left), -1), max(int(right), -1))


def options(
    softmax_scale: float | None, causal: bool, window_size: Any, softcap: float, alibi_slopes: Any, sinks: Any = None
) -> dict[str, Any]:
    """The options that every attention op of the library has."""
    return {
        "scale": softmax_scale,
        "causal": causal,
        "window": sides(window_size),
        "softcap": softcap if softcap > 0 else 0.0,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
    }


def refuse_dropout(op: str, dropout_p: float) -> NoReturn:
    raise NotImplementedError(f"{op}: dropout_p={dropout_p}; 0 is needed: attention dropout is not implemented")


def refuse_fp8(op: str, q: torch.Tensor, **scales: Any) -> None:
    needed = "float8 over a cache is not implemented, float32, float16 or bfloat16 is needed"
    for name, scale in scales.items():
        if scale is not None:
            raise NotImplementedError(f"{op}: {name} is given; {needed}")
    if q.dtype.itemsize == 1:
        raise NotImplementedError(f"{op}: q is {q.dtype}; {needed}")


def shapes(op: str, error: Exception, layout: str, **tensors: Any) -> Exception:
    """The library's error with the shapes that the caller passed, in the caller's layout."""
    given = ", ".join(f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items())
    return as_both(error, f"{op}: {given}; {layout} is needed: {error}")


_tokens_first: Any = vars(_C)["_attention_tokens_first"]  # no parts of the package's interface
_varlen_used: Any = vars(_C)["_attention_varlen_used"]
_used_backward: Any = vars(_C)["_attention_varlen_used_backward"]

DENSE = "[batch, seq, heads, head_dim]"
VARLEN = "[total, heads, head_dim]"


def attention(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    alibi_slopes: Any,
    sinks: Any,
    return_lse: bool,
) -> Any:
    """out [batch, seq_q, heads, head_dim_v], or (out, lse [batch, heads, seq_q]). An error is `op`'s."""
    result: Any
    try:
        if direct(q, k, v, alibi_slopes, sinks) and not torch._C._is_any_autocast_enabled():
            left, right = window_size
            result = _tokens_first(
                q, k, v, softmax_scale, causal, left, right, softcap, alibi_slopes, sinks, return_lse
            )  # fmt: skip
            if result is not None:
                return result
        if _recordable(q, k, v, alibi_slopes, sinks):
            left, right = window_size
            result = _Recorded.apply(op, q, k, v, alibi_slopes, sinks, softmax_scale, causal, left, right, softcap)
            return result if return_lse else result[0]
        given = options(softmax_scale, causal, window_size, softcap, alibi_slopes, sinks)
        if torch.is_autocast_enabled(q.device.type):
            q, k, v = autocast(q, k, v)
        if direct(q, k, v, alibi_slopes, sinks):
            out = q.new_empty((*q.shape[:-1], v.shape[-1]))
            result = fk.attention(
                _heads_first(q),
                _heads_first(k),
                _heads_first(v),
                **given,
                return_lse=return_lse,
                out=out.transpose(1, 2),
            )
            return (out, result[1]) if return_lse else out
        result = fkt.attention(_heads_first(q), _heads_first(k), _heads_first(v), **given, return_lse=return_lse)
    except (ValueError, IndexError) as error:
        raise shapes(op, error, DENSE, q=q, k=k, v=v) from None
    return (result[0].transpose(1, 2), result[1]) if return_lse else result.transpose(1, 2)


def plain(*tensors: Any) -> bool:
    """Whether a call is computed as it stands, and at most its gradient is recorded: nothing traces or transforms it,
    and no autocast is on.
    """
    if torch._C._is_any_autocast_enabled():
        return False
    with torch.no_grad():
        return direct(*tensors)


def _recordable(q: Any, k: Any, v: Any, alibi_slopes: Any, sinks: Any) -> bool:
    if not torch.is_grad_enabled() or not plain(q, k, v, alibi_slopes, sinks):
        return False
    if alibi_slopes is not None and alibi_slopes.requires_grad:  # which is refused
        return False
    return all(x.dim() == 4 and (x.stride(3) == 1 or x.shape[3] == 1) for x in (q, k, v))


class _Final(torch.autograd.Function):
    """Gradients as they are; a gradient of them is refused."""

    @staticmethod
    def forward(ctx: Any, op: str, grads: Any, *recorded: Any) -> Any:
        ctx.op = op
        return tuple(grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise NotImplementedError(
            f"{ctx.op}: second derivatives are not implemented; call backward without create_graph=True"
        )


def _final(op: str, grads: list[Any], recorded: Any) -> list[Any]:
    if not torch.is_grad_enabled():
        return grads
    results = iter(_Final.apply(op, [grad for grad in grads if grad is not None], *recorded))
    return [None if grad is None else next(results) for grad in grads]


class _Recorded(torch.autograd.Function):
    """Attention of [batch, seq, heads, head_dim] as one step of autograd: no views of its operands are recorded."""

    @staticmethod
    def forward(ctx: Any, op: str, q: Any, k: Any, v: Any, alibi_slopes: Any, sinks: Any, *given: Any) -> Any:
        out, lse = _tokens_first(q, k, v, *given, alibi_slopes, sinks, True)
        ctx.op, ctx.given = op, given
        ctx.save_for_backward(q, k, v, out, lse, alibi_slopes, sinks)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_out, grad_lse = grads
        if grad_out is None and grad_lse is None:
            return (None,) * 11
        q, k, v, out, lse, alibi_slopes, sinks = ctx.saved_tensors
        scale, causal, left, right, softcap = ctx.given
        need_sinks = ctx.needs_input_grad[5]
        with torch.no_grad():
            grad_out = torch.zeros_like(out) if grad_out is None else dense(grad_out)
            tensors = [x.transpose(1, 2) for x in (grad_out, q, k, v, out)]
            found: list[Any] = [like(q), like(k), like(v)]
            chosen = options(scale, causal, (left, right), softcap, alibi_slopes, sinks)
            of_q, of_k, of_v = (x.transpose(1, 2) for x in found)
            backward: Any = fk.attention_backward  # its overloads are chosen by literals
            all_of_them = backward(
                *tensors, lse, grad_lse=dense(grad_lse), **chosen, need_sinks=need_sinks, grads=(of_q, of_k, of_v)
            )
            found.append(all_of_them[-1] if need_sinks else None)
        *of, of_sinks = _final(ctx.op, found, (q, k, v, sinks, *grads))
        return None, *of, None, of_sinks, *(None,) * 5


def _heads_first(x: Any) -> Any:
    """A view; a copy only where the last dim is strided, which no kernel reads (flash-attn copies there too)."""
    return dense(x).transpose(1, 2)


def attention_fp8(
    op: str,
    tensors: Any,
    scales: Any,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    sinks: Any,
    return_lse: bool,
    lengths: Any = None,
) -> Any:
    """out in bfloat16, or (out, lse), of q, k and v of 8 bits; layouts and errors as those of the other functions.

    tensors: q, k, v. scales: theirs, [batch, heads_kv] or None. lengths: of sequences side by side: cu_seqlens_q and
       _k, max_seqlen_q and _k, seqused_q and _k.
    """
    chosen: dict[str, Any] = options(softmax_scale, causal, window_size, softcap, None, sinks)
    del chosen["alibi_slopes"]
    if lengths is not None:
        names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k"
        chosen.update(zip(names, lengths, strict=True))
    place = dense if lengths is not None else _heads_first
    try:
        out, lse = fkt.attention_fp8(*map(place, tensors), *scales, return_lse=True, **chosen)
    except (ValueError, IndexError) as error:
        q, k, v = tensors
        raise shapes(op, error, DENSE if lengths is None else VARLEN, q=q, k=k, v=v) from None
    out = out if lengths is not None else out.transpose(1, 2)
    return (out, lse) if return_lse else out


class _Used(torch.autograd.Function):
    """Attention of the tokens in use of [total, heads, head_dim]; 0 where they end, and LSE -inf."""

    @staticmethod
    def forward(ctx: Any, op: str, q: Any, k: Any, v: Any, sinks: Any, lengths: Any, given: Any) -> Any:
        q, k, v = dense(q), dense(k), dense(v)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=torch.float32)
        _varlen_used(q, k, v, *lengths, *given, sinks, out, lse)
        starts_q, starts_k, *longest, used_q, used_k = lengths
        ctx.op, ctx.longest, ctx.given = op, longest, given
        ctx.save_for_backward(q, k, v, sinks, out, lse, starts_q, starts_k, used_q, used_k)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_out, grad_lse = grads
        if grad_out is None and grad_lse is None:
            return (None,) * 7
        q, k, v, sinks, out, lse, starts_q, starts_k, used_q, used_k = ctx.saved_tensors
        with torch.no_grad():
            grad_out = torch.zeros_like(out) if grad_out is None else dense(grad_out)
            found: list[Any] = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
            found.append(torch.empty_like(sinks) if ctx.needs_input_grad[4] else None)
            lengths = starts_q, starts_k, *ctx.longest, used_q, used_k
            tensors = grad_out, dense(grad_lse), q, k, v, out, lse
            varlen_used_backward(tensors, lengths, ctx.given, found, sinks)
        return None, *_final(ctx.op, found, (q, k, v, sinks, *grads)), None, None


def varlen_used_backward(tensors: Any, lengths: Any, given: Any, grads: Any, sinks: Any = None) -> None:
    """Writes the gradients of q, k, v and sinks; of tokens that are not in use, 0.

    tensors: those of out and of lse or None, q, k, v, out, lse. lengths, given: as for `attention_varlen_used`. grads:
       of q, k, v, and of sinks or None.
    """
    for grad in grads:
        if grad is not None:
            grad.zero_()
    _used_backward(*tensors, *lengths, *given, sinks, *grads)


def attention_varlen_used(op: str, tensors: Any, lengths: Any, given: Any, return_lse: bool) -> Any:
    """out [total_q, heads, head_dim_v], or (out, lse [heads, total_q]), of the tokens in use; an error is `op`'s.

    tensors: q, k, v, sinks. lengths: cu_seqlens_q and _k, max_seqlen_q and _k, seqused_q and _k. given: scale, causal,
       both sides of the window, softcap.
    """
    try:
        result = _Used.apply(op, *tensors, lengths, given)
    except (ValueError, IndexError) as error:
        raise shapes(op, error, VARLEN, q=tensors[0], k=tensors[1], v=tensors[2]) from None
    return result if return_lse else result[0]


def attention_varlen(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    options: dict[str, Any],
    return_lse: bool,
) -> Any:
    """out [total_q, heads, head_dim_v], or (out, lse [heads, total_q]). An error is `op`'s."""
    try:
        return fkt.attention_varlen(
            dense(q),
            dense(k),
            dense(v),
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            **options,
            return_lse=return_lse,
        )
    except (ValueError, IndexError) as error:
        raise shapes(op, error, VARLEN, q=q, k=k, v=v) from None
