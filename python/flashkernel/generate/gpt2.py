"""GPT-2 (Radford et al., 2019) on FlashKernel ops, from Hugging Face's GPT2LMHeadModel checkpoints.

Per layer: fused residual + LayerNorm, QKV linear, KV append, paged attention, output linear, fused residual +
LayerNorm, linear + GELU in one kernel, linear. The checkpoint's Conv1D weights are [in, out] and go to `linear`
transposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flashkernel as fk

from .arrays import HostArrays
from .checkpoint import Checkpoint, MemoryCheckpoint
from .config import flag, integer, number, read_fields, text
from .errors import CheckpointError, UnsupportedModelError
from .files import describe
from .model import (
    ACTIVATIONS,
    ONCE,
    Model,
    PagedBatch,
    Split,
    base_prefix,
    embedding_and_head,
    refuse_windows,
    require_layers,
)
from .rope_scaling import Rope

__all__ = ["Gpt2"]

FIELDS = {
    "vocab_size": integer(50257),
    "n_positions": integer(1024, alias="max_position_embeddings"),
    "n_embd": integer(768, alias="hidden_size"),
    "n_layer": integer(12, alias="num_hidden_layers"),
    "n_head": integer(12, alias="num_attention_heads"),
    "n_inner": integer(None, null=True),
    "activation_function": text("gelu_new"),
    "layer_norm_epsilon": number(1e-5, 0, 1),
    "scale_attn_weights": flag(True),
    "scale_attn_by_inverse_layer_idx": flag(False),
    "add_cross_attention": flag(False),
    "tie_word_embeddings": flag(True),
}


@dataclass
class _Layer:
    ln_1_weight: Any
    ln_1_bias: Any
    attn_weight: Any
    attn_bias: Any
    attn_proj_weight: Any
    attn_proj_bias: Any
    ln_2_weight: Any
    ln_2_bias: Any
    fc_weight: Any
    fc_bias: Any
    fc_proj_weight: Any
    fc_proj_bias: Any
    scale: float


class Gpt2(Model, model_types=("gpt2",)):
    def __init__(self, checkpoint: Checkpoint | MemoryCheckpoint, arrays: HostArrays):
        super().__init__(checkpoint, arrays)
        config = read_fields(checkpoint.config, FIELDS)
        if config["add_cross_attention"]:
            raise UnsupportedModelError(
                "load_model: config.json has add_cross_attention=true; a decoder-only GPT-2 is needed"
            )
        activation = config["activation_function"]
        if activation not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"load_model: config.json has activation_function={describe(activation)}; "
                f"one of {', '.join(ACTIVATIONS)} is needed"
            )
        self.activation = ACTIVATIONS[activation]
        hidden = config["n_embd"]
        self.num_layers = config["n_layer"]
        self.heads_q = self.heads_kv = config["n_head"]
        self.max_positions = config["n_positions"]
        refuse_windows(checkpoint.config, self.max_positions, "sliding_window", "layer_types")
        self.vocab_size = config["vocab_size"]
        inner = config["n_inner"] or 4 * hidden
        self.eps = config["layer_norm_epsilon"]
        # What `accelerate` asks of every architecture (integrations/accelerate/protocol.py).
        # There is no one scale: each layer may have its own.
        self.numbers = {"eps": self.eps}
        self.derived: list[tuple[Any, Any, float]] = []
        self.ropes: dict[str, Rope] = {}  # none
        if hidden % self.heads_q:
            raise CheckpointError(
                f"load_model: config.json has n_embd={hidden} and n_head={self.heads_q}; n_embd must be a "
                f"multiple of n_head"
            )
        self.head_dim = hidden // self.heads_q
        self.hidden = hidden
        self.heads_q = self.heads_kv = self.share(self.heads_q, "n_head")
        inner, own = self.share(inner, "n_inner"), self.heads_q * self.head_dim
        self.splits = {
            "c_attn.weight": Split(1, (own, own, own)),
            "c_attn.bias": Split(0, (own, own, own)),
            "c_fc.weight": Split(1),
            "c_fc.bias": Split(0),
            "c_proj.weight": Split(0),
            "c_proj.bias": ONCE,
        }

        prefix = base_prefix(checkpoint, "transformer")
        require_layers(checkpoint, prefix + "h.{}.ln_1.weight", self.num_layers, "n_layer")
        embedding, head = embedding_and_head(checkpoint, prefix + "wte.weight", prefix, config["tie_word_embeddings"])

        def read(name: str, *shape: int) -> Any:
            return arrays.weight(self.read(checkpoint, prefix + name, shape))

        # Weights that lie the other way round than in the checkpoint, by their names there.
        self.turned: list[tuple[str, Any]] = []

        def conv1d(name: str, inputs: int, outputs: int) -> Any:
            """Conv1D's weight [in, out] as [out, in]."""
            weight = arrays.transposed(read(name, inputs, outputs))
            self.turned.append((prefix + name, weight))
            return weight

        self.wte = arrays.weight(checkpoint.read(embedding, (self.vocab_size, hidden)))
        self.wpe = read("wpe.weight", self.max_positions, hidden)
        self.layers = []
        for i in range(self.num_layers):
            scale = self.head_dim**-0.5 if config["scale_attn_weights"] else 1.0
            if config["scale_attn_by_inverse_layer_idx"]:
                scale /= i + 1
            self.layers.append(
                _Layer(
                    read(f"h.{i}.ln_1.weight", hidden),
                    read(f"h.{i}.ln_1.bias", hidden),
                    conv1d(f"h.{i}.attn.c_attn.weight", hidden, 3 * own),
                    read(f"h.{i}.attn.c_attn.bias", 3 * own),
                    conv1d(f"h.{i}.attn.c_proj.weight", own, hidden),
                    read(f"h.{i}.attn.c_proj.bias", hidden),
                    read(f"h.{i}.ln_2.weight", hidden),
                    read(f"h.{i}.ln_2.bias", hidden),
                    conv1d(f"h.{i}.mlp.c_fc.weight", hidden, inner),
                    read(f"h.{i}.mlp.c_fc.bias", inner),
                    conv1d(f"h.{i}.mlp.c_proj.weight", inner, hidden),
                    read(f"h.{i}.mlp.c_proj.bias", hidden),
                    scale,
                )
            )
        self.ln_f_weight = read("ln_f.weight", hidden)
        self.ln_f_bias = read("ln_f.bias", hidden)
        # Parameters that are the first rows of a matrix of their own, by their names in the checkpoint.
        self.stacked: list[tuple[list[str], Any]] = []
        if self.parallel is not None:
            self.lm_head = self.head(checkpoint, head, hidden)
            return
        tied = head == embedding
        rows = self.wte if tied else arrays.weight(checkpoint.read(head, (self.vocab_size, hidden)))
        self.lm_head = arrays.output_rows(rows)
        if self.lm_head is not rows:
            self.stacked.append(([head], self.lm_head))
            self.wte = self.lm_head[: self.vocab_size] if tied else self.wte

    def forward(self, batch: PagedBatch, pool: fk.KvPagePool) -> Any:
        self.same_batch(batch)
        take, options = self.arrays.take, self.arrays.op_options
        residual = fk.add(take(self.wte, batch.tokens), take(self.wpe, batch.positions), **options)
        first = self.layers[0]
        if self.fuses(batch, pool, first.attn_weight, first.fc_weight):
            return self._fused_logits(residual, batch, pool)
        x = fk.layer_norm(residual, first.ln_1_weight, first.ln_1_bias, eps=self.eps, **options)
        for i, layer in enumerate(self.layers):
            qkv = fk.linear(x, layer.attn_weight, layer.attn_bias, **options)
            x = self._attend_rows(qkv, layer, i, batch, pool)
            x = self.summed(fk.linear(x, layer.attn_proj_weight, layer.attn_proj_bias, **options))
            x, residual = fk.layer_norm(
                x, layer.ln_2_weight, layer.ln_2_bias, residual=residual, eps=self.eps, **options
            )
            x = fk.linear(x, layer.fc_weight, layer.fc_bias, activation=self.activation, **options)
            x = self.summed(fk.linear(x, layer.fc_proj_weight, layer.fc_proj_bias, **options))
            if i + 1 < self.num_layers:
                after = self.layers[i + 1]
                x, residual = fk.layer_norm(
                    x, after.ln_1_weight, after.ln_1_bias, residual=residual, eps=self.eps, **options
                )
        # Only the rows whose logits are wanted go through the last norm and the (large) output layer.
        if batch.last_rows is not None:
            x, residual = take(x, batch.last_rows), take(residual, batch.last_rows)
        x, _ = fk.layer_norm(
            x.reshape(-1, self.hidden), self.ln_f_weight, self.ln_f_bias, residual=residual, eps=self.eps, **options
        )
        return self.whole(fk.linear(x, self.lm_head, **options))

    def _attend_rows(self, qkv: Any, layer: _Layer, i: int, batch: PagedBatch, pool: fk.KvPagePool) -> Any:
        """Attention of the rows of Q, K and V as the linear gives them."""
        qkv = qkv.reshape(qkv.shape[0], 3, self.heads_q, self.head_dim)
        k_pages, v_pages = self.pages(pool, i)
        options = {**self.kv_options(pool, i), **self.arrays.op_options}
        fk.kv_append(qkv[:, 1], qkv[:, 2], k_pages, v_pages, batch.slots, **options)
        return self.attend(qkv[:, 0], pool, i, batch, layer.scale)

    def _fused_logits(self, residual: Any, batch: PagedBatch, pool: fk.KvPagePool) -> Any:
        """What `forward` gives, with norms and residuals in the linears beside them."""
        options: dict[str, Any] = {"constant_weights": True, **self.arrays.op_options}
        norm: dict[str, Any] = {"norm": "layer", "eps": self.eps, **options}
        for i, layer in enumerate(self.layers):
            weights = layer.attn_bias, layer.ln_1_weight, layer.ln_1_bias
            q = fk.qkv_append(residual, layer.attn_weight, *self.pages(pool, i), batch.slots, *weights, **norm)
            x = self.attend(q, pool, i, batch, layer.scale)
            residual = fk.fused_linear(x, layer.attn_proj_weight, layer.attn_proj_bias, residual=residual, **options)
            x = fk.fused_linear(
                residual,
                layer.fc_weight,
                layer.fc_bias,
                layer.ln_2_weight,
                layer.ln_2_bias,
                activation=self.activation,
                **norm,
            )
            residual = fk.fused_linear(x, layer.fc_proj_weight, layer.fc_proj_bias, residual=residual, **options)
        x = fk.layer_norm(residual, self.ln_f_weight, self.ln_f_bias, eps=self.eps, **self.arrays.op_options)
        return self.whole(fk.linear(x, self.lm_head, **self.arrays.op_options))
