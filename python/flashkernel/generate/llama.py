"""Llama (Touvron et al., 2023) on FlashKernel ops, from Hugging Face's LlamaForCausalLM checkpoints.

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
from .checkpoint import Checkpoint
from .errors import CheckpointError, UnsupportedModelError
from .model import Model, PagedBatch, config_number

__all__ = ["Llama", "rope_frequencies"]


@dataclass
class _Layer:
    input_norm: Any
    qkv_weight: Any
    qkv_bias: Any
    out_weight: Any
    out_bias: Any
    mlp_norm: Any
    gate_up_weight: Any
    gate_up_bias: Any
    down_weight: Any
    down_bias: Any


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
    def __init__(self, checkpoint: Checkpoint, arrays: HostArrays):
        super().__init__(checkpoint, arrays)
        config = checkpoint.config
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
        attention_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
        q_size, kv_size = self.heads_q * self.head_dim, self.heads_kv * self.head_dim

        # LlamaForCausalLM saves under "model."; the bare LlamaModel without it.
        prefix = "model." if "model.embed_tokens.weight" in checkpoint else ""

        def read(name: str, *shape: int) -> np.ndarray:
            return checkpoint.read(prefix + name, shape)

        def stack(names: list[tuple[str, int]], kind: str, present: bool, *tail: int) -> Any:
            """Some projections of the same input as one matrix (or one bias), rows one below the other."""
            if not present:
                return None
            return arrays.weight(np.concatenate([read(f"{name}.{kind}", rows, *tail) for name, rows in names]))

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
                    stack(qkv, "bias", attention_bias),
                    stack(out, "weight", True, q_size),
                    stack(out, "bias", attention_bias),
                    arrays.weight(read(f"layers.{i}.post_attention_layernorm.weight", hidden)),
                    stack(gate_up, "weight", True, hidden),
                    stack(gate_up, "bias", mlp_bias),
                    stack(down, "weight", True, inner),
                    stack(down, "bias", mlp_bias),
                )
            )
        self.inner = inner
        self.norm = arrays.weight(read("norm.weight", hidden))
        tied = config.get("tie_word_embeddings", False)
        self.lm_head = (
            self.embedding if tied else arrays.weight(checkpoint.read("lm_head.weight", (self.vocab_size, hidden)))
        )

    def forward(self, batch: PagedBatch, pool: fk.KvPagePool) -> Any:
        options = self.arrays.op_options
        heads_q, heads_kv, head_dim = self.heads_q, self.heads_kv, self.head_dim
        residual = self.arrays.take(self.embedding, batch.tokens)
        x = fk.rms_norm(residual, self.layers[0].input_norm, eps=self.eps, **options)
        for i, layer in enumerate(self.layers):
            qkv = fk.linear(x, layer.qkv_weight, layer.qkv_bias, **options)
            qkv = qkv.reshape(qkv.shape[0], heads_q + 2 * heads_kv, head_dim)
            q, k, v = qkv[:, :heads_q], qkv[:, heads_q : heads_q + heads_kv], qkv[:, heads_q + heads_kv :]
            # Rotates k on its way into the pages and q in place.
            rope: KvAppendRope = {
                "positions": batch.positions,
                "q": q,
                "q_out": q,
                "theta": self.theta,
                "rotary_dim": self.rotary_dim,
                "inv_freq": self.inv_freq,
            }
            fk.kv_append(k, v, pool.k_pages(i), pool.v_pages(i), batch.slots, rope=rope, **options)
            x = self.attend(q, pool, i, batch, self.scale)
            x = fk.linear(x, layer.out_weight, layer.out_bias, **options)
            x, residual = fk.rms_norm(x, layer.mlp_norm, residual=residual, eps=self.eps, **options)
            gate_up = fk.linear(x, layer.gate_up_weight, layer.gate_up_bias, **options)
            x = fk.swiglu(gate_up[:, : self.inner], gate_up[:, self.inner :], **options)
            x = fk.linear(x, layer.down_weight, layer.down_bias, **options)
            if i + 1 < self.num_layers:
                x, residual = fk.rms_norm(x, self.layers[i + 1].input_norm, residual=residual, eps=self.eps, **options)
        x, residual = self.arrays.take(x, batch.last_rows), self.arrays.take(residual, batch.last_rows)
        x, _ = fk.rms_norm(x, self.norm, residual=residual, eps=self.eps, **options)
        return fk.linear(x, self.lm_head, **options)
