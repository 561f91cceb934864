"""Text to token ids and back, by the `tokenizers` package and the checkpoint's tokenizer.json, or the vocab.json and
merges.txt of older GPT-2 checkpoints, or the metadata of a GGUF file.

`TextStream` gives text as tokens arrive: a character whose bytes are split over tokens is held back until it is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .errors import CheckpointError, GenerationError, MissingDependencyError, PromptError
from .files import MAX_INDEX_BYTES, is_file, read_json, require_directory, shown, without_panics
from .gguf_file import GgufFile, is_gguf
from .gguf_tokenizer import gguf_tokenizer

__all__ = ["TextStream", "TextTokenizer"]

T = TypeVar("T")
_REPLACEMENT = "\ufffd"  # what a decoder gives for an unfinished UTF-8 sequence


def _byte_level_bpe(vocab: Path, merges: Path) -> Any:
    """GPT-2's tokenizer; its vocabulary's <|...|> are single tokens, never made from text's letters."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer(str(vocab), str(merges))
    tokenizer.add_special_tokens([token for token in tokenizer.get_vocab() if re.fullmatch(r"<\|.+\|>", token)])
    return tokenizer


# Classes of Transformers that make the steps before the model themselves, and their add_prefix_space where the config
# says nothing. Other classes take tokenizer.json as it is.
_OF_BYTES = {"GPT2Tokenizer": False, "Qwen2Tokenizer": False}
_OF_PIECES = {"LlamaTokenizer": True}


def _steps(part: Any) -> list[dict[str, Any]]:
    """The normalizers or pre-tokenizers of a tokenizer, as its file has them."""

    def listed(step: Any) -> list[dict[str, Any]]:
        if not isinstance(step, dict):
            return []
        inner = step.get("pretokenizers") or step.get("normalizers") or []
        return [step, *(found for one in inner for found in listed(one))]

    return [] if part is None else listed(json.loads(part.__getstate__()))


def _prefix_space(steps: list[dict[str, Any]]) -> bool | None:
    """Whether a space is put before a text; None: none of the steps is one that could."""
    found: bool | None = None
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel":
            found = bool(found or step.get("add_prefix_space"))
        elif kind == "Metaspace":
            found = bool(found or step.get("prepend_scheme", "always") != "never")
        elif kind == "Prepend":
            found = True
    return found


class TextTokenizer:
    """The tokenizer of a checkpoint directory: tokenizer.json, as in Transformers, else the older pair of files; or
    that of a GGUF file."""

    def __init__(self, directory: str | Path):
        try:
            import tokenizers  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError(
                "load_tokenizer: the package tokenizers is not installed; run `pip install flashkernel[generate]`"
            ) from error
        self._before: tuple[int, ...] = ()  # ids that stand around a text where the tokenizer itself adds none
        self._after: tuple[int, ...] = ()
        if is_gguf(directory):
            self._names = shown(Path(directory).name)
            metadata = GgufFile(directory).metadata
            made = self._call("has no valid tokenizer", lambda: gguf_tokenizer(metadata, self._names))
            self._tokenizer, self._before, self._after = made.tokenizer, made.before, made.after
        else:
            self._open_directory(Path(directory))

    def _open_directory(self, directory: Path) -> None:
        from tokenizers import Tokenizer

        require_directory(directory)
        path, vocab, merges = (directory / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
        new = is_file(path)
        if not new and not (is_file(vocab) and is_file(merges)):
            raise CheckpointError(
                f"load_tokenizer: {shown(repr(str(directory)))} has no tokenizer.json (nor GPT-2's vocab.json and "
                "merges.txt); save one with the tokenizer's save_pretrained"
            )
        self._names = path.name if new else f"{vocab.name} with {merges.name}"

        def load() -> Any:
            tokenizer = Tokenizer.from_file(str(path)) if new else _byte_level_bpe(vocab, merges)
            tokenizer.no_padding()
            tokenizer.no_truncation()
            return tokenizer

        self._tokenizer = self._call("is not a valid tokenizer", load)
        added = _added_tokens(directory)
        lacking = self._call(
            "is not a valid tokenizer", lambda: [name for name in added if self._tokenizer.token_to_id(name) is None]
        )
        if lacking:
            raise CheckpointError(
                f"load_tokenizer: {self._names} lacks the added token {shown(repr(lacking[0]))} of this directory; "
                "save the tokenizer again with its save_pretrained, which writes one tokenizer.json"
            )

        self._check_prefix_space(Path(directory))

    def _check_prefix_space(self, directory: Path) -> None:
        """Refuses a tokenizer.json that differs in the space before a text from tokenizer_config.json: Transformers'
        class of a model goes by the latter. It does not go by add_bos_token and add_eos_token beside a tokenizer.json.
        """
        path = directory / "tokenizer_config.json"
        config = read_json(path, MAX_INDEX_BYTES) if is_file(path) else {}
        name = config.get("tokenizer_class")
        steps = self._call(
            "is not a valid tokenizer",
            lambda: [*_steps(self._tokenizer.normalizer), *_steps(self._tokenizer.pre_tokenizer)],
        )
        own = _prefix_space(steps)
        if own is None or not isinstance(name, str):
            return
        is_bytes = any(step.get("type") == "ByteLevel" for step in steps)
        default = (_OF_BYTES if is_bytes else _OF_PIECES).get(name.removesuffix("Fast"))
        if default is None:
            return
        given = config.get("add_prefix_space")
        wanted = given if isinstance(given, bool) else default
        if wanted != own:
            raise CheckpointError(
                f"load_tokenizer: {self._names} puts {'a' if own else 'no'} space before a text, but tokenizer_config."
                f"json says add_prefix_space={wanted} to {shown(name)}; save the tokenizer again with its "
                "save_pretrained"
            )

    def _call(self, failure: str, call: Callable[[], T]) -> T:
        """call(), where whatever the package raises becomes a CheckpointError."""
        try:
            return without_panics(call)
        except (MemoryError, GenerationError):
            raise
        except Exception as error:  # tokenizers raises a bare Exception
            raise CheckpointError(f"load_tokenizer: {self._names} {failure}: {shown(error, 200)}") from error

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """add_special: with the tokens that stand around every text, such as one for its begin; a chat template writes
        them itself."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half a surrogate pair: bytes of the command line that are not text
            raise PromptError(
                f"generate: character {error.start} of the prompt is {text[error.start]!r}, half of a surrogate pair; "
                "text in the encoding of the terminal (see PYTHONUTF8) is needed"
            ) from None
        encoding = self._call(
            "cannot encode the prompt", lambda: self._tokenizer.encode(text, add_special_tokens=add_special)
        )
        return [*self._before, *encoding.ids, *self._after] if add_special else list(encoding.ids)

    def name_of(self, token: int) -> str:
        """What the vocabulary calls a token; empty for an id that it lacks."""
        return str(self._tokenizer.id_to_token(token) or "")

    def decode(self, ids: Sequence[int]) -> str:
        return self._call(
            "cannot decode the tokens", lambda: str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
        )


def _added_tokens(directory: Path) -> list[str]:
    """The tokens that Transformers would add to the tokenizer's own, by the files that may name some."""
    names: list[Any] = []
    for file in ("added_tokens.json", "tokenizer_config.json"):
        path = directory / file
        if not is_file(path):
            continue
        values = read_json(path, MAX_INDEX_BYTES)
        if file == "added_tokens.json":
            names += values
        else:
            tokens = values.get("added_tokens_decoder")
            tokens = tokens.values() if isinstance(tokens, dict) else []
            names += [token.get("content") for token in tokens if isinstance(token, dict)]
    return [name for name in names if isinstance(name, str)]


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
