"""A row of attention: what it is, how its tensors are made, and our call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flashkernel as fk

from .. import baselines
from ..case import CHECK, ITEM_BYTES, OURS, PEER, TOLERANCE, Inputs, Provider, Settings, Work, nbytes
from . import attention_peers, formula

__all__ = ["Attention", "Tensors"]

OPS: Any = fk  # options are put together here, which the stubs' overloads cannot follow
MOST_SCORES = 2**28  # that the formula may hold on a GPU, in float32, a few times
MOST_SCORES_BACKWARD = 2**26


@dataclass(frozen=True)
class Attention:
    """queries and keys are lengths of each sequence; where `lengths` has those of every sequence, nothing else has."""

    model: str
    batch: int
    heads: int
    heads_kv: int
    queries: int
    keys: int
    dim: int
    causal: bool = False
    page: int = 0
    window: tuple[int, int] = (-1, -1)  # tokens to the left and right; -1: all
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    bias: bool = False  # [1, heads, queries, keys]
    blocks: float = 0.0  # the part of the blocks of 128 by 128 that a block mask shows; 0: there is no mask
    lengths: tuple[int, ...] = ()
    lse: bool = False
    backward: bool = False
    deterministic: bool = False  # of backward: the same bits on every run, ours and the peers'
    kv8: bool = False  # pages of float8_e4m3fn; peers read the same numbers in `dtype`
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        heads = f"{self.heads}/{self.heads_kv}" if self.heads != self.heads_kv else f"{self.heads}"
        if self.lengths:
            size = f"{len(self.lengths)} of {min(self.lengths)} to {max(self.lengths)}"
        elif self.queries == self.keys:
            size = f"{self.batch} x {self.keys}"
        else:
            size = f"{self.batch} x ({self.queries} over {self.keys})"
        options = [
            "causal" if self.causal else "full",
            f"pages of {self.page}" if self.page else "",
            "fp8 pages" if self.kv8 else "",
            f"window {self.window[0]},{self.window[1]}" if self.window != (-1, -1) else "",
            f"softcap {self.softcap:g}" if self.softcap else "",
            *(word for word in ("sinks", "alibi", "bias") if getattr(self, word)),
            f"{self.blocks:.0%} of blocks" if self.blocks else "",
            "LSE" if self.lse else "",
            ("deterministic" if self.deterministic else "any order") if self.backward else "",
        ]
        what = "backward " if self.backward else ""
        return f"{self.model}: {what}{size}, heads {heads}, d {self.dim}, " + ", ".join(filter(None, options))

    @property
    def shape(self) -> dict[str, Any]:
        named: dict[str, Any] = {
            "batch": len(self.lengths) or self.batch, "heads": self.heads, "heads_kv": self.heads_kv,
            "queries": self.queries, "keys": self.keys, "head_dim": self.dim, "page": self.page,
        }  # fmt: skip
        if not self.lengths and self.window == (-1, -1):  # as the suites name it
            named |= {"seq": self.keys, "causal": self.causal} if self.queries == self.keys else {}
            named |= {"cache": self.keys} if self.queries == 1 else {}
        return named

    def shrunk(self) -> Attention:
        """The same kind of call, small enough for a CPU."""
        heads_kv = min(self.heads_kv, 2)
        page = min(self.page, 16)
        keys = min(self.keys, 96) // (page or 1) * (page or 1) or page
        queries = keys if self.queries == self.keys else min(self.queries, 24, keys)
        return replace(
            self,
            batch=min(self.batch, 2),
            heads=heads_kv * min(self.heads // self.heads_kv, 4),
            heads_kv=heads_kv,
            queries=queries,
            keys=keys,
            page=page,
            window=(min(self.window[0], 16), min(self.window[1], 16)),
            lengths=tuple(min(length, 20 + i) for i, length in enumerate(self.lengths[:3])),
        )

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that it sees, in one head."""
        if self.lengths:
            return sum(length * (length + 1) / 2 if self.causal else float(length * length) for length in self.lengths)
        left, right = self.window
        if left < 0 and right < 0 and not self.causal:
            return self.batch * self.queries * self.keys * (self.blocks or 1.0)
        after = 0 if self.causal else self.keys if right < 0 else right
        before = self.keys if left < 0 else left
        offset = self.keys - self.queries
        seen = sum(
            max(0, min(self.keys, i + offset + after + 1) - max(0, i + offset - before)) for i in range(self.queries)
        )
        return float(self.batch * seen)

    def work(self, s: Settings) -> Work:
        tensors = Tensors.make(s, self)
        scores = self.batch * self.heads * self.queries * self.keys
        providers = list(_formula(s, self, tensors, scores))
        ours = _backward(self, tensors) if self.backward else _forward(self, tensors)
        providers.append(Provider("flashkernel", ours, OURS))
        providers += attention_peers.providers(s, self, tensors)
        first = tensors.sets[0]
        flop = 4.0 * self.heads * self.pairs * self.dim * (2.5 if self.backward else 1.0)
        kv = nbytes(*(tensors.pools[0] if self.page else first[1:]))
        if max(self.window) >= 0 and self.queries < self.keys:  # of the keys only those in sight must be read
            kv *= min(1.0, (max(self.window[0], 0) + self.queries) / self.keys)
        read = nbytes(first[0]) + kv + (nbytes(tensors.bias[0]) if tensors.bias else 0.0)
        times = (2.0, 1.0) if self.backward else (1.0, 1.0)
        written = nbytes(*first) if self.backward else nbytes(first[0])
        tolerance = TOLERANCE[self.dtype] * (4 if self.backward else 1)
        return Work(providers, tolerance, flop=flop, read=times[0] * read, written=times[1] * written)


@dataclass
class Tensors:
    """The tensors of one row: equal sets, so many that no call finds its own in a cache."""

    sets: list[tuple[Any, Any, Any]]  # q, k, v: [batch, heads, seq, dim] views of [batch, seq, heads, dim]; or packed
    pools: list[tuple[Any, Any]]  # pages of k and v
    table: Any = None
    seq_lens: Any = None
    cu_seqlens: Any = None
    bias: list[Any] | None = None
    slopes: Any = None
    sinks: Any = None
    blocks: Any = None  # bool [1, heads, blocks of queries, blocks of keys]
    grad: Any = None

    @staticmethod
    def make(s: Settings, row: Attention) -> Tensors:
        torch = baselines.require_torch()
        inputs = Inputs(s.device, row.dtype)
        if row.lengths:
            total = sum(row.lengths)
            q = inputs.randn(total, row.heads, row.dim)
            k, v = (inputs.randn(total, row.heads_kv, row.dim) for _ in range(2))
        else:
            q = inputs.heads(row.batch, row.heads, row.queries, row.dim)
            k, v = (inputs.heads(row.batch, row.heads_kv, row.keys, row.dim) for _ in range(2))
        if row.kv8:  # numbers that both types hold
            k, v = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (k, v))
        size = nbytes(q, k, v) + (row.heads * row.queries * row.keys * ITEM_BYTES[row.dtype] if row.bias else 0.0)
        sets = [(q, k, v)]
        sets += [(q.clone(), k.clone(), v.clone()) for _ in range(inputs.sets(size, from_memory=s.cuda) - 1)]
        tensors = Tensors(sets, [])
        if row.page:
            k_pages, v_pages, tensors.table = inputs.paged(k, v, row.page)
            tensors.pools = [(k_pages, v_pages), *((k_pages.clone(), v_pages.clone()) for _ in sets[1:])]
            tensors.seq_lens = inputs.index([row.keys] * row.batch)
        if row.lengths:
            ends = torch.tensor([0, *row.lengths]).cumsum(0)
            tensors.cu_seqlens = inputs.index(ends.tolist())
        if row.bias:
            bias = inputs.randn(1, row.heads, row.queries, row.keys)
            tensors.bias = [bias, *(bias.clone() for _ in sets[1:])]
        if row.alibi:
            steps = torch.arange(1, row.heads + 1, device=s.device, dtype=torch.float32)
            tensors.slopes = 2.0 ** (-8.0 * steps / row.heads)
        if row.sinks:
            tensors.sinks = torch.randn(row.heads, device=s.device)
        if row.blocks:
            shape = (1, row.heads, -(-row.queries // 128), -(-row.keys // 128))
            tensors.blocks = torch.rand(shape, device=s.device) < row.blocks
            tensors.blocks |= torch.eye(*shape[2:], dtype=torch.bool, device=s.device)  # no query sees nothing
        if row.backward:
            tensors.grad = inputs.randn(*q.shape) if row.lengths else inputs.heads(*q.shape)
        return tensors


def _options(row: Attention, tensors: Tensors) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": row.causal}
    if row.window != (-1, -1):
        options["window"] = row.window
    if row.softcap:
        options["softcap"] = row.softcap
    if row.alibi:
        options["alibi_slopes"] = tensors.slopes
    if row.sinks:
        options["sinks"] = tensors.sinks
    if row.blocks:
        options["block_mask"] = tensors.blocks
    return options


def _forward(row: Attention, tensors: Tensors) -> list[Callable[[], Any]]:
    options = _options(row, tensors) | ({"return_lse": True} if row.lse else {})
    if row.page:
        pools = tensors.pools
        if row.kv8:
            torch = baselines.require_torch()
            ones = torch.ones(row.heads_kv, device=tensors.sets[0][0].device)
            pools = [tuple(x.to(torch.float8_e4m3fn) for x in pool) for pool in pools]
            options["kv_scales"] = (ones, ones)
        return [
            partial(OPS.attention_paged, q, *pool, tensors.table, tensors.seq_lens, **options)
            for (q, _, _), pool in zip(tensors.sets, pools, strict=True)
        ]
    if row.lengths:
        bounds = (tensors.cu_seqlens, tensors.cu_seqlens, max(row.lengths), max(row.lengths))
        return [partial(OPS.attention_varlen, *qkv, *bounds, **options) for qkv in tensors.sets]
    if tensors.bias is not None:
        return [
            partial(OPS.attention, *qkv, bias=bias, **options)
            for qkv, bias in zip(tensors.sets, tensors.bias, strict=True)
        ]
    return [partial(OPS.attention, *qkv, **options) for qkv in tensors.sets]


def _backward(row: Attention, tensors: Tensors) -> list[Callable[[], Any]]:
    options = _options(row, tensors)
    last: dict[str, Any] = {"deterministic": row.deterministic}
    calls: list[Callable[[], Any]] = []
    for i, qkv in enumerate(tensors.sets):
        if row.lengths:
            bounds = (tensors.cu_seqlens, tensors.cu_seqlens, max(row.lengths), max(row.lengths))
            out, lse = OPS.attention_varlen(*qkv, *bounds, return_lse=True, **options)
            call = partial(OPS.attention_varlen_backward, tensors.grad, *qkv, out, lse, *bounds, **options, **last)
        else:
            more = {} if tensors.bias is None else {"bias": tensors.bias[i]}
            out, lse = OPS.attention(*qkv, return_lse=True, **options, **more)
            more |= {"need_bias": True} if row.bias else {}
            call = partial(OPS.attention_backward, tensors.grad, *qkv, out, lse, **options, **more, **last)
        calls.append(call)
    return calls


def _formula(s: Settings, row: Attention, tensors: Tensors, scores: int) -> Iterator[Provider]:
    """What the others are checked against where its scores fit into memory; on a CPU it is timed, as the peer."""
    if s.cuda and scores > (MOST_SCORES_BACKWARD if row.backward else MOST_SCORES):
        return
    kind, name = (CHECK, "formula") if s.cuda else (PEER, "eager")
    yield Provider(name, [partial(formula.backward if row.backward else formula.forward, row, tensors)], kind)
