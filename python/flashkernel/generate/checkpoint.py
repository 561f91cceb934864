"""A Hugging Face checkpoint directory on disk: config.json and *.safetensors, read without torch.

Called by the model classes. Weights are read one at a time and only when asked for. Pickled weights (*.bin, *.pt) are
never opened: loading one runs whatever code it holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .errors import CheckpointError, MissingDependencyError

__all__ = ["Checkpoint", "MemoryCheckpoint", "bfloat16_to_float32", "float32_to_bfloat16", "require_directory"]

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bfloat16 bit patterns (uint16)."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The bfloat16 bit patterns (uint16) nearest to float32 values, ties to even; a NaN stays a NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def require_directory(directory: str | Path) -> None:
    if not Path(directory).is_dir():
        raise CheckpointError(
            f"load_model: {str(directory)!r} is not a directory; a local Hugging Face checkpoint directory "
            "(config.json, *.safetensors, tokenizer.json) is needed"
        )


class Checkpoint:
    """The config and the weights of one checkpoint directory.

    Raises CheckpointError if config.json or safetensors weights are missing or broken.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        require_directory(directory)
        self.config = self._read_json("config.json", required=True)
        self.generation_config = self._read_json("generation_config.json", required=False)
        self._files = self._index()

    def _read_json(self, name: str, required: bool) -> dict[str, Any]:
        path = self.directory / name
        if not path.is_file():
            if not required:
                return {}
            raise CheckpointError(
                f"load_model: {str(self.directory)!r} has no {name}; a Hugging Face checkpoint directory is needed"
            )
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"load_model: {name} is not valid JSON: {error}") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"load_model: {name} holds a {type(value).__name__}; a JSON object is needed")
        return value

    def _index(self) -> dict[str, Path]:
        """Which file holds each tensor: by the sharded index if there is one, else by looking into every file."""
        index = self._read_json("model.safetensors.index.json", required=False)
        if index:
            weight_map = index.get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError("load_model: model.safetensors.index.json has no weight_map")
            for shard in sorted(set(weight_map.values())):
                # A name in the index must not lead out of the directory.
                if Path(shard).name != shard or not (self.directory / shard).is_file():
                    raise CheckpointError(
                        f"load_model: the index names the shard {shard!r}, which is not in {str(self.directory)!r}"
                    )
            return {name: self.directory / shard for name, shard in weight_map.items()}
        files = sorted(self.directory.glob("*.safetensors"))
        if not files:
            pickles = sorted(p.name for pattern in _PICKLES for p in self.directory.glob(pattern))
            found = (
                f"only pickled weights ({', '.join(pickles)}), which are never opened since a pickle can run code; "
                "convert them with model.save_pretrained(..., safe_serialization=True)"
                if pickles
                else "no weights"
            )
            raise CheckpointError(f"load_model: {str(self.directory)!r} has {found}; *.safetensors is needed")
        return {name: file for file in files for name in self._open(file).keys()}

    @staticmethod
    def _open(path: Path) -> Any:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise MissingDependencyError(
                "load_model: the package safetensors is not installed; run `pip install flashkernel[generate]`"
            ) from error
        try:
            return safe_open(str(path), framework="np")
        except Exception as error:  # safetensors raises its own type from Rust
            raise CheckpointError(f"load_model: {path.name} is not a valid safetensors file: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> list[str]:
        return sorted(self._files)

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """The tensor `name` as float32, of exactly `shape` if one is given."""
        if name not in self._files:
            raise CheckpointError(
                f"load_model: the checkpoint has no tensor {name!r} (it has {len(self._files)} others)"
            )
        path = self._files[name]
        file = self._open(path)
        try:
            view = file.get_slice(name)
            dtype, got = view.get_dtype(), tuple(view.get_shape())
        except Exception as error:
            raise CheckpointError(f"load_model: {path.name} does not hold the tensor {name!r}: {error}") from error
        if shape is not None and got != tuple(shape):
            raise CheckpointError(f"load_model: {name} has shape {list(got)}; the config needs {list(shape)}")
        if dtype == "BF16":
            return bfloat16_to_float32(_read_raw(path, name, np.dtype("<u2"), got))
        if dtype not in ("F32", "F16", "F64"):
            raise CheckpointError(f"load_model: {name} has dtype {dtype}; F32, F16, BF16 or F64 is needed")
        return file.get_tensor(name).astype(np.float32)


class MemoryCheckpoint:
    """A config and tensors that are in memory already, NumPy's or torch's: those of a model of Transformers."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ):
        self.config = dict(config)
        self.generation_config = dict(generation_config or {})
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> Any:
        """The tensor `name` as it is, of exactly `shape` if one is given."""
        if name not in self._tensors:
            raise CheckpointError(f"load_model: the model has no tensor {name!r} (it has {len(self._tensors)} others)")
        tensor = self._tensors[name]
        if shape is not None and tuple(tensor.shape) != tuple(shape):
            raise CheckpointError(f"load_model: {name} has shape {list(tensor.shape)}; the config needs {list(shape)}")
        return tensor


def _read_raw(path: Path, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The bits of a tensor of a type that NumPy lacks. The format: u64 length of a JSON header, the header, the data;
    the file was opened by the safetensors package before, which has checked that header and offsets are sound."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(header_bytes))[name]["data_offsets"]
    count = (end - begin) // dtype.itemsize
    if count == 0:
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=8 + header_bytes + begin, shape=(count,)).reshape(shape)
