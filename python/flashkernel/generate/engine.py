"""Text generation: the engine that a caller talks to. It sizes the cache and hands requests to the scheduler.

`Engine.generate` yields the tokens of a batch as they come; `submit`, `step` and `cancel` let requests come and go
while others run. A sequence gives its pages back as soon as it ends, and all do when the caller stops early or
anything raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

import flashkernel as fk

from .alone import LEFT_BEHIND, Turn, alone
from .lockstep import Lockstep
from .model import HostBatch, Model, PagedBatch
from .request import GenerationStats, Request, TokenEvent, check_request, token_ids
from .sampling import SamplingOptions
from .scheduler import Scheduler
from .sequences import Events
from .speculation import Speculation, check_speculation
from .text_output import TextOutput, check_stop_strings
from .tokenizer import TextTokenizer

KV_DTYPES = {"fp8": "float8_e4m3fn", "float8_e4m3fn": "float8_e4m3fn", "int8": "int8", "int4": "int4"}
MIN_TOKENS = 4096  # of a sequence, that page tables have room for where the model can have as many

__all__ = ["Engine", "GenerationStats", "Request", "TokenEvent", "check_request"]


class Engine:
    """Runs a model over a paged KV-cache.

    page_size: tokens per page: 16, 32, 64, 128 or 256.
    num_pages: pages of the pool; None: as many as the requests at hand can need at most. With fewer, requests wait for
        pages, and the youngest may have to be computed again.
    prefill_chunk: most prompt tokens in one forward step, which bounds the memory of activations; None: 2048 on the
        CPU, 8192 on a GPU.
    max_batch: most sequences at once; others wait.
    steps: decode steps between two looks at their tokens; None: 1 on the CPU, 8 on a GPU.
    run_ahead: start the next steps before the last ones are read; None: on a GPU.
    prefix_sharing: keep full pages for later requests that begin with the same tokens.
    graphs: replay decode steps, and short prompts of a shape that came before, as CUDA graphs; None: on a GPU.
    kv_dtype: elements of the cache, for less memory and less accuracy (docs/low_precision.md): "fp8" (float8_e4m3fn) or
        "int8" with a scale a token and head, half of 16 bits; "int4" with a scale and a zero for 32 elements, 0.31 of
        them; None: the model's dtype. Latent rows of DeepSeek: "fp8" alone (docs/ops/mla.md), 0.57 of 16 bits.
    one_launch: compute decode steps by one op, `flashkernel.decode_step` (docs/ops/decode_step.md): of up to 8 rows in
        one launch on a GPU of 9.0, of any number on the CPU. For plain decoders of Llama's kind, whose matrices are
        copied into stacks; UnsupportedModelError for others, when the cache is made. None: where it is faster. That
        is for such a model on a GPU with memory for another copy of its largest kind of matrices, and on the CPU if
        its matrices take up to 4 GiB.
    speculation: `PromptLookup` or `DraftModel`: steps verify guessed tokens, which changes no token
        (docs/speculation.md).

    A sequence whose logits are not finite (NaN, +inf, or all -inf) ends with NonFiniteLogitsError; the others go on.

    One thread at a time: a call while another thread is inside raises RuntimeError. On a GPU all calls belong on one
    stream. Of a model that several ranks share (docs/tensor_parallel.md) every rank has an engine and makes the same
    calls in the same order.
    """

    def __init__(
        self,
        model: Model,
        *,
        page_size: int = 256,
        num_pages: int | None = None,
        prefill_chunk: int | None = None,
        max_batch: int = 64,
        steps: int | None = None,
        run_ahead: bool | None = None,
        prefix_sharing: bool = True,
        graphs: bool | None = None,
        kv_dtype: str | None = None,
        speculation: Speculation | None = None,
        one_launch: bool | None = None,
    ):
        asynchronous = model.arrays.asynchronous
        steps = (8 if asynchronous else 1) if steps is None else steps
        prefill_chunk = (8192 if asynchronous else 2048) if prefill_chunk is None else prefill_chunk
        for name, value in (("prefill_chunk", prefill_chunk), ("max_batch", max_batch), ("steps", steps)):
            if value < 1:
                raise ValueError(f"generate: {name}={value}; an integer >= 1 is needed")
        if num_pages is not None and num_pages < 1:
            raise ValueError(f"generate: num_pages={num_pages}; an integer >= 1 is needed")
        if kv_dtype is not None and kv_dtype not in KV_DTYPES:
            raise ValueError(f"generate: kv_dtype={kv_dtype!r}; None or one of {', '.join(KV_DTYPES)} is needed")
        model.check_kv_dtype(kv_dtype)
        check_speculation(speculation, model)
        self.model = model
        self.page_size = page_size
        self.num_pages = num_pages
        self.max_batch = max_batch
        self._options: dict[str, Any] = {
            "prefill_chunk": prefill_chunk,
            "max_batch": max_batch,
            "steps": steps,
            "run_ahead": asynchronous if run_ahead is None else run_ahead,
            "prefix_sharing": prefix_sharing,
            "graphs": graphs,
            "kv_dtype": None if kv_dtype is None else KV_DTYPES[kv_dtype],
            "speculation": speculation,
            "one_launch": one_launch,
        }
        self.turn = Turn(self)
        self._scheduler: Scheduler | None = None
        self._backlog: list[Request] = []  # requests that need a larger cache, which is made when this one is idle
        self._submitted = 0
        self._agree("Engine", page_size, num_pages, self._options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("Engine: it holds a cache of pages, which is neither copied nor pickled; make another one")

    def abandon(self) -> None:
        """Forgets all requests and pages without giving them back: for the child of a fork in the midst of a step."""
        LEFT_BEHIND.append(self._scheduler)
        self._scheduler, self._backlog = None, []

    def active(self) -> AbstractContextManager[Any]:
        """Makes the model's device the current one."""
        return self.model.arrays.active()

    def _agree(self, name: str, *arguments: Any) -> None:
        """Raises ValueError where the ranks that share the model make different calls."""
        if self.model.parallel is not None:
            self.model.parallel.agree(name, arguments)

    @property
    def stats(self) -> GenerationStats:
        """Counts and times since the engine was last idle."""
        return GenerationStats() if self._scheduler is None else self._scheduler.stats

    @property
    def pages_in_use(self) -> int:
        """Pages that sequences hold now."""
        return 0 if self._scheduler is None else self._scheduler.pages_in_use

    @property
    def idle(self) -> bool:
        return not self._backlog and (self._scheduler is None or self._scheduler.idle)

    @property
    def running(self) -> int:
        """Sequences that have pages: those whose prompts are being computed, and those that decode."""
        scheduler = self._scheduler
        return 0 if scheduler is None else len(scheduler.prefilling) + len(scheduler.running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a row, for pages or for a larger cache."""
        return len(self._backlog) + (0 if self._scheduler is None else len(self._scheduler.waiting))

    @property
    def speculation(self) -> Speculation | None:
        """How drafts are made. Set while requests run, it raises ValueError."""
        found: Speculation | None = self._options["speculation"]
        return found

    @speculation.setter
    @alone
    def speculation(self, speculation: Speculation | None) -> None:
        check_speculation(speculation, self.model)
        if speculation == self.speculation:
            return
        if not self.idle:
            raise ValueError("generate: speculation was set while requests run; an idle engine is needed")
        self._options["speculation"] = speculation
        if self._scheduler is not None:
            self._scheduler.speculate(speculation)

    @alone
    def reserve(self, tokens: int) -> None:
        """Makes the cache now, with num_pages, for sequences of up to that many tokens: none of them waits for a larger
        one later. Raises ValueError while requests run.
        """
        if not self.idle:
            raise ValueError("generate: reserve while requests run; an idle engine is needed")
        self._agree("reserve", tokens)
        self._room(self.num_pages or -(-tokens // self.page_size), tokens)

    @alone
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        sampling: SamplingOptions | None = None,
        stop_tokens: frozenset[int] | set[int] | None = None,
        n: int = 1,
        stop_strings: Sequence[str] = (),
        tokenizer: TextTokenizer | None = None,
    ) -> Iterator[TokenEvent]:
        """Yields the tokens of all sequences as they come, step by step; within a step in the order of the prompts.

        prompts: token ids of each sequence. stop_tokens: end a sequence; None: the checkpoint's end-of-text tokens.
        n: how often each prompt is continued; sequences i * n to i * n + n - 1 are those of prompt i.
        stop_strings: end a sequence whose text holds one, as `tokenizer` decodes it; `TextOutput` gives the text before
            it.
        The request is checked by this call; the work is done as the result is iterated over. Several may be iterated
        over in
        turns: their sequences then run in one batch.

        Raises PromptError, ValueError; flashkernel.OutOfPagesError (a MemoryError) while iterating, if num_pages is
        too small for one of the sequences alone; NonFiniteLogitsError (a RuntimeError) after the tokens before it.
        """
        self.follow()
        ids = [token_ids(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]
        sampling = sampling or SamplingOptions()
        self._agree("generate", ids, max_new_tokens, sampling, sorted(self._stop(stop_tokens)), n, stop_strings)
        check_request(ids, max_new_tokens, self.model.vocab_size, self.model.max_positions, sampling)
        if not hasattr(n, "__index__") or n < 1:
            raise ValueError(f"generate: n={n}; an integer >= 1 is needed")
        strings = check_stop_strings(stop_strings)
        if strings and tokenizer is None:
            raise ValueError(
                "generate: stop_strings without a tokenizer; the tokenizer that decodes the text is needed"
            )
        ids = [prompt for prompt in ids for _ in range(n)]
        requests = []
        for i, prompt in enumerate(ids):
            until = TextOutput(tokenizer, prompt, strings).until if strings and tokenizer is not None else None
            requests.append(self._request(prompt, i, max_new_tokens, sampling, self._stop(stop_tokens), until))
        return self._run(requests)

    @alone
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
        """A request that `step` works on from now on, beside the others; what it has generated is in `.generated`, and
        `.finish` says why it ended. sequence: a number for its events, and which of the seed's draws it gets.
        until: called with each new token, in order; True ends the sequence with "stop". It must not raise.
        stop_strings: what `until` looks for; only a LeadingEngine, whose calls other ranks repeat, wants to know.

        Raises PromptError, ValueError, flashkernel.OutOfPagesError (num_pages is too small for it alone).
        """
        self.follow()
        ids = token_ids(prompt, "the prompt")
        sampling = sampling or SamplingOptions()
        self._agree("submit", ids, max_new_tokens, sampling, sorted(self._stop(stop_tokens)), sequence)
        check_request([ids], max_new_tokens, self.model.vocab_size, self.model.max_positions, sampling)
        request = self._request(ids, sequence, max_new_tokens, sampling, self._stop(stop_tokens), until)
        self._accept([request])
        return request

    @alone
    def step(self) -> Events:
        """Some work on the requests at hand: (request, event) of each new token, perhaps none.

        Raises NonFiniteLogitsError for a request of `submit` whose `.finish` is "error" now and whose `.error` it is.
        Tokens of other requests from the same work are in their `.generated`, and the next call goes on with them.
        """
        events = self._work()
        if self._scheduler is not None:
            for request in self._scheduler.failed:
                if not request.iterated and request.error is not None:
                    self._scheduler.failed.remove(request)
                    raise request.error
        return events

    @alone
    def _work(self) -> Events:
        if self._scheduler is not None and self._scheduler.idle and self._backlog:
            self._resize(self._backlog)
        if self._scheduler is None:
            return []
        events = self._scheduler.step()
        for request, event in events:
            request.outbox.append(event)
        return events

    def follow(self, tokens: int = 0) -> None:
        """Called before work begins: for engines whose model belongs to somebody else, who may have changed it.

        tokens: of the longest request whose pages may come from earlier ones or stay for later ones; 0: of none.
        """

    @alone
    def forget_prefixes(self) -> None:
        """Drops the pages that are kept for prompts to come: for weights that have changed."""
        if self._scheduler is not None:
            self._scheduler.forget_prefixes()

    @alone
    def lockstep(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Lockstep:
        """The prompts as one batch whose tokens the caller chooses, from the logits of each step (lockstep.py).

        In the engine's own pages while it is idle, else in others. Raises as `generate` does, and OutOfPagesError if
        num_pages are too few for all of them at once.
        """
        ids = [token_ids(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]
        self._agree("lockstep", ids, max_new_tokens)
        self.follow(max(map(len, ids), default=0) + max_new_tokens)
        check_request(ids, max_new_tokens, self.model.vocab_size, self.model.max_positions)
        wanted = sum(-(-(len(prompt) + max_new_tokens - 1) // self.page_size) for prompt in ids)
        if self.num_pages is not None and wanted > self.num_pages:
            error = fk.OutOfPagesError(
                f"generate: {len(ids)} sequences step by step need {wanted} pages of {self.page_size} at once; the "
                f"cache has num_pages={self.num_pages}"
            )
            error.requested_pages, error.free_pages, error.num_pages = wanted, self.num_pages, self.num_pages
            raise error
        longest = max(map(len, ids)) + max_new_tokens
        if self.idle and len(ids) <= self.max_batch:
            return Lockstep(self._room(self.num_pages or wanted, longest), ids)
        return Lockstep(self._make(wanted, longest, max_batch=max(len(ids), self.max_batch), speculation=None), ids)

    @alone
    def cancel(self, request: Request) -> None:
        """Ends a request; its pages are free at once."""
        if request in self._backlog:
            self._backlog.remove(request)
            request.finish = "cancelled"
        elif self._scheduler is not None:
            self._scheduler.cancel(request)

    @alone
    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """log p(token | the tokens before it), float32 [len(tokens) - 1]: the natural logarithm, from float32 logits.

        Computed in chunks of `prefill_chunk` over a cache of its own. exp(-mean) is the perplexity of a text. In the
        invariant mode these are, to the bit, the `logprob` of the events by which `generate` gave the tokens.
        """
        ids = token_ids(tokens, "the text")
        if len(ids) < 2:
            raise ValueError(f"score: {len(ids)} tokens; two or more are needed")
        self._agree("score", ids)
        self.follow()
        check_request([ids[:-1]], 1, self.model.vocab_size, self.model.max_positions)
        arrays, chunk = self.model.arrays, int(self._options["prefill_chunk"])
        scheduler = self._make(-(-len(ids) // self.page_size), len(ids), speculation=None)
        handle, scores = scheduler.cache.create(), []
        for begin in range(0, len(ids) - 1, chunk):
            part = ids[begin : min(begin + chunk, len(ids) - 1)]
            end = begin + len(part)
            slots = scheduler.cache.append(handle, len(part))
            table, _ = scheduler.cache.block_table([handle])
            batch = PagedBatch(
                tokens=arrays.index(part, "int64"),
                positions=arrays.index(np.arange(begin, end)),
                slots=arrays.index(slots, "int64"),
                cu_seqlens=arrays.index([0, len(part)]),
                max_seqlen=len(part),
                block_table=arrays.index(table),
                seq_lens=arrays.index([end]),
                last_rows=None,
                host=HostBatch(np.array([0, len(part)]), table, np.array([end])),
            )
            logits, after = self.model.forward(batch, scheduler.pool), np.array(ids[begin + 1 : end + 1])[:, None]
            if fk.is_invariant():
                likely = arrays.to_host(arrays.log_probabilities(logits))
                scores.append(np.take_along_axis(likely, after, axis=1)[:, 0])
                continue
            logits = arrays.to_float32(logits).astype(np.float64)
            logits -= logits.max(axis=-1, keepdims=True)
            chosen = np.take_along_axis(logits, after, axis=1)[:, 0]
            scores.append(chosen - np.log(np.exp(logits).sum(axis=-1)))
        return np.concatenate(scores).astype(np.float32)

    def _stop(self, stop_tokens: frozenset[int] | set[int] | None) -> frozenset[int]:
        return frozenset(self.model.stop_tokens if stop_tokens is None else token_ids(stop_tokens, "stop_tokens"))

    def _request(
        self,
        prompt: list[int],
        sequence: int,
        max_new_tokens: int,
        sampling: SamplingOptions,
        stop: frozenset[int],
        until: Callable[[int], bool] | None,
    ) -> Request:
        self._submitted += 1
        return Request(self._submitted, sequence, prompt, max_new_tokens, sampling, stop, until)

    def _run(self, requests: list[Request]) -> Iterator[TokenEvent]:
        outbox = requests[0].outbox
        for request in requests:
            request.outbox, request.iterated = outbox, True
        try:
            self._accept(requests)
            while True:
                while outbox:
                    yield outbox.popleft()
                for request in requests:
                    if request.error is not None:
                        raise request.error
                if all(request.finish for request in requests):
                    return
                self._work()
        finally:
            for request in requests:
                if request.finish is None:
                    self.cancel(request)

    @alone
    def _accept(self, requests: list[Request]) -> None:
        """Gives requests to the scheduler; they wait while the cache in use is too small for one of them."""
        for request in requests:
            pages = self._pages_of(request)
            if self.num_pages is not None and pages > self.num_pages:
                error = fk.OutOfPagesError(
                    f"generate: a prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones need "
                    f"{pages} pages of {self.page_size}; the cache has num_pages={self.num_pages}"
                )
                error.requested_pages, error.free_pages, error.num_pages = pages, self.num_pages, self.num_pages
                raise error
        if self.idle:
            self.follow(max(len(request.prompt) + request.max_new_tokens for request in requests))
            self._resize(requests)
        elif not self._backlog and self._scheduler is not None and all(map(self._scheduler.fits, requests)):
            for request in requests:
                self._scheduler.submit(request)
        else:
            self._backlog += requests

    def _pages_of(self, request: Request) -> int:
        return -(-(len(request.prompt) + request.max_new_tokens - 1) // self.page_size)

    def _resize(self, requests: list[Request]) -> None:
        """Submits requests to an idle scheduler: the last one if it is large enough, else a new one."""
        largest = sorted(map(self._pages_of, requests), reverse=True)[: self.max_batch]
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        scheduler = self._room(self.num_pages or sum(largest), longest)
        self._backlog = [] if requests is self._backlog else self._backlog
        for request in requests:
            scheduler.submit(request)

    def _room(self, pages: int, longest: int) -> Scheduler:
        """The scheduler, which is idle, if it has that many pages and tokens of a request; else a new one."""
        old = self._scheduler
        if old is None or old.num_pages < pages or old.max_tokens < longest:
            if old is not None:
                pages, longest = max(pages, old.num_pages), max(longest, old.max_tokens)
                self.model.arrays.wait()  # steps of sequences that have ended may still write to their pages
            self._scheduler = old = None  # give the old pages back first
            # Room for longer requests to come: a larger cache begins with an empty prefix index and without graphs.
            longest = min(self.model.max_positions, max(MIN_TOKENS, 1 << (longest - 1).bit_length()))
            self._scheduler = self._make(pages, longest)
        assert self._scheduler is not None
        self._scheduler.stats, self._scheduler.failed = GenerationStats(), []
        return self._scheduler

    def _make(self, num_pages: int, max_tokens: int, **changes: Any) -> Scheduler:
        options = {**self._options, **changes}
        return Scheduler(self.model, num_pages=num_pages, page_size=self.page_size, max_tokens=max_tokens, **options)
