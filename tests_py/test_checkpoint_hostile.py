"""Folders made to break load_model, TextTokenizer and `flashkernel generate`: each gets the package's own error, a
sentence of one line, within a bound of time and memory.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")  # of chat templates

import checkpoint_fuzz
from flashkernel.cli import main
from flashkernel.generate import (
    CheckpointError,
    GenerationError,
    ModelMemoryError,
    TextTokenizer,
    UnsupportedModelError,
    load_model,
)
from flashkernel.generate.files import describe, shown
from flashkernel.terminal import visible

linux = pytest.mark.skipif(sys.platform != "linux", reason="limits of address space and time as Linux has them")


@linux
@pytest.mark.parametrize("seed", range(2))
def test_mutated_folders_get_typed_errors(seed: int) -> None:
    """The folders are loaded in another process: a crash or an abort there is a failure here."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, checkpoint_fuzz.__file__, str(seed), "1500"],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads(run.stdout)
    assert not result["failures"], "\n".join(result["failures"][:20])
    assert result["cases"] == 1500 and 100 < result["loaded"] < 1000  # neither all sound nor all refused


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return checkpoint_fuzz.make(tmp_path / "llama", "llama", False)


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    return checkpoint_fuzz.make(tmp_path / "gpt2", "gpt2", False)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return checkpoint_fuzz.make(tmp_path / "shards", "llama", True)


def edit(directory: Path, name: str = "config.json", **changes: Any) -> Path:
    path = directory / name
    path.write_bytes(checkpoint_fuzz.dumps({**json.loads(path.read_bytes()), **changes}))
    return directory


INTEGERS = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
INTEGERS += ["num_key_value_heads", "head_dim", "max_position_embeddings"]
GPT2_INTEGERS = ["vocab_size", "n_embd", "n_layer", "n_head", "n_positions", "n_inner"]
NOT_INTEGERS = [2.5, 2.0, True, "2", [2], {"a": 2}, -1, 0, 2**31, 10**12, checkpoint_fuzz.HUGE, float("nan")]


@pytest.mark.parametrize("value", NOT_INTEGERS, ids=str)
def test_integers_are_integers(value: Any, llama: Path, gpt2: Path) -> None:
    """Heads of 2.5 were truncated to 2; Transformers refuses 2.0 too."""
    for directory, names in ((llama, INTEGERS), (gpt2, GPT2_INTEGERS)):
        sound = (directory / "config.json").read_bytes()
        for name in names:
            with pytest.raises(CheckpointError, match=f"{name}=|not valid JSON"):
                load_model(edit(directory, **{name: value}), device="cpu")
            (directory / "config.json").write_bytes(sound)


@pytest.mark.parametrize("value", [None, 0, 1, "true", [], {}], ids=str)
def test_flags_are_flags(value: Any, llama: Path) -> None:
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
        sound = (llama / "config.json").read_bytes()
        with pytest.raises(CheckpointError, match=f"{name}=.* true or false is needed"):
            load_model(edit(llama, **{name: value}), device="cpu")
        (llama / "config.json").write_bytes(sound)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rope_parameters": 3}, "rope_parameters=3; an object or null is needed"),
        ({"rope_scaling": [1]}, "rope_scaling=<a JSON array of 1>"),
        ({"rope_parameters": {"rope_type": "linear"}}, "has no factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": float("inf")}}, "factor=inf"),
        ({"rope_parameters": {"rope_type": ["x"]}}, "rope_type="),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta=0"),
        ({"rope_theta": "10000"}, "rope_theta='10000'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06"),
        ({"hidden_act": ["silu"]}, "hidden_act="),
        ({"eos_token_id": 2.5, "rms_norm_eps": 1e-6}, None),  # generation_config.json's is the one that is read
        ({"model_type": ["llama"]}, "model_type=<a JSON array"),
        ({"model_type": "\x1b]0;x\x07"}, r"model_type='\\x1b\]0;x\\x07'"),
        ({"num_attention_heads": 17, "head_dim": None}, "heads of 0 elements"),
    ],
    ids=str,
)
def test_fields_of_the_config(changes: dict[str, Any], text: str | None, llama: Path) -> None:
    edit(llama, **changes)
    if text is None:
        load_model(llama, device="cpu")
        return
    with pytest.raises((CheckpointError, UnsupportedModelError), match=text):
        load_model(llama, device="cpu")


@pytest.mark.parametrize("value", [2.5, True, "3", {"a": 1}, [3, None], [[3]], checkpoint_fuzz.HUGE], ids=str)
def test_end_of_text_tokens_are_integers(value: Any, llama: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json (has eos_token_id=|is not valid JSON)"):
        load_model(edit(llama, "generation_config.json", eos_token_id=value), device="cpu")


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_hidden_layers", 2**31 - 1), ("vocab_size", 2**31 - 1), ("hidden_size", 2**31 - 1), ("head_dim", 65536)],
)
def test_no_memory_for_what_the_weights_do_not_have(name: str, value: int, llama: Path) -> None:
    edit(llama, **{name: value})
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            load_model(llama, device="cpu")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


JSON_TEXTS: dict[str, tuple[bytes, str]] = {
    "deep arrays": (b'{"a":' + b"[" * 200_000, "nested too deep|not valid JSON"),
    "deep objects": (b'{"a":' * 100_000, "nested too deep|not valid JSON"),
    "mark of byte order": (b"\xef\xbb\xbf{}", "not valid JSON"),
    "not UTF-8": (b'{"a": "\xff"}', "not valid JSON"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not valid JSON"),
    "5000 digits": (b'{"a": ' + b"7" * 5000 + b"}", "not valid JSON|no model_type|model_type=None"),
    "a name twice": (b'{"model_type": "gpt2", "model_type": "llama"}', "'model_type' occurs twice"),
    "an array": (b"[]", "holds a list"),
    "null": (b"null", "holds a NoneType"),
    "nothing": (b"", "not valid JSON"),
    "escapes": (b'{"\x1b[31m\\u001b[31m": 1, "\x1b[31m": ', "not valid JSON"),
}


@pytest.mark.parametrize("case", JSON_TEXTS)
def test_text_that_is_no_config(case: str, llama: Path) -> None:
    data, text = JSON_TEXTS[case]
    (llama / "config.json").write_bytes(data)
    with pytest.raises(GenerationError, match=text) as caught:
        load_model(llama, device="cpu")
    assert visible(str(caught.value)) == str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "shard", [[], {}, 3, None, 2.5, "../x.safetensors", "/etc/passwd", "", ".", "..", "a\0b", "\x1b"]
)
def test_index_names_only_files_of_the_folder(shard: Any, shards: Path) -> None:
    path = shards / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = shard
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="names the shard"):
        load_model(shards, device="cpu")


@pytest.mark.parametrize("weight_map", [[], {}, 3, None, "x", [["a", "b"]]], ids=str)
def test_index_needs_a_map(weight_map: Any, shards: Path) -> None:
    with pytest.raises(CheckpointError, match="no weight_map"):
        load_model(edit(shards, "model.safetensors.index.json", weight_map=weight_map), device="cpu")


def entry(dtype: Any = "F32", shape: Any = (2,), begin: Any = 0, end: Any = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS: dict[str, tuple[Any, bytes]] = {
    "overlap": ({"a": entry(), "b": entry()}, bytes(8)),
    "hole": ({"a": entry(), "b": entry(begin=16, end=24)}, bytes(24)),
    "shape that overflows": ({"a": entry(shape=[2**62, 8, 2])}, bytes(8)),
    "unknown type": ({"a": entry("X1")}, bytes(8)),
    "backwards": ({"a": entry(begin=8, end=0)}, bytes(8)),
    "cut": ({"a": entry()}, bytes(4)),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": entry()}, bytes(8)),
    "a name twice": (b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
    "name of a megabyte": ({"a" * 10**6: entry(), "b": entry()}, bytes(8)),
    "deep": (b'{"a":' + b"[" * 100_000, b""),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_of_safetensors(case: str, llama: Path) -> None:
    header, data = HEADERS[case]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (llama / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not (a )?valid") as caught:
        load_model(llama, device="cpu")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("length", [0, 1, 10**8, 2**31, 2**63, 2**64 - 1])
def test_lengths_of_safetensors_headers(length: int, llama: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="not a valid safetensors file"):
        load_model(llama, device="cpu")


@pytest.mark.parametrize("shape", [[0, 2**62, 2**60], [1] * 100], ids=["huge and empty", "100 dims"])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "I64", "F8_E4M3"])
def test_shapes_that_numpy_lacks(shape: list[int], dtype: str, llama: Path) -> None:
    size = {"F32": 4, "BF16": 2, "I64": 8, "F8_E4M3": 1}[dtype] * (0 if 0 in shape else 1)
    text = json.dumps({"model.norm.weight": entry(dtype, shape, 0, size)}).encode()
    (llama / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(CheckpointError):
        load_model(llama, device="cpu")


# --- what stands in a file's place


def replace(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop of links":
        path.symlink_to(path.name)
    elif kind == "dangling link":
        path.symlink_to("nothing")


@linux
@pytest.mark.parametrize("kind", ["directory", "pipe", "device", "loop of links", "dangling link"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_no_file_in_a_file_s_place(name: str, kind: str, llama: Path) -> None:
    """Opening a pipe would wait for ever."""
    replace(llama / name, kind)
    text = f"has no {name}|no weights|cannot be read|neither model.safetensors"
    with pytest.raises(CheckpointError, match=text):
        (TextTokenizer if name == "tokenizer.json" else lambda d: load_model(d, device="cpu"))(llama)


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "nothing", "\x1b[2J"])
def test_names_of_no_directory(name: str, tmp_path: Path) -> None:
    for call in (TextTokenizer, lambda d: load_model(d, device="cpu")):
        with pytest.raises(CheckpointError) as caught:
            call(tmp_path / name)
        assert len(str(caught.value)) < 500 and "\x1b" not in str(caught.value)
    with pytest.raises(CheckpointError, match="not a directory"):
        load_model(__file__)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")])
@pytest.mark.parametrize("where", ["stat", "open"])
def test_files_that_cannot_be_read(where: str, error: OSError, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        with monkeypatch.context() as patch:
            real: Callable[..., Any] = os.stat if where == "stat" else Path.open

            def broken(path: Any, *args: Any, _name: str = name, _real: Any = real, **options: Any) -> Any:
                if Path(path).name == _name:
                    raise error
                return _real(path, *args, **options)

            patch.setattr(os if where == "stat" else Path, where, broken)
            with pytest.raises(CheckpointError, match=rf"{name}'? cannot be read: {error.strerror}"):
                load_model(llama, device="cpu")


def test_lack_of_memory_is_said(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any, **__: Any) -> Any:
        raise MemoryError("Unable to allocate 7 TiB")

    monkeypatch.setattr("flashkernel.generate.safetensors_file.SafetensorsFile.read", no_memory)
    with pytest.raises(ModelMemoryError, match="needs more memory"):
        load_model(llama, device="cpu")
    assert issubclass(ModelMemoryError, MemoryError) and issubclass(ModelMemoryError, GenerationError)


# --- the tokenizer


def test_panics_of_rust_packages_are_errors(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors
    import tokenizers

    class PanicException(BaseException):
        pass

    def panic(*_: Any, **__: Any) -> Any:
        raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr(safetensors, "safe_open", panic)
    with pytest.raises(CheckpointError, match="unwrap"):
        load_model(llama, device="cpu")
    tokenizer = TextTokenizer(llama)
    monkeypatch.setattr(tokenizer, "_tokenizer", type("T", (), {"encode": panic, "decode": panic})())
    with pytest.raises(CheckpointError, match="cannot encode the prompt: PanicException"):
        tokenizer.encode("a")
    with pytest.raises(CheckpointError, match="cannot decode the tokens: PanicException"):
        tokenizer.decode([1])
    monkeypatch.setattr(tokenizers, "Tokenizer", type("T", (), {"from_file": panic}))
    with pytest.raises(CheckpointError, match="not a valid tokenizer: PanicException"):
        TextTokenizer(llama)


def test_a_vocabulary_without_its_unknown_token(llama: Path) -> None:
    path = llama / "tokenizer.json"
    path.write_text(path.read_text().replace('"[UNK]":20', '"x":20').replace('"[UNK]": 20', '"x": 20'))
    with pytest.raises(CheckpointError, match="cannot encode the prompt"):
        TextTokenizer(llama).encode("other")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("added_tokens.json", {"<extra>": 21}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"21": {"content": "<extra>", "special": False}}}),
    ],
)
def test_added_tokens_that_the_tokenizer_lacks(file: str, content: Any, llama: Path) -> None:
    """Transformers would add them; without them the same text has other ids."""
    (llama / file).write_text(json.dumps(content).replace("<extra>", "w1"))
    assert TextTokenizer(llama).encode("w1") == [1]
    (llama / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="lacks the added token '<extra>'"):
        TextTokenizer(llama)


# --- the command


def test_the_command_says_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fuzzer = checkpoint_fuzz.Fuzzer(tmp_path)
    codes = []
    for number in range(60):
        directory, name, data = fuzzer.any_case(random.Random(f"command-{number}"))
        sound = (directory / name).read_bytes()
        (directory / name).write_bytes(data)
        arguments = ["--model", str(directory), "--device", "cpu", "--prompt", "w1 w2", "--max-new-tokens", "2"]
        codes.append(main(["generate", *arguments]))
        (directory / name).write_bytes(sound)
        lines = [line for line in capsys.readouterr().err.splitlines() if ": warning: " not in line]
        if codes[-1] == 0:
            assert [line.split()[0] for line in lines] == ["prefill", "decode", "device"]
        else:
            assert codes[-1] in (1, 2) and len(lines) == 1, lines
            assert lines[0].startswith("flashkernel generate: ") and len(lines[0]) < 1000
            assert visible(lines[0]) == lines[0]
    assert codes.count(2) > 20 and codes.count(0) > 2


def test_a_config_too_long_to_parse_is_not_read(llama: Path) -> None:
    with (llama / "config.json").open("r+b") as file:
        file.truncate(1 << 40)  # a hole: no disk is used
    with pytest.raises(CheckpointError, match=r"config\.json has 1099511627776 bytes"):
        load_model(llama, device="cpu")


def test_values_in_sentences_are_short() -> None:
    for value in ("a" * 10**6, [[]] * 10**6, {str(i): i for i in range(10**5)}, 10**5000, b"x" * 10**6):
        assert len(describe(value)) < 200
    assert describe(2.5) == "2.5" and describe("a") == "'a'" and describe(None) == "None"
    assert shown("a\nb\x1b") == "a b\\x1b"
