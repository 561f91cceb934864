"""How every command behaves as a program: streams, JSON, closed pipes, widths, encodings, errors, shutdown."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import flashkernel as fk
import gguf_files
from flashkernel import selfcheck, terminal
from flashkernel.bench.tables import ABOVE, listing
from flashkernel.cli import main

ROOT = Path(__file__).resolve().parents[1]
GENERATE = [
    "generate",
    "--model",
    "demo",
    "--prompt",
    "import os",
    "--max-new-tokens",
    "4",
    "--ignore-eos",
    "--device",
    "cpu",
]
BENCH = ["bench", "norm", "--quick", "--device", "cpu", "--case", "rms_norm 16", "--dtype", "float32"]
STATISTICS = re.compile(r"tokens/s|prefill|\d written|^device   ", re.MULTILINE)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.decoder(context=256).write(tmp_path_factory.mktemp("chat") / "model.gguf")


@pytest.fixture
def commands(chat_model: Path) -> dict[str, list[str]]:
    """One way to call each command that ends by itself."""
    return {
        "generate": GENERATE,
        "chat": ["chat", str(chat_model), "--max-tokens", "4", "--device", "cpu"],
        "doctor": ["doctor", "--no-check"],
        "kernels": ["kernels"],
        "bench": BENCH,
        "bench list": ["bench", "--list"],
    }


NAMES = ("generate", "chat", "doctor", "kernels", "bench", "bench list")
JSON = ("generate", "chat", "doctor", "kernels", "bench")


def process(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **options.pop("environment", {})}
    command = [sys.executable, "-m", "flashkernel.cli", *words]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, **options)


def in_process(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    return main(words)


@pytest.mark.parametrize("name", NAMES)
def test_stdout_holds_the_result_and_no_statistics(
    name: str, commands: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_process(commands[name], monkeypatch) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() and not STATISTICS.search(printed.out)
    if name in ("generate", "chat"):
        assert STATISTICS.search(printed.err)
        assert not any(kernel.id in printed.out + printed.err for kernel in fk.kernels())


def test_generate_names_kernels_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GENERATE, "--verbose"]) == 0
    printed = capsys.readouterr()
    for op in ("attention_fwd/", "linear/", "norm/", "kv_append/"):
        assert op in printed.err and op not in printed.out


def documented(name: str) -> set[str]:
    page = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^### `flashkernel {name} --json.*?`$(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL)
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize("name", JSON)
def test_json_has_the_documented_shape(
    name: str, commands: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not (ROOT / "docs").is_dir():
        pytest.skip("the source tree is not beside the tests")
    monkeypatch.setattr(selfcheck, "check_kernels", lambda: map(selfcheck.check_kernel, add_kernels()))
    words = [*commands[name], "--json", *(["-"] if name == "bench" else [])]
    assert in_process([word for word in words if word != "--no-check"], monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)
    keys = set(found[0]) if name == "kernels" else set(found)
    assert keys == documented(name)


@pytest.mark.skipif(os.name == "nt", reason="pipes of Windows have no SIGPIPE")
@pytest.mark.parametrize("name", [*NAMES, "help"])
def test_a_reader_that_goes_away_ends_the_command(name: str, commands: dict[str, list[str]]) -> None:
    """stdout is a pipe that nobody reads: as after `| head -1`, at once."""
    read, write = os.pipe()
    os.close(read)
    words = {**commands, "help": ["generate", "--help"]}[name]
    with process(words, stdin=subprocess.PIPE, stdout=write) as running:
        os.close(write)
        _, errors = running.communicate(b"hello", timeout=120)
    assert running.returncode == 128 + signal.SIGPIPE, errors
    assert b"Traceback" not in errors and b"Exception ignored" not in errors and b"BrokenPipe" not in errors


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("name", ["generate", "kernels"])
def test_a_full_disk_is_said_once(name: str, commands: dict[str, list[str]]) -> None:
    with open("/dev/full", "wb") as full, process(commands[name], stdout=full) as running:
        _, errors = running.communicate(timeout=120)
    assert running.returncode == 1 and b"Exception ignored" not in errors
    assert errors.splitlines()[-1].startswith(f"flashkernel {name}: failed: ".encode())


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
@pytest.mark.parametrize("name", ["generate", "doctor"])
def test_a_stdout_that_is_closed_is_nowhere(name: str, commands: dict[str, list[str]]) -> None:
    line = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "flashkernel.cli", *commands[name]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(line, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("columns", [40, 100, 200])
@pytest.mark.parametrize("name", ["doctor", "kernels", "bench"])
def test_tables_fit(
    name: str,
    columns: int,
    commands: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    words = [*commands[name], *(["--verbose"] if name == "doctor" else [])]
    assert in_process(words, monkeypatch) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    if columns == 200 and name != "bench":
        assert re.search(r"^norm/cpu/scalar +cpu ", out, re.MULTILINE)


def test_a_pipe_gets_a_hundred_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "__stdout__", io.StringIO())
    assert terminal.width() == 100
    assert main(["kernels", "linear"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def share_row(share: float) -> dict[str, Any]:
    p = dict.fromkeys(("mean", "std", "min", "p50", "p95", "p99", "max"), 1e-3)
    ours = {"kind": "ours", **p, "tflops": 1.0, "gbytes_per_second": 1.0, "peak_bytes": None, "share_of_limit": share}
    limit = {"bound": "memory", "seconds": 1e-3}
    row = {"group": "norm", "case": "rms_norm 4096 x 4096", "dtype": "float32", "limit": limit, "refused": {}}
    peers = {f"peer_number_{i}": {"kind": "peer", **p} for i in range(6)}
    return {**row, "providers": {"flashkernel": {**ours, "kernels": ["norm/cuda/" + "x" * 30]}, **peers}}


def test_more_than_the_limit_is_explained() -> None:
    for share, said in ((1.04, True), (1.004, False), (0.97, False)):
        text = listing([share_row(share)], 100)
        assert f"{share:.0%} memory" in text and (ABOVE[:20] in text) == said == ("% memory *" in text)
        assert max(map(len, text.splitlines())) <= 100 and "peer_number_5 1.00" in " ".join(text.split())


@pytest.mark.parametrize("name", ["generate", "doctor", "kernels"])
def test_an_encoding_that_knows_few_characters(name: str, commands: dict[str, list[str]]) -> None:
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    words = [word.replace("import os", "# \N{SNOWMAN}") for word in commands[name]]
    if name == "generate":  # the words of a command line are read by the locale; its text by PYTHONIOENCODING
        environment |= {"PYTHONUTF8": "1"}
    with process(words, stdout=subprocess.PIPE, environment=environment) as running:
        out, errors = running.communicate(timeout=120)
    assert running.returncode == 0, errors
    assert out.decode("ascii") and (name != "generate" or out.startswith(b"# ?"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "COMMAND"),
        (["nothing"], "invalid choice"),
        (["generate"], "no --prompt"),
        (["generate", "--model", "demo", "--prompt", "x", "--model", "/no\nwhere"], "not a directory"),
        (["generate", "--model", "demo", "--prompt", "x", "--dtype", "int8"], "int8"),
        (["chat", "/nowhere"], "not a directory"),
        (["serve", "--port", "70000"], "--port 70000"),
        (["serve", "--port", "x"], "--port"),
        (["doctor", "--nothing"], "--nothing"),
        (["kernels", "nothing"], "no op 'nothing'"),
        (["bench", "nothing"], "attention_forward"),
        (["bench", "norm", "--quick", "--json", "/nowhere/x.json"], "a folder that exists"),
    ],
)
def test_an_error_is_one_line(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = in_process(words, monkeypatch)
    except SystemExit as exit:
        code = exit.code  # type: ignore[assignment]
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert code == 2 and printed.out == "" and says in line
    assert line.startswith(" ".join(["flashkernel", *words[:1]]).replace(" nothing", "") + ": error: ")


def test_doctor_says_the_verdict_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = selfcheck.fk.add
    monkeypatch.setattr(selfcheck, "check_kernels", lambda: map(selfcheck.check_kernel, add_kernels()))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("All well: ") and "add/cpu/scalar" not in out
    monkeypatch.setattr(selfcheck.fk, "add", lambda *args, **kwargs: right(*args, **kwargs) * 2)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("WRONG: ") and lines[1].startswith("FAIL  add/cpu/")


def test_doctor_without_torch_leaves_out_what_it_cannot_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine with a GPU and without PyTorch, where each kernel for the GPU was WRONG once."""

    class OnGpu:
        device = "cuda"

        def __getattr__(self, name: str) -> Any:
            return getattr(on_cpu[0], name)

    on_cpu, on_gpu = add_kernels(), [OnGpu() for _ in range(3)]
    now = selfcheck.fk.kernels  # with their counts of calls
    monkeypatch.setattr(selfcheck.fk, "kernels", lambda: [*(row for row in now() if row.op == "add"), *on_gpu])
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "torch" else find(name, *more))
    assert {check.kernel for check in selfcheck.check_kernels()} == {row.id for row in on_cpu}
    assert main(["doctor"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == f"All well: each of the {len(on_cpu)} kernels that were checked computes right."
    assert second.startswith("3 kernels for GPUs are not checked: PyTorch")


def test_a_check_has_the_head_dim_of_its_kernel() -> None:
    """Also where more follows in the id: decode's were given 64, and accepted no case."""
    ids = {"attention_fwd/cuda/sm90a/decode/f16/d128/group": 128, "attention_fwd/cuda/sm80/d96": 96, "add/cuda": 64}
    assert {name: selfcheck.head_dim_of(name) for name in ids} == ids


def add_kernels() -> list[Any]:
    return [kernel for kernel in fk.kernels() if kernel.op == "add" and kernel.available]


def test_the_engines_thread_has_ended_when_the_server_has() -> None:
    """The last thing of `flashkernel serve`: the app waits for the engine, also for what nobody listens to any more."""
    pytest.importorskip("prometheus_client")
    pytest.importorskip("uvicorn")
    pytest.importorskip("httpx")
    from serving import serving

    before = set(threading.enumerate())
    with serving():
        (engine,) = [t for t in threading.enumerate() if t not in before and t.name == "flashkernel-engine"]
        assert engine.is_alive()
    assert not engine.is_alive()
