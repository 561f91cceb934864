"""Attention's options in the schemas of torch's ops: which argument each is there, and the way there and back.

A schema has no pairs, so the window is two numbers. Called by attention.py and kv_cache.py.
"""

from __future__ import annotations

from typing import Any

from flashkernel.attention_options import AttentionOptions

__all__ = ["DENSE", "NUM_DENSE", "NUM_VARLEN", "VARLEN", "from_schema", "to_schema"]

VARLEN = (
    "Tensor? alibi_slopes, Tensor? sinks, bool causal, int window_left, int window_right, float softcap, float? scale, "
    "str alibi"
)
DENSE = f"Tensor? bias, Tensor? mask, {VARLEN}"
NUM_VARLEN = VARLEN.count(",") + 1
NUM_DENSE = DENSE.count(",") + 1


def to_schema(options: AttentionOptions) -> tuple[Any, ...]:
    """The arguments that VARLEN names; those of DENSE are bias, mask and these."""
    left, right = options.window_sides()
    tensors, numbers = (options.alibi_slopes, options.sinks), (options.softcap, options.scale)
    return *tensors, options.causal, left, right, *numbers, options.alibi


def from_schema(*arguments: Any) -> dict[str, Any]:
    """The keywords of the library's op, from the arguments that DENSE or VARLEN names."""
    *dense, alibi_slopes, sinks, causal, left, right, softcap, scale, alibi = arguments
    bias, mask = dense or (None, None)
    return AttentionOptions(causal, (left, right), softcap, scale, alibi_slopes, sinks, bias, mask, alibi).keywords()
