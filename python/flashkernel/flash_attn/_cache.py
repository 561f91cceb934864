"""Attention over a KV-cache in flash-attn's forms: a cache of its own rows or of pages, with new tokens to append,
rotary tables, lengths, rows picked by index, and padding on the left.

Called by `flash_attn_with_kvcache` of both interfaces and by the variable-length forms with a page table or with
lengths in use. A cache [batch, seq, heads, head_dim] is a pool whose pages hold seq tokens each, so it is read where it
lies. No step waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import flashkernel.torch as fkt
from flashkernel import _C

from ..torch._library import dense, direct
from ._attention import shapes
from ._errors import ArgumentError

__all__ = ["attend_pages", "single_token_pages", "token_places", "with_cache"]


class _WithoutGradient(torch.autograd.Function):
    """Results of attention over a cache: forward as they are, also for a q that requires a gradient."""

    @staticmethod
    def forward(ctx: Any, op: str, out: Any, lse: Any, *recorded: Any) -> Any:
        ctx.op = op
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"{ctx.op}: attention over a cache has no gradients; call it under torch.no_grad()")


def token_places(cu_seqlens: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For tokens side by side: the sequence of each and its index in there, int64 [total]."""
    token = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), token, right=True).clamp_(max=cu_seqlens.shape[0] - 2)
    return sequence, token - cu_seqlens.long()[sequence]


def single_token_pages(cache: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A cache [rows, seq, heads, head_dim] as pages of one token each, and how many of them lie between the starts of
    two rows: a view where the stride of a row is a multiple of that of a token, else a copy.
    """
    rows, seq = cache.shape[:2]
    if seq == 1:  # whose stride says nothing
        return cache, 1
    if rows > 1 and (cache.stride(1) == 0 or cache.stride(0) % cache.stride(1)):
        cache = cache.clone(memory_format=torch.contiguous_format)
    step = cache.stride(0) // cache.stride(1) if rows > 1 else seq
    pages = (rows - 1) * step + seq
    strides = (cache.stride(1), cache.stride(1), cache.stride(2), cache.stride(3))
    return cache.as_strided((pages, 1, *cache.shape[2:]), strides), step


def attend_pages(
    op: str,
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: int | None,
    options: dict[str, Any],
    return_lse: bool,
    appended: tuple[Any, ...] = (),
) -> Any:
    """q [batch, seq_q, heads, head_dim] or, with cu_seqlens_q, [total_q, heads, head_dim]; results in q's layout, lse
    [batch, heads, seq_q] or [heads, total_q]. Where gradients are recorded, of what was `appended` before too, backward
    refuses.
    """
    result: Any
    if torch.is_grad_enabled():
        given = (q, k_pages, v_pages, *options.values(), *appended)
        recorded = [x for x in given if getattr(x, "requires_grad", False)]
        if recorded:
            with torch.no_grad():
                result = attend_pages(
                    op, q, k_pages, v_pages, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, options, True
                )
            out, lse = _WithoutGradient.apply(op, *result, *recorded)
            return (out, lse) if return_lse else out
    try:
        if cu_seqlens_q is not None:
            return fkt.attention_paged(
                dense(q),
                k_pages,
                v_pages,
                block_table,
                seq_lens,
                cu_seqlens_q=cu_seqlens_q,
                max_seqlen_q=max_seqlen_q,
                **options,
                return_lse=return_lse,
            )
        result = fkt.attention_paged(
            dense(q).transpose(1, 2), k_pages, v_pages, block_table, seq_lens, **options, return_lse=return_lse
        )
    except (ValueError, IndexError) as error:
        raise shapes(op, error, "flash-attn's layout of a cache", q=q, k_cache=k_pages, v_cache=v_pages) from None
    return (result[0].transpose(1, 2), result[1]) if return_lse else result.transpose(1, 2)


class _New(NamedTuple):
    """Tokens to append, and what turns them."""

    k: torch.Tensor | None
    v: torch.Tensor | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    interleaved: bool
    cu_seqlens: torch.Tensor | None
    positions: torch.Tensor | None


class _Cache(NamedTuple):
    k: torch.Tensor
    v: torch.Tensor
    seqlens: int | torch.Tensor | None
    rows: torch.Tensor | None
    leftpad: torch.Tensor | None
    block_table: torch.Tensor | None


_append_places: Any = vars(_C)["_kv_append_places"]  # no parts of the package's interface
_paged_tokens_first: Any = vars(_C)["_attention_paged_tokens_first"]
_own_rows: dict[tuple[torch.device, int], torch.Tensor] = {}


def _rows_in_order(batch: int, device: torch.device) -> torch.Tensor:
    """The page table [batch, 1] of a cache whose row b is sequence b's: made once, and never written again."""
    table = _own_rows.get((device, batch))
    if table is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.arange(batch, dtype=torch.int32, device=device)[:, None]  # memory of that graph
        # By way of the host: the copy is there when it returns, for every stream.
        table = _own_rows[device, batch] = torch.arange(batch, dtype=torch.int32)[:, None].to(device)
    return table


def _table_and_lengths(
    q: torch.Tensor, cache: _Cache, cu_seqlens_q: torch.Tensor | None, traced: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages of each sequence, int32 [batch, pages], and the tokens that it has before any are appended."""
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    rows, device = cache.rows, cache.k.device
    if cache.block_table is not None:
        table = cache.block_table if rows is None else cache.block_table[rows.long()]
    elif rows is not None:
        table = (rows if rows.dtype == torch.int32 else rows.to(torch.int32))[:, None]
    elif traced:
        table = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    else:
        table = _rows_in_order(batch, device)
    if isinstance(cache.seqlens, torch.Tensor):
        return table, cache.seqlens
    length = table.shape[1] * cache.k.shape[1] if cache.seqlens is None else cache.seqlens
    return table, torch.full((batch,), length, dtype=torch.int32, device=device)


def _turns_with_k(q: torch.Tensor, new: _New, cu_seqlens_q: torch.Tensor | None, moves: bool) -> bool:
    """Whether the call that appends k turns q as well: it has k's tokens, and each stands where k's does."""
    k = new.k
    if k is None or new.cos is None or cu_seqlens_q is not new.cu_seqlens or q.dtype != k.dtype:
        return False
    same = q.shape[:-2] == k.shape[:-2] and (moves or (cu_seqlens_q is None and q.shape[1] == 1))
    return same and not (torch.is_grad_enabled() and q.requires_grad)


def _turned(
    q: torch.Tensor,
    new: _New,
    lengths: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    moves: bool,
) -> torch.Tensor:
    """q turned by itself. Without a mask that moves with the query, all of a call stand at the first one's position."""
    sequence, index = _places(q, cu_seqlens_q)
    start = lengths if new.positions is None else new.positions
    position = start.long()[sequence] + (index if moves else 0)
    return _rotated(q, dense(new.cos), dense(new.sin), position, new.interleaved)


def _in_kernels(
    op: str,
    q: torch.Tensor,
    cache: _Cache,
    table: torch.Tensor,
    lengths: torch.Tensor,
    new: _New,
    options: dict[str, Any],
    return_lse: bool,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int | None,
) -> Any:
    """`with_cache` by one call that appends and one that attends; None where an array has to be copied first."""
    k, v = new.k, new.v
    if cache.k.dim() != 4 or cache.k.numel() == 0 or (k is not None and k.numel() == 0) or q.numel() == 0:
        return None
    left, right = options["window"] or (-1, -1)
    try:
        if k is not None:
            moves = _moves(options)
            appended = _append_places(
                k,
                v,
                cache.k,
                cache.v,
                table,
                lengths,
                new.cu_seqlens,
                new.cos,
                new.sin,
                new.positions,
                new.interleaved,
                q if _turns_with_k(q, new, cu_seqlens_q, moves) else None,
            )
            if appended is None:
                return None
            after, turned = appended
            if turned is not None:
                q = turned
            elif new.cos is not None:
                q = _turned(q, new, lengths, cu_seqlens_q, moves)
            lengths = after
        return _paged_tokens_first(
            q,
            cache.k,
            cache.v,
            table,
            lengths,
            cache.leftpad,
            cu_seqlens_q,
            q.shape[0] if max_seqlen_q is None else max_seqlen_q,
            options["scale"],
            options["causal"],
            left,
            right,
            options["softcap"],
            options["alibi_slopes"],
            options["sinks"],
            return_lse,
        )
    except (ValueError, IndexError) as error:
        raise shapes(op, error, "flash-attn's layout of a cache", q=q, k_cache=cache.k, v_cache=cache.v) from None


def _moves(options: dict[str, Any]) -> bool:
    """Whether the mask moves with the query."""
    return options["causal"] or options["window"] is not None


def with_cache(
    op: str,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    cache_seqlens: int | torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    block_table: torch.Tensor | None,
    rotary_interleaved: bool,
    options: dict[str, Any],
    return_lse: bool,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
) -> Any:
    """Appends k and v, rotated with q where there are tables, and attends over the cache."""
    if (k is None) != (v is None):
        raise ArgumentError(f"{op}: {'v' if v is None else 'k'} is missing; new keys and values come together")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ArgumentError(f"{op}: rotary_{'sin' if rotary_sin is None else 'cos'} is missing; both tables are needed")
    if rotary_cos is not None and k is None:
        raise ArgumentError(f"{op}: rotary tables without k and v; they are for the tokens that are appended")
    if k is not None and cache_seqlens is None:
        raise ArgumentError(f"{op}: k and v without cache_seqlens, which says where they are appended")
    if k is not None and torch.is_grad_enabled() and (k_cache.requires_grad or v_cache.requires_grad):
        raise NotImplementedError(
            f"{op}: a cache that requires a gradient is written to; call it under torch.no_grad()"
        )
    plain = direct(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, options["alibi_slopes"], options["sinks"])
    new = _New(k, v, rotary_cos, rotary_sin, rotary_interleaved, cu_seqlens_k_new, rotary_seqlens)
    cache = _Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    table, lengths = _table_and_lengths(q, cache, cu_seqlens_q, traced=not plain)
    if plain:
        result = _in_kernels(op, q, cache, table, lengths, new, options, return_lse, cu_seqlens_q, max_seqlen_q)
        if result is not None:
            return result
    seq_lens = lengths
    if k is not None and v is not None:
        sequence, index = _places(k, cu_seqlens_k_new)
        at = lengths.long()[sequence] + index
        rope: dict[str, Any] | None = None
        if rotary_cos is not None and rotary_sin is not None:
            start = lengths if rotary_seqlens is None else rotary_seqlens
            rope = {"positions": start.long()[sequence] + index, "interleaved": rotary_interleaved}
            rope |= {"cos": dense(rotary_cos), "sin": dense(rotary_sin)}
            if _turns_with_k(q, new, cu_seqlens_q, _moves(options)):
                rope["q"] = dense(q.reshape(-1, *q.shape[-2:]))
            else:
                q = _turned(q, new, lengths, cu_seqlens_q, _moves(options))
        with torch.no_grad():
            turned = _append(op, k, v, k_cache, v_cache, table, sequence, at, table.shape[1] * k_cache.shape[1], rope)
        if turned is not None:
            q = turned.view(q.shape)
        if cu_seqlens_k_new is None:
            seq_lens = lengths + k.shape[1]
        else:
            seq_lens = lengths + cu_seqlens_k_new.diff().to(lengths.dtype)
    k_pages, v_pages = k_cache, v_cache
    if cache_leftpad is not None:
        k_pages, v_pages, table = _after_padding(k_cache, v_cache, table, cache_leftpad)
        seq_lens = (seq_lens - cache_leftpad).clamp(min=0)
    appended = (k, v, rotary_cos, rotary_sin)
    return attend_pages(
        op, q, k_pages, v_pages, table, seq_lens, cu_seqlens_q, max_seqlen_q, options, return_lse, appended
    )  # fmt: skip


def _places(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence and index of every token of x [batch, seq, ...] or, with cu_seqlens, [total, ...]; int64."""
    if cu_seqlens is not None:
        return token_places(cu_seqlens, x.shape[0])
    batch, seq = x.shape[:2]
    token = torch.arange(batch * seq, device=x.device)
    return token // max(seq, 1), token % max(seq, 1)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> Any:
    """x [..., heads, head_dim] with the token of each position rotated, in the same order in memory."""
    tokens = x.reshape(-1, *x.shape[-2:]).transpose(0, 1)[None]  # [1, heads, tokens, head_dim]
    out = fkt.rope_table(dense(tokens), None, cos, sin, positions, interleaved=interleaved)
    return out[0].transpose(0, 1).reshape(x.shape)


def _append(
    op: str,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    sequence: torch.Tensor,
    at: torch.Tensor,
    capacity: int,
    rope: dict[str, Any] | None,
) -> Any:
    """Writes the tokens of k and v to position `at` [tokens] of sequence `sequence` [tokens], k turned by `rope`;
    returns its q, turned, where it has one.
    """
    fits = at < capacity
    if at.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(fits.all()):
        raise ArgumentError(f"{op}: a token is appended at position {int(at.max())} of a cache of {capacity} tokens")
    page_size = k_cache.shape[1]
    inside = at.clamp(max=capacity - 1)
    slots = table[sequence, inside // page_size].long() * page_size + inside % page_size
    slots = torch.where(fits, slots, -1)  # on a GPU, what does not fit is not written
    tokens: Any = dense(k.reshape(-1, *k.shape[-2:])), dense(v.reshape(-1, *v.shape[-2:]))
    return fkt.kv_append(*tokens, k_cache, v_cache, slots, rope=rope)  # type: ignore[call-overload]


def _after_padding(
    k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, leftpad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages of one token and a table in which each sequence begins behind its padding."""
    page_size = k_cache.shape[1]
    k_pages, step = single_token_pages(k_cache)
    v_pages, step_v = single_token_pages(v_cache)
    if step != step_v:
        v_pages, step_v = single_token_pages(v_cache.contiguous())
        if step != step_v:
            k_pages, step = single_token_pages(k_cache.contiguous())
    capacity = table.shape[1] * page_size
    token = torch.arange(capacity, device=table.device)[None] + leftpad.long()[:, None]
    token = token.clamp(max=capacity - 1)  # past a sequence's end, where the table is not read
    page = torch.gather(table.long(), 1, token // page_size)
    return k_pages, v_pages, (page * step + token % page_size).to(torch.int32)
