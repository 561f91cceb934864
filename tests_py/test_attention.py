"""attention in all its forms, merge_states and the gradients against the oracle, in both frameworks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashkernel as fk
from conftest import DTYPES, TRITON, Maker, f64, needs_triton, on_host
from flashkernel import reference, testing

FEATURES = [
    {},
    {"causal": True},
    {"window": (3, 2)},
    {"causal": True, "window": (4, None)},
    {"softcap": 1.5, "scale": 0.7},
    {"causal": True, "softcap": 2.0, "window": (5, 0)},
]


def check_without_lse(make, q, k, v, out, truth, **options):
    """Kernels for 9.0 may sum rows in another way where no LSE is wanted; all others give the same bits."""
    alone = fk.attention(q, k, v, **options, **make.kwargs)
    make.check(alone, truth)
    served = fk.explain("attention", q, k, v, **options).kernel if make.framework == "torch_cuda" else ""
    if not served.startswith("attention_fwd/cuda/sm90a/"):
        np.testing.assert_array_equal(f64(alone), f64(out))


@pytest.mark.parametrize("options", FEATURES)
def test_dense(make, options):
    q, k, v = make.normal(2, 4, 9, 16), make.normal(2, 2, 13, 16), make.normal(2, 2, 13, 8)
    out, lse = fk.attention(q, k, v, return_lse=True, **options, **make.kwargs)
    truth, true_lse = reference.attention(f64(q), f64(k), f64(v), **options)
    make.check(out, truth)
    testing.assert_close(lse, true_lse, "float32")
    check_without_lse(make, q, k, v, out, truth, **options)


@pytest.mark.parametrize("shape", [(4, 1, 1, 1), (1, 4, 1, 1), (1, 1, 9, 13), (4, 4, 9, 1), (13,), (9, 13)])
def test_bias_broadcasts(make, shape):
    q, k, v = make.normal(4, 4, 9, 16), make.normal(4, 4, 13, 16), make.normal(4, 4, 13, 16)
    for bias in (make.normal(*shape), make.array(make.rng.standard_normal(shape), "float32")):
        out = fk.attention(q, k, v, bias=bias, **make.kwargs)
        make.check(out, reference.attention(f64(q), f64(k), f64(v), bias=f64(bias))[0])


def test_alibi_and_sinks(make):
    q, k = make.normal(2, 4, 5, 8), make.normal(2, 4, 7, 8)
    sinks = make.array([0.5, -3.0, 2.0, 9.0], "float32")
    for slopes in (make.array([1.0, 0.5, 0.25, 0.0], "float32"), make.array(make.rng.random((2, 4)), "float32")):
        out, lse = fk.attention(q, k, k, alibi_slopes=slopes, sinks=sinks, return_lse=True, causal=True, **make.kwargs)
        truth, true_lse = reference.attention(
            f64(q), f64(k), f64(k), alibi_slopes=f64(slopes), sinks=f64(sinks), causal=True
        )
        make.check(out, truth)
        testing.assert_close(lse, true_lse, "float32")


def test_two_and_three_dims(make):
    q, k = make.normal(3, 5, 8), make.normal(3, 7, 8)
    out, lse = fk.attention(q, k, k, return_lse=True, **make.kwargs)
    truth, true_lse = reference.attention(f64(q), f64(k), f64(k))
    make.check(out, truth)
    testing.assert_close(lse, true_lse, "float32")
    check_without_lse(make, q[0], k[0], k[0], out[0], truth[0])


def test_transposed_views_and_out(make):
    """[batch, seq, heads, head_dim] storage, each tensor with its own strides, and an `out` of that kind."""
    q, k, v = make.normal(2, 5, 4, 8), make.normal(2, 7, 3, 2, 8), make.normal(2, 2, 9, 3, 8)
    swap = (lambda x: x.transpose(1, 2)) if make.framework != "numpy" else (lambda x: x.swapaxes(1, 2))
    q_view, k_view, v_view = swap(q), swap(k[:, :, 1]), v[:, :, :7, 0]
    storage = make.array(np.full((2, 5, 4, 8), np.nan))
    out = swap(storage)
    assert fk.attention(q_view, k_view, v_view, out=out, **make.kwargs) is out
    make.check(out, reference.attention(f64(q_view), f64(k_view), f64(v_view))[0])


def test_expanded_keys(make):
    k = make.normal(1, 1, 7, 8)
    q = make.normal(3, 2, 5, 8)
    wide = k.expand(3, 2, 7, 8) if make.framework != "numpy" else np.broadcast_to(k, (3, 2, 7, 8))
    out = fk.attention(q, wide, wide, **make.kwargs)
    make.check(out, reference.attention(f64(q), f64(wide), f64(wide))[0])


def test_rows_that_see_nothing(make):
    q, k = make.normal(1, 2, 6, 8), make.normal(1, 2, 3, 8)
    out = make.array(np.full((1, 2, 6, 8), np.nan))
    _, lse = fk.attention(q, k, k, causal=True, return_lse=True, out=out, **make.kwargs)
    assert (f64(out)[:, :, :3] == 0).all() and np.isneginf(f64(lse)[:, :, :3]).all()
    make.check(out, reference.attention(f64(q), f64(k), f64(k), causal=True)[0])


def test_empty(make):
    q = make.normal(1, 2, 4, 8)
    out, lse = fk.attention(q, q[:, :, :0], q[:, :, :0], return_lse=True, **make.kwargs)
    assert (f64(out) == 0).all() and np.isneginf(f64(lse)).all()
    assert fk.attention(q[:, :, :0], q, q, **make.kwargs).shape == (1, 2, 0, 8)
    assert fk.attention(q[:0], q[:0], q[:0], **make.kwargs).shape == (0, 2, 4, 8)


def test_nan_propagates_only_where_it_is_seen(make):
    q, k, v = make.rng.standard_normal((3, 1, 1, 6, 8))
    v[0, 0, 3, 2] = np.nan
    q, k, v = (make.array(x) for x in (q, k, v))
    out = fk.attention(q, k, v, causal=True, **make.kwargs)
    nan = np.isnan(f64(out))[0, 0]
    assert not nan[:3].any() and nan[3:, 2].all() and nan.sum() == 3


@pytest.mark.parametrize("framework", ["numpy", TRITON])
@pytest.mark.parametrize("size", [1e5, -1e5])
def test_large_logits(framework, size):
    make = Maker(framework, "float32")
    q, k = make.array(np.full((1, 1, 4, 8), size / 8)), make.array(np.ones((1, 1, 4, 8)))
    out, lse = fk.attention(q, k, k, scale=1.0, return_lse=True, **make.kwargs)
    assert (f64(out) == 1).all()
    np.testing.assert_allclose(f64(lse), size + np.log(4), rtol=1e-6)


shapes = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "heads_kv": st.integers(1, 3),
        "group": st.sampled_from([1, 2, 3, 5]),
        "seq_q": st.integers(1, 70),
        "seq_k": st.integers(1, 140),
        "head_dim": st.sampled_from([1, 8, 16, 33, 64, 80, 128, 256]),
        "causal": st.booleans(),
        "window": st.none() | st.tuples(st.none() | st.integers(0, 80), st.none() | st.integers(0, 80)),
        "softcap": st.sampled_from([0.0, 0.0, 3.0]),
    }
)


@given(shapes, st.sampled_from(DTYPES), st.integers(0, 2**32 - 1))
def test_any_shape(case, dtype, seed):
    check_any_shape(Maker("torch", dtype, seed), case)


@needs_triton
@settings(max_examples=8)  # each may be a kernel to compile, or minutes in the interpreter at full size
@given(shapes, st.sampled_from(DTYPES), st.integers(0, 2**32 - 1))
def test_any_shape_in_triton(case, dtype, seed):
    sizes = {"batch": 1, "heads_kv": 1, "seq_q": 1 + case["seq_q"] // 3, "seq_k": 1 + case["seq_k"] // 3}
    check_any_shape(Maker("triton", dtype, seed), {**case, **sizes})


def check_any_shape(make, case):
    heads = case["heads_kv"] * case["group"]
    q = make.normal(case["batch"], heads, case["seq_q"], case["head_dim"])
    k, v = (make.normal(case["batch"], case["heads_kv"], case["seq_k"], case["head_dim"]) for _ in range(2))
    options = {n: case[n] for n in ("causal", "window", "softcap")}
    out, lse = fk.attention(q, k, v, return_lse=True, **options, **make.kwargs)
    truth, true_lse = reference.attention(f64(q), f64(k), f64(v), **options)
    make.check(out, truth)
    testing.assert_close(lse, true_lse, "float32")


@pytest.mark.parametrize("causal", [False, True])
def test_no_worse_than_twice_torch(dtype, causal):
    make = Maker("torch", dtype)
    q, k, v = (make.normal(1, 4, 160, 64) for _ in range(3))
    with torch.no_grad():
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    truth, _ = reference.attention(f64(q), f64(k), f64(v), causal=causal)
    make.check(fk.attention(q, k, v, causal=causal), truth, baseline=theirs)


@pytest.mark.parametrize(
    "lengths", [((3, 0, 5), (4, 2, 0)), ((0, 0), (0, 0)), ((0, 4), (7, 4)), ((2, 3, 0), (2, 3, 1))]
)
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_varlen(make, lengths, index):
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(n)]) for n in lengths)
    q, k, v = make.normal(cu_q[-1], 4, 8), make.normal(cu_k[-1], 2, 8), make.normal(cu_k[-1], 2, 16)
    arguments = make.index(cu_q, index), make.index(cu_k, index), 5, 7
    out, lse = fk.attention_varlen(q, k, v, *arguments, causal=True, return_lse=True, **make.kwargs)
    truth, true_lse = reference.attention_varlen(f64(q), f64(k), f64(v), cu_q, cu_k, causal=True)
    make.check(out, truth)
    testing.assert_close(lse, true_lse, "float32")


def paged_case(make, page_size=16, lengths=(20, 0, 33), heads_kv=2, dim=8, dim_v=16):
    """Shuffled pages; whatever no sequence owns is NaN."""
    blocks = [-(-n // page_size) for n in lengths]
    order = make.rng.permutation(sum(blocks) + 3)
    k_pages = np.full((len(order), page_size, heads_kv, dim), np.nan)
    v_pages = np.full((len(order), page_size, heads_kv, dim_v), np.nan)
    table = np.full((len(lengths), max(blocks) + 1), -1)
    taken = iter(order)
    for b, length in enumerate(lengths):
        for j in range(blocks[b]):
            page = table[b, j] = next(taken)
            used = min(page_size, length - j * page_size)
            k_pages[page, :used] = make.rng.standard_normal((used, heads_kv, dim))
            v_pages[page, :used] = make.rng.standard_normal((used, heads_kv, dim_v))
    return make.array(k_pages), make.array(v_pages), make.index(table, np.int32), make.index(lengths)


@pytest.mark.parametrize("seq_q", [1, 4])
def test_paged(make, seq_q):
    k_pages, v_pages, table, lengths = paged_case(make)
    q = make.normal(3, 6, seq_q, 8)
    out, lse = fk.attention_paged(q, k_pages, v_pages, table, lengths, causal=True, return_lse=True, **make.kwargs)
    truth, true_lse = reference.attention_paged(
        f64(q), f64(k_pages), f64(v_pages), on_host(table), on_host(lengths), causal=True
    )
    make.check(out, truth)
    testing.assert_close(lse, true_lse, "float32")


@pytest.mark.parametrize("max_seqlen_q", [None, 5])
def test_paged_varlen(make, max_seqlen_q):
    k_pages, v_pages, table, lengths = paged_case(make)
    cu_q = [0, 2, 2, 7]
    q = make.normal(7, 4, 8)
    options = {"causal": True, "cu_seqlens_q": make.index(cu_q, np.int32)}
    out, lse = fk.attention_paged(
        q, k_pages, v_pages, table, lengths, max_seqlen_q=max_seqlen_q, return_lse=True, **options, **make.kwargs
    )
    options["cu_seqlens_q"] = cu_q
    truth, true_lse = reference.attention_paged(
        f64(q), f64(k_pages), f64(v_pages), on_host(table), on_host(lengths), **options
    )
    make.check(out, truth)
    testing.assert_close(lse, true_lse, "float32")


def test_merge_states(make):
    q, k, v = make.normal(2, 4, 5, 8), make.normal(2, 4, 9, 8), make.normal(2, 4, 9, 8)
    parts = [
        fk.attention(q, k[:, :, s], v[:, :, s], return_lse=True, **make.kwargs) for s in (slice(0, 4), slice(4, 9))
    ]
    out, lse = fk.merge_states(*parts[0], *parts[1], **make.kwargs)
    truth, true_lse = reference.merge_states(*(f64(x) for part in parts for x in part))
    make.check(out, truth)
    testing.assert_close(lse, true_lse, "float32")
    testing.assert_close(lse, reference.attention(f64(q), f64(k), f64(v))[1], "float32")
    nothing = make.array(np.full((2, 4, 5, 8), np.nan)), make.array(np.full((2, 4, 5), -np.inf), "float32")
    kept, _ = fk.merge_states(*parts[0], *nothing, out=parts[0], **make.kwargs)
    assert kept is parts[0][0]
    make.check(kept, reference.attention(f64(q), f64(k)[:, :, :4], f64(v)[:, :, :4])[0], scale=2.0)


def test_merge_states_of_many_parts(make):
    q, k, v = make.normal(2, 4, 5, 8), make.normal(2, 4, 9, 8), make.normal(2, 4, 9, 8)
    outs, lses = make.array(np.zeros((4, 2, 4, 5, 8)), "float32"), make.array(np.zeros((4, 2, 4, 5)), "float32")
    for part, s in enumerate((slice(0, 2), slice(2, 3), slice(3, 9))):
        out, lse = reference.attention(f64(q), f64(k)[:, :, s], f64(v)[:, :, s])
        outs[part], lses[part] = make.array(out, "float32"), make.array(lse, "float32")
    outs[3], lses[3] = float("nan"), float("-inf")  # a part without keys
    out, lse = fk.merge_states(outs, lses, out_dtype=make.dtype, **{**make.kwargs, "dtype": None})
    truth, true_lse = reference.attention(f64(q), f64(k), f64(v))
    assert out.dtype == q.dtype
    make.check(out, truth)
    testing.assert_close(lse, true_lse, "float32")
    merged = reference.merge_states(f64(outs)[:3], f64(lses)[:3])
    testing.assert_close(merged[0], truth, "float32")
    given = make.array(np.zeros((2, 4, 5, 8))), make.array(np.zeros((2, 4, 5)), "float32")
    assert fk.merge_states(outs, lses, out=given, **make.kwargs)[0] is given[0]
    make.check(given[0], truth)


# Gradients are sums of rounded terms, so they get room for the sum.


@pytest.mark.parametrize("options", FEATURES)
def test_backward(make, options):
    q, k, v = make.normal(2, 4, 9, 16), make.normal(2, 2, 13, 16), make.normal(2, 2, 13, 8)
    bias, sinks = make.array(make.rng.standard_normal((4, 1, 13)), "float32"), make.array([0.0, 1, -1, 3], "float32")
    extras = {**options, "bias": bias, "sinks": sinks}
    out, lse = fk.attention(q, k, v, return_lse=True, **extras, **make.kwargs)
    grad_out, grad_lse = make.normal(*out.shape), make.array(make.rng.standard_normal(lse.shape), "float32")
    grads = fk.attention_backward(
        grad_out, q, k, v, out, lse, grad_lse=grad_lse, need_bias=True, need_sinks=True, **extras, **make.kwargs
    )
    truth = reference.attention_backward(
        f64(grad_out),
        f64(q),
        f64(k),
        f64(v),
        grad_lse=f64(grad_lse),
        bias=f64(bias),
        sinks=f64(sinks),
        **options,
    )
    for name, grad in zip(("q", "k", "v"), grads[:3], strict=True):
        make.check(grad, truth[name], scale=4.0, what=f"grad_{name}")
    for name, grad in zip(("bias", "sinks"), grads[3:], strict=True):
        testing.assert_close(grad, truth[name], make.dtype, scale=8.0, what=f"grad_{name}")


def test_backward_into_given_arrays(make):
    """Each of the caller's strides, also with the heads split off one row; what isn't three arrays is refused."""
    q, k, v = make.normal(2, 4, 9, 16), make.normal(2, 2, 13, 16), make.normal(2, 2, 13, 8)
    out, lse = fk.attention(q, k, v, causal=True, return_lse=True, **make.kwargs)
    arguments = make.normal(*out.shape), q, k, v, out, lse
    expected = fk.attention_backward(*arguments, causal=True, **make.kwargs)
    rows = [make.array(np.full((b, s, h, d), np.nan)) for b, h, s, d in (q.shape, k.shape, v.shape)]
    given = [x.swapaxes(1, 2) for x in rows]
    grads = fk.attention_backward(*arguments, causal=True, grads=given, **make.kwargs)
    for mine, to, theirs in zip(grads, given, expected, strict=True):
        assert mine is to
        assert np.array_equal(f64(mine), f64(theirs))
    with pytest.raises(ValueError, match=r"grads has 2 entries; \(grad_q, grad_k, grad_v\) is needed"):
        fk.attention_backward(*arguments, causal=True, grads=given[:2], **make.kwargs)
    with pytest.raises(ValueError, match=r"grad_k|grads\[1\]"):
        fk.attention_backward(*arguments, causal=True, grads=[given[0], given[0], given[2]], **make.kwargs)


def test_varlen_backward(make):
    cu_q, cu_k = [0, 3, 3, 8], [0, 4, 6, 6]
    q, k, v = make.normal(8, 4, 8), make.normal(6, 2, 8), make.normal(6, 2, 8)
    arguments = make.index(cu_q), make.index(cu_k), 5, 4
    out, lse = fk.attention_varlen(q, k, v, *arguments, causal=True, return_lse=True, **make.kwargs)
    grad_out = make.normal(*out.shape)
    grads = fk.attention_varlen_backward(grad_out, q, k, v, out, lse, *arguments, causal=True, **make.kwargs)
    truth = reference.attention_varlen_backward(f64(grad_out), f64(q), f64(k), f64(v), cu_q, cu_k, causal=True)
    for name, grad in zip(("q", "k", "v"), grads, strict=True):
        make.check(grad, truth[name], scale=4.0, what=f"grad_{name}")


def test_backward_is_bitwise_reproducible():
    make = Maker("numpy", "float32")
    q, k, v = (make.normal(1, 4, 70, 32) for _ in range(3))
    out, lse = fk.attention(q, k, v, causal=True, return_lse=True)
    threads = fk.get_num_threads()
    try:
        runs = []
        for count in (1, 2, 3, 2):
            fk.set_num_threads(count)
            runs.append(fk.attention_backward(out, q, k, v, out, lse, causal=True))
    finally:
        fk.set_num_threads(threads)
    for run in runs[1:]:
        for a, b in zip(runs[0], run, strict=True):
            np.testing.assert_array_equal(a, b)
