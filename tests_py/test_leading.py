"""An engine that one rank leads and others follow: real processes; `serve` and `chat` under torchrun."""

from __future__ import annotations

import doctest
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import gguf_files
import tensor_parallel_cases as cases
from flashkernel.cli import main
from flashkernel.generate import Engine, SamplingOptions, TextOutput, TextTokenizer, find_model, load_model
from flashkernel.generate.leading import LeadingEngine, follow
from ranks import Ranks

FOLDER = str(find_model("demo"))
DRAWN = SamplingOptions(temperature=0.9, top_p=0.95, seed=3)
ASKED: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("def fibonacci(n):", {"max_new_tokens": 30}, ()),
    ("class A:", {"max_new_tokens": 40, "sampling": DRAWN, "sequence": 7}, ("self",)),
    ("import ", {"max_new_tokens": 40}, ("\n",)),
    ("for i in", {"max_new_tokens": 24, "sampling": DRAWN}, ()),
]


def alone() -> list[tuple[list[int], str | None]]:
    """Each request in an engine of this process."""
    engine, tokenizer, found = Engine(load_model(FOLDER, device="cpu"), page_size=16), TextTokenizer(FOLDER), []
    for prompt, more, strings in ASKED:
        ids = tokenizer.encode(prompt)
        until = TextOutput(tokenizer, ids, strings).until if strings else None
        request = engine.submit(ids, until=until, **more)
        while request.finish is None:
            engine.step()
        found.append((request.generated, request.finish))
    return found


def test_followers_do_as_the_leader(tmp_path: Path) -> None:
    """Few pages and rows, so that requests wait and some are computed again; a cancel, refusals, stop strings."""
    two = Ranks(2, tmp_path)
    try:
        first, second = two.ask(cases.leads, FOLDER, ASKED)
    finally:
        two.close()
    assert isinstance(first, dict), first
    wanted = alone()
    assert first["found"] == wanted and {"stop", "length"} == {finish for _, finish in wanted}
    assert first["cancelled"] == "cancelled"
    assert [text.split("; ")[-1] for text in first["refusals"]][3:] == ["one of them is needed"] * 2
    assert len(first["refusals"]) == 5
    assert first["left"] == second == {"idle": True, "pages": 0, "preemptions": first["left"]["preemptions"]}


def test_a_leader_that_ends_is_an_error(tmp_path: Path) -> None:
    two = Ranks(2, tmp_path)
    try:
        ended, answer = two.ask(cases.leader_dies, FOLDER)
    finally:
        two.close()
    assert ended is None
    assert answer.startswith("PeerError: tensor_parallel: a message of rank 0: a rank ended"), answer


@pytest.mark.long
def test_an_idle_leader_keeps_its_followers(tmp_path: Path) -> None:
    two = Ranks(2, tmp_path)
    try:
        assert two.ask(cases.patience, FOLDER) == [2, "dismissed"]
    finally:
        two.close()


def test_the_example_runs() -> None:
    test = doctest.DocTestParser().get_doctest(LeadingEngine.__doc__ or "", {}, "LeadingEngine", None, 0)
    report: list[str] = []
    assert not doctest.DocTestRunner().run(test, out=report.append).failed, report


def test_alone_there_is_nobody_to_lead() -> None:
    model = load_model(FOLDER, device="cpu")
    with pytest.raises(ValueError, match="LeadingEngine is for rank 0"):
        LeadingEngine(model)
    with pytest.raises(ValueError, match="follow is for the ranks"):
        follow(Engine(model))


@pytest.mark.parametrize("command", [["serve", "--model", "demo"], ["chat", "demo"]])
def test_commands_need_torchrun(command: list[str], capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    assert main([*command, "--tensor-parallel"]) == 2
    error = capsys.readouterr().err
    assert "--tensor-parallel without torchrun; run `torchrun" in error and f"flashkernel {command[0]} --ten" in error


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "flashkernel"]


@pytest.mark.long
def test_serve() -> None:
    """OpenAI's client at the first of two processes; SIGTERM ends both when the answers are complete."""
    openai = pytest.importorskip("openai")
    pytest.importorskip("uvicorn")
    options = ["--model", "demo", "--device", "cpu", "--port", "0", "--json", "--tensor-parallel", "--threads", "1"]
    with subprocess.Popen(
        [*TORCHRUN, "serve", *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            facts = json.loads(process.stdout.readline())
            client = openai.OpenAI(base_url=facts["url"], api_key="x", max_retries=0, timeout=120)
            tokenizer = TextTokenizer(FOLDER)
            for (prompt, more, strings), (tokens, finish) in zip(ASKED, alone(), strict=True):
                output = TextOutput(tokenizer, tokenizer.encode(prompt), strings)
                wanted = "".join(map(output.put, tokens)) + output.end()
                if more.get("sequence"):
                    continue  # HTTP has no number of a sequence
                sampling = more.get("sampling")
                drawn = {"temperature": 0.9, "top_p": 0.95, "seed": 3} if sampling else {"temperature": 0}
                parts = client.completions.create(
                    model=facts["model"], prompt=prompt, max_tokens=more["max_new_tokens"], stop=list(strings) or None,
                    stream=True, **drawn,
                )  # fmt: skip
                choices = [part.choices[0] for part in parts if part.choices]
                assert "".join(choice.text for choice in choices) == wanted
                assert choices[-1].finish_reason == finish
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@pytest.mark.long
def test_chat(tmp_path: Path) -> None:
    """An answer under torchrun is the answer of one process."""
    pytest.importorskip("jinja2")
    path = str(gguf_files.decoder().write(tmp_path / "model.gguf"))
    answers = []
    for command in ([sys.executable, "-m", "flashkernel"], TORCHRUN):
        shared = ["--tensor-parallel"] if command is TORCHRUN else ["--weights", "dequantized"]
        done = subprocess.run(
            [*command, "chat", path, "--json", "--max-tokens", "8", "--context", "64", "--device", "cpu", *shared],
            input="Hello", capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout)["text"])
    assert answers[0] == answers[1] and answers[0]
