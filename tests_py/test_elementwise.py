"""add, swiglu and its gradient against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashkernel as fk
from conftest import DTYPES, TRITON, Maker, f64
from flashkernel import reference


def test_values_and_aliasing(make):
    a, b, grad = make.normal(3, 50), make.normal(3, 50), make.normal(3, 50)
    make.check(fk.add(a, b, **make.kwargs), reference.add(f64(a), f64(b)))
    make.check(fk.swiglu(a, b, **make.kwargs), reference.swiglu(f64(a), f64(b)))
    ours = fk.swiglu_backward(grad, a, b, **make.kwargs)
    for mine, truth in zip(ours, reference.swiglu_backward(f64(grad), f64(a), f64(b)), strict=True):
        make.check(mine, truth)
    for function in (fk.add, fk.swiglu):
        truth = f64(function(a, b, **make.kwargs))
        for position in (0, 1):
            arguments = [make.array(f64(a)), make.array(f64(b))]
            out = arguments[position]
            assert function(*arguments, out=out, **make.kwargs) is out
            np.testing.assert_array_equal(f64(out), truth)


def test_extremes(make):
    gate = make.array([1e4, -1e4, np.inf, -np.inf, np.nan, 0.0])
    up = make.array([1.0, 1.0, 1.0, 1.0, 1.0, 5.0])
    out = f64(fk.swiglu(gate, up, **make.kwargs))
    assert out[0] == f64(gate)[0] and out[1] == 0 and out[2] == np.inf and np.isnan(out[4]) and out[5] == 0


@pytest.mark.parametrize("framework", ["torch", TRITON])
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.data(), st.sampled_from(DTYPES))
def test_any_strides(framework, shape, data, dtype):
    make = Maker(framework, dtype)
    order = data.draw(st.permutations(range(len(shape))))
    a, b = make.normal(*shape), make.normal(*[shape[d] for d in order]).permute(*np.argsort(order))
    make.check(fk.add(a, b, **make.kwargs), reference.add(f64(a), f64(b)))
