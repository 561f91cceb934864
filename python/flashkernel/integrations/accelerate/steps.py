"""Generation one step at a time, each token chosen by Transformers' own processors and criteria.

The loop is that of Transformers' `_sample`, with the engine's logits in it: the functions see the tensors that they
would see there, padded prompts and finished sequences included, and draws come from torch's generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...generate.engine import Engine
from ...generate.errors import NonFiniteLogitsError

__all__ = ["by_steps"]


def by_steps(
    engine: Engine,
    ids: torch.Tensor,
    prompts: list[list[int]],
    count: int,
    processors: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    criteria: Any,
    *,
    sample: bool,
    seed: int | None,
    pad: torch.Tensor | None,
    streamer: Any,
    keep_scores: bool,
    keep_logits: bool,
    mends_logits: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None, tuple[torch.Tensor, ...] | None]:
    """ids [batch, seq + new], and the scores and logits of each step where they are kept.

    mends_logits: a processor takes NaN and inf away.
    """
    scores: tuple[torch.Tensor, ...] | None = () if keep_scores else None
    raw: tuple[torch.Tensor, ...] | None = () if keep_logits else None
    ends = pad is not None and any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    running = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    generator = None if seed is None else torch.Generator(ids.device).manual_seed(seed)
    with engine.lockstep(prompts, count) as batch:
        found = batch.prefill()
        for step in range(count):
            logits = found.to(dtype=torch.float32, device=ids.device, copy=True)
            wanted = running if ends else torch.ones_like(running)
            if not mends_logits:
                _check(logits.amax(-1), wanted, step, (math.inf, -math.inf))
            chosen_from = processors(ids, logits.clone() if keep_logits else logits)
            if scores is not None:
                scores += (chosen_from,)
            if raw is not None:
                raw += (logits,)
            if ends:
                chosen_from = chosen_from.masked_fill(~running[:, None], 0)
            _check(chosen_from.amax(-1), wanted, step, (-math.inf,))
            if sample:
                likely = torch.nn.functional.softmax(chosen_from, dim=-1)
                tokens = torch.multinomial(likely, num_samples=1, generator=generator).squeeze(1)
            else:
                tokens = torch.argmax(chosen_from, dim=-1)
            if ends:
                tokens = torch.where(running, tokens, pad)
            ids = torch.cat([ids, tokens[:, None]], dim=-1)
            if streamer is not None:
                streamer.put(tokens.cpu())
            running = running & ~criteria(ids, scores)
            if step + 1 == count or not running.any():
                break
            # Transformers goes on with finished sequences, too; their logits matter where they are given back.
            kept = None if not ends or keep_scores or keep_logits else running.tolist()
            found = batch.step(tokens.tolist(), kept)
    if streamer is not None:
        streamer.end()
    return ids, scores, raw


def _check(best: torch.Tensor, wanted: torch.Tensor, step: int, refused: tuple[float, ...]) -> None:
    """Raises NonFiniteLogitsError for the first wanted row whose best score is NaN or one of `refused`."""
    if bool((best.isfinite() | ~wanted).all()):
        return
    for sequence, value in enumerate(best.tolist()):
        if wanted[sequence] and (math.isnan(value) or value in refused):
            raise NonFiniteLogitsError(sequence, step, value)
