"""What travels between a caller and the scheduler: requests, the events of their tokens, and counts.

Used by engine.py, scheduler.py and stock.py.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import NonFiniteLogitsError, PromptError
from .sampling import Draws, SamplingOptions

__all__ = ["GenerationStats", "Request", "TokenEvent", "check_request", "token_ids"]


@dataclass(frozen=True)
class TokenEvent:
    """One token of one sequence. `finish` is None, "stop" (an end-of-text token: `token`; a stop string) or "length".

    logprob, top: where the sampling options ask for them, the natural logarithm of the token's probability, and the
    likeliest tokens with theirs, best first.
    """

    sequence: int
    token: int
    finish: str | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class GenerationStats:
    prefill_tokens: int = 0  # prompt tokens computed
    prefix_tokens: int = 0  # prompt tokens whose pages were found in the cache
    prefill_seconds: float = 0.0
    decode_tokens: int = 0  # tokens that decode steps gave; the first of each sequence comes from its prefill
    decode_seconds: float = 0.0
    peak_pages: int = 0
    preemptions: int = 0  # times that a sequence gave its pages to an older one and was computed again later
    drafts: int = 0  # speculation: drafts that were verified, one a sequence and step
    drafted_tokens: int = 0  # tokens of them
    accepted_tokens: int = 0  # those that were right: tokens that took no step of their own

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Generated tokens per second, over the whole batch."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def accepted_per_draft(self) -> float:
        """Tokens of a draft that were right, on average: a step with a draft gives one more than these."""
        return self.accepted_tokens / self.drafts if self.drafts else 0.0


@dataclass(eq=False)
class Request:
    """One sequence, from its prompt to its last token. Identity is equality."""

    order: int  # older ones go first
    sequence: int  # what its events say
    prompt: list[int]
    max_new_tokens: int
    sampling: SamplingOptions
    stop: frozenset[int]
    until: Callable[[int], bool] | None = None  # called with each token; True ends the sequence
    generated: list[int] = field(default_factory=list)
    finish: str | None = None  # "stop", "length", "cancelled" or "error"
    error: NonFiniteLogitsError | None = None  # where finish is "error"
    iterated: bool = False  # whether `Engine.generate` raises the error, not `Engine.step`
    outbox: deque[TokenEvent] = field(default_factory=deque)  # events that the caller has not taken yet
    # What the scheduler keeps while the sequence has pages:
    handle: Any = None
    slots: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # of the prompt tokens still to compute
    prefilled: int = 0
    pages_dropped: int = 0  # leading ones that were given back, since no query to come looks at them
    in_flight: int = 0  # tokens of decode steps that were started and not yet read

    def __post_init__(self) -> None:
        self.random = Draws(self.sampling, self.sequence)

    @property
    def tokens(self) -> list[int]:
        """All tokens so far: what a prefill computes, also that of a sequence which had to give its pages away."""
        return self.prompt + self.generated

    @property
    def remaining(self) -> int:
        """Tokens that may still be asked for."""
        return self.max_new_tokens - len(self.generated) - self.in_flight


def token_ids(tokens: Iterable[Any], what: str) -> list[int]:
    """The ids as ints. Raises PromptError for what is no integer: 1.5 is no token, nor is a letter."""
    try:
        return list(map(operator.index, tokens))
    except TypeError:
        listed = isinstance(tokens, Iterable) and not isinstance(tokens, str)
        given = next((token for token in tokens if not hasattr(token, "__index__")), tokens) if listed else tokens
        raise PromptError(f"generate: {what} has {given!r:.60}; integers are needed") from None


def check_request(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    vocab_size: int,
    max_positions: int,
    sampling: SamplingOptions | None = None,
) -> None:
    """Raises PromptError or ValueError for what no model with these limits could run."""
    if not prompts:
        raise PromptError("generate: no prompts; one or more are needed")
    if not hasattr(max_new_tokens, "__index__") or max_new_tokens < 1:
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
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            token = next(token for token in prompt if not 0 <= token < vocab_size)
            raise PromptError(f"generate: prompt {index} has the token id {token}; ids in [0, {vocab_size}) are needed")
    biases = () if sampling is None else sampling.biases
    for token, _ in biases:
        if token >= vocab_size:
            raise ValueError(f"generate: logit_bias has the token id {token}; ids in [0, {vocab_size}) are needed")
    if sum(bias == -math.inf for _, bias in biases) == vocab_size:
        raise ValueError(f"generate: logit_bias bans all {vocab_size} tokens; one or more must be left")
