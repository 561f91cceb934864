"""Which of Transformers' processors and stopping criteria the engine's own sampling covers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import logits_process, stopping_criteria

from ...generate.sampling_options import SamplingOptions
from .penalties import CountPenalties

__all__ = ["Choices", "end_tokens", "known"]

# In the order in which the engine applies them. Values of each: its attributes, and the options that they set.
_KNOWN: list[tuple[str, dict[str, str]]] = [
    ("SequenceBiasLogitsProcessor", {"sequence_bias": "logit_bias"}),
    ("RepetitionPenaltyLogitsProcessor", {"penalty": "repetition_penalty"}),
    ("NoBadWordsLogitsProcessor", {"sequence_bias": "logit_bias"}),  # -inf, which no penalty changes
    (
        "CountPenalties",
        {"frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty"},
    ),
    ("TemperatureLogitsWarper", {"temperature": "temperature"}),
    ("TopKLogitsWarper", {"top_k": "top_k"}),
    ("TopPLogitsWarper", {"top_p": "top_p"}),
    ("MinPLogitsWarper", {"min_p": "min_p"}),
    ("TypicalLogitsWarper", {"mass": "typical_p"}),
]
_OF_DRAWS = 4  # from here on they belong to sampling
_KINDS = {name: getattr(logits_process, name, None) for name, _ in _KNOWN} | {"CountPenalties": CountPenalties}
_ORDER = {_KINDS[name]: (rank, attributes) for rank, (name, attributes) in enumerate(_KNOWN) if _KINDS[name]}


@dataclass(frozen=True)
class Choices:
    """How the engine chooses, from one step to the next."""

    sampling: SamplingOptions
    stop: frozenset[int]


def known(processors: Iterable[Any], criteria: Iterable[Any], padding: Any, sample: bool, seed: int) -> Choices | None:
    """The engine's own options for these; None: only the functions themselves can tell.

    padding: how many hidden tokens stand before each prompt; None: all tokens are visible.
    """
    options: dict[str, Any] = {"temperature": 1.0} if sample else {}
    last = -1
    for processor in processors:
        rank, attributes = _ORDER.get(type(processor), (-1, {}))
        if rank <= last or getattr(processor, "min_tokens_to_keep", 1) != 1 or (rank >= _OF_DRAWS and not sample):
            return None
        if getattr(processor, "filter_value", -float("inf")) != -float("inf"):
            return None
        if hasattr(processor, "penalty"):  # it sees the tokens of the padding, unless it is told how many they are
            ignored = getattr(processor, "prompt_ignore_length", None)
            if (ignored.tolist() if isinstance(ignored, torch.Tensor) else ignored) != padding:
                return None
        for attribute, option in attributes.items():
            value = getattr(processor, attribute)
            if option == "logit_bias":
                if any(len(ids) != 1 for ids in value):  # a bias of several tokens in a row
                    return None
                before = options.get(option, {})
                value = before | {ids[0]: before.get(ids[0], 0.0) + bias for ids, bias in value.items()}
            options[option] = value
        last = rank
    stop = end_tokens(criteria)
    if stop is None:
        return None
    try:
        return Choices(SamplingOptions(seed=seed, **options), stop)
    except (TypeError, ValueError):  # a number that the engine does not take: the processor knows
        return None


def end_tokens(criteria: Iterable[Any]) -> frozenset[int] | None:
    """The tokens that end a sequence, if these criteria say nothing but that and a length; else None."""
    stop: frozenset[int] = frozenset()
    for criterion in criteria:
        if type(criterion) is stopping_criteria.EosTokenCriteria:
            stop |= frozenset(torch.as_tensor(criterion.eos_token_id).flatten().tolist())
        elif type(criterion) is not stopping_criteria.MaxLengthCriteria:
            return None
    return stop
