"""FlashKernel in torch's registry of flash attention implementations, under the name "flashkernel".

`torch.nn.attention.activate_flash_attention_impl("flashkernel")` (torch 2.11 and later) makes torch's own attention ops
run on FlashKernel, forward and backward: F.scaled_dot_product_attention, nn.MultiheadAttention, `varlen_attn`, nested
tensors, and every model on "sdpa". Called by torch alone. `restore_flash_attention_impl()` gives torch's kernels back.

A function here takes and returns what the aten op of its name does; each runs below autograd. Alignment differs between
them: `_flash_attention_forward` is causal to the bottom right, as flash-attn is; the ops below
scaled_dot_product_attention are to the top left.
"""

from __future__ import annotations

from typing import Any

import torch

import flashkernel as fk

from ._library import dense, like
from .sdpa import mask_option, top_left

__all__ = ["NAME", "activate", "register"]

NAME = "flashkernel"

_WAY_OUT = "call torch.nn.attention.restore_flash_attention_impl() for torch's own kernels"


def _refuse(op: str, dropout_p: float, *tensors: Any, debug: bool = False) -> None:
    if dropout_p:
        raise NotImplementedError(f"flashkernel, as {op}: dropout_p={dropout_p}; 0 is needed; {_WAY_OUT}")
    if debug:
        raise NotImplementedError(f"flashkernel, as {op}: return_debug_mask=True; the weights are never written")
    for tensor in tensors:
        if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise NotImplementedError(
                f"flashkernel, as {op}: {tensor.dtype}; float32, float16 or bfloat16 is needed; {_WAY_OUT}"
            )


def _random_state(q: Any) -> tuple[Any, Any, Any]:
    """What the ops return for dropout, which there is none of: seed, offset and an empty debug mask."""
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return seed, torch.zeros((), dtype=torch.uint64, device=q.device), q.new_empty(0)


def _new_out(q: Any, v: Any) -> Any:
    return like(q) if q.shape[-1] == v.shape[-1] else q.new_empty((*q.shape[:-1], v.shape[-1]))


# --- heads first, aligned to the top left: below scaled_dot_product_attention


def _given(mask: Any, q: Any, k: Any) -> dict[str, Any]:
    """torch's mask, or the options that stand for it already."""
    return mask if isinstance(mask, dict) else mask_option(None if mask is None else mask.detach(), q.dtype, k.shape[2])


def _forward(q: Any, k: Any, v: Any, is_causal: bool, scale: Any, mask: Any = None, out: Any = None) -> Any:
    q, k, v = dense(q.detach()), dense(k.detach()), dense(v.detach())
    options = _given(mask, q, k)
    if is_causal:
        k, v, causal = top_left(q.shape[2], k.shape[2], k, v)
        options |= causal
    return fk.attention(q, k, v, scale=scale, return_lse=True, out=_new_out(q, v) if out is None else out, **options)


def _backward(
    grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, is_causal: bool, scale: Any, mask: Any, need_bias: bool
) -> Any:
    grads = tuple(like(x) for x in (q, k, v))
    grad_q, grad_k, grad_v = grads
    options = _given(mask, q, k)
    k_seen, v_seen = k, v
    if is_causal:
        k_seen, v_seen, causal = top_left(q.shape[2], k.shape[2], k, v)
        options |= causal
        unseen = k.shape[2] - k_seen.shape[2]
        if unseen:
            for grad in (grad_k, grad_v):
                grad.narrow(2, k_seen.shape[2], unseen).zero_()
            grad_k, grad_v = grad_k.narrow(2, 0, q.shape[2]), grad_v.narrow(2, 0, q.shape[2])
    result = fk.attention_backward(
        dense(grad_out),
        dense(q),
        dense(k_seen),
        dense(v_seen),
        dense(out),
        lse,
        scale=scale,
        need_bias=need_bias,
        grads=(grad_q, grad_k, grad_v),
        **options,
    )
    return (*grads, result[3] if need_bias else None)


def _sdpa_flash(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    _refuse("_scaled_dot_product_flash_attention", dropout_p, query, debug=return_debug_mask)
    out, lse = _forward(query, key, value, is_causal, scale)
    return out, lse, None, None, query.shape[2], key.shape[2], *_random_state(query)


def _sdpa_flash_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Any,
    philox_offset: Any,
    *,
    scale: float | None = None,
) -> Any:
    _refuse("_scaled_dot_product_flash_attention_backward", dropout_p, query)
    return _backward(grad_out, query, key, value, out, logsumexp, is_causal, scale, None, False)[:3]


def _sdpa_efficient(
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """The op that torch calls for masks, for float32 and before compute capability 8.0."""
    _refuse("_scaled_dot_product_efficient_attention", dropout_p, query)
    if is_causal and attn_bias is not None:
        raise NotImplementedError(
            f"flashkernel, as _scaled_dot_product_efficient_attention: attn_bias beside is_causal=True; {_WAY_OUT}"
        )
    batch, heads, seq_q, _ = query.shape
    out = query.new_empty((batch, seq_q, heads, value.shape[-1])).transpose(1, 2)
    out, lse = _forward(query, key, value, is_causal, scale, attn_bias, out)
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    if not compute_log_sumexp:
        return out, lse.new_empty((batch, heads, 0)), seed, seed.clone()
    padded = lse.new_empty((batch, heads, -(-seq_q // 32) * 32))  # torch expects whole blocks of 32 rows
    padded[..., :seq_q] = lse
    return out, padded, seed, seed.clone()


def _sdpa_efficient_backward(
    grad_out_: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any,
    out: Any,
    logsumexp: Any,
    philox_seed: Any,
    philox_offset: Any,
    dropout_p: float,
    grad_input_mask: Any,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    _refuse("_scaled_dot_product_efficient_attention_backward", dropout_p, query)
    if attn_bias is not None and attn_bias.numel() == 0:
        attn_bias = None
    mask = attn_bias
    need_bias = bool(grad_input_mask[3]) and attn_bias is not None
    if need_bias:
        bias = attn_bias.detach()  # its gradient has all of its entries, also along dims that it was expanded to
        mask = {"bias": bias if bias.stride(-1) == 1 or bias.shape[-1] == 1 else bias.contiguous()}
    lse = logsumexp[..., : query.shape[2]]
    return _backward(grad_out_, query, key, value, out, lse, is_causal, scale, mask, need_bias)


def _sdpa_cpu(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> Any:
    _refuse("_scaled_dot_product_flash_attention_for_cpu", dropout_p, query)
    return _forward(query, key, value, is_causal, scale, attn_mask)


def _sdpa_cpu_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> Any:
    _refuse("_scaled_dot_product_flash_attention_for_cpu_backward", dropout_p, query)
    return _backward(grad_out, query, key, value, out, logsumexp, is_causal, scale, attn_mask, False)[:3]


# --- seq first, aligned to the bottom right: varlen_attn and nested tensors


def _options(is_causal: bool, left: int | None, right: int | None, scale: float | None) -> dict[str, Any]:
    sides = tuple(-1 if side is None or side < 0 else side for side in (left, right))
    return {"causal": is_causal, "window": None if sides == (-1, -1) else sides, "scale": scale}


def _flash_forward(
    query: Any,
    key: Any,
    value: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Any = None,
    alibi_slopes: Any = None,
    block_table: Any = None,
    num_splits: int | None = None,
) -> Any:
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    lse = _flash_forward_into(
        out,
        query,
        key,
        value,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        return_debug_mask,
        scale=scale,
        window_size_left=window_size_left,
        window_size_right=window_size_right,
        seqused_k=seqused_k,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
    )
    return out, lse, *_random_state(query)


def _flash_forward_into(
    out: Any,
    query: Any,
    key: Any,
    value: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Any = None,
    alibi_slopes: Any = None,
    block_table: Any = None,
    num_splits: int | None = None,
) -> Any:
    """Writes out and returns lse: [batch, heads, seq_q], or [heads, total_q] with cum_seq_q."""
    _refuse("_flash_attention_forward", dropout_p, query, debug=return_debug_mask)
    q, k, v = dense(query.detach()), dense(key.detach()), dense(value.detach())
    options = _options(is_causal, window_size_left, window_size_right, scale)
    options |= {"alibi_slopes": alibi_slopes, "return_lse": True}
    if block_table is None and seqused_k is None:
        if cum_seq_q is None:
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            return fk.attention(*heads_first, out=out.transpose(1, 2), **options)[1]
        return fk.attention_varlen(q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, out=out, **options)[1]
    if block_table is None and cum_seq_k is not None:  # the keys of a sequence are pages of one token
        token = torch.arange(max(max_k, 1), device=q.device)[None] + cum_seq_k[:-1].long()[:, None]
        block_table = token.clamp_(max=max(k.shape[0] - 1, 0)).to(torch.int32)
        k, v = k[:, None], v[:, None]
    elif block_table is None:  # [batch, seq, heads, head_dim], of which seqused_k count: one page each
        block_table = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)[:, None]
    lengths = cum_seq_k.diff() if seqused_k is None else seqused_k
    if cum_seq_q is None:
        return fk.attention_paged(
            q.transpose(1, 2), k, v, block_table, lengths, out=out.transpose(1, 2), **options
        )[1]  # fmt: skip
    return fk.attention_paged(
        q, k, v, block_table, lengths, cu_seqlens_q=cum_seq_q, max_seqlen_q=max_q, out=out, **options
    )[1]  # fmt: skip


def _flash_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Any,
    unused: Any,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:
    _refuse("_flash_attention_backward", dropout_p, query)
    options = _options(is_causal, window_size_left, window_size_right, scale)
    grad, q, k, v, o = (dense(x) for x in (grad_out, query, key, value, out))
    if cum_seq_q is not None:
        return fk.attention_varlen_backward(
            grad, q, k, v, o, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, **options
        )[:3]  # fmt: skip
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    grad, q, k, v, o = (x.transpose(1, 2) for x in (grad, q, k, v, o))
    grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in grads)
    fk.attention_backward(grad, q, k, v, o, logsumexp, grads=(grad_q, grad_k, grad_v), **options)
    return grads


# --- the registry

_SAME_ON_BOTH = {
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_into,
    "_flash_attention_backward": _flash_backward,
}
OPS: dict[str, dict[str, Any]] = {
    "CPU": {
        **_SAME_ON_BOTH,
        "_scaled_dot_product_flash_attention_for_cpu": _sdpa_cpu,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _sdpa_cpu_backward,
    },
    "CUDA": {
        **_SAME_ON_BOTH,
        "_scaled_dot_product_flash_attention": _sdpa_flash,
        "_scaled_dot_product_flash_attention_backward": _sdpa_flash_backward,
        "_scaled_dot_product_efficient_attention": _sdpa_efficient,
        "_scaled_dot_product_efficient_attention_backward": _sdpa_efficient_backward,
    },
}
"""What is put in place of torch's kernels, by dispatch key."""


class _Handle:
    """What torch's registry keeps while the implementation is active."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library = library

    def remove(self) -> None:
        self._library._destroy()


def activate() -> _Handle:
    """Puts `OPS` in place. Called by torch's activate_flash_attention_impl; `remove()` of the result undoes it."""
    library = torch.library.Library("aten", "IMPL")
    for key, ops in OPS.items():
        for name, function in ops.items():
            if hasattr(torch.ops.aten, name):  # releases differ in them
                library.impl(name, function, key)
    return _Handle(library)


def register() -> None:
    """Makes the name known to torch; nothing changes before it is activated. No effect before torch 2.11."""
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        return
    register_flash_attention_impl(NAME, register_fn=activate)
