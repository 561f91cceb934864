"""The tokenizer that a GGUF file describes, made with the package tokenizers.

Called by tokenizer.py. Two kinds: "gpt2", byte-level BPE with the file's merges, whose way to cut text before the
merges `tokenizer.ggml.pre` names; and "llama", SentencePiece's BPE, whose merges follow from the scores of its tokens.
A file does not spell these ways out, so one with another name is refused: text would get other tokens than the model
was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import array, flag, read_field, text
from .errors import CheckpointError, UnsupportedModelError
from .files import describe, shown
from .gguf_checkpoint import special_token

__all__ = ["GgufTokenizer", "gguf_tokenizer"]

MAX_TOKENS = 1 << 20
MAX_PIECE = 256  # characters of a token of SentencePiece: each of its cuts is looked at

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type that matter here

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}" + _REST.replace(r"[\r\n]*", r"[\r\n/]*")


@dataclass(frozen=True)
class _Cut:
    """How text is cut before the merges of byte-level BPE."""

    pattern: str | None = None  # None: GPT-2's
    digits: bool = False  # each digit is a piece of its own
    whole: bool = False  # a piece that is a token needs no merges
    begin: bool = False  # whether texts begin with a token unless the file says otherwise
    nfc: bool = False


_LLAMA3 = _Cut(_CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST, whole=True, begin=True)
_QWEN2 = _Cut(_CONTRACTIONS + _WORDS + r"|\p{N}" + _REST, nfc=True)
_CUTS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "jais", "mpt"), _Cut()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), _Cut(digits=True)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _Cut(_TEKKEN, whole=True, begin=True),
}


@dataclass(frozen=True)
class GgufTokenizer:
    """tokenizer: of the package tokenizers. before, after: the ids that stand around a text."""

    tokenizer: Any
    before: tuple[int, ...]
    after: tuple[int, ...]


class _Vocabulary:
    """The fields of a file's tokenizer, checked."""

    def __init__(self, metadata: Mapping[str, Any], file: str):
        self.metadata, self.file = metadata, file
        tokens = self._list("tokens", str, None)
        if not 0 < len(tokens) <= MAX_TOKENS:
            raise self._fail(f"has {len(tokens)} tokenizer.ggml.tokens; 1 to {MAX_TOKENS} are needed")
        self.tokens: list[str] = tokens
        self.ids = {token: i for i, token in enumerate(tokens)}
        if len(self.ids) < len(tokens):
            twice = next(token for i, token in enumerate(tokens) if self.ids[token] != i)
            raise self._fail(f"has the token {shown(repr(twice))} twice")
        self.types: list[int] = self._list("token_type", int, len(tokens)) or [1] * len(tokens)

    def _fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"load_tokenizer: {self.file} {what}")

    def _list(self, name: str, kind: type, length: int | None) -> list[Any]:
        key = f"tokenizer.ggml.{name}"
        values = read_field(self.metadata, key, array(), self.file) or []
        if not all(type(value) is kind for value in values):
            raise self._fail(f"has {key} that are no array of {kind.__name__}")
        if values and length is not None and len(values) != length:
            raise self._fail(f"has {len(values)} {key} for {length} tokens")
        return list(values)

    def flag(self, name: str, default: bool) -> bool:
        return bool(read_field(self.metadata, f"tokenizer.ggml.{name}", flag(default), self.file))

    def merges(self) -> list[tuple[str, str]]:
        merges = self._list("merges", str, None)
        if not merges:
            raise self._fail("has no tokenizer.ggml.merges")
        pairs = []
        for merge in merges:
            left, space, right = merge.partition(" ")
            if not (left and space and right) or " " in right:
                raise self._fail(f"has the merge {shown(repr(merge))}; two parts and one space are needed")
            pairs.append((left, right))
        return pairs

    def merges_of_scores(self) -> list[tuple[str, str]]:
        """The pairs that join to a token, the best-scored token first: SentencePiece's own order."""
        scores = self._list("scores", float, len(self.tokens))
        if not scores:
            raise self._fail("has no tokenizer.ggml.scores")
        ids, found = self.ids, []
        for token, score in zip(self.tokens, scores, strict=True):
            if len(token) > MAX_PIECE:
                raise self._fail(f"has a token of {len(token)} characters; at most {MAX_PIECE} are needed")
            cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
            pairs = [(left, right) for left, right in cuts if left in ids and right in ids]
            found += [(score, pair) for pair in sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
        found.sort(key=lambda item: (item[0], len(item[1][0]), len(item[1][1])), reverse=True)
        return [pair for _, pair in found]

    def around(self, begin: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids before and behind a text. begin: the default where the file has no add_bos_token."""
        ids = []
        for name, default in (("bos", begin), ("eos", False)):
            token = special_token(self.metadata, name, self.file)
            ids.append((token,) if self.flag(f"add_{name}_token", default) and token is not None else ())
        return ids[0], ids[1]


def _byte_level(words: _Vocabulary) -> tuple[Any, _Cut]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    key = "tokenizer.ggml.pre"
    name = read_field(words.metadata, key, text(""), words.file)
    if name not in _CUTS:
        raise UnsupportedModelError(
            f"load_tokenizer: {words.file} has {f'{key}={describe(name)}' if name else f'no {key}'}; one of "
            f"{', '.join(_CUTS)} is needed"
        )
    cut = _CUTS[name]
    tokenizer: Any = Tokenizer(models.BPE(words.ids, words.merges(), ignore_merges=cut.whole))
    if cut.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut.digits else []
    if cut.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, cut


def _sentencepiece(words: _Vocabulary) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    unknown = next((token for token, kind in zip(words.tokens, words.types, strict=True) if kind == _UNKNOWN), None)
    merges = words.merges_of_scores()
    tokenizer: Any = Tokenizer(models.BPE(words.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    space = words.flag("add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="\u2581", prepend_scheme="first" if space else "never", split=False
    )
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space else steps)
    return tokenizer


def gguf_tokenizer(metadata: Mapping[str, Any], file: str) -> GgufTokenizer:
    """The tokenizer of a file's metadata, `file` being its name.

    Raises CheckpointError for fields that lack or do not fit, UnsupportedModelError for another kind; whatever the
    package tokenizers raises comes through.
    """
    from tokenizers import AddedToken

    kind = read_field(metadata, "tokenizer.ggml.model", text(""), file)
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"load_tokenizer: {file} has tokenizer.ggml.model={describe(kind)}; gpt2 (byte-level BPE) or llama "
            "(SentencePiece's BPE) is needed"
        )
    words = _Vocabulary(metadata, file)
    if kind == "gpt2":
        tokenizer, cut = _byte_level(words)
        begin = cut.begin
    else:
        tokenizer, begin = _sentencepiece(words), True
    named = list(zip(words.tokens, words.types, strict=True))
    special = [AddedToken(token, normalized=False, special=True) for token, what in named if what == _CONTROL]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token, what in named if what == _USER_DEFINED]
    )
    before, after = words.around(begin)
    return GgufTokenizer(tokenizer, before, after)
