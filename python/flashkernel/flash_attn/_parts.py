"""flash-attn 2's functions below autograd: what it keeps private and what libraries that spread one sequence over
several GPUs call, a part of the keys at a time (ring-flash-attention, TransformerEngine, yunchang, DeepSpeed's FPDT).

Names, order and defaults are those of release 2.8. Gradients go into dq, dk and dv, which are views of any strides
but in the last dim. Plain functions, since callers read their arguments by `inspect`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

import flashkernel as fk

from ..torch._library import dense, like
from . import _attention as door
from ._cache import attend_pages
from ._errors import ArgumentError

__all__ = ["PRIVATE", "refuse_probabilities", "write_gradients"]

PRIVATE = (
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
)
"""What `install()` shows of flash_attn.flash_attn_interface beside its public names."""

_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def refuse_probabilities(op: str) -> NoReturn:
    """The package's own words are about dropout: it gives probabilities beside it alone."""
    raise ArgumentError(f"{op}: return_softmax=True; False is needed: probabilities are kept for dropout alone")


def _parts(result: Any) -> _Parts:
    """(out, lse) with the package's other two: probabilities, empty, and a state of random numbers, never written."""
    out, lse = result
    return out, lse, out.new_empty(0), torch.empty(2, dtype=torch.int64, device=out.device)


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> _Parts:
    """(out [batch, seq_q, heads_q, head_dim_v], lse float32 [batch, heads_q, seq_q], an empty tensor, int64 [2]).

    q, k, v and their options as those of `flash_attn_func`. Where q, k or v require a gradient, so do out and lse,
    which the package's don't. A row that sees no key has LSE -inf. Raises as `flash_attn_func` does.
    """
    op = "_flash_attn_forward"
    if dropout_p:
        door.refuse_dropout(op, dropout_p)
    if return_softmax:
        refuse_probabilities(op)
    window = window_size_left, window_size_right
    return _parts(door.attention(op, q, k, v, softmax_scale, causal, window, softcap, alibi_slopes, None, True))


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> _Parts:
    """(out [total_q, heads_q, head_dim_v], lse float32 [heads_q, total_q], an empty tensor, int64 [2]).

    Arguments as those of `flash_attn_varlen_func`; seqused_k: int32 [batch], how many keys of each sequence count.
    zero_tensors and num_splits are accepted: there is nothing that they would change.
    """
    op = "_flash_attn_varlen_forward"
    if dropout_p:
        door.refuse_dropout(op, dropout_p)
    if return_softmax:
        refuse_probabilities(op)
    if leftpad_k is not None:
        raise NotImplementedError(f"{op}: leftpad_k is given; None is needed: padding on the left is not implemented")
    window = window_size_left, window_size_right
    options = door.options(softmax_scale, causal, window, softcap, alibi_slopes)
    if block_table is not None:
        lengths = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        return _parts(attend_pages(op, q, k, v, block_table, lengths, cu_seqlens_q, max_seqlen_q, options, True))
    bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if seqused_k is None:
        return _parts(door.attention_varlen(op, q, k, v, *bounds, options, True))
    if alibi_slopes is not None:
        raise NotImplementedError(f"{op}: alibi_slopes with seqused_k; one of them must be None")
    given = softmax_scale, causal, *window, softcap
    return _parts(door.attention_varlen_used(op, (q, k, v, None), (*bounds, None, seqused_k), given, True))


@torch.compiler.disable
@torch.no_grad()
def write_gradients(
    op: str,
    tensors: tuple[Any, ...],
    grads: tuple[Any, ...],
    softmax_scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: Any,
    lengths: tuple[Any, ...] | None = None,
) -> torch.Tensor:
    """Writes the gradients of q, k and v; an empty tensor in place of the package's softmax_d. An error is `op`'s.

    tensors: dout, q, k, v, out and lse; lse may be that over more keys than k's, as a ring's is. grads: dq, dk, dv;
       None: a new tensor, which nobody gets. lengths: of sequences side by side, cu_seqlens_q and _k, max_seqlen_q and
       _k, and the tokens in use, seqused_q and _k, or None.
    """
    dout, q, k, v, out, lse = (x.detach() for x in tensors)
    dout, q, k, v, out, lse = dense(dout), dense(q), dense(k), dense(v), dense(out), lse.contiguous()
    found = [like(x) if given is None else given.detach() for given, x in zip(grads, (q, k, v), strict=True)]
    options = door.options(softmax_scale, causal, window, softcap, alibi_slopes)
    backward: Any  # its overloads are chosen by literals
    try:
        if lengths is None:
            backward, order = fk.attention_backward, (dout, q, k, v, out)
            heads_first = [x.transpose(1, 2) for x in (*order, *found)]
            backward(*heads_first[:5], lse, grads=tuple(heads_first[5:]), **options)
        elif lengths[4:] == (None, None):
            backward = fk.attention_varlen_backward
            backward(dout, q, k, v, out, lse, *lengths[:4], grads=tuple(found), **options)
        else:
            door.varlen_used_backward(
                (dout, None, q, k, v, out, lse), lengths, (softmax_scale, causal, *window, softcap), (*found, None)
            )
    except (ValueError, IndexError) as error:
        layout = door.DENSE if lengths is None else door.VARLEN
        dq, dk, dv = found
        raise door.shapes(op, error, layout, dout=dout, q=q, k=k, v=v, out=out, dq=dq, dk=dk, dv=dv) from None
    return lse.new_empty(0)


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes the gradients of q, k and v into dq, dk and dv, which have their shapes and dtypes.

    softmax_lse: float32 [batch, heads_q, seq_q]; over more keys than k's it gives k's share of the gradients. Returns
    an empty tensor, in place of a scratch of the package's. No gradient of the gradients is recorded.
    """
    op = "_flash_attn_backward"
    if dropout_p:
        door.refuse_dropout(op, dropout_p)
    window = window_size_left, window_size_right
    tensors = dout, q, k, v, out, softmax_lse
    return write_gradients(op, tensors, (dq, dk, dv), softmax_scale, causal, window, softcap, alibi_slopes)


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """`_flash_attn_backward` of sequences side by side; softmax_lse float32 [heads_q, total_q]."""
    op = "_flash_attn_varlen_backward"
    if dropout_p:
        door.refuse_dropout(op, dropout_p)
    window = window_size_left, window_size_right
    tensors, lengths = (dout, q, k, v, out, softmax_lse), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return write_gradients(
        op, tensors, (dq, dk, dv), softmax_scale, causal, window, softcap, alibi_slopes, (*lengths, None, None)
    )


# The package's own calls go through these, torch's ops where torch has them; here there is one function.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
