"""Random inputs of one dtype on one device, and their exact values: what selfcheck.py makes samples and cases of."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import testing

__all__ = ["Inputs"]


class Inputs:
    """Random inputs of one dtype on one device, and their exact values in float64.

    rows: the shape of matrices that may be of any size. as_torch: makes tensors on the CPU also, not NumPy arrays.
    """

    def __init__(
        self, dtype: str, device: str, head_dim: int = 64, rows: tuple[int, int] = (7, 33), as_torch: bool = False
    ):
        self.dtype = dtype
        self.rows = rows
        self._as_numpy = device == "cpu" and not as_torch
        self.head_dim = head_dim
        self.device = device
        self.options: dict[str, Any] = {"dtype": "bfloat16"} if dtype == "bfloat16" and self._as_numpy else {}
        self._random = np.random.default_rng(0)

    def randn(self, *shape: int) -> tuple[Any, np.ndarray]:
        """(array for the op, its values in float64)."""
        values = self._random.standard_normal(shape).astype(np.float32)
        if self.dtype == "bfloat16":
            bits = testing.bfloat16_bits(values)
            return self._put(bits, bfloat16=True), testing.from_bfloat16_bits(bits).astype(np.float64)
        rounded = values.astype(self.dtype)
        return self._put(rounded), rounded.astype(np.float64)

    def int8(self, *shape: int) -> tuple[Any, np.ndarray]:
        values = self._random.integers(-127, 128, shape, dtype=np.int8)
        return self._put(values), values.astype(np.float64)

    def float32(self, values: np.ndarray) -> Any:
        return self._put(values.astype(np.float32))

    def float16(self, values: np.ndarray) -> Any:
        return self._put(values.astype(np.float16))

    def rounded(self, values: np.ndarray) -> Any:
        """Values in the case's dtype, for arguments that an earlier op made."""
        return (
            self._put(testing.bfloat16_bits(values), bfloat16=True)
            if self.dtype == "bfloat16"
            else self._put(values.astype(self.dtype))
        )

    def index(self, values: Any) -> Any:
        return self._put(np.asarray(values, dtype=np.int32))

    def bytes(self, values: Any) -> Any:
        return self._put(np.asarray(values, dtype=np.uint8))

    def float8(self, bits: np.ndarray) -> Any:
        """Bits of float8_e4m3fn; as they are for NumPy, which has no such type."""
        tensor = self._put(bits)
        if self._as_numpy:
            return tensor
        import torch

        return tensor.view(torch.float8_e4m3fn)

    def _put(self, array: np.ndarray, bfloat16: bool = False) -> Any:
        if self._as_numpy:
            return array
        import torch

        tensor = torch.from_numpy(array.view(np.int16) if bfloat16 else array)
        return (tensor.view(torch.bfloat16) if bfloat16 else tensor).to(self.device)

    def get(self, array: Any) -> np.ndarray:
        """Values of a result in float64."""
        if not self._as_numpy:
            return array.double().cpu().numpy()
        if array.dtype == np.uint16:
            return testing.from_bfloat16_bits(array).astype(np.float64)
        return np.asarray(array).astype(np.float64)
