"""Which sequence runs when: waiting, prefill, decode; who gets pages, and who gives them back.

Used by engine.py; knows nothing of devices beyond what the model's arrays and the decoder do. Older requests go
first. A request is admitted when a row is free and the pages of all its tokens can be had; decode steps take pages as
lengths grow. Where none is left, the youngest sequence gives its pages back and is computed again later from its
prompt and what it has generated: nothing is lost. A request that would fit the pool alone therefore always comes to
its end.

Full pages are offered to later requests with the same beginning; a request whose first page is just being computed for
another one waits for that. Where every layer of a model has a sliding window, pages that lie wholly behind it go back
while the sequence runs on.

Decode steps run a few at a time. On an asynchronous device the next ones are started before the tokens of the last are
read, so that the device does not wait for the host; tokens of a sequence that has ended in between are dropped.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .choice import Scores
from .decode import Row, row_bucket
from .model import Model
from .request import Request
from .sequences import Events, Sequences
from .speculate import Speculator
from .speculation import DraftModel, Speculation

__all__ = ["Scheduler"]

PREFILLS_IN_A_ROW = 4  # chunks of prompts, before running sequences get their turn


@dataclass
class _Flight:
    """Decode steps that were started."""

    rows: list[Request | None]
    steps: int
    tokens: Callable[[], tuple[np.ndarray, np.ndarray, Scores | None]]


class Scheduler(Sequences):
    """Requests over one pool of pages; the parameters are those of `Engine`, with their defaults filled in.

    max_tokens: most tokens of a request, prompt and new ones.
    """

    def __init__(
        self, model: Model, *, run_ahead: bool, speculation: Speculation | None = None, num_pages: int, **options: Any
    ):
        super().__init__(model, num_pages=num_pages, **options)
        self.run_ahead = run_ahead
        # A draft may begin a page more than its sequence has.
        self._draft_options = {**options, "one_launch": False, "num_pages": num_pages + min(self.max_batch, num_pages)}
        self.speculator: Speculator | None = None
        self._kept: Speculator | None = None  # the last one
        self.speculate(speculation)
        self.waiting: list[Request] = []  # by order
        self.prefilling: list[Request] = []
        self._flights: deque[_Flight] = deque()
        self._prefills = 0
        self._rows_lost = False  # some steps of a flight ran and some did not: what rows hold on the device is unknown

    def __del__(self) -> None:
        if getattr(self, "_flights", None):  # steps that nobody waited for still use the pages and the graphs
            with contextlib.suppress(Exception):
                self.model.arrays.wait()

    def speculate(self, speculation: Speculation | None) -> None:
        """How drafts are made from now on; the scheduler is idle. What was measured for the same ones before stays."""
        if speculation is None:
            self.speculator = None
            return
        if self._kept is None or self._kept.speculation != speculation:
            self._kept = None  # gives the pages of its draft model back first
            drafts = None
            if isinstance(speculation, DraftModel):
                sizes = {"max_tokens": self.max_tokens + speculation.tokens + 1, "steps": speculation.tokens + 1}
                drafts = Sequences(speculation.model, **{**self._draft_options, **sizes})
            self._kept = Speculator(self, speculation, drafts)
        self.speculator = self._kept
        self.speculator.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Drops the pages that are kept for prompts to come."""
        self.cache.drop_cached()
        if self._kept is not None:
            self._kept.forget_prefixes()

    @property
    def idle(self) -> bool:
        """No request is left; steps of requests that have ended may still be under way on the device."""
        return not (self.waiting or self.prefilling or self.running)

    def fits(self, request: Request) -> bool:
        """Whether the request could run if it were alone. Its last token is never appended."""
        tokens = len(request.prompt) + request.max_new_tokens
        return tokens <= self.max_tokens and self.pages_for(tokens - 1) <= self.num_pages

    def submit(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=lambda waiting: waiting.order)

    def cancel(self, request: Request) -> None:
        """Ends a request without a last event; its pages are free at once. Nothing happens if it has ended."""
        if request.finish is None:
            request.finish = "cancelled"
            for queue in (self.waiting, self.prefilling, self.running):
                if request in queue:
                    queue.remove(request)
            self.release(request)

    def step(self) -> Events:
        """Admits what can be admitted, computes a chunk of prompts or some decode steps, and returns new tokens.

        May return none while requests are left. Raises OutOfPagesError if others hold the pool's pages.
        """
        begin = time.perf_counter()
        while self._flights and all(request is None or request.finish for request in self._flights[0].rows):
            self._flights.popleft()  # nobody wants their tokens; what is queued next runs after them
        if not self._flights:
            self._admit()
            if self.prefilling and (not self.running or self._prefills < PREFILLS_IN_A_ROW):
                self._prefills += 1
                events = self._prefill()
                self.stats.prefill_seconds += time.perf_counter() - begin
                return events
            self._prefills = 0
            if not self.running:
                return []
            drafted = None if self.speculator is None else self.speculator.step()
            if drafted is not None:
                self._count_decode(begin, drafted)
                return drafted
            self._launch()
            if not self._flights:
                return []
        if self._may_run_ahead():
            self._launch()
        flight = self._flights[0]
        events = self._collect()
        seconds = self._count_decode(begin, events)
        if self.speculator is not None:
            self.speculator.count_plain(sum(row is not None for row in flight.rows), seconds / flight.steps)
        return events

    def _count_decode(self, begin: float, events: Events) -> float:
        seconds = time.perf_counter() - begin
        self.stats.decode_seconds += seconds
        self.stats.decode_tokens += len(events)
        return seconds

    # --- pages

    def left(self, request: Request) -> None:
        if self.speculator is not None:
            self.speculator.forget(request)

    def _grows(self, request: Request) -> bool:
        """Whether the request may come to need a page more than its tokens fill now."""
        most = len(request.prompt) + request.max_new_tokens - 1
        # The last token that was generated is not in the cache yet.
        held = len(request.tokens) if request.handle is None else self.cache.length(request.handle)
        return self.pages_for(most) > self.pages_for(held)

    def _admit(self) -> None:
        if not self.waiting:
            return
        growing = sum(map(self._grows, self.running)) + sum(map(self._grows, self.prefilling))
        while self.waiting and len(self.running) + len(self.prefilling) < self.max_batch:
            request = self.waiting[0]
            growing += self._grows(request)
            if self._awaits_prefix(request) or not self._reserve(request, growing):
                return
            self.prefilling.append(self.waiting.pop(0))

    def _awaits_prefix(self, request: Request) -> bool:
        first = request.tokens[: self.page_size]
        return (
            self.prefix_sharing
            and len(request.tokens) > self.page_size
            and any(other.tokens[: self.page_size] == first for other in self.prefilling)
        )

    def _reserve(self, request: Request, growing: int) -> bool:
        """Takes the pages of all tokens of a request, unless running ones are about to need them. growing: how many
        requests may need a page more, this one included.
        """
        cache, tokens = self.cache, request.tokens
        handle = cache.create(np.array(tokens, np.int32)) if self.prefix_sharing else cache.create()
        try:
            found = cache.length(handle)
            wanted = self.pages_for(len(tokens)) - cache.num_pages(handle)
            if (self.running or self.prefilling) and wanted + growing > self.pages_available():
                cache.free(handle)
                return False
            request.slots = cache.append(handle, len(tokens) - found)
        except Exception:
            cache.free(handle)
            self.waiting.remove(request)
            raise
        request.handle, request.prefilled = handle, found
        self.stats.prefix_tokens += found
        return True

    def _preempt(self) -> None:
        """The youngest of all that hold pages gives them back, also one whose prompt is still being computed."""
        request = max(self.running + self.prefilling, key=lambda request: request.order)
        queue = self.running if request in self.running else self.prefilling
        queue.remove(request)
        self.release(request, offer=queue is self.running)
        self.submit(request)
        self.stats.preemptions += 1

    # --- prefill

    def _prefill(self) -> Events:
        """Computes up to `prefill_chunk` tokens of admitted requests; the first tokens of those that are complete."""
        budget = self.prefill_chunk
        chunk: list[tuple[Request, int]] = []
        for request in self.prefilling:
            if budget:
                count = min(budget, len(request.slots))
                chunk.append((request, count))
                budget -= count
        ready = [request for request, count in chunk if count == len(request.slots)]
        first, logits, scores = self.choose_tokens(self.forward_prompts(chunk), ready)
        self.count_prompts(chunk)
        events: Events = []
        for i, (request, token, logit) in enumerate(zip(ready, first, logits, strict=True)):
            self.prefilling.remove(request)
            if self.prefix_sharing and np.isfinite(logit):
                self.cache.publish(request.handle, np.array(request.tokens, np.int32))
            bisect.insort(self.running, request, key=lambda running: running.order)
            events += self.accept(request, int(token), float(logit), scores, (0, i))
        return events

    # --- decode

    def _pages_wanted(self, steps: int) -> int:
        return self.pages_wanted([steps] * len(self.running))

    def _steps(self) -> int:
        most = self.steps if self.speculator is None else min(self.steps, self.speculator.most_steps())
        return min(most, *(request.remaining for request in self.running))

    def _may_run_ahead(self) -> bool:
        return bool(
            self.run_ahead
            and not self._rows_lost
            and len(self._flights) == 1
            and self.running
            and not self.prefilling
            and not (self.waiting and len(self.running) < self.max_batch)
            and row_bucket(len(self.running)) == row_bucket(len(self._flights[0].rows))  # else fewer rows would do
            and self._steps() >= 1
            and self._pages_wanted(self._steps()) <= self.pages_available()
            and (self.speculator is None or self.speculator.may_run_ahead())
        )

    def _launch(self) -> None:
        """Starts decode steps of all running sequences. With no others in flight, rows are dealt anew and pages are
        made room for; else every sequence keeps its row, and the device has its last token.
        """
        fresh = not self._flights
        steps = self._steps()
        for running in self.running:
            self.drop_unseen(running, self.cache.length(running.handle))
        while fresh and self._pages_wanted(steps) > self.pages_available():
            if steps > 1:
                steps = 1
            elif len(self.running) + len(self.prefilling) > 1:
                self._preempt()
            else:
                break  # others hold the pool's pages, which append tells
        if not self.running:
            return  # it was younger than those whose prompts are computed
        if fresh:
            self._rows_lost = False
            requests: list[Request | None] = list(self.running)
        else:
            requests = [None if r is None or r.finish else r for r in self._flights[-1].rows]
        rows: list[Row | None] = []
        draws = [(r, r.random.place) for r in requests if r is not None and not r.sampling.greedy]
        try:
            for request in requests:
                if request is None:
                    rows.append(None)
                    continue
                length = self.cache.length(request.handle)
                slots = self.cache.append(request.handle, steps)
                rows.append(Row(request, length, slots, self.cache.pages(request.handle)))
            self.count_pages()
            last = np.array([r.generated[-1] for r in requests if r is not None], np.int64) if fresh else None
            tokens = self.decoder.run(rows, steps, last)
        except BaseException:
            self._rows_lost = True
            for row in rows:  # as it was: the caller may try again
                if row is not None:
                    self.cache.truncate(row.request.handle, row.length)
            for request, place in draws:
                request.random.place = place
            raise
        for row in rows:
            if row is not None:
                row.request.in_flight += steps
        self._flights.append(_Flight(requests, steps, tokens))

    def _collect(self) -> Events:
        flight = self._flights.popleft()
        tokens, logits, scores = flight.tokens()
        for request in flight.rows:
            if request is not None and request.finish is None:
                request.in_flight -= flight.steps
        events: Events = []
        for step in range(flight.steps):
            for i, request in enumerate(flight.rows):
                if request is not None and request.finish is None:
                    token, logit = int(tokens[step, i]), float(logits[step, i])
                    events += self.accept(request, token, logit, scores, (step, i))
        return events
