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
from flashkernel.typing import KvAppendRopeWithQ

from .arrays import HostArrays
from .checkpoint import Checkpoint, MemoryCheckpoint
from .config import NEEDED, Field, array, flag, integer, mapping, number, read_field, read_fields, text
from .errors import CheckpointError, UnsupportedModelError
from .files import describe
from .model import Model, PagedBatch, base_prefix, embedding_and_head, refuse_windows, require_layers

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


MAX_HEAD_DIM = 65536  # far above what the kernels take; frequencies are made for each

# What is read of a config.json, and what it may leave out; by model_type where it differs from Llama's.
_LLAMA = {
    "vocab_size": integer(32000),
    "hidden_size": integer(4096),
    "intermediate_size": integer(11008),
    "num_hidden_layers": integer(32),
    "num_attention_heads": integer(32),
    "num_key_value_heads": integer(None, null=True),
    "head_dim": integer(None, high=MAX_HEAD_DIM, null=True),
    "hidden_act": text("silu"),
    "max_position_embeddings": integer(2048),
    "rms_norm_eps": number(1e-6, 0, 1),
    "tie_word_embeddings": flag(False),
}
_QWEN = {
    **_LLAMA,
    "vocab_size": integer(151936),
    "intermediate_size": integer(22016),
    "num_key_value_heads": integer(32, null=True),
    "max_position_embeddings": integer(32768),
    "use_sliding_window": flag(False),
    "sliding_window": integer(4096, null=True),
    "max_window_layers": integer(28, low=0),
    "layer_types": array(),
}
FIELDS: dict[str, dict[str, Field]] = {
    "llama": {**_LLAMA, "attention_bias": flag(False), "mlp_bias": flag(False)},
    "mistral": {
        **_LLAMA,
        "intermediate_size": integer(14336),
        "num_key_value_heads": integer(8, null=True),
        "max_position_embeddings": integer(131072),
        "sliding_window": integer(4096, null=True),
        "layer_types": array(),
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": integer(128, high=MAX_HEAD_DIM), "attention_bias": flag(False)},
}


def layer_windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """The sliding window of each layer, from the fields that have been read: of those that layer_types names, else of
    all of Mistral's and of Qwen's from max_window_layers on."""
    window = config.get("sliding_window")
    if not config.get("use_sliding_window", True):
        window = None
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 0)
        return [window if i >= first else None for i in range(num_layers)]
    allowed = ("full_attention",) if window is None else ("full_attention", "sliding_attention")
    if len(kinds) != num_layers or any(kind not in allowed for kind in kinds):
        raise UnsupportedModelError(
            f"load_model: config.json has layer_types={describe(kinds)} and sliding_window={window}; {num_layers} of "
            f"{' or '.join(allowed)} are needed"
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]


def rope_frequencies(config: Mapping[str, Any], head_dim: int) -> tuple[float, int, np.ndarray | None]:
    """(theta, rotary_dim, inv_freq) of a Llama config; inv_freq float32 [rotary_dim / 2] only where RoPE is scaled.

    Reads the old layout (rope_theta, rope_scaling) and that of Transformers 5 (rope_parameters). Scaling: "linear"
    divides the frequencies by a factor; "llama3" only the slow ones, with a smooth change in between (Llama 3.1's).
    """
    named = read_fields(config, {"rope_scaling": mapping(), "rope_parameters": mapping()})
    parameters = named["rope_scaling"] or named["rope_parameters"] or {}  # the older name wins, as in Transformers
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedModelError("load_model: config.json has rope_parameters by layer type; one set is needed")
    where = "RoPE of config.json"
    kind = read_field(parameters, "rope_type", text(parameters.get("type", "default")), where)
    if not isinstance(kind, str) or kind not in ("default", "linear", "llama3"):
        raise UnsupportedModelError(
            f"load_model: config.json has rope_type={describe(kind)}; default, linear or llama3 is needed"
        )
    for source in (parameters, config):
        partial = source.get("partial_rotary_factor")
        if partial is not None and (isinstance(partial, bool) or partial != 1):
            raise UnsupportedModelError(
                f"load_model: config.json has partial_rotary_factor={describe(partial)}; 1 is needed: Transformers "
                "rotates whole heads of this model_type"
            )
    outer = config.get("rope_theta")
    theta_field = number(10000.0, 1e-6)
    if outer is not None:
        theta_field = number(read_field(config, "rope_theta", theta_field), 1e-6)
    theta = read_field(parameters, "rope_theta", theta_field, where)
    rotary_dim = head_dim
    if rotary_dim < 2 or rotary_dim % 2:
        raise CheckpointError(
            f"load_model: config.json gives {rotary_dim} rotated dims of a head; an even number >= 2 is needed"
        )
    if kind == "default":
        return theta, rotary_dim, None
    frequencies = 1.0 / theta ** (np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    factors = number(NEEDED, 1e-6)
    factor = read_field(parameters, "factor", factors, where)
    if kind == "linear":
        return theta, rotary_dim, (frequencies / factor).astype(np.float32)
    low = read_field(parameters, "low_freq_factor", factors, where)
    high = read_field(parameters, "high_freq_factor", factors, where)
    # The context that the model was trained for: the config's own field wins, as in Transformers.
    original = "original_max_position_embeddings"
    holder = config if config.get(original) is not None else parameters
    context = read_field(holder, original, integer(config.get("max_position_embeddings", 2048)), where)
    if high <= low:
        raise CheckpointError(
            f"load_model: config.json has high_freq_factor={high} and low_freq_factor={low}; high must be above low"
        )
    turns = context * frequencies / (2 * math.pi)  # full turns of a pair within the original context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 0: slow, divided by factor; 1: fast, kept
    return theta, rotary_dim, ((1 - smooth) * frequencies / factor + smooth * frequencies).astype(np.float32)


class Llama(Model, model_types=FIELDS):
    def __init__(self, checkpoint: Checkpoint | MemoryCheckpoint, arrays: HostArrays):
        super().__init__(checkpoint, arrays)
        kind = checkpoint.config.get("model_type", "llama")
        config = read_fields(checkpoint.config, FIELDS[kind])
        activation = config["hidden_act"]
        if activation not in ("silu", "swish"):
            raise UnsupportedModelError(
                f"load_model: config.json has hidden_act={describe(activation)}; silu is needed"
            )
        hidden = config["hidden_size"]
        inner = config["intermediate_size"]
        self.num_layers = config["num_hidden_layers"]
        self.heads_q = config["num_attention_heads"]
        self.heads_kv = config["num_key_value_heads"] or self.heads_q
        self.head_dim = config["head_dim"] or hidden // self.heads_q
        self.max_positions = config["max_position_embeddings"]
        foreign = [name for name in ("sliding_window", "layer_types") if name not in FIELDS[kind]]
        refuse_windows(checkpoint.config, self.max_positions, *foreign)
        self.vocab_size = config["vocab_size"]
        self.eps = config["rms_norm_eps"]
        if not 1 <= self.head_dim <= MAX_HEAD_DIM:
            raise CheckpointError(
                f"load_model: config.json has hidden_size={hidden} and num_attention_heads={self.heads_q}, which gives "
                f"heads of {self.head_dim} elements; 1 to {MAX_HEAD_DIM} are needed"
            )
        if self.heads_q % self.heads_kv:
            raise CheckpointError(
                f"load_model: config.json has num_attention_heads={self.heads_q} and num_key_value_heads="
                f"{self.heads_kv}; the first must be a multiple of the second"
            )
        self.scale = self.head_dim**-0.5
        self.theta, self.rotary_dim, inv_freq = rope_frequencies(
            {**checkpoint.config, "max_position_embeddings": self.max_positions}, self.head_dim
        )
        if checkpoint.rope_divisors is not None:
            plain = self.theta ** (-np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim)
            inv_freq = ((plain if inv_freq is None else inv_freq) / checkpoint.rope_divisors).astype(np.float32)
        # Frequencies are float32 whatever the model's dtype.
        self.inv_freq = None if inv_freq is None else arrays.index(inv_freq, "float32")
        out_bias = config.get("attention_bias", False)
        qkv_bias = kind == "qwen2" or out_bias
        mlp_bias = config.get("mlp_bias", False)
        prefix = base_prefix(checkpoint, "model")
        require_layers(checkpoint, prefix + "layers.{}.input_layernorm.weight", self.num_layers, "num_hidden_layers")
        embedding, head = embedding_and_head(
            checkpoint, prefix + "embed_tokens.weight", prefix, config["tie_word_embeddings"]
        )
        if kind == "mistral" and isinstance(checkpoint, MemoryCheckpoint):
            config["layer_types"] = None  # Transformers' Mistral has none; on disk they make a Ministral of it
        windows = layer_windows(config, self.num_layers)
        sizes = [size for size in windows if size is not None]
        self.window = max(sizes) if sizes and len(sizes) == len(windows) else None
        q_size, kv_size = self.heads_q * self.head_dim, self.heads_kv * self.head_dim

        def read(name: str, *shape: int) -> Any:
            return checkpoint.read(prefix + name, shape)

        self.turned: list[tuple[str, Any]] = []  # see Gpt2: none here
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

        self.embedding = arrays.weight(checkpoint.read(embedding, (self.vocab_size, hidden)))
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
        tied = head == embedding
        rows = self.embedding if tied else arrays.weight(checkpoint.read(head, (self.vocab_size, hidden)))
        self.lm_head = arrays.output_rows(rows)
        if self.lm_head is not rows:
            self.stacked.append(([head], self.lm_head))
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
            rope: KvAppendRopeWithQ = {
                "positions": batch.positions,
                "q": q,
                "q_out": q,
                "theta": self.theta,
                "rotary_dim": self.rotary_dim,
                "inv_freq": self.inv_freq,
            }
            k_pages, v_pages = self.pages(pool, i)
            fk.kv_append(k, v, k_pages, v_pages, batch.slots, rope=rope, **self.kv_options(pool, i), **options)
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
