"""GGUF files of the families besides Llama and Qwen: tokens equal those of the Transformers model that was written.

A file is written here as llama.cpp's converter writes it. The names of its tensors and fields come from the package
gguf, which that converter uses; what the converter does to the values is done in `converted`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import torch

from flashkernel.generate import CheckpointError, Engine, UnsupportedModelError, load_model
from flashkernel.generate.gguf_architectures import ARCHITECTURES
from flashkernel.generate.gguf_checkpoint import GgufCheckpoint
from gguf_files import SIZES, File, Tensor, encoded, permuted
from model_families import LONGROPE, family_model

PROMPT = [(7 * i) % 90 for i in range(30)]  # longer than the windows
KEYS = gguf.Keys
# By llama.cpp's names: the case of model_families.py, and what a file can't say or need not.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", dict(query_pre_attn_scalar=16)),
    "gemma2-27b": ("gemma2", dict(num_hidden_layers=46, hidden_size=24, query_pre_attn_scalar=4)),
    "gemma3": ("gemma3", dict(query_pre_attn_scalar=16, sliding_window_pattern=6, num_hidden_layers=6)),
    "gemma3-scaled": (
        "gemma3",
        dict(
            query_pre_attn_scalar=16,
            sliding_window_pattern=6,
            num_hidden_layers=6,
            final_logit_softcapping=None,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            },
        ),
    ),
    "phi3": ("phi3", {}),
    "phi3-partial": ("phi3-partial", {}),
    "phi3-longrope": ("phi3-longrope", {}),
    "granite": ("granite", {}),
    "granite-biases": ("granite-biases", {}),
    "olmo2": ("olmo2", {}),
    "mixtral": ("mixtral", {}),
    "qwen3moe": ("qwen3-moe", dict(norm_topk_prob=True, num_experts_per_tok=2, head_dim=16)),
}


def fields_of(config: Any, arch: str) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes for a config."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = dict(config.rope_parameters)
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    named: dict[str, Any] = {
        KEYS.LLM.BLOCK_COUNT: config.num_hidden_layers,
        KEYS.LLM.CONTEXT_LENGTH: config.max_position_embeddings,
        KEYS.LLM.EMBEDDING_LENGTH: config.hidden_size,
        KEYS.LLM.FEED_FORWARD_LENGTH: config.intermediate_size,
        KEYS.Attention.HEAD_COUNT: config.num_attention_heads,
        KEYS.Attention.HEAD_COUNT_KV: config.num_key_value_heads,
        KEYS.Attention.LAYERNORM_RMS_EPS: config.rms_norm_eps,
        KEYS.Attention.KEY_LENGTH: head_dim,
        KEYS.Attention.VALUE_LENGTH: head_dim,
        KEYS.Rope.DIMENSION_COUNT: int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        KEYS.Rope.FREQ_BASE: float(rope["rope_theta"]),
    }
    if arch in ("gemma2", "gemma3", "phi3") and config.sliding_window:
        named[KEYS.Attention.SLIDING_WINDOW] = config.sliding_window
    if arch == "gemma2":
        named[KEYS.LLM.ATTN_LOGIT_SOFTCAPPING] = config.attn_logit_softcapping
    if arch in ("gemma2", "gemma3") and config.final_logit_softcapping:
        named[KEYS.LLM.FINAL_LOGIT_SOFTCAPPING] = config.final_logit_softcapping
    if local is not None:
        named["{arch}.rope.freq_base_swa"] = float(local["rope_theta"])
    if rope["rope_type"] == "linear":
        named |= {KEYS.Rope.SCALING_TYPE: "linear", KEYS.Rope.SCALING_FACTOR: float(rope["factor"])}
    if rope["rope_type"] == "longrope":
        named[KEYS.Rope.SCALING_ORIG_CTX_LEN] = config.original_max_position_embeddings
    if arch == "granite":
        named |= {
            KEYS.Attention.SCALE: config.attention_multiplier,
            KEYS.LLM.EMBEDDING_SCALE: config.embedding_multiplier,
            KEYS.LLM.RESIDUAL_SCALE: config.residual_multiplier,
            KEYS.LLM.LOGIT_SCALE: config.logits_scaling,
        }
    if hasattr(config, "num_experts_per_tok"):
        count = getattr(config, "num_experts", None) or config.num_local_experts
        named |= {KEYS.LLM.EXPERT_COUNT: count, KEYS.LLM.EXPERT_USED_COUNT: config.num_experts_per_tok}
        if hasattr(config, "moe_intermediate_size"):
            named[KEYS.LLM.EXPERT_FEED_FORWARD_LENGTH] = config.moe_intermediate_size
    return {"general.architecture": arch} | {key.format(arch=arch): value for key, value in named.items()}


def converted(model: Any, arch: str, kind: str = "F32") -> File:
    """A Transformers model as a GGUF file of llama.cpp's architecture `arch`; experts in the tensor type `kind`."""
    config, rng = model.config, np.random.default_rng(0)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors: list[Tensor] = []

    def add(name: str, values: np.ndarray, kind: str = "F32") -> None:
        tensors.append(Tensor(name, SIZES[kind][0], values.shape[::-1], encoded(rng, values, kind)))

    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if ".mlp.experts." in name:
            at = f"blk.{name.split('.')[2]}."
            if name.endswith("gate_up_proj"):
                gate, up = np.split(values, 2, axis=1)
                add(at + "ffn_gate_exps.weight", gate, kind)
                add(at + "ffn_up_exps.weight", up, kind)
            else:
                add(at + "ffn_down_exps.weight", values, kind)
            continue
        part = name.split(".")[-2]
        if arch in ("llama", "granite") and part in heads:
            values = permuted(values, heads[part])
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        add(own, np.ascontiguousarray(values))
    rope = config.rope_parameters
    for which in ("short", "long") if rope.get("rope_type") == "longrope" else ():
        add(f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32))
    return File(fields_of(config, arch), tensors)


def tokens_of(path: Path, count: int = 16) -> list[int]:
    engine = Engine(load_model(path, device="cpu"), page_size=16)
    return [event.token for event in engine.generate([PROMPT], max_new_tokens=count, stop_tokens=frozenset())]


def stock_tokens(model: Any, count: int = 16) -> list[int]:
    ids = torch.tensor([PROMPT])
    options: dict[str, Any] = dict(attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=None)
    out = model.generate(ids, max_new_tokens=count, **options)
    return out[0, len(PROMPT) :].tolist()


def arch_of(case: str) -> str:
    return {"mixtral": "llama"}.get(case, case.split("-")[0])


LONG = {"gemma2-27b", "granite-biases", "phi3-partial"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long) if case in LONG else case for case in CASES]
)
def test_tokens_equal_the_model_that_was_written(case: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    model = family_model(CASES[case][0], **CASES[case][1])
    path = converted(model, arch_of(case)).write(tmp_path / "model.gguf")
    expected = stock_tokens(model)
    assert len(set(expected)) > 2
    recwarn.clear()
    assert tokens_of(path) == expected
    assert not recwarn.list  # every tensor of the file has a use
    # Every weight comes back bit for bit.
    checkpoint = GgufCheckpoint(path)
    for name, parameter in model.named_parameters():
        values = checkpoint.read(name)
        if case.startswith("gemma") and name.endswith("norm.weight"):
            np.testing.assert_allclose(values, parameter.detach().numpy(), atol=2e-7)
        else:
            np.testing.assert_array_equal(values, parameter.detach().numpy())


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("gemma2", "gemma2.attention.sliding_window", 64),
        ("gemma2", "gemma2.attn_logit_softcapping", 0.0),
        ("gemma3", "gemma3.attention.sliding_window", 64),
        ("gemma3-scaled", "gemma3.rope.freq_base_swa", 10000.0),
        ("phi3", "phi3.attention.sliding_window", 64),
        ("phi3-longrope", "phi3.rope.scaling.attn_factor", 2.0),
        ("granite", "granite.attention.scale", 1.0),
        ("granite", "granite.embedding_scale", 1.0),
        ("granite", "granite.residual_scale", 1.0),
        ("mixtral", "llama.expert_used_count", 1),
    ],
)
def test_a_field_matters(case: str, key: str, value: Any, tmp_path: Path) -> None:
    """Another value gives other tokens, so the test above would fail if the field were not read."""
    model = family_model(CASES[case][0], **CASES[case][1])
    file = converted(model, arch_of(case))
    file.metadata[key] = value
    assert tokens_of(file.write(tmp_path / "model.gguf")) != stock_tokens(model)


def test_linear_scaling_is_of_layers_without_a_window(tmp_path: Path) -> None:
    model = family_model(CASES["gemma3-scaled"][0], **CASES["gemma3-scaled"][1])
    path = converted(model, "gemma3").write(tmp_path / "model.gguf")
    assert GgufCheckpoint(path).config["rope_parameters"] == CASES["gemma3-scaled"][1]["rope_parameters"]


def test_experts_in_blocks_of_8_bits(tmp_path: Path) -> None:
    """Three dimensions of a quantised tensor, by Transformers' model of the values that the package gguf gives back."""
    model = family_model("qwen3-moe", norm_topk_prob=True, num_experts_per_tok=2, hidden_size=96, head_dim=16)
    path = converted(model, "qwen3moe", "Q8_0").write(tmp_path / "model.gguf")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mlp.experts." in name:
                kind = gguf.GGMLQuantizationType.Q8_0
                raw = gguf.quantize(parameter.detach().numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.dequantize(raw, kind).reshape(parameter.shape)))
    assert tokens_of(path) == stock_tokens(model)


def without(file: File, *names: str) -> File:
    file.tensors = [tensor for tensor in file.tensors if tensor.name not in names]
    return file


def test_what_lacks_or_does_not_fit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    moe = family_model(CASES["qwen3moe"][0], **CASES["qwen3moe"][1])
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts"):
        load_model(without(converted(moe, "qwen3moe"), "blk.1.ffn_up_exps.weight").write(path), device="cpu")
    file = converted(moe, "qwen3moe")
    del file.metadata["qwen3moe.expert_used_count"]
    with pytest.raises(CheckpointError, match=r"no qwen3moe\.expert_used_count"):
        load_model(file.write(path), device="cpu")
    file = converted(moe, "qwen3moe")
    file.metadata["qwen3moe.expert_used_count"] = 5
    with pytest.raises(CheckpointError, match=r"num_experts_per_tok=5 and 4 experts"):
        load_model(file.write(path), device="cpu")
    longrope = family_model("phi3-longrope")
    with pytest.raises(CheckpointError, match=r"'rope_factors_short\.weight' of shape None; \[4\]"):
        load_model(without(converted(longrope, "phi3"), "rope_factors_short.weight").write(path), device="cpu")
    file = converted(longrope, "phi3")
    del file.metadata["phi3.rope.scaling.original_context_length"]
    with pytest.raises(UnsupportedModelError, match=r"original_context_length=None; phi3 with a length"):
        load_model(file.write(path), device="cpu")
    file = converted(longrope, "phi3")
    file.metadata["phi3.rope.dimension_count"] = 10
    with pytest.raises(UnsupportedModelError, match=r"dimension_count=10 with heads of 8"):
        load_model(file.write(path), device="cpu")
    assert (
        LONGROPE["short_factor"]
        == GgufCheckpoint(converted(longrope, "phi3").write(path)).config["rope_parameters"]["short_factor"]
    )


def test_the_docs_table_names_these_architectures() -> None:
    page = Path(__file__).resolve().parents[1] / "docs" / "generate.md"
    if not page.is_file():
        pytest.skip("the source tree is not beside the tests")
    table = page.read_text(encoding="utf-8").split("<!-- families:begin -->")[1].split("<!-- families:end -->")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()[2:]]
    named = {row[0]: row[-1] for row in rows if row[-1]}
    expected = {found.model_type: name for name, found in ARCHITECTURES.items()}
    assert named == {**expected, "mistral": "llama", "mixtral": "llama"}
