"""Speculative decoding: a step that verifies drafts, for the scheduler, and when it is worth one.

Lossless by construction: behind every drafted token the model's own choice is computed, greedy or drawn with the number
that the sequence would have drawn with at that place, and a draft is kept up to the first token that differs from it.
So a sequence gives the tokens that it gives without drafts, drawn ones too. The chance that a drawn token equals a
given draft is its probability, as in the rejection rule of Leviathan et al. (2023) and Chen et al. (2023) for a draft
that is certain of itself; a draft model draws with the same numbers as the model that verifies. `DraftModel` may ask
for that rule itself, which keeps the distribution and not the text.

Rejected tokens' pages go back at once. A draft takes pages only where they are free: nobody is preempted for it.
"""

from __future__ import annotations

import copy
import math
import time
import weakref

import numpy as np

from .drafts import ACCEPTANCE, Drafter, LookupDrafter, ModelDrafter
from .fixed_step import TokenRow
from .pace import Acceptance, Ledger, StepTimes, draft_lengths
from .request import Request
from .sampling import Draws, adjust, distribution, drawn_from, log_probabilities
from .sequences import Events, Sequences
from .speculation import DraftModel, PromptLookup, Speculation
from .verify import Verifier

__all__ = ["Speculator"]

# Looks in a row that found nothing worth a draft, before decode steps run ahead of the host as without speculation;
# then one flight of steps in so many is waited for, for another look.
QUIET, LOOK_EVERY = 4, 4
# Before it is measured: a step of the draft model, in steps of the model.
FIRST_DRAFT_STEP = 0.2


class Speculator:
    """Speculation for the running ones of some sequences; drafts: those of a draft model."""

    def __init__(self, sequences: Sequences, speculation: Speculation, drafts: Sequences | None):
        self.sequences: Sequences = weakref.proxy(sequences)  # a cycle would keep its pages alive
        self.speculation = speculation
        if isinstance(speculation, PromptLookup):
            self.drafter: Drafter = LookupDrafter(speculation)
        else:
            assert drafts is not None
            self.drafter = ModelDrafter(drafts, speculation.rule == "rejection")
        self.verifier = Verifier(
            sequences.model,
            sequences.pool,
            rows=sequences.max_batch,
            width=sequences.pages_for(sequences.max_tokens),
            fixed=sequences.by_graph,
        )
        self.times, self.draft_times, self.ledger = StepTimes(), StepTimes(slope=1.0), Ledger()
        self._acceptance: dict[Request, Acceptance] = {}
        self._quiet = self._ahead = 0

    def forget(self, request: Request) -> None:
        """The sequence has ended, or has given its pages away."""
        self._acceptance.pop(request, None)
        self.drafter.forget(request)

    def forget_prefixes(self) -> None:
        """Drops the pages that a draft model keeps for prompts to come."""
        if isinstance(self.drafter, ModelDrafter):
            self.drafter.forget_prefixes()

    # --- plain steps

    def most_steps(self) -> int:
        """Plain steps before the next look for drafts: more with each look that found none."""
        return 1 << min(self._quiet, 16)

    def may_run_ahead(self) -> bool:
        if self._quiet < QUIET:
            return False
        self._ahead = (self._ahead + 1) % LOOK_EVERY
        return self._ahead != 0

    def count_plain(self, rows: int, seconds: float) -> None:
        """A plain step of that many sequences took so long."""
        self.times.record(rows, seconds)
        self.ledger.record(seconds, None)

    # --- steps with drafts

    def step(self) -> Events | None:
        """A step of all running sequences with drafts for some, and its tokens; None: a plain one is better."""
        sequences, begin = self.sequences, time.perf_counter()
        requests = list(sequences.running)
        most = [min(self.speculation.tokens, request.remaining - 1) for request in requests]
        limits = self.drafter.limits(requests, most)
        lengths = self._fitting(requests, self._lengths(requests, limits))
        drafts = self.drafter.propose(requests, lengths) if any(lengths) else []
        if not any(drafts):
            self._quiet += 1
            return None
        self._quiet = 0
        proposed = time.perf_counter()
        if isinstance(self.drafter, ModelDrafter) and not self.drafter.read:
            self.draft_times.record(max(map(len, drafts)) + 1, proposed - begin)
        events = self._verify(requests, drafts)
        end = time.perf_counter()
        self.times.record(len(requests) + sum(map(len, drafts)), end - proposed)
        if self.times.knows(len(requests)):
            plain = float(self.times.seconds(np.array([len(requests)]))[0])
            self.ledger.record(plain * len(events) / len(requests), end - begin)
        return events

    def _lengths(self, requests: list[Request], limits: list[int]) -> list[int]:
        if not self.speculation.adaptive:
            return limits
        if not self.times.knows(len(requests)):  # what a plain step takes has to be known first
            return [0] * len(requests)
        known = [self._acceptance.setdefault(request, Acceptance()) for request in requests]
        drafting = self._draft_seconds if isinstance(self.drafter, ModelDrafter) else None
        lengths = [0] * len(requests)
        if self.ledger.allows:
            lengths = draft_lengths([a.rate for a in known], limits, self.times.seconds, drafting)
        for acceptance, limit, length in zip(known, limits, lengths, strict=True):
            if limit and not length:
                acceptance.skip()
        return lengths

    def _draft_seconds(self, longest: np.ndarray) -> np.ndarray:
        seconds = self.draft_times.seconds(longest + 1)
        if self.draft_times.empty:
            seconds = seconds * FIRST_DRAFT_STEP * self.times.seconds(np.ones(1))
        return seconds

    def _fitting(self, requests: list[Request], lengths: list[int]) -> list[int]:
        """The lengths with which the pages at hand do, the youngest sequences' drafts left out first."""
        sequences, lengths = self.sequences, list(lengths)
        for i in reversed(range(len(requests))):
            if sequences.pages_wanted([length + 1 for length in lengths]) <= sequences.pages_available():
                return lengths
            lengths[i] = 0
        return [0] * len(requests)  # perhaps not even for a plain step, which knows what to do then

    def _verify(self, requests: list[Request], drafts: list[list[int]]) -> Events:
        sequences, cache = self.sequences, self.sequences.cache
        rows: list[TokenRow] = []
        for request in requests:
            sequences.drop_unseen(request, cache.length(request.handle))
        lengths = [cache.length(request.handle) for request in requests]
        try:
            for request, draft, length in zip(requests, drafts, lengths, strict=True):
                slots = cache.append(request.handle, 1 + len(draft))
                tokens = [request.generated[-1], *draft]
                rows.append(TokenRow(tokens, length, slots, cache.pages(request.handle)))
            sequences.count_pages()
            logits = self.verifier.run(rows)
            pairs = list(zip(requests, drafts, strict=True))
            behind = [_behind(request, draft[:j]) for request, draft in pairs for j in range(len(draft) + 1)]
            chosen, values, scores = sequences.choose_tokens(logits, behind)
            host = sequences.model.arrays.to_float32(logits) if self._rejects else None
        except BaseException:
            for request, length in zip(requests, lengths, strict=True):  # as it was: the caller may try again
                cache.truncate(request.handle, length)
            raise
        events: Events = []
        at = 0
        for request, draft, length in zip(requests, drafts, lengths, strict=True):
            right = 0
            if draft and host is not None and not request.sampling.greedy:
                rows_of = slice(at, at + 1 + len(draft))
                right = self._reject(request, draft, host[rows_of], chosen[rows_of], values[rows_of])
                if scores is not None:
                    likely = log_probabilities(host[rows_of])
                    scores.chosen[0, rows_of] = np.take_along_axis(likely, chosen[rows_of, None], axis=1)[:, 0]
            else:
                while right < len(draft) and chosen[at + right] == draft[right]:
                    right += 1
            cache.truncate(request.handle, length + 1 + right)
            if not request.sampling.greedy:
                request.random.take(right + 1)
            if draft:
                self._acceptance.setdefault(request, Acceptance()).record(len(draft), right)
                sequences.stats.drafts += 1
                sequences.stats.drafted_tokens += len(draft)
                sequences.stats.accepted_tokens += right
            for j in range(at, at + right + 1):
                if request.finish is None:
                    events += sequences.accept(request, int(chosen[j]), float(values[j]), scores, (0, j))
            at += 1 + len(draft)
        return events

    @property
    def _rejects(self) -> bool:
        return isinstance(self.speculation, DraftModel) and self.speculation.rule == "rejection"

    def _reject(
        self, request: Request, draft: list[int], logits: np.ndarray, chosen: np.ndarray, values: np.ndarray
    ) -> int:
        """The rejection rule: how many tokens of a draft are kept. Writes them, and what is drawn in the place of the
        first other one, to `chosen`, and their logits to `values`; float32 logits [draft and one, vocab].

        A token x is kept with the chance min(1, p(x) / q(x)), p of the model and q of the draft model; in the place of
        one that is not kept, a token is drawn from max(0, p - q).
        """
        assert isinstance(self.drafter, ModelDrafter)
        place, options = request.random.place, request.sampling
        accept = Draws(options, request.sequence, purpose=ACCEPTANCE).uniforms(place, len(draft))
        for j, (token, q) in enumerate(zip(draft, self.drafter.likely(request), strict=False)):
            if not math.isfinite(values[j]):
                return j  # the choice tells of it
            p = distribution(adjust(logits[j], options, request.prompt, [*request.generated, *draft[:j]]), options)
            kept = accept[j] * q[token] < p[token]
            if kept:
                chosen[j] = token
            else:
                (uniform,) = request.random.uniforms(place + j, 1)
                chosen[j] = drawn_from(np.maximum(p - q, 0), uniform)
            values[j] = logits[j, chosen[j]]
            if not kept:
                return j
        return len(draft)


def _behind(request: Request, draft: list[int]) -> Request:
    """The request as it is when these tokens are accepted: what choosing the next one looks at."""
    view = copy.copy(request)
    view.random = copy.copy(request.random)
    if not request.sampling.greedy:
        view.random.take(len(draft))
    if draft and (request.sampling.penalised or request.sampling.counted):
        view.generated = [*request.generated, *draft]
    return view
