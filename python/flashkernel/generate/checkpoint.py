"""A Hugging Face checkpoint directory on disk: config.json and the weights that Transformers would read from it.

Called by the model classes. Weights are read one at a time and only when asked for. Pickled weights (*.bin, *.pt) are
never opened: loading one runs whatever code it holds. Where Transformers' choice of a file depends on what else is
installed, or where two files or names could be meant, the directory is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..quantized import FP8, FP8_BLOCK, QuantizedWeight, from_fp8
from .errors import CheckpointError, UnsupportedModelError
from .files import MAX_INDEX_BYTES, describe, is_file, read_json, require_directory, shown
from .safetensors_file import SafetensorsFile, bfloat16_to_float32

if TYPE_CHECKING:
    from .tensor_parallel import TensorParallel

__all__ = ["Checkpoint", "MemoryCheckpoint", "bfloat16_to_float32", "float32_to_bfloat16"]

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_SCALE = "_scale_inv"  # behind the name of a tensor in float8_e4m3fn: what its elements are multiplied with
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def float32_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The bfloat16 bit patterns (uint16) nearest to float32 values, ties to even; a NaN stays a NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _is_fp8(quantization: Any) -> bool:
    """Whether the weights are float8_e4m3fn with a scale for each 128 x 128; False: they are not quantised.

    Raises UnsupportedModelError for any other quantisation.
    """
    if quantization is None:
        return False
    method: Any = quantization
    if isinstance(quantization, dict):
        method = quantization.get("quant_method", "no quant_method")
        fits = {
            "weight_block_size": quantization.get("weight_block_size") == [FP8_BLOCK, FP8_BLOCK],
            "activation_scheme": quantization.get("activation_scheme", "dynamic") == "dynamic",
            "fmt": quantization.get("fmt", "e4m3") == "e4m3",
        }
        if method == "fp8":
            for name, right in fits.items():
                if not right:
                    raise UnsupportedModelError(
                        f"load_model: config.json has fp8 weights with {name}={describe(quantization.get(name))}; "
                        "weight_block_size [128, 128], activation_scheme dynamic and fmt e4m3 are needed"
                    )
            return True
    raise UnsupportedModelError(
        f"load_model: config.json has a quantization_config ({describe(method)}); weights in F32, F16, BF16 or "
        "F64, or in fp8 with weight_block_size [128, 128], are needed"
    )


class Checkpoint:
    """The config and the weights of one checkpoint directory.

    Raises CheckpointError if config.json or safetensors weights are missing or broken, UnsupportedModelError for an
    adapter and for quantised weights but float8_e4m3fn with a scale for each 128 x 128 (DeepSeek-V3, Qwen3-FP8).
    """

    rope_divisors: np.ndarray | None = None  # float32 [head_dim / 2], of RoPE's frequencies; only GGUF files have them
    parallel: TensorParallel | None = None  # the ranks that share the model that is made of it
    keep_blocks = False  # whether matrices in float8_e4m3fn are given as they are to who asks for `blocks`

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        require_directory(directory)
        if is_file(self.directory / "adapter_config.json"):
            raise UnsupportedModelError(
                "load_model: adapter_config.json says that an adapter belongs to these weights, which this engine "
                "does not apply; merge it first (model.merge_and_unload(), then save_pretrained) and load the result"
            )
        config = self._read_json("config.json")
        if config is None:
            raise CheckpointError(
                f"load_model: {shown(repr(str(directory)))} has no config.json; a Hugging Face checkpoint directory is "
                "needed"
            )
        self.config = config
        self.is_fp8 = _is_fp8(config.get("quantization_config"))
        self.generation_config = self._read_json("generation_config.json")  # None: there is no such file
        self._files = self._find(self._weight_file())
        self._unread = set(self._files)

    def _read_json(self, name: str) -> dict[str, Any] | None:
        path = self.directory / name
        return read_json(path) if is_file(path) else None

    def _weight_file(self) -> str:
        """The file that Transformers begins with: the one that the config names, else model.safetensors, else the
        index of shards. Other *.safetensors files are none of the model's."""
        named = self.config.get("transformers_weights")
        if named is not None:
            if not isinstance(named, str) or not named.endswith((".safetensors", ".safetensors.index.json")):
                raise CheckpointError(
                    f"load_model: config.json has transformers_weights={describe(named)}; the name of a *.safetensors "
                    "or *.safetensors.index.json file is needed"
                )
            if not self._inside(named):
                raise CheckpointError(
                    f"load_model: config.json has transformers_weights={describe(named)}, which is not in "
                    f"{shown(repr(str(self.directory)))}"
                )
            return named
        for name in (_SINGLE, _INDEX):
            if is_file(self.directory / name):
                return name
        try:
            others = sorted(path.name for path in self.directory.glob("*.safetensors"))
            pickles = sorted(path.name for pattern in _PICKLES for path in self.directory.glob(pattern))
        except OSError:  # the directory cannot be listed: then there is nothing to tell about it
            others, pickles = [], []
        if others:
            found = f"{shown(', '.join(others))}, but neither {_SINGLE} nor {_INDEX}"
            way_out = "rename the file that is meant to model.safetensors, or save the model again"
        elif pickles:
            found = (
                f"only pickled weights ({shown(', '.join(pickles))}), which are never opened since a pickle can run "
                "code"
            )
            way_out = "convert them with model.save_pretrained(..., safe_serialization=True)"
        else:
            found, way_out = "no weights", f"{_SINGLE} (or shards with {_INDEX}) is needed"
        raise CheckpointError(f"load_model: {shown(repr(str(self.directory)))} has {found}; {way_out}")

    def _inside(self, name: str) -> bool:
        """Whether a name is that of a file in the directory itself."""
        return "\0" not in name and Path(name).name == name and is_file(self.directory / name)

    def _find(self, file: str) -> dict[str, SafetensorsFile]:
        """Which file holds each tensor: all tensors of all files that the index names, as in Transformers."""
        if not file.endswith(".index.json"):
            whole = SafetensorsFile(self.directory / file)
            return dict.fromkeys(whole.names(), whole)
        weight_map = read_json(self.directory / file, MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"load_model: {file} has no weight_map")
        shards = {describe(shard) if not isinstance(shard, str) else shard for shard in weight_map.values()}
        files: dict[str, SafetensorsFile] = {}
        for shard in sorted(shards):
            # A name in the index must not lead out of the directory.
            if not self._inside(shard):
                raise CheckpointError(
                    f"load_model: {file} names the shard {describe(shard)}, which is not in "
                    f"{shown(repr(str(self.directory)))}"
                )
            opened = SafetensorsFile(self.directory / shard)
            for name in opened.names():
                if name in files:
                    raise CheckpointError(
                        f"load_model: {files[name].path.name} and {shard} both hold {shown(name)}; one of them must go"
                    )
                files[name] = opened
        for name, shard in weight_map.items():
            if name not in files or files[name].path.name != shard:
                raise CheckpointError(
                    f"load_model: {file} says that {shown(shard)} holds {shown(name)}, which it does not; save the "
                    "model again, so that index and shards belong together"
                )
        return files

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> list[str]:
        return sorted(self._files)

    @property
    def unread(self) -> list[str]:
        """The tensors that nobody has asked for."""
        return sorted(self._unread)

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """The tensor `name` as float32, of exactly `shape` if one is given."""
        if name not in self._files:
            raise CheckpointError(
                f"load_model: the checkpoint has no tensor {name!r} (it has {len(self._files)} others)"
            )
        got = self._files[name].shape(name)
        if shape is not None and got != tuple(shape):
            raise CheckpointError(
                f"load_model: {shown(name)} has shape {shown(list(got))}; the config needs {list(shape)}"
            )
        self._unread.discard(name)
        if self._is_float8(name):
            return from_fp8(self._files[name].bits(name), self._scales(name))
        return self._files[name].read(name)

    def _is_float8(self, name: str) -> bool:
        return self.is_fp8 and self._files[name].dtype(name) == "F8_E4M3"

    def _scales(self, name: str) -> np.ndarray:
        """The scales of a tensor in float8_e4m3fn, one for each 128 x 128."""
        shape = self._files[name].shape(name)
        if len(shape) < 2:
            raise CheckpointError(f"load_model: {shown(name)} in F8_E4M3 has shape {list(shape)}; 2 dims are needed")
        blocks = tuple(-(-extent // FP8_BLOCK) for extent in shape[-2:])
        return self.read(name + _SCALE, (*shape[:-2], *blocks))

    def blocks(self, name: str, shape: tuple[int, ...]) -> QuantizedWeight | None:
        """A matrix of a file in few bits that stays in them; None: there is none, and `read` has its numbers."""
        if not self.keep_blocks or name not in self or not self._is_float8(name):
            return None
        if len(shape) != 2 or self._files[name].shape(name) != tuple(shape):
            return None  # `read` says what is wrong
        self._unread.discard(name)
        return QuantizedWeight(self._files[name].bits(name), self._scales(name), None, FP8)

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors hold the same values."""
        self._unread -= {name, other}
        return self._files[name].same(name, self._files[other], other)


class MemoryCheckpoint:
    """A config and tensors that are in memory already, NumPy's or torch's: those of a model of Transformers."""

    rope_divisors: np.ndarray | None = None
    parallel: TensorParallel | None = None

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ):
        self.config = dict(config)
        self.generation_config = None if generation_config is None else dict(generation_config)
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> list[str]:
        return sorted(self._tensors)

    def blocks(self, name: str, shape: tuple[int, ...]) -> QuantizedWeight | None:
        """None: see `Checkpoint`."""
        return None

    def same(self, name: str, other: str) -> bool:
        """Whether two names are those of one tensor."""
        return self._tensors[name] is self._tensors[other]

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> Any:
        """The tensor `name` as it is, of exactly `shape` if one is given."""
        if name not in self._tensors:
            raise CheckpointError(f"load_model: the model has no tensor {name!r} (it has {len(self._tensors)} others)")
        tensor = self._tensors[name]
        if shape is not None and tuple(tensor.shape) != tuple(shape):
            raise CheckpointError(f"load_model: {name} has shape {list(tensor.shape)}; the config needs {list(shape)}")
        return tensor
