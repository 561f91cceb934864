"""Frequency and presence penalties as a processor of Transformers, which has none."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor

__all__ = ["CountPenalties"]


class CountPenalties(LogitsProcessor):
    """logit - count * frequency_penalty - (count > 0) * presence_penalty, with counts of the generated tokens.

    The formula of OpenAI's API. For one `generate` call: what stands before the first call is the prompt.

    >>> import torch
    >>> from flashkernel.integrations.accelerate.penalties import CountPenalties
    >>> penalties = CountPenalties(frequency_penalty=0.5, presence_penalty=0.25)
    >>> first = penalties(torch.tensor([[0, 1]]), torch.zeros(1, 3))
    >>> penalties(torch.tensor([[0, 1, 2]]), torch.zeros(1, 3)).tolist()
    [[0.0, 0.0, -0.75]]
    """

    def __init__(self, frequency_penalty: float = 0.0, presence_penalty: float = 0.0):
        self.frequency_penalty, self.presence_penalty = float(frequency_penalty), float(presence_penalty)
        self._prompt: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._prompt is None:
            self._prompt = input_ids.shape[1]
        new = input_ids[:, self._prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        scores = scores - counts * self.frequency_penalty
        return scores - (counts > 0).to(scores.dtype) * self.presence_penalty
