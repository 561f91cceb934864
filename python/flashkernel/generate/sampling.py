"""From a row of logits to the next token: greedy, or temperature, top-k and top-p in the order of Hugging Face.

Called by the engine (`draw`; `device_sampling.draw_rows` is the same on torch tensors, without waiting for the
device) and by the stock path (`Sampler`). Every sequence draws from its own generator, seeded by (seed, its place in
the batch), one number a token, so what one sequence draws depends on neither its batch mates nor the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

__all__ = ["Sampler", "SamplingOptions", "draw", "uniforms"]


@dataclass(frozen=True)
class SamplingOptions:
    """temperature 0 means greedy; top_k 0 and top_p 1 mean no limit."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"generate: temperature={self.temperature}; a finite number >= 0 is needed (0 is greedy)")
        if self.top_k < 0:
            raise ValueError(f"generate: top_k={self.top_k}; an integer >= 0 is needed (0 is no limit)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"generate: top_p={self.top_p}; a number in (0, 1] is needed")
        if self.seed < 0:
            raise ValueError(f"generate: seed={self.seed}; an integer >= 0 is needed")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


def uniforms(options: SamplingOptions, sequence: int) -> np.random.Generator:
    """The generator of one sequence: `random()` for each token in turn."""
    return np.random.Generator(np.random.PCG64([options.seed, sequence]))


def draw(logits: np.ndarray, temperature: float, top_k: int, top_p: float, uniform: float) -> int:
    """The token at which the cumulative probability, best first, passes `uniform` in [0, 1); float32 logits [vocab]."""
    if temperature == 0 or top_k == 1:
        return int(np.argmax(logits))
    scores = logits.astype(np.float64) / temperature
    candidates = np.arange(scores.size)
    if 0 < top_k < scores.size:
        # All that reach the k-th best score: of equal ones, those of the smallest ids are kept below.
        candidates = np.flatnonzero(scores >= np.partition(scores, -top_k)[-top_k])
    # Best first; equal scores by token id.
    candidates = candidates[np.lexsort((candidates, -scores[candidates]))][: top_k or None]
    probabilities = np.exp(scores[candidates] - scores[candidates[0]])
    probabilities /= probabilities.sum()
    if top_p < 1:
        # The smallest set whose probability reaches top_p: a token stays while less than top_p stands before it.
        before = np.cumsum(probabilities) - probabilities
        keep = max(1, int(np.count_nonzero(before < top_p)))
        candidates, probabilities = candidates[:keep], probabilities[:keep]
    cumulative = np.cumsum(probabilities)
    drawn = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
    return int(candidates[min(int(drawn), candidates.size - 1)])


class Sampler:
    """Draws the tokens of one sequence."""

    def __init__(self, options: SamplingOptions, sequence: int):
        self.options = options
        self._random = uniforms(options, sequence)

    def __call__(self, logits: np.ndarray) -> int:
        """The next token from float32 logits [vocab]."""
        options = self.options
        uniform = 0.0 if options.greedy else self._random.random()
        return draw(logits, options.temperature, options.top_k, options.top_p, uniform)
