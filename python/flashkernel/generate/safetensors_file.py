"""One *.safetensors file: which tensors it holds, and their values, without torch.

Called by checkpoint.py. The format: the length of a JSON header as u64, the header, the data. The package safetensors
checks a file first (lengths, offsets, sizes); what is read here rests on that. Its NumPy side knows neither bfloat16
nor shapes too big for NumPy, so the data is mapped here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import CheckpointError, MissingDependencyError
from .files import parse_json, reason, shown, without_panics

__all__ = ["SafetensorsFile", "bfloat16_to_float32"]

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bfloat16 bit patterns (uint16)."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int  # byte of the file
    size: int  # bytes


class SafetensorsFile:
    """The header of a file. Raises CheckpointError if the file is no sound safetensors file."""

    def __init__(self, path: Path):
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise MissingDependencyError(
                "load_model: the package safetensors is not installed; run `pip install flashkernel[generate]`"
            ) from error
        self.path = path
        try:
            without_panics(lambda: safe_open(str(path), framework="np").keys())
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                text = file.read(length)
        except OSError as error:
            raise CheckpointError(f"load_model: {path.name} cannot be read: {reason(error)}") from error
        except MemoryError:
            raise
        except Exception as error:  # safetensors raises its own type from Rust
            raise CheckpointError(
                f"load_model: {path.name} is not a valid safetensors file: {shown(error, 200)}"
            ) from error
        header = parse_json(text, f"the header of {path.name}")
        header.pop("__metadata__", None)
        self._entries: dict[str, _Entry] = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            self._entries[name] = _Entry(entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """As the file spells it: "BF16"."""
        return self._entries[name].dtype

    def bits(self, name: str) -> np.ndarray:
        """The bytes of a tensor of 8-bit elements, in memory of its own."""
        entry = self._entries[name]
        return np.array(self._map(entry, "u1").reshape(entry.shape))

    def _map(self, entry: _Entry, dtype: str) -> Any:
        """The bytes of a tensor as a flat array that lies in the file."""
        count = entry.size // np.dtype(dtype).itemsize
        if count == 0:
            return np.zeros(0, dtype)
        try:
            return np.memmap(self.path, dtype=dtype, mode="r", offset=entry.begin, shape=(count,))
        except (OSError, ValueError) as error:  # gone, or cut, since it was opened
            raise CheckpointError(f"load_model: {self.path.name} cannot be read: {shown(error)}") from error

    def read(self, name: str) -> np.ndarray:
        """The tensor `name` as float32, in memory of its own."""
        entry = self._entries[name]
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"load_model: {shown(name)} has dtype {entry.dtype}; F32, F16, BF16 or F64 is needed")
        values = self._map(entry, _DTYPES[entry.dtype]).reshape(entry.shape)
        return bfloat16_to_float32(values) if entry.dtype == "BF16" else np.array(values, dtype=np.float32)

    def same(self, name: str, other: SafetensorsFile, other_name: str) -> bool:
        """Whether two tensors hold the same bits, of one dtype and shape; compared in pieces."""
        a, b = self._entries[name], other._entries[other_name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        left, right = self._map(a, "u1"), other._map(b, "u1")
        step = 1 << 24
        return all(np.array_equal(left[i : i + step], right[i : i + step]) for i in range(0, a.size, step))
