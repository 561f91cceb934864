"""FlashKernel as an attention backend of SGLang.

SGLang finds `register` by the entry point "sglang.srt.plugins" and calls it in each of its processes. A user then says

    python -m sglang.launch_server --model MODEL --attention-backend flashkernel --page-size 16

Nothing changes for who does not.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]

NAME = "flashkernel"


def register() -> None:
    """Makes the backend "flashkernel" known to SGLang. May be called any number of times."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_make)


def _make(runner: Any) -> Any:
    from .backend import FlashKernelBackend

    return FlashKernelBackend(runner)
