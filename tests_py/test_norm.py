"""layer_norm and rms_norm with residual, statistics and gradients against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashkernel as fk
from conftest import DTYPES, TRITON, Maker, f64
from flashkernel import reference, testing


@pytest.mark.parametrize("wide", [False, True])
def test_layer_norm(make, wide):
    x, weight, bias = make.normal(2, 3, 20), make.normal(20), make.normal(20)
    if wide:  # parameters in float32
        weight, bias = make.array(f64(weight), "float32"), make.array(f64(bias), "float32")
    out, mean, rstd = fk.layer_norm(x, weight, bias, return_stats=True, **make.kwargs)
    truth, true_mean, true_rstd = reference.layer_norm(f64(x), f64(weight), f64(bias))
    make.check(out, truth)
    testing.assert_close(mean, true_mean, "float32")
    testing.assert_close(rstd, true_rstd, "float32")
    make.check(fk.layer_norm(x, **make.kwargs), reference.layer_norm(f64(x))[0])


def test_rms_norm(make):
    x, weight = make.normal(2, 3, 20), make.normal(20)
    out, rstd = fk.rms_norm(x, weight, return_stats=True, eps=1e-3, **make.kwargs)
    truth, true_rstd = reference.rms_norm(f64(x), f64(weight), eps=1e-3)
    make.check(out, truth)
    testing.assert_close(rstd, true_rstd, "float32")


def test_residual_in_place(make):
    x, residual, weight = make.normal(4, 20), make.normal(4, 20), make.normal(20)
    total = make.array(f64(x) + f64(residual))
    for norm in (fk.layer_norm, fk.rms_norm):
        truth = getattr(reference, norm.__name__)(f64(total), f64(weight))[0]
        out, h = norm(x, weight, residual=residual, **make.kwargs)
        np.testing.assert_array_equal(f64(h), f64(total))
        make.check(out, truth)
        x2, residual2 = make.array(f64(x)), make.array(f64(residual))
        out, h = norm(x2, weight, residual=residual2, out=x2, residual_out=residual2, **make.kwargs)
        assert out is x2 and h is residual2
        make.check(out, truth)
        np.testing.assert_array_equal(f64(h), f64(total))


def test_backward(make):
    x, weight, grad, extra = make.normal(5, 20), make.normal(20), make.normal(5, 20), make.normal(5, 20)
    _, mean, rstd = fk.layer_norm(x, weight, return_stats=True, **make.kwargs)
    grads = fk.layer_norm_backward(grad, x, weight, mean, rstd, grad_residual_out=extra, **make.kwargs)
    truth = reference.layer_norm_backward(
        f64(grad), f64(x), f64(weight), f64(mean), f64(rstd), grad_residual_out=f64(extra)
    )
    for name, ours, theirs in zip(("x", "weight", "bias"), grads, truth, strict=True):
        make.check(ours, theirs, what=f"grad_{name}")
    _, rstd = fk.rms_norm(x, weight, return_stats=True, **make.kwargs)
    grads = fk.rms_norm_backward(grad, x, weight, rstd, grad_residual_out=extra, **make.kwargs)
    truth = reference.rms_norm_backward(f64(grad), f64(x), f64(weight), f64(rstd), grad_residual_out=f64(extra))
    for name, ours, theirs in zip(("x", "weight"), grads, truth, strict=True):
        make.check(ours, theirs, what=f"grad_{name}")
    assert fk.rms_norm_backward(grad, x, None, rstd, **make.kwargs)[1] is None
    assert fk.layer_norm_backward(grad, x, weight, mean, rstd, need_weight=False, need_bias=False, **make.kwargs)[
        1:
    ] == (
        None,
        None,
    )


def test_a_large_mean_does_not_cancel():
    """Two passes: variance 1 around a mean of 10000 survives float32."""
    x = (np.random.default_rng(0).standard_normal((2, 256)) + 1e4).astype(np.float32)
    truth = reference.layer_norm(x)[0]
    theirs = torch.nn.functional.layer_norm(torch.from_numpy(x), (256,))
    # x itself has spacing 1e-3 there: torch errs by as much.
    testing.assert_close(fk.layer_norm(x), truth, "float32", baseline=theirs, scale=200.0)


@pytest.mark.parametrize("framework", ["torch", TRITON])
@given(st.integers(1, 9), st.integers(1, 300), st.sampled_from(DTYPES))
def test_any_shape(framework, rows, features, dtype):
    make = Maker(framework, dtype, features)
    x, weight = make.normal(rows, features + 3)[:, 3:], make.normal(features)
    truth = reference.layer_norm(f64(x), f64(weight))[0]
    theirs = torch.nn.functional.layer_norm(x, (features,), weight)
    ours = fk.layer_norm(x, weight, **make.kwargs)
    # One feature, or two that are nearly equal: both lose digits in x - mean, whatever the algorithm.
    room = max(1.0, 2e5 * testing.max_error(theirs, truth)) if dtype == "float32" else 2.0
    testing.assert_close(ours, truth, dtype, scale=room * max(1.0, np.abs(truth).max()))
    make.check(fk.rms_norm(x, weight, **make.kwargs), reference.rms_norm(f64(x), f64(weight))[0])
