"""The invariant mode by random problems: batches, chunks, pages, places (docs/invariance.md).

On the CPU, and on a GPU where there is one. Some keys are twenty times as large as the others, so that the maxima of
rows move as keys are walked: where a row moved with its neighbours, its bits would depend on them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashkernel as fk
import flashkernel.torch as fkt
from conftest import DTYPES, HAS_GPU, TORCH

DEVICES = ("cpu", *(("cuda",) if HAS_GPU and fk.num_cuda_devices() else ()))
LONGEST = {"cpu": 300, "cuda": 1500}

device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
seeds = st.integers(0, 2**31 - 1)


@pytest.fixture(autouse=True, scope="module")
def mode() -> Iterator[None]:
    with fk.invariant():
        yield


class Draw:
    """Random numbers of one problem, from a seed that Hypothesis draws and shrinks."""

    def __init__(self, seed: int, dtype: str, device: str) -> None:
        self.rng, self.dtype, self.device = np.random.default_rng(seed), TORCH[dtype], device
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def between(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device).to(self.dtype)

    def keys(self, *shape: int) -> torch.Tensor:
        large = torch.rand(shape[:-1], generator=self.generator, device=self.device)[..., None] < 0.02
        return self.normal(*shape) * torch.where(large, 20.0, 1.0).to(self.dtype)

    def index(self, values, dtype=torch.int32) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype, device=self.device)

    def starts(self, lengths: list[int]) -> torch.Tensor:
        return self.index([0, *np.cumsum(lengths)])

    def some_of(self, count: int) -> list[int]:
        return [self.between(0, count - 1) for _ in range(self(1, 2, 3, 5, 8, 9, 17, 60, 130))]


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    different = a.contiguous().view(kind) != b.contiguous().view(kind)
    assert not different.any(), f"{int(different.sum())} of {a.numel()} differ, first {different.nonzero()[0].tolist()}"


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, dim] as a batch of one, [1, heads, tokens, dim]."""
    return x[None].transpose(1, 2)


@device
@each_dtype
@given(seed=seeds)
def test_attention(device, dtype, seed):
    draw = Draw(seed, dtype, device)
    group, heads_kv, dim = draw(1, 2, 4, 7), draw(1, 2), draw(64, 80, 128, 96, 32, 192, 256)
    heads, count = group * heads_kv, draw.between(1, 4)
    lengths = [draw.between(1, LONGEST[device]) for _ in range(count)]
    options = draw({}, {}, {"softcap": 5.0}, {"window": (draw.between(1, 200), 0)}, {"scale": 0.7})
    if draw(False, False, True):
        options["sinks"] = draw.normal(heads).float()
    if draw(False, False, True):
        options["alibi_slopes"] = torch.rand(heads, generator=draw.generator, device=device)
    q = [draw.normal(n, heads, dim) for n in lengths]
    k, v = [draw.keys(n, heads_kv, dim) for n in lengths], [draw.normal(n, heads_kv, dim) for n in lengths]
    alone, alone_lse = [], []
    for i in range(count):
        out, lse = fk.attention(*(heads_first(x[i]) for x in (q, k, v)), causal=True, return_lse=True, **options)
        same(fk.attention(*(heads_first(x[i]) for x in (q, k, v)), causal=True, **options), out)
        alone.append(out[0].transpose(0, 1))
        alone_lse.append(lse[0].T)

    starts = draw.starts(lengths)
    most = max(lengths) + draw(0, 3, 200)
    packed = fk.attention_varlen(
        torch.cat(q), torch.cat(k), torch.cat(v), starts, starts, most, most, causal=True, **options
    )
    same(packed, torch.cat(alone))

    i = draw.between(0, count - 1)  # a chunk that begins and ends anywhere
    end = draw.between(1, lengths[i])
    begin = draw.between(0, end - 1)
    part, lse = fk.attention(
        *(heads_first(x) for x in (q[i][begin:end], k[i][:end], v[i][:end])), causal=True, return_lse=True, **options
    )
    same(part[0].transpose(0, 1), alone[i][begin:end])
    same(lse[0].T, alone_lse[i][begin:end])

    size = draw(8, 16, 64, 256)
    wide = -(-most // size)
    tables = draw.rng.permutation(count * wide).reshape(count, wide)
    pages = [torch.full((count * wide, size, heads_kv, dim), float("nan"), dtype=draw.dtype) for _ in "kv"]
    for page, tensors in zip(pages, (k, v), strict=True):
        for table, x in zip(tables, tensors, strict=True):
            for j, rows in enumerate(x.cpu().split(size)):
                page[table[j], : len(rows)] = rows
    pages, table, own = [page.to(device) for page in pages], draw.index(tables), draw.index(lengths)
    last = [min(draw(1, 2, 7, 17, 40, 70), n) for n in lengths]  # queries of each sequence, its last ones
    found = fk.attention_paged(
        torch.cat([x[-n:] for x, n in zip(q, last, strict=True)]), *pages, table, own,
        cu_seqlens_q=draw.starts(last), max_seqlen_q=max(last), causal=True, **options,
    )  # fmt: skip
    same(found, torch.cat([x[-n:] for x, n in zip(alone, last, strict=True)]))
    ids = draw.some_of(count)
    decoded = fk.attention_paged(
        torch.stack([q[i][-1] for i in ids])[:, :, None], *pages, table[ids], own[ids], causal=True, **options
    )
    same(decoded[:, :, 0], torch.stack([alone[i][-1] for i in ids]))


@device
@each_dtype
@given(seed=seeds)
def test_linear(device, dtype, seed):
    draw = Draw(seed, dtype, device)
    large = device == "cuda"  # enough tiles for several rounds of multiprocessors
    features = draw(64, 512, 776, 800, 1000, 2304, 4100)
    outputs = draw(8, 33, 64, 200, 513, 1024, *([8192, 8192] if large else []))
    weight = draw.normal(features, outputs).T if draw(False, True) else draw.normal(outputs, features)
    bias, activation = draw(None, draw.normal(outputs)), draw(None, "gelu_tanh", "silu")
    x = draw.normal(draw(20, 150, 300, *([4096] if large else [])), features)
    whole = fk.linear(x, weight, bias, activation=activation)
    for _ in range(3):
        ids = draw.some_of(len(x))
        same(fk.linear(x[ids], weight, bias, activation=activation), whole[ids])


@device
@each_dtype
@given(seed=seeds)
def test_rows(device, dtype, seed):
    draw = Draw(seed, dtype, device)
    columns, count = draw(8, 64, 96, 777, 1024, 3072, 4096, 9000, 33000), draw(3, 40, 700 if device == "cuda" else 90)
    x, more = draw.normal(count, columns), draw.normal(count, columns)
    weight, bias = draw.normal(columns), draw.normal(columns)
    targets = draw.index(draw.rng.integers(columns, size=count), torch.int64)
    calls = {
        "rms_norm": lambda at: fk.rms_norm(x[at], weight),
        "rms_norm, residual": lambda at: torch.stack(fk.rms_norm(x[at], weight, residual=more[at]), 1),
        "layer_norm": lambda at: fk.layer_norm(x[at], weight, bias),
        "softmax": lambda at: fk.softmax(x[at]),
        "log_softmax": lambda at: fk.log_softmax(x[at]),
        "log_softmax in fp32": lambda at: fk.log_softmax(x[at].float()),
        "cross_entropy": lambda at: fk.cross_entropy(x[at], targets[at], reduction="none"),
        "swiglu": lambda at: fk.swiglu(x[at], more[at]),
        "reduce_sum": lambda at: fk.reduce_sum(x[at], -1),
    }
    for name in draw.rng.permutation(list(calls))[:4]:
        whole, ids = calls[name](list(range(count))), draw.some_of(count)
        same(calls[name](ids), whole[ids])


@device
@each_dtype
@given(seed=seeds)
def test_losses_of_a_linear_layer(device, dtype, seed):
    draw = Draw(seed, dtype, device)
    features, classes = draw(64, 136, 200), draw(33, 1000, 5001, 8192)
    x, weight = draw.normal(90, features), draw.normal(classes, features)
    targets = draw.index(draw.rng.integers(classes, size=90), torch.int64)
    whole, ids = fk.linear_selected_log_prob(x, weight, targets), draw.some_of(90)
    same(fk.linear_selected_log_prob(x[ids], weight, targets[ids]), whole[ids])


@device
@each_dtype
@given(seed=seeds)
def test_gradients_of_a_sequence(device, dtype, seed):
    draw = Draw(seed, dtype, device)
    group, heads_kv, dim, count = draw(1, 2), draw(1, 2), draw(64, 96, 128), draw.between(2, 4)
    lengths = [draw.between(1, LONGEST[device]) for _ in range(count)]
    q, grad = ([draw.normal(n, group * heads_kv, dim) for n in lengths] for _ in "qg")
    k, v = [draw.keys(n, heads_kv, dim) for n in lengths], [draw.normal(n, heads_kv, dim) for n in lengths]

    def gradients(ids: list[int]) -> list[tuple[torch.Tensor, ...]]:
        starts, own = draw.starts([lengths[i] for i in ids]), [lengths[i] for i in ids]
        inputs = [torch.cat([x[i] for i in ids]).requires_grad_() for x in (q, k, v)]
        out = fkt.attention_varlen(*inputs, starts, starts, max(own), max(own), causal=True)
        found = torch.autograd.grad(out, inputs, torch.cat([grad[i] for i in ids]))
        return list(zip(*(x.split(own) for x in found), strict=True))

    ids = [draw.between(0, count - 1) for _ in range(draw.between(2, 5))]
    for i, together in zip(ids, gradients(ids), strict=True):
        for a, b in zip(together, gradients([i])[0], strict=True):
            same(a, b)


@device
@each_dtype
@given(seed=seeds)
def test_gradients_of_rows(device, dtype, seed):
    draw = Draw(seed, dtype, device)
    columns, outputs = draw(64, 96, 777, 1024, 2056, 9000), draw(8, 33, 64, 512)
    x = draw.normal(80, columns)
    weight, matrix = draw.normal(columns), draw.normal(outputs, columns)
    ops = {
        "linear": lambda rows: fkt.linear(rows, matrix, activation="gelu_tanh"),
        "rms_norm": lambda rows: fkt.rms_norm(rows, weight),
        "layer_norm": lambda rows: fkt.layer_norm(rows, weight, weight),
        "softmax": lambda rows: fkt.softmax(rows),
        "log_softmax": lambda rows: fkt.log_softmax(rows),
        "swiglu": lambda rows: fkt.swiglu(rows, rows),
    }
    for op in ops.values():
        grad = draw.normal(*op(x).shape)

        def gradient(ids: list[int], op=op, grad=grad) -> torch.Tensor:
            rows = x[ids].requires_grad_()
            return torch.autograd.grad(op(rows), rows, grad[ids])[0]

        ids = draw.some_of(80)
        same(gradient(ids), gradient(list(range(80)))[ids])
