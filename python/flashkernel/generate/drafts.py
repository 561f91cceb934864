"""Where drafts come from: the text itself, or a smaller model. Used by speculate.py."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

import flashkernel as fk

from .decode import Row
from .request import Request
from .sampling import Draws, SamplingOptions, adjust, distribution, drawn_from
from .sequences import Sequences
from .speculation import PromptLookup

DRAFT, ACCEPTANCE = 1, 2  # purposes of numbers under the rejection rule

__all__ = ["Drafter", "LookupDrafter", "ModelDrafter"]


class Drafter(ABC):
    """Drafts for the running sequences of a scheduler, each of which it may keep something about until `forget`."""

    @abstractmethod
    def limits(self, requests: Sequence[Request], most: Sequence[int]) -> list[int]:
        """How many tokens each draft could have, at most as many as stand beside its request."""

    @abstractmethod
    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[list[int]]:
        """Drafts of at most these lengths, which are at most the `limits` of the same requests just before."""

    @abstractmethod
    def forget(self, request: Request) -> None:
        """The sequence has ended, or has given its pages away."""


class _Ngrams:
    """The text of one sequence, and where each of its n-grams went on last."""

    def __init__(self, speculation: PromptLookup):
        self._sizes = range(speculation.ngram, speculation.min_ngram - 1, -1)  # longest first
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}

    def extend(self, request: Request) -> None:
        tokens, begin = self._tokens, len(self._tokens)
        prompt = len(request.prompt)
        if begin < prompt:
            tokens += request.prompt[begin:]
        tokens += request.generated[len(tokens) - prompt :]
        for place in range(max(begin, 1), len(tokens)):  # of the token behind an n-gram
            for size in self._sizes:
                if size <= place:
                    self._places[tuple(tokens[place - size : place])] = place

    def draft(self, count: int) -> list[int]:
        """What stood behind the last tokens before; where that runs into the end, it goes on with the draft itself."""
        for size in self._sizes:
            place = self._places.get(tuple(self._tokens[-size:])) if size <= len(self._tokens) else None
            if place is not None:
                found, period = self._tokens[place : place + count], len(self._tokens) - place
                while len(found) < count:
                    found.append(found[-period])
                return found
        return []


class LookupDrafter(Drafter):
    """Prompt lookup."""

    def __init__(self, speculation: PromptLookup):
        self._speculation = speculation
        self._texts: dict[Request, _Ngrams] = {}
        self._found: dict[Request, list[int]] = {}

    def limits(self, requests: Sequence[Request], most: Sequence[int]) -> list[int]:
        self._found = {}
        for request, count in zip(requests, most, strict=True):
            text = self._texts.get(request)
            if text is None:
                text = self._texts[request] = _Ngrams(self._speculation)
            text.extend(request)
            self._found[request] = text.draft(count) if count > 0 else []
        return [len(self._found[request]) for request in requests]

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[list[int]]:
        return [self._found[request][:count] for request, count in zip(requests, lengths, strict=True)]

    def forget(self, request: Request) -> None:
        self._texts.pop(request, None)
        self._found.pop(request, None)


@dataclass
class _Draft:
    """What the draft model's cache holds of one sequence."""

    shadow: Request  # with the draft model's pages; it shares the list of generated tokens
    confirmed: int = 0  # tokens of the text at its last draft
    guessed: list[int] = field(default_factory=list)  # those of that draft
    likely: list[np.ndarray] = field(default_factory=list)  # by the rejection rule: what each was drawn from
    slots: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # of the steps to come


class ModelDrafter(Drafter):
    """A draft model. sequences: its own cache and decode steps. rejection: its tokens are drawn by numbers of their
    own, from probabilities that are kept.

    A draft of k tokens takes k + 1 steps without a look at their tokens: the last one writes the keys and values of
    token k, so that a draft of which all was right needs no other computation before the next.
    """

    def __init__(self, sequences: Sequences, rejection: bool):
        self._sequences, self._rejection = sequences, rejection
        self._drafts: dict[Request, _Draft] = {}
        self.read = 0  # tokens of prompts that the last `propose` computed

    def limits(self, requests: Sequence[Request], most: Sequence[int]) -> list[int]:
        positions = self._sequences.model.max_positions
        return [max(0, min(n, positions - len(r.tokens) - 1)) for r, n in zip(requests, most, strict=True)]

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[list[int]]:
        positions, steps = self._sequences.model.max_positions, max(lengths) + 1
        asked = [
            self._draft(request)
            for request, length in zip(requests, lengths, strict=True)
            if length > 0 and len(request.tokens) - 1 + steps <= positions
        ]
        ready = self._read([draft for draft in asked if self._take_pages(draft, steps)])
        found: dict[Request, list[int]] = {}
        if ready:
            tokens = self._write(ready, steps)
            for i, draft in enumerate(ready):
                draft.confirmed, draft.guessed = len(draft.shadow.tokens), tokens[:-1, i].tolist()
            by_shadow = {id(draft): draft.guessed for draft in ready}
            found = {r: by_shadow[id(draft)] for r, draft in self._drafts.items() if id(draft) in by_shadow}
        return [found.get(request, [])[:length] for request, length in zip(requests, lengths, strict=True)]

    def forget(self, request: Request) -> None:
        draft = self._drafts.pop(request, None)
        if draft is not None:
            self._release(draft)

    def forget_prefixes(self) -> None:
        self._sequences.cache.drop_cached()

    def _draft(self, request: Request) -> _Draft:
        draft = self._drafts.get(request)
        if draft is None:
            shadow = Request(
                request.order,
                request.sequence,
                request.prompt,
                request.max_new_tokens,
                replace(request.sampling, logprobs=None),
                frozenset(),
                generated=request.generated,
            )
            shadow.random = Draws(request.sampling, request.sequence, purpose=DRAFT)
            draft = self._drafts[request] = _Draft(shadow)
        place = request.random.place
        if self._rejection:
            draft.shadow.random.place = place
        else:
            draft.shadow.random = copy.copy(request.random)
        return draft

    def likely(self, request: Request) -> list[np.ndarray]:
        """float64 [vocab] for each token of the last draft: the probabilities that it was drawn from."""
        return self._drafts[request].likely

    def _release(self, draft: _Draft) -> None:
        self._sequences.release(draft.shadow)
        draft.confirmed, draft.guessed = 0, []

    def _take_pages(self, draft: _Draft, steps: int) -> bool:
        """Room for what is not in the cache, without the last token, and for the steps; False: there is none."""
        cache, shadow, tokens = self._sequences.cache, draft.shadow, draft.shadow.tokens
        if shadow.handle is None:
            known = np.array(tokens[:-1], np.int32)
            shadow.handle = cache.create(known) if self._sequences.prefix_sharing else cache.create()
            shadow.prefilled = cache.length(shadow.handle)
        else:
            right = 0
            for guess, token in zip(draft.guessed, tokens[draft.confirmed :], strict=False):
                if guess != token:
                    break
                right += 1
            shadow.prefilled = min(draft.confirmed + right, cache.length(shadow.handle), len(tokens) - 1)
            cache.truncate(shadow.handle, shadow.prefilled)
        try:
            shadow.slots = cache.append(shadow.handle, len(tokens) - 1 - shadow.prefilled)
            draft.slots = cache.append(shadow.handle, steps)
        except fk.OutOfPagesError:
            self._release(draft)
            return False
        return True

    def _read(self, drafts: list[_Draft]) -> list[_Draft]:
        """Computes what stands before the last token of each sequence."""
        sequences, self.read = self._sequences, 0
        while waiting := [draft.shadow for draft in drafts if len(draft.shadow.slots)]:
            chunk, budget = [], sequences.prefill_chunk
            for shadow in waiting:
                count = min(budget, len(shadow.slots))
                if count:
                    chunk.append((shadow, count))
                    budget -= count
            sequences.forward_prompts(chunk)
            sequences.count_prompts(chunk)
            self.read += sum(count for _, count in chunk)
        for draft in drafts:
            if sequences.prefix_sharing and not draft.confirmed:  # for the next text that begins so
                sequences.cache.publish(draft.shadow.handle, np.array(draft.shadow.tokens[:-1], np.int32))
        return drafts

    def _write(self, drafts: list[_Draft], steps: int) -> np.ndarray:
        """int64 [steps, drafts]: the tokens of that many steps."""
        sequences, rows = self._sequences, list[Row | None]()
        for draft in drafts:
            length = len(draft.shadow.tokens) - 1
            sequences.drop_unseen(draft.shadow, length)
            rows.append(Row(draft.shadow, length, draft.slots, sequences.cache.pages(draft.shadow.handle)))
        last = np.array([draft.shadow.tokens[-1] for draft in drafts], np.int64)
        if self._rejection:
            return self._draw(drafts, rows, steps, last)
        tokens, _, _ = sequences.decoder.run(rows, steps, last)()
        return tokens

    def _draw(self, drafts: list[_Draft], rows: list[Row | None], steps: int, last: np.ndarray) -> np.ndarray:
        arrays, tokens = self._sequences.model.arrays, np.zeros((steps, len(drafts)), np.int64)
        greedy = list[Row]()  # what they look like to a step that chooses no tokens
        for row, draft in zip(rows, drafts, strict=True):
            assert row is not None
            draft.likely, view = [], copy.copy(draft.shadow)
            view.sampling = SamplingOptions()
            greedy.append(replace(row, request=view))
        for step in range(steps):
            now = [replace(row, length=row.length + step, slots=row.slots[step : step + 1]) for row in greedy]
            logits = self._sequences.decoder.run_logits(now, last if step == 0 else tokens[step - 1])
            if step == steps - 1:
                break  # for its keys and values alone
            for i, (row, draft) in enumerate(zip(arrays.to_float32(logits), drafts, strict=True)):
                shadow = draft.shadow
                before = [*shadow.generated, *tokens[:step, i].tolist()]
                draft.likely.append(distribution(adjust(row, shadow.sampling, shadow.prompt, before), shadow.sampling))
                (uniform,) = shadow.random.uniforms(shadow.random.place + step, 1)
                tokens[step, i] = drawn_from(draft.likely[-1], uniform)
        return tokens
