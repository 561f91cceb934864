"""Sequences over one pool of pages: their pages, their prompts, and the tokens that are chosen for them.

What scheduler.py, which decides who runs when, shares with lockstep.py and with the drafts of speculate.py. Nothing
here waits in a queue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import flashkernel as fk

from .choice import RowChoice, Scores
from .decode import Decoder
from .errors import NonFiniteLogitsError
from .fixed_step import TokenRow
from .model import HostBatch, Model, PagedBatch
from .one_launch import matrices
from .prompt_graphs import PromptGraphs
from .request import GenerationStats, Request, TokenEvent
from .sampling_options import wanted

__all__ = ["Events", "Sequences"]

Events = list[tuple[Request, TokenEvent]]


class Sequences:
    """The parameters are those of `Engine`, with their defaults filled in.

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
        prefix_sharing: bool,
        graphs: bool | None = None,
        kv_dtype: str | None = None,
        one_launch: bool | None = None,
    ):
        self.model, self.page_size, self.num_pages, self.max_tokens = model, page_size, num_pages, max_tokens
        self.max_batch, self.prefill_chunk, self.steps = max_batch, prefill_chunk, steps
        self.prefix_sharing = prefix_sharing
        self.by_graph = model.arrays.asynchronous if graphs is None else graphs
        self.pool = fk.KvPagePool(
            num_pages,
            **model.pool_options(kv_dtype),
            page_size=page_size,
            num_layers=model.num_layers,
            device=model.arrays.device,
        )
        self.cache = fk.KvCache(self.pool)
        self.decoder = Decoder(
            model,
            self.pool,
            rows=max_batch,
            width=self.pages_for(max_tokens),
            steps=steps,
            graphs=graphs,
            one_launch=one_launch,
        )
        self.prompt_graphs = PromptGraphs(model, self.pool, rows=max_batch, width=self.pages_for(max_tokens))
        self._matrices = matrices(model)  # kept while graphs of this object name them
        self.running: list[Request] = []  # those that decode, by order
        self.failed: list[Request] = []  # those whose errors nobody has seen yet
        self.stats = GenerationStats()

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    @property
    def pages_in_use(self) -> int:
        return int(self.cache.stats().num_pages_used)

    # --- pages

    def pages_available(self) -> int:
        """Pages that can be taken: the free ones and those that only the prefix index holds."""
        stats = self.cache.stats()
        return int(stats.num_pages_free + stats.num_pages_cached)

    def pages_wanted(self, tokens: Sequence[int]) -> int:
        """Pages that the running sequences lack for so many tokens more of each."""
        lengths = [self.cache.length(request.handle) for request in self.running]
        return sum(self.pages_for(n + new) - self.pages_for(n) for n, new in zip(lengths, tokens, strict=True))

    def count_pages(self) -> None:
        self.stats.peak_pages = max(self.stats.peak_pages, self.pages_in_use)

    def release(self, request: Request, offer: bool = False) -> None:
        """Gives the pages of a request back; `offer`: the prefix index keeps its full pages while nobody needs them."""
        self.left(request)
        if request.handle is not None:
            if offer and self.prefix_sharing:
                self.cache.publish(request.handle, np.array(request.tokens[:-1], np.int32))
            self.cache.free(request.handle)
        request.handle, request.prefilled, request.in_flight, request.pages_dropped = None, 0, 0, 0
        request.slots = np.empty(0, np.int64)

    def drop_unseen(self, request: Request, position: int) -> None:
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

    def left(self, request: Request) -> None:
        """Called when a request gives its pages back."""

    # --- tokens

    def forward_prompts(self, chunk: list[tuple[Request, int]]) -> Any:
        """Computes the next tokens of some prompts, as many as stand beside each; logits behind those that are
        complete then.
        """
        arrays = self.model.arrays
        done = np.array([count == len(request.slots) for request, count in chunk])
        if self.by_graph and done.all():
            logits = self.prompt_graphs.run([self._row(request) for request, _ in chunk])
            if logits is not None:
                self.count_pages()
                return logits
        counts = np.array([count for _, count in chunk])
        cu_seqlens = np.concatenate([[0], np.cumsum(counts)])
        ends = np.array([request.prefilled + count for request, count in chunk])
        table, _ = self.cache.block_table([request.handle for request, _ in chunk])
        tokens = [request.tokens[request.prefilled : request.prefilled + count] for request, count in chunk]
        positions = [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
        self.count_pages()
        batch = PagedBatch(
            tokens=arrays.index(np.concatenate(tokens), "int64"),
            positions=arrays.index(np.concatenate(positions)),
            slots=arrays.index(np.concatenate([request.slots[:count] for request, count in chunk]), "int64"),
            cu_seqlens=arrays.index(cu_seqlens),
            max_seqlen=int(counts.max()),
            block_table=arrays.index(table),
            seq_lens=arrays.index(ends),
            last_rows=(cu_seqlens[1:] - 1)[done].astype(np.int64),
            host=HostBatch(cu_seqlens, table, ends),
        )
        return self.model.forward(batch, self.pool)

    def _row(self, request: Request) -> TokenRow:
        """All tokens that are left to compute: a draft model leaves the last one to its first step."""
        tokens = request.tokens[request.prefilled : request.prefilled + len(request.slots)]
        return TokenRow(tokens, request.prefilled, request.slots, self.cache.pages(request.handle))

    def count_prompts(self, chunk: list[tuple[Request, int]]) -> None:
        """Takes down that these tokens were computed; until then they can be computed again."""
        for request, count in chunk:
            request.slots = request.slots[count:]
            request.prefilled += count
            self.stats.prefill_tokens += count
            self.drop_unseen(request, request.prefilled)

    def choose_tokens(self, logits: Any, requests: list[Request]) -> tuple[np.ndarray, np.ndarray, Scores | None]:
        """A token for each request behind its row of logits, the token's logit in float32, and log-probabilities where
        some request asks for them.
        """
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

    def accept(self, request: Request, token: int, logit: float, scores: Scores | None, at: tuple[int, int]) -> Events:
        """Takes a token down. at: its place in `scores`."""
        if not math.isfinite(logit):
            request.error = NonFiniteLogitsError(request.sequence, len(request.generated), logit)
            request.finish = "error"
            self.failed.append(request)
            self.running.remove(request)
            self.release(request)
            return []
        request.generated.append(token)
        if token in request.stop or (request.until is not None and request.until(token)):
            request.finish = "stop"
        elif len(request.generated) == request.max_new_tokens:
            request.finish = "length"
        if request.finish:
            self.running.remove(request)
            self.release(request, offer=True)
        event = TokenEvent(request.sequence, token, request.finish)
        if scores is not None and request.sampling.logprobs is not None:
            count = request.sampling.logprobs
            top = zip(scores.ids[at][:count].tolist(), scores.values[at][:count].tolist(), strict=True)
            event = replace(event, logprob=float(scores.chosen[at]), top=tuple(top))
        return [(request, event)]
