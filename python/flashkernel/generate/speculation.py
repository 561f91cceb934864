"""What an engine may be told about speculative decoding: where guessed tokens come from, and how many at most.

A step computes the last token of a sequence and some guessed ones behind it (a draft) together, chooses a token behind
each of them as ever, and keeps those up to the first that differs from the draft (Leviathan et al., 2023,
https://arxiv.org/abs/2211.17192; Chen et al., 2023, https://arxiv.org/abs/2302.01318). docs/speculation.md is the
guide.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .model import Model

__all__ = ["DraftModel", "PromptLookup", "Speculation", "check_speculation", "speculation_of"]

MAX_DRAFT = 64  # tokens of a draft
RULES = ("same", "rejection")


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"generate: {name}={value}; an integer in [{least}, {most}] is needed")


@dataclass(frozen=True)
class PromptLookup:
    """Drafts are what stood behind the same last tokens earlier in prompt and answer (prompt lookup,
    https://github.com/apoorvumang/prompt-lookup-decoding). They cost nothing, and fit where a text repeats itself.

    tokens: most tokens of a draft, 1 to 64. ngram: the latest place with the same last `ngram` tokens is taken, else
    one with fewer of them, down to `min_ngram`. adaptive: fewer tokens, or none, where more do not pay (pace.py);
    False: always as many as there are.

    Raises ValueError.

    >>> from flashkernel.generate import Engine, PromptLookup, find_model, load_model
    >>> engine = Engine(load_model(find_model("demo"), device="cpu"), speculation=PromptLookup(tokens=6))
    >>> tokens = [event.token for event in engine.generate([[40, 41, 42] * 4], max_new_tokens=12)]
    >>> engine.stats.accepted_tokens <= engine.stats.drafted_tokens
    True
    """

    tokens: int = 8
    ngram: int = 3
    min_ngram: int = 2
    adaptive: bool = True

    def __post_init__(self) -> None:
        _check("speculation.tokens", self.tokens, 1, MAX_DRAFT)
        _check("speculation.ngram", self.ngram, 1, MAX_DRAFT)
        _check("speculation.min_ngram", self.min_ngram, 1, self.ngram)


@dataclass(frozen=True)
class DraftModel:
    """Drafts are what a smaller model of the same vocabulary writes.

    model: from `load_model`, on the device of the engine's model. tokens: most tokens of a draft, 1 to 64. adaptive: as
    in `PromptLookup`. The draft model's keys and values lie in pages of their own, as many as the engine has.

    rule: which drawn tokens of the draft are kept. "same": those that the engine's model draws with the same random
    number. A seed then gives the text that it gives without drafts. "rejection": those that the rule of Leviathan et
    al. accepts, which are more. Texts then have the distribution of the engine's model, and a seed repeats a text only
    where the drafts are the same (adaptive=False, and pages enough). The host computes this rule. Greedy texts are the
    same under both rules.

    Raises ValueError.
    """

    model: Model
    tokens: int = 4
    adaptive: bool = True
    rule: str = "same"

    def __post_init__(self) -> None:
        _check("speculation.tokens", self.tokens, 1, MAX_DRAFT)
        if self.rule not in RULES:
            raise ValueError(f"generate: speculation.rule={self.rule!r}; one of {', '.join(RULES)} is needed")


Speculation = PromptLookup | DraftModel


def check_speculation(speculation: Any, model: Model) -> None:
    """Raises ValueError or TypeError for what does not go with the engine's model."""
    if speculation is None:
        return
    if not isinstance(speculation, (PromptLookup, DraftModel)):
        raise TypeError(
            f"generate: speculation is a {type(speculation).__name__}; PromptLookup, DraftModel or None is needed"
        )
    if model.parallel is not None:
        raise ValueError(
            "generate: speculation with a model that several ranks share: each would measure times of its own and "
            "draft other tokens; None is needed"
        )
    if isinstance(speculation, DraftModel):
        draft = speculation.model
        if draft.parallel is not None:
            raise ValueError("generate: speculation.model is shared among ranks; a model of one process is needed")
        if draft.vocab_size != model.vocab_size:
            raise ValueError(
                f"generate: speculation.model has a vocabulary of {draft.vocab_size} tokens, the engine's model one of "
                f"{model.vocab_size}; the same vocabulary is needed"
            )
        if draft.arrays.device != model.arrays.device:
            raise ValueError(
                f"generate: speculation.model is on {draft.arrays.device}, the engine's model on "
                f"{model.arrays.device}; the same device is needed"
            )


def speculation_of(name: str | None, tokens: int | None, device: str, dtype: str) -> Speculation | None:
    """What a command's `--speculate NAME --speculate-tokens TOKENS` asks for: "lookup", or the name or path of a model.

    Raises ValueError, and what `load_model` raises.
    """
    if name is None:
        if tokens is not None:
            raise ValueError("generate: --speculate-tokens without --speculate; give both, or neither")
        return None
    if name == "lookup":
        return PromptLookup() if tokens is None else PromptLookup(tokens)
    from .model import load_model
    from .model_names import find_model

    path: Path = find_model(name)
    model = load_model(path, device=device, dtype=dtype)
    return DraftModel(model) if tokens is None else DraftModel(model, tokens)
