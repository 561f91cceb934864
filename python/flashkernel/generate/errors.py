"""Errors of text generation.

Each is also the built-in type that a caller would expect (ValueError, NotImplementedError), and its text says what was
found, what is needed and, where there is one, the way out.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "GenerationError",
    "MissingDependencyError",
    "ModelMemoryError",
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


class MissingDependencyError(GenerationError, ImportError):
    """A Python package that this path needs is not installed."""
