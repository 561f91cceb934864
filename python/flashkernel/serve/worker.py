"""The engine's thread: takes requests from the event loop, runs the engine's steps, and gives text back.

One thread owns the engine, so that its steps never wait for a socket; requests, cancels and text pass by queues. Texts
are decoded here, since a stop string ends its sequence between two steps.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..generate import Engine, NonFiniteLogitsError, TextOutput, TextTokenizer, TokenEvent
from ..generate.request import Request
from .metrics import Metrics
from .protocol import Call

__all__ = ["Job", "Piece", "Worker"]


@dataclass(frozen=True)
class Piece:
    """What a step gave one sequence of a job: text that may be shown now, and the token behind it."""

    index: int
    text: str
    event: TokenEvent
    stop_token: bool  # the token only says that the text ends
    place: int  # in the text, of the first character of the token


class Job:
    """A call under way. `pieces` gives Piece, or an exception as the last thing; at most max_tokens of each sequence
    lie in it, however slow its reader is.
    """

    def __init__(self, call: Call):
        self.call, self.begin = call, time.perf_counter()
        self.pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        self.open = call.sequences  # sequences that have not ended
        self.started = False  # whether the first token has come


class _Sequence:
    """One sequence of a job, in the engine's thread."""

    def __init__(self, job: Job, index: int, tokenizer: TextTokenizer, prompt: list[int]):
        self.job, self.index = job, index
        self.output = TextOutput(tokenizer, prompt, job.call.stop)
        self.texts: deque[tuple[str, int]] = deque()
        self.error: Exception | None = None

    def until(self, token: int) -> bool:
        try:
            place = self.output.place
            self.texts.append((self.output.put(token), place))
        except Exception as error:  # of the tokenizer: it must not end the engine's step
            self.error = error
            return True
        return self.output.stopped


class Worker:
    """Owns `engine` from `start` to the end of `close`."""

    def __init__(self, engine: Engine, tokenizer: TextTokenizer, metrics: Metrics):
        self.engine, self.tokenizer, self.metrics = engine, tokenizer, metrics
        self.sequences = 0  # accepted and not yet ended; touched by the event loop alone
        self._inbox: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._closing = False
        self._active: dict[Request, _Sequence] = {}
        self._thread = threading.Thread(target=self._run, name="flashkernel-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Returns when every request that was submitted has ended. The event loop must go on meanwhile."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    # --- called by the event loop

    def submit(self, call: Call) -> Job:
        job = Job(call)
        self.sequences += call.sequences
        self._post(lambda: self._start(job))
        return job

    def cancel(self, job: Job) -> None:
        """Ends the sequences of a job and frees their pages; nothing happens if they have ended."""
        if job.open:
            self.sequences -= job.open
            job.open = 0
            self.metrics.cancelled.inc()
            self._post(lambda: self._cancel(job))

    def _post(self, action: Callable[[], None]) -> None:
        with self._changed:
            self._inbox.append(action)
            self._changed.notify()

    def _deliver(self, news: list[tuple[Job, Piece | Exception]]) -> None:
        for job, piece in news:
            if not job.open:
                continue  # cancelled meanwhile
            ended = job.open if isinstance(piece, Exception) else int(piece.event.finish is not None)
            job.open -= ended
            self.sequences -= ended
            job.pieces.put_nowait(piece)
            if not job.open:
                self.metrics.seconds.observe(time.perf_counter() - job.begin)

    # --- the engine's thread

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # nobody would wake those who wait for an answer
            stopped = error if isinstance(error, Exception) else RuntimeError("the engine's thread has ended")
            self._fail_all(stopped)
            raise

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not (self._inbox or self._active or self._closing):
                    self._changed.wait()
                actions, self._inbox = self._inbox, []
                if self._closing and not actions and not self._active:
                    return
            for action in actions:
                action()
            if self._active:
                self._step()
            self._measure()

    def _start(self, job: Job) -> None:
        call = job.call
        prompts = [prompt for prompt in call.prompts for _ in range(call.n)]
        try:
            for index, prompt in enumerate(prompts):
                sequence = _Sequence(job, index, self.tokenizer, prompt)
                request = self.engine.submit(
                    prompt,
                    max_new_tokens=call.max_tokens,
                    sampling=call.sampling,
                    stop_tokens=frozenset() if call.ignore_eos else None,
                    sequence=index,
                    until=sequence.until,
                    stop_strings=call.stop,
                )
                self._active[request] = sequence
                self.metrics.prompt_tokens.inc(len(prompt))
        except Exception as error:
            self._fail(job, error)

    def _cancel(self, job: Job) -> None:
        for request in [request for request, sequence in self._active.items() if sequence.job is job]:
            del self._active[request]
            self.engine.cancel(request)

    def _fail(self, job: Job, error: Exception) -> None:
        self._cancel(job)
        news: list[tuple[Job, Piece | Exception]] = [(job, error)]
        job.loop.call_soon_threadsafe(self._deliver, news)

    def _step(self) -> None:
        failure: Exception | None = None
        before = self._drafted()
        try:
            self.engine.step()
        except NonFiniteLogitsError:
            pass  # the request that it belongs to says so
        except Exception as error:
            failure = error
        news: list[tuple[Job, Piece | Exception]] = []
        for request, sequence in list(self._active.items()):
            news += self._news(request, sequence)
        if news:
            news[0][0].loop.call_soon_threadsafe(self._deliver, news)
        metrics = self.metrics
        counters = (metrics.drafts, metrics.drafted_tokens, metrics.accepted_tokens)
        for counter, new, old in zip(counters, self._drafted(), before, strict=True):
            counter.inc(max(0, new - old))  # a new cache counts from 0
        if failure is not None:  # whose fault it is cannot be told
            self._fail_all(failure)

    def _drafted(self) -> tuple[int, int, int]:
        stats = self.engine.stats
        return stats.drafts, stats.drafted_tokens, stats.accepted_tokens

    def _fail_all(self, error: Exception) -> None:
        for job in {id(sequence.job): sequence.job for sequence in self._active.values()}.values():
            self._fail(job, error)

    def _news(self, request: Request, sequence: _Sequence) -> list[tuple[Job, Piece | Exception]]:
        """What a step gave one sequence; it is left when it has ended."""
        job, found = sequence.job, list[tuple[Job, Piece | Exception]]()
        while request.outbox:
            event = request.outbox.popleft()
            text, place = sequence.texts.popleft() if sequence.texts else ("", sequence.output.place)
            if event.finish:
                text += sequence.output.end()
            if not job.started:
                job.started = True
                self.metrics.first_token.observe(time.perf_counter() - job.begin)
            self.metrics.new_tokens.inc()
            found.append((job, Piece(sequence.index, text, event, event.token in request.stop, place)))
        error = sequence.error or request.error
        if error is not None:
            self._cancel(job)
            return [(job, error)]
        if request.finish:
            del self._active[request]
        return found

    def _measure(self) -> None:
        engine, metrics = self.engine, self.metrics
        if engine.running:
            metrics.batch.observe(engine.running)
        metrics.running.set(engine.running)
        metrics.waiting.set(engine.waiting)
        metrics.pages_used.set(engine.pages_in_use)
        metrics.preemptions.set(engine.stats.preemptions)
