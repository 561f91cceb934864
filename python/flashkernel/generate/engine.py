"""Text generation: sequences of a batch, their pages, and the loop of prefill and decode steps.

`Engine.generate` yields tokens as they come. Prompts are prefilled in chunks of a bounded number of tokens, many
sequences to a chunk; then every step decodes one token of each sequence that is still running. A sequence gives its
pages back as soon as it ends, and all do when the caller stops early or anything raises.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import flashkernel as fk

from .errors import PromptError
from .model import Model, PagedBatch
from .sampling import Sampler, SamplingOptions

__all__ = ["Engine", "GenerationStats", "TokenEvent", "check_request"]


@dataclass(frozen=True)
class TokenEvent:
    """One token of one sequence. `finish` is None, "stop" (an end-of-text token: `token`) or "length"."""

    sequence: int
    token: int
    finish: str | None = None


@dataclass
class GenerationStats:
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0  # tokens that decode steps gave; the first of each sequence comes from its prefill
    decode_seconds: float = 0.0
    peak_pages: int = 0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Generated tokens per second, over the whole batch."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass
class _Running:
    index: int
    prompt: list[int]
    sampler: Sampler
    handle: Any = None
    prefilled: int = 0
    generated: list[int] = field(default_factory=list)


def check_request(prompts: Sequence[Sequence[int]], max_new_tokens: int, vocab_size: int, max_positions: int) -> None:
    """Raises PromptError or ValueError for what no model with these limits could run."""
    if not prompts:
        raise PromptError("generate: no prompts; one or more are needed")
    if max_new_tokens < 1:
        raise ValueError(f"generate: max_new_tokens={max_new_tokens}; an integer >= 1 is needed")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise PromptError(f"generate: prompt {index} has no tokens; one or more are needed")
        if len(prompt) + max_new_tokens > max_positions:
            raise PromptError(
                f"generate: prompt {index} has {len(prompt)} tokens and max_new_tokens={max_new_tokens}; the model's "
                f"context holds {max_positions}: shorten the prompt or ask for at most "
                f"{max(0, max_positions - len(prompt))} new tokens"
            )
        for token in prompt:
            if not 0 <= token < vocab_size:
                raise PromptError(
                    f"generate: prompt {index} has the token id {token}; ids in [0, {vocab_size}) are needed"
                )


class Engine:
    """Runs a model over a paged KV-cache.

    page_size: tokens per page: 16, 32, 64, 128 or 256.
    num_pages: pages of the pool; None: as many as a request can need at most.
    prefill_chunk: most prompt tokens in one forward step, which bounds the memory of activations.
    """

    def __init__(self, model: Model, *, page_size: int = 256, num_pages: int | None = None, prefill_chunk: int = 2048):
        if prefill_chunk < 1:
            raise ValueError(f"generate: prefill_chunk={prefill_chunk}; an integer >= 1 is needed")
        self.model = model
        self.page_size = page_size
        self.num_pages = num_pages
        self.prefill_chunk = prefill_chunk
        self.stats = GenerationStats()
        self._pool: fk.KvPagePool | None = None
        self._pool_pages = 0

    @property
    def pages_in_use(self) -> int:
        return 0 if self._pool is None else int(self._pool.num_used)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        sampling: SamplingOptions | None = None,
        stop_tokens: frozenset[int] | set[int] | None = None,
    ) -> Iterator[TokenEvent]:
        """Yields the tokens of all sequences as they come, step by step; within a step in the order of the prompts.

        prompts: token ids of each sequence. stop_tokens: end a sequence; None: the checkpoint's end-of-text tokens.
        The request is checked by this call; the work is done as the result is iterated over.

        Raises PromptError, ValueError; flashkernel.OutOfPagesError (a MemoryError) while iterating, if num_pages is
        too small.
        """
        sampling = sampling or SamplingOptions()
        ids = [[int(token) for token in prompt] for prompt in prompts]
        check_request(ids, max_new_tokens, self.model.vocab_size, self.model.max_positions)
        stop = frozenset(self.model.stop_tokens if stop_tokens is None else stop_tokens)
        return self._run(ids, max_new_tokens, sampling, stop)

    def _run(
        self, prompts: list[list[int]], max_new_tokens: int, sampling: SamplingOptions, stop: frozenset[int]
    ) -> Iterator[TokenEvent]:
        self.stats = GenerationStats()
        cache = fk.KvCache(self._pool_for(prompts, max_new_tokens))
        waiting = [_Running(i, prompt, Sampler(sampling, i)) for i, prompt in enumerate(prompts)]
        running: list[_Running] = []
        try:
            while waiting or running:
                begin = time.perf_counter()
                if waiting:
                    ready, tokens = self._prefill_step(cache, waiting)
                    running += ready
                    self.stats.prefill_seconds += time.perf_counter() - begin
                else:
                    ready = list(running)
                    tokens = self._step(
                        cache, ready, [sequence.generated[-1:] for sequence in ready], list(range(len(ready)))
                    )
                    self.stats.decode_seconds += time.perf_counter() - begin
                    self.stats.decode_tokens += len(tokens)
                for sequence, token in zip(ready, tokens, strict=True):
                    sequence.generated.append(token)
                    finish = (
                        "stop" if token in stop else "length" if len(sequence.generated) == max_new_tokens else None
                    )
                    if finish:
                        cache.free(sequence.handle)
                        sequence.handle = None
                        running.remove(sequence)
                    yield TokenEvent(sequence.index, token, finish)
        finally:
            for sequence in running + waiting:
                if sequence.handle is not None:
                    cache.free(sequence.handle)

    def _prefill_step(self, cache: fk.KvCache, waiting: list[_Running]) -> tuple[list[_Running], list[int]]:
        """Computes up to `prefill_chunk` tokens of waiting prompts; returns those that are complete, and their first
        tokens.
        """
        budget = self.prefill_chunk
        chunk: list[_Running] = []
        new_tokens: list[list[int]] = []
        last: list[int] = []
        ready: list[_Running] = []
        for sequence in waiting:
            if budget == 0:
                break
            part = sequence.prompt[sequence.prefilled : sequence.prefilled + budget]
            budget -= len(part)
            if sequence.handle is None:
                sequence.handle = cache.create()
            if sequence.prefilled + len(part) == len(sequence.prompt):
                last.append(len(chunk))
                ready.append(sequence)
            chunk.append(sequence)
            new_tokens.append(part)
        tokens = self._step(cache, chunk, new_tokens, last)
        for sequence, part in zip(chunk, new_tokens, strict=True):
            sequence.prefilled += len(part)
            self.stats.prefill_tokens += len(part)
        del waiting[: len(ready)]  # sequences are served in order, so the complete ones stand first
        return ready, tokens

    def _step(
        self, cache: fk.KvCache, sequences: list[_Running], new_tokens: list[list[int]], last: list[int]
    ) -> list[int]:
        """One forward pass over `new_tokens` of each sequence; the next token of those numbered in `last`."""
        arrays = self.model.arrays
        lengths = [len(tokens) for tokens in new_tokens]
        slots, positions = [], []
        for sequence, count in zip(sequences, lengths, strict=True):
            begin = cache.length(sequence.handle)
            slots.append(cache.append(sequence.handle, count))
            positions.append(np.arange(begin, begin + count, dtype=np.int32))
        self.stats.peak_pages = max(self.stats.peak_pages, self.pages_in_use)
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        table, seq_lens = cache.block_table([sequence.handle for sequence in sequences])
        batch = PagedBatch(
            tokens=np.array([token for tokens in new_tokens for token in tokens], dtype=np.int64),
            positions=arrays.index(np.concatenate(positions)),
            slots=arrays.index(np.concatenate(slots), "int64"),
            cu_seqlens=arrays.index(cu_seqlens),
            max_seqlen=max(lengths),
            block_table=arrays.index(table),
            seq_lens=arrays.index(seq_lens),
            last_rows=cu_seqlens[1:][last].astype(np.int64) - 1,
        )
        logits = self.model.forward(batch, cache.pool)
        return [sequences[index].sampler(row) for index, row in zip(last, arrays.to_float32(logits), strict=True)]

    def _pool_for(self, prompts: list[list[int]], max_new_tokens: int) -> fk.KvPagePool:
        """The pool of the last request if it is large enough, else a new one. A sequence's last token is never
        appended.
        """
        needed = sum(-(-(len(prompt) + max_new_tokens - 1) // self.page_size) for prompt in prompts)
        num_pages = self.num_pages or needed
        if self._pool is None or self._pool_pages < num_pages:
            model = self.model
            self._pool = None  # give the old one back first
            self._pool = fk.KvPagePool(
                num_pages,
                model.heads_kv,
                model.head_dim,
                page_size=self.page_size,
                num_layers=model.num_layers,
                dtype=model.arrays.dtype,
                device=model.arrays.device,
            )
            self._pool_pages = num_pages
        return self._pool
