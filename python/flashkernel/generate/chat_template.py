"""A model's chat template: the messages of a conversation as the text that the model was trained to go on with.

The template is Jinja, written by whoever made the model, so it runs in Jinja's sandbox, as in Transformers, and gets
plain strings only. What it gives equals `apply_chat_template` of Transformers.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .config import read_field, text
from .errors import CheckpointError, GenerationError, MissingDependencyError, PromptError, UnsupportedModelError
from .files import MAX_INDEX_BYTES, is_file, read_bytes, read_json, require_directory, shown
from .gguf_checkpoint import special_token
from .gguf_file import GgufFile, is_gguf

__all__ = ["ChatTemplate"]

MAX_TEMPLATE_BYTES = 1 << 20
MAX_RENDERED = 1 << 24  # characters
MAX_REPEATED = 1 << 20  # of what a template multiplies

_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _environment() -> Any:
    """Jinja's sandbox with what templates of models expect to find."""
    try:
        import jinja2
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
    except ImportError as error:
        raise MissingDependencyError(
            "chat: the package jinja2 is not installed; run `pip install flashkernel[chat]`"
        ) from error
    if tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdecimal()) < (3, 1, 6):
        raise MissingDependencyError(
            f"chat: jinja2 {jinja2.__version__} is installed, whose sandbox has known holes; run "
            "`pip install flashkernel[chat]`, which brings 3.1.6 or newer"
        )

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            """No product of a size that only a template made to fill the memory would ask for."""
            for value, other in ((left, right), (right, left)):
                numbers = isinstance(value, int) and isinstance(other, int)
                many = other if isinstance(other, int) else 0
                size = value.bit_length() if numbers else len(value) if isinstance(value, (str, list, tuple)) else 0
                if size * many > MAX_REPEATED and (operator == "**" or not numbers):
                    raise SecurityError(f"a product of {MAX_REPEATED} elements or more")
            return super().call_binop(context, operator, left, right)

    class Generation(jinja2.ext.Extension):
        """{% generation %}: marks an answer for training; here what it encloses is all."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own escapes what HTML would obey

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    found = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    found.filters["tojson"] = tojson
    found.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return found


class ChatTemplate:
    """A template and the special tokens that it may write, by Transformers' names ("bos_token", ...).

    Raises CheckpointError for a template that is no Jinja, MissingDependencyError without jinja2.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], name: str):
        self._tokens, self._name = dict(tokens), name
        try:
            self._template = _environment().from_string(source)
        except (MemoryError, GenerationError):
            raise
        except Exception as error:  # TemplateSyntaxError, and what the compiler makes of odd code
            raise CheckpointError(
                f"chat: the chat template of {name} is no valid Jinja: {shown(error, 200)}"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> ChatTemplate:
        """The template of a checkpoint directory or a GGUF file. Raises UnsupportedModelError where there is none."""
        name = shown(Path(path).name)
        source, tokens = _of_file(Path(path), name) if is_gguf(path) else _of_directory(Path(path))
        if not source:
            raise UnsupportedModelError(
                f"chat: {name} has no chat template; a model that was trained to chat is needed (`flashkernel "
                "generate` continues text with any)"
            )
        return cls(source, tokens, name)

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation: messages with "role" (system, user, assistant) and "content".

        add_generation_prompt: with the begin of an answer. Raises PromptError where the template refuses the messages.

        >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", {}, "example")
        >>> template.render([{"role": "user", "content": "Hello"}])
        '<user>Hello'
        """
        plain = [{str(key): str(value) for key, value in message.items()} for message in messages]
        values = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        pieces, size = [], 0
        try:
            for piece in self._template.generate(messages=plain, **values, **self._tokens):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED:
                    raise ValueError(f"more than {MAX_RENDERED} characters")
        except MemoryError:
            raise
        except Exception as error:  # whatever the template's code raises
            raise PromptError(
                f"chat: the chat template of {self._name} refuses the messages: {shown(error, 200)}"
            ) from error
        return "".join(pieces)


def _of_file(path: Path, name: str) -> tuple[str, dict[str, str]]:
    metadata = GgufFile(path).metadata
    words = metadata.get("tokenizer.ggml.tokens")
    tokens = {}
    for token, own in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = special_token(metadata, own, name)
        if number is not None and isinstance(words, list) and isinstance(words[number], str):
            tokens[f"{token}_token"] = words[number]
    return read_field(metadata, "tokenizer.chat_template", text(""), name), tokens


def _of_directory(path: Path) -> tuple[str, dict[str, str]]:
    """chat_template.jinja, which wins in Transformers, else the field of tokenizer_config.json."""
    require_directory(path)
    config = path / "tokenizer_config.json"
    fields = read_json(config, MAX_INDEX_BYTES) if is_file(config) else {}
    tokens = {}
    for name in _TOKENS:
        value = fields.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    file = path / "chat_template.jinja"
    if is_file(file):
        try:
            return read_bytes(file, MAX_TEMPLATE_BYTES).decode("utf-8"), tokens
        except UnicodeDecodeError:
            raise CheckpointError("load_model: chat_template.jinja is not UTF-8") from None
    source = fields.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else "", tokens
