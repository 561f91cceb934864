"""Errors of text generation.

Each is also the built-in type that a caller would expect (ValueError, NotImplementedError), and its text says what was
found, what is needed and, where there is one, the way out.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CheckpointError",
    "GenerationError",
    "MissingDependencyError",
    "ModelMemoryError",
    "NonFiniteLogitsError",
    "PromptError",
    "UnsupportedModelError",
]


class GenerationError(Exception):
    """Base of the errors below."""


class CheckpointError(GenerationError, ValueError):
    """A checkpoint directory lacks a file or a tensor, or holds one that does not fit the config."""


class UnsupportedModelError(GenerationError, NotImplementedError):
    """A valid checkpoint whose architecture, activation, RoPE variant, adapter or quantisation this engine does not
    run."""


class ModelMemoryError(GenerationError, MemoryError):
    """A valid checkpoint that needs more memory than the machine gives."""


class PromptError(GenerationError, ValueError):
    """A prompt that is empty, too long for the model, or holds a token id outside of the vocabulary."""


class NonFiniteLogitsError(GenerationError, RuntimeError):
    """The logits of a step hold a NaN or +inf, or nothing above -inf: there is no token to choose.

    sequence: the place of the sequence among the prompts. step: how many tokens it had generated before.
    """

    def __init__(self, sequence: int, step: int, value: float):
        found = "nothing above -inf" if value == float("-inf") else f"a value that is {value}"
        super().__init__(
            f"generate: the logits of sequence {sequence} at step {step} hold {found}; finite logits are needed "
            f"(-inf masks a token), so weights or activations are broken or overflow the dtype"
        )
        self.sequence, self.step, self.value = sequence, step, value

    def __reduce__(self) -> tuple[Any, ...]:
        return NonFiniteLogitsError, (self.sequence, self.step, self.value)


class MissingDependencyError(GenerationError, ImportError):
    """A Python package that this path needs is not installed."""
