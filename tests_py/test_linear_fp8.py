"""linear_fp8 and quantize_fp8_blocks against the oracle and torch's float8; refusals; gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flashkernel as fk
import flashkernel.torch as fkt
from conftest import TORCH, f64
from flashkernel import reference
from flashkernel.quantized import from_fp8

F8 = torch.float8_e4m3fn


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32))


def scales(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.linspace(0.01, 0.03, int(np.prod(shape)), dtype=np.float32).reshape(shape))


FORMS = {  # of x [5, 300] and of the weight [200, 300]
    "blocks": ((5, 3), (2, 3)),
    "blocks of rows": ((5, 3), (200, 3)),
    "rows": ((5, 1), (200, 1)),
    "rows in a vector": ((5, 1), (200,)),
    "numbers": ((), (1,)),
}


@pytest.mark.parametrize("out_dtype", TORCH)
@pytest.mark.parametrize("form", FORMS)
def test_against_the_oracle(form: str, out_dtype: str) -> None:
    x, weight = (40 * numbers(5, 300)).to(F8), (20 * numbers(200, 300, seed=1)).to(F8)
    x_scale, weight_scale = (scales(*shape) for shape in FORMS[form])
    bias = numbers(200)
    truth = reference.linear_fp8(f64(x.float()), f64(weight.float()), x_scale, weight_scale, bias, activation="silu")
    out = fk.linear_fp8(x, weight, x_scale, weight_scale, bias, activation="silu", out_dtype=out_dtype)
    assert out.dtype == TORCH[out_dtype] and out.shape == (5, 200)
    tolerance = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[out_dtype]
    assert np.abs(f64(out) - truth).max() <= tolerance * np.abs(truth).max()
    bits = [part.view(torch.uint8).numpy() for part in (x, weight)]  # NumPy has bytes
    mine = fk.linear_fp8(
        *bits, x_scale.numpy(), weight_scale.numpy(), bias.numpy(), activation="silu", out_dtype="float32"
    )
    assert np.abs(mine - truth).max() <= 1e-5 * np.abs(truth).max()
    np.testing.assert_array_equal(reference.ops.float8_numbers(bits[1]), f64(weight.float()))


@pytest.mark.parametrize("dtype", TORCH)
def test_x_of_more_bits_is_rounded_on_the_way(dtype: str) -> None:
    x, weight, scale = numbers(2, 7, 260).to(TORCH[dtype]), (20 * numbers(130, 260)).to(F8), scales(2, 3)
    elements, x_scale = fk.quantize_fp8_blocks(x)
    expected = fk.linear_fp8(elements, weight, x_scale, scale, out_dtype=dtype)
    assert torch.equal(fk.linear_fp8(x, weight, None, scale), expected) and expected.dtype == x.dtype
    turned = x.transpose(0, 1)
    assert torch.equal(fk.linear_fp8(turned, weight, None, scale), expected.transpose(0, 1))


@pytest.mark.parametrize("dtype", TORCH)
def test_quantised_blocks_are_torchs(dtype: str) -> None:
    x = numbers(3, 5, 256).to(TORCH[dtype])
    x[0, 1, 3], x[1, 0, 200], x[2, 2, :128] = float("inf"), float("nan"), 0
    elements, got = fk.quantize_fp8_blocks(x)
    blocks = x.float().unflatten(-1, (2, 128))
    largest = blocks.abs().nan_to_num(0, torch.finfo(torch.float32).max).amax(-1)
    scale = (largest / 448).clamp_min(2.0**-100)
    assert torch.equal(got, scale)
    expected = (blocks * (1 / scale)[..., None]).clamp(-448, 448).flatten(-2).to(F8)
    assert torch.equal(elements.view(torch.uint8) & 127, expected.view(torch.uint8) & 127)
    columns = torch.empty(2, 5, 3).permute(2, 1, 0)  # rows side by side
    assert fk.quantize_fp8_blocks(x, scales=columns)[1] is columns and torch.equal(columns, scale)


def test_refusals() -> None:
    x, weight, x_scale, scale = numbers(4, 256).to(F8), numbers(8, 256).to(F8), scales(4, 2), scales(1, 2)
    for arguments, message in (
        ((x, weight, None, scale), "x_scale is absent"),
        ((x.float(), weight, x_scale, scale), "x_scale beside x in float32"),
        ((x, weight, scales(4, 3), scale), "x_scale has last dim 3"),
        ((x, weight, scales(3, 2), scale), r"x_scale.shape\[0\]=3"),
        ((x, weight, x_scale, scales(2, 2)), "weight_scale is 2 x 2"),
        ((x, weight, x_scale, scale.double()), "weight_scale"),
        ((x, weight.float(), x_scale, scale), "weight is float32"),
        ((x, weight[:, :128], x_scale, scale), r"weight.shape\[1\]=128"),
    ):
        with pytest.raises(ValueError, match=f"^linear_fp8: {message}"):
            fk.linear_fp8(*arguments)
    with pytest.raises(ValueError, match=r"^linear_fp8: out_dtype is float16 but out is float32"):
        fk.linear_fp8(x, weight, x_scale, scale, out=torch.empty(4, 8), out_dtype="float16")
    with pytest.raises(ValueError, match=r"^quantize_fp8_blocks: scales.shape\[1\]=3"):
        fk.quantize_fp8_blocks(numbers(4, 256), scales=torch.empty(4, 3))
    with pytest.raises(ValueError, match=r"^quantize_fp8_blocks: out "):
        fk.quantize_fp8_blocks(numbers(4, 256), out=torch.empty(4, 256))


@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
def test_gradients(activation: str | None) -> None:
    """Those of linear with the dequantised weight; x counts as if it were not rounded."""
    weight, scale = (20 * numbers(130, 260)).to(F8), scales(2, 3)
    wide = torch.from_numpy(from_fp8(weight, scale))
    grad, results = numbers(5, 130, seed=2), []
    for dense in (False, True):
        # Whole numbers up to 7, which is in each block: 1 becomes 64, and nothing is lost by 8 bits.
        x = (numbers(5, 260) * 3).round().clamp(-7, 7)
        x[:, ::128] = 7
        x, bias = x.requires_grad_(), numbers(130).requires_grad_()
        out = (
            fkt.linear(x, wide, bias, activation=activation)
            if dense
            else fkt.linear_fp8(x, weight, None, scale, bias, activation=activation)
        )
        out.backward(grad)
        results.append((x.grad, bias.grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_gradients_that_there_are_not_and_compile() -> None:
    x, weight, scale = numbers(2, 128), numbers(3, 128).to(F8), scales(1, 1)
    with pytest.raises(NotImplementedError, match=r"^linear_fp8: weight_scale requires a gradient"):
        fkt.linear_fp8(x, weight, None, scale.clone().requires_grad_())
    with pytest.raises(NotImplementedError, match=r"^linear_fp8: x in float8_e4m3fn requires a gradient"):
        fkt.linear_fp8(x.to(F8).requires_grad_(), weight, scales(2, 1), scale)
    call = lambda x: fkt.linear_fp8(*fkt.quantize_fp8_blocks(x * 1)[:1], weight, fkt.quantize_fp8_blocks(x)[1], scale)
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x))
