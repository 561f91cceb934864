"""Types in the signatures of FlashKernel's functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypedDict, TypeVar


class SupportsDLPack(Protocol):
    """An array that speaks DLPack: torch.Tensor, numpy.ndarray, jax.Array, cupy.ndarray, flashkernel.Array, ..."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


ArrayT = TypeVar("ArrayT", bound=SupportsDLPack)
"""The kind of an op's results: that of its first array."""

_PlainT_co = TypeVar("_PlainT_co", covariant=True)


class TorchTensor(SupportsDLPack, Protocol[_PlainT_co]):
    """A torch.Tensor, told by `clone` so that no torch is needed here.

    Results for a subclass such as torch.nn.Parameter are plain tensors, as its clones are.
    """

    def clone(self) -> _PlainT_co: ...


Window: TypeAlias = tuple[int | None, int | None] | None
"""Tokens seen to the left and right of a query's position; None or -1: unbounded."""

KvScales: TypeAlias = tuple[SupportsDLPack, SupportsDLPack] | tuple[SupportsDLPack, SupportsDLPack, float, float] | None
"""Scales of keys and of values where pages have 8 or 4 bits; of NVFP4 also those of the whole tensors."""

Axis: TypeAlias = int | Sequence[int] | None
"""The dims of a reduction; None: all."""


class _KvAppendRopePositions(TypedDict):
    positions: SupportsDLPack


class _KvAppendRopeQ(_KvAppendRopePositions):
    q: SupportsDLPack


class KvAppendRope(_KvAppendRopePositions, total=False):
    """RoPE fused into `kv_append`; only ``positions`` is required. k_norm: RMSNorm's weight, [head_dim]."""

    theta: float
    rotary_dim: int | None
    interleaved: bool
    inv_freq: SupportsDLPack | None
    cos: SupportsDLPack | None
    sin: SupportsDLPack | None
    k_norm: SupportsDLPack | None
    norm_eps: float
    q: None
    q_out: None


class KvAppendRopeWithQ(_KvAppendRopeQ, total=False):
    """RoPE fused into `kv_append`, for a ``q`` too, which the call returns rotated; after norms of heads, if given."""

    theta: float
    rotary_dim: int | None
    interleaved: bool
    inv_freq: SupportsDLPack | None
    cos: SupportsDLPack | None
    sin: SupportsDLPack | None
    q_norm: SupportsDLPack | None
    k_norm: SupportsDLPack | None
    norm_eps: float
    q_out: SupportsDLPack | None
