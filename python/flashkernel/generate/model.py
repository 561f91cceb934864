"""What the engine knows about a model: its limits, its cache geometry, and one forward step over a ragged batch.

Architectures (gpt2.py, llama.py) subclass `Model`; `load_model` picks one by config.json's model_type.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import flashkernel as fk

from .arrays import HostArrays, arrays_for
from .checkpoint import Checkpoint, MemoryCheckpoint
from .errors import CheckpointError, UnsupportedModelError

__all__ = ["Model", "PagedBatch", "build_model", "config_number", "load_model", "stop_tokens"]

# Hugging Face's names of activations, by the fused epilogue of `linear` that computes them.
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
}


@dataclass
class PagedBatch:
    """The new tokens of some sequences side by side, and where their keys and values go and stand."""

    tokens: Any  # int64 [total] ids
    positions: Any  # int32 or int64 [total]
    slots: Any  # int64 [total]: page * page_size + offset of each new token
    cu_seqlens: Any  # int32 [batch + 1]: the new tokens of each sequence; None: one of each
    max_seqlen: int  # most new tokens of a sequence
    block_table: Any  # int32 [batch, max_pages]
    seq_lens: Any  # int32 or int64 [batch]: tokens in the cache, the new ones included
    last_rows: np.ndarray | None  # rows of `tokens` whose logits are wanted; None: all


class Model(ABC):
    """A decoder whose weights are held in the arrays of one device."""

    num_layers: int
    heads_q: int
    heads_kv: int
    head_dim: int
    max_positions: int
    vocab_size: int
    window: int | None = None  # most keys that a query of any layer sees, its own included; None: all

    def __init__(self, checkpoint: Checkpoint | MemoryCheckpoint, arrays: HostArrays):
        self.config: Mapping[str, Any] = checkpoint.config
        self.arrays = arrays
        self.stop_tokens = stop_tokens(checkpoint)

    @abstractmethod
    def forward(self, batch: PagedBatch, pool: fk.KvPagePool) -> Any:
        """Appends the batch's keys and values to `pool` and returns logits [len(last_rows), vocab_size]."""

    def attend(
        self, q: Any, pool: fk.KvPagePool, layer: int, batch: PagedBatch, scale: float, window: int | None = None
    ) -> Any:
        """Causal attention of q [total, heads_q, head_dim] over the pages of one layer; [total, heads_q * head_dim].

        window: most keys that a query sees, its own included.
        """
        one_each = batch.cu_seqlens is None  # then q is [batch, heads_q, 1, head_dim]
        k_pages, v_pages = self.pages(pool, layer)
        out = fk.attention_paged(
            q[:, :, None] if one_each else q,
            k_pages,
            v_pages,
            batch.block_table,
            batch.seq_lens,
            cu_seqlens_q=batch.cu_seqlens,
            max_seqlen_q=None if one_each else batch.max_seqlen,
            causal=True,
            window=None if window is None else (window - 1, 0),
            scale=scale,
            **self.kv_options(pool, layer),
            **self.arrays.op_options,
        )
        return out.reshape(out.shape[0], self.heads_q * self.head_dim)

    def pages(self, pool: fk.KvPagePool, layer: int) -> tuple[Any, Any]:
        """The pages of one layer, keys and values."""
        options = self.arrays.pool_views
        return pool.k_pages(layer, **options), pool.v_pages(layer, **options)

    def kv_options(self, pool: fk.KvPagePool, layer: int) -> dict[str, Any]:
        """What ops that take the pages of one layer need to know of an 8-bit cache."""
        scales = pool.scales(layer, **self.arrays.pool_views)
        return {} if scales is None else {"kv_scales": scales, "kv_dtype": pool.dtype}


def config_number(config: Mapping[str, Any], key: str, default: float | None = None, minimum: float = 1) -> Any:
    """config[key] as a number of at least `minimum`; `default` where the key is missing or null."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < minimum:
        raise CheckpointError(f"load_model: config.json has {key}={value!r}; a number >= {minimum} is needed")
    return value


def stop_tokens(checkpoint: Checkpoint | MemoryCheckpoint) -> frozenset[int]:
    """End-of-text ids: generation_config.json's, else config.json's; one id, a list or none."""
    value = checkpoint.generation_config.get("eos_token_id", checkpoint.config.get("eos_token_id"))
    values: Iterable[Any] = [] if value is None else value if isinstance(value, list) else [value]
    return frozenset(int(token) for token in values)


def load_model(directory: str | Path, *, device: str = "auto", dtype: str = "float32") -> Model:
    """Loads a local Hugging Face GPT-2, Llama, Mistral, Qwen2 or Qwen3 checkpoint.

    directory: holds config.json and *.safetensors (one file, or shards with an index); pickles are refused.
    device: "auto" (a CUDA device if this build and machine have one), "cpu" or "cuda".
    dtype: "float32", "float16" or "bfloat16", of weights, activations and cache.

    Raises CheckpointError (missing or broken files), UnsupportedModelError (another architecture), NotImplementedError
    (device).
    """
    checkpoint = Checkpoint(directory)
    return build_model(checkpoint, arrays_for(device, dtype))


def build_model(checkpoint: Checkpoint | MemoryCheckpoint, arrays: HostArrays) -> Model:
    """The model of a checkpoint's config. Raises UnsupportedModelError for another architecture."""
    from .gpt2 import Gpt2
    from .llama import DEFAULTS, Llama

    architectures: dict[str, type[Model]] = {"gpt2": Gpt2, **dict.fromkeys(DEFAULTS, Llama)}
    model_type = checkpoint.config.get("model_type")
    if model_type not in architectures:
        raise UnsupportedModelError(
            f"load_model: config.json has model_type={model_type!r}; one of {', '.join(architectures)} is needed"
        )
    return architectures[model_type](checkpoint, arrays)
