"""Every family of decoders with RoPE and RMSNorm (families.py) on FlashKernel ops, from Hugging Face's checkpoints.

Per layer, as in Llama (Touvron et al., 2023): fused residual + RMSNorm, one linear for Q, K and V, RoPE fused into the
KV append, paged attention with grouped queries, output linear, fused residual + RMSNorm, one linear for gate and up,
SwiGLU, down linear. What a family has besides is taken where its `Family` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import flashkernel as fk
from flashkernel.typing import KvAppendRope, KvAppendRopeWithQ

from ..quantized import FP8, FP8_BLOCK, QuantizedWeight, as_bytes
from .arrays import HostArrays
from .checkpoint import Checkpoint, MemoryCheckpoint
from .config import read_fields
from .errors import CheckpointError, UnsupportedModelError
from .experts import ExpertBlock, read_experts
from .families import FAMILIES, MAX_HEAD_DIM, check_foreign, layer_ropes, layer_windows
from .files import describe
from .latent_attention import EPS, LatentAttention, LatentSizes, Way, latent_scale, latent_sizes, read_latent, way
from .model import (
    ONCE,
    Model,
    PagedBatch,
    Split,
    base_prefix,
    embedding_and_head,
    refuse_windows,
    require_layers,
)
from .rope_scaling import Rope, rope_parameters

__all__ = ["DecoderModel"]


@dataclass
class _Mlp:
    gate_up_weight: Any
    gate_up_bias: Any
    down_weight: Any
    down_bias: Any
    inner: int


@dataclass
class _Layer:
    input_norm: Any  # None: attention takes what the layer before gave
    qkv_weight: Any
    qkv_bias: Any
    q_norm: Any
    k_norm: Any
    sinks: Any  # float32 [heads_q] or None
    out_weight: Any
    out_bias: Any
    attention_norm: Any  # of what attention gives; None: there is none
    mlp_norm: Any
    mlp: _Mlp | ExpertBlock
    result_norm: Any  # of what the MLP gives
    window: int | None  # most keys that a query sees
    rope: Rope | None
    latent: LatentAttention | None  # in the place of Q, K and V
    shared: _Mlp | None  # whose result is added to that of the experts


class DecoderModel(Model, model_types=FAMILIES):
    piled: tuple[Any, ...] | None = None  # the weights as one_launch.py takes them, made by the first who needs them

    def __init__(self, checkpoint: Checkpoint | MemoryCheckpoint, arrays: HostArrays):
        super().__init__(checkpoint, arrays)
        kind = checkpoint.config.get("model_type", "llama")
        self.family = family = FAMILIES[kind]
        config = read_fields(checkpoint.config, family.fields)
        check_foreign(checkpoint.config, family.fields)
        activation = config[family.activation_field]
        if activation not in family.activations:
            raise UnsupportedModelError(
                f"load_model: config.json has {family.activation_field}={describe(activation)}; "
                f"{next(iter(family.activations))} is needed"
            )
        self.activation = family.activations[activation]
        hidden = config["hidden_size"]
        self.num_layers = config["num_hidden_layers"]
        self.heads_q = config["num_attention_heads"]
        self.heads_kv = config["num_key_value_heads"] or self.heads_q
        self.head_dim = config.get("head_dim") or hidden // self.heads_q
        self.max_positions = config["max_position_embeddings"]
        foreign = [name for name in ("sliding_window", "layer_types") if name not in family.fields]
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
        self.sizes = latent_sizes(config) if family.latent else None
        self._share(config)
        prefix = base_prefix(checkpoint, "model")
        first = next(name for name in family.norms if name is not None)
        require_layers(checkpoint, f"{prefix}layers.{{}}.{first}.weight", self.num_layers, "num_hidden_layers")
        if kind == "mistral" and isinstance(checkpoint, MemoryCheckpoint):
            config["layer_types"] = None  # Transformers' Mistral has none; on disk they make a Ministral of it
        windows = layer_windows(family, config, self.num_layers)
        sizes = [size for size in windows if size is not None]
        self.window = max(sizes) if sizes and len(sizes) == len(windows) else None
        rotated = self.head_dim if self.sizes is None else self.sizes.turned
        self.ropes, names = layer_ropes(family, checkpoint.config, config, windows, rotated)
        for rope in self.ropes.values():
            self._place(rope, checkpoint.rope_divisors)
        self._read_numbers(config)
        if self.sizes is not None:
            self._keep_latents(self.sizes, config)
        embedding, head = embedding_and_head(
            checkpoint, prefix + "embed_tokens.weight", prefix, config["tie_word_embeddings"]
        )
        self._read_weights(config, checkpoint, prefix, windows, names, embedding, head)

    def _share(self, config: dict[str, Any]) -> None:
        """Heads and columns of the MLP that this rank has, and where they lie in the checkpoint's tensors."""
        self.inner = self.share(config["intermediate_size"], "intermediate_size")
        self.heads_q = self.share(self.heads_q, "num_attention_heads")
        self.heads_kv = self.share(self.heads_kv, "num_key_value_heads")
        if self.parallel is None:
            return
        whole = "norms over all heads" if self.family.qk_norm == "whole" else None
        refused = whole if self.family.experts is None else "experts"
        if refused:
            raise UnsupportedModelError(
                f"load_model: tensor_parallel with model_type={describe(self.config.get('model_type'))}, which has "
                f"{refused}; one without is needed"
            )
        q_size, kv_size = self.heads_q * self.head_dim, self.heads_kv * self.head_dim
        rows = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), Split(0))
        rows |= {"qkv_proj": Split(0, (q_size, kv_size, kv_size)), "gate_up_proj": Split(0, (self.inner, self.inner))}
        self.splits = {f"{name}.{what}": split for name, split in rows.items() for what in ("weight", "bias")}
        for name in ("o_proj", "down_proj"):
            self.splits |= {f"{name}.weight": Split(1), f"{name}.bias": ONCE}
        self.splits["self_attn.sinks"] = Split(0)

    def _place(self, rope: Rope, divisors: np.ndarray | None) -> None:
        if divisors is not None:
            plain = rope.frequencies() if rope.inv_freq is None else rope.inv_freq
            rope.inv_freq = (plain / divisors).astype(np.float32)
        elif rope.inv_freq is None and not self.arrays.asynchronous:
            # one_launch.py's steps take no theta: prompts and steps turn alike.
            rope.inv_freq, rope.rounded = rope.frequencies(), True
        if rope.inv_freq is not None:  # float32 whatever the model's dtype
            rope.inv_freq = self.arrays.index(rope.inv_freq, "float32")
        self.max_positions = min(self.max_positions, rope.max_positions or self.max_positions)

    def _read_numbers(self, config: dict[str, Any]) -> None:
        """What is multiplied, capped and scaled."""
        size = config.get("query_pre_attn_scalar", self.head_dim)
        self.scale = config.get("attention_multiplier", float(size) ** -0.5)
        self.softcap = config.get("attn_logit_softcapping") or 0.0
        self.logits_softcap = config.get("final_logit_softcapping")
        self.logits_factor = 1.0 / config.get("logits_scaling", 1.0)
        self.residual_factor = config.get("residual_multiplier", 1.0)
        self.embedding_factor = config.get("embedding_multiplier", 1.0)
        # Numbers that the stock modules keep beside the config, by their attributes.
        self.numbers = {"variance_epsilon": self.eps, "eps": self.eps, "scaling": self.scale}
        if self.softcap:
            self.numbers["attn_logit_softcapping"] = self.softcap
        for name in ("residual_multiplier", "embedding_multiplier"):
            if name in config:
                self.numbers[name] = config[name]
        if self.family.embedding_root:
            root = float(config["hidden_size"]) ** 0.5
            self.numbers["scalar_embed_scale"] = root
            # The stock model multiplies by the root as the model's dtype has it.
            self.embedding_factor = float(self.arrays.to_float32(self.arrays.weight(np.array([root], np.float32)))[0])
        if self.family.experts is not None:
            self.numbers["top_k"] = config["num_experts_per_tok"]
        if "swiglu_alpha" in config:
            self.numbers.update(alpha=config["swiglu_alpha"], limit=config["swiglu_limit"])

    def pool_options(self, kv_dtype: str | None) -> dict[str, Any]:
        options = super().pool_options(kv_dtype)
        if self.sizes is None or kv_dtype is None:
            return options
        # Latent rows in 8 bits are bytes of several kinds, which the pool keeps as so many 16-bit elements.
        return {**options, "head_dim": self.sizes.row_bytes // 2, "dtype": "float16"}

    def _keep_latents(self, sizes: LatentSizes, config: dict[str, Any]) -> None:
        """The cache has one row a token. Nothing is read of its values, which can't be none."""
        self.heads_kv, self.head_dim, self.head_dim_v, self.latent_cache = 1, sizes.row, 1, True
        self.scale = self.numbers["scaling"] = latent_scale(sizes, rope_parameters(self.config))
        self.numbers["routed_scaling_factor"] = config["routed_scaling_factor"]
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            self.numbers[f"{name}.variance_epsilon"] = EPS

    def _read_weights(
        self,
        config: dict[str, Any],
        checkpoint: Checkpoint | MemoryCheckpoint,
        prefix: str,
        windows: list[int | None],
        ropes: list[str | None],
        embedding: str,
        head: str,
    ) -> None:
        arrays, family, hidden = self.arrays, self.family, config["hidden_size"]
        out_bias = config.get("attention_bias", False)
        qkv_bias = family.qkv_bias or out_bias
        mlp_bias = config.get("mlp_bias", False)
        q_size, kv_size = self.heads_q * self.head_dim, self.heads_kv * self.head_dim
        sizes = self.sizes

        def read(name: str, *shape: int) -> Any:
            return self.read(checkpoint, prefix + name, shape)

        self.turned: list[tuple[str, Any]] = []  # see Gpt2: none here
        # Parameters that lie one below the other in a matrix (or bias) of their own, of which they may be the first
        # rows, by their names in the checkpoint.
        self.stacked: list[tuple[list[str], Any]] = []
        # (array, tensor, offset): what was worked out of a tensor of the checkpoint, float32: tensor + offset.
        self.derived: list[tuple[Any, Any, float]] = []

        def stack(names: list[tuple[str, int]], what: str, present: bool, *tail: int, blocks: bool = True) -> Any:
            """Some projections of the same input as one matrix (or one bias), rows one below the other; `blocks`: it
            may stay in few bits."""
            if not present:
                return None
            full = [f"{name}.{what}" for name, _ in names]
            if what == "weight" and blocks:
                shapes = [(rows, *tail) for _, rows in names]
                parts = [checkpoint.blocks(prefix + name, shape) for name, shape in zip(full, shapes, strict=True)]
                joined = _joined(parts)
                if joined is not None:
                    return arrays.for_linear(arrays.blocks(joined))
            whole = arrays.stack([read(name, rows, *tail) for name, (_, rows) in zip(full, names, strict=True)])
            self.stacked.append(([prefix + name for name in full], whole))
            return whole

        def floats(name: str, offset: float, *shape: int) -> Any:
            source = read(name, *shape)
            made = arrays.float_weight(source, offset)
            self.derived.append((made, source, offset))
            return made

        def norm(name: str, size: int) -> Any:
            if family.norm_offset:
                return floats(name + ".weight", family.norm_offset, size)
            return arrays.weight(read(name + ".weight", size))

        def dense(at: str, inner: int) -> _Mlp:
            gate_up = [(at + "gate_proj", inner), (at + "up_proj", inner)]
            gate_up = [(at + "gate_up_proj", 2 * inner)] if family.fused else gate_up
            down = [(at + "down_proj", hidden)]
            return _Mlp(
                stack(gate_up, "weight", True, hidden),
                stack(gate_up, "bias", mlp_bias),
                stack(down, "weight", True, inner),
                stack(down, "bias", mlp_bias),
                inner,
            )

        def mlp(i: int) -> tuple[_Mlp | ExpertBlock, _Mlp | None]:
            at = f"layers.{i}.mlp."
            if family.experts is None or not _has_experts(config, i):
                return dense(at, self.inner), None
            stacked = f"{prefix}{at}experts.gate_up_proj" in checkpoint
            experts = read_experts(family.experts, config, arrays, f"layers.{i}.", read, floats, stacked)
            shared = config.get("n_shared_experts", 0) * config.get("moe_intermediate_size", 0)
            return experts, dense(at + "shared_experts.", shared) if shared else None

        def table(name: str) -> Any:
            """The rows of the vocabulary."""
            kept = checkpoint.blocks(name, (self.vocab_size, hidden))
            if kept is not None:
                return arrays.blocks(kept)
            return arrays.weight(checkpoint.read(name, (self.vocab_size, hidden)))

        self.embedding = table(embedding)
        self.layers = []
        for i in range(self.num_layers):
            at = f"layers.{i}.self_attn."
            norms = [None if name is None else norm(f"layers.{i}.{name}", hidden) for name in family.norms]
            qkv = [(at + "q_proj", q_size), (at + "k_proj", kv_size), (at + "v_proj", kv_size)]
            qkv = [(at + "qkv_proj", q_size + 2 * kv_size)] if family.fused else qkv
            out = [(at + "o_proj", hidden)]
            whole = family.qk_norm == "whole"
            name = ropes[i]
            rope = None if name is None else self.ropes[name]
            latent = None
            if sizes is not None:
                assert rope is not None
                latent, qkv = read_latent(arrays, config, sizes, at, rope, stack, norm), []
            experts, shared = mlp(i)
            self.layers.append(
                _Layer(
                    norms[0],
                    stack(qkv, "weight", bool(qkv), hidden),
                    stack(qkv, "bias", bool(qkv) and qkv_bias),
                    norm(at + "q_norm", q_size if whole else self.head_dim) if family.qk_norm else None,
                    norm(at + "k_norm", kv_size if whole else self.head_dim) if family.qk_norm else None,
                    floats(at + "sinks", 0.0, self.heads_q) if family.sinks else None,
                    stack(out, "weight", True, q_size if sizes is None else self.heads_q * sizes.value),
                    stack(out, "bias", out_bias),
                    norms[1],
                    norms[2],
                    experts,
                    norms[3],
                    windows[i],
                    rope,
                    latent,
                    shared,
                )
            )
        self.norm = norm("norm", hidden)
        if self.parallel is not None:
            self.lm_head = self.head(checkpoint, head, hidden)
            return
        tied = head == embedding
        rows = self.embedding if tied else table(head)
        if isinstance(rows, QuantizedWeight):
            self.lm_head = arrays.for_linear(rows)
            return
        self.lm_head = arrays.output_rows(rows)
        if self.lm_head is not rows:
            self.stacked.append(([head], self.lm_head))
            self.embedding = self.lm_head[: self.vocab_size] if tied else self.embedding

    def forward(self, batch: PagedBatch, pool: fk.KvPagePool) -> Any:
        self.same_batch(batch)
        arrays = self.arrays
        if isinstance(self.embedding, QuantizedWeight):
            residual = arrays.take_blocks(self.embedding, batch.tokens)
        else:
            residual = arrays.take(self.embedding, batch.tokens)
        if self.embedding_factor != 1.0:
            residual = arrays.scaled(residual, self.embedding_factor)
        if all(map(self._can_fuse, self.layers)) and self.fuses(batch, pool, *self._linear_weights(self.layers[0])):
            return self._logits(self._fused_layers(residual, batch, pool))
        before = self.layers[0].input_norm
        x = residual if before is None else fk.rms_norm(residual, before, eps=self.eps, **arrays.op_options)
        to_latents = None if self.sizes is None else way(arrays, batch, pool.page_size)
        for i, layer in enumerate(self.layers):
            x = self._attention(x, layer, i, batch, pool, to_latents)
            x, residual = self._join(x, residual, layer.attention_norm, layer.mlp_norm)
            x = self._feed(x, layer)
            if i + 1 < self.num_layers:
                x, residual = self._join(x, residual, layer.result_norm, self.layers[i + 1].input_norm)
        # Only the rows whose logits are wanted go through the last norm and the (large) output layer.
        if batch.last_rows is not None:
            x, residual = arrays.take(x, batch.last_rows), arrays.take(residual, batch.last_rows)
        x, _ = self._join(x, residual, self.layers[-1].result_norm, self.norm)
        return self._logits(x)

    def _logits(self, x: Any) -> Any:
        arrays = self.arrays
        logits = self.whole(self._linear(x, self.lm_head))
        if self.logits_factor != 1.0:
            logits = arrays.scaled(logits, self.logits_factor)
        return logits if self.logits_softcap is None else arrays.softcapped(logits, self.logits_softcap)

    def _can_fuse(self, layer: _Layer) -> bool:
        """Whether a layer is a norm before attention, a norm before an MLP with SwiGLU, and plain sums behind them; its
        keys go to their pages as the linear gives them, or turned as whole heads.
        """
        if layer.q_norm is not None or (layer.rope is not None and layer.rope.rotary_dim != self.head_dim):
            return False
        plain = layer.attention_norm is None and layer.result_norm is None and self.residual_factor == 1.0
        normed = layer.input_norm is not None and layer.mlp_norm is not None and layer.latent is None
        if not (plain and normed and self.activation == "silu" and isinstance(layer.mlp, _Mlp)):
            return False
        weights = self._linear_weights(layer)
        return layer.shared is None and not any(isinstance(weight, QuantizedWeight) for weight in weights)

    def _linear_weights(self, layer: _Layer) -> tuple[Any, ...]:
        mlp = layer.mlp
        assert isinstance(mlp, _Mlp)
        return layer.qkv_weight, layer.out_weight, mlp.gate_up_weight, mlp.down_weight

    def _fused_layers(self, residual: Any, batch: PagedBatch, pool: fk.KvPagePool) -> Any:
        """All layers and the last norm, with five ops in a layer but attention: what a norm gives goes into its linear
        without a way through memory, and the residual leaves with the product that is added to it.
        """
        options: dict[str, Any] = {"constant_weights": True, **self.arrays.op_options}
        for i, layer in enumerate(self.layers):
            mlp = layer.mlp
            assert isinstance(mlp, _Mlp)
            x = self._append_and_attend(residual, layer, i, batch, pool, options)
            residual = fk.fused_linear(x, layer.out_weight, layer.out_bias, residual=residual, **options)
            x = fk.fused_linear(
                residual,
                mlp.gate_up_weight,
                mlp.gate_up_bias,
                layer.mlp_norm,
                eps=self.eps,
                activation="swiglu",
                **options,
            )
            residual = fk.fused_linear(x, mlp.down_weight, mlp.down_bias, residual=residual, **options)
        return fk.rms_norm(residual, self.norm, eps=self.eps, **self.arrays.op_options)

    def _append_and_attend(
        self, x: Any, layer: _Layer, i: int, batch: PagedBatch, pool: fk.KvPagePool, options: dict[str, Any]
    ) -> Any:
        """Attention of the rows of the residual stream, by one op for all that comes before it."""
        turned, scale = layer.rope, self.scale
        rope: KvAppendRope | None = None
        if turned is not None:
            rope = {"positions": batch.positions, "theta": turned.theta, "inv_freq": turned.given}
            scale *= turned.factor**2
        q = fk.qkv_append(
            x,
            layer.qkv_weight,
            *self.pages(pool, i),
            batch.slots,
            layer.qkv_bias,
            layer.input_norm,
            rope=rope,
            eps=self.eps,
            **options,
        )
        return self.attend(q, pool, i, batch, scale, layer.window, self.softcap, layer.sinks)

    def _linear(self, x: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        return self.arrays.linear(x, weight, bias, **options)

    def _join(self, x: Any, residual: Any, after: Any, before: Any) -> tuple[Any, Any]:
        """What comes next and the residual, of a result x, this rank's part of it: added up over the ranks, normed by
        `after`, added, and the sum normed by `before`.
        """
        options = self.arrays.op_options
        if self.parallel is not None:
            if after is None and before is not None and self.residual_factor == 1.0:
                joined = self.parallel.sum_norm(x, residual, before, self.eps)
                if joined is not None:
                    return joined
            x = self.parallel.sum(x)
        if after is not None:
            x = fk.rms_norm(x, after, eps=self.eps, **options)
        if self.residual_factor != 1.0:
            x = self.arrays.scaled(x, self.residual_factor)
        if before is None:
            residual = fk.add(x, residual, **options)
            return residual, residual
        x, residual = fk.rms_norm(x, before, residual=residual, eps=self.eps, **options)
        return x, residual

    def _attention(
        self, x: Any, layer: _Layer, i: int, batch: PagedBatch, pool: fk.KvPagePool, to_latents: Way | None
    ) -> Any:
        if layer.latent is not None:
            assert to_latents is not None
            pages = self.arrays.view(self.pages(pool, i)[0])
            if pool.head_dim != self.head_dim:  # rows in 8 bits
                pages = as_bytes(pages)
            x = layer.latent(x, batch, to_latents, pages, self.scale)
            return self._linear(x, layer.out_weight, layer.out_bias)
        x = self._attend_rows(self._linear(x, layer.qkv_weight, layer.qkv_bias), layer, i, batch, pool)
        return self._linear(x, layer.out_weight, layer.out_bias)

    def _attend_rows(self, qkv: Any, layer: _Layer, i: int, batch: PagedBatch, pool: fk.KvPagePool) -> Any:
        """Attention of the rows of Q, K and V as the linear gives them, which this writes to."""
        options = self.arrays.op_options
        heads_q, heads_kv, head_dim = self.heads_q, self.heads_kv, self.head_dim
        if self.family.qk_norm == "whole":
            for rows, weight in (
                (qkv[:, : heads_q * head_dim], layer.q_norm),
                (qkv[:, heads_q * head_dim : (heads_q + heads_kv) * head_dim], layer.k_norm),
            ):
                fk.rms_norm(rows, weight, eps=self.eps, out=rows, **options)
        qkv = qkv.reshape(qkv.shape[0], heads_q + 2 * heads_kv, head_dim)
        q, k, v = qkv[:, :heads_q], qkv[:, heads_q : heads_q + heads_kv], qkv[:, heads_q + heads_kv :]
        scale, turned, quantized = self.scale, layer.rope, self.kv_options(pool, i)
        # kv_append can norm heads before it turns them. It needs a rotation, and pages of the heads' dtype.
        norms = self.family.qk_norm == "head"
        if norms and (turned is None or quantized):
            fk.rms_norm(q, layer.q_norm, eps=self.eps, out=q, **options)
            fk.rms_norm(k, layer.k_norm, eps=self.eps, out=k, **options)
            norms = False
        k_pages, v_pages = self.pages(pool, i)
        if turned is None:
            fk.kv_append(k, v, k_pages, v_pages, batch.slots, **quantized, **options)
        else:
            # Rotates k on its way into the pages and q in place.
            rope: KvAppendRopeWithQ = {
                "positions": batch.positions,
                "q": q,
                "q_out": q,
                "theta": turned.theta,
                "rotary_dim": turned.rotary_dim,
                "inv_freq": turned.given,
            }
            if norms:
                rope |= {"q_norm": layer.q_norm, "k_norm": layer.k_norm, "norm_eps": self.eps}
            fk.kv_append(k, v, k_pages, v_pages, batch.slots, rope=rope, **quantized, **options)
            # A factor of q and k each counts twice in their product.
            if turned.rotary_dim == head_dim:
                scale *= turned.factor**2
            elif turned.factor != 1.0:
                self.arrays.scale_in_place(q[..., : turned.rotary_dim], turned.factor**2)
        return self.attend(q, pool, i, batch, scale, layer.window, self.softcap, layer.sinks)

    def _feed(self, x: Any, layer: _Layer) -> Any:
        """What stands behind attention: an MLP, or experts and perhaps an MLP beside them."""
        if not isinstance(layer.mlp, ExpertBlock):
            return self._mlp(x, layer.mlp)
        if layer.shared is None:
            return layer.mlp(x)
        return fk.add(layer.mlp(x), self._mlp(x, layer.shared), **self.arrays.op_options)

    def _mlp(self, x: Any, mlp: _Mlp) -> Any:
        options, inner = self.arrays.op_options, mlp.inner
        if self.activation == "silu":
            gate_up = self._linear(x, mlp.gate_up_weight, mlp.gate_up_bias)
            x = fk.swiglu(gate_up[:, :inner], gate_up[:, inner:], **options)
        else:
            gate = self._linear(x, mlp.gate_up_weight[:inner], activation=self.activation)
            x = self.arrays.multiplied(gate, self._linear(x, mlp.gate_up_weight[inner:]))
        return self._linear(x, mlp.down_weight, mlp.down_bias)


def _joined(parts: list[QuantizedWeight | None]) -> QuantizedWeight | None:
    """Matrices in blocks one below the other; None where they have no one format, or blocks of many rows end within."""
    kept = [part for part in parts if part is not None]
    if len(kept) != len(parts) or len({part.format for part in kept}) > 1:
        return None
    fp8 = kept[0].format == FP8
    if fp8 and any(part.shape[0] % FP8_BLOCK for part in kept[:-1]):
        return None
    scales = np.concatenate([part.scales for part in kept]) if fp8 else None
    return QuantizedWeight(np.concatenate([part.weight for part in kept]), scales, None, kept[0].format)


def _has_experts(config: dict[str, Any], layer: int) -> bool:
    """Whether a layer has experts; in Qwen3-MoE some may have an MLP, in DeepSeek the first ones."""
    if layer < config.get("first_k_dense_replace", 0):
        return False
    dense = config.get("mlp_only_layers") or ()
    return layer not in dense and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
