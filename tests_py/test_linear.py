"""linear and linear_backward against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashkernel as fk
from conftest import DTYPES, TRITON, Maker, f64
from flashkernel import reference, testing

ACTIVATIONS = [None, "gelu", "gelu_tanh", "silu"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear(make, activation):
    x, weight, bias = make.normal(2, 3, 24), make.array(make.rng.standard_normal((10, 24)) / 5), make.normal(10)
    out, pre = fk.linear(x, weight, bias, activation=activation, return_preactivation=True, **make.kwargs)
    truth, true_pre = reference.linear(f64(x), f64(weight), f64(bias), activation=activation)
    make.check(out, truth)
    make.check(pre, true_pre)
    wide_bias = make.array(f64(bias), "float32")
    make.check(fk.linear(x, weight, wide_bias, activation=activation, **make.kwargs), truth)
    make.check(fk.linear(x, weight, **make.kwargs), reference.linear(f64(x), f64(weight))[0])


def test_transposed_weight_and_out(make):
    """GPT-2's [in, out] weight as a view, rows of x with gaps, and an `out` with gaps."""
    x, weight = make.normal(6, 40), make.array(make.rng.standard_normal((24, 10)) / 5)
    storage = make.array(np.full((3, 20), np.nan))
    out = storage[:, :10]
    assert fk.linear(x[::2, 8:32], weight.T, out=out, **make.kwargs) is out
    make.check(out, reference.linear(f64(x)[::2, 8:32], f64(weight).T)[0])
    assert np.isnan(f64(storage)[:, 10:]).all()


def test_empty(make):
    weight, bias = make.normal(4, 3), make.normal(4)
    assert fk.linear(make.normal(0, 3), weight, **make.kwargs).shape == (0, 4)
    out = fk.linear(make.normal(2, 0), make.normal(4, 0), bias, **make.kwargs)
    np.testing.assert_array_equal(f64(out), np.broadcast_to(f64(bias), (2, 4)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_backward(make, activation):
    x, weight, grad = make.normal(2, 3, 24), make.array(make.rng.standard_normal((10, 24)) / 5), make.normal(2, 3, 10)
    _, pre = fk.linear(x, weight, activation=activation, return_preactivation=True, **make.kwargs)
    grads = fk.linear_backward(grad, x, weight, pre, activation=activation, **make.kwargs)
    truth = reference.linear_backward(f64(grad), f64(x), f64(weight), f64(pre), activation=activation)
    for name, ours, theirs in zip(("x", "weight", "bias"), grads, truth, strict=True):
        make.check(ours, theirs, what=f"grad_{name}")
    some = fk.linear_backward(grad, x, weight, pre, activation=activation, need_x=False, need_bias=False, **make.kwargs)
    assert some[0] is None and some[2] is None
    np.testing.assert_array_equal(f64(some[1]), f64(grads[1]))


@pytest.mark.parametrize("framework", ["torch", TRITON])
@given(
    st.integers(1, 70), st.integers(1, 150), st.integers(1, 90), st.sampled_from(DTYPES), st.sampled_from(ACTIVATIONS)
)
def test_any_shape(framework, rows, features, out_features, dtype, activation):
    make = Maker(framework, dtype, rows)
    x, weight = (
        make.normal(rows, features),
        make.array(make.rng.standard_normal((out_features, features)) / features**0.5),
    )
    bias = make.normal(out_features)
    out = fk.linear(x, weight, bias, activation=activation, **make.kwargs)
    make.check(out, reference.linear(f64(x), f64(weight), f64(bias), activation=activation)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_worse_than_twice_torch(dtype):
    make = Maker("torch", dtype)
    x, weight, bias = make.normal(33, 256), make.array(make.rng.standard_normal((64, 256)) / 16), make.normal(64)
    theirs = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias), approximate="tanh")
    truth, _ = reference.linear(f64(x), f64(weight), f64(bias), activation="gelu_tanh")
    testing.assert_close(fk.linear(x, weight, bias, activation="gelu_tanh"), truth, dtype, baseline=theirs)
