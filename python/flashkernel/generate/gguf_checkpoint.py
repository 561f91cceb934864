"""A GGUF file as a checkpoint: its metadata as the config, its tensors under Transformers' names.

Called by model.py. What llama.cpp changed when it made the file is undone (gguf_architectures.py says where): rows of Q
and K that lie so that RoPE turns neighbours go back to where RoPE turns halves, the 1 that was added to the norms of
Gemma is taken off, the experts of a layer become one tensor. Whatever would make the model compute something else than
its architecture says (windows, scaled RoPE that is not linear, ...) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..quantized import QuantizedWeight
from .checkpoint import Checkpoint
from .config import NEEDED, Field, integer, number, read_field, text
from .errors import CheckpointError, UnsupportedModelError
from .files import describe, shown
from .gguf_architectures import ARCHITECTURES, EXPERTS, MIXTRAL, OTHER_TENSORS, Architecture
from .gguf_file import GgufFile

__all__ = ["GgufCheckpoint", "end_tokens", "special_token"]

_ARCHITECTURE = Field("text", NEEDED)
_FIELDS = {
    "context_length": integer(NEEDED),
    "embedding_length": integer(NEEDED),
    "feed_forward_length": integer(NEEDED),
    "block_count": integer(NEEDED),
    "attention.head_count": integer(NEEDED),
    "attention.head_count_kv": integer(None),
    "attention.key_length": integer(None),
    "attention.value_length": integer(None),
    "attention.layer_norm_rms_epsilon": number(NEEDED, 0, 1),
    "attention.sliding_window": integer(0, low=0),
    "expert_count": integer(0, low=0),
    "rope.dimension_count": integer(None),
    "rope.freq_base": number(10000.0, 1e-6),
    "rope.scale_linear": number(1.0, 1e-6),
    "rope.scaling.type": text("none"),
    "rope.scaling.factor": number(1.0, 1e-6),
    "rope.scaling.original_context_length": integer(None),
    "rope.scaling.attn_factor": number(None, 1e-6, 1e6),
}

_IN_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)")
_DIVISORS = "rope_freqs.weight"
_TWO_CONTEXTS = ("rope_factors_short.weight", "rope_factors_long.weight")


def _renamed(architecture: Architecture, name: str) -> str:
    """A tensor's name in Transformers; its own where there is none."""
    found = _IN_LAYER.fullmatch(name)
    if found is None or found[2] not in architecture.names:
        return OTHER_TENSORS.get(name, name)
    return f"model.layers.{found[1]}.{architecture.names[found[2]]}.{found[3]}"


def _parts(architecture: Architecture, names: list[str]) -> dict[str, list[str]]:
    """The tensors of a file, in the order in which they lie beside each other, by Transformers' names."""
    found = {_renamed(architecture, name): [name] for name in names}
    if architecture.experts:
        for layer in sorted({match[1] for match in map(_IN_LAYER.fullmatch, names) if match is not None}):
            for name, parts in EXPERTS.items():
                own = [f"blk.{layer}.{part}.weight" for part in parts]
                if all(part in found for part in own):
                    for part in own:
                        del found[part]
                    found[f"model.layers.{layer}.{name}"] = own
    return found


def special_token(metadata: Mapping[str, Any], name: str, file: str) -> int | None:
    """The id of "bos", "eos" and so on in the vocabulary; None: the file names none."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    most = len(tokens) - 1 if isinstance(tokens, list) and tokens else 2**31 - 1
    key = f"tokenizer.ggml.{name}_token_id"
    if metadata.get(key) in (0xFFFFFFFF, -1):  # how some files say that there is none
        return None
    value: int | None = read_field(metadata, key, integer(None, low=0, high=most), file)
    return value


def end_tokens(metadata: Mapping[str, Any], file: str) -> list[int]:
    """The ids that end a text, a turn or a message."""
    found = [special_token(metadata, name, file) for name in ("eos", "eot", "eom")]
    return sorted({token for token in found if token is not None})


class _Weights:
    """The tensors of a file by Transformers' names: what `Checkpoint` asks a file of safetensors for."""

    def __init__(self, file: GgufFile, architecture: Architecture, heads: Mapping[str, int]):
        self.path = file.path
        self._file = file
        self._heads = heads  # by the kind of tensor whose rows llama.cpp has moved
        self._offset = architecture.norm_offset
        self._parts = _parts(architecture, list(file.names()))

    def names(self) -> list[str]:
        return list(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        shapes = [self._file.shape(own) for own in self._parts[name]]
        if len(shapes) == 1:
            return shapes[0]
        if any(len(shape) < 2 or shape[:1] + shape[2:] != shapes[0][:1] + shapes[0][2:] for shape in shapes):
            return ()  # they do not lie beside each other: no model has such a tensor
        return (shapes[0][0], sum(shape[1] for shape in shapes), *shapes[0][2:])

    def read(self, name: str) -> np.ndarray:
        if len(self._parts[name]) > 1:
            return np.concatenate([self._file.read(own) for own in self._parts[name]], axis=1)
        own = self._parts[name][0]
        values = self._file.read(own)
        if self._offset and own.endswith("norm.weight"):
            return values - np.float32(self._offset)
        layer = _IN_LAYER.fullmatch(own)
        if layer is None or layer[2] not in self._heads:
            return values
        pairs = values.reshape(self._heads[layer[2]], -1, 2, *values.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)

    def blocks(self, name: str) -> QuantizedWeight | None:
        """A matrix whose blocks `quantized_linear` takes as they are; None: it is none."""
        own = self._parts[name][0]
        kind = self._file.kind(own).lower()
        if len(self._parts[name]) > 1 or kind not in ("q4_0", "q4_1", "q8_0") or len(self._file.shape(own)) != 2:
            return None
        rows = self._file.blocks(own)
        layer = _IN_LAYER.fullmatch(own)
        if layer is not None and layer[2] in self._heads:
            pairs = rows.reshape(self._heads[layer[2]], -1, 2, rows.shape[1])
            rows = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
        return QuantizedWeight(rows, None, None, kind)

    def same(self, name: str, other: _Weights, other_name: str) -> bool:
        return np.array_equal(self.read(name).view(np.uint32), other.read(other_name).view(np.uint32))


class GgufCheckpoint(Checkpoint):
    """The config and the weights of one GGUF file, in the form of a Hugging Face checkpoint.

    keep_blocks: matrices of Q4_0, Q4_1 and Q8_0 are given as they are in the file to who asks for `blocks`.

    Raises CheckpointError for a file that is broken or lacks a field or a tensor, UnsupportedModelError for another
    architecture or tensor type and for a part of a split file.
    """

    def __init__(self, path: str | Path, *, keep_blocks: bool = False):
        self.directory = Path(path)
        self.is_fp8 = False
        self.keep_blocks = keep_blocks
        file = GgufFile(path)
        self._file, self._label = file, shown(file.path.name)
        metadata = file.metadata
        kind = read_field(metadata, "general.architecture", _ARCHITECTURE, self._label)
        if kind not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"load_model: {self._label} has general.architecture={describe(kind)}; one of "
                f"{', '.join(ARCHITECTURES)} is needed"
            )
        parts = read_field(metadata, "split.count", integer(0, low=0), self._label)
        if parts > 1:
            raise UnsupportedModelError(
                f"load_model: {self._label} is one of {parts} parts of a model; one whole file is needed "
                "(llama-gguf-split --merge joins them)"
            )
        architecture = ARCHITECTURES[kind]
        if kind == "llama" and self._field(metadata, "llama.expert_count", _FIELDS):
            architecture = MIXTRAL
        self.config = self._config(kind, architecture, metadata)
        self.generation_config = {"eos_token_id": end_tokens(metadata, self._label)}
        heads = {"attn_q": self.config["num_attention_heads"], "attn_k": self.config["num_key_value_heads"]}
        weights = _Weights(file, architecture, heads if architecture.pairs else {})
        self._files: Any = dict.fromkeys(weights.names(), weights)
        self._unread = set(self._files) - set(_TWO_CONTEXTS)
        self.rope_divisors = self._divisors()

    def _config(self, kind: str, architecture: Architecture, metadata: Mapping[str, Any]) -> dict[str, Any]:
        fields = {**_FIELDS, **architecture.fields}
        found = {name: self._field(metadata, f"{kind}.{name}", fields) for name in fields}
        heads, head_dim = self._heads(kind, architecture, found)
        self._refuse(kind, architecture, found)
        layers = found["block_count"]
        if f"blk.{layers - 1}.{architecture.first}.weight" not in self._file:
            raise CheckpointError(
                f"load_model: {self._label} has {kind}.block_count={layers}, but no tensor "
                f"'blk.{layers - 1}.{architecture.first}.weight'"
            )
        if "token_embd.weight" not in self._file or len(self._file.shape("token_embd.weight")) != 2:
            raise CheckpointError(f"load_model: {self._label} has no matrix 'token_embd.weight'")
        has_bias = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
        rope = self._rope(kind, architecture, found, head_dim)
        original = found["rope.scaling.original_context_length"] if rope["rope_type"] == "longrope" else None
        return {
            "model_type": architecture.model_type,
            "vocab_size": self._file.shape("token_embd.weight")[0],
            "hidden_size": found["embedding_length"],
            "intermediate_size": found["feed_forward_length"],
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": found["attention.head_count_kv"] or heads,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": found["context_length"],
            "rms_norm_eps": found["attention.layer_norm_rms_epsilon"],
            "tie_word_embeddings": "output.weight" not in self._file,  # llama.cpp writes it only where it differs
            **{name: has_bias[name] in self._file for name in architecture.biases},
            "rope_parameters": rope,
            **architecture.config({**found, "head_dim": head_dim, "rope": rope, "original": original}),
        }

    def _heads(self, kind: str, architecture: Architecture, found: Mapping[str, Any]) -> tuple[int, int]:
        """How many heads of Q there are, and the elements of each head."""
        heads = found["attention.head_count"]
        heads_kv = found["attention.head_count_kv"] or heads
        turned = found["rope.dimension_count"]
        # Where a part of a head may be rotated, the part says nothing of the whole.
        whole = None if architecture.partial_rotary else turned
        head_dim = found["attention.key_length"] or whole or found["embedding_length"] // heads
        if heads % heads_kv or head_dim < 2 or head_dim % 2:
            raise CheckpointError(
                f"load_model: {self._label} has {heads} heads of {head_dim} elements, {heads_kv} of keys and values; "
                "even elements, and a multiple of the heads of keys and values, are needed"
            )
        fits = {"attention.value_length": found["attention.value_length"] in (None, head_dim)}
        part = architecture.partial_rotary and (turned or 0) <= head_dim
        fits["rope.dimension_count"] = turned in (None, head_dim) or part
        for name, right in fits.items():
            if not right:
                raise UnsupportedModelError(
                    f"load_model: {self._label} has {kind}.{name}={found[name]} with heads of {head_dim} elements; the "
                    "same number is needed"
                )
        return heads, head_dim

    def _refuse(self, kind: str, architecture: Architecture, found: Mapping[str, Any]) -> None:
        """Raises for fields that the architecture does not compute with here, or that lack."""
        if found["expert_count"] and not architecture.experts:
            raise UnsupportedModelError(
                f"load_model: {self._label} has {kind}.expert_count={found['expert_count']}; a model without experts "
                "is needed"
            )
        window = found["attention.sliding_window"]
        if not architecture.windows and 0 < window < found["context_length"]:
            raise UnsupportedModelError(
                f"load_model: {self._label} has {kind}.attention.sliding_window={window}, which {kind} of llama.cpp "
                "does not compute with; none is needed"
            )
        needed = ["expert_count", "expert_used_count"] if architecture.experts else []
        for name in [*needed, "expert_feed_forward_length"] if kind == "qwen3moe" else needed:
            if not found[name]:
                raise CheckpointError(f"load_model: {self._label} has no {kind}.{name}; an integer above 0 is needed")

    def _field(self, metadata: Mapping[str, Any], key: str, fields: Mapping[str, Field]) -> Any:
        name = key.split(".", 1)[1]
        if isinstance(metadata.get(key), list):
            raise UnsupportedModelError(
                f"load_model: {self._label} has {key}=<an array of {len(metadata[key])}>; one value for all layers is "
                "needed"
            )
        return read_field(metadata, key, fields[name], self._label)

    def _rope(self, kind: str, architecture: Architecture, found: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
        scaling, factor = found["rope.scaling.type"], found["rope.scaling.factor"]
        base = {"rope_theta": found["rope.freq_base"]}
        if any(name in self._file for name in _TWO_CONTEXTS):
            return {**base, **self._longrope(kind, architecture, found, head_dim)}
        if scaling == "none" and found["rope.scale_linear"] != 1:  # what older files have
            scaling, factor = "linear", found["rope.scale_linear"]
        if scaling not in ("none", "linear") or (scaling == "linear" and architecture.partial_rotary):
            raise UnsupportedModelError(
                f"load_model: {self._label} has {kind}.rope.scaling.type={describe(scaling)}; "
                f"none{'' if architecture.partial_rotary else ' or linear'} is needed"
            )
        return (
            {"rope_type": "default", **base} if scaling == "none" else {"rope_type": scaling, "factor": factor, **base}
        )

    def _longrope(
        self, kind: str, architecture: Architecture, found: Mapping[str, Any], head_dim: int
    ) -> dict[str, Any]:
        """RoPE of models with divisors of the frequencies for two contexts."""
        context = found["rope.scaling.original_context_length"]
        if not architecture.partial_rotary or not context:
            raise UnsupportedModelError(
                f"load_model: {self._label} has {_TWO_CONTEXTS[0]!r} or its counterpart, RoPE's divisors for two "
                f"contexts, and {kind}.rope.scaling.original_context_length={describe(context)}; phi3 with a length is "
                "needed"
            )
        pairs = (found["rope.dimension_count"] or head_dim) // 2
        for name in _TWO_CONTEXTS:
            if name not in self._file or self._file.shape(name) != (pairs,):
                shape = list(self._file.shape(name)) if name in self._file else None
                raise CheckpointError(f"load_model: {self._label} has {name!r} of shape {shape}; [{pairs}] is needed")
        short, long = (self._file.read(name).tolist() for name in _TWO_CONTEXTS)
        given = found["rope.scaling.attn_factor"]
        attention = {} if given is None else {"attention_factor": given}
        return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **attention}

    def _divisors(self) -> np.ndarray | None:
        """What llama.cpp divides RoPE's frequencies by: how Llama 3.1 and later scale them, worked out already."""
        if _DIVISORS not in self:
            return None
        divisors = self.read(_DIVISORS, (self.config["head_dim"] // 2,))
        if not (np.isfinite(divisors).all() and (divisors > 0).all()):
            raise CheckpointError(f"load_model: {self._label} has numbers that are not positive in {_DIVISORS!r}")
        return divisors

    def blocks(self, name: str, shape: tuple[int, ...]) -> QuantizedWeight | None:
        if not self.keep_blocks or name not in self or self._files[name].shape(name) != tuple(shape):
            return None  # `read` says what is wrong
        found: QuantizedWeight | None = self._files[name].blocks(name)
        if found is not None:
            self._unread.discard(name)
        return found

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        if name not in self:
            raise CheckpointError(f"load_model: {self._label} has no tensor for {name!r}")
        return super().read(name, shape)
