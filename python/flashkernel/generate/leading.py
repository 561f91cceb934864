"""An engine that one rank leads: its calls are told to the other ranks of the model, which repeat them.

Every rank of a tensor-parallel model has to make the same calls of its engine in the same order (tensor_parallel.py).
A server and a conversation have their callers on one rank alone: rank 0 has a `LeadingEngine`, each other rank
`follow`s it until it is dismissed.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flashkernel as fk

from ..torch._ranks import PeerError
from .engine import Engine
from .errors import NonFiniteLogitsError
from .model import Model
from .request import Request, token_ids
from .sampling_options import SamplingOptions
from .sequences import Events
from .text_output import TextOutput, check_stop_strings
from .tokenizer import TextTokenizer

__all__ = ["LeadingEngine", "follow"]

STEP, CALL, STILL_HERE, DISMISSED = range(4)
BEAT_SECONDS = 10.0  # how often an idle leader says that it is still there: groups give up after minutes
# What a call may raise on every rank alike. Anything else is one rank's own trouble, and ends a follower.
ALIKE = (ValueError, TypeError, fk.OutOfPagesError, NonFiniteLogitsError)


class LeadingEngine(Engine):
    """The engine of rank 0 whose `submit`, `step`, `cancel` and `reserve` the other ranks repeat.

    Takes Engine's arguments. Other calls of it that need all ranks (`generate`, `lockstep`, `score`) are refused.
    Raises ValueError where the model is not shared, or this is not rank 0.

    >>> import torch.distributed as dist
    >>> from flashkernel.generate import find_model, load_model
    >>> from flashkernel.generate.leading import LeadingEngine
    >>> from flashkernel.generate.tensor_parallel import TensorParallel
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = load_model(find_model("demo"), device="cpu", tensor_parallel=TensorParallel())
    >>> with LeadingEngine(model).leading() as engine:
    ...     request = engine.submit([10, 11, 12], max_new_tokens=2)
    ...     while request.finish is None:
    ...         _ = engine.step()
    >>> len(request.generated)
    2
    >>> dist.destroy_process_group()
    """

    def __init__(self, model: Model, **options: Any):
        if model.parallel is None or model.parallel.rank != 0:
            raise ValueError("generate: LeadingEngine is for rank 0 of a model that several ranks share")
        super().__init__(model, **options)
        self._parallel = model.parallel
        self._numbers: weakref.WeakKeyDictionary[Request, int] = weakref.WeakKeyDictionary()
        self._told = 0  # requests so far
        self._spoke = threading.Event()  # since the last look
        self._dismissed = threading.Event()

    @contextlib.contextmanager
    def leading(self) -> Iterator[LeadingEngine]:
        """The followers are held meanwhile, and dismissed at the end."""
        beat = threading.Thread(target=self._beat, name="flashkernel-leader", daemon=True)
        beat.start()
        try:
            yield self
        finally:
            self._dismissed.set()
            beat.join()
            with self.turn, contextlib.suppress(PeerError):  # whom nobody follows any more has nobody to dismiss
                self._parallel.tell(DISMISSED)

    def _beat(self) -> None:
        seconds = BEAT_SECONDS if self._parallel.timeout is None else min(BEAT_SECONDS, self._parallel.timeout / 4)
        while not self._dismissed.wait(seconds):
            if self._spoke.is_set():
                self._spoke.clear()
                continue
            with self.turn, contextlib.suppress(PeerError):  # the next call finds it, too
                self._parallel.tell(STILL_HERE)

    def _tell(self, kind: int, *call: Any) -> None:
        if self._dismissed.is_set():
            raise RuntimeError("generate: the ranks that followed this engine are dismissed; another one is needed")
        self._spoke.set()
        self._parallel.tell(kind, pickle.dumps(call) if call else b"")

    def _agree(self, name: str, *arguments: Any) -> None:
        if name not in ("Engine", "submit", "reserve"):
            raise ValueError(
                f"generate: {name} of a LeadingEngine, whose followers repeat submit, step, cancel and reserve; one of "
                "them is needed"
            )
        super()._agree(name, *arguments)

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int = 128,
        sampling: SamplingOptions | None = None,
        stop_tokens: frozenset[int] | set[int] | None = None,
        sequence: int = 0,
        until: Callable[[int], bool] | None = None,
        stop_strings: Sequence[str] = (),
    ) -> Request:
        """`Engine.submit`. What `until` answers counts where there are stop_strings, since the followers look for these
        by themselves; they need a tokenizer for it.
        """
        ids, strings = token_ids(prompt, "the prompt"), check_stop_strings(stop_strings)
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "sampling": sampling,
            "stop_tokens": stop_tokens,
            "sequence": sequence,
        }
        with self.turn:
            self._tell(CALL, "submit", ids, options, strings)
            number = self._told = self._told + 1
            request = super().submit(ids, until=until if strings or until is None else _watched(until), **options)
            self._numbers[request] = number
        return request

    def step(self) -> Events:
        with self.turn:
            self._tell(STEP)
            return super().step()

    def cancel(self, request: Request) -> None:
        with self.turn:
            self._tell(CALL, "cancel", self._numbers[request])
            super().cancel(request)

    def reserve(self, tokens: int) -> None:
        with self.turn:
            self._tell(CALL, "reserve", tokens)
            super().reserve(tokens)

    def forget_prefixes(self) -> None:
        with self.turn:
            self._tell(CALL, "forget_prefixes")
            super().forget_prefixes()


def _watched(until: Callable[[int], bool]) -> Callable[[int], bool]:
    def go_on(token: int) -> bool:
        until(token)
        return False

    return go_on


def _stops(tokenizer: TextTokenizer | None, prompt: list[int], strings: Sequence[str]) -> Callable[[int], bool]:
    if tokenizer is None:
        raise ValueError("generate: a follower without a tokenizer and a request with stop strings; it needs one")
    output = TextOutput(tokenizer, prompt, strings)

    def until(token: int) -> bool:
        try:
            return output.until(token)
        except Exception:  # of the tokenizer; the leader ends the sequence, too
            return True

    return until


def follow(engine: Engine, tokenizer: TextTokenizer | None = None) -> None:
    """Repeats what rank 0's LeadingEngine does until it dismisses its followers.

    engine: with the same arguments as rank 0's. tokenizer: for requests with stop strings.
    Raises PeerError where rank 0 has ended, and what only this rank's engine raises.
    """
    parallel = engine.model.parallel
    if parallel is None or parallel.rank == 0:
        raise ValueError("generate: follow is for the ranks of a shared model other than 0")
    follower = _Follower(engine, tokenizer)
    while True:
        kind, payload = parallel.hear()
        if kind == DISMISSED:
            return
        with contextlib.suppress(*ALIKE):
            if kind == STEP:
                follower.step()
            elif kind == CALL:
                name, *arguments = pickle.loads(payload)
                getattr(follower, name)(*arguments)


class _Follower:
    """The calls of a LeadingEngine, by name."""

    def __init__(self, engine: Engine, tokenizer: TextTokenizer | None):
        self.engine, self.tokenizer = engine, tokenizer
        self._requests: dict[int, Request] = {}
        self._told = 0

    def submit(self, ids: list[int], options: dict[str, Any], strings: Sequence[str]) -> None:
        self._told += 1
        until = _stops(self.tokenizer, ids, strings) if strings else None
        self._requests[self._told] = self.engine.submit(ids, until=until, **options)

    def step(self) -> None:
        try:
            self.engine.step()
        finally:
            self._requests = {n: request for n, request in self._requests.items() if request.finish is None}

    def cancel(self, number: int) -> None:
        request = self._requests.pop(number, None)
        if request is not None:
            self.engine.cancel(request)

    def reserve(self, tokens: int) -> None:
        self.engine.reserve(tokens)

    def forget_prefixes(self) -> None:
        self.engine.forget_prefixes()
