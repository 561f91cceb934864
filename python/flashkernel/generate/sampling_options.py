"""What a request asks of sampling, and which parts of it a step must compute.

The order in which they act is that of Hugging Face: logit bias, repetition penalty, frequency and presence penalties;
then greedy, or temperature, top-k, top-p, min-p and typical sampling.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["MAX_LOGPROBS", "SamplingOptions", "Wanted", "wanted"]

MAX_LOGPROBS = 20  # alternatives of a token, as in OpenAI's API


def _check(name: str, value: float, fine: bool, needed: str) -> None:
    if not fine:
        raise ValueError(f"generate: {name}={value}; {needed} is needed")


@dataclass(frozen=True)
class SamplingOptions:
    """How the tokens of a sequence are chosen. The defaults are greedy and without penalties.

    temperature: divides the logits; 0 means greedy.
    top_k: only the k likeliest tokens are drawn; 0: no limit.
    top_p: only the smallest set of likeliest tokens whose probability reaches top_p is drawn (nucleus sampling,
        https://arxiv.org/abs/1904.09751); 1: no limit.
    seed: of the draws. The same seed gives the same draws on every device and beside any other request.
    min_p: tokens less likely than min_p times the likeliest are not drawn (https://arxiv.org/abs/2407.01082).
    repetition_penalty: logits of tokens that the sequence holds already, its prompt included, are divided by it where
        they are positive and multiplied where they are negative (https://arxiv.org/abs/1909.05858); 1: none.
    typical_p: only the tokens whose information is closest to the entropy, up to this probability, are drawn (locally
        typical sampling, https://arxiv.org/abs/2202.00666); 1: no limit.
    frequency_penalty, presence_penalty: a logit loses `count * frequency_penalty`, and `presence_penalty` if count > 0,
        where count says how often the sequence has generated the token (the formula of OpenAI's API); 0: none.
    logit_bias: numbers added to the logits of token ids; -inf bans a token.
    logprobs: how many likely alternatives each `TokenEvent` tells of, 0 to 20, beside the natural logarithm of the
        token's own probability; None: neither. They are those of the model, before penalties, bias and temperature.

    Penalties and biases act on greedy choices, too. Raises ValueError.

    >>> SamplingOptions(temperature=0.8, min_p=0.05, logit_bias={13: -100.0}).greedy
    False
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    typical_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        finite = math.isfinite
        t, r = self.temperature, self.repetition_penalty
        _check("temperature", t, finite(t) and t >= 0, "a finite number >= 0 (0 is greedy)")
        _check("top_k", self.top_k, self.top_k >= 0, "an integer >= 0 (0 is no limit)")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "a number in (0, 1]")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "a number in [0, 1] (0 is no limit)")
        _check("repetition_penalty", r, finite(r) and r > 0, "a finite number > 0 (1 is none)")
        _check("typical_p", self.typical_p, 0 < self.typical_p <= 1, "a number in (0, 1] (1 is no limit)")
        for name in ("frequency_penalty", "presence_penalty"):
            _check(name, getattr(self, name), finite(getattr(self, name)), "a finite number (0 is none)")
        _check("seed", self.seed, self.seed >= 0, "an integer >= 0")
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, 0 <= self.logprobs <= MAX_LOGPROBS, f"an integer in [0, {MAX_LOGPROBS}]")
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        biases = tuple(sorted((int(token), float(bias)) for token, bias in dict(pairs).items()))
        for token, bias in biases:
            _check("logit_bias", token, token >= 0, "a token id >= 0")
            _check(f"logit_bias[{token}]", bias, finite(bias) or bias == -math.inf, "a finite number, or -inf,")
        object.__setattr__(self, "logit_bias", biases)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs of a token id and its bias, by id."""
        return self.logit_bias if isinstance(self.logit_bias, tuple) else tuple(self.logit_bias.items())

    @property
    def penalised(self) -> bool:
        """Whether the tokens of the prompt matter beyond the model."""
        return self.repetition_penalty != 1

    @property
    def counted(self) -> bool:
        """Whether it matters how often a token was generated."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0


class Wanted(NamedTuple):
    """What choosing the tokens of some rows takes beyond the best logit of each; a CUDA graph is made for each kind."""

    sampled: bool = False
    typical: bool = False
    penalised: bool = False
    counted: bool = False
    biased: bool = False
    scored: bool = False  # log-probabilities are asked for

    @property
    def adjusted(self) -> bool:
        """Whether choices are made from other numbers than the logits."""
        return self.penalised or self.counted or self.biased


def wanted(options: Iterable[SamplingOptions]) -> Wanted:
    """What some row of a batch needs."""
    rows = list(options)
    drawn = [row for row in rows if not row.greedy]
    return Wanted(
        sampled=bool(drawn),
        typical=any(row.typical_p < 1 for row in drawn),
        penalised=any(row.penalised for row in rows),
        counted=any(row.counted for row in rows),
        biased=any(row.logit_bias for row in rows),
        scored=any(row.logprobs is not None for row in rows),
    )
