"""Attention over keys that come in parts: the state of a forward pass, and the gradients of a backward pass.

Keys and values travel as one tensor, [tokens, batch, heads_kv, head_dim + head_dim_v], in which any range of tokens is
one piece of memory. A part's output is rounded to q's dtype once, as the op gives it; all sums are float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import flashkernel as fk
from flashkernel.torch._library import dense, like

from .layout import Call, Span

__all__ = ["Job", "Sums", "given_back", "grads_of", "keep", "kept", "pack", "unpack"]


class Job(NamedTuple):
    """What a call of context_parallel.attention is about, the same on every rank but for `rank`."""

    group: Any
    rank: int
    size: int
    seq_lens: tuple[int, ...]
    chunks: tuple[tuple[Span, ...], ...]  # of each rank
    sides: tuple[int | None, int | None]  # most tokens seen on the left and the right
    documents: tuple[int, ...] | None
    softcap: float
    scale: float | None
    timeout: float | None


def pack(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[batch, heads, tokens, dim] twice as [tokens, batch, heads, dim + dim_v]."""
    return torch.cat([k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)], dim=-1)


def unpack(packed: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of k and v: [batch, heads, tokens, dim]."""
    heads_first = packed.permute(1, 2, 0, 3)
    return heads_first[..., :head_dim], heads_first[..., head_dim:]


def _options(job: Job, call: Call) -> dict[str, Any]:
    return {"causal": call.causal, "window": call.window, "softcap": job.softcap, "scale": job.scale}


def _part(x: torch.Tensor, span: Span, offset: int = 0) -> torch.Tensor:
    return x[:, :, span.begin - offset : span.end - offset]


class Sums:
    """The state of all queries over the keys so far: a sink is a key without a value that was seen first."""

    def __init__(self, q: torch.Tensor, head_dim_v: int, sinks: torch.Tensor | None):
        batch, heads, rows, _ = q.shape
        self._q = dense(q)
        self.out = torch.zeros(batch, heads, rows, head_dim_v, dtype=torch.float32, device=q.device)
        self.lse = torch.full((batch, heads, rows), -torch.inf, dtype=torch.float32, device=q.device)
        if sinks is not None:
            self.lse.copy_(sinks.float()[None, :, None].expand(self.lse.shape))

    def add(self, job: Job, plan: tuple[Call, ...], k: torch.Tensor, v: torch.Tensor, offset: int = 0) -> None:
        """The keys at hand are rows `offset` and on of those that the plan speaks of."""
        for call in plan:
            part, part_lse = fk.attention(
                _part(self._q, call.q), _part(k, call.k, offset), _part(v, call.k, offset), return_lse=True,
                **_options(job, call),
            )  # fmt: skip
            out, lse = _part(self.out, call.q), _part(self.lse, call.q)
            fk.merge_states(out, lse, part.float(), part_lse, out=(out, lse))

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        q, out = self._q, self.out
        if out.dtype == q.dtype:
            return out, self.lse
        new = like(q) if out.shape == q.shape else q.new_empty(out.shape)
        return new.copy_(out), self.lse


class Saved(NamedTuple):
    """What the gradients of a rank's queries are made of; LSE is that over all keys of all ranks."""

    grad_out: torch.Tensor
    grad_lse: torch.Tensor | None
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def keep(ctx: Any, q: Any, k: Any, v: Any, sinks: Any, sums: Sums, job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """The end of a forward pass: what it gives, kept for `kept`."""
    out, lse = sums.result()
    ctx.save_for_backward(q, k, v, sinks, out, lse)
    ctx.job = job
    ctx.set_materialize_grads(False)
    return out, lse


def kept(ctx: Any, grad_out: Any, grad_lse: Any) -> tuple[Saved, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The beginning of a backward pass: what the gradients are made of, k, v, and a float32 grad_q of zeros."""
    q, k, v, _, out, lse = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else dense(grad_out)
    grad_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    return Saved(grad_out, dense(grad_lse), dense(q), out, lse), k, v, grad_q


def given_back(ctx: Any, saved: Saved, grad_q: torch.Tensor, packed: torch.Tensor) -> tuple[Any, ...]:
    """The end of a backward pass: gradients of (q, k, v, sinks, job) from float32 ones, those of keys packed."""
    q, k, v, sinks, *_ = ctx.saved_tensors
    grad_k, grad_v = unpack(packed, k.shape[3])
    grad_sinks = sinks_grad(saved, sinks) if ctx.needs_input_grad[3] else None
    return like(q).copy_(grad_q), like(k).copy_(grad_k), like(v).copy_(grad_v), grad_sinks, None


def grads_of(
    job: Job, plan: tuple[Call, ...], saved: Saved, k: torch.Tensor, v: torch.Tensor, rows: Span, grad_q: torch.Tensor
) -> torch.Tensor:
    """Adds to the float32 grad_q; gives the gradients of the key rows `rows`, packed as keys and values are.

    In q's dtype where one call gave them, since it has rounded them; in float32 where several were added.
    """
    batch, heads, _, head_dim = k.shape
    whole = None
    for call in plan:
        tokens = call.k.end - call.k.begin
        packed = k.new_empty(tokens, batch, heads, head_dim + v.shape[3])
        grads = (
            torch.empty_like(_part(saved.q, call.q), memory_format=torch.contiguous_format),
            *unpack(packed, head_dim),
        )
        fk.attention_backward(
            _part(saved.grad_out, call.q),
            _part(saved.q, call.q),
            _part(k, call.k, rows.begin),
            _part(v, call.k, rows.begin),
            _part(saved.out, call.q),
            _part(saved.lse, call.q),
            grad_lse=None if saved.grad_lse is None else _part(saved.grad_lse, call.q),
            grads=grads,
            **_options(job, call),
        )
        _part(grad_q, call.q).add_(grads[0])
        if len(plan) == 1:
            return packed
        if whole is None:
            whole = packed.new_zeros(rows.end - rows.begin, *packed.shape[1:], dtype=torch.float32)
        whole[call.k.begin - rows.begin : call.k.end - rows.begin] += packed
    assert whole is not None
    return whole


def sinks_grad(saved: Saved, sinks: torch.Tensor) -> torch.Tensor:
    """The gradient of sinks from this rank's queries, [heads]: a sink is a key whose value is 0."""
    row = (saved.grad_out.float() * saved.out.float()).sum(-1)
    if saved.grad_lse is not None:
        row = row - saved.grad_lse
    share = torch.exp(sinks.float()[None, :, None] - saved.lse)
    return -(share * row).sum((0, 2)).to(sinks.dtype)
