"""Sampling for torch: tokens have no gradient."""

from __future__ import annotations

from typing import Any

import torch

import flashkernel as fk

from ._library import define, direct

__all__ = ["sample"]

_NAMES = (
    *("temperature", "top_k", "top_p", "min_p", "bias", "history"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "offset"),
)


def _kernel(logits: Any, *given: Any) -> Any:
    return fk.sample(logits, **dict(zip(_NAMES, given, strict=True)))


def _fake(logits: Any, *_: Any) -> Any:
    return logits.new_empty(logits.shape[:1], dtype=torch.int64)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.mark_non_differentiable(output)


def _grad(ctx: Any, _: Any) -> Any:
    return (None,) * (1 + len(_NAMES))


_sample = define(
    f"sample(Tensor logits, {', '.join(f'Tensor? {name}' for name in _NAMES)}) -> Tensor",
    _kernel,
    _fake,
    backward=_grad,
    setup_context=_setup,
)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    history: torch.Tensor | None = None,
    repetition_penalty: torch.Tensor | None = None,
    frequency_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """The next token of each row of logits [rows, vocab], int64 [rows], as `flashkernel.sample` draws it. No gradient.

    >>> import torch, flashkernel.torch as fkt
    >>> fkt.sample(torch.tensor([[0.0, 2.0, 1.0]])).tolist()
    [1]
    """
    given = (
        *(temperature, top_k, top_p, min_p, bias, history),
        *(repetition_penalty, frequency_penalty, presence_penalty, seed, offset),
    )
    if direct(logits, bias):
        return _kernel(logits, *given)
    return _sample(logits, *given)
