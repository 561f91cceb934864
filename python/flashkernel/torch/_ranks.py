"""Processes of a torch.distributed group: finding it, and waits that end with an error that says who did not come.

Called by `flashkernel.torch.context_parallel` and `flashkernel.generate.tensor_parallel`, whose names sentences begin
with: `who`.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["PeerError", "all_gather", "backend_for", "find_group", "guarded", "wait"]

# The second name is that of torch up to 2.12.
_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class PeerError(RuntimeError):
    """A rank of the group ended, or did not answer in time. The group can't be used any more."""


def find_group(who: str, group: Any) -> Any:
    """The process group of a ProcessGroup, of a one-dimensional DeviceMesh, or the default group for None."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(f"{who}: torch.distributed is not initialised; init_process_group must come first")
    if group is None:
        return dist.group.WORLD
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(
                f"{who}: the DeviceMesh has {group.ndim} dims; one is needed, as a mesh of several gives it by a "
                "dim's name"
            )
        return group.get_group()
    if dist.get_rank(group) < 0:
        raise ValueError(f"{who}: this process is not a rank of the group")
    return group


def backend_for(who: str, group: Any, device: str) -> bool:
    """Whether the group has a backend for the host beside the one for `device` ("cpu" or "cuda"), which it needs."""
    config = dist.get_backend_config(group)
    if f"{device}:" not in config:
        raise ValueError(
            f"{who}: the tensors lie on {device} and the group's backends are {config}; one for {device} is needed"
        )
    return "cpu:" in config


def guarded(who: str, what: str, call: Callable[[], Any]) -> Any:
    """The result of a call that other ranks take part in."""
    try:
        return call()
    except torch.cuda.OutOfMemoryError:  # it is a RuntimeError, but says nothing of another rank
        raise
    except RuntimeError as error:
        reason = str(error).strip().splitlines()
        raise PeerError(
            f"{who}: {what}: a rank ended or did not answer in time ({reason[0] if reason else error!r})"
        ) from error


def wait(who: str, what: str, works: Sequence[Any], tensor: torch.Tensor, timeout: float | None) -> None:
    """timeout: seconds; None: the group's own. NCCL's waits hold the stream, not the host, and have no other limit."""
    limit = () if timeout is None or tensor.is_cuda else (datetime.timedelta(seconds=timeout),)
    for work in works:
        guarded(who, what, functools.partial(work.wait, *limit))


def all_gather(who: str, what: str, group: Any, local: torch.Tensor, timeout: float | None) -> torch.Tensor:
    """[ranks, *local.shape]: the tensors of all ranks, which have one shape."""
    size, local = dist.get_world_size(group), local.contiguous()
    whole = local.new_empty((size * local.numel(),))
    assert _gather is not None
    # Without async_op NCCL works on the stream at hand, where nothing has to wait for another one.
    call = functools.partial(_gather, whole, local.reshape(-1), group=group, async_op=not local.is_cuda)
    work = guarded(who, what, call)
    if work is not None:
        wait(who, what, [work], local, timeout)
    return whole.view(size, *local.shape)
