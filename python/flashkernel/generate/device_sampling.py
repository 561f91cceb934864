"""`sampling.draw` for a batch of torch tensors: fixed shapes, and nothing that the host would have to wait for.

Called by `arrays.TorchArrays`, also under CUDA graph capture.
"""

from __future__ import annotations

import torch

__all__ = ["draw_rows", "penalise_rows", "typical_rows"]


def penalise_rows(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """float32 [rows, vocab]: `sampling.penalise` of each row. seen: bool [rows, vocab]; penalty: float64 [rows]."""
    scores, penalty = logits.float(), penalty.float()[:, None]
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def typical_rows(likely: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """bool [rows, vocab]: which probabilities > 0 are typical; float64 [rows, vocab], of any sum, and mass [rows]."""
    likely = likely / likely.sum(-1, keepdim=True)
    there = likely > 0
    information = torch.where(there, -torch.log(likely), torch.inf)
    entropy = torch.where(there, likely * information, 0.0).sum(-1, keepdim=True)
    distance = torch.where(there, (information - entropy).abs(), torch.inf)
    ordered, order = torch.sort(distance, dim=-1, stable=True)
    reached = likely.gather(1, order).cumsum(-1)
    last = torch.minimum((reached < mass[:, None]).sum(-1), there.sum(-1) - 1).clamp(min=0)
    return (distance <= ordered.gather(1, last[:, None])) | (mass[:, None] >= 1)


def draw_rows(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    min_p: torch.Tensor,
    typical_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """int64 [rows] from logits [rows, vocab]; the options float64 [rows], `uniform` in [0, 1). typical_p None: all 1.

    In float64, whatever the dtype of the logits; equal scores stand in the order of their ids (the sort is stable),
    so that a row draws the token that `draw` gives for it.
    """
    greedy = ((temperature == 0) | (top_k == 1))[:, None]
    scores = logits.double() / torch.where(greedy, 1.0, temperature[:, None])
    scores, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    likely = torch.exp(scores - scores[:, :1])
    last = scores.gather(1, (top_k.long() - 1).clamp(0, scores.shape[-1] - 1)[:, None])  # what equals it stays, too
    likely = likely * ((scores >= last) | (top_k[:, None] == 0))
    likely = likely / likely.sum(-1, keepdim=True)
    before = likely.cumsum(-1) - likely
    # Without a limit all stay: rounding must not cut the end off.
    kept = (before < top_p[:, None]) | (rank == 0) | (top_p[:, None] >= 1)
    likely = likely * (kept & (likely >= min_p[:, None] * likely[:, :1]))
    if typical_p is not None:
        likely = likely * typical_rows(likely, typical_p)
    cumulative = likely.cumsum(-1)
    place = (cumulative <= uniform[:, None] * cumulative[:, -1:]).sum(-1, keepdim=True)
    # The last that may be drawn; with a NaN nothing is above 0, and its place is taken.
    last = (rank * (likely > 0)).amax(-1, keepdim=True)
    place = torch.where(greedy, torch.zeros_like(place), torch.minimum(place, last))
    return ids.gather(1, place)[:, 0]
