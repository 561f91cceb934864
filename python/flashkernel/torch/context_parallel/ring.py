"""Ring attention (Liu, Zaharia, Abbeel, 2023): keys and values go round the ranks while queries stay.

In step s a rank has the keys of the rank s places before it. They come straight from their owner and only those that
are seen: of a causal zig-zag half of them in half of the steps, of a window the neighbours' alone. The next step's
keys are under way while this step's are worked on. Backward, gradients of keys go straight back to their owner, which
adds them in the order of the steps; so results are the same bits every time.
"""

from __future__ import annotations

from typing import Any

import torch

from .exchange import Transfer, start
from .layout import Call, Span, calls, rows_needed
from .partial import Job, Sums, given_back, grads_of, keep, kept, pack, unpack

__all__ = ["Ring"]


def _plan(job: Job, reader: int, owner: int) -> tuple[Call, ...]:
    return calls(job.chunks[reader], job.chunks[owner], *job.sides, job.documents)


def _send_keys(job: Job, step: int, local: torch.Tensor) -> Transfer | None:
    """Posts the exchange of keys of a step; None after the last one."""
    if step >= job.size:
        return None
    reader, owner = (job.rank + step) % job.size, (job.rank - step) % job.size
    wanted, needed = rows_needed(_plan(job, reader, job.rank)), rows_needed(_plan(job, job.rank, owner))
    outgoing = None if wanted is None else (reader, local[wanted.begin : wanted.end])
    incoming = None if needed is None else (owner, local.new_empty(needed.end - needed.begin, *local.shape[1:]))
    what = f"rank {job.rank} of {job.size} waits for the keys of rank {owner}"
    return start(job.group, outgoing, incoming, step, what, job.timeout)


def _send_grads(job: Job, step: int, grads: torch.Tensor | None, local: torch.Tensor) -> Transfer:
    """Posts the gradients of the keys of a step on their way back to their owner."""
    reader, owner = (job.rank + step) % job.size, (job.rank - step) % job.size
    plan, incoming = _plan(job, reader, job.rank), None
    rows = rows_needed(plan)
    if rows is not None:
        dtype = local.dtype if len(plan) == 1 else torch.float32
        incoming = (reader, local.new_empty(rows.end - rows.begin, *local.shape[1:], dtype=dtype))
    outgoing = None if grads is None else (owner, grads)
    what = f"rank {job.rank} of {job.size} waits for gradients of rank {reader}"
    return start(job.group, outgoing, incoming, job.size + step, what, job.timeout)


def _steps(job: Job, local: torch.Tensor, head_dim: int) -> Any:
    """(step, plan, k, v, rows) of each owner's keys, this rank's own first; the next ones are under way meanwhile."""
    transfer = _send_keys(job, 1, local)
    plan = _plan(job, job.rank, job.rank)
    if plan:
        yield 0, plan, *unpack(local, head_dim), Span(0, len(local))
    for step in range(1, job.size):
        assert transfer is not None
        packed = transfer.finish()
        transfer = _send_keys(job, step + 1, local)
        plan = _plan(job, job.rank, (job.rank - step) % job.size)
        rows = rows_needed(plan)
        if rows is None:
            yield step, (), None, None, None
        else:
            yield step, plan, *unpack(packed, head_dim), rows


class Ring(torch.autograd.Function):
    """apply(q, k, v, sinks, job) gives (out, lse) of this rank's queries over all keys."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sinks: Any, job: Job) -> Any:
        sums = Sums(q, v.shape[3], sinks)
        for _, plan, keys, values, rows in _steps(job, pack(k, v), k.shape[3]):
            if plan:
                sums.add(job, plan, keys, values, rows.begin)
        return keep(ctx, q, k, v, sinks, sums, job)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
        saved, k, v, grad_q = kept(ctx, grad_out, grad_lse)
        job: Job = ctx.job
        local, head_dim = pack(k, v), k.shape[3]
        own = torch.zeros(local.shape, dtype=torch.float32, device=k.device)
        under_way: tuple[int, Transfer] | None = None
        for step, plan, keys, values, rows in _steps(job, local, head_dim):
            grads = grads_of(job, plan, saved, keys, values, rows, grad_q) if plan else None
            if step == 0:
                own += grads
                continue
            before, under_way = under_way, (step, _send_grads(job, step, grads, local))
            _add_returned(job, before, own)
        _add_returned(job, under_way, own)
        return given_back(ctx, saved, grad_q, own)


def _add_returned(job: Job, under_way: tuple[int, Transfer] | None, own: torch.Tensor) -> None:
    """Waits for the gradients that another rank worked out for this rank's keys and adds them."""
    if under_way is None:
        return
    step, transfer = under_way
    grads = transfer.finish()
    rows = rows_needed(_plan(job, (job.rank + step) % job.size, job.rank))
    if rows is not None:
        own[rows.begin : rows.end] += grads
