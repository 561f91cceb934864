"""Types in the signatures of FlashKernel's functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypedDict


class SupportsDLPack(Protocol):
    """An array that speaks DLPack: torch.Tensor, numpy.ndarray, jax.Array, cupy.ndarray, flashkernel.Array, ..."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


Window: TypeAlias = tuple[int | None, int | None] | None
"""Tokens seen to the left and right of a query's position; None or -1: unbounded."""

Axis: TypeAlias = int | Sequence[int] | None
"""The dims of a reduction; None: all."""


class _RequiredKvAppendRope(TypedDict):
    positions: SupportsDLPack


class KvAppendRope(_RequiredKvAppendRope, total=False):
    """RoPE fused into `kv_append`; only ``positions`` is required."""

    theta: float
    rotary_dim: int | None
    interleaved: bool
    inv_freq: SupportsDLPack | None
    q: SupportsDLPack | None
    q_out: SupportsDLPack | None
