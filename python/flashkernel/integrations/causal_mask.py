"""A causal mask that is written out only when something other than FlashKernel's attention looks at it.

Transformers leaves a causal mask away where the attention function is expected to know by itself that it is causal,
from flags that not every model sets, or sets with the same meaning. `CausalMask` says it with the mask itself: it
costs no memory where a model passes it on to the attention untouched, and has its numbers for a model that slices, adds
or moves it. Without a mask attention then sees everything, as in Transformers' "eager".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["CausalMask", "additive", "written"]

_aten = torch.ops.aten
_PASSED_ON = (_aten.detach.default, _aten.alias.default)


def additive(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A boolean mask as float32, 0 where it is True and -inf elsewhere; another one as it is."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    # A mask of padding only is the same row for each query, which torch holds as an expanded dim: keep one of them.
    for dim in range(mask.dim()):
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(~mask, float("-inf"))


class CausalMask(torch.Tensor):
    """Additive float32 [batch, 1, seq_q, seq_k] in which query i sees the keys 0 to i, or all keys where seq_q is 1.

    It has no storage: any op on it first has `make` write the boolean mask, which is kept. An op that changes it in
    place changes that copy, and the mask stops being `plain`.
    """

    _make: Callable[[], torch.Tensor]
    _whole: torch.Tensor | None
    _versions: tuple[int, int] | None

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], device: torch.device, make: Callable[[], torch.Tensor]) -> CausalMask:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=device)

    def __init__(self, shape: tuple[int, ...], device: torch.device, make: Callable[[], torch.Tensor]) -> None:
        self._make = make
        self._whole = None

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mask = args[0] if args else None
        if func in _PASSED_ON and isinstance(mask, CausalMask) and mask.plain:
            return CausalMask(tuple(mask.shape), mask.device, mask._make)
        return func(*tree_map(written, args), **tree_map(written, kwargs or {}))

    @property
    def plain(self) -> bool:
        """Whether the mask has not changed since it was made, as far as is known: inference tensors have no version."""
        return self._whole is None or (self._versions is not None and self._counted() == self._versions)

    def _counted(self) -> tuple[int, int] | None:
        # Torch counts a change made through a view now with this tensor, now with the one that it was a view of.
        whole = self._whole
        return None if whole is None or whole.is_inference() or self.is_inference() else (self._version, whole._version)

    def whole(self) -> torch.Tensor:
        """The mask in memory."""
        if self._whole is None:
            whole = additive(self._make())
            assert whole is not None
            self._whole = whole.expand(self.shape).contiguous()
            self._versions = self._counted()
        return self._whole

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"CausalMask({tuple(self.shape)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.whole().clone()


def written(value: Any) -> Any:
    """A CausalMask in memory; anything else as it is."""
    return value.whole() if isinstance(value, CausalMask) else value
