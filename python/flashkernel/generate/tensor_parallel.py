"""One model over the ranks of a torch.distributed group: heads and columns of the MLP are dealt to them.

Shoeybi et al., Megatron-LM (2019): each rank has some heads and some columns of the MLP's inner layer, so a layer needs
two sums over the ranks, one behind the output projection of attention and one behind the MLP's. The output layer's
rows are dealt, too; its logits are joined, so that every rank draws the same tokens. Embeddings and norms are whole on
every rank. Every rank makes the same calls of the engine in the same order, and gets the same tokens; leading.py lets
one rank lead.

Used by model.py, the models and engine.py. This module needs torch, and nothing else of this package imports it.
"""

from __future__ import annotations

import functools
import time
import zlib
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import flashkernel as fk

from ..torch import _ranks
from ..torch._ranks import PeerError

__all__ = ["PeerError", "TensorParallel"]

WHO = "tensor_parallel"
HEAD_ROWS = 64  # rows of the output layer come in multiples of it, as the kernels for few rows like them
ONE_SHOT_BYTES = 1 << 18  # up to here a sum is faster when each rank reads all others' numbers
GPU_SECONDS = 600.0  # NCCL's own limit, which does not see the sums in a CUDA graph


class Agreement(NamedTuple):
    """What a rank says about a call: whether it goes on, what the call is, and with which arguments."""

    good: int
    name: int
    arguments: int


class TensorParallel:
    """The ranks that share one model: `load_model(path, tensor_parallel=TensorParallel(group))`.

    group: a ProcessGroup or a one-dimensional DeviceMesh of NCCL (on GPUs) or gloo (on CPUs); None: the default group.
    timeout: seconds that a rank waits for the others; None: the group's own limit on the CPU, ten minutes on a GPU.
    one_shot: whether sums of up to 256 KiB on GPUs go through torch's symmetric memory, where each rank reads the
        numbers of all others at once, instead of NCCL.
    fused: whether sums of up to 32 rows on GPUs are one kernel with the residual and the norm behind them, where ranks
        write to each other's symmetric memory. It needs Triton, and up to 8 GPUs that reach each other's memory. Not in
        the invariant mode. None: where it works, and `one_shot` is not asked for.

    Raises ValueError where there is no group. A rank that ends or does not answer is a `PeerError` of whatever waits.

    Source: Shoeybi et al., Megatron-LM (2019).

    >>> import torch.distributed as dist
    >>> from flashkernel.generate import Engine, find_model, load_model
    >>> from flashkernel.generate.tensor_parallel import TensorParallel
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun: no arguments
    >>> model = load_model(find_model("demo"), device="cpu", tensor_parallel=TensorParallel())
    >>> [event.token for event in Engine(model).generate([[10, 11, 12]], max_new_tokens=2)] != []
    True
    >>> dist.destroy_process_group()
    """

    def __init__(
        self, group: Any = None, *, timeout: float | None = None, one_shot: bool = False, fused: bool | None = None
    ):
        if timeout is not None and not timeout > 0:
            raise ValueError(f"{WHO}: timeout={timeout}; seconds > 0 are needed")
        self.group = _ranks.find_group(WHO, group)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.timeout, self.one_shot, self.fused = timeout, one_shot, fused
        self._device = torch.device("cpu")  # where ranks talk about calls
        self._on_cpu = False  # whether sums are
        self._buffers: dict[torch.dtype, Any] = {}  # of the sums that read all ranks' numbers
        self._inbox: Any = None  # symmetric memory that others write to
        self._mapped: Any = None  # keeps the others' inboxes in reach
        self._fused: Any = None  # a RankSum
        self._lost = False

    def prepare(self, arrays: Any) -> None:
        """Called by every rank, once the device is known and before the first sum."""
        kind = torch.device(arrays.device).type
        on_host = _ranks.backend_for(WHO, self.group, kind)
        self._device = torch.device("cpu" if on_host else arrays.device)
        self._on_cpu = kind == "cpu"
        if self._on_cpu:
            return
        arrays.watch = self.watch
        # NCCL's first message must come from all ranks, and outside of a graph.
        dist.all_reduce(torch.zeros(1, device=arrays.device), group=self.group)
        if self.one_shot and self.size > 1:
            self._prepare_one_shot(arrays)
        is_asked = not self.one_shot if self.fused is None else self.fused
        if is_asked and self.size > 1 and self._fused is None:
            self._prepare_fused(arrays)

    def _prepare_fused(self, arrays: Any) -> None:
        """Each step is one that all ranks have taken before one of them takes the next."""
        steps = self._map_inboxes, self._try_fused
        for step in steps:
            failed = None
            try:
                step(arrays)
            except Exception as error:
                failed = error
            if not self._records("the ranks' inboxes", Agreement(int(failed is None), 0, 0))[:, 0].all():
                self._inbox = self._mapped = self._fused = None
                self._lost = False  # a trial that waited in vain is no rank that was lost: all of them are here
                if self.fused is None:
                    return
                raise ValueError(
                    f"{WHO}: fused=True, and sums in one kernel do not work on every rank "
                    f"({failed or 'here they do'}); False is needed"
                )

    def _map_inboxes(self, arrays: Any) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        from ..triton.rank_sum import MOST_RANKS, RankSum, inbox_words

        if self.size > MOST_RANKS:
            raise ValueError(f"the group has {self.size} ranks; up to {MOST_RANKS} are served")
        self._inbox = symmetric_memory.empty(inbox_words(self.size), dtype=torch.int64, device=arrays.device)
        self._inbox.zero_()
        self._mapped = mapped = symmetric_memory.rendezvous(self._inbox, self.group)
        torch.cuda.synchronize(arrays.device)
        seconds = GPU_SECONDS if self.timeout is None else self.timeout
        words = (inbox_words(self.size),)
        addresses = [mapped.get_buffer(peer, words, torch.int64).data_ptr() for peer in range(self.size)]
        self._fused = RankSum(self.rank, addresses, arrays.device, seconds)

    def _try_fused(self, arrays: Any) -> None:
        """Compiles the kernel, and sees whether it adds."""
        x = torch.full((1, 64), self.rank + 1.0, dtype=getattr(torch, arrays.dtype), device=arrays.device)
        total = self._fused.sum(x)
        done = torch.cuda.Event()
        done.record()
        self.watch(done)
        if not bool((total == self.size * (self.size + 1) / 2).all()):
            raise RuntimeError("a sum is wrong")

    def _prepare_one_shot(self, arrays: Any) -> None:
        buffer, failed, dtype = None, None, getattr(torch, arrays.dtype)
        if dtype in self._buffers:
            return
        try:
            import torch.distributed._symmetric_memory as symmetric_memory

            buffer = symmetric_memory.empty(ONE_SHOT_BYTES // dtype.itemsize, dtype=dtype, device=arrays.device)
            symmetric_memory.rendezvous(buffer, self.group)
            # Not every torch has the op, nor each dtype in it.
            self._one_shot(buffer, torch.zeros(64, dtype=dtype, device=arrays.device))
        except Exception as error:
            failed = error
        if self._records("the ranks' symmetric memory", Agreement(int(failed is None), 0, 0))[:, 0].all():
            self._buffers[dtype] = buffer
        else:
            raise ValueError(
                f"{WHO}: one_shot=True, and symmetric memory does not work on every rank ({failed or 'here it does'}); "
                "False is needed"
            )

    def close(self) -> None:
        """Ends the group where it is the default one of this process; models of it can't be used any more."""
        if not self._lost and dist.is_initialized() and self.group is dist.group.WORLD:
            dist.destroy_process_group()

    # --- what the model asks for

    def sum(self, x: Any) -> Any:
        """x [rows, columns] of all ranks added up, perhaps in its place."""
        if self.size == 1:
            return x
        tensor = _tensor(x)
        if not tensor.is_cuda:
            call = functools.partial(dist.all_reduce, tensor, group=self.group, async_op=True)
            _ranks.wait(WHO, "a sum", [_ranks.guarded(WHO, "a sum", call)], tensor, self.timeout)
            return x
        if self._fused is not None and self._fused.takes(tensor) and not fk.is_invariant():
            return self._fused.sum(tensor)
        num_bytes = tensor.numel() * tensor.element_size()
        buffer = self._buffers.get(tensor.dtype)
        if buffer is not None and num_bytes <= ONE_SHOT_BYTES and num_bytes % 16 == 0:
            return self._one_shot(buffer, tensor)
        _ranks.guarded(WHO, "a sum", functools.partial(dist.all_reduce, tensor, group=self.group))
        return tensor

    def sum_norm(self, x: Any, residual: Any, weight: Any, eps: float) -> tuple[Any, Any] | None:
        """(rms_norm(h) * weight, h), h = residual + x of all ranks, by one kernel; None where there is none for it.

        x, residual: [rows, columns]. weight: [columns], of their dtype or float32.
        """
        if self._fused is None or not self._fused.takes(x) or not residual.is_contiguous() or fk.is_invariant():
            return None
        return self._fused.sum_norm(x, residual, weight, eps)

    def _one_shot(self, buffer: Any, tensor: torch.Tensor) -> torch.Tensor:
        total, begin = torch.empty_like(tensor), buffer[: tensor.numel()].view(tensor.shape)
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(begin, tensor, "sum", self.group.group_name, total)
        return total

    def join_columns(self, x: Any) -> Any:
        """[rows, columns] of each rank as [rows, ranks * columns]."""
        if self.size == 1:
            return x
        local = _tensor(x)
        parts = _ranks.all_gather(WHO, "the logits", self.group, local, self.timeout)
        whole = parts.transpose(0, 1).reshape(len(local), self.size * local.shape[1])
        return whole if isinstance(x, torch.Tensor) else _array(whole, x.dtype)

    def head_rows(self, arrays: Any, whole: Any) -> Any:
        """This rank's rows of an output layer [vocab, hidden], float32 or the model's; rows of 0 may be added."""
        vocab, hidden = whole.shape
        rows = -(-vocab // self.size)
        rows += -rows % HEAD_ROWS
        mine = whole[min(vocab, self.rank * rows) : min(vocab, (self.rank + 1) * rows)]
        padded = arrays.activations((rows, hidden))
        if len(mine):
            padded[: len(mine)] = arrays.weight(mine)
        return padded

    # --- what ranks say to each other about their calls

    def _records(self, what: str, record: Agreement) -> torch.Tensor:
        """[ranks, 3]"""
        mine = torch.tensor(record, dtype=torch.int64, device=self._device)
        return _ranks.all_gather(WHO, what, self.group, mine, self.timeout).cpu()

    def agree(self, name: str, arguments: Any = None, refusal: BaseException | None = None) -> None:
        """Compares a call with those of the other ranks: ValueError on all of them where they differ, or where one
        refuses it, which raises its own `refusal`.

        name: of the call. arguments: what is equal on all ranks, of types whose repr says all.
        """
        if self.size > 1:
            record = Agreement(int(refusal is None), _checksum(name), _checksum(repr(arguments)))
            records = self._records(f"comparing the calls of {name}", record).tolist()
        if refusal is not None:
            raise refusal
        if self.size == 1:
            return
        _, first, given = records[0]
        for rank, (good, _, _) in enumerate(records):
            if not good:
                raise ValueError(f"{WHO}: {name}: rank {rank} refused it; its own error says why")
        for rank, (_, call, arguments) in enumerate(records):
            if call != first:
                raise ValueError(
                    f"{WHO}: rank {rank} makes another call than rank 0 (here it is {name}); the same is needed"
                )
            if arguments != given:
                raise ValueError(f"{WHO}: {name}: rank {rank} has other arguments than rank 0; the same are needed")

    def same_batch(self, batch: Any) -> None:
        """On the CPU, compares the tokens that a step works on: gloo ends the process where a sum's sizes differ. On a
        GPU nothing, since asking waits for it.
        """
        if self.size > 1 and self._on_cpu:
            self.agree("a step", [np.asarray(x).tolist() for x in (batch.tokens, batch.positions)])

    def tell(self, kind: int, payload: bytes = b"") -> None:
        """Sends a message from rank 0 to all others, which `hear` it."""
        self._message(torch.tensor([kind, len(payload)], dtype=torch.int64), payload)

    def hear(self) -> tuple[int, bytes]:
        """The next message of rank 0. Raises PeerError."""
        return self._message(torch.zeros(2, dtype=torch.int64), b"")

    def _message(self, head: torch.Tensor, payload: bytes) -> tuple[int, bytes]:
        if self.size == 1:
            return int(head[0]), payload
        kind, size = self._broadcast(head).tolist()
        body = torch.frombuffer(bytearray(payload.ljust(size, b"\0")), dtype=torch.uint8) if size else None
        return kind, b"" if body is None else self._broadcast(body).numpy().tobytes()

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        what, tensor = "a message of rank 0", tensor.to(self._device)
        call = functools.partial(
            dist.broadcast, tensor, dist.get_global_rank(self.group, 0), group=self.group, async_op=True
        )
        _ranks.wait(WHO, what, [_ranks.guarded(WHO, what, call)], tensor, self.timeout)
        return tensor.cpu()

    def watch(self, event: Any) -> None:
        """Waits for work on a GPU in which sums may wait for other ranks. Raises PeerError."""
        limit = time.monotonic() + (GPU_SECONDS if self.timeout is None else self.timeout)
        while not event.query():
            if self._lost or time.monotonic() > limit:
                self._lost = True
                raise PeerError(f"{WHO}: rank {self.rank} of {self.size} waits: a rank ended or did not answer in time")
            time.sleep(0)
        if self._fused is not None and self._fused.failed:
            self._lost = True
            raise PeerError(f"{WHO}: rank {self.rank} of {self.size}: a sum has waited for a rank in vain")


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())


def _tensor(x: Any) -> torch.Tensor:
    """The same memory: NumPy has no bfloat16, and the host's arrays hold its bits."""
    if isinstance(x, torch.Tensor):
        return x
    tensor = torch.from_numpy(x)
    return tensor.view(torch.bfloat16) if x.dtype == np.uint16 else tensor


def _array(tensor: torch.Tensor, dtype: Any) -> np.ndarray:
    return tensor.view(torch.uint16).numpy() if dtype == np.uint16 else tensor.numpy()
