"""A batch whose sequences go on step by step together, each token chosen by the caller from the logits.

Made by `Engine.lockstep`, for choices that only the caller can make: processors and stopping criteria that are Python
functions of all tokens so far. Pages, prefixes and graphs are those of a scheduler; its queues are not used, so all
sequences hold their pages from the first step to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from .decode import Row
from .request import Request
from .sampling import SamplingOptions
from .scheduler import Scheduler

__all__ = ["Lockstep"]


class Lockstep:
    """A context manager: it gives the pages back at its end.

    >>> from flashkernel.generate import Engine, find_model, load_model
    >>> engine = Engine(load_model(find_model("demo"), device="cpu"))
    >>> with engine.lockstep([[10, 11], [12]], max_new_tokens=2) as batch:
    ...     first = batch.prefill()
    ...     second = batch.step(first.argmax(axis=-1))
    >>> first.shape == second.shape == (2, engine.model.vocab_size)
    True
    """

    def __init__(self, scheduler: Scheduler, prompts: Sequence[list[int]]):
        self._scheduler = scheduler
        plain = SamplingOptions()
        self._requests = [Request(i, i, prompt, 1, plain, frozenset()) for i, prompt in enumerate(prompts)]

    def __enter__(self) -> Lockstep:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        with self._scheduler.model.arrays.active():
            self._scheduler.model.arrays.wait()
        for request in self._requests:
            if request.handle is not None:
                if self._scheduler.prefix_sharing and kind is None:
                    tokens = request.tokens[: self._scheduler.cache.length(request.handle)]
                    self._scheduler.cache.publish(request.handle, np.array(tokens, np.int32))
                self._scheduler.cache.free(request.handle)
                request.handle = None

    def prefill(self) -> Any:
        """Logits [sequences, vocab] behind the prompts."""
        with self._scheduler.model.arrays.active():
            return self._prefill()

    def _prefill(self) -> Any:
        scheduler, arrays = self._scheduler, self._scheduler.model.arrays
        for request in self._requests:
            tokens = np.array(request.tokens, np.int32)
            request.handle = scheduler.cache.create(tokens) if scheduler.prefix_sharing else scheduler.cache.create()
            request.prefilled = scheduler.cache.length(request.handle)
            request.slots = scheduler.cache.append(request.handle, len(tokens) - request.prefilled)
        logits = arrays.activations((len(self._requests), scheduler.model.vocab_size))
        while any(len(request.slots) for request in self._requests):
            chunk, budget = [], scheduler.prefill_chunk
            for i, request in enumerate(self._requests):
                count = min(budget, len(request.slots))
                if count:
                    chunk.append((i, request, count))
                    budget -= count
            done = [i for i, request, count in chunk if count == len(request.slots)]
            counts = [(request, count) for _, request, count in chunk]
            found = scheduler.forward_prompts(counts)
            scheduler.count_prompts(counts)
            if done:
                logits[done] = found
        return logits

    def step(self, tokens: Sequence[int] | np.ndarray, running: Sequence[bool] | None = None) -> Any:
        """Appends a token to each sequence; logits [sequences, vocab] behind it, which the next step may overwrite.

        running: False for sequences that are left out: they take no token, and their logits say nothing.
        """
        scheduler = self._scheduler
        rows: list[Row | None] = []
        for i, request in enumerate(self._requests):
            if running is not None and not running[i]:
                rows.append(None)
                continue
            request.generated.append(int(tokens[i]))
            length = scheduler.cache.length(request.handle)
            slots = scheduler.cache.append(request.handle, 1)
            rows.append(Row(request, length, slots, scheduler.cache.pages(request.handle)))
        with scheduler.model.arrays.active():
            return scheduler.decoder.run_logits(rows, np.asarray(tokens, np.int64))
