"""The oracle: every op in NumPy and float64, as its formula says, with no thought for speed.

Called by the tests and `flashkernel doctor`; bench, whose shapes are too large for it, holds results against its peers'
by the same rule (`flashkernel.testing`). Functions take what their namesakes in `flashkernel` do (NumPy arrays
of any float dtype) and return all of their results in float64, gradients included. Invariant: no code is shared with
the kernels.
"""

from __future__ import annotations

from flashkernel.reference.attention import (
    attention,
    attention_backward,
    attention_paged,
    attention_varlen,
    attention_varlen_backward,
    merge_states,
)
from flashkernel.reference.kv_ops import (
    kv_append,
    kv_copy_pages,
    kv_quantize,
    kv_read,
    round_to_e4m3,
    round_to_int8,
)
from flashkernel.reference.ops import (
    activate,
    add,
    argmax,
    cross_entropy,
    cross_entropy_backward,
    layer_norm,
    layer_norm_backward,
    linear,
    linear_backward,
    log_softmax,
    log_softmax_backward,
    reduce_max,
    reduce_mean,
    reduce_sum,
    rms_norm,
    rms_norm_backward,
    rope,
    rope_table,
    softmax,
    softmax_backward,
    swiglu,
    swiglu_backward,
)

__all__ = [
    "activate",
    "add",
    "argmax",
    "attention",
    "attention_backward",
    "attention_paged",
    "attention_varlen",
    "attention_varlen_backward",
    "cross_entropy",
    "cross_entropy_backward",
    "kv_append",
    "kv_copy_pages",
    "kv_quantize",
    "kv_read",
    "layer_norm",
    "layer_norm_backward",
    "linear",
    "linear_backward",
    "log_softmax",
    "log_softmax_backward",
    "merge_states",
    "reduce_max",
    "reduce_mean",
    "reduce_sum",
    "rms_norm",
    "rms_norm_backward",
    "rope",
    "rope_table",
    "round_to_e4m3",
    "round_to_int8",
    "softmax",
    "softmax_backward",
    "swiglu",
    "swiglu_backward",
]
