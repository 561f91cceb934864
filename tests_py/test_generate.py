"""flashkernel.generate: greedy and sampled tokens equal those of the stock Hugging Face model; bad input gets typed
errors.
"""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("safetensors")

import flashkernel as fk
from flashkernel.generate import (
    CheckpointError,
    Engine,
    GenerationError,
    PromptError,
    SamplingOptions,
    TextStream,
    TextTokenizer,
    UnsupportedModelError,
    find_model,
    load_model,
)
from flashkernel.generate.checkpoint import Checkpoint, bfloat16_to_float32, float32_to_bfloat16
from flashkernel.generate.rope_scaling import read_rope
from flashkernel.generate.sampling import Sampler

PROMPTS = [[1, 2, 3], list(range(10, 47)), [7], [90, 3] * 9]


def tokens_of(events: Any, count: int) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in range(count)]
    for event in events:
        tokens[event.sequence].append(event.token)
    return tokens


def save(model: Any, directory: Path, **options: Any) -> Path:
    """Random weights of a size at which greedy choices vary and no two logits come close."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25, generator=generator)
            else:  # norms near 1, biases near 0: a large bias would make one token win always
                parameter.normal_(mean=0.0 if name.endswith("bias") else 1.0, std=0.05, generator=generator)
    model.save_pretrained(directory, **options)
    return directory


def gpt2(directory: Path, save_options: dict[str, Any] | None = None, **changes: Any) -> Path:
    transformers = pytest.importorskip("transformers")
    config = dict(vocab_size=97, n_positions=128, n_embd=48, n_layer=3, n_head=3, bos_token_id=96, eos_token_id=96)
    return save(
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**config, **changes})),
        directory,
        **(save_options or {}),
    )


def llama(directory: Path, save_options: dict[str, Any] | None = None, **changes: Any) -> Path:
    transformers = pytest.importorskip("transformers")
    config = dict(
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
    return save(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**config, **changes})),
        directory,
        **(save_options or {}),
    )


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "gpt2": lambda d: gpt2(d),
    "gpt2-erf-gelu-untied": lambda d: gpt2(d, activation_function="gelu", tie_word_embeddings=False, n_inner=100),
    "gpt2-layer-scale": lambda d: gpt2(d, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True),
    "gpt2-shards": lambda d: gpt2(d, {"max_shard_size": "60KB"}),
    "llama": lambda d: llama(d),
    "llama-tied-biases": lambda d: llama(d, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-llama3-rope": lambda d: llama(d, rope_parameters=LLAMA3),
    "llama-linear-rope": lambda d: llama(
        d, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "llama-mha-head-dim": lambda d: llama(d, num_key_value_heads=6, head_dim=24),
    "llama-shards": lambda d: llama(d, {"max_shard_size": "60KB"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_the_stock_model(name: str, tmp_path: Path) -> None:
    from flashkernel.generate.stock import StockEngine

    directory = MODELS[name](tmp_path)
    if "shards" in name:
        assert len(list(directory.glob("*.safetensors"))) > 2
    stock = StockEngine(directory, device="cpu", attention="eager")
    engine = Engine(load_model(directory), page_size=16)
    for sampling in (SamplingOptions(), SamplingOptions(temperature=0.9, top_k=20, top_p=0.9, seed=5)):
        request: dict[str, Any] = dict(max_new_tokens=40, sampling=sampling)
        expected = tokens_of(stock.generate(PROMPTS, **request), len(PROMPTS))
        assert tokens_of(engine.generate(PROMPTS, **request), len(PROMPTS)) == expected
        assert len({token for tokens in expected for token in tokens}) > 5  # not a constant
    assert engine.pages_in_use == 0
    assert engine.stats.prefill_tokens + engine.stats.prefix_tokens == sum(map(len, PROMPTS))


def test_greedy_equals_huggingface_generate(tmp_path: Path) -> None:
    """Against `model.generate` itself, not only our loop around the stock model."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = llama(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(directory).eval()
    engine = Engine(load_model(directory))
    for prompt in PROMPTS:
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, pad_token_id=0)[
            0, len(prompt) :
        ].tolist()
        assert tokens_of(engine.generate([prompt], max_new_tokens=30), 1) == [expected]


@pytest.mark.parametrize("chunk", [1, 5, 16, 1000])
@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_chunks_and_pages_do_not_change_tokens(chunk: int, page_size: int, tmp_path: Path) -> None:
    model = load_model(gpt2(tmp_path))
    expected = tokens_of(Engine(model).generate(PROMPTS, max_new_tokens=20), len(PROMPTS))
    engine = Engine(model, page_size=page_size, prefill_chunk=chunk)
    assert tokens_of(engine.generate(PROMPTS, max_new_tokens=20), len(PROMPTS)) == expected


def test_batch_mates_do_not_change_a_sequence(tmp_path: Path) -> None:
    engine = Engine(load_model(llama(tmp_path)))
    together = tokens_of(engine.generate(PROMPTS, max_new_tokens=20), len(PROMPTS))
    assert [tokens_of(engine.generate([prompt], max_new_tokens=20), 1)[0] for prompt in PROMPTS] == together


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(make: Any, dtype: str, tmp_path: Path) -> None:
    """First-token logits stay near float32's: the error of a dozen roundings of the dtype, not that of a wrong
    kernel.
    """
    directory = make(tmp_path)
    logits = {}
    for name in ("float32", dtype):
        model = load_model(directory, dtype=name)
        engine = Engine(model, page_size=16)
        seen: list[np.ndarray] = []
        forward = model.forward

        def spy(*args: Any, forward: Any = forward, seen: Any = seen, model: Any = model) -> Any:
            result = forward(*args)
            if not seen:  # the prompts' call; later ones may lie in a graph's capture, where nothing can be read
                seen.append(model.arrays.to_float32(result))
            return result

        model.forward = spy  # type: ignore[method-assign]
        tokens = tokens_of(engine.generate(PROMPTS, max_new_tokens=8, stop_tokens=frozenset()), len(PROMPTS))
        assert all(len(t) == 8 for t in tokens)
        logits[name] = seen[0]
    scale = np.abs(logits["float32"]).max()
    bound = {"float16": 0.01, "bfloat16": 0.08}[dtype]
    difference = np.abs(logits[dtype] - logits["float32"]).max() / scale
    assert 0 < difference < bound


def test_stop_tokens_end_a_sequence_and_free_its_pages(tmp_path: Path) -> None:
    engine = Engine(load_model(gpt2(tmp_path)), page_size=16)
    free_run = tokens_of(engine.generate(PROMPTS, max_new_tokens=30, stop_tokens=frozenset()), len(PROMPTS))
    stop = free_run[1][4]
    events = list(engine.generate(PROMPTS, max_new_tokens=30, stop_tokens={stop}))
    for index, tokens in enumerate(free_run):
        expected = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        mine = [event for event in events if event.sequence == index]
        assert [event.token for event in mine] == expected
        assert [event.finish for event in mine] == [None] * (len(mine) - 1) + ["stop" if stop in tokens else "length"]
    assert engine.pages_in_use == 0


def test_caller_that_stops_early_leaks_no_pages(tmp_path: Path) -> None:
    engine = Engine(load_model(gpt2(tmp_path)), page_size=16)
    events = engine.generate(PROMPTS, max_new_tokens=30)
    for _ in range(7):
        next(events)
    assert engine.pages_in_use > 0
    events.close()
    assert engine.pages_in_use == 0


def test_out_of_pages_is_typed_and_leaks_nothing(tmp_path: Path) -> None:
    engine = Engine(load_model(gpt2(tmp_path)), page_size=16, num_pages=4)
    with pytest.raises(fk.OutOfPagesError) as caught:
        list(engine.generate(PROMPTS, max_new_tokens=60))
    assert isinstance(caught.value, MemoryError)
    assert caught.value.num_pages == 4
    assert engine.pages_in_use == 0
    assert len(list(engine.generate([[1, 2]], max_new_tokens=5))) == 5  # the engine still works


def test_kernels_run(tmp_path: Path) -> None:
    engine = Engine(load_model(llama(tmp_path)))
    before = {kernel.id: kernel.calls for kernel in fk.kernels()}
    list(engine.generate([[1, 2, 3]], max_new_tokens=4))
    ran = {kernel.op for kernel in fk.kernels() if kernel.calls > before[kernel.id]}
    assert {"attention_fwd", "kv_append", "linear", "norm", "swiglu"} <= ran


# --- bad input


@pytest.mark.parametrize(
    ("prompts", "text"),
    [
        ([], "no prompts"),
        ([[1], []], "prompt 1 has no tokens"),
        ([[1] * 120], "128"),
        ([[1] * 500], "at most 0"),
        ([[97]], "id 97"),
        ([[-1]], "id -1"),
        ([[1], [1, 1.5]], "prompt 1 has 1.5; integers are needed"),
        ([["1"]], "prompt 0 has '1'; integers are needed"),
        ([1], "prompt 0 has 1; integers are needed"),
        (["a text"], "prompt 0 has 'a text'; integers are needed"),
    ],
)
def test_bad_prompts(prompts: list[list[int]], text: str, tmp_path: Path) -> None:
    engine = Engine(load_model(gpt2(tmp_path)))
    with pytest.raises(PromptError, match=text):
        engine.generate(prompts, max_new_tokens=20)
    with pytest.raises(PromptError, match=text.replace("prompt 1", "prompt 0")):
        engine.lockstep(prompts[-1:], 20)


def test_tokens_are_integers_of_any_kind(tmp_path: Path) -> None:
    engine = Engine(load_model(gpt2(tmp_path)))
    want = [event.token for event in engine.generate([[1, 2]], max_new_tokens=3)]
    for prompts in (np.array([[1, 2]]), [np.array([1, 2], np.int32)], [(np.int64(1), 2)]):
        assert [event.token for event in engine.generate(prompts, max_new_tokens=3)] == want
    with pytest.raises(PromptError, match="stop_tokens has 'ab'; integers are needed"):
        engine.generate([[1]], stop_tokens="ab")
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"^Engine: it holds a cache of pages"):
            copied(engine)


def test_bad_counts(tmp_path: Path) -> None:
    model = load_model(gpt2(tmp_path))
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        Engine(model).generate([[1]], max_new_tokens=0)
    with pytest.raises(ValueError, match=r"max_new_tokens=2\.5; an integer"):
        Engine(model).generate([[1]], max_new_tokens=2.5)
    with pytest.raises(ValueError, match=r"n=1\.5; an integer"):
        Engine(model).generate([[1]], max_new_tokens=2, n=1.5)
    with pytest.raises(ValueError, match="prefill_chunk=0"):
        Engine(model, prefill_chunk=0)
    with pytest.raises(ValueError, match="page_size"):
        list(Engine(model, page_size=17).generate([[1]], max_new_tokens=2))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_sampling(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SamplingOptions(**options)


def edit_config(directory: Path, **changes: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a directory"):
        load_model(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_model(tmp_path)
    directory = gpt2(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        TextTokenizer(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a valid tokenizer"):
        TextTokenizer(directory)
    weights = directory / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="not a valid safetensors"):
        load_model(directory)
    weights.unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        load_model(directory)
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(CheckpointError, match="pickle"):
        load_model(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_model(directory)


def test_shard_index_must_stay_inside(tmp_path: Path) -> None:
    directory = gpt2(tmp_path / "model", {"max_shard_size": "60KB"})
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = next(iter(content["weight_map"]))
    content["weight_map"][name] = "../outside.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="outside"):
        load_model(directory)


def test_unsupported_models(tmp_path: Path) -> None:
    directory = gpt2(tmp_path / "gpt2")
    with pytest.raises(UnsupportedModelError, match="mamba"):
        load_model(edit_config(directory, model_type="mamba"))
    with pytest.raises(UnsupportedModelError, match="relu"):
        load_model(edit_config(directory, model_type="gpt2", activation_function="relu"))
    with pytest.raises(UnsupportedModelError, match="cross_attention"):
        load_model(edit_config(directory, activation_function="gelu_new", add_cross_attention=True))
    other = llama(tmp_path / "llama")
    with pytest.raises(UnsupportedModelError, match="proportional"):
        load_model(edit_config(other, rope_parameters={"rope_type": "proportional", "rope_theta": 1e4, "factor": 4.0}))
    for error in (CheckpointError, PromptError, UnsupportedModelError):
        assert issubclass(error, GenerationError)
    assert issubclass(UnsupportedModelError, NotImplementedError) and issubclass(CheckpointError, ValueError)


def test_config_that_does_not_fit_the_weights(tmp_path: Path) -> None:
    directory = gpt2(tmp_path)
    for changes, text in [
        ({"n_inner": 10}, "c_fc"),
        ({"n_layer": 4}, r"h\.3\."),
        ({"n_head": 5}, "n_head"),
        ({"n_embd": "48"}, "n_embd"),
        ({"n_head": 0}, "n_head"),
    ]:
        original = (directory / "config.json").read_text()
        with pytest.raises(CheckpointError, match=text):
            load_model(edit_config(directory, **changes))
        (directory / "config.json").write_text(original)


def test_device_and_dtype_are_checked(tmp_path: Path) -> None:
    directory = gpt2(tmp_path)
    with pytest.raises(ValueError, match="tpu"):
        load_model(directory, device="tpu")
    with pytest.raises(ValueError, match="int8"):
        load_model(directory, dtype="int8")
    assert load_model(directory, device="cpu").arrays.device == "cpu"
    if not any(kernel.available and kernel.device == "cuda" for kernel in fk.kernels()):
        assert load_model(directory, device="auto").arrays.device == "cpu"
        with pytest.raises(NotImplementedError, match="doctor"):
            load_model(directory, device="cuda")


# --- parts


def test_bfloat16_checkpoints_read_exactly(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    values = {
        "a": torch.randn(3, 5).bfloat16(),
        "empty": torch.zeros(0, 4).bfloat16(),
        "half": torch.randn(7).half(),
        "ids": torch.arange(3),
    }
    save_file(values, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint(tmp_path)
    for name in ("a", "empty", "half"):
        np.testing.assert_array_equal(checkpoint.read(name), values[name].float().numpy())
    with pytest.raises(CheckpointError, match="I64"):
        checkpoint.read("ids")
    with pytest.raises(CheckpointError, match=r"\[3, 5\].*\[5, 3\]"):
        checkpoint.read("a", (5, 3))


def test_bfloat16_rounding_equals_torch() -> None:
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(0).integers(0, 2**32, 20000, dtype=np.uint32)
    edge = np.array(
        [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 1, 0x7FC00001], np.uint32
    )
    values = np.concatenate([bits, edge]).view(np.float32)
    expected = torch.from_numpy(values).bfloat16()
    got = float32_to_bfloat16(values)
    nan = np.isnan(values)
    np.testing.assert_array_equal(got[~nan], expected.view(torch.uint16).numpy()[~nan])
    assert np.isnan(bfloat16_to_float32(got)[nan]).all()


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 8192},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512},
        {
            "rope_type": "yarn",
            "rope_theta": 15e4,
            "factor": 32.0,
            "truncate": False,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
        },
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.3},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 512,
            "short_factor": [1 + 0.05 * i for i in range(64)],
            "long_factor": [1 + 0.5 * i for i in range(64)],
        },
    ],
    ids=str,
)
def test_rope_frequencies_equal_transformers(parameters: dict[str, Any]) -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    configuration = pytest.importorskip("transformers.models.llama.configuration_llama")
    config = configuration.LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=dict(parameters))
    expected = modeling.LlamaRotaryEmbedding(config)
    rope = read_rope(config.to_dict(), 128)
    inv_freq = rope.frequencies() if rope.inv_freq is None else rope.inv_freq
    np.testing.assert_allclose(inv_freq, expected.inv_freq.numpy(), rtol=2e-6)
    assert rope.factor == pytest.approx(expected.attention_scaling, rel=1e-9)
    assert rope.max_positions == (512 if parameters["rope_type"] == "longrope" else None)


def test_old_rope_layout() -> None:
    config = {"rope_theta": 1000.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "max_position_embeddings": 64}
    rope = read_rope(config, 8)
    assert (rope.theta, rope.rotary_dim) == (1000.0, 8)
    np.testing.assert_allclose(rope.inv_freq, 0.5 * 1000.0 ** (-np.arange(4) / 4), rtol=1e-6)


def test_sampler_distribution() -> None:
    """Drawn frequencies against the probabilities of temperature, top-k and top-p, computed by hand."""
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
    count = 4000

    def frequencies(**options: Any) -> np.ndarray:
        sampler = Sampler(SamplingOptions(seed=1, **options), 0)
        return np.bincount([sampler(logits) for _ in range(count)], minlength=4) / count

    for options, expected in [
        ({"temperature": 1.0}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.5}, np.array([0.25, 0.0625, 0.0225, 0.01]) / 0.345),
        ({"temperature": 1.0, "top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.8}, np.array([0.5, 0.25, 0.15, 0]) / 0.9),
        ({"temperature": 1.0, "top_p": 0.01}, [1, 0, 0, 0]),
    ]:
        got = frequencies(**options)
        assert (got[np.asarray(expected) == 0] == 0).all()
        np.testing.assert_allclose(got, expected, atol=0.03)  # 4 standard deviations of 4000 draws
    assert Sampler(SamplingOptions(), 0)(logits) == 0


def test_seeds_repeat_and_differ(tmp_path: Path) -> None:
    engine = Engine(load_model(gpt2(tmp_path)))

    def run(seed: int) -> list[list[int]]:
        options = SamplingOptions(temperature=1.0, seed=seed)
        return tokens_of(engine.generate(PROMPTS[:2], max_new_tokens=20, sampling=options), 2)

    assert run(1) == run(1) != run(2)


# --- the demo checkpoint


def test_demo_checkpoint_equals_the_stock_model() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = TextTokenizer(find_model("demo"))
    prompts = [
        tokenizer.encode(text) for text in ("def fibonacci(n):", "import os\n\nclass", "for i in range(10):\n    ")
    ]
    engine = Engine(load_model(find_model("demo")))
    got = tokens_of(engine.generate(prompts, max_new_tokens=48, stop_tokens=frozenset()), len(prompts))
    model = transformers.GPT2LMHeadModel.from_pretrained(find_model("demo"), dtype=torch.float32).eval()
    for prompt, tokens in zip(prompts, got, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # else the end-of-text token in front would be taken for padding
            max_new_tokens=48,
            min_new_tokens=48,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        assert tokens == expected[0, len(prompt) :].tolist()


def test_text_stream_equals_decoding_at_once() -> None:
    tokenizer = TextTokenizer(find_model("demo"))
    text = "naïve = 'λ → 日本語 🙂'  # tabs\tand   spaces\n"
    prompt = tokenizer.encode("# coding: utf-8\n")
    ids = tokenizer.encode(text)
    assert len(ids) > len("日本語🙂")
    stream = TextStream(tokenizer, prompt)
    parts = [stream.put(token) for token in ids]
    assert "".join(parts) + stream.end() == text
    assert not any("\ufffd" in part for part in parts)
    stream = TextStream(tokenizer, prompt)
    cut = tokenizer.encode("🙂")[:-1]
    if cut:  # an emoji that the vocabulary splits, cut in its middle: held back, then shown as unfinished
        assert "".join(stream.put(token) for token in cut) == ""
        assert "\ufffd" in stream.end()


def test_vocabulary_and_merges_of_older_checkpoints(tmp_path: Path) -> None:
    """vocab.json and merges.txt without tokenizer.json: the ids are those of Transformers' GPT-2 tokenizer."""
    transformers = pytest.importorskip("transformers")
    bpe = json.loads((find_model("demo") / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(bpe["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]), encoding="utf-8")
    ours = TextTokenizer(tmp_path)
    theirs = transformers.GPT2Tokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    source = Path(__file__).read_text(encoding="utf-8")
    for text in ("def f(x):\n\treturn x  # \u2603 \xe9\r\n", source, " a", "", "a<|endoftext|>b", "<|end"):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == text.replace("<|endoftext|>", "")
    (tmp_path / "merges.txt").write_text("no merges here", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"vocab\.json with merges\.txt is not a valid tokenizer"):
        TextTokenizer(tmp_path)


def test_a_prompt_that_is_not_text_is_refused() -> None:
    with pytest.raises(PromptError, match="character 2 of the prompt"):
        TextTokenizer(find_model("demo")).encode("# \udcff")


def test_copy_of_a_checkpoint_directory_works_anywhere(tmp_path: Path) -> None:
    """Nothing in a checkpoint refers to where it was saved."""
    original = gpt2(tmp_path / "a")
    moved = tmp_path / "b"
    shutil.copytree(original, moved)
    shutil.rmtree(original)
    assert len(list(Engine(load_model(moved)).generate([[1]], max_new_tokens=3))) == 3


def test_documentation_examples_run() -> None:
    import doctest

    import flashkernel.generate as module

    result = doctest.testmod(module)
    assert result.attempted >= 5 and result.failed == 0
