"""Llama (Touvron et al., 2023) on FlashKernel ops, from Hugging Face's LlamaForCausalLM checkpoints, and the models
that share its blocks: Mistral (sliding window), Qwen2 (biases of Q, K and V), Qwen3 (norms of the heads of Q and K).

Per layer: fused residual + RMSNorm, one linear for Q, K and V, RoPE fused into the KV append, paged attention with
grouped queries, output linear, fused residual + RMSNorm, one linear for gate and up, SwiGLU, down linear.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashkernel as fk
from flashkernel.typing import KvAppendRope

from .arrays import HostArrays
from .checkpoint import Checkpoint, MemoryCheckpoint
from .errors import CheckpointError, UnsupportedModelError
from .model import Model, PagedBatch, config_number

__all__ = ["Llama", "rope_frequencies"]


@dataclass
class _Layer:
    input_norm: Any
    qkv_weight: Any
    qkv_bias: Any
    q_norm: Any
    k_norm: Any
    out_weight: Any
    out_bias: Any
    mlp_norm: Any
    gate_up_weight: Any
    gate_up_bias: Any
    down_weight: Any
    down_bias: Any
    window: int | None  # most keys that a query sees


# What a config.json may leave out, by model_type, where it is not Llama's default.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768},
    "qwen3": {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768, "head_dim": 128},
}


def layer_windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """The sliding window of each layer: by layer_types where the config has them, else as the model_type has it."""
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if window is None or config.get("model_type") not in ("mistral", "qwen2", "qwen3"):
        slides = [False] * num_layers
    elif config["model_type"] == "mistral":
        slides = [True] * num_layers
    elif kinds is not None:
        if len(kinds) != num_layers or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
            raise UnsupportedModelError(
                f"load_model: config.json has layer_types={kinds!r}; {num_layers} of full_attention or "
                "sliding_attention are needed"
            )
        slides = [kind == "sliding_attention" for kind in kinds]
    else:
        first = int(config_number(config, "max_window_layers", 28, minimum=0))
        slides = [bool(config.get("use_sliding_window")) and i >= first for i in range(num_layers)]
    size = int(config_number(config, "sliding_window", 1)) if any(slides) else None
    return [size if slide else None for slide in slides]


def rope_frequencies(config: Mapping[str, Any], head_dim: int) -> tuple[float, int, np.ndarray | None]:
    """(theta, rotary_dim, inv_freq) of a Llama config; inv_freq float32 [rotary_dim / 2] only where RoPE is scaled.

    Reads the old layout (rope_theta, rope_scaling) and that of Transformers 5 (rope_parameters). Scaling: "linear"
    divides the frequencies by a factor; "llama3" only the slow ones, with a smooth change in between (Llama 3.1's).
    """
    parameters = dict(config.get("rope_scaling") or {})
    parameters.update(config.get("rope_parameters") or {})
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * float(partial))
    if rotary_dim < 2 or rotary_dim % 2:
        raise CheckpointError(
            f"load_model: config.json gives {rotary_dim} rotated dims of a head; an even number >= 2 is needed"
        )
    if kind == "default":
        return theta, rotary_dim, None
    if kind not in ("linear", "llama3"):
        raise UnsupportedModelError(
            f"load_model: config.json has rope_type={kind!r}; default, linear or llama3 is needed"
        )
    frequencies = 1.0 / theta ** (np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    factor = float(config_number(parameters, "factor", minimum=1e-6))
    if kind == "linear":
        return theta, rotary_dim, (frequencies / factor).astype(np.float32)
    low = float(config_number(parameters, "low_freq_factor", minimum=1e-6))
    high = float(config_number(parameters, "high_freq_factor", minimum=1e-6))
    context = float(
        config_number(parameters, "original_max_position_embeddings", config.get("max_position_embeddings"))
    )
    if high <= low:
        raise CheckpointError(
            f"load_model: config.json has high_freq_factor={high} and low_freq_factor={low}; high must be above low"
        )
    turns = context * frequencies / (2 * math.pi)  # full turns of a pair within the original context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 0: slow, divided by factor; 1: fast, kept
    return theta, rotary_dim, ((1 - smooth) * frequencies / factor + smooth * frequencies).astype(np.float32)


class Llama(Model):
    def __init__(self, checkpoint: Checkpoint | MemoryCheckpoint, arrays: HostArrays):
        super().__init__(checkpoint, arrays)
        kind = checkpoint.config.get("model_type", "llama")
        config = {**DEFAULTS[kind], **checkpoint.config}
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise UnsupportedModelError(f"load_model: config.json has hidden_act={activation!r}; silu is needed")
        hidden = int(config_number(config, "hidden_size", 4096))
        inner = int(config_number(config, "intermediate_size", 11008))
        self.num_layers = int(config_number(config, "num_hidden_layers", 32))
        self.heads_q = int(config_number(config, "num_attention_heads", 32))
        self.heads_kv = int(config_number(config, "num_key_value_heads", self.heads_q))
        self.head_dim = int(config_number(config, "head_dim", hidden // self.heads_q))
        self.max_positions = int(config_number(config, "max_position_embeddings", 2048))
        self.vocab_size = int(config_number(config, "vocab_size", 32000))
        self.eps = float(config_number(config, "rms_norm_eps", 1e-6, minimum=0))
        if self.heads_q % self.heads_kv:
            raise CheckpointError(
                f"load_model: config.json has num_attention_heads={self.heads_q} and num_key_value_heads="
                f"{self.heads_kv}; the first must be a multiple of the second"
            )
        self.scale = self.head_dim**-0.5
        self.theta, self.rotary_dim, inv_freq = rope_frequencies(config, self.head_dim)
        # Frequencies are float32 whatever the model's dtype.
        self.inv_freq = None if inv_freq is None else arrays.index(inv_freq, "float32")
        out_bias = kind in ("llama", "qwen3") and bool(config.get("attention_bias"))
        qkv_bias = kind == "qwen2" or out_bias
        mlp_bias = kind == "llama" and bool(config.get("mlp_bias"))
        windows = layer_windows(config, self.num_layers)
        sizes = [size for size in windows if size is not None]
        self.window = max(sizes) if sizes and len(sizes) == len(windows) else None
        q_size, kv_size = self.heads_q * self.head_dim, self.heads_kv * self.head_dim

        # LlamaForCausalLM saves under "model."; the bare LlamaModel without it.
        prefix = "model." if "model.embed_tokens.weight" in checkpoint else ""

        def read(name: str, *shape: int) -> Any:
            return checkpoint.read(prefix + name, shape)

        # Parameters that lie one below the other in a matrix (or bias) of their own, of which they may be the first
        # rows, by their names in the checkpoint.
        self.stacked: list[tuple[list[str], Any]] = []

        def stack(names: list[tuple[str, int]], what: str, present: bool, *tail: int) -> Any:
            """Some projections of the same input as one matrix (or one bias), rows one below the other."""
            if not present:
                return None
            full = [f"{name}.{what}" for name, _ in names]
            whole = arrays.stack([read(name, rows, *tail) for name, (_, rows) in zip(full, names, strict=True)])
            self.stacked.append(([prefix + name for name in full], whole))
            return whole

        def head_norm(name: str) -> Any:
            return arrays.weight(read(name, self.head_dim)) if kind == "qwen3" else None

        self.embedding = arrays.weight(read("embed_tokens.weight", self.vocab_size, hidden))
        self.layers = []
        for i in range(self.num_layers):
            at, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
            qkv = [(at + "q_proj", q_size), (at + "k_proj", kv_size), (at + "v_proj", kv_size)]
            gate_up = [(mlp + "gate_proj", inner), (mlp + "up_proj", inner)]
            out, down = [(at + "o_proj", hidden)], [(mlp + "down_proj", hidden)]
            self.layers.append(
                _Layer(
                    arrays.weight(read(f"layers.{i}.input_layernorm.weight", hidden)),
                    stack(qkv, "weight", True, hidden),
                    stack(qkv, "bias", qkv_bias),
                    head_norm(at + "q_norm.weight"),
                    head_norm(at + "k_norm.weight"),
                    stack(out, "weight", True, q_size),
                    stack(out, "bias", out_bias),
                    arrays.weight(read(f"layers.{i}.post_attention_layernorm.weight", hidden)),
                    stack(gate_up, "weight", True, hidden),
                    stack(gate_up, "bias", mlp_bias),
                    stack(down, "weight", True, inner),
                    stack(down, "bias", mlp_bias),
                    windows[i],
                )
            )
        self.inner = inner
        self.norm = arrays.weight(read("norm.weight", hidden))
        tied = config.get("tie_word_embeddings", False)
        head = self.embedding if tied else arrays.weight(checkpoint.read("lm_head.weight", (self.vocab_size, hidden)))
        self.lm_head = arrays.output_rows(head)
        if self.lm_head is not head:
            self.stacked.append(([prefix + "embed_tokens.weight" if tied else "lm_head.weight"], self.lm_head))
            self.embedding = self.lm_head[: self.vocab_size] if tied else self.embedding

    def forward(self, batch: PagedBatch, pool: fk.KvPagePool) -> Any:
        options = self.arrays.op_options
        heads_q, heads_kv, head_dim = self.heads_q, self.heads_kv, self.head_dim
        residual = self.arrays.take(self.embedding, batch.tokens)
        x = fk.rms_norm(residual, self.layers[0].input_norm, eps=self.eps, **options)
        for i, layer in enumerate(self.layers):
            qkv = fk.linear(x, layer.qkv_weight, layer.qkv_bias, **options)
            qkv = qkv.reshape(qkv.shape[0], heads_q + 2 * heads_kv, head_dim)
            q, k, v = qkv[:, :heads_q], qkv[:, heads_q : heads_q + heads_kv], qkv[:, heads_q + heads_kv :]
            if layer.q_norm is not None:
                fk.rms_norm(q, layer.q_norm, eps=self.eps, out=q, **options)
                fk.rms_norm(k, layer.k_norm, eps=self.eps, out=k, **options)
            # Rotates k on its way into the pages and q in place.
            rope: KvAppendRope = {
                "positions": batch.positions,
                "q": q,
                "q_out": q,
                "theta": self.theta,
                "rotary_dim": self.rotary_dim,
                "inv_freq": self.inv_freq,
            }
            fk.kv_append(k, v, *self.pages(pool, i), batch.slots, rope=rope, **self.kv_options(pool, i), **options)
            x = self.attend(q, pool, i, batch, self.scale, layer.window)
            x = fk.linear(x, layer.out_weight, layer.out_bias, **options)
            x, residual = fk.rms_norm(x, layer.mlp_norm, residual=residual, eps=self.eps, **options)
            gate_up = fk.linear(x, layer.gate_up_weight, layer.gate_up_bias, **options)
            x = fk.swiglu(gate_up[:, : self.inner], gate_up[:, self.inner :], **options)
            x = fk.linear(x, layer.down_weight, layer.down_bias, **options)
            if i + 1 < self.num_layers:
                x, residual = fk.rms_norm(x, self.layers[i + 1].input_norm, residual=residual, eps=self.eps, **options)
        if batch.last_rows is not None:
            x, residual = self.arrays.take(x, batch.last_rows), self.arrays.take(residual, batch.last_rows)
        x, _ = fk.rms_norm(x, self.norm, residual=residual, eps=self.eps, **options)
        return fk.linear(x, self.lm_head, **options)[:, : self.vocab_size]
