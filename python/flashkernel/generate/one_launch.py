"""A decode step as one op (`flashkernel.decode_step`): which models it computes, and how it takes their weights.

Used by decode.py where that pays, and for `Engine(one_launch=True)`. The matrices of all layers are stacked, kind by
kind, and the model's own become views of the stacks, so that prefill and larger batches read the same memory.
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

__all__ = ["OneLaunch", "matrices", "pays", "stack_layers"]

MOST_ROWS = 8  # of a step on a GPU; more take the ops one by one
# Tokens that all sequences of a step on a GPU may have together: of one kv head each multiprocessor attends to its part
# of the keys alone, so that long caches are read faster by the ops one by one (lab/notebooks/decode_step.md).
MOST_TOKENS = 8192
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


def _why_not_gpu(model: DecoderModel) -> str | None:
    """What the kernel of GPUs (src/cuda/decode_step/sm90a) does not take; None: nothing, or the model is on the CPU."""
    if not model.arrays.asynchronous:
        return None
    import torch

    if torch.cuda.get_device_capability(model.arrays.device) != (9, 0):
        return "a GPU whose compute capability is not 9.0"
    if model.arrays.dtype not in ("float16", "bfloat16"):
        return "a model in float32"
    if model.head_dim not in (64, 128):
        return "heads of other than 64 or 128 elements"
    if model.embedding.shape[1] % 32 or model.inner % 32:
        return "a hidden size, or one of the MLP, that is no multiple of 32"
    return None


def pays(model: Model, cache_dtype: str) -> bool:
    """Whether an engine that is not told takes the op: where it computes the model, and is faster."""
    if cache_dtype != model.arrays.dtype or _why_not(model) is not None:
        return False
    assert isinstance(model, DecoderModel)
    if _why_not_gpu(model) is not None:
        return False
    if model.piled is not None:
        return True
    kinds = [[int(matrix.nbytes) for matrix in kind] for kind in zip(*_by_layer(model), strict=True)]
    if not model.arrays.asynchronous:
        return sum(map(sum, kinds)) <= MOST_BYTES
    import torch

    free, _ = torch.cuda.mem_get_info(model.arrays.device)
    return free >= 1.1 * max(map(sum, kinds))  # a kind's stack is there before its matrices are gone


def _by_layer(model: DecoderModel) -> list[tuple[Any, ...]]:
    return [
        (layer.qkv_weight, layer.out_weight, layer.mlp.gate_up_weight, layer.mlp.down_weight)
        for layer in model.layers
        if isinstance(layer.mlp, _Mlp)
    ]


def stack_layers(model: Model, before: Model | None = None) -> None:
    """Makes `model.piled`, if there is none: the weights as the op takes them, of which the model's own are views then.

    before: a model whose stacks are taken where this one's matrices lie in them already.

    Raises UnsupportedModelError for a model that the op does not compute.
    """
    why = _why_not(model)
    if why is None:
        assert isinstance(model, DecoderModel)
        why = _why_not_gpu(model)
    if why is not None:
        raise UnsupportedModelError(f"generate: one_launch=True with {why}; a plain decoder of Llama's kind is needed")
    assert isinstance(model, DecoderModel)
    if model.piled is not None:
        return
    arrays, layers = model.arrays, model.layers
    rope = layers[0].rope
    assert rope is not None
    if rope.inv_freq is None:  # prompts are turned by the same numbers from here on
        rope.inv_freq = arrays.index(rope.frequencies().astype(np.float32), "float32")
        rope.rounded = True
    mlps: Sequence[Any] = [layer.mlp for layer in layers]
    norms = [*(norm for layer in layers for norm in (layer.input_norm, layer.mlp_norm)), model.norm]
    joined = arrays.joined([norm[None] for norm in norms], 0)  # in new memory
    model.derived += [(joined[i], norm, 0.0) for i, norm in enumerate(norms)]
    old = before.piled if isinstance(before, DecoderModel) and before.piled is not None else (None,) * 8
    model.piled = (
        model.embedding,
        joined,
        _stack(model, layers, "qkv_weight", old[2]),
        _stack(model, layers, "out_weight", old[3]),
        _stack(model, mlps, "gate_up_weight", old[4]),
        _stack(model, mlps, "down_weight", old[5]),
        model.lm_head,
        rope.inv_freq,
    )


def _stack(model: DecoderModel, owners: Sequence[Any], name: str, before: Any) -> Any:
    """The matrices of all layers as one array, of which they are views from here on: one by one, so that the memory of
    each is free before the next one is copied. `before`: taken if the matrices lie in it.
    """
    places = {id(matrix): place for place, (_, matrix) in enumerate(model.stacked)}
    first = getattr(owners[0], name)
    shape = (len(owners), *first.shape)
    del first
    there = before is not None and tuple(before.shape) == shape
    there = there and all(getattr(owner, name).data_ptr() == before[i].data_ptr() for i, owner in enumerate(owners))
    whole = before if there else model.arrays.space(shape)
    for i, owner in enumerate(owners):
        matrix = getattr(owner, name)
        if not there:
            whole[i] = matrix
        place = places.get(id(matrix))
        if place is not None:
            model.stacked[place] = model.stacked[place][0], whole[i]
        setattr(owner, name, whole[i])
    return whole


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
        if pool.dtype != model.arrays.dtype and _why_not(model) is None:
            raise UnsupportedModelError(
                f"generate: one_launch=True with a cache of {pool.dtype}; one of the model's dtype is needed"
            )
        stack_layers(model)
        assert isinstance(model, DecoderModel) and model.piled is not None
        self.model, arrays, rope = model, model.arrays, model.layers[0].rope
        assert rope is not None
        self._weights = model.piled
        self._pages = pool.k_layers(**arrays.pool_views), pool.v_layers(**arrays.pool_views)
        self._scale = model.scale * rope.factor**2  # of q and k each

    def takes(self, rows: int, tokens: int = 0) -> bool:
        """Whether it computes steps of so many rows, whose sequences have so many tokens together. Not where the
        model's forward pass has been replaced.
        """
        if getattr(self.model.forward, "__func__", None) is not DecoderModel.forward:
            return False
        return not self.model.arrays.asynchronous or (rows <= MOST_ROWS and tokens <= MOST_TOKENS)

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
