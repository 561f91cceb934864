"""Checkpoints in fp8 with a scale for each 128 x 128 (DeepSeek-V3, Qwen3-FP8) in the engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import flashkernel as fk
from flashkernel.generate import CheckpointError, Engine, UnsupportedModelError, load_model
from flashkernel.generate.decoder_model import _joined
from flashkernel.quantized import QuantizedWeight, dequantize
from flashkernel.reference.ops import float8_numbers
from model_families import family_model
from test_model_families import PROMPTS, logits_of, tokens_of

F8 = torch.float8_e4m3fn
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
# Rows of Q and K are whole blocks, so that they stay one matrix; those of V end within one.
WIDE = {
    "hidden_size": 160,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def save_fp8(case: str, folder: Path, quantization: Any = FP8, **changes: Any) -> dict[str, torch.Tensor]:
    """A checkpoint whose projections are in fp8, and the numbers that its tensors stand for."""
    from safetensors.torch import load_file, save_file

    family_model(case, **changes).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    kept, whole = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        whole[name] = kept[name] = tensor
        if tensor.dim() != 2 or "_proj" not in name:
            continue
        rows, columns = tensor.shape
        blocks = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
        blocks[:rows, :columns] = tensor
        tiles = blocks.reshape(blocks.shape[0] // 128, 128, -1, 128)
        scale = tiles.abs().amax((1, 3)) / 448
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        kept[name], kept[name + "_scale_inv"] = (tensor / wide).to(F8), scale
        whole[name] = kept[name].float() * wide
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return whole


def linear_of_rounded(weight: QuantizedWeight, x: Any, bias: Any = None, **options: Any) -> Any:
    """`linear` of the numbers of a weight, x rounded to 8 bits before."""
    elements, scales = fk.quantize_fp8_blocks(x)
    wide = np.repeat(scales, 128, axis=-1)[..., : x.shape[-1]]
    numbers = (float8_numbers(elements) * wide).astype(np.float32)
    return fk.linear(numbers, dequantize(weight), bias, **options)


@pytest.mark.parametrize("case, changes", [("qwen3-yarn", WIDE), ("olmo2", {}), ("deepseek-v3", {}), ("qwen3-moe", {})])
def test_an_fp8_checkpoint(case: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dequantised: the tokens of the numbers. In 8 bits: the logits of `linear` with what they multiply rounded."""
    from safetensors.torch import save_file

    whole = save_fp8(case, tmp_path / "fp8", **changes)
    shutil.copytree(tmp_path / "fp8", tmp_path / "numbers")
    save_file(whole, tmp_path / "numbers" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "numbers" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "numbers" / "config.json").write_text(json.dumps(config))
    stock, loaded = load_model(tmp_path / "numbers", device="cpu"), load_model(tmp_path / "fp8", device="cpu")
    assert tokens_of(Engine(loaded, page_size=16), PROMPTS[:2]) == tokens_of(Engine(stock, page_size=16), PROMPTS[:2])
    exact = logits_of(stock, PROMPTS[1])
    np.testing.assert_array_equal(logits_of(loaded, PROMPTS[1]), exact)
    narrow = load_model(tmp_path / "fp8", device="cpu", weights="quantized")
    kinds = [type(layer.out_weight) for layer in narrow.layers]
    assert kinds == [QuantizedWeight] * len(kinds)
    if case == "qwen3-yarn":
        joined = narrow.layers[0].qkv_weight
        np.testing.assert_array_equal(dequantize(joined), np.asarray(stock.layers[0].qkv_weight))
    ours = logits_of(narrow, PROMPTS[1])
    monkeypatch.setattr(QuantizedWeight, "linear", linear_of_rounded)
    size, rounded = np.abs(exact).max(), logits_of(narrow, PROMPTS[1])
    assert np.abs(ours - rounded).max() <= 0.02 * size  # what is near half of a step may go the other way
    assert np.abs(ours - exact).max() > 0.02 * size


def test_torch_arrays_run_it(tmp_path: Path) -> None:
    from flashkernel.generate.arrays import TorchArrays
    from flashkernel.generate.checkpoint import Checkpoint
    from flashkernel.generate.model import build_model

    save_fp8("qwen3-yarn", tmp_path, **WIDE)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.keep_blocks = True
    model = build_model(checkpoint, TorchArrays("float32", "cpu"))
    assert model.layers[0].out_weight.weight.dtype == F8
    host = load_model(tmp_path, device="cpu", weights="quantized")
    np.testing.assert_allclose(logits_of(model, PROMPTS[1]), logits_of(host, PROMPTS[1]), rtol=0, atol=1e-4)


def test_rows_of_blocks() -> None:
    weight = QuantizedWeight(
        np.zeros((300, 200), np.uint8), np.arange(6, dtype=np.float32).reshape(3, 2), None, "fp8_block"
    )
    assert weight.shape == (300, 200) and weight[128:].scales.tolist() == [[2, 3], [4, 5]]
    assert weight[:200].scales.shape == (2, 2)
    with pytest.raises(ValueError, match=r"^QuantizedWeight: rows 5:300:1"):
        weight[5:]
    assert _joined([weight[:256], weight]).scales.shape == (5, 2) and _joined([weight, weight]) is None


@pytest.mark.parametrize(
    "quantization, message",
    [
        ({**FP8, "weight_block_size": [64, 64]}, "fp8 weights with weight_block_size="),
        ({"quant_method": "fp8"}, "fp8 weights with weight_block_size=None"),
        ({**FP8, "activation_scheme": "static"}, "fp8 weights with activation_scheme='static'"),
        ({"quant_method": "awq"}, r"a quantization_config \('awq'\)"),
    ],
)
def test_other_quantisations_are_refused(quantization: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_fp8("olmo2", tmp_path, quantization)
    with pytest.raises(UnsupportedModelError, match=rf"^load_model: config.json has {message}"):
        load_model(tmp_path, device="cpu")


def test_a_missing_scale_is_told(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_fp8("olmo2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.down_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for weights in ("quantized", "dequantized"):
        with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.0\.mlp\.down_proj\.weight_scale_inv'"):
            load_model(tmp_path, device="cpu", weights=weights)
