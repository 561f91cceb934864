"""A GGUF file as a checkpoint: its metadata as the config, its tensors under Transformers' names.

Called by model.py. What llama.cpp changed when it made the file is undone: the rows of Q and K of its architecture
"llama", which lie so that RoPE turns neighbours, go back to where RoPE turns halves. Whatever would make the model
compute something else than its architecture says (experts, windows, scaled RoPE that is not linear) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint import Checkpoint
from .config import NEEDED, Field, integer, number, read_field, text
from .errors import CheckpointError, UnsupportedModelError
from .files import describe, shown
from .gguf_file import GgufFile

__all__ = ["GgufCheckpoint", "end_tokens", "special_token"]

_ARCHITECTURE = Field("text", NEEDED)
_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # by llama.cpp's names, which are Transformers' model_types
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
}

# A layer's tensors without "blk.N." and the ending, by Transformers' names of them.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)")
_DIVISORS = "rope_freqs.weight"


def _renamed(name: str) -> str:
    """A tensor's name in Transformers; its own where there is none."""
    found = _IN_LAYER.fullmatch(name)
    if found is None or found[2] not in _LAYER:
        return _OTHERS.get(name, name)
    return f"model.layers.{found[1]}.{_LAYER[found[2]]}.{found[3]}"


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

    def __init__(self, file: GgufFile, heads: Mapping[str, int]):
        self.path = file.path
        self._file = file
        self._heads = heads  # by the kind of tensor whose rows llama.cpp has moved
        self.own_names = {_renamed(name): name for name in file.names()}

    def names(self) -> list[str]:
        return list(self.own_names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(self.own_names[name])

    def read(self, name: str) -> np.ndarray:
        own = self.own_names[name]
        values = self._file.read(own)
        layer = _IN_LAYER.fullmatch(own)
        if layer is None or layer[2] not in self._heads:
            return values
        pairs = values.reshape(self._heads[layer[2]], -1, 2, *values.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)

    def same(self, name: str, other: _Weights, other_name: str) -> bool:
        return np.array_equal(self.read(name).view(np.uint32), other.read(other_name).view(np.uint32))


class GgufCheckpoint(Checkpoint):
    """The config and the weights of one GGUF file, in the form of a Hugging Face checkpoint.

    Raises CheckpointError for a file that is broken or lacks a field or a tensor, UnsupportedModelError for another
    architecture or tensor type and for a part of a split file.
    """

    def __init__(self, path: str | Path):
        self.directory = Path(path)
        file = GgufFile(path)
        self._file, self._label = file, shown(file.path.name)
        metadata = file.metadata
        kind = read_field(metadata, "general.architecture", _ARCHITECTURE, self._label)
        if kind not in _ARCHITECTURES:
            raise UnsupportedModelError(
                f"load_model: {self._label} has general.architecture={describe(kind)}; one of "
                f"{', '.join(_ARCHITECTURES)} is needed"
            )
        parts = read_field(metadata, "split.count", integer(0, low=0), self._label)
        if parts > 1:
            raise UnsupportedModelError(
                f"load_model: {self._label} is one of {parts} parts of a model; one whole file is needed "
                "(llama-gguf-split --merge joins them)"
            )
        self.config = self._config(kind, metadata)
        self.generation_config = {"eos_token_id": end_tokens(metadata, self._label)}
        heads = {"attn_q": self.config["num_attention_heads"], "attn_k": self.config["num_key_value_heads"]}
        weights = _Weights(file, heads if kind == "llama" else {})
        self._files: Any = dict.fromkeys(weights.names(), weights)
        self._unread = set(self._files)
        self.rope_divisors = self._divisors()

    def _config(self, kind: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: self._field(metadata, f"{kind}.{name}") for name in _FIELDS}
        heads = found["attention.head_count"]
        heads_kv = found["attention.head_count_kv"] or heads
        head_dim = found["attention.key_length"] or found["rope.dimension_count"] or found["embedding_length"] // heads
        if heads % heads_kv or head_dim < 2 or head_dim % 2:
            raise CheckpointError(
                f"load_model: {self._label} has {heads} heads of {head_dim} elements, {heads_kv} of keys and values; "
                "even elements, and a multiple of the heads of keys and values, are needed"
            )
        for name in ("attention.value_length", "rope.dimension_count"):
            if found[name] not in (None, head_dim):
                raise UnsupportedModelError(
                    f"load_model: {self._label} has {kind}.{name}={found[name]} with heads of {head_dim} elements; the "
                    "same number is needed"
                )
        if found["expert_count"]:
            raise UnsupportedModelError(
                f"load_model: {self._label} has {kind}.expert_count={found['expert_count']}; a model without experts "
                "is needed"
            )
        if 0 < found["attention.sliding_window"] < found["context_length"]:
            raise UnsupportedModelError(
                f"load_model: {self._label} has {kind}.attention.sliding_window={found['attention.sliding_window']}, "
                f"which {kind} of llama.cpp does not compute with; none is needed"
            )
        layers = found["block_count"]
        if f"blk.{layers - 1}.attn_norm.weight" not in self._file:
            raise CheckpointError(
                f"load_model: {self._label} has {kind}.block_count={layers}, but no tensor "
                f"'blk.{layers - 1}.attn_norm.weight'"
            )
        if "token_embd.weight" not in self._file or len(self._file.shape("token_embd.weight")) != 2:
            raise CheckpointError(f"load_model: {self._label} has no matrix 'token_embd.weight'")
        return {
            "model_type": kind,
            "vocab_size": self._file.shape("token_embd.weight")[0],
            "hidden_size": found["embedding_length"],
            "intermediate_size": found["feed_forward_length"],
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads_kv,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": found["context_length"],
            "rms_norm_eps": found["attention.layer_norm_rms_epsilon"],
            "tie_word_embeddings": "output.weight" not in self._file,  # llama.cpp writes it only where it differs
            **({} if kind == "qwen2" else {"attention_bias": "blk.0.attn_q.bias" in self._file}),
            **({"mlp_bias": "blk.0.ffn_up.bias" in self._file} if kind == "llama" else {}),
            "rope_parameters": self._rope(kind, found),
        }

    def _field(self, metadata: Mapping[str, Any], key: str) -> Any:
        name = key.split(".", 1)[1]
        if isinstance(metadata.get(key), list):
            raise UnsupportedModelError(
                f"load_model: {self._label} has {key}=<an array of {len(metadata[key])}>; one value for all layers is "
                "needed"
            )
        return read_field(metadata, key, _FIELDS[name], self._label)

    def _rope(self, kind: str, found: Mapping[str, Any]) -> dict[str, Any]:
        scaling, factor = found["rope.scaling.type"], found["rope.scaling.factor"]
        if scaling == "none" and found["rope.scale_linear"] != 1:  # what older files have
            scaling, factor = "linear", found["rope.scale_linear"]
        if scaling not in ("none", "linear"):
            raise UnsupportedModelError(
                f"load_model: {self._label} has {kind}.rope.scaling.type={describe(scaling)}; none or linear is needed"
            )
        base = {"rope_theta": found["rope.freq_base"]}
        return (
            {"rope_type": "default", **base} if scaling == "none" else {"rope_type": scaling, "factor": factor, **base}
        )

    def _divisors(self) -> np.ndarray | None:
        """What llama.cpp divides RoPE's frequencies by: how Llama 3.1 and later scale them, worked out already."""
        if _DIVISORS not in self:
            return None
        divisors = self.read(_DIVISORS, (self.config["head_dim"] // 2,))
        if not (np.isfinite(divisors).all() and (divisors > 0).all()):
            raise CheckpointError(f"load_model: {self._label} has numbers that are not positive in {_DIVISORS!r}")
        return divisors

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        if name not in self:
            raise CheckpointError(f"load_model: {self._label} has no tensor for {name!r}")
        return super().read(name, shape)
