"""`flashkernel bench`: every group runs, the results agree with torch, JSON and CSV are sane. No timing is asserted."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flashkernel as fk
from flashkernel.bench.case import OURS, PEER, Settings
from flashkernel.bench.machine import last_level_cache_bytes
from flashkernel.bench.memory import peak_extra_bytes
from flashkernel.bench.results import read
from flashkernel.bench.runner import difference
from flashkernel.bench.suites import GROUPS, SUITES, select
from flashkernel.bench.suites.kernels import OPS, representative
from flashkernel.cli import build_parser, main

pytestmark = pytest.mark.chooses_kernels
ROOT = Path(__file__).resolve().parents[1]
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Run]:
    """Runs the command on the CPU with one thread (so that it needs no pauses) and gives back its JSON."""
    threads = fk.get_num_threads(), torch.get_num_threads()

    def run(*words: str, code: int = 0) -> dict[str, Any]:
        file = tmp_path / "bench.json"
        common = ["--quick", "--device", "cpu", "--threads", "1", "--json", str(file)]
        assert main(["bench", *words, *common]) == code
        return read(file)

    yield run
    fk.set_num_threads(threads[0])
    torch.set_num_threads(threads[1])


def check_row(row: dict[str, Any]) -> None:
    assert row["agrees"] and not row["refused"]
    kinds = [provider["kind"] for provider in row["providers"].values()]
    assert OURS in kinds and PEER in kinds and row["best_peer"] in row["providers"]
    for name, p in row["providers"].items():
        assert p["calls"] >= 3
        assert 0 < p["min"] <= p["p50"] <= p["p95"] <= p["p99"] <= p["max"]
        assert p["min"] <= p["mean"] * 1.00001 and p["mean"] <= p["max"] * 1.00001 and p["std"] >= 0
        assert row["flop"] is None or p["tflops"] == pytest.approx(row["flop"] / p["p50"] * 1e-12, rel=1e-4)
        assert row["bytes"] is None or p["gbytes_per_second"] == pytest.approx(row["bytes"] / p["p50"] * 1e-9, rel=1e-4)
        if p["kind"] == OURS:
            assert p["kernels"] and all("/" in kernel for kernel in p["kernels"])
            if name.startswith("sample/"):  # whose draws are checked by what top-p lets in
                assert p["relative_error"] is None
            else:
                assert 0 <= p["relative_error"] < 0.2
            best = row["providers"][row["best_peer"]]["p50"]
            assert p["ratio_to_best_peer"] == pytest.approx(best / p["p50"], rel=1e-4)
            own = p["kernels"]
            if name.startswith("linear_cross_entropy"):  # the products of its chunks are linear's kernels
                own = [kernel for kernel in own if not kernel.startswith(("linear/", "linear_bwd/"))]
            if name.endswith(("cpu/composed", "cuda/generic")) and name in own:  # beside it the ops that it is made of
                own = [name]
            assert "/" not in name or own == [name]


@pytest.mark.parametrize("group", [name for name in GROUPS if name not in ("kernels", "attention_f32")])
def test_quick_run(group: str, bench: Run, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(group)
    assert {"cpu", "threads", "torch", "flashkernel", "commit", "date"} <= set(result["machine"])
    assert result["method"]["quick"] and result["command"].startswith(f"flashkernel bench {group}")
    assert result["rows"] and set(result["ceilings"]) >= {"read", "copy"}
    printed = capsys.readouterr()
    assert f"[1/{len(result['rows'])}]" in printed.err  # progress
    for row in result["rows"]:
        assert row["group"] == group and row["case"] in printed.out
        check_row(row)
        if group != "call_overhead":
            assert row["flop"] or row["bytes"]
        if group == "decode":  # both sides against a plain sum over the same bytes, timed in turn
            assert row["limit"]["by"] in ("sum", "torch sum")
            p = row["providers"]["flashkernel"]
            assert p["share_of_limit"] == pytest.approx(row["limit"]["seconds"] / p["p50"], rel=1e-4)
        if group == "attention_memory":
            assert row["library_peak_bytes"] > 0


def test_every_kernel_of_the_registry_has_a_row(bench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench("--kernels", "all", "--csv", str(tmp_path / "bench.csv"))
    available = {kernel.id for kernel in fk.kernels() if kernel.available and kernel.device == "cpu"}
    timed = {name for row in result["rows"] for name, p in row["providers"].items() if p["kind"] == OURS}
    assert timed == available
    for row in result["rows"]:
        check_row(row)
        assert re.search(
            r"\d", row["case"].removeprefix("attention_fwd d64").removeprefix("attention_bwd d64")
        )  # sizes
    assert fk.forced_kernels() == ""
    printed = capsys.readouterr().out
    assert available <= set(printed.split())
    with (tmp_path / "bench.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line["provider"] for line in lines} >= available
    for line in lines:
        assert float(line["p50_us"]) > 0 and line["cpu"] and line["torch"] and line["flashkernel"]


def test_dtypes_parts_and_kernel_prefixes(bench: Run) -> None:
    rows = bench("--kernels", "softmax/cpu,add/cpu/scalar", "--dtype", "bfloat16", "--dtype", "float16")["rows"]
    assert {row["dtype"] for row in rows} == {"bfloat16", "float16"}
    assert {row["case"] for row in rows} == {"softmax 16 x 128", "add 16 x 128"}
    result = bench("--kernels", "softmax/cpu,add/cpu/scalar", "--case", "soft", "--case", "no such row")
    assert {row["case"] for row in result["rows"]} == {"softmax 16 x 128"}
    assert '--case "soft" --case "no such row"' in result["command"]
    parts = [bench("elementwise", "--part", f"{i}/3")["rows"] for i in (1, 2, 3)]
    whole = bench("elementwise")["rows"]
    names = [(row["case"], row["dtype"]) for part in parts for row in part]
    assert sorted(names) == sorted((row["case"], row["dtype"]) for row in whole)


def test_a_budget_that_is_spent_leaves_rows_out(bench: Run, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench("elementwise", "--budget", "1e-9")
    assert len(result["rows"]) == 0 and len(result["left_out"]) == 13
    assert "left out for lack of time: elementwise: softmax" in capsys.readouterr().err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    for name in [*SUITES, "attention_forward", "sdpa_cudnn", "cublaslt_gelu", "triton"]:
        assert name in printed
    assert main(["bench", "attention", "--list", "--device", "cuda"]) == 0  # a GPU's rows, without one
    assert "(1, 16, 16384, 128) causal float16" in capsys.readouterr().out
    assert main(["bench", "--list", "--kernels", "all", "--device", "cpu"]) == 0
    assert "kernels (" in capsys.readouterr().out


def test_what_is_asked_for_on_a_gpu() -> None:
    """The rows of the comparison with attention libraries, without making their tensors."""
    s = Settings(device="cuda")
    cases = [case for name in select(["attention"]) for case in GROUPS[name](s)]
    shapes = [case.shape for case in cases if case.group == "attention_forward"]
    assert len(shapes) == 36  # 6 lengths, full and causal, 3 head dims
    assert all(x["batch"] * x["seq"] == 16384 and x["heads"] * x["head_dim"] == 2048 for x in shapes)
    assert sum(case.group == "attention_backward" for case in cases) == 24
    assert [case.shape["page"] for case in cases if case.group == "attention_gqa"] == [0, 16, 256]
    rungs = [(case.name.split()[0], case.shape) for case in GROUPS["attention_ladder"](s)]
    assert len(rungs) == 16 and {op for op, _ in rungs} == {"attention_fwd", "attention_bwd"}
    assert all(x["batch"] * x["seq"] == 16384 and x["heads"] * x["head_dim"] == 2048 for _, x in rungs)
    sizes = [case.shape for case in GROUPS["attention_sizes"](s)]
    assert {x["batch"] for x in sizes} == {1, 4, 8, 16} and {x["head_dim"] for x in sizes} == {64, 128}
    assert {x["seq"] for x in sizes} == {512, 1024, 2048, 4096, 8192, 16384, 131072}
    assert {case.dtype for case in GROUPS["attention_sizes"](s)} == {"float16", "bfloat16", "float32"}
    layers = {("GELU" in case.name, case.shape["features"], case.shape["outputs"]) for case in GROUPS["linear"](s)}
    widths = [(768, 3072), (2048, 8192), (4096, 16384)]
    assert layers == {(True, *size) for size in widths} | {(False, out, width) for width, out in widths}


def test_the_ladder_has_the_registrys_rungs(bench: Run) -> None:
    """On the CPU they run; on a GPU each of them is a kernel of the sources, by name."""
    from flashkernel.bench.suites import attention

    for row in bench("attention_ladder")["rows"]:
        op = row["case"].split()[0]
        there = {
            kernel.id for kernel in fk.kernels() if kernel.available and kernel.device == "cpu" and kernel.op == op
        }
        named = {f"{op}/{rung}" for rung in attention.LADDER[op]}
        forced = {name: p["kernels"] for name, p in row["providers"].items() if "/" in name}
        assert set(forced) == there & named and all(ran == [name] for name, ran in forced.items())
    source = ROOT / "src" / "cuda" / "kernels.cpp"
    if not source.is_file():
        pytest.skip("the source tree is not beside the tests")
    text = source.read_text()
    for op, rungs in attention.LADDER.items():
        for rung in rungs:
            if rung.startswith("cuda/"):
                arch = rung.split("/")[1]
                folder = {"attention_fwd": "forward", "attention_bwd": "backward"}[op]
                assert f'"{op}/{rung.format("f16/d64")}"' in text, rung
                assert (ROOT / "src" / "cuda" / "attention" / folder / arch).is_dir(), rung


def test_every_kernel_in_the_cuda_sources_has_a_representative() -> None:
    source = ROOT / "src" / "cuda" / "kernels.cpp"
    if not source.is_file():
        pytest.skip("the source tree is not beside the tests")
    text = source.read_text()
    ops = set(re.findall(r'"([a-z_]+)/cuda/', text)) | set(re.findall(r'"cuda/\w+/([a-z_]+?)(?:_f32)?_instances', text))
    assert ops - {"attention_decode", "attention_decode_quantized"} <= set(OPS)  # rows of attention_fwd
    ids = [*re.findall(r'"([a-z_]+/cuda/[a-z0-9_/]+)"', text), "attention_fwd/cuda/sm80/decode/bf16/d192"]
    for kernel in ids:
        row = representative(kernel)
        assert row.op == kernel.split("/")[0] and row.dtype in ("float32", "float16", "bfloat16")
    last = representative(ids[-1])
    assert (last.mode, last.dtype, last.head_dim) == ("decode", "bfloat16", 192)
    with pytest.raises(ValueError, match="no representative shape for the op 'sort'"):
        representative("sort/cuda/generic")


def test_doors_cost_something_over_the_plain_op(bench: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = bench("doors")["rows"]
    plain = row["providers"]["flashkernel"]["p50"]
    for name in ("torch_op", "flash_attn_func", "sdpa_door"):
        door = row["providers"][name]
        assert door["over_plain"] == pytest.approx(door["p50"] - plain, rel=1e-3, abs=1e-9) and door["kernels"]
    assert "over_plain" not in row["providers"]["sdpa"] and "us over the plain" in capsys.readouterr().out


def test_every_bench_command_in_the_docs_can_be_typed() -> None:
    if not (ROOT / "README.md").is_file():
        pytest.skip("the source tree is not beside the tests")
    text = "\n".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    commands = [line.split("#")[0] for line in re.findall(r"^flashkernel bench.*$", text, re.MULTILINE)]
    assert len(commands) >= 8
    for command in commands:
        args = build_parser().parse_args(shlex.split(command)[1:])
        if args.group not in (["report"], ["e2e"], ["survey"]):
            assert select(args.group)


def test_difference() -> None:
    a = torch.tensor([1.0, 2.0])
    assert difference(a, a) == 0 and difference((a, a), (a, 2 * a)) == 0.5
    assert difference(a, a[:1]) == float("inf")
    assert difference(a, torch.tensor([1.0, torch.nan])) == float("inf")
    infinite = torch.tensor([1.0, torch.inf])
    assert difference(a, infinite) == difference(-infinite, infinite) == float("inf")
    assert difference(infinite, infinite) == 0


def test_last_level_cache() -> None:
    assert 2**16 <= last_level_cache_bytes() < 2**36


def test_peak_memory_sees_an_allocation() -> None:
    size = 64 * 2**20
    peak = peak_extra_bytes(lambda: bytearray(b"x" * size))
    if peak is None:
        pytest.skip("no /proc/self/clear_refs here")
    assert peak > size / 2
    quiet = peak_extra_bytes(lambda: None)
    assert quiet is not None and quiet < size / 8


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing"], "attention_forward"),
        (["--calls", "0"], "--calls 0"),
        (["--kernels", "linear/none"], "no such kernel"),
        (["--without", "nobody"], "sdpa_flash"),
        (["--part", "3/2"], "I/N"),
        (["--steady", "0.01", "--device", "cpu"], "a GPU"),
        (["--steady", "0"], "--steady 0.0"),
        (["norm", "--case", "no such row"], "no row is left"),
        (["report"], "report"),
    ],
)
def test_bad_arguments(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert says in capsys.readouterr().err


def test_cuda_without_a_gpu_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "norm", "--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_json_keeps_what_was_measured(bench: Run) -> None:
    result = bench("rope")
    text = json.dumps(result)
    assert "NaN" not in text and "Infinity" not in text
