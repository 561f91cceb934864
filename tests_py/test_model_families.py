"""The families of the engine besides GPT-2, Llama, Mistral, Qwen2 and Qwen3: logits and tokens equal stock
Transformers', by `load_model` and by `accelerate`, and each feature of a family matters.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import flashkernel as fk
from conftest import HAS_GPU, needs_triton
from flashkernel.generate import (
    CheckpointError,
    Engine,
    GenerationError,
    PromptError,
    UnsupportedModelError,
    load_model,
)
from flashkernel.generate.arrays import TorchArrays
from flashkernel.generate.checkpoint import MemoryCheckpoint
from flashkernel.generate.decoder_model import DecoderModel
from flashkernel.generate.experts import ExpertBlock
from flashkernel.generate.families import FAMILIES as DECODERS
from flashkernel.integrations.transformers import accelerate
from model_families import FAMILIES, FEATURES, LONGROPE, family_model

ROOT = Path(__file__).resolve().parents[1]
needs_docs = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the source tree is not beside the tests")
LENGTHS = (3, 40, 1, 21)
IDS = torch.randint(0, 95, (4, 40), generator=torch.Generator().manual_seed(1))
LEFT = torch.stack([torch.arange(40) >= 40 - n for n in LENGTHS]).long()
PROMPTS = [row[40 - n :].tolist() for row, n in zip(IDS, LENGTHS, strict=True)]
NEW = 16
# One case of each family; the others are variants of theirs.
FIRST = list({options[0]: case for case, options in reversed(FAMILIES.items())}.values())
REST = [pytest.param(case, marks=pytest.mark.long) for case in FAMILIES if case not in FIRST]


@pytest.fixture(autouse=True)
def quiet() -> Any:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)


def logits_of(model: Any, ids: list[int], **options: Any) -> np.ndarray:
    """Float32 logits at every position, by the engine."""
    found: list[np.ndarray] = []
    forward = model.forward

    def spy(*args: Any) -> Any:
        logits = forward(*args)
        found.append(np.array(model.arrays.to_float32(logits)))
        return logits

    model.forward = spy
    try:
        Engine(model, page_size=16, prefill_chunk=17, **options).score([*ids, 0])
    finally:
        del model.forward
    return np.concatenate(found)


def tokens_of(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in prompts]
    for event in engine.generate(prompts, max_new_tokens=NEW, stop_tokens=frozenset()):
        tokens[event.sequence].append(event.token)
    return tokens


def stock_tokens(model: Any) -> list[list[int]]:
    return model.generate(IDS, attention_mask=LEFT, max_new_tokens=NEW, do_sample=False, eos_token_id=None)[
        :, IDS.shape[1] :
    ].tolist()


def exact_logits(model: Any, ids: Any, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The stock model's in float64, those parts that its code does in float32 included."""
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        return model.double()(ids).logits[0].numpy()


@pytest.mark.parametrize("case", [*FIRST, *REST])
def test_logits_and_tokens_equal_the_stock_model(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    stock = family_model(case)
    stock.save_pretrained(tmp_path)
    with torch.no_grad():
        theirs = stock(IDS[1:2]).logits[0].numpy()
    expected = stock_tokens(stock)
    exact = exact_logits(stock, IDS[1:2], monkeypatch)
    recwarn.clear()
    model = load_model(tmp_path, device="cpu")
    assert not recwarn.list  # every tensor of the checkpoint has a use
    ours = logits_of(model, PROMPTS[1])
    floor = 8 * np.finfo(np.float32).eps * np.abs(exact).max()
    assert np.abs(ours - exact).max() <= 2 * np.abs(theirs - exact).max() + floor
    engine = Engine(model, page_size=16, prefill_chunk=17)
    assert tokens_of(engine, PROMPTS) == expected
    assert len({token for row in expected for token in row}) > 5  # not a constant
    again = engine.stats.prefix_tokens
    assert tokens_of(engine, PROMPTS[1:2]) == expected[1:2]  # alone, on pages that are kept
    assert engine.stats.prefix_tokens - again >= 32
    assert engine.pages_in_use == 0


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_matters(feature: str) -> None:
    """Without the feature the logits are others, so the test above would fail if it were missing."""
    case, changes = FEATURES[feature]
    stock = family_model(case)
    tensors = stock.state_dict()
    config = stock.config.to_dict()
    found = [
        logits_of(DecoderModel(MemoryCheckpoint(one, tensors), TorchArrays("float32", "cpu")), PROMPTS[1])
        for one in (config, {**config, **changes})
    ]
    assert np.abs(found[0] - found[1]).max() > 1e-2 * np.abs(found[0]).max()


def trained(model: Any) -> None:
    """Every parameter is written in place, norms and sinks too."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05).add_(0.01)


@pytest.mark.parametrize("case", [*FIRST, *REST])
def test_accelerate_gives_stock_tokens(case: str) -> None:
    model = family_model(case)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    expected = stock_tokens(model)
    engine = accelerate(model, page_size=16, prefill_chunk=20).flashkernel
    assert stock_tokens(model) == expected
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == size  # nothing is kept twice
    trained(model)
    got = stock_tokens(model)
    assert model.flashkernel is engine
    other = family_model(case)
    trained(other)
    assert got == stock_tokens(other) != expected


@pytest.mark.skipif(not (fk.num_cuda_devices() and torch.cuda.is_available()), reason="no GPU, or a build without CUDA")
@pytest.mark.parametrize("case", [*FIRST, *REST])
def test_graphs_on_a_gpu_give_stock_tokens(case: str) -> None:
    """Decode steps as CUDA graphs, replayed after training has changed what is worked out of parameters."""
    model, other = family_model(case), family_model(case)
    expected = stock_tokens(model)
    accelerate(model.cuda(), page_size=16, prefill_chunk=20)
    options: dict[str, Any] = dict(attention_mask=LEFT.cuda(), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    assert model.generate(IDS.cuda(), **options)[:, IDS.shape[1] :].tolist() == expected
    trained(model)
    trained(other)
    assert model.generate(IDS.cuda(), **options)[:, IDS.shape[1] :].tolist() == stock_tokens(other)


HALF = ["gemma2", "gemma3", "phi3-longrope-partial", "granite", "olmo2", "gpt-oss", "mixtral", "deepseek-v2"]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("case", HALF)
def test_bfloat16_is_as_close_to_float32_as_eagers(case: str, kind: str) -> None:
    stock = family_model(case).to(torch.bfloat16)
    with torch.no_grad():
        low = stock(IDS[1:2]).logits[0].float().numpy()
        exact = family_model(case).to(torch.bfloat16).float()(IDS[1:2]).logits[0].numpy()
    if kind == "torch":
        model = accelerate(stock).flashkernel.model
    else:
        from flashkernel.generate.arrays import HostArrays

        tensors = {name: tensor.float().numpy() for name, tensor in stock.state_dict().items()}
        model = DecoderModel(MemoryCheckpoint(stock.config.to_dict(), tensors), HostArrays("bfloat16"))
    ours, theirs = np.abs(logits_of(model, PROMPTS[1]) - exact), np.abs(low - exact)
    assert 0 < ours.mean() <= 1.2 * theirs.mean()


# --- experts


def expert_block(case: str, device: str) -> ExpertBlock:
    model = accelerate(family_model(case).to(device)).flashkernel.model
    return next(layer.mlp for layer in model.layers if isinstance(layer.mlp, ExpertBlock))


@needs_triton
@pytest.mark.parametrize("tokens", [1, 19])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("case", ["mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_experts_by_each_way_are_the_same(
    case: str, grouped: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does, by groups or all experts on all tokens, and what the CPU does; a broken expert that no token was
    sent to changes nothing."""
    block = expert_block(case, "cpu")
    gpu = expert_block(case, "cuda") if HAS_GPU and fk.num_cuda_devices() else block
    x = torch.randn(1, 48, generator=torch.Generator().manual_seed(2)).expand(tokens, -1).contiguous()
    with torch.no_grad():
        sparse = block(x)
        if block.routing is not None:
            chosen = block.routing(x)[1]
        else:
            logits = fk.linear(x, block.router_weight, block.router_bias)
            chosen = block.arrays.route(logits, block.each, block.softmax_first, False)[1]
        spare = next(i for i in range(block.gate_up.shape[0]) if i not in chosen)
        gpu.down[spare] = float("inf")
        monkeypatch.setattr(gpu.arrays, "asynchronous", True)
        if grouped:
            monkeypatch.setattr(gpu, "_one", None, raising=False)  # a loop over experts would call it
        else:
            monkeypatch.setattr(gpu.arrays, "groups", lambda *_: None)
        on_a_gpu = gpu(x.to(gpu.down.device)).cpu()
    torch.testing.assert_close(on_a_gpu, sparse, rtol=1e-5, atol=1e-6 * max(1.0, sparse.abs().max().item()))


@pytest.mark.parametrize("case", ["mixtral", "qwen3-moe", "deepseek-v2"])
def test_stacked_experts_on_disk(case: str, tmp_path: Path) -> None:
    """Checkpoints with one matrix for each expert, and those with all in one, give the same weights."""
    stock = family_model(case)
    stock.save_pretrained(tmp_path / "each")
    stock.save_pretrained(tmp_path / "stacked", save_original_format=False)
    found = []
    for name in ("each", "stacked"):
        model: Any = load_model(tmp_path / name, device="cpu")
        found.append(model.layers[-1].mlp)
    np.testing.assert_array_equal(found[0].gate_up, found[1].gate_up)
    np.testing.assert_array_equal(found[0].down, found[1].down)
    from safetensors import safe_open

    with safe_open(tmp_path / "each" / "model.safetensors", "np") as each:
        assert any(".experts.0." in name for name in each.keys())


# --- what is refused


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "softcap in Llama": ("llama-yarn", dict(final_logit_softcapping=30.0), "final_logit_softcapping=30.0, which"),
    "experts in Granite": ("granite", dict(num_local_experts=8), "num_local_experts=8, which"),
    "multiplier in OLMo2": ("olmo2", dict(residual_multiplier=0.5), "residual_multiplier=0.5, which"),
    "softcap of scores in Gemma 3": ("gemma3", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0, which"),
    "both directions": ("gemma2", dict(use_bidirectional_attention=True), "use_bidirectional_attention=True, which"),
    "another activation": ("gemma2", dict(hidden_activation="relu"), "hidden_activation='relu'; gelu_pytorch_tanh"),
    "window in OLMo2": ("olmo2", dict(sliding_window=8), "sliding_window=8"),
    "part of a head": ("granite", dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    "rope_type of Phi-3": (
        "phi3",
        dict(rope_parameters={"rope_type": "linear", "factor": 2.0}),
        "rope_type='linear'; default or longrope",
    ),
    "one RoPE in Gemma 3": ("gemma3", dict(rope_parameters={"rope_theta": 1e4}), "full_attention"),
    "too many experts of a token": ("mixtral", dict(num_experts_per_tok=9), "num_experts_per_tok=9 and 4 experts"),
    "fewer layers with RoPE": ("smollm3", dict(no_rope_layers=[1]), r"no_rope_layers=<an array of 1|no_rope_layers="),
    "longrope's numbers": (
        "phi3-longrope",
        dict(rope_parameters={**LONGROPE, "short_factor": [1.0]}),
        "4 positive numbers are needed",
    ),
    "MXFP4": ("gpt-oss", dict(quantization_config={"quant_method": "mxfp4"}), "mxfp4"),
    "latent rows in Llama": ("llama-yarn", dict(kv_lora_rank=512), "kv_lora_rank=512, which"),
    "another routing in V2": ("deepseek-v2-lite", dict(topk_method="noaux_tc"), "topk_method='noaux_tc'; greedy or"),
    "another routing in V3": ("deepseek-v3", dict(topk_method="greedy"), "topk_method='greedy', which"),
    "scores of V3 in V2": ("deepseek-v2", dict(scoring_func="sigmoid"), "scoring_func='sigmoid', which"),
    "normed weights in V2": ("deepseek-v2", dict(norm_topk_prob=True), "norm_topk_prob=True, which"),
    "every other layer with experts": ("deepseek-v3", dict(moe_layer_freq=2), "moe_layer_freq=2, which"),
    "groups that are too few": ("deepseek-v3", dict(topk_group=1, num_experts_per_tok=3), "topk_group=1 and"),
    "wide latent rows": ("deepseek-v3", dict(kv_lora_rank=600), "kv_lora_rank=600 and qk_rope_head_dim=8"),
    "fewer heads of keys": ("deepseek-v2-lite", dict(num_key_value_heads=2), "num_key_value_heads=2; one number"),
    "a bias beside none": ("deepseek-v2-lite", dict(attention_bias=True), "attention_bias=true and q_lora_rank=null"),
    "longrope of DeepSeek": (
        "deepseek-v3",
        dict(rope_parameters={"rope_type": "longrope", "factor": 2.0}),
        "rope_type='longrope'; default, linear, dynamic, llama3 or yarn",
    ),
    "vision": ("gemma3", dict(model_type="gemma3"), "model_type='gemma3'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name(what: str, tmp_path: Path) -> None:
    case, changes, text = REFUSED[what]
    family_model(case).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises((UnsupportedModelError, CheckpointError), match=re.escape(text.split("|")[-1])):
        load_model(tmp_path, device="cpu")


VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 2**31, 10**300, 2.5, -0.5, 1e-300, 1e300, float("nan"), float("inf"), "", "silu"),
    *([], [1], [[]], ["a"], [0, 0, 0], [1, 1, 1], {}, {"a": 1}, {"full_attention": 3}, {"rope_type": "yarn"}),
    *(["full_attention"] * 3, ["sliding_attention"] * 3, {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e-300}),
]


@pytest.mark.parametrize("case", FIRST)
def test_mutated_configs_get_typed_errors(case: str, tmp_path: Path) -> None:
    """Each field of a config by a value of another kind: the model runs, or one of the package's own errors comes."""
    family_model(case).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    sound = json.loads(path.read_text())
    rng = random.Random(case)
    refused = 0
    for key in sound:
        path.write_text(json.dumps({**sound, key: rng.choice(VALUES)}))
        try:
            model = load_model(tmp_path, device="cpu")
            list(Engine(model, page_size=16).generate([[1, 2, 3]], max_new_tokens=2))
        except GenerationError:
            refused += 1
    assert refused > 3


def test_longrope_ends_at_the_original_context() -> None:
    """Beyond it the stock model computes the whole text anew with other frequencies."""
    engine = accelerate(family_model("phi3-longrope")).flashkernel
    assert engine.model.max_positions == 128
    with pytest.raises(PromptError, match="128"):
        engine.generate([[1] * 120], max_new_tokens=9)


def test_numbers_of_modules_are_compared() -> None:
    for case, name, key in (
        ("granite", "model.layers.0", "residual_multiplier"),
        ("gemma2", "model.layers.1.self_attn", "attn_logit_softcapping"),
        ("gpt-oss", "model.layers.0.mlp.experts", "limit"),
        ("deepseek-v2", "model.layers.1.self_attn.kv_a_layernorm", "variance_epsilon"),
        ("deepseek-v3", "model.layers.1.mlp.gate", "routed_scaling_factor"),
        ("deepseek-v3", "model.layers.1.self_attn", "scaling"),
    ):
        model = family_model(case)
        setattr(model.get_submodule(name), key, 0.75)
        with pytest.raises(
            NotImplementedError, match=rf"{re.escape(name)} has {key.replace('variance_epsilon', 'eps')}=0\.75"
        ):
            accelerate(model)


# --- what the docs say


def _rows(page: str, name: str) -> list[list[str]]:
    """The rows of a marked table, cell by cell; the cells hold names in backticks."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    table = text.split(f"<!-- {name}:begin -->")[1].split(f"<!-- {name}:end -->")[0]
    return [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]


@needs_docs
def test_the_table_names_the_families_that_tests_cover() -> None:
    import test_accelerate
    import test_transformers_sweep as sweep

    named = [cells[0].strip("`") for cells in _rows("generate.md", "families")]
    kinds = {kind for kind, _ in (*FAMILIES.values(), *test_accelerate.FAMILIES.values())}
    names = {"Gemma3": "Gemma3Text"}
    covered = [getattr(transformers, f"{names.get(kind, kind)}Config").model_type for kind in kinds]
    assert sorted(named) == sorted(covered) == sorted({"gpt2", *DECODERS})
    assert set(named) <= set(sweep.DECODERS)


@needs_docs
def test_the_list_names_the_types_that_the_sweep_covers() -> None:
    import test_transformers_sweep as sweep

    listed = [re.findall(r"`([\w-]+)`", cells[1]) for cells in _rows("transformers.md", "fkernel")]
    assert listed == [sweep.DECODERS, sweep.ENCODERS, sweep.BOTH, sweep.OTHERS, sweep.UNUSED]
