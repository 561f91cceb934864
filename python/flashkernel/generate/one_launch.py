"""A decode step as one op (`flashkernel.decode_step`): which models it computes, and how it takes their weights.

Made by decode.py for `Engine(one_launch=True)`, and where an engine is not told on the CPU. The matrices of all layers
are stacked, kind by kind, and the model's own become views of the stacks, so that prefill and larger batches read the
same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import flashkernel as fk

from ..quantized import QuantizedWeight
from .decoder_model import DecoderModel, _Layer, _Mlp
from .errors import UnsupportedModelError
from .model import Model, PagedBatch

__all__ = ["OneLaunch", "matrices", "pays"]

MOST_ROWS = 8  # of a step on a GPU; more take the ops one by one
# Of all matrices, on the CPU: what lies between the ops of a step takes milliseconds, which are nothing beside the time
# that larger ones take, and these would be copied for it.
MOST_BYTES = 4 << 30


def _why_not_layer(layer: _Layer, model: DecoderModel) -> str | None:
    if layer.latent is not None or layer.shared is not None or not isinstance(layer.mlp, _Mlp):
        return "latent attention or experts"
    biases = layer.qkv_bias, layer.out_bias, layer.mlp.gate_up_bias, layer.mlp.down_bias
    if any(bias is not None for bias in biases):
        return "biases"
    if layer.q_norm is not None or layer.attention_norm is not None or layer.result_norm is not None:
        return "norms of q, k or results"
    if layer.input_norm is None or layer.mlp_norm is None:
        return "layers without a norm"
    if layer.window is not None or layer.sinks is not None:
        return "windows or sinks"
    if layer.rope is None or layer.rope.rotary_dim != model.head_dim or layer.rope is not model.layers[0].rope:
        return "heads that RoPE turns in part, or not in all layers alike"
    if isinstance(layer.mlp.gate_up_weight, QuantizedWeight) or isinstance(layer.qkv_weight, QuantizedWeight):
        return "quantised weights"
    return None


def _why_not(model: Model) -> str | None:
    """What a model has that the op does not compute; None: nothing."""
    if not isinstance(model, DecoderModel):
        return "another architecture than Llama's"
    if model.parallel is not None:
        return "several ranks"
    factors = model.embedding_factor, model.residual_factor, model.logits_factor
    if any(factor != 1.0 for factor in factors) or model.softcap or model.logits_softcap is not None:
        return "factors or caps of its own"
    if model.activation != "silu" or model.family.norm_offset or model.head_dim % 2:
        return "another activation or norm"
    if isinstance(model.embedding, QuantizedWeight) or isinstance(model.lm_head, QuantizedWeight):
        return "quantised weights"
    return next((why for why in (_why_not_layer(layer, model) for layer in model.layers) if why), None)


def pays(model: Model, pool: fk.KvPagePool) -> bool:
    """Whether an engine that is not told takes the op: on the CPU, where it computes the model and is faster."""
    if model.arrays.asynchronous or pool.dtype != model.arrays.dtype or _why_not(model) is not None:
        return False
    return sum(int(matrix.nbytes) for layer in matrices(model) for matrix in layer) <= MOST_BYTES


def matrices(model: Model) -> list[Any]:
    """The arrays that `OneLaunch` replaces by views: CUDA graphs made before name their memory, but do not keep it."""
    if not isinstance(model, DecoderModel):
        return []
    mlps = [layer.mlp for layer in model.layers if isinstance(layer.mlp, _Mlp)]
    return [
        *((layer.qkv_weight, layer.out_weight) for layer in model.layers),
        *((mlp.gate_up_weight, mlp.down_weight) for mlp in mlps),
    ]


class OneLaunch:
    """The steps of a model over a pool.

    Raises UnsupportedModelError for a model, or a pool of other elements, that the op does not compute.
    """

    def __init__(self, model: Model, pool: fk.KvPagePool):
        why = _why_not(model)
        if why is None and pool.dtype != model.arrays.dtype:
            why = f"a cache of {pool.dtype}"
        if why is not None:
            raise UnsupportedModelError(
                f"generate: one_launch=True with {why}; a plain decoder of Llama's kind is needed"
            )
        assert isinstance(model, DecoderModel)
        self.model, arrays, layers = model, model.arrays, model.layers
        rope = layers[0].rope
        assert rope is not None
        if rope.inv_freq is None:  # prompts are turned by the same numbers from here on
            rope.inv_freq = arrays.index(rope.frequencies().astype(np.float32), "float32")
            rope.rounded = True
        mlps: Sequence[Any] = [layer.mlp for layer in layers]
        norms = [norm for layer in layers for norm in (layer.input_norm, layer.mlp_norm)]
        if model.piled is None:  # else another cache's steps have piled them up
            model.piled = (
                model.embedding,
                self._joined([*norms, model.norm]),
                self._pile(layers, "qkv_weight"),
                self._pile(layers, "out_weight"),
                self._pile(mlps, "gate_up_weight"),
                self._pile(mlps, "down_weight"),
                model.lm_head,
                rope.inv_freq,
            )
        self._weights = model.piled
        self._pages = pool.k_layers(**arrays.pool_views), pool.v_layers(**arrays.pool_views)
        self._scale = model.scale * rope.factor**2  # of q and k each

    def _joined(self, parts: Sequence[Any]) -> Any:
        """Arrays of one shape as [parts, ...], in new memory."""
        return self.model.arrays.joined([part[None] for part in parts], 0)

    def _pile(self, owners: Sequence[Any], name: str) -> Any:
        """The matrices of all layers as one array, of which they are views from here on: one by one, so that the memory
        of each is free before the next one is copied.
        """
        stacked = self.model.stacked
        places = {id(matrix): place for place, (_, matrix) in enumerate(stacked)}
        first = getattr(owners[0], name)
        whole = self.model.arrays.space((len(owners), *first.shape))
        del first
        for i, owner in enumerate(owners):
            matrix = getattr(owner, name)
            whole[i] = matrix
            place = places.get(id(matrix))
            if place is not None:
                stacked[place] = stacked[place][0], whole[i]
            setattr(owner, name, whole[i])
        return whole

    def takes(self, rows: int) -> bool:
        """Whether it computes steps of so many rows. Not where the model's forward pass has been replaced."""
        replaced = getattr(self.model.forward, "__func__", None) is not DecoderModel.forward
        return not replaced and (rows <= MOST_ROWS or not self.model.arrays.asynchronous)

    def forward(self, batch: PagedBatch) -> Any:
        """Logits [rows, vocab] of one new token for each row; keys and values are written."""
        model = self.model
        call: Any = fk.decode_step  # the weights are a tuple of many kinds
        logits = call(
            batch.tokens,
            batch.positions,
            batch.slots,
            batch.block_table,
            batch.seq_lens,
            *self._weights,
            *self._pages,
            eps=model.eps,
            scale=self._scale,
            **model.arrays.op_options,
        )
        return logits[:, : model.vocab_size]
