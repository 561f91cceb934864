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
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import flashkernel as fk

from .choice import RowChoice, Scores
from .decode import Decoder, Row, row_bucket
from .errors import NonFiniteLogitsError
from .model import Model, PagedBatch
from .request import GenerationStats, Request, TokenEvent
from .sampling_options import wanted

__all__ = ["Scheduler"]

PREFILLS_IN_A_ROW = 4  # chunks of prompts, before running sequences get their turn

Events = list[tuple[Request, TokenEvent]]


@dataclass
class _Flight:
    """Decode steps that were started."""

    rows: list[Request | None]
    steps: int
    tokens: Callable[[], tuple[np.ndarray, np.ndarray, Scores | None]]


class Scheduler:
    """Requests over one pool of pages; the parameters are those of `Engine`, with their defaults filled in.

    max_tokens: most tokens of a request, prompt and new ones.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_pages: int,
        page_size: int,
        max_tokens: int,
        max_batch: int,
        prefill_chunk: int,
        steps: int,
        run_ahead: bool,
        prefix_sharing: bool,
        graphs: bool | None = None,
        kv_dtype: str | None = None,
    ):
        self.model, self.page_size, self.num_pages, self.max_tokens = model, page_size, num_pages, max_tokens
        self.max_batch, self.prefill_chunk, self.steps = max_batch, prefill_chunk, steps
        self.run_ahead, self.prefix_sharing = run_ahead, prefix_sharing
        self.pool = fk.KvPagePool(
            num_pages,
            model.heads_kv,
            model.head_dim,
            page_size=page_size,
            num_layers=model.num_layers,
            dtype=kv_dtype or model.arrays.dtype,
            device=model.arrays.device,
        )
        self.cache = fk.KvCache(self.pool)
        self.decoder = Decoder(
            model, self.pool, rows=max_batch, width=self.pages_for(max_tokens), steps=steps, graphs=graphs
        )
        self.waiting: list[Request] = []  # by order
        self.prefilling: list[Request] = []
        self.running: list[Request] = []  # by order
        self.failed: list[Request] = []  # those whose errors nobody has seen yet
        self.stats = GenerationStats()
        self._flights: deque[_Flight] = deque()
        self._prefills = 0
        self._rows_lost = False  # some steps of a flight ran and some did not: what rows hold on the device is unknown

    def __del__(self) -> None:
        if getattr(self, "_flights", None):  # steps that nobody waited for still use the pages and the graphs
            with contextlib.suppress(Exception):
                self.model.arrays.wait()

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    @property
    def idle(self) -> bool:
        """No request is left; steps of requests that have ended may still be under way on the device."""
        return not (self.waiting or self.prefilling or self.running)

    @property
    def pages_in_use(self) -> int:
        return int(self.cache.stats().num_pages_used)

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
            self._release(request)

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
            self._launch()
        if self._may_run_ahead():
            self._launch()
        events = self._collect()
        self.stats.decode_seconds += time.perf_counter() - begin
        self.stats.decode_tokens += len(events)
        return events

    # --- pages

    def _available(self) -> int:
        """Pages that can be taken: the free ones and those that only the prefix index holds."""
        stats = self.cache.stats()
        return int(stats.num_pages_free + stats.num_pages_cached)

    def _grows(self, request: Request) -> bool:
        """Whether the request may come to need a page more than its tokens fill now."""
        most = len(request.prompt) + request.max_new_tokens - 1
        return self.pages_for(most) > self.pages_for(len(request.prompt) + len(request.generated))

    def _release(self, request: Request, offer: bool = False) -> None:
        """Gives the pages of a request back; `offer`: the prefix index keeps its full pages while nobody needs them."""
        if request.handle is not None:
            if offer and self.prefix_sharing:
                self.cache.publish(request.handle, np.array(request.tokens[:-1], np.int32))
            self.cache.free(request.handle)
        request.handle, request.prefilled, request.in_flight, request.pages_dropped = None, 0, 0, 0
        request.slots = np.empty(0, np.int64)

    def _drop_unseen(self, request: Request, position: int) -> None:
        """Gives back the pages that no query from `position` on looks at: those wholly behind its window. Steps under
        way may still read them; whatever is written to them next is queued behind those steps.
        """
        if self.model.window is None:
            return
        seen = position - self.model.window + 1
        if seen // self.page_size <= request.pages_dropped:
            return
        if self.prefix_sharing:  # the index keeps them while nobody needs them
            self.cache.publish(request.handle, np.array(request.tokens[:seen], np.int32))
        self.cache.drop_before(request.handle, seen)
        request.pages_dropped = seen // self.page_size

    def _admit(self) -> None:
        while self.waiting and len(self.running) + len(self.prefilling) < self.max_batch:
            request = self.waiting[0]
            if self._awaits_prefix(request) or not self._reserve(request):
                return
            self.prefilling.append(self.waiting.pop(0))

    def _awaits_prefix(self, request: Request) -> bool:
        first = request.tokens[: self.page_size]
        return (
            self.prefix_sharing
            and len(request.tokens) > self.page_size
            and any(other.tokens[: self.page_size] == first for other in self.prefilling)
        )

    def _reserve(self, request: Request) -> bool:
        """Takes the pages of all tokens of a request, unless running ones are about to need them."""
        cache, tokens = self.cache, request.tokens
        active = self.running + self.prefilling
        handle = cache.create(np.array(tokens, np.int32)) if self.prefix_sharing else cache.create()
        try:
            found = cache.length(handle)
            wanted = self.pages_for(len(tokens)) - cache.num_pages(handle)
            if active and wanted + sum(map(self._grows, [*active, request])) > self._available():
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
        request = self.running.pop()
        self._release(request, offer=True)
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
        first, logits, scores = self._first_tokens(self.forward_prompts(chunk), ready)
        self.count_prompts(chunk)
        events: Events = []
        for i, (request, token, logit) in enumerate(zip(ready, first, logits, strict=True)):
            self.prefilling.remove(request)
            if self.prefix_sharing and np.isfinite(logit):
                self.cache.publish(request.handle, np.array(request.tokens, np.int32))
            bisect.insort(self.running, request, key=lambda running: running.order)
            events += self._accept(request, int(token), float(logit), scores, (0, i))
        return events

    def forward_prompts(self, chunk: list[tuple[Request, int]]) -> Any:
        """Computes the next tokens of some prompts, as many as stand beside each; logits behind those that are
        complete then.
        """
        arrays = self.model.arrays
        counts = np.array([count for _, count in chunk])
        cu_seqlens = np.concatenate([[0], np.cumsum(counts)])
        ends = np.array([request.prefilled + count for request, count in chunk])
        done = np.array([count == len(request.slots) for request, count in chunk])
        table, _ = self.cache.block_table([request.handle for request, _ in chunk])
        tokens = [request.tokens[request.prefilled : request.prefilled + count] for request, count in chunk]
        positions = [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
        self.stats.peak_pages = max(self.stats.peak_pages, self.pages_in_use)
        batch = PagedBatch(
            tokens=arrays.index(np.concatenate(tokens), "int64"),
            positions=arrays.index(np.concatenate(positions)),
            slots=arrays.index(np.concatenate([request.slots[:count] for request, count in chunk]), "int64"),
            cu_seqlens=arrays.index(cu_seqlens),
            max_seqlen=int(counts.max()),
            block_table=arrays.index(table),
            seq_lens=arrays.index(ends),
            last_rows=(cu_seqlens[1:] - 1)[done].astype(np.int64),
        )
        return self.model.forward(batch, self.pool)

    def count_prompts(self, chunk: list[tuple[Request, int]]) -> None:
        """Takes down that these tokens were computed; until then they can be computed again."""
        for request, count in chunk:
            request.slots = request.slots[count:]
            request.prefilled += count
            self.stats.prefill_tokens += count
            self._drop_unseen(request, request.prefilled)

    def _first_tokens(self, logits: Any, requests: list[Request]) -> tuple[np.ndarray, np.ndarray, Scores | None]:
        """A token for each request, its logit in float32, and log-probabilities where some request asks for them."""
        arrays, rows = self.model.arrays, len(requests)
        if not requests:
            return np.empty(0, np.int64), np.empty(0, np.float32), None
        kind = wanted(request.sampling for request in requests)
        choice = RowChoice(arrays, rows, 1, self.model.vocab_size)
        choice.reserve(kind)
        choice.load(requests, 1, kind, fresh=True)
        tokens = arrays.zeros((rows,), "int64")
        choice.choose(logits, rows, arrays.zeros((1,), "int64"), kind, tokens)
        found, values = arrays.fetch(tokens), arrays.fetch_float(arrays.at(logits, tokens))
        scores = choice.fetch_scores(1, kind)
        return found(), values(), scores()

    # --- decode

    def _pages_wanted(self, steps: int) -> int:
        lengths = [self.cache.length(request.handle) for request in self.running]
        return sum(self.pages_for(length + steps) - self.pages_for(length) for length in lengths)

    def _steps(self) -> int:
        return min(self.steps, *(request.remaining for request in self.running))

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
            and self._pages_wanted(self._steps()) <= self._available()
        )

    def _launch(self) -> None:
        """Starts decode steps of all running sequences. With no others in flight, rows are dealt anew and pages are
        made room for; else every sequence keeps its row, and the device has its last token.
        """
        fresh = not self._flights
        steps = self._steps()
        for running in self.running:
            self._drop_unseen(running, self.cache.length(running.handle))
        while fresh and self._pages_wanted(steps) > self._available() and (steps > 1 or len(self.running) > 1):
            if steps > 1:
                steps = 1
            else:
                self._preempt()
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
            self.stats.peak_pages = max(self.stats.peak_pages, self.pages_in_use)
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
                    events += self._accept(request, token, logit, scores, (step, i))
        return events

    def _accept(self, request: Request, token: int, logit: float, scores: Scores | None, at: tuple[int, int]) -> Events:
        """Takes a token down. at: its place in `scores`."""
        if not math.isfinite(logit):
            request.error = NonFiniteLogitsError(request.sequence, len(request.generated), logit)
            request.finish = "error"
            self.failed.append(request)
            self.running.remove(request)
            self._release(request)
            return []
        request.generated.append(token)
        if token in request.stop or (request.until is not None and request.until(token)):
            request.finish = "stop"
        elif len(request.generated) == request.max_new_tokens:
            request.finish = "length"
        if request.finish:
            self.running.remove(request)
            self._release(request, offer=True)
        event = TokenEvent(request.sequence, token, request.finish)
        if scores is not None and request.sampling.logprobs is not None:
            count = request.sampling.logprobs
            top = zip(scores.ids[at][:count].tolist(), scores.values[at][:count].tolist(), strict=True)
            event = replace(event, logprob=float(scores.chosen[at]), top=tuple(top))
        return [(request, event)]
