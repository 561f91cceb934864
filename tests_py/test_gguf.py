"""GGUF files: values equal those of the package gguf, tokens those of Transformers on the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import torch

import gguf_files
from flashkernel.generate import CheckpointError, Engine, TextTokenizer, UnsupportedModelError, load_model
from flashkernel.generate.chat_template import ChatTemplate
from flashkernel.generate.decoder_model import DecoderModel
from flashkernel.generate.gguf_blocks import TYPES, to_float32
from flashkernel.generate.gguf_checkpoint import GgufCheckpoint
from flashkernel.generate.gguf_file import GgufFile

PROMPT = [1, 50, 90, 33, 7, 200]


def tokens_of(path: Path, count: int = 24) -> list[int]:
    engine = Engine(load_model(path, device="cpu"), page_size=16)
    return [event.token for event in engine.generate([PROMPT], max_new_tokens=count, stop_tokens=frozenset())]


def stock(path: Path) -> Any:
    """Transformers' own reading of the file, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def stock_tokens(model: Any, count: int = 24) -> list[int]:
    ids = torch.tensor([PROMPT])
    out = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(PROMPT) :].tolist()


# --- tensor types


@pytest.mark.parametrize("number", TYPES)
def test_values_of_a_block_equal_those_of_ggml(number: int) -> None:
    """Every bit pattern of the quants, and scales that are normal, tiny, 0 and negative."""
    kind = TYPES[number]
    theirs = gguf.GGMLQuantizationType(number)
    assert kind.name == theirs.name
    assert (kind.elements, kind.layout.itemsize) == gguf.GGML_QUANT_SIZES[theirs]
    rng = np.random.default_rng(number)
    raw = rng.integers(0, 256, (5000, kind.layout.itemsize), dtype=np.uint8)
    blocks = raw.reshape(-1).view(kind.layout)
    for name in ("d", "m", "dmin"):
        if kind.layout.names is not None and name in kind.layout.names:
            blocks[name] = rng.normal(size=5000).astype(np.float16)
            blocks[name][:4] = [0.0, -0.0, 6e-8, -65504.0]
    with np.errstate(invalid="ignore"):
        expected = gguf.dequantize(raw.reshape(-1), theirs) if number > 1 else blocks.astype(np.float32)
    ours = to_float32(blocks, kind)
    finite = np.isfinite(expected.reshape(-1))
    assert finite.mean() > 0.9
    assert np.array_equal(ours[finite].view(np.uint32), expected.reshape(-1)[finite].view(np.uint32))


@pytest.mark.parametrize("kind", gguf_files.SIZES)
def test_tokens_equal_transformers_for_every_type(kind: str, tmp_path: Path) -> None:
    path = gguf_files.decoder(kind, hidden=256, inner=256, heads=8).write(tmp_path / "model.gguf")
    assert GgufFile(path).kind("blk.1.ffn_up.weight") == kind
    model = stock(path)
    expected = stock_tokens(model)
    assert len(set(expected)) > 5  # not a constant
    assert tokens_of(path) == expected


def test_the_stock_engine_reads_the_file(tmp_path: Path) -> None:
    """`generate --no-flashkernel` on a GGUF file."""
    from flashkernel.generate.stock import StockEngine

    path = gguf_files.decoder("Q4_1").write(tmp_path / "model.gguf")
    events = StockEngine(path, device="cpu").generate([PROMPT], max_new_tokens=24, stop_tokens=frozenset())
    assert [event.token for event in events] == tokens_of(path)


# --- architectures


@pytest.mark.parametrize(
    "options",
    [
        {"tied": True},
        {"heads": 4, "heads_kv": 4},
        {"heads": 4, "heads_kv": 1},
        {"architecture": "qwen2", "biases": True},
        {"architecture": "qwen3", "tied": True, "hidden": 256, "heads": 2, "heads_kv": 1},
    ],
    ids=str,
)
def test_tokens_equal_transformers_for_every_architecture(options: dict[str, Any], tmp_path: Path) -> None:
    """Rows of Q and K, which llama.cpp moves for "llama" alone; biases; norms of heads."""
    path = gguf_files.decoder(**options).write(tmp_path / "model.gguf")
    expected = stock_tokens(stock(path))
    assert len(set(expected)) > 5
    assert tokens_of(path) == expected


def test_biases_of_llama_are_moved_too(tmp_path: Path) -> None:
    """Transformers' config of a file has no attention_bias, so its model of the weights read here is the peer."""
    path = gguf_files.decoder(biases=True).write(tmp_path / "model.gguf")
    assert tokens_of(path) == stock_tokens(by_config(path))
    checkpoint = GgufCheckpoint(path)
    moved = GgufFile(path).read("blk.0.attn_q.bias")
    back = checkpoint.read("model.layers.0.self_attn.q_proj.bias")
    assert not np.array_equal(moved, back) and np.array_equal(gguf_files.permuted(back, 4), moved)


def by_config(path: Path, **changes: Any) -> Any:
    """Transformers' model with the config and the weights that are read here."""
    checkpoint = GgufCheckpoint(path)
    config = transformers.AutoConfig.for_model(**{**checkpoint.config, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    state = {name: torch.from_numpy(checkpoint.read(name)) for name in checkpoint.names if name != "rope_freqs.weight"}
    model.load_state_dict(state, strict=not checkpoint.config["tie_word_embeddings"])
    return model.float().eval()


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def test_rope_of_llama_3_comes_as_divisors(tmp_path: Path) -> None:
    """A file holds what llama.cpp's converter has worked out of rope_type "llama3", and no rope_type."""
    from flashkernel.generate.rope_scaling import read_rope

    file = gguf_files.decoder()
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    scaled = read_rope({"rope_parameters": LLAMA3, "max_position_embeddings": 64}, 16).inv_freq
    assert scaled is not None
    divisors = (plain / scaled).astype("<f4")
    assert divisors.max() > 2 and divisors.min() == pytest.approx(1)
    file.tensors.insert(0, gguf_files.Tensor("rope_freqs.weight", 0, (8,), divisors.tobytes()))
    path = file.write(tmp_path / "model.gguf")
    model = load_model(path, device="cpu")
    assert isinstance(model, DecoderModel) and np.allclose(model.ropes[""].inv_freq, scaled, rtol=1e-6)
    assert tokens_of(path) == stock_tokens(by_config(path, rope_parameters=LLAMA3))
    assert tokens_of(path) != stock_tokens(by_config(path))  # the divisors matter


def test_linear_scaling(tmp_path: Path) -> None:
    for fields in (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ):
        path = gguf_files.decoder(**fields).write(tmp_path / "model.gguf")
        rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
        assert GgufCheckpoint(path).config["rope_parameters"] == rope
        assert tokens_of(path) == stock_tokens(by_config(path, rope_parameters=rope))


QWEN2 = {
    key.replace("llama", "qwen2"): value
    for key, value in gguf_files.decoder().metadata.items()
    if key.startswith("llama.")
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"general.architecture": "mamba"},
        "general.architecture='mamba'; one of llama, qwen2, qwen3, gemma2",
    ),
    "experts": ({"general.architecture": "qwen2", "qwen2.expert_count": 8, **QWEN2}, "expert_count=8"),
    "scaling": ({"llama.rope.scaling.type": "yarn"}, "scaling.type='yarn'; none or linear"),
    "window": ({"llama.attention.sliding_window": 16}, "sliding_window=16"),
    "part": ({"split.count": 3}, "one of 3 parts"),
    "partial rotation": ({"llama.rope.dimension_count": 8, "llama.attention.key_length": 16}, "dimension_count=8"),
    "value heads": ({"llama.attention.value_length": 8}, "value_length=8"),
    "heads by layer": ({"llama.attention.head_count_kv": [2, 1]}, "an array of 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_compute_something_else_is_refused(case: str, tmp_path: Path) -> None:
    fields, text = REFUSED[case]
    path = gguf_files.decoder(**fields).write(tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError, match=text):
        load_model(path, device="cpu")


def test_an_unknown_tensor_type_is_refused(tmp_path: Path) -> None:
    file = gguf_files.decoder()
    file.tensors[1].kind = 10  # Q2_K
    with pytest.raises(UnsupportedModelError, match="tensor type 10; one of F32, F16"):
        load_model(file.write(tmp_path / "model.gguf"), device="cpu")


def test_stop_tokens_are_those_of_the_file(tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 0xFFFFFFFF}
    path = gguf_files.decoder(**fields).write(tmp_path / "model.gguf")
    assert load_model(path, device="cpu").stop_tokens == {0, 2}


# --- tokenizers


TEXTS = [
    "hello world 12 123 x1",
    "<|im_start|>user\nhello<|im_end|>\n",
    "naïve 日本語 🎉\n\n  tail  ",
    "it's I'LL we'd 3.14",
    "",
]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_byte_level_tokens_equal_transformers(pre: str, tmp_path: Path) -> None:
    file = gguf_files.decoder(**{"tokenizer.ggml.pre": pre})
    path = file.write(tmp_path / "model.gguf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = TextTokenizer(path)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_digits_of_smollm_stand_alone(tmp_path: Path) -> None:
    """The vocabulary has the merge "1 2", which must not apply: SmolLM's own tokenizer cuts digits first."""
    for pre, count in (("smollm", 2), ("gpt-2", 1)):
        path = gguf_files.decoder(**{"tokenizer.ggml.pre": pre}).write(tmp_path / "model.gguf")
        assert len(TextTokenizer(path).encode("12")) == count


def sentencepiece(**fields: Any) -> gguf_files.File:
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    words = [("▁", -1.0), ("h", -2.0), ("e", -3.0), ("l", -4.0), ("o", -5.0), ("▁h", -6.0), ("ll", -7.0), ("el", -9.5)]
    words += [("llo", -8.0), ("▁he", -9.0), ("▁hello", -10.0), ("▁▁", -11.0), ("w", -12.0), ("▁w", -12.5)]
    file = gguf_files.decoder(
        **{
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": pieces + [word for word, _ in words],
            "tokenizer.ggml.scores": [0.0] * len(pieces) + [score for _, score in words],
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
            "tokenizer.ggml.unknown_token_id": 0,
            **fields,
        }
    )
    for name in ("tokenizer.ggml.pre", "tokenizer.ggml.merges", "tokenizer.ggml.add_bos_token"):
        del file.metadata[name]
    return file


def test_sentencepiece_tokens_equal_transformers(tmp_path: Path) -> None:
    path = sentencepiece().write(tmp_path / "model.gguf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = TextTokenizer(path)
    for text in [*TEXTS[2:], "hello hello", "  hello w", "</s>hello", "hell"]:
        ids = ours.encode(text, add_special=False)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert len(ours.encode("hello", add_special=False)) == 1
    assert ours.encode("hello")[0] == 1  # without a word of the file, SentencePiece's texts begin with <s>


def test_tokens_around_a_text(tmp_path: Path) -> None:
    flags = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    ours = TextTokenizer(gguf_files.decoder(**flags).write(tmp_path / "model.gguf"))
    inner = ours.encode("hello", add_special=False)
    assert ours.encode("hello") == [1, *inner, 2] and ours.decode(ours.encode("hello")) == "hello"


BROKEN_TOKENIZERS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "another model": ({"tokenizer.ggml.model": "bert"}, UnsupportedModelError, "model='bert'; gpt2"),
    "another cut": ({"tokenizer.ggml.pre": "default"}, UnsupportedModelError, "pre='default'; one of gpt-2"),
    "a merge of three": ({"tokenizer.ggml.merges": ["a b c"]}, CheckpointError, "merge 'a b c'"),
    "a merge of strangers": ({"tokenizer.ggml.merges": ["aaa b"]}, CheckpointError, "no valid tokenizer"),
    "no tokens": ({"tokenizer.ggml.tokens": []}, CheckpointError, "has 0 tokenizer.ggml.tokens"),
    "a token twice": ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, CheckpointError, "the token 'a' twice"),
    "too few types": ({"tokenizer.ggml.token_type": [1]}, CheckpointError, "has 1 tokenizer.ggml.token_type"),
    "numbers as tokens": ({"tokenizer.ggml.tokens": [1, 2]}, CheckpointError, "no array of str"),
    "bos outside": ({"tokenizer.ggml.bos_token_id": 10**6}, CheckpointError, "bos_token_id=1000000"),
}


@pytest.mark.parametrize("case", BROKEN_TOKENIZERS)
def test_broken_tokenizers(case: str, tmp_path: Path) -> None:
    fields, kind, text = BROKEN_TOKENIZERS[case]
    path = gguf_files.decoder(**fields).write(tmp_path / "model.gguf")
    with pytest.raises(kind, match=text):
        TextTokenizer(path)


# --- chat templates


CONVERSATION = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi.\n"},
    {"role": "user", "content": " 1 < 2? "},
]
TEMPLATES = [
    gguf_files.CHATML,
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'system' %}{% continue %}{% endif %}\n"
    "{{ loop.index }}{{ m | tojson }}{% generation %}{{ m.content | trim }}{% endgeneration %}{{ eos_token }}\n"
    "{% endfor %}{% set ns = namespace(n=0) %}{% set ns.n = messages | length %}{{ ns.n }}{{ add_generation_prompt }}"
    "{% if tools is not none %}tools{% endif %}{% if pad_token is defined %}pad{% endif %}{{ '-' * 3 }}",
]


@pytest.mark.parametrize("template", TEMPLATES, ids=["chatml", "everything"])
@pytest.mark.parametrize("begin", [False, True])
def test_a_template_renders_as_in_transformers(template: str, begin: bool, tmp_path: Path) -> None:
    path = gguf_files.decoder(**{"tokenizer.chat_template": template}).write(tmp_path / "model.gguf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = ChatTemplate.load(path)
    for messages in (CONVERSATION, CONVERSATION[1:2]):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=begin)
        assert ours.render(messages, add_generation_prompt=begin) == expected
