"""Laws that hold for any arguments: of lengths, page tables, slots, cuts, targets, positions and shifts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashkernel as fk
from conftest import DTYPES, Maker, f64
from flashkernel import reference, testing

dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**32 - 1)
lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 70)), min_size=1, max_size=4)
heads = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 5]))  # kv heads, query heads of each
dims = st.tuples(st.sampled_from([1, 8, 33, 64]), st.sampled_from([8, 40, 64]))
options = st.fixed_dictionaries(
    {
        "causal": st.booleans(),
        "window": st.none() | st.tuples(st.none() | st.integers(0, 50), st.none() | st.integers(0, 50)),
        "softcap": st.sampled_from([0.0, 2.0]),
    }
)


def starts(counts) -> list[int]:
    return [0, *np.cumsum(counts).tolist()]


@given(lengths, heads, dims, options, dtypes, seeds)
def test_varlen_attention_and_its_gradient(lens, heads, dims, options, dtype, seed):
    make = Maker("torch", dtype, seed)
    cu_q, cu_k = (starts(n) for n in zip(*lens, strict=True))
    q = make.normal(cu_q[-1], heads[0] * heads[1], dims[0])
    k, v = (make.normal(cu_k[-1], heads[0], dim) for dim in dims)
    bounds = make.index(cu_q, np.int32), make.index(cu_k), 40, 70
    out, lse = fk.attention_varlen(q, k, v, *bounds, return_lse=True, **options)
    truth, true_lse = reference.attention_varlen(f64(q), f64(k), f64(v), cu_q, cu_k, **options)
    make.check(out, truth)
    testing.assert_close(lse, true_lse, "float32")
    grad_out = make.normal(*out.shape)
    grads = fk.attention_varlen_backward(grad_out, q, k, v, out, lse, *bounds, **options)
    truths = reference.attention_varlen_backward(f64(grad_out), f64(q), f64(k), f64(v), cu_q, cu_k, **options)
    # `out`, rounded, enters sums over its columns, up to 64.
    for name, grad in zip(("q", "k", "v"), grads, strict=True):
        size = np.abs(truths[name]).max(initial=1.0)
        make.check(grad, truths[name], scale=8.0 * size, what=f"grad_{name}")


@given(lengths, heads, dims, options, dtypes, seeds, st.sampled_from([1, 7, 16, 64]))
def test_tokens_go_through_pages_unchanged(lens, heads, dims, options, dtype, seed, page_size):
    """Appended to any free slots, they are read back bit for bit, and attended to as if they lay side by side."""
    make = Maker("torch", dtype, seed)
    cu_q, cu_k = (starts(n) for n in zip(*lens, strict=True))
    blocks = [-(-n // page_size) for _, n in lens]
    order = make.rng.permutation(sum(blocks) + 2)
    k_pages, v_pages = (make.array(np.full((len(order), page_size, heads[0], dim), np.nan)) for dim in dims)
    table = np.full((len(lens), max(blocks) + 1), -1, np.int32)
    slots = []
    for b, (_, n) in enumerate(lens):
        table[b, : blocks[b]] = order[starts(blocks)[b] :][: blocks[b]]
        slots += [int(table[b, j // page_size]) * page_size + j % page_size for j in range(n)]
    k, v = (make.normal(cu_k[-1], heads[0], dim) for dim in dims)
    some = make.rng.permutation(cu_k[-1])  # in any order
    if len(some):
        fk.kv_append(k[some], v[some], k_pages, v_pages, make.index(np.array(slots)[some]))
    seq_lens = make.index([n for _, n in lens], np.int32)
    tables = make.index(table, np.int32)
    for read, tokens in zip(fk.kv_read(k_pages, v_pages, tables, seq_lens), (k, v), strict=True):
        for b, (_, n) in enumerate(lens):
            np.testing.assert_array_equal(f64(read[b, :n]), f64(tokens[cu_k[b] : cu_k[b + 1]]))
            assert (f64(read[b, n:]) == 0).all()
    q = make.normal(cu_q[-1], heads[0] * heads[1], dims[0])
    bounds = make.index(cu_q, np.int32)
    paged = fk.attention_paged(
        q, k_pages, v_pages, tables, seq_lens, cu_seqlens_q=bounds, max_seqlen_q=40, return_lse=True, **options
    )
    truth, true_lse = reference.attention_varlen(f64(q), f64(k), f64(v), cu_q, cu_k, **options)
    make.check(paged[0], truth)
    testing.assert_close(paged[1], true_lse, "float32")


@given(st.integers(1, 60), st.lists(st.integers(0, 60), max_size=6), dtypes, seeds)
def test_parts_merge_to_the_whole(count, cuts, dtype, seed):
    make = Maker("torch", dtype, seed)
    q, k, v = make.normal(2, 3, 16), make.normal(2, count, 16), make.normal(2, count, 16)
    edges = sorted([0, count, *(cut for cut in cuts if cut <= count)])
    merged = None
    for begin, end in itertools.pairwise(edges):
        part = fk.attention(q, k[:, begin:end], v[:, begin:end], return_lse=True)
        merged = part if merged is None else fk.merge_states(*merged, *part)
    truth, true_lse = reference.attention(f64(q), f64(k), f64(v))
    make.check(merged[0], truth, scale=float(len(edges)))  # each part and each merge is rounded
    testing.assert_close(merged[1], true_lse, "float32")


@given(
    st.integers(1, 9),
    st.integers(1, 300),
    st.sampled_from(["none", "sum", "mean"]),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from([-100, 0, 7]),
    dtypes,
    seeds,
)
def test_cross_entropy(rows, classes, reduction, label_smoothing, ignore_index, dtype, seed):
    make = Maker("torch", dtype, seed)
    logits = make.normal(rows, classes + 3)[:, 1 : classes + 1]
    targets = make.rng.integers(0, classes, rows)
    targets[make.rng.random(rows) < 0.3] = ignore_index
    arguments = {"reduction": reduction, "label_smoothing": label_smoothing, "ignore_index": ignore_index}
    loss, lse = fk.cross_entropy(logits, make.index(targets), return_lse=True, **arguments)
    truth, true_lse = reference.cross_entropy(f64(logits), targets, **arguments)
    testing.assert_close(loss, truth, "float32", scale=float(rows))
    testing.assert_close(lse, true_lse, "float32")
    grad = make.array(make.rng.standard_normal(truth.shape), "float32")
    ours = fk.cross_entropy_backward(grad, logits, make.index(targets), lse, **arguments)
    make.check(ours, reference.cross_entropy_backward(f64(grad), f64(logits), targets, **arguments))


@given(st.integers(0, 2**20), st.integers(1, 9), st.sampled_from([16, 64]), st.booleans(), seeds)
def test_scores_of_rotated_vectors_know_distances_only(shift, seq, dim, interleaved, seed):
    """<rope(q, i), rope(k, j)> depends on i - j: the reason why RoPE exists; and `inverse` undoes it."""
    make = Maker("numpy", "float32", seed)
    q, k = make.normal(1, 1, seq, dim), make.normal(1, 1, seq, dim)
    here, there = (fk.rope(q, k, make.index(np.arange(seq) + offset), interleaved=interleaved) for offset in (0, shift))
    scores = [f64(a)[0, 0] @ f64(b)[0, 0].T for a, b in (here, there)]
    np.testing.assert_allclose(scores[0], scores[1], atol=2e-5 * dim)
    positions = make.index(np.arange(seq) + shift)
    back = fk.rope(there[0], None, positions, interleaved=interleaved, inverse=True)
    np.testing.assert_allclose(f64(back), f64(q), atol=1e-5)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.data(), seeds)
def test_softmax_does_not_see_a_shift(name, shape, data, seed):
    make = Maker("numpy", "float32", seed)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = make.rng.integers(-30, 30, shape).astype(np.float32)  # a shift by an integer is exact
    out = getattr(fk, name)(x, axis)
    np.testing.assert_array_equal(out, getattr(fk, name)(x + 1000, axis))
    total = np.exp(out).sum(axis) if name == "log_softmax" else out.sum(axis)
    np.testing.assert_allclose(total, 1, atol=1e-5)
