"""`flashkernel bench`: every group runs, the results agree with torch, the JSON is sane. No timing is asserted."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("torch")

from flashkernel.bench.cases import GROUPS
from flashkernel.bench.memory import last_level_cache_bytes
from flashkernel.bench.report import GROUP_NAMES
from flashkernel.bench.timing import alternate, peak_extra_bytes, summarize
from flashkernel.cli import main


def test_every_group_is_listed() -> None:
    assert tuple(GROUPS) == GROUP_NAMES


@pytest.mark.parametrize("group", GROUP_NAMES)
def test_quick_run(group: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert main(["bench", group, "--quick", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert {"cpu", "threads", "torch", "flashkernel", "commit", "date"} <= set(result["machine"])
    assert result["rows"]
    printed = capsys.readouterr().out
    for row in result["rows"]:
        assert row["group"] == group and row["case"] in printed
        assert row["kernels"] and all("/" in kernel for kernel in row["kernels"])
        assert row["agrees"] and row["relative_error"] < 0.2
        assert row["ratio_to_torch"] > 0
        for side in ("ours", "torch"):
            t = row[side]
            assert t["calls"] >= 3
            assert 0 < t["min"] <= t["p50"] <= t["p95"] <= t["p99"] <= t["max"]
            assert t["min"] <= t["mean"] <= t["max"] and t["std"] >= 0
        if group not in ("call_overhead",):
            assert (row["gflops"] or row["gbytes_per_second"]) > 0
        if group == "decode":  # bound by memory: both sides against a plain sum over the same bytes
            assert row["read_gbytes_per_second"] > 0 and row["share_of_read"] > 0 and len(row["reads"]) == 2
            assert math.isclose(row["torch_share_of_read"] * row["ratio_to_torch"], row["share_of_read"])


def test_summary_of_known_times() -> None:
    timing = summarize([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (timing.calls, timing.min, timing.p50, timing.mean, timing.max) == (5, 1.0, 3.0, 3.0, 5.0)
    assert math.isclose(timing.p95, 4.8) and math.isclose(timing.std, math.sqrt(2))
    assert summarize([7.0]).p99 == 7.0


def test_functions_alternate_and_the_budget_holds() -> None:
    order: list[str] = []
    timings = alternate([lambda: order.append("a"), lambda: order.append("b")], warmup=2, calls=4, budget=60)
    assert order == ["a", "b"] * 6
    assert [t.calls for t in timings] == [4, 4]
    assert alternate([lambda: None], warmup=0, calls=10**9, budget=0.0)[0].calls == 3
    (timing,) = alternate([lambda: None], warmup=0, calls=3, budget=60, pause=0.05)
    assert timing.min < 0.05  # the pause is not part of the time


def test_last_level_cache() -> None:
    assert 2**20 <= last_level_cache_bytes() < 2**36


def test_peak_memory_sees_an_allocation() -> None:
    size = 64 * 2**20
    peak = peak_extra_bytes(lambda: bytearray(b"x" * size))
    if peak is None:
        pytest.skip("no /proc/self/clear_refs here")
    assert peak > size / 2
    quiet = peak_extra_bytes(lambda: None)
    assert quiet is not None and quiet < size / 8


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nothing"]) == 2
    assert "attention" in capsys.readouterr().err
    assert main(["bench", "--calls", "0"]) == 2
