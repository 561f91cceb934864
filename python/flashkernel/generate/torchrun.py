"""`--tensor-parallel` of the commands: the group of torchrun's processes, of which the first one talks and is followed.

Used by the commands generate, chat and serve.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

from .engine import Engine
from .errors import MissingDependencyError
from .model import Model
from .tokenizer import TextTokenizer

__all__ = ["led", "make_engine", "shared", "torchrun_group"]


def torchrun_group(command: str, device: str) -> Any:
    """The processes' TensorParallel. Raises ValueError outside of torchrun."""
    if "LOCAL_RANK" not in os.environ:
        raise ValueError(
            f"{command}: --tensor-parallel without torchrun; run "
            f"`torchrun --nproc-per-node 2 -m flashkernel {command} --tensor-parallel ...`"
        )
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(f"{command}: --tensor-parallel needs torch; run `pip install torch`") from error
    from .tensor_parallel import TensorParallel

    if device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group()  # gloo for the host and NCCL where there are GPUs
    return TensorParallel()


@contextlib.contextmanager
def shared(command: str, args: argparse.Namespace) -> Iterator[Any]:
    """The group where a command has `--tensor-parallel`, else None; ends it. The first process writes for all."""
    group = torchrun_group(command, args.device) if args.tensor_parallel else None
    try:
        with quiet() if group is not None and group.rank else contextlib.nullcontext():
            yield group
    finally:
        if group is not None:
            group.close()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing that is written comes out."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def make_engine(model: Model, group: Any, **options: Any) -> Engine:
    """The engine of a command whose callers are at the first process: there it leads those of the others."""
    if group is None or group.rank:
        return Engine(model, **options)
    from .leading import LeadingEngine

    return LeadingEngine(model, **options)


@contextlib.contextmanager
def led(engine: Engine, tokenizer: TextTokenizer) -> Iterator[bool]:
    """Whether this process is one that callers talk to. The others follow it here, until its block ends.

    Signals are the first process's, which ends its answers, and then the others.
    """
    if engine.model.parallel is None:
        yield True
        return
    from .leading import LeadingEngine, follow

    if isinstance(engine, LeadingEngine):
        with engine.leading():
            yield True
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        follow(engine, tokenizer)
        yield False
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
