"""Text to token ids and back, by the `tokenizers` package and the checkpoint's tokenizer.json, or the vocab.json and
merges.txt of older GPT-2 checkpoints.

`TextStream` gives text as tokens arrive: a character whose bytes are split over tokens is held back until it is whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .checkpoint import require_directory
from .errors import CheckpointError, MissingDependencyError, PromptError

__all__ = ["TextStream", "TextTokenizer"]

_REPLACEMENT = "\ufffd"  # what a decoder gives for an unfinished UTF-8 sequence


def _byte_level_bpe(vocab: Path, merges: Path) -> Any:
    """GPT-2's tokenizer; its vocabulary's <|...|> are single tokens, never made from text's letters."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer(str(vocab), str(merges))
    tokenizer.add_special_tokens([token for token in tokenizer.get_vocab() if re.fullmatch(r"<\|.+\|>", token)])
    return tokenizer


class TextTokenizer:
    def __init__(self, directory: str | Path):
        require_directory(directory)
        path, vocab, merges = (Path(directory) / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
        old = not path.is_file() and vocab.is_file() and merges.is_file()
        if not path.is_file() and not old:
            raise CheckpointError(
                f"load_tokenizer: {str(directory)!r} has no tokenizer.json (nor GPT-2's vocab.json and merges.txt); "
                f"save one with the tokenizer's save_pretrained"
            )
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingDependencyError(
                "load_tokenizer: the package tokenizers is not installed; run `pip install flashkernel[generate]`"
            ) from error
        try:
            self._tokenizer = _byte_level_bpe(vocab, merges) if old else Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises a bare Exception
            names = f"{vocab.name} with {merges.name}" if old else path.name
            raise CheckpointError(f"load_tokenizer: {names} is not a valid tokenizer: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half a surrogate pair: bytes of the command line that are not text
            raise PromptError(
                f"generate: character {error.start} of the prompt is {text[error.start]!r}, half of a surrogate pair; "
                "text in the encoding of the terminal (see PYTHONUTF8) is needed"
            ) from None
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


class TextStream:
    """Incremental decoding of one sequence. Text comes from two decodes of a short window, since a decoder may treat
    the first token of a text differently (SentencePiece drops its leading space)."""

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._ids = list(prompt[-8:])
        self._window = 0
        self._shown = len(self._ids)

    def put(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        self._ids.append(token)
        text = self._pending()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._window, self._shown = self._shown, len(self._ids)
        return text

    def end(self) -> str:
        """What is still held back, an unfinished character as U+FFFD."""
        text = self._pending()
        self._window, self._shown = self._shown, len(self._ids)
        return text

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._ids[self._window : self._shown])
        return self._tokenizer.decode(self._ids[self._window :])[len(before) :]
