"""Numbers far from 0, as masks and runaway logits have them: rows of finfo.min, -1e9, 1e6 against eager PyTorch.

A bias of -inf hides a key and no finite one does; what exp(x - LSE) cannot say where LSE is -3.4e38 is added up again.
Infinities in what a query sees against PyTorch's math backend.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashkernel as fk
from conftest import FRAMEWORKS, TORCH, TRITON, Maker, f64
from flashkernel import testing

LOWEST = torch.finfo(torch.float32).min
KERNELS = [kernel for kernel in ("scalar", "avx2", "avx512", "amx")]
# Which kernels run: every framework's own choice, and each kernel of the CPU that this machine has.
PLACES = [*FRAMEWORKS, *(pytest.param(f"cpu/{name}", id=f"cpu-{name}") for name in KERNELS)]
INFINITY = float("inf")


def maker(place: str, dtype: str, op: str) -> Maker:
    """A Maker, with the kernel forced that `place` names; undone by the fixture below."""
    if not isinstance(place, str) or not place.startswith("cpu/"):
        return Maker(place, dtype)
    name = f"{op}/{place}"
    if not any(kernel.id == name and kernel.available for kernel in fk.kernels()):
        pytest.skip(f"no {name} on this machine")
    fk.force_kernels(name)
    return Maker("torch", dtype)


@pytest.fixture(autouse=True)
def forced():
    before = fk.forced_kernels()
    yield
    fk.force_kernels(before)


def bias_of_masks(queries: int, keys: int, dtype: str) -> np.ndarray:
    """[queries, keys]: rows that only finite numbers hide, beside others."""
    lowest = float(torch.finfo(TORCH[dtype]).min)
    bias = np.zeros((queries, keys))
    bias[0::8] = lowest
    bias[1::8] = lowest
    bias[1::8, ::3] = -INFINITY
    bias[2::8] = max(lowest, -2.4e38)
    bias[3::8] = -INFINITY
    bias[4::8] = lowest
    bias[4::8, 2] = 0
    bias[5::8] = max(lowest, -1e9)
    bias[6::8, 1::2] = -lowest
    return bias


def eager(q, k, v, bias, grad=None):
    """(out, gradients of q, k, v, bias) in fp32 by PyTorch's own operations; rows of -inf give 0."""
    inputs = [torch.from_numpy(f64(x)).float().requires_grad_() for x in (q, k, v, bias)]
    q, k, v, bias = inputs
    score = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
    hidden = (score == -INFINITY).all(-1, keepdim=True)
    out = torch.softmax(torch.where(hidden, 0.0, score), -1).masked_fill(hidden, 0.0) @ v
    if grad is None:
        return out.detach()
    return out.detach(), torch.autograd.grad(out, inputs, torch.from_numpy(f64(grad)).float())


@pytest.mark.parametrize("bias_dtype", ["float32", "same"])
@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("queries, keys, dim", [(1, 40, 32), (17, 45, 64), (40, 300, 64)])
def test_rows_hidden_by_finite_numbers(place, dtype, bias_dtype, queries, keys, dim):
    make = maker(place, dtype, "attention_fwd")
    if place == "triton" and not make.on_gpu and keys > 100:
        pytest.skip("the same tiles again, slowly")
    q, k, v = make.normal(2, 2, queries, dim), make.normal(2, 2, keys, dim), make.normal(2, 2, keys, dim)
    kind = dtype if bias_dtype == "same" else bias_dtype
    bias = make.array(bias_of_masks(queries, keys, kind), kind)
    out, lse = fk.attention(q, k, v, bias=bias, return_lse=True, **make.kwargs)
    scale = 8.0 if kind == "float16" else 1.0  # scores of -65504 are multiples of 2^-8
    make.check(out, eager(q, k, v, bias), scale=scale)
    assert np.isneginf(f64(lse)[:, :, 3::8]).all()
    assert np.isfinite(np.delete(f64(lse), np.s_[3::8], 2)).all()


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("of_padding", [False, True])
def test_gradients_of_rows_hidden_by_finite_numbers(place, dtype, of_padding):
    make = maker(place, dtype, "attention_bwd")
    q, k, v = (make.normal(1, 2, 24, 32) for _ in range(3))
    bias = make.array(bias_of_masks(24, 24, "float32"), "float32")
    values = make.rng.standard_normal((1, 2, 24, 32))
    if of_padding:
        values[:, :, np.arange(24) % 8 < 7] = 0
    grad = make.array(values)
    out, lse = fk.attention(q, k, v, bias=bias, return_lse=True, **make.kwargs)
    grads = fk.attention_backward(grad, q, k, v, out, lse, bias=bias, need_bias=True, **make.kwargs)
    for ours, truth in zip(grads[:3], eager(q, k, v, bias, grad)[1][:3], strict=True):
        make.check(ours, truth, scale=4.0)
    hidden = np.isneginf(f64(bias))
    error = np.abs(f64(grads[3]) - np.where(hidden, 0, f64(eager(q, k, v, bias, grad)[1][3])))
    assert error.max() < (1e-5 if dtype == "float32" else 0.05)


@pytest.mark.parametrize("value", [INFINITY, -INFINITY])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("place", PLACES)
def test_an_infinity_that_is_seen(place, dtype, where, value):
    make = maker(place, dtype, "attention_fwd")
    arrays = {name: make.rng.standard_normal((1, 1, 20, 32)) for name in "qkv"}
    arrays[where][0, 0, 7, 3] = value
    q, k, v = (make.array(arrays[name]) for name in "qkv")
    out = f64(fk.attention(q, k, v, **make.kwargs))
    with sdpa_kernel(SDPBackend.MATH):
        truth = f64(torch.nn.functional.scaled_dot_product_attention(*(torch.from_numpy(f64(x)) for x in (q, k, v))))
    assert np.array_equal(np.isnan(out), np.isnan(truth))
    assert np.array_equal(np.isinf(out), np.isinf(truth))
    finite = np.isfinite(truth)
    assert np.abs(out[finite] - truth[finite]).max(initial=0.0) < (1e-5 if dtype == "float32" else 0.02)


@pytest.mark.parametrize("value", [LOWEST, -2.4e38, -1e9, 1e6, -LOWEST])
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_softmax_of_rows_far_from_0(framework, op, value):
    make = Maker(framework, "float32")
    for columns in (3, 100, 5000):
        x = make.array(np.full((3, columns), value))
        truth = torch.full((3, columns), 1 / columns, dtype=torch.float64)
        make.check(getattr(fk, op)(x, **make.kwargs), truth if op == "softmax" else truth.log())


@pytest.mark.parametrize("value", [LOWEST, -2.4e38, -1e9, 1e6, -LOWEST])
@pytest.mark.parametrize("smoothing", [None, 0.0, 0.1], ids=["log_prob", "loss", "smoothed"])
@pytest.mark.parametrize("place", [place for place in PLACES if place is not TRITON and place is not PLACES[-1]])
def test_losses_of_an_output_layer_far_from_0(place, smoothing, value):
    """Products and the bias are exact in fp32, so that the logits are PyTorch's. Classes fill two chunks of the CPU.
    Neither Triton nor AMX has kernels of their own for them.
    """
    make = maker(place, "float32", "linear_cross_entropy_bwd")
    x, weight = make.rng.integers(-1, 2, (6, 16)), make.rng.integers(-2, 3, (1300, 16)) / 4
    bias, targets = np.full(1300, value), np.array([3, 1, 1299, 7, -100, 6])
    if not smoothing:
        bias[::5] = -INFINITY  # classes that cannot be, which smoothing would give a share
    inputs = [torch.from_numpy(array).float().requires_grad_() for array in (x, weight, bias)]
    logits, wanted = torch.nn.functional.linear(*inputs), torch.from_numpy(targets)
    truth = torch.nn.functional.cross_entropy(logits, wanted, reduction="none", label_smoothing=smoothing or 0.0)
    if smoothing is None:
        name, truth, options = "linear_selected_log_prob", -truth, make.kwargs
    else:
        name, options = "linear_cross_entropy", {**make.kwargs, "reduction": "none", "label_smoothing": smoothing}
    x, weight, bias, ones = (make.array(array, "float32") for array in (x, weight, bias, np.ones(6)))
    targets = make.index(targets)
    losses, lse = getattr(fk, name)(x, weight, targets, bias, return_lse=True, **options)
    assert np.allclose(f64(losses), f64(truth), rtol=1e-6, atol=1e-5)
    found = getattr(fk, f"{name}_backward")(ones, x, weight, targets, lse, bias, **options)
    for ours, theirs in zip(found, torch.autograd.grad(truth.sum(), inputs), strict=True):
        assert np.abs(f64(ours) - f64(theirs)).max() < 1e-4


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("value", [LOWEST, -2.4e38, -1e9, 1e6])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_cross_entropy_of_rows_far_from_0(framework, value, smoothing):
    make = Maker(framework, "float32")
    classes = 100
    logits, targets = make.array(np.full((4, classes), value)), make.index(np.arange(4))
    options = {"reduction": "none", "label_smoothing": smoothing, **make.kwargs}
    loss, lse = fk.cross_entropy(logits, targets, return_lse=True, **options)
    assert np.abs(f64(loss) - np.log(classes)).max() < 1e-5
    grad = fk.cross_entropy_backward(make.array(np.ones(4), "float32"), logits, targets, lse, **options)
    wanted = np.full((4, classes), (1 - smoothing) / classes)
    wanted[np.arange(4), np.arange(4)] -= 1 - smoothing
    testing.assert_close(grad, wanted, "float32")


@pytest.mark.parametrize("value", [LOWEST, -1e9])
@pytest.mark.parametrize("place", [0, 57])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_smoothed_loss_of_rows_with_one_number_far_from_0(framework, place, value):
    """The mean of the logits, whichever of them is the far one."""
    make = Maker(framework, "float32")
    values = make.rng.standard_normal((2, 100))
    values[0, place] = value
    values[1] += 5000
    logits, targets = make.array(values), make.index([3, 3])
    loss = fk.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1, **make.kwargs)
    truth = torch.nn.functional.cross_entropy(
        torch.from_numpy(f64(logits)), torch.tensor([3, 3]), reduction="none", label_smoothing=0.1
    )
    np.testing.assert_allclose(f64(loss), truth.numpy(), rtol=1e-5)
