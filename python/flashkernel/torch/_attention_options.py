"""Attention's options in the schemas of torch's ops: which argument each is there, and the way there and back.

A schema has no pairs, so the window is two numbers. Called by attention.py and kv_cache.py.
"""

from __future__ import annotations

from typing import Any

from flashkernel.attention_options import AttentionOptions

__all__ = ["DENSE", "NUM_DENSE", "NUM_VARLEN", "VARLEN", "from_schema", "to_dense_schema", "to_schema"]

VARLEN = (
    "Tensor? alibi_slopes, Tensor? sinks, bool causal, SymInt window_left, SymInt window_right, float softcap, "
    "float? scale, str alibi"
)
DENSE = f"Tensor? bias, Tensor? mask, Tensor? block_mask, {VARLEN}, SymInt block_size_q, SymInt block_size_k"
NUM_VARLEN = VARLEN.count(",") + 1
NUM_DENSE = DENSE.count(",") + 1


def to_schema(options: AttentionOptions) -> tuple[Any, ...]:
    """The arguments that VARLEN names."""
    left, right = options.window_sides()
    tensors, numbers = (options.alibi_slopes, options.sinks), (options.softcap, options.scale)
    return *tensors, options.causal, left, right, *numbers, options.alibi


def to_dense_schema(options: AttentionOptions) -> tuple[Any, ...]:
    """The arguments that DENSE names."""
    tensors = options.bias, options.mask, options.block_mask
    return *tensors, *to_schema(options), *options.block_sizes()


def from_schema(*arguments: Any) -> dict[str, Any]:
    """The keywords of the library's op, from the arguments that DENSE or VARLEN names."""
    bias = mask = block_mask = None
    block_size = 128, 128
    if len(arguments) == NUM_DENSE:
        bias, mask, block_mask, *arguments_of_all, size_q, size_k = arguments
        arguments, block_size = tuple(arguments_of_all), (size_q, size_k)
    alibi_slopes, sinks, causal, left, right, softcap, scale, alibi = arguments
    return AttentionOptions(
        causal, (left, right), softcap, scale, alibi_slopes, sinks, bias, mask, alibi, block_mask, block_size
    ).keywords()
