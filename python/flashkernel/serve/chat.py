"""The model's chat template: the one function that the server asks for the text of a conversation."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..generate import CheckpointError, MissingDependencyError, PromptError
from ..generate.files import MAX_INDEX_BYTES, is_file, read_json, shown

__all__ = ["chat_renderer"]

_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def chat_renderer(directory: str | Path) -> Callable[[list[dict[str, str]]], str] | None:
    """Messages (role and content) to the text that the model goes on with; None: the checkpoint has no template.

    The template is code of whoever made the model, so it runs in Jinja's sandbox. The function raises PromptError where
    the template refuses the messages.
    """
    directory = Path(directory)
    config = directory / "tokenizer_config.json"
    fields = read_json(config, MAX_INDEX_BYTES) if is_file(config) else {}
    source = fields.get("chat_template")
    if isinstance(source, list):
        source = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}.get("default")
    file = directory / "chat_template.jinja"
    if is_file(file):
        source = file.read_text(encoding="utf-8")
    if not isinstance(source, str) or not source:
        return None
    tokens = {}
    for name in _TOKENS:
        value = fields.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    template = _compile(source)

    def render(messages: list[dict[str, str]]) -> str:
        try:
            return str(template.render(messages=messages, add_generation_prompt=True, tools=None, **tokens))
        except MemoryError:
            raise
        except Exception as error:  # whatever the template's code raises
            raise PromptError(f"chat: the chat template refuses the messages: {shown(error, 200)}") from error

    return render


def _compile(source: str) -> Any:
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingDependencyError(
            "serve: the package jinja2 is not installed; run `pip install flashkernel[serve]`"
        ) from error

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.datetime.now().strftime(form))
    try:
        return environment.from_string(source)
    except Exception as error:
        raise CheckpointError(f"chat: the chat template is no valid Jinja: {shown(error, 200)}") from error
