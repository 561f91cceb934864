"""From a row of logits to the next token: greedy, or temperature, top-k and top-p in the order of Hugging Face.

Called by the engine and by the stock path. Every sequence draws from its own generator, seeded by (seed, its place in
the batch), so what one sequence draws does not depend on its batch mates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

__all__ = ["Sampler", "SamplingOptions"]


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


class Sampler:
    """Draws the tokens of one sequence."""

    def __init__(self, options: SamplingOptions, sequence: int):
        self.options = options
        self._random = np.random.Generator(np.random.PCG64([options.seed, sequence]))

    def __call__(self, logits: np.ndarray) -> int:
        """The next token from float32 logits [vocab]."""
        if self.options.greedy:
            return int(np.argmax(logits))
        scores = logits.astype(np.float64) / self.options.temperature
        candidates = np.arange(scores.size)
        if 0 < self.options.top_k < scores.size:
            candidates = np.argpartition(scores, -self.options.top_k)[-self.options.top_k :]
        # Best first; equal scores by token id, so that a draw does not depend on how the partition left them.
        candidates = candidates[np.lexsort((candidates, -scores[candidates]))]
        probabilities = np.exp(scores[candidates] - scores[candidates[0]])
        probabilities /= probabilities.sum()
        if self.options.top_p < 1:
            # The smallest set whose probability reaches top_p: a token stays while less than top_p stands before it.
            before = np.cumsum(probabilities) - probabilities
            keep = max(1, int(np.count_nonzero(before < self.options.top_p)))
            candidates, probabilities = candidates[:keep], probabilities[:keep]
        cumulative = np.cumsum(probabilities)
        drawn = np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right")
        return int(candidates[min(int(drawn), candidates.size - 1)])
