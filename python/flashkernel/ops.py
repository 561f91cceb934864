"""The ops: functions of the compiled module, reached without a Python layer in between, and `force`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from flashkernel._C import (
    Array,
    BlockTableError,
    CudaError,
    Explanation,
    KernelInfo,
    KernelVerdict,
    KvCache,
    KvCacheStats,
    KvPagePool,
    MemoryStats,
    OutOfMemoryError,
    OutOfPagesError,
    SequenceId,
    add,
    argmax,
    attention,
    attention_backward,
    attention_paged,
    attention_varlen,
    attention_varlen_backward,
    build_info,
    check_block_table,
    cpu_features,
    cross_entropy,
    cross_entropy_backward,
    explain,
    force_kernels,
    forced_kernels,
    get_num_threads,
    kernels,
    kv_append,
    kv_copy_pages,
    kv_read,
    layer_norm,
    layer_norm_backward,
    linear,
    linear_backward,
    log_softmax,
    log_softmax_backward,
    memory_stats,
    merge_states,
    num_cuda_devices,
    reduce_max,
    reduce_mean,
    reduce_sum,
    rms_norm,
    rms_norm_backward,
    rope,
    rope_table,
    set_num_threads,
    softmax,
    softmax_backward,
    swiglu,
    swiglu_backward,
)

__all__ = [
    "Array",
    "BlockTableError",
    "CudaError",
    "Explanation",
    "KernelInfo",
    "KernelVerdict",
    "KvCache",
    "KvCacheStats",
    "KvPagePool",
    "MemoryStats",
    "OutOfMemoryError",
    "OutOfPagesError",
    "SequenceId",
    "add",
    "argmax",
    "attention",
    "attention_backward",
    "attention_paged",
    "attention_varlen",
    "attention_varlen_backward",
    "build_info",
    "check_block_table",
    "cpu_features",
    "cross_entropy",
    "cross_entropy_backward",
    "explain",
    "force",
    "force_kernels",
    "forced_kernels",
    "get_num_threads",
    "kernels",
    "kv_append",
    "kv_copy_pages",
    "kv_read",
    "layer_norm",
    "layer_norm_backward",
    "linear",
    "linear_backward",
    "log_softmax",
    "log_softmax_backward",
    "memory_stats",
    "merge_states",
    "num_cuda_devices",
    "reduce_max",
    "reduce_mean",
    "reduce_sum",
    "rms_norm",
    "rms_norm_backward",
    "rope",
    "rope_table",
    "set_num_threads",
    "softmax",
    "softmax_backward",
    "swiglu",
    "swiglu_backward",
]


@contextlib.contextmanager
def force(patterns: str) -> Iterator[None]:
    """Run only kernels whose id matches, within a ``with`` block; what was in force before is back after it.

    patterns: as for `force_kernels`: an id such as "attention_fwd/cpu/scalar", a prefix of one, or "*/cpu/scalar";
       several, comma-separated. Ops that no pattern names choose freely. One with "?" at its end ("*/cuda/sm75?") only
       puts its kernels before all others where they accept the call. Process-wide, not per thread.

    Raises: ValueError if a pattern matches no kernel. An op whose forced kernel can't serve a call raises
    NotImplementedError.

    Example:

    >>> import flashkernel as fk
    >>> with fk.force("attention_fwd/cpu/scalar"):
    ...     fk.forced_kernels()
    'attention_fwd/cpu/scalar'
    """
    before = forced_kernels()
    force_kernels(patterns)
    try:
        yield
    finally:
        force_kernels(before)
