"""The report: BENCHMARKS.md, plots and README say what the committed results say, and notice when they do not."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

pytest.importorskip("tools.places", reason="the source tree is not beside the tests")

from tools import standing
from tools.bar import bar, points, recorded
from tools.changes import Changes
from tools.places import PLOTS, RESULTS, ROOT, TABLES
from tools.plots import digest, digest_in, figures
from tools.report import merged, pages, run, sections
from tools.training import smoothed

from flashkernel.bench import results
from flashkernel.bench.tables import seconds, table


def provider(p50: float, kind: str = "ours", peak: int | None = None) -> dict[str, Any]:
    times = {key: p50 for key in ("mean", "std", "min", "p50", "p95", "p99", "max")}
    return {
        "kind": kind, "calls": 9, **times, "inner": 1, "graph": True, "tflops": 1e-3 / p50, "gbytes_per_second": 2.0,
        "peak_bytes": peak, "share_of_limit": 0.5, "relative_error": 0.0, "kernels": ["attention_fwd/cuda/x"],
        "workspace_bytes": 2**20, "ratio_to_best_peer": 2.0,
    }  # fmt: skip


def row(seq: int, p50: float, batch: int = 1, group: str = "attention_sizes") -> dict[str, Any]:
    shape = {"batch": batch, "heads": 16, "heads_kv": 16, "seq": seq, "head_dim": 64, "causal": True}
    providers = {
        "flashkernel": provider(p50, peak=seq * 2**20),
        "sdpa_flash": provider(2 * p50, "peer", seq * 2**21),
        "sum": provider(p50 / 2, "limit"),
    }
    return {
        "group": group, "case": f"{batch} x {seq}", "dtype": "float16", "device": "cuda", "shape": shape, "flop": 10**9,
        "bytes": 10**6, "limit": {"bound": "matmul", "seconds": p50 / 2}, "agrees": True, "providers": providers,
        "refused": {"fa4": "not here"}, "library_peak_bytes": 5, "clocks": {}, "best_peer": "sdpa_flash",
    }  # fmt: skip


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    machine = {
        "gpu": "NVIDIA Test", "driver_version": "1.2", "clocks.sm": "1 MHz", "clocks.mem": "2 MHz",
        "power.limit": "3 W",
        "cpu": "some", "cpus": 2, "threads": 2, "system": "Linux", "python": "3.12", "torch": "2.11", "commit": "abc",
        "flashkernel": "0.1.0", "date": "2026-11-21T00:00:00", "torch_cuda": "13.0", "cudnn": 9, "triton": None,
    }  # fmt: skip
    method = {"warmup": 100, "calls": 1000, "seconds": 2.0, "least_calls": 30, "quick": False}
    head = {"command": "flashkernel bench attention", "method": method, "machine": machine, "ceilings": {"read": 4e12}}
    return {**head, "left_out": ["decode: x"], "rows": rows}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the report reads and writes, with a GPU's results beside what is committed."""
    shutil.copytree(ROOT / "lab", tmp_path / "lab", ignore=shutil.ignore_patterns("profiles", "notebooks"))
    for name in ("README.md", "BENCHMARKS.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def training_result() -> dict[str, Any]:
    """A result as scripts/compare_training.py writes it."""
    runs = [
        {
            "kernels": kernels,
            "way": way,
            "tokens_per_second": 4_000_000 if kernels == "flashkernel" else 3_000_000,
            "ready_seconds": 12.0,
            "peak_bytes": 2**31,
            "val_loss": 2.25,
            "losses": [8.0 / (1 + i / 40) + (0.001 if kernels == "flashkernel" else 0.0) for i in range(steps)],
        }
        for way, steps in (("graph", 200), ("compile + graph", 200), ("eager", 50))
        for kernels in ("stock", "flashkernel")
    ]
    gap = {"from": "stock, graph", "to": "flashkernel, graph", "steps": 200}
    method = {"steps": 200, "batch": 32, "context": 1024, "layers": 7, "width": 192, "dropout": 0.1, "bf16": True}
    machine = {"gpu": "NVIDIA Test", "date": "2026-01-02T03", "commit": "abc", "torch": "2", "transformers": "5"}
    return {
        "schema": "train-1",
        "command": "compare",
        "machine": machine,
        "method": {**method, "window": 50},
        "runs": runs,
        "distances": [{**gap, "max_distance": 0.001, "last_distance": 0.001}],
        "failed": [],
    }


@pytest.mark.long
def test_training_is_shown(checkout: Path) -> None:
    pytest.importorskip("matplotlib")
    for measured in (checkout / RESULTS).rglob("*.json"):  # all of whose plots the test below draws
        if results.is_result(json.loads(measured.read_text())) and measured.parent.name != "cpu":
            measured.unlink()
    assert run(checkout, check=False) == 0
    assert run(checkout, check=True) == 0
    file = checkout / RESULTS / "test" / "training.json"
    file.parent.mkdir()
    file.write_text(json.dumps(training_result()))
    assert run(checkout, check=True) == 1
    assert run(checkout, check=False) == 0
    assert run(checkout, check=True) == 0
    losses = training_result()["runs"][1]["losses"]
    last = sum(losses[-50:]) / 50
    assert smoothed(losses, 50)[-1] == pytest.approx(last)
    row = f"| graph | flashkernel | 4.00 M | 12.0 s | 2.00 GiB | {last:.4f} | 2.2500 |"
    text = (checkout / "lab/tables/whole_models.md").read_text()
    assert row in text and "| flashkernel, graph less stock, graph | 0.0010 | +0.0010 |" in text
    assert "(../plots/test_training.svg)" in text
    svg = (checkout / PLOTS / "test_training.svg").read_text()
    assert digest_in(svg) and len(svg) < 100_000
    result = training_result()
    result["runs"][1]["losses"][-1] += 1.0
    file.write_text(json.dumps(result))
    assert run(checkout, check=True) == 1


def test_what_is_committed_agrees_with_the_results() -> None:
    assert run(ROOT, check=True) == 0, "run `python -m tools report`"


def test_a_changed_figure_is_noticed(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(checkout, check=True) == 0
    file = checkout / RESULTS / "cpu" / "run.2.json"
    before = file.read_text()
    run2 = json.loads(before)
    for x in run2["rows"]:
        x["providers"]["flashkernel"]["p50"] *= 1.5
    file.write_text(json.dumps(run2))
    assert run(checkout, check=True) == 1
    said = capsys.readouterr().err
    assert "README.md" in said and "BENCHMARKS.md" in said and "python -m tools report" in said
    file.write_text(before)
    page = checkout / "BENCHMARKS.md"
    page.write_text(page.read_text().replace("22.", "21.", 1))
    assert run(checkout, check=True) == 1


@pytest.mark.long
def test_one_command_makes_it_all(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(seq, seq * 1e-6) for seq in (512, 1024)] + [row(512, 3e-4, batch) for batch in (4, 8)]
    results.write_json(checkout / RESULTS / "h200" / "sizes.json", result(rows))
    (checkout / PLOTS / "gone.svg").write_text("<svg/>")
    assert run(checkout, check=True) == 1
    assert "gone.svg" in capsys.readouterr().err
    assert run(checkout, check=False) == 0
    assert run(checkout, check=True) == 0
    page = (checkout / TABLES / "h200_sizes.md").read_text()
    for kind in ("latency", "throughput", "speedup", "scaling", "memory"):
        svg = checkout / PLOTS / f"h200_sizes_attention_sizes_{kind}.svg"
        assert f"(../plots/{svg.name})" in page
        text = svg.read_text()
        assert len(text) < 100_000 and digest_in(text)
    assert not (checkout / PLOTS / "gone.svg").exists()
    assert (
        "NVIDIA Test (driver 1.2, SM 1 MHz" in page
        and "read 4 TB/s" in page
        and "Left out for lack of time: decode" in page
    )
    assert "sdpa_flash 2.00" in page and "512 MiB + 1 MiB" in page and "50% matmul" in page
    svg.write_text(svg.read_text().replace("data ", "data 0", 1))
    assert run(checkout, check=True) == 1


def test_figures_hold_the_rows_and_change_with_them() -> None:
    rows = [row(512, 1e-3), row(1024, 2e-3), row(512, 3e-3, 4)]
    found = {figure.name: figure for figure in figures("x", rows)}
    latency = found["x_attention_sizes_latency"]
    assert latency.panels == {
        "head dim 64, causal, float16": {
            "flashkernel": [(512, 1000), (1024, 2000)],
            "sdpa_flash": [(512, 2000), (1024, 4000)],
        }
    }
    assert found["x_attention_sizes_speedup"].panels["head dim 64, causal, float16"] == {
        "sdpa_flash": [(512, 2), (1024, 2)]
    }
    assert found["x_attention_sizes_memory"].panels["head dim 64, causal, float16"]["flashkernel"] == [
        (512, 513),
        (1024, 1025),
    ]
    scaling = found["x_attention_sizes_scaling"]
    assert list(scaling.panels) == ["head dim 64, causal, float16, seq 512"] and scaling.x_label == "batch"
    assert scaling.panels["head dim 64, causal, float16, seq 512"]["flashkernel"] == [(1, 1), (4, 0.3333)]
    before = digest(latency)
    rows[0]["providers"]["flashkernel"]["p50"] *= 1.01
    assert digest(next(f for f in figures("x", rows) if f.name == latency.name)) != before


def test_peers_that_are_not_in_a_run_stand_by_their_ratio_to_cudnn() -> None:
    known = recorded(ROOT)
    assert len(known) == 61  # forward d64, d128, d256 and backward d64, d128 at six lengths, full and causal; and GQA
    assert all({"sdpa_cudnn", "fa3", "fa4"} <= set(rates) for rates in known.values())
    one = row(512, 1e-3, group="attention_forward")
    one["providers"] = {"flashkernel": provider(1e-3), "sdpa_cudnn": provider(2e-3, "peer")}
    one["shape"]["head_dim"] = 128
    known = {"forward d128 seq 512 causal": {"sdpa_cudnn": 300.0, "fa3": 450.0, "fa4": 150.0, "sdpa_flash": 100.0}}
    (point,) = points([one, row(512, 1.0)], known)
    assert point.measured == {"sdpa_cudnn": 0.5}
    assert point.estimated == pytest.approx({"fa3": 0.75, "fa4": 0.25, "sdpa_flash": 0.5 / 3})
    assert point.ratio == pytest.approx(1 / 0.75)
    text = bar([point])
    assert "| ~1 " in text and "1.33" in text and "1 of 1 points at 1.00 or more" in text
    one["providers"]["fa3"] = provider(0.5e-3, "peer")  # now it is
    assert points([one], known)[0].ratio == pytest.approx(0.5)


def test_runs_of_the_same_thing_are_merged() -> None:
    runs = [result([row(512, p50)]) for p50 in (1e-3, 3e-3, 2e-3)]
    (merged_row,) = merged(runs)
    assert merged_row["providers"]["flashkernel"]["p50"] == 2e-3 and merged_row["limit"]["seconds"] == 1e-3
    names = {section.name: len(section.runs) for section in sections(ROOT)}
    assert names["cpu/run"] == 3
    texts, _ = pages(ROOT, sections(ROOT))
    assert "Medians of 3 runs." in texts[ROOT / TABLES / "cpu_run.md"]


def test_a_suite_keeps_the_digits_of_its_name() -> None:
    """Only a number after a dot counts runs of the same thing: linear_decode_f16 is not linear_decode_f."""
    names = {section.name for section in sections(ROOT)}
    assert {"h200/linear_decode_f16", "h200/linear_512", "h200/memory_bound"} <= names
    assert not names & {"h200/linear_decode_f", "h200/linear_", "h200/memory_bound.1"}


def test_every_row_where_a_peer_is_ahead_stands_in_one_table() -> None:
    runs = [result([row(512, 1e-3), row(1024, 1e-3)])]
    runs[0]["rows"][1]["providers"]["sdpa_flash"]["p50"] = 0.5e-3
    suite = standing.Suite("h200/x", "h200_x", runs, merged(runs))
    assert [found.ratio for found in standing.rows_with_a_peer(suite)] == [2.0, 0.5]
    text = standing.where_others_are_faster([suite], Changes({}))
    assert "1 of 2" in text and "| 0.50 " in text and "| 2.00 " not in text
    older = [{**runs[0], "machine": {**runs[0]["machine"], "date": "2025-01-01T00"}, "rows": [row(512, 9.0)]}]
    older[0]["rows"][0]["providers"]["sdpa_flash"]["p50"] = 1.0
    before = standing.Suite("h200/old", "h200_old", older, merged(older))
    assert "1 of 2" in standing.where_others_are_faster([before, suite], Changes({}))  # the newest run of a case counts
    any_order = provider(0.4e-3, "variant")
    runs[0]["rows"][1]["providers"]["any_order"] = any_order
    assert "0 of 2" in standing.where_others_are_faster(
        [standing.Suite("h200/x", "h200_x", runs, merged(runs))], Changes({})
    )


def test_a_person_reads_benchmarks_to_the_end() -> None:
    assert len((ROOT / "BENCHMARKS.md").read_text().splitlines()) <= 300


def test_the_cpus_figures_are_medians_of_the_runs() -> None:
    """Worked out here by another way than readme.py's."""
    runs = [results.read(path) for path in sorted((ROOT / RESULTS / "cpu").glob("run.*.json"))]
    table = (ROOT / "BENCHMARKS.md").read_text().split("## Measured on a CPU")[1].split("\n## ")[0]
    for i, first in enumerate(runs[0]["rows"]):
        if first["group"] == "attention_memory":
            continue
        same = [x["rows"][i]["providers"] for x in runs]
        peer = "sdpa" if "sdpa" in same[0] else "eager"
        ratio = statistics.median(p[peer]["p50"] / p["flashkernel"]["p50"] for p in same)
        line = next(x for x in table.splitlines() if f"| {first['case']} | {first['dtype']} |" in x)
        assert f"**{ratio:.2f}**" in line


def test_files_of_other_kinds_are_not_results(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"rows": []}')
    with pytest.raises(ValueError, match="schema"):
        results.read(other)
    assert all(results.is_result(run) for section in sections(ROOT) for run in section.runs)


def test_the_table_of_kernels() -> None:
    text = table([row(512, 1e-3)])
    head, _, line = text.splitlines()
    for column in ("kernel", "mean", "std", "min", "p50", "p95", "p99", "max", "rate", "of limit", "peak memory"):
        assert column in head
    assert "attention_fwd/cuda/x" in line and "1 TFLOP/s" in line and "sum" not in line
    wrong = row(512, 1e-3)
    wrong["refused"] = {"flashkernel": "DIFFERS from sdpa_flash by 1.0e+00"}
    assert "DIFFERS from sdpa_flash" in table([wrong])
    assert [seconds(x) for x in (2.0, 0.9996, 1.5e-3, 2.34e-6, 5e-9)] == [
        "2 s",
        "1000 ms",
        "1.5 ms",
        "2.34 us",
        "5 ns",
    ]
