"""quantized_linear against the oracle and linear; other layouts read; refusals; GGUF models that stay quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashkernel as fk
from flashkernel import reference
from flashkernel.generate import Engine, load_model
from flashkernel.generate.arrays import TorchArrays
from flashkernel.generate.errors import UnsupportedModelError
from flashkernel.generate.gguf_checkpoint import GgufCheckpoint
from flashkernel.generate.model import build_model
from flashkernel.quantized import FORMATS, QuantizedWeight, dequantize, from_awq, from_gptq, quantize, tiled, untiled


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def gguf(format: str, rows: int = 70, columns: int = 160) -> QuantizedWeight:
    """Random blocks of a GGUF type."""
    rng = np.random.default_rng(3)
    head, size = FORMATS[format]
    blocks = rng.integers(0, 256, (rows, columns // 32, head + size), dtype=np.uint8)
    heads = (rng.standard_normal((rows, columns // 32, head // 2)) / 16).astype(np.float16)
    blocks[..., :head] = heads.view(np.uint8)
    return QuantizedWeight(blocks.reshape(rows, -1), None, None, format)


WEIGHTS = {
    **{name: gguf(name) for name in ("q4_0", "q4_1", "q8_0")},
    "int4, 32": quantize(numbers(70, 160)),
    "int4, zeros": quantize(numbers(70, 256), group_size=64, symmetric=False, dtype=np.float16),
    "int8, row": quantize(numbers(70, 101), "int8"),
    "int8, zeros": quantize(numbers(70, 256), "int8", group_size=128, symmetric=False, dtype=np.float16),
}


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 40])
@pytest.mark.parametrize("name", WEIGHTS)
def test_values(name: str, rows: int) -> None:
    weight = WEIGHTS[name]
    x, bias = numbers(2, rows, weight.shape[1]), numbers(70)
    got = fk.quantized_linear(
        x, weight.weight, weight.scales, weight.zeros, bias, format=weight.format, activation="silu"
    )
    expected = reference.quantized_linear(
        x, weight.weight, weight.scales, weight.zeros, bias, format=weight.format, activation="silu"
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(
        reference.linear(x, dequantize(weight), bias, activation="silu")[0], expected, rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 64])
@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q8_0", "int4, zeros", "int8, zeros"])
@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_bits_are_those_of_the_dequantised_weight(name: str, rows: int, isa: str) -> None:
    if not any(kernel.id == f"linear/cpu/{isa}" and kernel.available for kernel in fk.kernels()):
        pytest.skip(f"this build or processor has no {isa}")
    weight = WEIGHTS[name]
    x = numbers(rows, weight.shape[1])
    with fk.force(f"quantized_linear/cpu/{isa}"):
        got = weight.linear(x)
    with fk.force(f"linear/cpu/{isa}"):
        expected = fk.linear(x, dequantize(weight))
    np.testing.assert_array_equal(got, expected)


TILED = {name: tiled(gguf(name, 80)) for name in ("q4_0", "q4_1", "q8_0")}


@pytest.mark.parametrize("rows", [1, 5, 13, 40])
@pytest.mark.parametrize("name", TILED)
def test_tiles(name: str, rows: int) -> None:
    """Blocks of 16 rows side by side are the same numbers, to fp32's own error."""
    weight, plain = TILED[name], gguf(name, 80)
    np.testing.assert_array_equal(untiled(weight).weight, plain.weight)
    np.testing.assert_array_equal(dequantize(weight), dequantize(plain))
    x, bias = numbers(rows, 160), numbers(80)
    exact = reference.quantized_linear(x, plain.weight, bias=bias, format=name)
    np.testing.assert_array_equal(reference.quantized_linear(x, weight.weight, bias=bias, format=name), exact)
    error = np.abs(weight.linear(x, bias) - exact).max()
    assert error <= 2 * np.abs(plain.linear(x, bias) - exact).max() + 2e-7 * np.abs(exact).max()


def test_what_a_row_gives_over_tiles_depends_on_that_row_alone() -> None:
    x = numbers(5, 160)
    x[2, 7] = np.inf  # its row goes another way
    x[4] *= 1e-30
    for weight in TILED.values():
        with np.errstate(invalid="ignore"):
            together = weight.linear(x)
        np.testing.assert_array_equal(together, np.concatenate([weight.linear(row[None]) for row in x]))


def test_what_has_no_tiles_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^tiled: format='int4'"):
        tiled(WEIGHTS["int4, 32"])
    with pytest.raises(ValueError, match=r"^tiled: format='q8_0', weight \[70, 170\]"):
        tiled(WEIGHTS["q8_0"])
    with pytest.raises(ValueError, match=r"^QuantizedWeight: rows of a tiled weight"):
        TILED["q8_0"][:16]
    x, tiles = np.ones((2, 160), np.float32), TILED["q8_0"].weight
    with pytest.raises(ValueError, match=r"^quantized_linear: weight of 3 dims with format=int4"):
        fk.quantized_linear(x, tiles, np.ones((80, 5), np.float32))
    with pytest.raises(ValueError, match=r"^quantized_linear: weight.shape\[1\]=4"):
        fk.quantized_linear(x, tiles[:, :4], format="q8_0")
    with pytest.raises(ValueError, match=r"^quantized_linear: weight.strides\[1\]="):
        fk.quantized_linear(x, np.repeat(tiles, 2, axis=1)[:, ::2], format="q8_0")


def test_rows_of_a_weight() -> None:
    weight = WEIGHTS["int4, zeros"]
    np.testing.assert_array_equal(dequantize(weight[7:20]), dequantize(weight)[7:20])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("format", "bound"), [("int4", 0.51), ("int8", 0.51)])
def test_quantize_rounds_to_the_nearest_step(format: str, bound: float, symmetric: bool) -> None:
    values = numbers(9, 128) + 0.3
    weight = quantize(values, format, group_size=64, symmetric=symmetric)
    # The largest of a symmetric group of 4 bits may lie half a step beyond the last one.
    steps = np.repeat(weight.scales, 64, axis=1)
    assert np.all(np.abs(dequantize(weight) - values) <= bound * steps)


def words(q: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """Numbers of 4 bits [n, 8 m] as int32 [n, m]: number i of a word in the bits from 4 * order[i] on."""
    parts = q.reshape(q.shape[0], -1, 8).astype(np.uint32)
    return sum(parts[..., i] << np.uint32(4 * order[i]) for i in range(8)).astype(np.uint32).view(np.int32)


def layer() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q [in, out], zeros and scales [groups, out], and the weight [out, in] that they are."""
    rng = np.random.default_rng(1)
    q, zeros = rng.integers(0, 16, (128, 24)), rng.integers(1, 16, (2, 24))
    scales = (rng.random((2, 24)) + 0.1).astype(np.float16)
    groups = np.arange(128) // 64
    return q, zeros, scales, ((q - zeros[groups]) * scales.astype(np.float32)[groups]).T


def test_gptq() -> None:
    q, zeros, scales, expected = layer()
    plain = tuple(range(8))
    qweight = np.ascontiguousarray(words(np.ascontiguousarray(q.T), plain).T)  # words run along the inputs
    index = (np.arange(128) // 64).astype(np.int32)
    weight = from_gptq(qweight, words(zeros - 1, plain), scales, index)
    np.testing.assert_array_equal(dequantize(weight), expected)
    weight = from_gptq(qweight, words(zeros, plain), scales, zero_offset=0)
    np.testing.assert_array_equal(dequantize(weight), expected)
    with pytest.raises(ValueError, match="act-order"):
        from_gptq(qweight, words(zeros - 1, plain), scales, index[::-1])


def test_awq() -> None:
    q, zeros, scales, expected = layer()
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    np.testing.assert_array_equal(dequantize(from_awq(words(q, order), words(zeros, order), scales)), expected)


def test_refusals() -> None:
    x, packed, scales = np.ones((2, 64), np.float32), np.ones((3, 32), np.uint8), np.ones((3, 2), np.float32)
    cases = [
        (dict(weight=packed, format="q5_0"), r"format='q5_0'; 'int4', "),
        (dict(weight=packed), r"scales is absent; format=int4 needs one for each group"),
        (dict(weight=packed[:, :31], scales=scales), r"weight.shape\[1\]=31"),
        (dict(weight=packed.view(np.int8), scales=scales), r"weight is int8"),
        (dict(weight=packed, scales=np.ones((3, 4), np.float32)), r"scales.shape\[1\]=4 groups of in_features=64; "),
        (dict(weight=packed, scales=scales, zeros=np.ones((3, 2), np.float16)), r"zeros is float16"),
        (dict(weight=np.ones((3, 36), np.uint8), scales=scales, format="q4_0"), r"scales beside format=q4_0"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=f"^quantized_linear: {message}"):
            fk.quantized_linear(x, **arguments)
    with pytest.raises(ValueError, match=r"^quantized_linear: x has last dim 63"):
        fk.quantized_linear(np.ones((2, 63), np.float32), packed, scales)


# --- models


def file_of(kind: str, path: Path, **sizes: int) -> Path:
    pytest.importorskip("gguf")
    import gguf_files

    written: Path = gguf_files.decoder(kind, **sizes).write(path / "model.gguf")
    return written


def tokens_of(path: Path, weights: str | None, dtype: str = "float32") -> list[int]:
    return tokens_from(load_model(path, device="cpu", dtype=dtype, weights=weights))


def tokens_from(model: Any) -> list[int]:
    prompt = [1, 50, 90, 33, 7, 200, 12, 15, 9, 3, 77]  # more rows than a decode step has
    events = Engine(model, page_size=16).generate([prompt], max_new_tokens=24, stop_tokens=frozenset())
    return [event.token for event in events]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_tokens_of_a_model_in_blocks(kind: str, tmp_path: Path) -> None:
    path = file_of(kind, tmp_path, hidden=256, inner=256, heads=8)
    model = load_model(path, device="cpu")
    assert isinstance(model.layers[0].qkv_weight, QuantizedWeight)
    assert model.layers[0].qkv_weight.format == kind.lower()
    expected = tokens_of(path, "dequantized")
    assert len(set(expected)) > 5  # not a constant
    assert tokens_of(path, "quantized") == tokens_of(path, None) == expected


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_tokens_of_a_model_in_blocks_on_torch(kind: str, tmp_path: Path) -> None:
    """What a GPU does, on torch tensors of the CPU: rows at multiples of 16 bytes, an embedding in blocks."""
    pytest.importorskip("torch")
    path = file_of(kind, tmp_path, hidden=96, inner=160, heads=4)
    model = build_model(GgufCheckpoint(path, keep_blocks=True), TorchArrays("float32", "cpu"))
    kept = model.layers[0].out_weight.weight
    assert model.layers[0].out_weight.shape == (96, 96) and kept.stride(0) % 16 == 0 and kept.data_ptr() % 16 == 0
    assert tokens_from(model) == tokens_of(path, "dequantized")


def test_other_types_are_dequantised(tmp_path: Path) -> None:
    path = file_of("Q6_K", tmp_path, hidden=256, inner=256, heads=8)
    assert tokens_of(path, "quantized") == tokens_of(path, "dequantized")


def test_what_cannot_stay_quantised_is_refused(tmp_path: Path) -> None:
    path = file_of("Q4_1", tmp_path)
    with pytest.raises(ValueError, match=r"^load_model: weights='int4'; 'quantized', "):
        load_model(path, weights="int4")
    pytest.importorskip("transformers")
    from model_families import family_model

    family_model("olmo2").save_pretrained(tmp_path / "numbers")
    with pytest.raises(UnsupportedModelError, match=r"^load_model: weights='quantized' with a checkpoint that is no"):
        load_model(tmp_path / "numbers", device="cpu", weights="quantized")


# --- torch


@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
@pytest.mark.parametrize("name", [*WEIGHTS, "tiles"])
def test_gradients(name: str, activation: str | None) -> None:
    torch = pytest.importorskip("torch")
    import flashkernel.torch as fkt

    weight = TILED["q4_1"] if name == "tiles" else WEIGHTS[name]
    parts = [None if part is None else torch.from_numpy(part) for part in (weight.weight, weight.scales, weight.zeros)]
    results = []
    for dense in (False, True):
        x = torch.from_numpy(numbers(5, weight.shape[1])).requires_grad_()
        bias = torch.from_numpy(numbers(weight.shape[0])).requires_grad_()
        if dense:
            out = fkt.linear(x, torch.from_numpy(dequantize(weight)), bias, activation=activation)
        else:
            out = fkt.quantized_linear(x, *parts, bias, format=weight.format, activation=activation)
        out.backward(torch.from_numpy(numbers(5, weight.shape[0])))
        results.append((out.detach(), x.grad, bias.grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_a_gradient_of_scales_is_refused_and_compile_takes_the_op() -> None:
    torch = pytest.importorskip("torch")
    import flashkernel.torch as fkt

    weight = WEIGHTS["int4, 32"]
    packed, scales = torch.from_numpy(weight.weight), torch.from_numpy(weight.scales)
    x = torch.from_numpy(numbers(2, 160))
    with pytest.raises(NotImplementedError, match=r"^quantized_linear: scales requires a gradient"):
        fkt.quantized_linear(x, packed, scales.clone().requires_grad_())
    call = lambda x: fkt.quantized_linear(x * 1, packed, scales) + 1
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x))


@pytest.mark.parametrize("format", ["int4", "int8"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_small_weights_have_small_steps(format: str, symmetric: bool, dtype: Any) -> None:
    """A row's error is of the row's size, not of a least step that all rows share."""
    weight = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    weight *= np.array([1.0, 1e-3, 1e-4, 0.0], np.float32)[:, None]
    error = np.abs(dequantize(quantize(weight, format, symmetric=symmetric, dtype=dtype)) - weight).max(1)
    step = np.abs(weight).max(1) / (7 if format == "int4" else 127)
    assert (error <= 1.1 * step + (6e-8 * 32 if dtype == np.float16 else 0)).all()


def test_what_has_no_steps_is_refused() -> None:
    weight = np.ones((2, 32), np.float32)
    weight[1, 3] = np.nan
    with pytest.raises(ValueError, match=r"^quantize: the weight has a NaN or an infinity; finite numbers are needed"):
        quantize(weight)
    with pytest.raises(ValueError, match=r"^quantize: a step of 1.42857e\+09 is beyond float16; float32 is needed"):
        quantize(np.full((1, 32), 1e10, np.float32), dtype=np.float16)
    for size in (0, -32):
        with pytest.raises(ValueError, match=f"^quantize: group_size={size} for rows of 32; "):
            quantize(np.ones((1, 32), np.float32), group_size=size)
