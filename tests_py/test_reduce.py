"""Reductions, argmax, softmax and log_softmax with their gradients against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashkernel as fk
from conftest import DTYPES, TRITON, Maker, f64
from flashkernel import reference, testing

REDUCTIONS = ("reduce_sum", "reduce_mean", "reduce_max")


@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 2), (1, 0), (0, 1, 2)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_reductions(make, axis, keepdims):
    x = make.normal(3, 4, 5)
    for name in REDUCTIONS:
        ours = getattr(fk, name)(x, axis, keepdims=keepdims, **make.kwargs)
        make.check(ours, getattr(reference, name)(f64(x), axis, keepdims=keepdims), what=name)
    index = fk.argmax(x, axis, keepdims=keepdims, **make.kwargs)
    np.testing.assert_array_equal(f64(index), reference.argmax(f64(x), axis, keepdims=keepdims))
    assert "int64" in str(index.dtype)


def test_float32_out_of_half_inputs(make):
    x = make.normal(3, 40)
    out = make.array(np.zeros(3), "float32")
    assert fk.reduce_sum(x, 1, out=out, **make.kwargs) is out
    testing.assert_close(out, reference.reduce_sum(f64(x), 1), "float32")


def test_nan_inf_and_nothing(make):
    x = make.array([[1, np.nan, 3], [np.inf, -np.inf, 0], [-np.inf, -np.inf, -np.inf]])
    for name in ("reduce_sum", "reduce_max", "softmax", "log_softmax"):
        truth = getattr(reference, name)(f64(x), -1)
        make.check(getattr(fk, name)(x, -1, **make.kwargs), truth, what=name)
    np.testing.assert_array_equal(f64(fk.argmax(x, 1, **make.kwargs)), [1, 0, 0])
    empty = make.normal(2, 0)
    assert (f64(fk.reduce_sum(empty, 1, **make.kwargs)) == 0).all()
    assert np.isnan(f64(fk.reduce_mean(empty, 1, **make.kwargs))).all()
    for function in (fk.reduce_max, fk.argmax):
        with pytest.raises(ValueError, match=r"reduce_max|argmax"):
            function(empty, 1, **make.kwargs)
    assert fk.reduce_max(empty, 0, **make.kwargs).shape == (0,)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_softmax(make, name, axis):
    x = make.normal(3, 4, 5)
    ours = getattr(fk, name)(x, axis, **make.kwargs)
    make.check(ours, getattr(reference, name)(f64(x), axis))
    grad = make.normal(3, 4, 5)
    grad_x = getattr(fk, name + "_backward")(grad, ours, axis, **make.kwargs)
    make.check(grad_x, getattr(reference, name + "_backward")(f64(grad), f64(ours), axis))
    assert getattr(fk, name)(x, axis, out=x, **make.kwargs) is x
    np.testing.assert_array_equal(f64(x), f64(ours))


@pytest.mark.parametrize("framework", ["torch", TRITON])
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.data(),
    st.sampled_from(DTYPES),
)
def test_any_axes_and_strides(framework, shape, data, dtype):
    make = Maker(framework, dtype, sum(shape))
    order = data.draw(st.permutations(range(len(shape))))
    axes = tuple(data.draw(st.sets(st.sampled_from(range(len(shape))), min_size=1)))
    x = make.normal(*[shape[d] + 1 for d in order])[tuple(slice(1, None) for _ in order)].permute(*np.argsort(order))
    assert list(x.shape) == shape
    for name in REDUCTIONS:
        make.check(getattr(fk, name)(x, axes, **make.kwargs), getattr(reference, name)(f64(x), axes), what=name)
    np.testing.assert_array_equal(f64(fk.argmax(x, axes, **make.kwargs)), reference.argmax(f64(x), axes))
    make.check(fk.softmax(x, axes[0], **make.kwargs), reference.softmax(f64(x), axes[0]))


def test_sum_does_not_depend_on_threads():
    x = Maker("numpy", "float32").normal(100_003)
    threads, sums = fk.get_num_threads(), set()
    try:
        for count in (1, 2, 3, 5):
            fk.set_num_threads(count)
            sums.add(float(fk.reduce_sum(x)))
    finally:
        fk.set_num_threads(threads)
    assert len(sums) == 1
