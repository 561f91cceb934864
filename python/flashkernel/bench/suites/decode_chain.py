"""A whole layer of a model for one new token of each sequence: its ops with their real dependencies, in one graph.

What an op gains where it follows itself it may lose where it waits for another: steps are made of this. Each call is
the next of several equal layers, so that weights and caches come from memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import flashkernel as fk
from flashkernel.generate.model import FUSED_NUMBERS, FUSED_ROWS

from .. import baselines
from ..case import ITEM_BYTES, OURS, TOLERANCE, VARIANT, Case, Inputs, Provider, Settings, Work, each

__all__ = ["decode_chain"]

PAGE = 16
THETA = 10000.0


@dataclass(frozen=True)
class Layer:
    model: str
    hidden: int
    inner: int
    heads: int
    heads_kv: int
    dim: int
    llama: bool = True  # RMSNorm, RoPE, SwiGLU; else LayerNorm, biases and GELU

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.heads_kv) * self.dim

    @property
    def up(self) -> int:
        return self.inner * (2 if self.llama else 1)

    @property
    def weights(self) -> int:
        """Numbers."""
        return self.hidden * (self.qkv + self.heads * self.dim + self.up + self.inner)


LAYERS = (
    Layer("llama-1b", 2048, 8192, 32, 8, 64),
    Layer("llama-8b", 4096, 14336, 32, 8, 128),
    Layer("gpt2", 768, 3072, 12, 12, 64, llama=False),
)
SMALL = (Layer("llama", 64, 96, 4, 2, 16), Layer("gpt2", 48, 96, 3, 3, 16, llama=False))


def _tensors(s: Settings, layer: Layer, batch: int, cache: int, dtype: str) -> SimpleNamespace:
    """The tensors of one layer. The new token is the cache's last."""
    inputs, hidden = Inputs(s.device, dtype), layer.hidden

    def matrix(out: int, into: int) -> Any:
        return inputs.randn(out, into, scale=1 / math.sqrt(into))

    t = SimpleNamespace(x=inputs.randn(batch, hidden), residual=inputs.randn(batch, hidden))
    t.sum = t.x + t.residual
    t.norms = [inputs.randn(hidden), inputs.randn(hidden)]
    t.qkv, t.o = matrix(layer.qkv, hidden), matrix(hidden, layer.heads * layer.dim)
    t.up, t.down = matrix(layer.up, hidden), matrix(hidden, layer.inner)
    t.biases = [inputs.randn(n) for n in (hidden, hidden, layer.qkv, hidden, layer.up, hidden)]
    t.k, t.v = (inputs.randn(batch, layer.heads_kv, cache, layer.dim) for _ in range(2))
    t.k_pages, t.v_pages, t.table = inputs.paged(t.k, t.v, PAGE)
    t.lengths, t.positions = inputs.index([cache] * batch), inputs.index([cache - 1] * batch)
    t.slots = (t.table[:, -1] * PAGE + PAGE - 1).int()
    t.last = t.positions[:1].long()
    cos, sin = baselines.rope_tables(s, dtype, cache, layer.dim, THETA)
    t.cos, t.sin = cos[-1], sin[-1]
    return t


def _ours(layer: Layer, t: Any) -> Any:
    """(the layer's output, the residual stream before it)"""
    batch, dim, parts = t.x.shape[0], layer.dim, (layer.heads * layer.dim, layer.heads_kv * layer.dim)
    bias = t.biases if not layer.llama else [None] * 6
    if layer.llama:
        h, residual = fk.rms_norm(t.x, t.norms[0], residual=t.residual)
    else:
        h, residual = fk.layer_norm(t.x, t.norms[0], bias[0], residual=t.residual)
    q, k, v = (x.view(batch, -1, dim) for x in fk.linear(h, t.qkv, bias[2]).split([parts[0], parts[1], parts[1]], -1))
    rope: Any = {"positions": t.positions, "theta": THETA, "q": q} if layer.llama else None
    rotated: Any = fk.kv_append(k, v, t.k_pages, t.v_pages, t.slots, rope=rope)
    q = rotated if layer.llama else q
    out = fk.attention_paged(q.unsqueeze(2), t.k_pages, t.v_pages, t.table, t.lengths, causal=True)
    h = fk.linear(out.reshape(batch, -1), t.o, bias[3])
    if not layer.llama:
        h, residual = fk.layer_norm(h, t.norms[1], bias[1], residual=residual)
        return fk.linear(fk.linear(h, t.up, bias[4], activation="gelu_tanh"), t.down, bias[5]), residual
    h, residual = fk.rms_norm(h, t.norms[1], residual=residual)
    gate, up = fk.linear(h, t.up).split([layer.inner, layer.inner], -1)
    return fk.linear(fk.swiglu(gate, up), t.down), residual


def _fused(layer: Layer, t: Any) -> Any:
    """The same by fused ops, as the engine's steps of few rows are made. What `_ours` adds in its first norm is one
    tensor here: the ops before have added it.
    """
    batch = t.x.shape[0]
    bias = t.biases if not layer.llama else [None] * 6
    kind = "rms" if layer.llama else "layer"
    constant: dict[str, Any] = {"constant_weights": True}
    norm: dict[str, Any] = {"norm": kind, "eps": 1e-6 if layer.llama else 1e-5, **constant}
    rope: Any = {"positions": t.positions, "theta": THETA} if layer.llama else None
    q = fk.qkv_append(t.sum, t.qkv, t.k_pages, t.v_pages, t.slots, bias[2], t.norms[0], bias[0], rope=rope, **norm)
    out = fk.attention_paged(q.unsqueeze(2), t.k_pages, t.v_pages, t.table, t.lengths, causal=True)
    residual = fk.fused_linear(out.reshape(batch, -1), t.o, bias[3], residual=t.sum, **constant)
    h = fk.fused_linear(
        residual, t.up, bias[4], t.norms[1], bias[1], activation="swiglu" if layer.llama else "gelu_tanh", **norm
    )
    return fk.fused_linear(h, t.down, bias[5], **constant), residual


def _eager(layer: Layer, t: Any) -> Any:
    """The same by torch, over a cache without pages."""
    functional = baselines.require_torch().nn.functional
    batch, dim, parts = t.x.shape[0], layer.dim, (layer.heads * layer.dim, layer.heads_kv * layer.dim)
    bias = t.biases if not layer.llama else [None] * 6
    norm = baselines.rms_norm_residual if layer.llama else baselines.layer_norm_residual
    more = ([], []) if layer.llama else ([bias[0]], [bias[1]])
    h, residual = norm(t.x, t.residual, t.norms[0], *more[0])
    split = functional.linear(h, t.qkv, bias[2]).split([parts[0], parts[1], parts[1]], -1)
    q, k, v = (x.view(batch, -1, 1, dim) for x in split)
    if layer.llama:
        q, k = baselines.rope(q, k, t.cos, t.sin)
    t.k.index_copy_(2, t.last, k)
    t.v.index_copy_(2, t.last, v)
    out = baselines.sdpa(q, t.k, t.v)
    h, residual = norm(functional.linear(out.reshape(batch, -1), t.o, bias[3]), residual, t.norms[1], *more[1])
    up = functional.linear(h, t.up, bias[4])
    if layer.llama:
        gate, up = up.split([layer.inner, layer.inner], -1)
        return functional.linear(baselines.swiglu(gate, up), t.down), residual
    return functional.linear(functional.gelu(up, approximate="tanh"), t.down, bias[5]), residual


def _work(s: Settings, layer: Layer, batch: int, cache: int, dtype: str) -> Work:
    size = float(ITEM_BYTES[dtype])
    read = size * (layer.weights + 2 * batch * layer.heads_kv * cache * layer.dim)
    sets = Inputs(s.device, dtype).sets(read, from_memory=s.cuda)
    layers = [_tensors(s, layer, batch, cache, dtype) for _ in range(sets)]
    ops = each(partial(_ours, layer), [(t,) for t in layers])
    if s.cuda and batch <= FUSED_ROWS and layer.hidden * max(layer.qkv, layer.up) <= FUSED_NUMBERS:
        fused = each(partial(_fused, layer), [(t,) for t in layers])
        providers = [Provider("flashkernel", fused, OURS), Provider("flashkernel, op by op", ops, VARIANT)]
    else:
        providers = [Provider("flashkernel", ops, OURS)]
    providers += baselines.stock(s, partial(_eager, layer), [(t,) for t in layers])
    # Five ops behind one another, each of which rounds.
    return Work(providers, 4 * TOLERANCE[dtype], read=read, written=size * batch * layer.hidden)


def decode_chain(s: Settings) -> Iterator[Case]:
    batches = s.pick(quick=(1, 3), cpu=(1, 8), cuda=(1, 2, 4, 8, 16, 32))
    cache = s.pick(quick=64, cpu=256, cuda=1024)
    for layer in SMALL if s.quick else LAYERS:
        for dtype in s.dtypes_of(("bfloat16" if layer.llama else "float16",) if s.cuda else ("float32",)):
            for batch in batches:
                name = f"layer of {layer.model}, batch {batch}, cache {cache}"
                named = {"model": layer.model, "batch": batch, "cache": cache}
                build = partial(_work, s, layer, batch, cache, dtype)
                yield Case("decode_chain", name, dtype, s.device, build, named)
