"""Processes of a gloo group: started once, then asked case after case.

A case is a function of a module: it runs on every rank at the same time. context_parallel_cases.py and
tensor_parallel_cases.py have them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 120.0  # seconds that a test waits for an answer


class Ranks:
    """`size` processes; `ask` runs a function on each and gives what each returned or raised."""

    def __init__(self, size: int, folder: Path, timeout: float = 60.0):
        context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        if sys.platform == "linux":  # torch is imported once, and each process is a fork of the one that did it
            context.set_forkserver_preload(["flashkernel.torch.context_parallel", "flashkernel.generate"])
        self._pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, size, str(folder / "store"), timeout))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def ask(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((case, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(LIMIT), f"rank {rank} hangs in {case.__name__}{args}"
            try:
                answers.append(pipe.recv())
            except EOFError:
                answers.append(None)  # it has ended
        return answers

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()


def serve(pipe: Any, rank: int, size: int, store: str, timeout: float) -> None:
    import datetime

    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    import flashkernel as fk

    torch.set_num_threads(1)
    fk.set_num_threads(1)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    pairs = dist.new_group([0, 1]) if size > 2 else None
    while True:
        try:
            case, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(case(pairs, *args))
        except Exception as error:
            place = traceback.format_exc() if isinstance(error, AssertionError) else ""
            pipe.send(f"{type(error).__name__}: {error}\n{place}")
