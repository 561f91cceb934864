"""From a row of logits to the next token: the repetition penalty, then greedy, or temperature, top-k, top-p and min-p.

That is the order of Hugging Face.

Called by the engine (`draw`; `device_sampling.draw_rows` is the same on torch tensors, without waiting for the
device) and by the stock path (`Sampler`). Every sequence draws from its own generator, seeded by (seed, its place in
the batch), one number a token, so what one sequence draws depends on neither its batch mates nor the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .errors import NonFiniteLogitsError

__all__ = ["Sampler", "SamplingOptions", "draw", "penalise", "uniforms"]


@dataclass(frozen=True)
class SamplingOptions:
    """temperature 0 means greedy; top_k 0, top_p 1 and min_p 0 mean no limit; repetition_penalty 1 means none.

    min_p: tokens less likely than min_p times the likeliest are not drawn.
    repetition_penalty: logits of tokens that the sequence holds already, its prompt included, are divided by it where
        they are positive and multiplied where they are negative; greedy choices see it, too.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"generate: temperature={self.temperature}; a finite number >= 0 is needed (0 is greedy)")
        if self.top_k < 0:
            raise ValueError(f"generate: top_k={self.top_k}; an integer >= 0 is needed (0 is no limit)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"generate: top_p={self.top_p}; a number in (0, 1] is needed")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"generate: min_p={self.min_p}; a number in [0, 1] is needed (0 is no limit)")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(
                f"generate: repetition_penalty={self.repetition_penalty}; a finite number > 0 is needed (1 is none)"
            )
        if self.seed < 0:
            raise ValueError(f"generate: seed={self.seed}; an integer >= 0 is needed")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1


def uniforms(options: SamplingOptions, sequence: int) -> np.random.Generator:
    """The generator of one sequence: `random()` for each token in turn."""
    return np.random.Generator(np.random.PCG64([options.seed, sequence]))


def penalise(logits: np.ndarray, seen: np.ndarray, penalty: float) -> np.ndarray:
    """float32 logits [vocab] with those of the token ids in `seen` made less likely by `penalty`, in float32."""
    out, at = logits.astype(np.float32), np.unique(seen)
    found, penalty = out[at], np.float32(penalty)
    out[at] = np.where(found < 0, found * penalty, found / penalty)
    return out


def draw(logits: np.ndarray, temperature: float, top_k: int, top_p: float, uniform: float, min_p: float = 0.0) -> int:
    """The token at which the cumulative probability, best first, passes `uniform` in [0, 1); float32 logits [vocab].

    Logits with a NaN or +inf, or all -inf, give the place of that value: the caller looks at what it got.
    """
    best = int(np.argmax(logits))
    if temperature == 0 or top_k == 1 or not math.isfinite(logits[best]):
        return best
    scores = logits.astype(np.float64) / temperature
    candidates = np.arange(scores.size)
    if 0 < top_k < scores.size:
        # All that reach the k-th best score, also where several equal it: as Transformers has it.
        candidates = np.flatnonzero(scores >= np.partition(scores, -top_k)[-top_k])
    # Best first; equal scores by token id.
    candidates = candidates[np.lexsort((candidates, -scores[candidates]))]
    probabilities = np.exp(scores[candidates] - scores[candidates[0]])
    probabilities /= probabilities.sum()
    if top_p < 1:
        # The smallest set whose probability reaches top_p: a token stays while less than top_p stands before it.
        before = np.cumsum(probabilities) - probabilities
        keep = max(1, int(np.count_nonzero(before < top_p)))
        candidates, probabilities = candidates[:keep], probabilities[:keep]
    if min_p > 0:
        keep = max(1, int(np.count_nonzero(probabilities >= min_p * probabilities[0])))
        candidates, probabilities = candidates[:keep], probabilities[:keep]
    cumulative = np.cumsum(probabilities)
    drawn = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
    return int(candidates[min(int(drawn), candidates.size - 1)])


class Sampler:
    """Draws the tokens of one sequence."""

    def __init__(self, options: SamplingOptions, sequence: int):
        self.options, self.sequence, self.step = options, sequence, 0
        self._random = uniforms(options, sequence)

    def __call__(self, logits: np.ndarray, seen: Sequence[int] = ()) -> int:
        """The next token from float32 logits [vocab]; `seen`: the tokens so far, for the repetition penalty.

        Raises NonFiniteLogitsError.
        """
        options = self.options
        uniform = 0.0 if options.greedy else self._random.random()
        scores = penalise(logits, np.asarray(seen), options.repetition_penalty) if options.penalised else logits
        token = draw(scores, options.temperature, options.top_k, options.top_p, uniform, options.min_p)
        if not math.isfinite(logits[token]):
            raise NonFiniteLogitsError(self.sequence, self.step, float(logits[token]))
        self.step += 1
        return token
