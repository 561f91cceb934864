"""DeepSpeed-Ulysses (Jacobs et al., 2023): each rank has all tokens of some heads while attention runs.

Two exchanges of all ranks with all, one before and one behind a call of attention as it is on one device.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from flashkernel.torch.attention import attention

from .exchange import all_to_all
from .gather import from_ranks, to_ranks
from .partial import Job

__all__ = ["heads_refusal", "ulysses"]


def heads_refusal(heads_q: int, heads_kv: int, size: int) -> str | None:
    """Why heads can't be dealt to the ranks; None: they can. Fewer key heads than ranks are repeated."""
    if heads_q % size or (heads_kv % size and size % heads_kv):
        return (
            f"method='ulysses' with {heads_q} query heads and {heads_kv} key heads on {size} ranks; multiples of "
            f"{size}, or for keys a divisor of it, are needed"
        )
    return None


def _to_heads(job: Job, x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, own tokens, dim] to [batch, heads / ranks, all tokens, dim]."""
    batch, heads, tokens, dim = x.shape
    rows = x.reshape(batch, job.size, heads // job.size, tokens, dim).permute(1, 3, 0, 2, 4)
    rows = rows.reshape(job.size * tokens, batch, heads // job.size, dim)
    what = f"rank {job.rank} of {job.size} exchanges tokens for heads"
    rows = all_to_all(job.group, rows, [tokens] * job.size, job.seq_lens, what, job.timeout)
    return from_ranks(job, rows).permute(1, 2, 0, 3)


def _to_tokens(job: Job, x: torch.Tensor) -> torch.Tensor:
    """The way back."""
    batch, heads, _, dim = x.shape
    own = job.seq_lens[job.rank]
    what = f"rank {job.rank} of {job.size} exchanges heads for tokens"
    rows = to_ranks(job, x.permute(2, 0, 1, 3))
    rows = all_to_all(job.group, rows, job.seq_lens, [own] * job.size, what, job.timeout)
    return (
        rows.reshape(job.size, own, batch, heads, dim).permute(2, 0, 3, 1, 4).reshape(batch, job.size * heads, own, dim)
    )


class _Exchange(torch.autograd.Function):
    """apply(x, job, to_heads): tokens for heads, or heads for tokens; its gradient is the other one."""

    @staticmethod
    def forward(ctx: Any, x: Any, job: Job, to_heads: bool) -> Any:
        ctx.job, ctx.to_heads = job, to_heads
        return _to_heads(job, x) if to_heads else _to_tokens(job, x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        return _to_tokens(ctx.job, grad) if ctx.to_heads else _to_heads(ctx.job, grad), None, None


def ulysses(q: Any, k: Any, v: Any, job: Job, options: dict[str, Any]) -> Any:
    """(out, lse) of this rank's queries over all keys. options: those of `attention` without causal and window."""
    heads_q, heads_kv = q.shape[1], k.shape[1]
    if heads_kv % job.size:
        k, v = (x.repeat_interleave(job.size // heads_kv, dim=1) for x in (k, v))
    mine = slice(job.rank * heads_q // job.size, (job.rank + 1) * heads_q // job.size)
    options = {name: x[..., mine] if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    left, right = job.sides
    plain = left is None and right in (None, 0)
    options |= {"causal": right == 0, "window": None if plain else (left, None if right == 0 else right)}
    q, k, v = (_Exchange.apply(x, job, True) for x in (q, k, v))
    bounds = job.documents or (0, q.shape[2])
    parts = []
    for begin, end in itertools.pairwise(bounds):
        if begin < end:
            q_part, k_part, v_part = (x[:, :, begin:end] for x in (q, k, v))
            parts.append(attention(q_part, k_part, v_part, return_lse=True, **options))
    if not parts:
        nothing = q.sum() + k.sum() + v.sum()  # so that a backward pass has its messages
        out, lse = nothing + q.new_zeros(*q.shape[:3], v.shape[3]), q.new_zeros(q.shape[:3], dtype=torch.float32)
    elif len(parts) == 1:
        out, lse = parts[0]
    else:
        out, lse = (torch.cat(kind, dim=2) for kind in zip(*parts, strict=True))
    return _Exchange.apply(out, job, False), _Exchange.apply(lse[..., None], job, False)[..., 0]
