"""The `flashkernel` command: output, exit codes and error texts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flashkernel as fk
from flashkernel.cli import main
from flashkernel.generate import Engine, SamplingOptions, TextTokenizer, find_model, load_model

PROMPT = "def fibonacci(n):"
GENERATE = ("generate", "--model", "demo")


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# --- generate


def test_generate_prints_text_and_statistics(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GENERATE, "--prompt", PROMPT, "--max-new-tokens", "24"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(PROMPT) and "tokens/s" not in printed.out
    assert "tokens/s" in printed.err and "device   " in printed.err


def test_generate_json_and_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    args = (
        *GENERATE,
        "--prompt",
        PROMPT,
        "--prompt",
        "import",
        "--max-new-tokens",
        "16",
        "--ignore-eos",
        "--temperature",
        "1",
        "--seed",
    )
    first, again, other = (run_json(capsys, *args, seed) for seed in ("1", "1", "2"))
    assert [s["tokens"] for s in first["sequences"]] == [s["tokens"] for s in again["sequences"]]
    assert [s["tokens"] for s in first["sequences"]] != [s["tokens"] for s in other["sequences"]]
    assert [len(s["tokens"]) for s in first["sequences"]] == [16, 16]
    tokenizer = TextTokenizer(find_model("demo"))
    for sequence in first["sequences"]:
        assert sequence["text"] == tokenizer.decode(sequence["tokens"]) or "\ufffd" in sequence["text"]
    assert first["decode_tokens"] == 30 and first["decode_tokens_per_second"] > 0
    assert first["kernels"] and first["flashkernel"]


def test_stock_path_writes_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    args = (
        *GENERATE,
        "--prompt",
        PROMPT,
        "--prompt",
        "class Point:\n    def",
        "--max-new-tokens",
        "32",
        "--greedy",
    )
    ours, stock = run_json(capsys, *args), run_json(capsys, *args, "--no-flashkernel")
    assert ours["sequences"] == stock["sequences"]
    assert stock["kernels"] == {} and not stock["flashkernel"]


def test_batch_prints_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GENERATE, "--prompt", "import os", "--prompt", "class A", "--max-new-tokens", "8"]) == 0
    out = capsys.readouterr().out
    assert out.index("prompt 1 of 2") < out.index("import os") < out.index("prompt 2 of 2") < out.index("class A")


def test_threads_and_stdin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    before = fk.get_num_threads()
    monkeypatch.setattr(sys, "stdin", io.StringIO("import "))
    try:
        result = run_json(capsys, *GENERATE, "--prompt", "-", "--max-new-tokens", "4", "--threads", "1")
    finally:
        fk.set_num_threads(before)
    assert result["threads"] == 1 and result["sequences"][0]["prompt"] == "import "


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["generate"], "--prompt"),
        ([*GENERATE, "--prompt", "x", "--model", "/nowhere"], "not a directory"),
        ([*GENERATE, "--prompt", "x", "--greedy", "--top-k", "5"], "--greedy"),
        ([*GENERATE, "--prompt", "x", "--temperature", "-1"], "temperature"),
        (["kernels", "nothing"], "attention_fwd"),
    ],
)
def test_bad_input_exits_with_2(args: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert text in capsys.readouterr().err


def test_too_long_a_request_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GENERATE, "--prompt", "x", "--max-new-tokens", "100000"]) == 2
    assert "context" in capsys.readouterr().err


def test_too_few_pages_exit_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                *GENERATE,
                "--prompt",
                "x " * 40,
                "--max-new-tokens",
                "8",
                "--page-size",
                "16",
                "--num-pages",
                "1",
            ]
        )
        == 1
    )
    assert "page" in capsys.readouterr().err


def test_usage_errors_exit_with_2() -> None:
    for args in ([], ["nothing"], ["generate", "--max-new-tokens", "0"], ["generate", "--dtype", "int8"]):
        with pytest.raises(SystemExit) as exit:
            main(args)
        assert exit.value.code == 2


@pytest.mark.parametrize("count", ["0", "-3", "many", "1.5", ""])
def test_counts_say_what_they_need(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*GENERATE, "--prompt", "x", "--max-new-tokens", count])
    assert f"{count!r}: an integer >= 1 is needed" in capsys.readouterr().err


def test_missing_torch_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["bench", "norm", "--quick"]) == 2
    assert "pip install torch" in capsys.readouterr().err


def test_command_is_installed_and_needs_no_torch(tmp_path: Path) -> None:
    """The command runs as a user starts it: another process, where torch and transformers can't be imported."""
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')\n")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    command = [
        sys.executable,
        "-m",
        "flashkernel.cli",
        *GENERATE,
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        "8",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(PROMPT)
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["prefill", "decode", "device"]  # no progress
    done = subprocess.run([*command, "--no-flashkernel"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install torch" in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_text_that_the_terminal_lacks_is_replaced(encoding: str) -> None:
    """A pipe on Windows, or a C locale: the text goes on, with a mark where a character can't be shown."""
    command = [
        sys.executable,
        "-m",
        "flashkernel.cli",
        *GENERATE,
        "--prompt",
        "# \u2603",
        "--max-new-tokens",
        "4",
    ]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0" if os.name == "nt" else "1"}
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == 0 and done.stdout.startswith(b"# ?"), done.stderr


# --- kernels and doctor


def test_kernels_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_json(capsys, "kernels")
    assert [row["id"] for row in rows] == [kernel.id for kernel in fk.kernels()]
    assert main(["kernels", "linear"]) == 0
    out = capsys.readouterr().out
    assert "linear/cpu/scalar" in out and "attention_fwd" not in out


def test_doctor_passes_on_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert fk.__version__ in out and "FAIL" not in out
    for kernel in fk.kernels():
        if kernel.available:
            assert re.search(rf"^{re.escape(kernel.id)} +PASS ", out, re.MULTILINE)
    assert fk.forced_kernels() == os.environ.get("FLASHKERNEL_FORCE", "")  # what was forced is let go


def test_doctor_fails_when_a_kernel_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import flashkernel.selfcheck as selfcheck

    right = selfcheck.fk.add

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out = right(*args, **kwargs)
        if out.dtype == "float32":
            out[3, 5] += 1e-2
        return out

    monkeypatch.setattr(selfcheck.fk, "add", wrong)
    assert main(["doctor", "--json"]) == 1
    checks = {check["kernel"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert not checks["add/cpu/scalar"]["passed"] and "float32: result: error" in checks["add/cpu/scalar"]["detail"]
    assert checks["swiglu/cpu/scalar"]["passed"]


def test_doctor_json(capsys: pytest.CaptureFixture[str]) -> None:
    facts = run_json(capsys, "doctor", "--no-check")
    assert facts["version"] == fk.__version__ and facts["cuda"] and "checks" not in facts
    assert facts["frameworks"]["numpy"] and facts["threads"] >= 1


# --- sampling options


def test_generate_options_reach_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """Each option of the command line changes the text as the engine's own option does."""
    args = (
        *GENERATE,
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        "20",
        "--ignore-eos",
        "--temperature",
        "1.3",
    )
    model = Engine(load_model(find_model("demo"), device="cpu"))
    ids = TextTokenizer(find_model("demo")).encode(PROMPT)
    texts = []
    for name, value, options in (
        ("--seed", "3", {"seed": 3}),
        ("--min-p", "0.4", {"min_p": 0.4}),
        ("--typical-p", "0.2", {"typical_p": 0.2}),
        ("--repetition-penalty", "4", {"repetition_penalty": 4.0}),
        ("--frequency-penalty", "9", {"frequency_penalty": 9.0}),
        ("--presence-penalty", "8", {"presence_penalty": 8.0}),
        ("--logit-bias", "300=40", {"logit_bias": {300: 40.0}}),
    ):
        (sequence,) = run_json(capsys, *args, name, value)["sequences"]
        events = model.generate(
            [ids],
            max_new_tokens=20,
            sampling=SamplingOptions(temperature=1.3, **options),
            stop_tokens=frozenset(),
        )
        assert sequence["tokens"] == [event.token for event in events], name
        texts.append(tuple(sequence["tokens"]))
    assert len(set(texts)) == len(texts)


def test_generate_n_stop_and_logprobs(capsys: pytest.CaptureFixture[str]) -> None:
    args = (*GENERATE, "--prompt", PROMPT, "--max-new-tokens", "30", "--min-p", "0.1", "-n", "3")
    plain = run_json(capsys, *args, "--ignore-eos")["sequences"]
    assert len({sequence["text"] for sequence in plain}) == 3
    stop = plain[0]["text"][5:8]
    found = run_json(capsys, *args, "--ignore-eos", "--stop", stop, "--logprobs", "2")["sequences"]
    assert found[0]["finish"] == "stop" and found[0]["text"] == plain[0]["text"][: plain[0]["text"].index(stop)]
    for sequence in found:
        assert stop not in sequence["text"]
        assert len(sequence["logprobs"]) == len(sequence["top_logprobs"]) == len(sequence["tokens"])
        assert all(len(top) == 2 and top[0]["logprob"] >= top[1]["logprob"] for top in sequence["top_logprobs"])
    assert main([*GENERATE, "--prompt", PROMPT, "--logprobs", "2"]) == 2
    assert "--logprobs without --json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*GENERATE, "--prompt", PROMPT, "--logit-bias", "x=1"])
    assert "a token id and a number" in capsys.readouterr().err
