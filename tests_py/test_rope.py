"""rope and rope_table against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashkernel as fk
from conftest import DTYPES, FRAMEWORKS, TRITON, Maker, f64, on_host
from flashkernel import reference, testing


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 8, 2])
def test_rope(make, interleaved, rotary_dim):
    q, k = make.normal(2, 4, 5, 16), make.normal(2, 2, 5, 16)
    for positions in (None, make.index([4, 0, 9, 70000, 3]), make.index(np.arange(10).reshape(2, 5), np.int32)):
        options = {"theta": 500.0, "rotary_dim": rotary_dim, "interleaved": interleaved}
        rotated = fk.rope(q, k, positions, **options, **make.kwargs)
        at = None if positions is None else on_host(positions)
        for ours, truth in zip(rotated, reference.rope(f64(q), f64(k), at, **options), strict=True):
            make.check(ours, truth)


def test_inverse_and_in_place(make):
    q, k = make.normal(1, 2, 5, 8), make.normal(1, 1, 5, 8)
    before = f64(q).copy(), f64(k).copy()
    assert all(a is b for a, b in zip(fk.rope(q, k, out=(q, k), **make.kwargs), (q, k), strict=True))
    for ours, truth in zip((q, k), reference.rope(*before), strict=True):
        make.check(ours, truth)
    back = fk.rope(q, inverse=True, **make.kwargs)
    make.check(back, reference.rope(f64(q), inverse=True)[0])


@pytest.mark.parametrize("framework", ["numpy", TRITON])
def test_positions_beyond_a_million_stay_exact(framework):
    make = Maker(framework, "float32")
    q = make.normal(1, 1, 4, 64)
    positions = np.array([100_000, 1_000_003, 2**24 + 1, 2**31 - 2])
    make.check(fk.rope(q, None, make.index(positions), **make.kwargs), reference.rope(f64(q), None, positions)[0])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_error_of_far_positions(framework):
    """docs/numerics.md: 1.2e-7 + |position * frequency| * 2^-51 against 80-bit numbers, Triton's twin 1e-6."""
    make = Maker(framework, "float32")
    pairs = 32
    far = np.array([0, 1, -1, -5, 4095, 10**6 + 3, 2**24 + 1, -(2**30) - 7, 2**31 - 1, -(2**31)])
    q = np.zeros((1, 1, len(far), 2 * pairs))
    q[..., :pairs] = 1  # (1, 0) becomes (cos, sin)
    frequency = np.longdouble(10000.0) ** (-np.arange(pairs, dtype=np.longdouble) / pairs)
    angle = far.astype(np.longdouble)[:, None] * frequency
    truth = np.concatenate([np.cos(angle), np.sin(angle)], -1)
    bound = (1e-6 if framework == "triton" else 1.2e-7) + np.abs(np.concatenate([angle, angle], -1)) * 2.0**-51
    for dtype in (np.int32, np.int64):
        rotated = f64(fk.rope(make.array(q), None, make.index(far, dtype), **make.kwargs))[0, 0]
        assert (np.abs(rotated - truth) <= bound).all()


def append(make, positions):
    """Tokens rotated on their way into pages; the keys' page."""
    k = make.normal(len(positions), 1, 8)
    pages = [make.array(np.zeros((1, 16, 1, 8))) for _ in range(2)]
    rope = {"positions": make.index(positions)}
    fk.kv_append(k, k, *pages, make.index(np.arange(len(positions))), rope=rope, **make.kwargs)
    return f64(pages[0])[0, : len(positions)]


@pytest.mark.parametrize("bad", [2**31, 2**53 + 1, -(2**31) - 1])
def test_positions_past_int32(make, bad):
    """Refused where the host reads positions; else NaN in the elements of that token that are rotated."""
    q, positions = make.normal(1, 2, 3, 8), make.index([5, bad, 2**31 - 1])
    if make.host_reads:
        with pytest.raises(ValueError, match=rf"rope: positions\[1\]={bad}; needs a value from -2147483648 to"):
            fk.rope(q, None, positions, **make.kwargs)
        with pytest.raises(ValueError, match=rf"kv_append: rope.positions\[0\]={bad}; needs"):
            append(make, [bad])
        return
    rotated = f64(fk.rope(q, None, positions, rotary_dim=4, **make.kwargs))
    assert np.isnan(rotated[:, :, 1, :4]).all()
    assert np.isfinite(rotated[:, :, 1, 4:]).all() and np.isfinite(rotated[:, :, [0, 2]]).all()
    kept = append(make, [7, bad])
    assert np.isfinite(kept[0]).all() and np.isnan(kept[1]).all()


def test_inv_freq(make):
    q = make.normal(1, 2, 5, 8)
    inv_freq = make.array([1.0, 0.5, 0.01, 0.0], "float32")
    make.check(fk.rope(q, inv_freq=inv_freq, **make.kwargs), reference.rope(f64(q), inv_freq=f64(inv_freq))[0])


@pytest.mark.parametrize("interleaved", [False, True])
def test_table(make, interleaved):
    q, k = make.normal(2, 4, 5, 16), make.normal(2, 2, 5, 16)
    angles = make.rng.standard_normal((9, 6))
    cos, sin = make.array(np.cos(angles), "float32"), make.array(np.sin(angles), "float32")
    positions = make.index([8, 0, 3, 3, 1])
    options = {"interleaved": interleaved, "inverse": True}
    rotated = fk.rope_table(q, k, cos, sin, positions, **options, **make.kwargs)
    truth = reference.rope_table(f64(q), f64(k), f64(cos), f64(sin), on_host(positions), **options)
    for ours, theirs in zip(rotated, truth, strict=True):
        make.check(ours, theirs, scale=2.0)
    direct = fk.rope_table(q, None, cos[None, :5], sin[None, :5], **options, **make.kwargs)
    make.check(
        direct, reference.rope_table(f64(q), None, f64(cos)[None, :5], f64(sin)[None, :5], **options)[0], scale=2.0
    )


@pytest.mark.parametrize("table", DTYPES)
def test_a_table_of_any_dtype(make, table):
    """It widens exactly, whatever the dtype of q."""
    for pairs in (5, 8):  # by elements and by vectors
        q, k = make.normal(2, 4, 6, 16), make.normal(2, 2, 6, 16)
        angles = make.rng.standard_normal((9, pairs))
        cos, sin = make.array(np.cos(angles), table), make.array(np.sin(angles), table)
        hint = {"dtype": "bfloat16"} if make.framework == "numpy" and "bfloat16" in (table, make.dtype) else make.kwargs
        truth = reference.rope_table(f64(q), f64(k), *(testing.to_float64(x) for x in (cos, sin)))
        for ours, theirs in zip(fk.rope_table(q, k, cos, sin, **hint), truth, strict=True):
            make.check(ours, theirs, scale=2.0)


@pytest.mark.parametrize("framework", ["torch", TRITON])
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 40), st.integers(1, 40), st.booleans(), st.integers(0, 999))
def test_any_shape(framework, batch, heads, seq, pairs, interleaved, seed):
    make = Maker(framework, "float32", seed)
    seq = seq if framework == "torch" else 1 + seq // 8  # a program of Triton's is a token
    q = make.normal(batch, heads, seq, 2 * pairs + seed % 2)
    options = {"interleaved": interleaved, "rotary_dim": 2 * pairs}
    make.check(fk.rope(q, **options, **make.kwargs), reference.rope(f64(q), **options)[0])
