"""The model's chat template: the one function that the server asks for the text of a conversation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..generate import UnsupportedModelError
from ..generate.chat_template import ChatTemplate

__all__ = ["chat_renderer"]


def chat_renderer(path: str | Path) -> Callable[[list[dict[str, str]]], str] | None:
    """Messages (role and content) to the text that the model goes on with; None: the checkpoint has no template.

    path: a checkpoint directory or a GGUF file. The function raises PromptError where the template refuses messages.
    """
    try:
        template = ChatTemplate.load(path)
    except UnsupportedModelError:
        return None
    return lambda messages: template.render(messages)
