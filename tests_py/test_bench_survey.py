"""`flashkernel bench survey` on a CPU: rows scaled down, peers by fakes, and the number that it ends in."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flashkernel as fk
from flashkernel.bench import runner
from flashkernel.bench.case import OURS, PEER, Case, Provider, Settings, Work
from flashkernel.bench.survey import attention, attention_peers, command, formula, summary
from flashkernel.bench.survey.attention import Attention, Tensors
from flashkernel.bench.survey.tables import FAMILIES
from flashkernel.bench.timing import CpuDevice, Rule
from flashkernel.cli import main

pytestmark = pytest.mark.chooses_kernels
RUN = ["bench", "survey", "--device", "cpu", "--threads", "1"]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = fk.get_num_threads(), torch.get_num_threads()
    yield
    fk.set_num_threads(before[0])
    torch.set_num_threads(before[1])


def test_a_quick_run_measures_every_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "survey.json.gz"
    assert main([*RUN, "--quick", "--json", str(file)]) == 0
    result = json.loads(gzip.decompress(file.read_bytes()))
    assert result["schema"] == 2 and {row["group"] for row in result["rows"]} == {f"survey_{name}" for name in FAMILIES}
    for row in result["rows"]:
        assert (
            row["agrees"]
            and "(scaled down)" in row["case"]
            and {"flashkernel", row["best_peer"]} <= set(row["providers"])
        )
    printed = capsys.readouterr().out
    found = list(summary.measurements(result["rows"]))
    assert len(found) == len(result["rows"]) and "The least ten:" in printed and "Without a figure" not in printed
    assert f"geometric mean: {summary.geometric_mean(m.ratio for m in found):.3f} ({len(found)} measurements" in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_parts_and_families_make_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*words: str) -> list[str]:
        assert main([*RUN, "--list", *words]) == 0
        return capsys.readouterr().out.splitlines()

    whole = listed()
    assert len(whole) == len(set(whole)) == sum(map(len, FAMILIES.values())) >= 300
    assert sorted(listed("--part", "1/3") + listed("--part", "2/3") + listed("--part", "3/3")) == sorted(whole)
    assert sorted(line for name in FAMILIES for line in listed("--family", name)) == sorted(whole)
    assert main([*RUN, "--family", "nothing"]) == 2 and "decode, verify" in capsys.readouterr().err
    assert main(["bench", "norm", "--family", "decode", "--list"]) == 2


def test_the_rows_ask_for_what_models_do() -> None:
    """Every option and mode of the families' promise is in the tables."""
    rows = [row for specs in FAMILIES.values() for row in specs if isinstance(row, Attention)]
    for option in ("bias", "alibi", "sinks", "softcap", "blocks", "lse", "kv8", "lengths", "page", "causal"):
        assert {bool(getattr(row, option)) for row in rows} == {True, False}, option
    assert {row.dim for row in rows if row.backward} >= {32, 64, 80, 96, 112, 128, 160, 192, 256}
    assert {row.deterministic for row in rows if row.backward} == {True, False}
    assert {row.queries for row in FAMILIES["verify"]} >= {2, 4, 8, 16}  # type: ignore[attr-defined]
    assert {row.rows for row in FAMILIES["linear"]} >= {1, 8192}  # type: ignore[attr-defined]


def test_pairs_are_those_that_the_mask_lets_through() -> None:
    base = Attention("x", 2, 4, 2, 5, 9, 8)
    rows = [base, replace(base, causal=True), replace(base, window=(2, 1)), replace(base, causal=True, window=(3, 0))]
    for row in rows:
        hidden = formula._hidden(row, row.queries, row.keys, "cpu")
        seen = row.queries * row.keys if hidden is None else int((~hidden).sum())
        assert row.pairs == row.batch * seen, row.name
    assert replace(base, lengths=(2, 3), causal=True).pairs == 3 + 6


def _row(name: str, ours: float, peers: dict[str, float], **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"flashkernel": {"kind": OURS, "p50": ours, "std": 0.0}} if ours else {}
    made |= {peer: {"kind": PEER, "p50": time, "std": 0.0} for peer, time in peers.items()}
    return {"group": "survey_decode", "case": name, "dtype": "float16", "providers": made, "refused": {}} | more


def test_the_number_counts_every_way_and_drops_nothing() -> None:
    both = _row("both", 2e-5, {"a": 1e-5, "b": 3e-5})
    both["providers"]["flashkernel"]["alone"] = {"p50": 4e-5, "std": 0.0}
    both["providers"]["b"]["alone"] = {"p50": 2e-4, "std": 0.0}
    rows = [
        both,
        _row("no peer", 1e-5, {}, refused={"fa3": "takes no such thing"}),
        _row("ours is wrong", 0, {"a": 1e-5}, refused={"flashkernel": "DIFFERS from a by 1e+00"}),
        _row("a peer is wrong", 1e-5, {"a": 2e-5}, refused={"b": "DIFFERS from a by 1e+00"}),
        _row("no kernel", 0, {"a": 1e-5}, refused={"flashkernel": "no kernel for it"}),
    ]
    found = {(m.case, m.way): m for m in summary.measurements(rows)}
    assert set(found) == {("both", "chain"), ("both", "alone"), ("a peer is wrong", "chain")}
    assert found["both", "chain"].ratio == pytest.approx(0.5) and found["both", "chain"].peer == "a"
    assert found["both", "alone"].ratio == pytest.approx(5.0) and found["both", "alone"].peer == "b"
    assert {row["case"] for row, _ in summary.without_figure(rows)} == {r["case"] for r in rows[1:]}
    text = summary.text(rows, 100)
    assert f"geometric mean: {math.prod([0.5, 5.0, 2.0]) ** (1 / 3):.3f} (3 measurements, 1 behind)" in text
    assert "Without a figure, or wrong (4)" in text and "takes no such thing" in text
    assert "nan" in summary.text([], 100)


def test_a_row_that_cannot_be_made_is_in_the_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(self: Any, s: Settings) -> Work:
        raise RuntimeError("out of everything")

    monkeypatch.setattr(attention.Attention, "work", fails)
    file = tmp_path / "survey.json"
    assert main([*RUN, "--quick", "--family", "varlen", "--family", "sampling", "--json", str(file)]) == 1
    rows = json.loads(file.read_text())["rows"]
    failed = [row for row in rows if row["group"] == "survey_varlen"]
    assert failed and all(row["refused"] == {"flashkernel": "FAILS: out of everything"} for row in failed)
    assert any(row["agrees"] for row in rows) and "out of everything" in capsys.readouterr().out


@dataclass(frozen=True)
class LikeCuda(Settings):
    """The providers of a GPU over CPU tensors."""

    @property
    def cuda(self) -> bool:
        return True


def _by_formula(options: dict[str, Any], q: Any, k: Any, v: Any, **more: Any) -> tuple[Any, Any]:
    """(out, LSE) in the layout of flash-attn from its options; of packed sequences too."""
    right = -1 if not options["is_causal"] and options["window_size_right"] < 0 else options["window_size_right"]
    ends = options.get("cu_seqlens_q")
    row = Attention(
        "fake", 1, q.shape[-2], k.shape[-2], 1, 1, q.shape[-1], causal=options["is_causal"],
        window=(options["window_size_left"], right), softcap=options["softcap"],
        lengths=tuple(ends.diff().tolist()) if ends is not None else (),
    )  # fmt: skip
    if ends is None:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = formula._all(row, None, q.float(), k.float(), v.float(), None)
    return (out.transpose(1, 2) if ends is None else out), lse


class FakeFlash3:
    """flash_attn_3's two ops over CPU tensors."""

    def fwd(self, q: Any, k: Any, v: Any, num_splits: int, softmax_scale: float, **options: Any) -> Any:
        assert softmax_scale == q.shape[-1] ** -0.5
        if "page_table" in options:
            assert options["seqused_k"].unique().numel() == 1
            k, v = (x[options["page_table"].long()].flatten(1, 2) for x in (k, v))
        out, lse = _by_formula(options, q, k, v)
        return out.to(q.dtype), lse, None, None

    def bwd(self, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, deterministic: bool, **options: Any) -> Any:
        leaves = [x.float().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            again, _ = _by_formula(options, *leaves)
            grads = torch.autograd.grad(again, leaves, grad.float())
        return (*(g.to(grad.dtype) for g in grads), lse, lse)


WANTED = {
    "causal": {"causal": True},
    "lse": {"lse": True, "causal": True},
    "pages": {"page": 16, "queries": 3, "causal": True, "heads_kv": 2},
    "window": {"window": (5, 3)},
    "softcap": {"softcap": 4.0},
    "sinks": {"sinks": True, "lse": True, "causal": True},
    "varlen": {"lengths": (7, 1, 30), "causal": True},
    "varlen backward": {"lengths": (7, 1, 30), "causal": True, "backward": True},
    "varlen sinks": {"lengths": (7, 1, 30), "sinks": True, "lse": True},
    "backward": {"backward": True, "heads_kv": 2, "deterministic": True},
}


@pytest.mark.parametrize("options", WANTED.values(), ids=WANTED)
def test_flash_attention_3_is_called_as_it_wants(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its raw op agrees with ours and the formula in every mode: layouts, masks, LSE and sinks reach it rightly."""
    monkeypatch.setattr(attention_peers, "flash3", FakeFlash3)
    monkeypatch.setattr(attention, "Inputs", lambda device, dtype: _Few(device, dtype))
    row = replace(Attention("x", 2, 4, 4, 32, 32, 16, dtype="float32"), **options)
    without = frozenset({"sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "compile", "triton"})
    session = runner.Session(LikeCuda(device="cpu", without=without), CpuDevice(), Rule(0, 1, 0.1))
    case = Case("survey_test", row.name, row.dtype, "cpu", lambda: row.work(session.settings))
    monkeypatch.setattr(runner, "cuda_peak_bytes", lambda call: 0)
    monkeypatch.setattr(runner, "gpu_clocks", dict)
    session.ceilings = {"read": 1.0, "copy": 1.0, "matmul float32": 1.0}
    found = session.row(case)
    assert set(found["providers"]) == {"flashkernel", "fa3"} and not found["refused"], found["refused"]


class _Few(attention.Inputs):
    def sets(self, bytes_per_call: float, *, from_memory: bool = True) -> int:
        return 2


def test_torch_refuses_what_its_ops_cannot_do() -> None:
    """A peer that cannot serve a row says so in its first call, and the row tells why."""
    row = Attention("x", 1, 2, 2, 4, 8, 8, causal=True, bias=True)
    qkv = tuple(torch.zeros(1, 2, n, 8) for n in (4, 8, 8))
    tensors = Tensors([qkv], [], bias=[torch.zeros(1, 2, 4, 8)])
    for call in (*attention_peers._flash2(row, tensors), *attention_peers._by_bias("cudnn", row, tensors)):
        with pytest.raises(RuntimeError, match=r"bias|top left"):
            call()


def test_a_call_alone_is_less_the_kernel_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second way to measure, with a clock of its own: what the unrelated kernel takes is taken off."""

    class Clock(CpuDevice):
        now = 0.0

        def mark(self) -> Any:
            return self.now

        def seconds(self, begin: Any, end: Any) -> float:
            return float(end - begin)

    device = Clock()

    def work(seconds: float) -> Any:
        def call() -> Any:
            device.now += seconds
            return torch.zeros(1)

        return call

    device.spacer = work(7e-6)
    providers = [Provider("flashkernel", [work(2e-6)], OURS), Provider("peer", [work(3e-6), work(5e-6)])]
    session = runner.Session(Settings(), device, Rule(0, 4, 1.0), alone=True)
    session.ceilings = {"read": 1.0, "copy": 1.0}
    row = session.row(Case("survey_test", "x", "float32", "cpu", lambda: Work(providers)))
    assert row["providers"]["flashkernel"]["alone"]["p50"] == pytest.approx(2e-6)
    assert row["providers"]["peer"]["alone"]["p50"] == pytest.approx(4e-6)
    device.spacer = None
    row = session.row(Case("survey_test", "x", "float32", "cpu", lambda: Work(providers)))
    assert "alone" not in row["providers"]["peer"]


def test_a_lost_gpu_ends_the_run() -> None:
    assert command._is_lost(
        [{"refused": {"flashkernel": "FAILS: CUDA error: an illegal memory access was encountered"}}]
    )
    assert not command._is_lost([{"refused": {"fa3": "takes no bias"}}]) and not command._is_lost([])


def test_standing_counts_the_survey(tmp_path: Path) -> None:
    pytest.importorskip("tools.places", reason="the source tree is not beside the tests")
    from tools.standing import Suite, overview, rows_with_a_peer, where_others_are_faster

    row = _row("shape", 2e-5, {"a": 3e-5})
    row["providers"]["flashkernel"] |= {"alone": {"p50": 4e-5, "std": 0.0}, "kernels": []}
    row["providers"]["a"]["alone"] = {"p50": 2e-5, "std": 0.0}
    machine = {"gpu": "NVIDIA H200", "commit": "abc", "date": "2026-01-01"}
    run = {"command": "flashkernel bench survey --part 1/2", "machine": machine, "method": {}}
    suite = Suite("h200/survey", "h200_survey", [run], [row])
    assert [(r.case, round(r.ratio, 3)) for r in rows_with_a_peer(suite)] == [("shape", 1.5), ("shape, alone", 0.5)]
    newer = SimpleNamespace(is_older=lambda kernels, commits: False)
    text = where_others_are_faster([suite], newer)  # type: ignore[arg-type]
    assert "shape, alone" in text and "1 of 2" in text and "Shapes beside the suites" not in text
    row["providers"]["a"]["p50"] = 1.9e-5  # behind in a chain, too: BENCHMARKS.md has a shape once
    begin = overview([suite], newer)  # type: ignore[arg-type]
    assert "2 of 2" in begin and begin.count("| shape") == 1 and "| shape, alone" in begin
