"""Where the engine's tensors live: the one module that knows the array type of a device.

The models call FlashKernel ops on what this module makes and otherwise only slice, reshape and gather. A device is
added by one more class with the same methods. bfloat16 has no NumPy dtype: on the CPU it travels as uint16 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import flashkernel as fk

from .checkpoint import bfloat16_to_float32, float32_to_bfloat16

__all__ = ["DTYPES", "CudaArrays", "HostArrays", "arrays_for", "available_devices"]

DTYPES = ("float32", "float16", "bfloat16")
ALIASES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}


class HostArrays:
    """NumPy arrays on the CPU."""

    device = "cpu"

    def __init__(self, dtype: str = "float32"):
        dtype = ALIASES.get(dtype, dtype)
        if dtype not in DTYPES:
            raise ValueError(f"generate: dtype {dtype!r}; one of {', '.join(DTYPES)} is needed")
        self.dtype = dtype
        # Keyword arguments of every op: the meaning of uint16 arrays, where needed.
        self.op_options: dict[str, Any] = {"dtype": "bfloat16"} if dtype == "bfloat16" else {}

    def weight(self, values: np.ndarray) -> Any:
        """Float32 values in the model's dtype, contiguous."""
        if self.dtype == "bfloat16":
            return float32_to_bfloat16(values)
        return np.ascontiguousarray(values, dtype=self.dtype)

    def index(self, values: Any, dtype: str = "int32") -> Any:
        return np.ascontiguousarray(values, dtype=dtype)

    def take(self, table: Any, rows: Any) -> Any:
        """table[rows]: the rows of an embedding table, or some rows of an activation."""
        return np.take(table, rows, axis=0)

    def to_float32(self, values: Any) -> np.ndarray:
        return bfloat16_to_float32(values) if self.dtype == "bfloat16" else values.astype(np.float32, copy=False)

    def to_host(self, values: Any) -> np.ndarray:
        return values


class CudaArrays(HostArrays):
    """torch tensors on the current CUDA device: torch is the array type there, not the engine."""

    device = "cuda:0"

    def __init__(self, dtype: str = "float32"):
        super().__init__(dtype)
        import torch

        self._torch = torch
        self._dtype = getattr(torch, self.dtype)
        self.device = f"cuda:{torch.cuda.current_device()}"
        self.op_options = {}  # torch has a bfloat16 of its own

    def _place(self, values: np.ndarray) -> Any:
        return self._torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def weight(self, values: np.ndarray) -> Any:
        return self._place(values).to(self._dtype)

    def index(self, values: Any, dtype: str = "int32") -> Any:
        return self._place(np.asarray(values, dtype=dtype))

    def take(self, table: Any, rows: Any) -> Any:
        return table[rows if isinstance(rows, self._torch.Tensor) else self.index(rows, "int64")]

    def to_float32(self, values: Any) -> np.ndarray:
        return values.float().cpu().numpy()

    def to_host(self, values: Any) -> np.ndarray:
        return values.cpu().numpy()

    @staticmethod
    def usable() -> bool:
        """torch is there and sees a GPU."""
        try:
            import torch
        except ImportError:
            return False
        return bool(torch.cuda.is_available())


_NAMESPACES: dict[str, type[HostArrays]] = {"cuda": CudaArrays, "cpu": HostArrays}


def available_devices() -> list[str]:
    """Devices that have both an attention kernel that this machine can run and an array type here, best first."""
    runnable = {kernel.device for kernel in fk.kernels() if kernel.op == "attention_fwd" and kernel.available}
    return [device for device in _NAMESPACES if device in runnable and (device != "cuda" or CudaArrays.usable())]


def arrays_for(device: str, dtype: str) -> HostArrays:
    """The arrays of "cpu", "cuda" or "auto" (a CUDA device if this build and machine have one, else the CPU)."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"generate: device {device!r}; auto, cpu or cuda is needed")
    found = available_devices()
    if device == "auto":
        device = found[0] if found else "cpu"
    if device not in found:
        raise NotImplementedError(
            f"generate: device {device!r} was asked for, but text generation can run on "
            f"{', '.join(found) or 'no device'} here; a GPU needs a CUDA build, and torch with CUDA for its arrays "
            f"(`flashkernel doctor` tells)"
        )
    return _NAMESPACES[device](dtype)
