"""The suites: which rows there are. A group is a function from Settings to cases; a suite is a word for several groups.

One file per family of ops. What a row's providers are is decided beside its shapes; how it is measured is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..case import Case, Settings
from . import attention, decode, decode_chain, doors, kernels, linear, linear_fp8, linear_loss, quantized_linear, rows

__all__ = ["GROUPS", "SUITES", "select"]

GROUPS: dict[str, Callable[[Settings], Iterator[Case]]] = {
    "attention_forward": attention.forward,
    "attention_backward": attention.backward,
    "attention_gqa": attention.gqa,
    "attention_f32": attention.f32,
    "attention_ladder": attention.ladder,
    "attention_sizes": attention.sizes,
    "attention_memory": attention.memory,
    "decode": decode.decode,
    "kv": decode.kv,
    "decode_chain": decode_chain.decode_chain,
    "call_overhead": rows.call_overhead,
    "doors": doors.doors,
    "linear": linear.linear,
    "linear_backward": linear.linear_backward,
    "quantized_linear": quantized_linear.quantized_linear,
    "linear_fp8": linear_fp8.linear_fp8,
    "norm": rows.norm,
    "norm_backward": rows.norm_backward,
    "rope": rows.rope,
    "elementwise": rows.elementwise,
    "cross_entropy": rows.cross_entropy,
    "linear_cross_entropy": linear_loss.linear_cross_entropy,
    "kernels": kernels.kernels,
}

SUITES: dict[str, tuple[str, ...]] = {
    # Forward, backward, grouped heads and pages: where attention libraries are compared.
    "attention": ("attention_forward", "attention_backward", "attention_gqa"),
    "inference": ("decode", "kv", "decode_chain", "call_overhead", "doors"),
    "all": tuple(name for name in GROUPS if name != "kernels"),
}


def select(words: list[str]) -> list[str]:
    """The groups that the words name, each once, in order; a ValueError names what is unknown."""
    groups: list[str] = []
    for word in words or ["all"]:
        if word not in GROUPS and word not in SUITES:
            known = ", ".join([*SUITES, *GROUPS])
            raise ValueError(f"bench: no group {word!r}; one of {known} is needed, or report")
        groups += [group for group in SUITES.get(word, (word,)) if group not in groups]
    return groups
