"""FlashKernel's ops written in Triton: the same functions, with the signatures of `flashkernel`, for torch tensors.

A second implementation to measure the library's own kernels against, and to read beside them.
``flashkernel.attention(..., backend="triton")`` calls `flashkernel.triton.attention(...)`. Needs torch and triton
(``pip install flashkernel[triton]``); kernels are compiled for the tensors' GPU, or run in Triton's interpreter where
TRITON_INTERPRET=1 was in the environment when triton was first imported.

>>> import torch, flashkernel.triton as fk_triton
>>> x = torch.arange(4.0, device=fk_triton.default_device())
>>> fk_triton.reduce_sum(x).item()
6.0
"""

from __future__ import annotations

import inspect as _inspect
import typing as _typing

try:
    import torch as _torch
    import triton as _triton
except ImportError as error:
    raise ImportError(f"flashkernel.triton: {error}; pip install 'flashkernel[triton]' is needed") from error

from .. import _C
from ._host import IS_INTERPRETED

if _typing.TYPE_CHECKING:  # the signatures, with their overloads; made from those of flashkernel
    from .._triton import *  # noqa: F403
else:
    from .elementwise import add, swiglu, swiglu_backward
    from .flash_attention import attention, attention_varlen, merge_states
    from .flash_attention_backward import attention_backward, attention_varlen_backward
    from .fused_gelu_linear import linear, linear_backward
    from .loss import cross_entropy, cross_entropy_backward
    from .norm import layer_norm, layer_norm_backward, rms_norm, rms_norm_backward
    from .pack_mask import pack_mask
    from .paged_attention import attention_paged
    from .paged_kv_cache import kv_append, kv_copy_pages, kv_read
    from .reduce import argmax, reduce_max, reduce_mean, reduce_sum
    from .rope import rope, rope_table
    from .softmax import log_softmax, log_softmax_backward, softmax, softmax_backward

OPS: tuple[str, ...] = tuple(
    name for name in sorted(_C.OPS) if "backend" in _inspect.signature(getattr(_C, name)).parameters
)
"""Names of the ops here: functions of `flashkernel` and of this module alike."""

__all__ = ["IS_INTERPRETED", "OPS", "default_device", *OPS]


def default_device() -> str:
    """The device whose tensors these kernels take: "cpu" in Triton's interpreter, else "cuda"."""
    return "cpu" if IS_INTERPRETED else "cuda"
