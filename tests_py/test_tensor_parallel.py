"""A model that several ranks share against the same model in one process: real processes, gloo, 2 and 4 ranks."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import gguf_files
import tensor_parallel_cases as cases
from flashkernel import testing
from flashkernel.cli import main
from flashkernel.generate import load_model
from flashkernel.generate.tensor_parallel import TensorParallel
from model_families import family_model
from ranks import Ranks

PROMPTS = [[5, 3, 90], [*range(1, 41)], [7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]]
NEW = 12
FOUR: dict[str, Any] = dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=4)


def gpt2(**changes: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=64, n_embd=48, n_layer=2, n_head=6, bos_token_id=96, eos_token_id=96, **changes
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2).add_(0.5 if parameter.dim() == 1 else 0.0)
    return model


# What they have: fused and separate matrices, biases, tied and other heads, norms of heads, windows and softcaps.
MODELS: dict[str, Any] = {
    "gpt2": gpt2,
    "llama": lambda **changes: family_model("llama-yarn", **{"attention_bias": True, "mlp_bias": True, **changes}),
    "phi3": lambda **changes: family_model("phi3", **changes),
    "qwen3": lambda **changes: family_model("qwen3-yarn", **{"tie_word_embeddings": True, **changes}),
    "gemma2": lambda **changes: family_model("gemma2", **changes),
    "gemma3": lambda **changes: family_model("gemma3-scaled", **changes),
    "granite": lambda **changes: family_model("granite-biases", **changes),
    "smollm3": lambda **changes: family_model("smollm3", **changes),
    "mixtral": lambda **changes: family_model("mixtral", **changes),
    "olmo2": lambda **changes: family_model("olmo2", **changes),
}
CASES = [
    ("gpt2", "float32"), ("llama", "float32"), ("phi3", "float32"), ("qwen3", "float32"),
    ("gpt2", "bfloat16"), ("llama", "float16"),
]  # fmt: skip
LONG = [("gemma2", "float32"), ("gemma3", "float32"), ("granite", "float32"), ("smollm3", "float32")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Any:
    """Checkpoints by name and changes, each saved once."""
    saved: dict[str, str] = {}

    def folder(name: str, **changes: Any) -> str:
        key = name + repr(changes)
        if key not in saved:
            path = tmp_path_factory.mktemp(name)
            MODELS[name](**changes).save_pretrained(path)
            saved[key] = str(path)
        return saved[key]

    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Any:
    group = Ranks(2, tmp_path_factory.mktemp("two"))
    yield group
    group.close()


def check(answers: list[Any], folder: str, dtype: str) -> None:
    assert all(isinstance(answer, dict) for answer in answers), answers
    for answer in answers[1:]:  # every rank has the same tokens, to the bit of what they are drawn from
        assert answer["greedy"] == answers[0]["greedy"] and answer["drawn"] == answers[0]["drawn"]
        np.testing.assert_array_equal(answer["scores"], answers[0]["scores"])
    first = answers[0]
    assert first["pages"] == 0
    alone = cases.everything(load_model(folder, device="cpu", dtype=dtype), PROMPTS, NEW)
    exact = cases.everything(load_model(folder, device="cpu"), PROMPTS, NEW) if dtype != "float32" else alone
    if dtype == "float32":
        assert first["greedy"] == alone["greedy"]
        assert first["drawn"] == alone["drawn"]
        # Sums in another order; one process multiplies Q8_0 blocks by integers, which is 3e-7 of the largest result.
        atol = 32 * np.finfo(np.float32).eps * np.abs(alone["scores"]).max()
        np.testing.assert_allclose(first["scores"], alone["scores"], rtol=0, atol=atol)
        return
    # Parts of a sum are rounded to 16 bits before they are added: no worse than what rounding does to one process.
    worst = np.abs(alone["scores"] - exact["scores"]).max()
    floor = 16 * testing.EPSILON[dtype] * np.abs(exact["scores"]).max()
    assert np.abs(first["scores"] - exact["scores"]).max() <= 2 * worst + floor


@pytest.mark.parametrize(("name", "dtype"), [*CASES, *(pytest.param(*c, marks=pytest.mark.long) for c in LONG)])
def test_equals_one_process(two, folders, name, dtype) -> None:
    folder = folders(name)
    check(two.ask(cases.answers, folder, dtype, PROMPTS, NEW), folder, dtype)


@pytest.mark.long
def test_four_ranks(folders, tmp_path) -> None:
    four = Ranks(4, tmp_path)
    try:
        for name in ("llama", "phi3", "qwen3", "gemma2"):
            folder = folders(name, **FOUR)
            check(four.ask(cases.answers, folder, "float32", PROMPTS, NEW), folder, "float32")
    finally:
        four.close()


@pytest.mark.long
def test_a_gguf_file(two, tmp_path) -> None:
    """Its quantised matrices are dequantised, since a rank's part of a row may end within a block."""
    pytest.importorskip("gguf")  # makes the blocks
    path = str(gguf_files.decoder("Q8_0", biases=True).write(tmp_path / "model.gguf"))
    check(two.ask(cases.answers, path, "float32", PROMPTS, NEW), path, "float32")


REFUSED = {
    "folder": ("ValueError: tensor_parallel: load_model: rank 1 refused it", "CheckpointError: load_model: "),
    "config": ("ValueError: tensor_parallel: load_model: rank 1 has other arguments than rank 0",) * 2,
    "dtype": ("ValueError: tensor_parallel: load_model: rank 1 has other arguments than rank 0",) * 2,
    "engine": ("ValueError: tensor_parallel: Engine: rank 1 has other arguments than rank 0",) * 2,
    "prompt": ("ValueError: tensor_parallel: generate: rank 1 has other arguments than rank 0",) * 2,
    "call": ("ValueError: tensor_parallel: rank 1 makes another call than rank 0 (here it is ",) * 2,
    # A sum of other sizes would end the process of one rank.
    "cancel": ("ValueError: tensor_parallel: a step: rank 1 has other arguments than rank 0",) * 2,
    "between": ("ValueError: tensor_parallel: rank 1 makes another call than rank 0 (here it is ",) * 2,
    "heads": (
        "UnsupportedModelError: load_model: config.json has num_key_value_heads=1, which 2 ranks of tensor_parallel "
        "can't share; a multiple of 2 is needed",
    )
    * 2,
    "experts": ("UnsupportedModelError: load_model: tensor_parallel with model_type='mixtral', which has experts",) * 2,
    "norms": ("UnsupportedModelError: load_model: tensor_parallel with model_type='olmo2', which has norms over",) * 2,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_every_rank_refuses(two, folders, tmp_path, kind) -> None:
    others = {
        "folder": lambda: str(tmp_path),
        "config": lambda: folders("llama", max_position_embeddings=128),
        "heads": lambda: folders("llama", num_key_value_heads=1),
        "experts": lambda: folders("mixtral"),
        "norms": lambda: folders("olmo2"),
    }
    other = others[kind]() if kind in others else ""
    call = "heads" if kind in ("experts", "norms") else kind
    answers = two.ask(cases.refused, call, folders("llama"), other)
    for answer, wanted in zip(answers, REFUSED[kind], strict=True):
        assert isinstance(answer, str) and answer.startswith(wanted), answers


def test_a_dead_rank_is_an_error(tmp_path, folders) -> None:
    pair = Ranks(2, tmp_path)
    try:
        answer, ended = pair.ask(cases.die, folders("gpt2"))
        assert ended is None
        assert answer.startswith("PeerError: tensor_parallel: ") and "a rank ended or did not answer" in answer
    finally:
        pair.close()


def test_a_rank_that_stays_away_is_an_error(tmp_path, folders) -> None:
    pair = Ranks(2, tmp_path)
    try:
        answer, other = pair.ask(cases.late, folders("gpt2"))
        assert other == "late"
        assert answer.startswith("PeerError: tensor_parallel: ") and "a rank ended or did not answer" in answer
    finally:
        pair.close()


def test_the_example_runs() -> None:
    text = TensorParallel.__doc__
    test = doctest.DocTestParser().get_doctest(text, {}, "TensorParallel", None, 0)
    report: list[str] = []
    assert not doctest.DocTestRunner().run(test, out=report.append).failed, report


def test_without_a_group() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel: .* is not initialised"):
        TensorParallel()


# --- the command


def test_the_command_needs_torchrun(capsys, monkeypatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert main(["generate", "--model", "demo", "--prompt", "x", "--tensor-parallel"]) == 2
    assert "--tensor-parallel without torchrun; run `torchrun" in capsys.readouterr().err


@pytest.mark.long
def test_the_command() -> None:
    """torchrun finds a free port by itself; the first process writes for all, what one process alone writes."""
    asked = [
        "generate",
        "--model",
        "demo",
        "--prompt",
        "def main(",
        "--max-new-tokens",
        "12",
        "--device",
        "cpu",
        "--json",
    ]
    module = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    texts = []
    for command in ([sys.executable, "-m"], module):
        shared = ["--tensor-parallel"] if command is module else []
        done = subprocess.run([*command, "flashkernel", *asked, *shared], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        texts.append(json.loads(done.stdout)["sequences"])
    assert texts[0] == texts[1]
