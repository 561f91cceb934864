"""load_model reads the files that Transformers would read: over a matrix of folder layouts the weights are those of
AutoModelForCausalLM.from_pretrained, or the folder is refused.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

pytest.importorskip("tokenizers")

import checkpoint_fuzz
from flashkernel.generate import CheckpointError, Engine, UnsupportedModelError, load_model

IDS = [5, 17, 2, 80, 33, 33, 9, 61, 40, 12, 7, 0, 95]
SMALL = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=96,
    eos_token_id=96,
)
CLASSES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SMALL),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**SMALL, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**SMALL, "use_sliding_window": False}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**SMALL, "head_dim": 8}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        dict(vocab_size=97, n_positions=64, n_embd=48, n_layer=2, n_head=3, bos_token_id=96, eos_token_id=96),
    ),
}


def save(directory: Path, kind: str = "llama", seed: int = 0, options: Any = None, **changes: Any) -> Path:
    """A checkpoint whose weights depend on the seed so much that no two are taken for each other."""
    model_class, config_class, config = CLASSES[kind]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**{**config, **changes}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=0.0 if parameter.dim() > 1 else 1.0, std=0.25, generator=generator)
    model.save_pretrained(directory, **(options or {}))
    return directory


def weights(directory: Path, name: str = "model.safetensors") -> dict[str, Any]:
    return dict(safetensors_torch.load_file(directory / name))


def store(directory: Path, tensors: dict[str, Any], name: str = "model.safetensors") -> None:
    contiguous = {key: value.clone().contiguous() for key, value in tensors.items()}
    safetensors_torch.save_file(contiguous, directory / name, metadata={"format": "pt"})


def edit(directory: Path, name: str = "config.json", remove: tuple[str, ...] = (), **changes: Any) -> None:
    path = directory / name
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if key not in remove}))


def shards(directory: Path, seed: int = 0, **changes: Any) -> Path:
    return save(directory, seed=seed, options={"max_shard_size": "60KB"}, **changes)


def edit_map(directory: Path, change: Callable[[dict[str, str]], None]) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


LAYOUTS: dict[str, Callable[[Path], Any]] = {}
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {}


def loads(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    LAYOUTS[function.__name__] = function
    return function


def refused(text: str) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    def add(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
        REFUSED[function.__name__] = (function, text)
        return function

    return add


# --- which files


@loads
def single_file(d: Path) -> None:
    save(d)


@loads
def shards_with_index(d: Path) -> None:
    shards(d)
    assert len(list(d.glob("*.safetensors"))) > 2


@loads
def other_safetensors_beside_the_model(d: Path) -> None:
    save(d)
    for name in ("a.safetensors", "z.safetensors", "consolidated.safetensors", "model.fp16.safetensors"):
        store(d, weights(save(d.parent / name, seed=1)), name)
    shutil.copytree(d.parent / "a.safetensors", d / "original")


@loads
def index_beside_the_model(d: Path) -> None:
    shards(d, seed=1)
    shutil.copy(save(d.parent / "single") / "model.safetensors", d)


@loads
def stale_index_beside_the_model(d: Path) -> None:
    save(d)
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (d / "model.safetensors.index.json").write_text(json.dumps(index))


@loads
def pickle_beside_the_model(d: Path) -> None:
    save(d)
    (d / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")


@loads
def directory_in_the_model_s_place(d: Path) -> None:
    shards(d)
    (d / "model.safetensors").mkdir()


@loads
def links_to_files_elsewhere(d: Path) -> None:
    """The layout of the hub's cache."""
    save(d.parent / "blobs")
    d.mkdir()
    for path in (d.parent / "blobs").iterdir():
        (d / path.name).symlink_to(path)


@loads
def tensors_that_the_index_forgot(d: Path) -> None:
    shards(d)
    edit_map(d, lambda names: [names.pop(name) for name in list(names)[::3]] and None)


@loads
def file_named_by_the_config(d: Path) -> None:
    store(d, weights(save(d, seed=1)), "decoy.safetensors")
    store(d, weights(save(d.parent / "other")), "other.safetensors")
    edit(d, transformers_weights="other.safetensors")


@loads
def index_named_by_the_config(d: Path) -> None:
    shards(d)
    (d / "model.safetensors.index.json").rename(d / "other.safetensors.index.json")
    shutil.copy(save(d.parent / "other", seed=1) / "model.safetensors", d)
    edit(d, transformers_weights="other.safetensors.index.json")


@refused(r"a\.safetensors, b\.safetensors, but neither model\.safetensors")
def two_files_of_other_names(d: Path) -> None:
    store(d, weights(save(d, seed=1)), "b.safetensors")
    (d / "model.safetensors").rename(d / "a.safetensors")


@refused(r"model\.fp16\.safetensors, but neither")
def only_a_variant(d: Path) -> None:
    save(d, options={"variant": "fp16"})


@refused("both hold model")
def two_shards_hold_one_tensor(d: Path) -> None:
    shards(d)
    first, second = sorted(d.glob("*.safetensors"))[:2]
    store(d, {**weights(d, second.name), **weights(d, first.name)}, second.name)


@refused("which it does not")
def index_of_other_shards(d: Path) -> None:
    shards(d)
    first, second = sorted(path.name for path in d.glob("*.safetensors"))[:2]
    edit_map(d, lambda names: names.update({k: second for k, v in names.items() if v == first} | {"more": first}))


@refused("names the shard")
def index_of_a_missing_shard(d: Path) -> None:
    shards(d)
    sorted(d.glob("*.safetensors"))[1].unlink()


@refused("merge_and_unload")
def adapter(d: Path) -> None:
    save(d)
    (d / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "base", "peft_type": "LORA"}))


@refused("'gptq'")
def quantised(d: Path) -> None:
    edit(save(d), quantization_config={"quant_method": "gptq", "bits": 4})


@refused("transformers_weights='../x.safetensors'")
def file_outside_named_by_the_config(d: Path) -> None:
    shutil.copy(save(d) / "model.safetensors", d.parent / "x.safetensors")
    edit(d, transformers_weights="../x.safetensors")


# --- which tensors


@loads
def bare_decoder(d: Path) -> None:
    tensors = weights(save(d, tie_word_embeddings=True))
    store(d, {name.removeprefix("model."): value for name, value in tensors.items()})


@loads
def bare_decoder_of_gpt2(d: Path) -> None:
    tensors = weights(save(d, "gpt2"))
    store(d, {name.removeprefix("transformer."): value for name, value in tensors.items()})


@loads
def decoder_s_names_without_prefix_and_a_head(d: Path) -> None:
    store(d, {name.removeprefix("model."): value for name, value in weights(save(d)).items()})


@loads
def tied_and_both_saved(d: Path) -> None:
    tensors = weights(save(d, tie_word_embeddings=True))
    store(d, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})


@loads
def tied_and_only_the_head_saved(d: Path) -> None:
    tensors = weights(save(d, tie_word_embeddings=True))
    head = tensors.pop("model.embed_tokens.weight")
    store(d, {**tensors, "lm_head.weight": head})


@loads
def tied_gpt2_and_only_the_head_saved(d: Path) -> None:
    tensors = weights(save(d, "gpt2"))
    head = tensors.pop("transformer.wte.weight")
    store(d, {**tensors, "lm_head.weight": head})


@loads
def masks_of_old_versions(d: Path) -> None:
    tensors = weights(save(d, "gpt2"))
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in range(2)}
    masks |= {f"transformer.h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    store(d, {**tensors, **masks})


@refused("tie_word_embeddings=true, but")
def tied_and_two_saved(d: Path) -> None:
    tensors = weights(save(d, tie_word_embeddings=True))
    store(d, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1})


@refused("no tensor 'lm_head.weight'")
def untied_without_a_head(d: Path) -> None:
    tensors = weights(save(d))
    del tensors["lm_head.weight"]
    store(d, tensors)


@refused("no tensor 'model.layers.1.mlp.up_proj.weight'")
def missing_tensor(d: Path) -> None:
    tensors = weights(save(d))
    del tensors["model.layers.1.mlp.up_proj.weight"]
    store(d, tensors)


@refused("two names of one tensor")
def with_and_without_the_prefix(d: Path) -> None:
    tensors = weights(save(d))
    store(d, {**tensors, "norm.weight": tensors["model.norm.weight"] + 1})


@loads
def bfloat16_weights(d: Path) -> None:
    store(d, {name: value.bfloat16() for name, value in weights(save(d)).items()})


@loads
def float16_said_by_the_config(d: Path) -> None:
    edit(save(d), dtype="float16", torch_dtype="float16")


# --- which config


@loads
def old_and_new_rope(d: Path) -> None:
    edit(
        save(d),
        rope_scaling={"type": "linear", "factor": 4.0},
        rope_theta=500.0,
        rope_parameters={"rope_type": "default", "rope_theta": 7000.0},
    )


@loads
def llama3_rope_of_an_outer_context(d: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    edit(save(d), rope_parameters={**rope, "original_max_position_embeddings": 16}, original_max_position_embeddings=64)


@loads
def gpt2_by_the_common_names(d: Path) -> None:
    edit(
        save(d, "gpt2"),
        remove=("n_embd", "n_layer", "n_head", "n_positions"),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=64,
    )


@loads
def mistral_window(d: Path) -> None:
    save(d, "mistral")


@loads
def mistral_without_a_window(d: Path) -> None:
    edit(save(d, "mistral"), sliding_window=None)


@loads
def mistral_windows_by_layer(d: Path) -> None:
    """Transformers takes such a config for Ministral's."""
    edit(save(d, "mistral"), layer_types=["full_attention", "sliding_attention"])


@loads
def qwen2_windows_from_a_layer_on(d: Path) -> None:
    edit(save(d, "qwen2"), remove=("layer_types",), use_sliding_window=True, sliding_window=4, max_window_layers=1)


@loads
def qwen2_windows_by_layer(d: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    edit(save(d, "qwen2"), use_sliding_window=True, sliding_window=4, layer_types=kinds)


@loads
def qwen2_window_that_is_off(d: Path) -> None:
    edit(save(d, "qwen2"), use_sliding_window=False, sliding_window=4, max_window_layers=0)


@loads
def qwen3_norms(d: Path) -> None:
    save(d, "qwen3")


@refused("layer_types")
def qwen2_sliding_layers_of_a_window_that_is_off(d: Path) -> None:
    edit(save(d, "qwen2"), use_sliding_window=False, sliding_window=4, layer_types=["sliding_attention"] * 2)


@refused("num_key_value_heads=32")
def qwen2_without_key_value_heads(d: Path) -> None:
    edit(save(d, "qwen2"), remove=("num_key_value_heads",))  # 32 in Transformers, not num_attention_heads


@refused("sliding_window=4, which model_type='llama' does not compute with")
def llama_with_a_window(d: Path) -> None:
    """Transformers' prefill sees all keys, its decode steps four."""
    edit(save(d), sliding_window=4)


@refused("attention_chunk_size=4")
def chunks_of_attention(d: Path) -> None:
    edit(save(d, "gpt2"), attention_chunk_size=4)


@refused("layer_types=<a JSON array of 2>")
def llama_with_sliding_layers(d: Path) -> None:
    edit(save(d), layer_types=["full_attention", "sliding_attention"])


@loads
def window_beyond_the_context(d: Path) -> None:
    edit(save(d), sliding_window=4096, layer_types=["full_attention"] * 2, attention_chunk_size=None)


@refused("partial_rotary_factor")
def part_of_a_head_rotated(d: Path) -> None:
    edit(save(d), partial_rotary_factor=0.5)


@refused("two names of one field")
def gpt2_by_two_names(d: Path) -> None:
    edit(save(d, "gpt2"), num_attention_heads=6)


@refused("by layer type")
def rope_by_layer_type(d: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10.0}
    edit(save(d, "qwen3"), rope_parameters={"full_attention": rope, "sliding_attention": rope})


def stock_scores(stock: Any, ids: list[int]) -> Any:
    """log p of each token after those before it, as Engine.score has it."""
    with torch.no_grad():
        logits = stock(torch.tensor([ids])).logits[0].double()
    return torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_those_that_transformers_loads(layout: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    LAYOUTS[layout](directory)
    stock = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is left out
        model = load_model(directory, device="cpu")
    embedding = model.wte if layout.count("gpt2") or "masks" in layout else model.embedding  # type: ignore[attr-defined]
    np.testing.assert_array_equal(embedding, stock.get_input_embeddings().weight.detach().numpy())
    np.testing.assert_array_equal(model.lm_head, stock.get_output_embeddings().weight.detach().numpy())  # type: ignore[attr-defined]
    np.testing.assert_allclose(Engine(model, page_size=16).score(IDS), stock_scores(stock, IDS), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("layout", REFUSED)
def test_layouts_that_are_refused(layout: str, tmp_path: Path) -> None:
    make, text = REFUSED[layout]
    make(tmp_path / "model")
    with pytest.raises((CheckpointError, UnsupportedModelError), match=text):
        load_model(tmp_path / "model", device="cpu")


def test_mutated_folders_compute_what_transformers_computes(tmp_path: Path) -> None:
    """Some hundred seeded changes to configs, indices and weights. What both load agrees in prefill, decode and eos."""
    fuzzer = checkpoint_fuzz.Fuzzer(tmp_path)
    ids = [token % 24 for token in IDS]
    compared = 0
    for number in range(300):
        directory, name, data = fuzzer.case(random.Random(f"stock-{number}"))
        if name == "tokenizer.json":
            continue
        sound = (directory / name).read_bytes()
        (directory / name).write_bytes(data)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = load_model(directory, device="cpu")
            stock = transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        except Exception:  # one of them refuses it; test_checkpoint_hostile.py looks at how
            continue
        finally:
            (directory / name).write_bytes(sound)
        what = f"case {number}: {directory.name}/{name}: {data[:300]!r}"
        eos = stock.generation_config.eos_token_id
        assert model.stop_tokens == (set() if eos is None else {eos} if isinstance(eos, int) else set(eos)), what
        engine = Engine(model, page_size=16)
        np.testing.assert_allclose(engine.score(ids), stock_scores(stock, ids), rtol=1e-3, atol=2e-3, err_msg=what)
        options = dict(attention_mask=torch.ones(1, len(ids)), max_new_tokens=8, do_sample=False, pad_token_id=0)
        expected = stock.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()
        assert [event.token for event in engine.generate([ids], max_new_tokens=8)] == expected, what
        compared += 1
    assert compared > 30


def test_tensors_without_a_use_are_named(tmp_path: Path) -> None:
    """Transformers reports them as unexpected and goes on; a bias or a layer too many should not pass in silence."""
    tensors = weights(save(tmp_path))
    store(tmp_path, {**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(48)})
    with pytest.warns(UserWarning, match=r"no use for 1 .*q_proj\.bias"):
        load_model(tmp_path, device="cpu")
    edit(save(tmp_path), num_hidden_layers=1)
    with pytest.warns(UserWarning, match=r"no use for 9 .*layers\.1"):
        load_model(tmp_path, device="cpu")


MISSING = object()


@pytest.mark.parametrize(
    ("config", "generation"), list(itertools.product([MISSING, None, 5, [5, 6]], ["no file", MISSING, None, 7, [7, 8]]))
)
def test_end_of_text_tokens_are_those_of_transformers(config: Any, generation: Any, tmp_path: Path) -> None:
    save(tmp_path)
    edit(tmp_path, remove=("eos_token_id",))
    if config is not MISSING:
        edit(tmp_path, eos_token_id=config)
    if generation == "no file":
        (tmp_path / "generation_config.json").unlink()
    else:
        values = {} if generation is MISSING else {"eos_token_id": generation}
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id
    expected = set() if stock is None else set(stock) if isinstance(stock, list) else {stock}
    assert load_model(tmp_path, device="cpu").stop_tokens == expected
