"""Messages between the ranks of a process group: torch.distributed, with waits that end and errors that say who.

Called by ring.py, gather.py and ulysses.py. Sends and receives are posted in the same order on every rank.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from flashkernel.torch import _ranks
from flashkernel.torch._ranks import PeerError

__all__ = ["PeerError", "Transfer", "agree", "all_gather", "all_to_all", "find_group", "start"]


find_group = functools.partial(_ranks.find_group, "context_parallel")
_guarded = functools.partial(_ranks.guarded, "context_parallel")
_wait = functools.partial(_ranks.wait, "context_parallel")


class Transfer:
    """Messages under way: `finish` waits for them and gives what was received."""

    def __init__(
        self, works: Sequence[Any], received: Any, kept: Any, what: str, tensor: torch.Tensor, timeout: float | None
    ):
        self._works, self._received, self._kept = works, received, kept
        self._what, self._tensor, self._timeout = what, tensor, timeout

    def finish(self) -> Any:
        _wait(self._what, self._works, self._tensor, self._timeout)
        self._kept = None
        return self._received


def start(
    group: Any,
    outgoing: tuple[int, torch.Tensor] | None,
    incoming: tuple[int, torch.Tensor] | None,
    tag: int,
    what: str,
    timeout: float | None,
) -> Transfer:
    """Posts a message to one rank of the group and one from another, (rank, contiguous tensor) each; None: none."""
    ops = []
    if outgoing is not None:
        ops.append(dist.P2POp(dist.isend, outgoing[1], dist.get_global_rank(group, outgoing[0]), group, tag))
    if incoming is not None:
        ops.append(dist.P2POp(dist.irecv, incoming[1], dist.get_global_rank(group, incoming[0]), group, tag))
    works = _guarded(what, lambda: dist.batch_isend_irecv(ops)) if ops else []
    tensor = (outgoing or incoming or (0, torch.empty(0)))[1]
    received = None if incoming is None else incoming[1]
    return Transfer(works, received, outgoing, what, tensor, timeout)


def all_gather(group: Any, local: torch.Tensor, what: str, timeout: float | None) -> torch.Tensor:
    """[ranks, *local.shape]: the tensors of all ranks, which have one shape."""
    return _ranks.all_gather("context_parallel", what, group, local, timeout)


def all_to_all(
    group: Any, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], what: str, timeout: float | None
) -> torch.Tensor:
    """Sends `sent[r]` rows, one rank's behind the other's, to each rank r, and gives the `received[r]` rows of each."""
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    splits = {"output_split_sizes": list(received), "input_split_sizes": list(sent)}
    rows = rows.contiguous()
    work = _guarded(what, lambda: dist.all_to_all_single(result, rows, group=group, async_op=True, **splits))
    _wait(what, [work], rows, timeout)
    return result


# --- agreement about a call

RECORD = 20  # numbers that ranks compare: as many for every kind of call, so that two kinds can be told apart

_agreed: weakref.WeakKeyDictionary[Any, set[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def agree(
    group: Any,
    device: torch.device,
    fields: dict[str, int],
    seq_lens: Sequence[int] | None,
    refusal: Exception | None,
    timeout: float | None,
) -> None:
    """Compares a call with the other ranks', so that every rank refuses what they don't agree about.

    fields: what must be equal on all ranks, the kind of call first, and "seq", the rank's own number of tokens.
    refusal: this rank's own reason not to go on, which the others hear of before it is raised. On a GPU ranks speak
    before the first call of a kind only: asking waits for the device.
    """
    # A group for both kinds of device compares on the host.
    on_host = _ranks.backend_for("context_parallel", group, device.type)
    size, on_gpu = dist.get_world_size(group), device.type != "cpu"
    record = (0 if refusal else 1, *fields.values())
    known = _agreed.setdefault(group, set())
    if on_gpu and refusal is None and record in known:
        return
    mine = torch.tensor([*record, *[0] * (RECORD - len(record))], device="cpu" if on_host else device)
    records = all_gather(group, mine, "comparing the arguments", timeout).tolist()
    if refusal is not None:
        raise refusal
    for rank in range(size):
        if not records[rank][0]:
            raise ValueError(f"context_parallel: rank {rank} refused its arguments; its own error says why")
    for i, name in enumerate(fields, start=1):
        values = [row[i] for row in records]
        if name == "seq":
            wanted = [values[0]] * size if seq_lens is None else list(seq_lens)
            if values != wanted:
                raise ValueError(
                    f"context_parallel: the ranks hold {values} tokens; {wanted} are needed"
                    + (" (seq_lens says how many each holds where they differ)" if seq_lens is None else "")
                )
        elif len(set(values)) > 1:
            rank = next(r for r in range(size) if values[r] != values[0])
            raise ValueError(
                f"context_parallel: {name}={values[0]} on rank 0 and {values[rank]} on rank {rank}; the same is needed "
                "on every rank"
            )
    if on_gpu and on_host and not known:
        # The first message of a GPU group must come from all ranks; those of a ring may come from some.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    known.add(record)
