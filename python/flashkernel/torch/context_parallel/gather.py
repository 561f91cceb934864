"""All keys and values on every rank: one all-gather before, and one exchange of their gradients behind.

More memory than the ring (the whole sequence's keys and values) and no overlap, but each query row is one call of
attention over all of its keys, as it is on one device.
"""

from __future__ import annotations

from typing import Any

import torch

from .exchange import all_gather, all_to_all
from .layout import Call, Span, calls, global_order
from .partial import Job, Sums, given_back, grads_of, keep, kept, pack, unpack

__all__ = ["Gather", "from_ranks", "gather_rows", "to_ranks"]


def from_ranks(job: Job, rows: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, one rank's behind the other's, in the order of the whole sequence."""
    begins = [sum(job.seq_lens[:rank]) for rank in range(job.size)]
    parts = [rows[begins[rank] + own.begin : begins[rank] + own.end] for rank, own in global_order(job.chunks)]
    return rows if len(parts) == 1 or not parts else torch.cat(parts)


def to_ranks(job: Job, rows: torch.Tensor) -> torch.Tensor:
    """The way back: one rank's rows behind the other's."""
    parts = [rows[span.begin : span.end] for chunks in job.chunks for span in chunks]
    return rows if len(parts) == 1 or not parts else torch.cat(parts)


def gather_rows(job: Job, local: torch.Tensor, what: str) -> torch.Tensor:
    """All rows of the sequence in its order. Shards travel as long as the longest."""
    longest = max(job.seq_lens)
    padded = local
    if len(local) < longest:
        padded = local.new_zeros(longest, *local.shape[1:])
        padded[: len(local)] = local
    parts = all_gather(job.group, padded, f"rank {job.rank} of {job.size} {what}", job.timeout)
    return from_ranks(job, torch.cat([parts[rank, :size] for rank, size in enumerate(job.seq_lens)]))


def _plan(job: Job) -> tuple[Call, ...]:
    whole = (Span(0, sum(job.seq_lens)),) if sum(job.seq_lens) else ()
    return calls(job.chunks[job.rank], whole, *job.sides, job.documents)


class Gather(torch.autograd.Function):
    """apply(q, k, v, sinks, job) gives (out, lse) of this rank's queries over all keys."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sinks: Any, job: Job) -> Any:
        packed = gather_rows(job, pack(k, v), "gathers keys and values")
        sums = Sums(q, v.shape[3], sinks)
        sums.add(job, _plan(job), *unpack(packed, k.shape[3]))
        return keep(ctx, q, k, v, sinks, sums, job)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
        saved, k, v, grad_q = kept(ctx, grad_out, grad_lse)
        job: Job = ctx.job
        packed, head_dim = gather_rows(job, pack(k, v), "gathers keys and values"), k.shape[3]
        whole = torch.zeros(packed.shape, dtype=torch.float32, device=k.device)
        for call in _plan(job):
            keys, values = unpack(packed[call.k.begin : call.k.end], head_dim)
            whole[call.k.begin : call.k.end] += grads_of(job, (call,), saved, keys, values, call.k, grad_q)
        own = job.seq_lens[job.rank]
        what = f"rank {job.rank} of {job.size} exchanges gradients of keys"
        parts = all_to_all(job.group, to_ranks(job, whole), job.seq_lens, [own] * job.size, what, job.timeout)
        total = parts[:own]
        for rank in range(1, job.size):  # in the order of the ranks, so that the sum is the same every time
            total += parts[rank * own : (rank + 1) * own]
        return given_back(ctx, saved, grad_q, total)
