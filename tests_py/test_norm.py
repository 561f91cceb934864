"""layer_norm and rms_norm with residual, statistics and gradients against the oracle."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashkernel as fk
import flashkernel.torch as fkt
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


def test_weight_offset_and_other_dtypes_of_weights(make):
    """Weights that are stored less 1 (Gemma), in a 16-bit dtype that the rows may not have."""
    x, weight, bias, grad = make.normal(4, 40), make.normal(40), make.normal(40), make.normal(4, 40)
    if make.framework != "numpy":  # NumPy has no bfloat16
        weight, bias = make.array(f64(weight), "bfloat16"), make.array(f64(bias), "float16")
    w, b, options = f64(weight), f64(bias), {**make.kwargs, "weight_offset": 1.0}
    out, mean, rstd = fk.layer_norm(x, weight, bias, return_stats=True, **options)
    make.check(out, reference.layer_norm(f64(x), w + 1, b)[0])
    make.check(out, reference.layer_norm(f64(x), w, b, weight_offset=1.0)[0])
    grads = fk.layer_norm_backward(grad, x, weight, mean, rstd, **options)
    truth = reference.layer_norm_backward(f64(grad), f64(x), w, f64(mean), f64(rstd), weight_offset=1.0)
    assert str(grads[1].dtype) == str(weight.dtype)
    for name, ours, theirs in zip(("x", "weight", "bias"), grads, truth, strict=True):
        testing.assert_close(ours, theirs, "bfloat16" if name != "x" else make.dtype, what=f"grad_{name}", scale=8.0)
    out, h, rstd = fk.rms_norm(x, weight, residual=grad, return_stats=True, **options)
    make.check(out, reference.rms_norm(f64(h), w + 1)[0])
    grad_x, grad_weight = fk.rms_norm_backward(grad, h, weight, rstd, **options)
    truth = reference.rms_norm_backward(f64(grad), f64(h), w + 1, f64(rstd))
    make.check(grad_x, truth[0])
    testing.assert_close(grad_weight, truth[1], "bfloat16", scale=8.0)


@pytest.mark.parametrize("to", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("features", [50, 1024])
def test_quantized(dtype, to, features):
    """Elements in 8 bits: a scale a row or one for all, with residual; a step apart at most."""
    make = Maker("torch", dtype)
    x, residual, weight, bias = (
        make.normal(3, 4, features),
        make.normal(3, 4, features),
        *(make.normal(features) for _ in range(2)),
    )

    def check(elements, scales, truth):
        numbers, true_scales = truth
        assert str(elements.dtype) == f"torch.{to}" and elements.shape == x.shape
        np.testing.assert_allclose(f64(scales), true_scales, rtol=1e-5)
        step = 1.0 if to == "int8" else np.maximum(2.0**-9, np.exp2(np.floor(np.log2(np.abs(numbers) + 1e-9)) - 3))
        off = np.abs(f64(elements.float()) - numbers)
        assert (off <= step * 1.001).all() and (off > 0).mean() < 0.01

    check(
        *fk.rms_norm_quantized(x, weight, out_dtype=to), reference.rms_norm_quantized(f64(x), f64(weight), out_dtype=to)
    )
    out, h = torch.zeros(3, 4, features, dtype=getattr(torch, to)), make.array(np.zeros(x.shape))
    scales = torch.zeros(3, 4)
    result = fk.layer_norm_quantized(
        x, weight, bias, out_dtype=to, weight_offset=1.0, residual=residual, out=out, scales=scales, residual_out=h
    )
    assert result[0] is out and result[1] is scales and result[2] is h
    np.testing.assert_array_equal(f64(h), f64(make.array(f64(x) + f64(residual))))
    truth = reference.layer_norm_quantized(f64(h), f64(weight) + 1, f64(bias), out_dtype=to)
    check(out, scales, truth)
    for scale in (torch.tensor(0.01), torch.tensor([10.0])):
        elements, given = fk.rms_norm_quantized(x, weight, out_dtype=to, scale=scale)
        assert given is scale
        check(elements, scale, reference.rms_norm_quantized(f64(x), f64(weight), out_dtype=to, scale=f64(scale)))


def test_quantized_numpy_and_refusals():
    x = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    elements, scales = fk.rms_norm_quantized(x)
    assert elements.dtype == np.uint8 and scales.shape == (3,)
    np.testing.assert_array_equal(
        torch.from_numpy(elements).view(torch.float8_e4m3fn).double().numpy(), reference.rms_norm_quantized(x)[0]
    )
    one = np.float32([0.5])
    for message, options in {
        "out_dtype='float16'; 'float8_e4m3fn' or 'int8' is needed": {"out_dtype": "float16"},
        "scales with scale": {"scale": one, "scales": np.zeros(3, np.float32)},
        "scale has 2 numbers; needs one": {"scale": np.float32([1, 2])},
        "residual_out without residual": {"residual_out": x},
        "out is int8 but out_dtype is float8_e4m3fn": {"out": np.zeros((3, 20), np.int8)},
        "scales.shape": {"scales": np.zeros(4, np.float32)},
    }.items():
        with pytest.raises(ValueError, match=f"^rms_norm_quantized: {re.escape(message)}"):
            fk.rms_norm_quantized(x, **options)
    with pytest.raises(NotImplementedError, match=r"^rms_norm_quantized: an argument requires a gradient"):
        fkt.rms_norm_quantized(torch.ones(2, 4, requires_grad=True))


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
