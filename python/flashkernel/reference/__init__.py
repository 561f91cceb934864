"""The oracle: every op in NumPy and float64, as its formula says, with no thought for speed.

Called by the tests and `flashkernel doctor`; bench, whose shapes are too large for it, holds results against its peers'
by the same rule (`flashkernel.testing`). Functions take what their namesakes in `flashkernel` do (NumPy arrays
of any float dtype) and return all of their results in float64, gradients included. Invariant: no code is shared with
the kernels.
"""

from __future__ import annotations

from flashkernel.reference import attention as _attention
from flashkernel.reference import decode_step as _decode_step
from flashkernel.reference import kv_ops as _kv_ops
from flashkernel.reference import latent as _latent
from flashkernel.reference import linear_loss as _linear_loss
from flashkernel.reference import ops as _ops
from flashkernel.reference.attention import *  # noqa: F403
from flashkernel.reference.decode_step import *  # noqa: F403
from flashkernel.reference.kv_ops import *  # noqa: F403
from flashkernel.reference.latent import *  # noqa: F403
from flashkernel.reference.linear_loss import *  # noqa: F403
from flashkernel.reference.ops import *  # noqa: F403

__all__ = [
    *_attention.__all__,
    *_decode_step.__all__,
    *_kv_ops.__all__,
    *_latent.__all__,
    *_linear_loss.__all__,
    *_ops.__all__,
]
