"""`flashkernel bench e2e` on tiny models: every provider runs, the figures hang together. No timing is asserted."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import flashkernel as fk
from flashkernel.bench import e2e
from flashkernel.cli import main

RUN = ["bench", "e2e", "--quick", "--device", "cpu", "--threads", "1"]


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = fk.get_num_threads(), torch.get_num_threads()
    yield
    fk.set_num_threads(before[0])
    torch.set_num_threads(before[1])


@pytest.mark.long
def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "e2e.json"
    assert main([*RUN, "--without", "hf_static_compile,vllm", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["schema"] == e2e.SCHEMA and {"cpu", "torch", "commit", "transformers"} <= set(result["machine"])
    assert len(result["rows"]) == 6 and result["left_out"] == []
    printed = capsys.readouterr()
    assert "[6/6]" in printed.err and printed.out.count("of the greedy row's decode tokens/s: flashkernel") == 2
    for row in result["rows"]:
        shape, providers = row["shape"], row["providers"]
        assert row["case"] in printed.out and list(providers) == ["flashkernel", "hf_sdpa", "hf_eager"]
        tokens = shape["batch"] * shape["new"]
        for p in providers.values():
            assert 0 < p["first_token_seconds"] and 0 < p["seconds_min"] <= p["seconds"] <= p["seconds_max"]
            assert p["tokens_per_second"] == pytest.approx(tokens / p["seconds"], rel=1e-4)
            assert p["ready_seconds"] >= 0
        ours, best = providers["flashkernel"], providers[row["best_peer"]]
        assert ours["ratio_to_best_peer"] == pytest.approx(
            ours["tokens_per_second"] / best["tokens_per_second"], rel=1e-4
        )
        if shape["sampled"]:
            greedy = next(r for r in result["rows"] if r["case"] == row["case"].removesuffix(", sampled"))
            share = ours["decode_tokens_per_second"] / greedy["providers"]["flashkernel"]["decode_tokens_per_second"]
            assert ours["ratio_to_greedy"] == pytest.approx(share, rel=1e-4) and "agreement_with_hf_eager" not in ours
        else:
            assert ours["agreement_with_hf_eager"] == 1.0  # float32: the same tokens
        # one page a sequence holds all tokens but the last
        config = e2e.build(shape["model"], "float32", "cpu", True).config
        assert ours["kv_bytes"] == shape["batch"] * 256 * e2e.kv_bytes(config, 4)
        assert row["static_kv_bytes"] == providers["hf_sdpa"]["kv_bytes"]


def test_static_cache_and_compile_run() -> None:
    """The compiled provider without waiting for a compiler: what is checked is its set-up and that all is put back."""
    model = e2e.build("gpt2", "float32", "cpu", True)
    shape = e2e.Shape("gpt2", "float32", 5, 3, 2)
    ids = torch.randint(0, 200, (2, 5))
    with e2e.provider("hf_sdpa", model, shape) as (generate, _):
        expected = generate(ids, 3)
    compiled = torch.compile
    try:
        torch.compile = lambda function, **_: function  # type: ignore[assignment]
        with e2e.provider("hf_static_compile", model, shape) as (generate, _):
            assert torch.equal(generate(ids, 3), expected)
    finally:
        torch.compile = compiled
    assert "forward" not in vars(model) and "generate" not in vars(model)
    with e2e.provider("flashkernel", model, shape) as (generate, used):
        assert torch.equal(generate(ids, 3), expected) and used()["kv_bytes"] > 0
    assert "generate" not in vars(model)


def test_what_is_asked_for_on_a_gpu() -> None:
    found = e2e.shapes("cuda", False)
    assert {s.batch for s in found} == {1, 8, 32} and {s.new for s in found} == {128} and len(found) == 26
    assert {s.prompt for s in found} == {32, 128, 896, 1024, 8192} and {s.prompt for s in found if s.sampled} == {128}
    assert {(s.model, s.dtype) for s in found} == {("gpt2", "float16"), ("llama-1b", "bfloat16")}
    # the true shapes, without their memory
    transformers = pytest.importorskip("transformers")
    expected = {"gpt2": 124_439_808, "llama-1b": 1_235_814_400}
    for name, (kind, options) in e2e.models(False).items():
        with torch.device("meta"):
            config = getattr(transformers, f"{kind}Config")(**options)
            model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
        assert sum(p.numel() for p in model.parameters()) == expected[name]


def test_bad_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--without", "nobody"]) == 2
    assert "hf_sdpa" in capsys.readouterr().err
    assert main([*RUN, "--case", "no such model"]) == 2
    assert main([*RUN, "--list"]) == 0
    assert "gpt2 prompt 16 + 8, batch 1" in capsys.readouterr().out


def test_budget_leaves_rows_out(tmp_path: Path) -> None:
    file = tmp_path / "e2e.json"
    assert main([*RUN, "--without", "hf_eager,hf_static_compile,vllm", "--budget", "1e-9", "--json", str(file)]) == 0
    assert len(json.loads(file.read_text())["left_out"]) == 6


FAKE_VLLM = """
import os, sys, time

print("a line that the engine prints")


class SamplingParams:
    def __init__(self, **options):
        self.options = options


class Answer:
    def __init__(self, tokens):
        self.outputs = [self]
        self.token_ids = tokens


class LLM:
    def __init__(self, model, max_model_len, **options):
        assert os.path.exists(os.path.join(model, "config.json")) and options["load_format"] == "dummy"
        with open(os.environ["FAKE_VLLM_STARTS"], "a") as file:
            file.write(f"{max_model_len} {options['dtype']};")

    def generate(self, prompts, sampling, use_tqdm):
        asked = sampling.options
        if asked["temperature"]:
            raise ValueError("no sampling today")
        time.sleep(0.05)
        return [Answer([sum(p["prompt_token_ids"]) % 211] * asked["max_tokens"]) for p in prompts]
"""


def test_vllm_is_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine for the rows of a model, its own times, and its words where it fails; with a stand-in for vLLM."""
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("FAKE_VLLM_STARTS", str(tmp_path / "starts"))
    file = tmp_path / "e2e.json"
    without = "hf_sdpa,hf_eager,hf_static_compile"
    assert main([*RUN, "--case", "gpt2 prompt", "--without", without, "--json", str(file)]) == 0
    one, three, sampled = json.loads(file.read_text())["rows"]
    assert (tmp_path / "starts").read_text() == "24 float32;"
    for row in (one, three):
        p = row["providers"]["vllm"]
        assert row["best_peer"] == "vllm" and "peak_bytes" not in p and p["ready_seconds"] > 0
        assert p["first_token_seconds"] >= 0.05 and p["seconds_min"] >= 0.05
    assert list(sampled["providers"]) == ["flashkernel"]
    assert sampled["refused"] == {"vllm": "ValueError: no sampling today"}


def test_report_shows_committed_results(tmp_path: Path) -> None:
    pytest.importorskip("tools.places", reason="the source tree is not beside the tests")
    from tools import whole_models
    from tools.places import RESULTS

    folder = tmp_path / RESULTS / "cpu"
    folder.mkdir(parents=True)
    file = folder / "e2e.json"
    assert whole_models.report(tmp_path) == ""
    without = "hf_eager,hf_static_compile,vllm"
    assert main([*RUN, "--case", "gpt2 prompt 16", "--without", without, "--json", str(file)]) == 0
    text = whole_models.report(tmp_path)
    assert "## Whole models: cpu/e2e" in text and "(../results/cpu/e2e.json)" in text
    assert "| gpt2 prompt 16 + 8, batch 1 float32 | flashkernel |" in text and "| hf_sdpa " in text
