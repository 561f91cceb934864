"""scripts/gpu_sanitizers.py with programs that stand in for compute-sanitizer and for the conformance cases."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu_sanitizers.py"
ROWS = ("attention_fwd/cuda/generic/tiled", "attention_fwd/cuda/sm90a/decode/f16/d64", "norm/cuda/sm90a/long_rows")
# Two cases a row, the first of which can be left out; `failing`, `slow` and `halting` are rows in which the second one
# fails, none ends, the second one does not end.
CASES = """#!/bin/sh
case "$1" in
  --gtest_list_tests) for row in {rows}; do echo "$row."; echo "  case"; done; exit ;;
esac
filter=${{1#--gtest_filter=}}
row=${{filter%%.\\**}}
[ "$FK_CONFORMANCE_ORACLE" = 0 ] || exit 3
[ "$row" != "{slow}" ] || sleep 100
case "$filter" in
  *":$row.one"*) ;;
  *) echo "[       OK ] $row.one (1 ms)" ;;
esac
[ "$row" != "{halting}" ] || sleep 100
if [ "$row" = "{failing}" ]; then echo "[  FAILED  ] $row.two (1 ms)"; exit 1; fi
echo "[       OK ] $row.two (1 ms)"
"""
TOOL = """#!/bin/sh
# --tool NAME --error-exitcode 1 PROGRAM FILTER
echo "$2 $6 $FK_CONFORMANCE_PART" >>"$CALLS"
"$5" "$6"
status=$?
if [ "$2" = "{reporting}" ]; then echo "========= ERROR SUMMARY: 3 errors"; exit 1; fi
echo "========= ERROR SUMMARY: 0 errors"
exit $status
"""


@pytest.fixture
def sanitize(tmp_path, monkeypatch):
    """Runs the script: exit status, what it prints, its processes.tsv as lists, and the calls of the tool."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))

    def run(*arguments, failing="", slow="", halting="", reporting=""):
        for name, text in (
            ("cases", CASES.format(rows=" ".join(ROWS), failing=failing, slow=slow, halting=halting)),
            ("compute-sanitizer", TOOL.format(reporting=reporting)),
        ):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        (tmp_path / "calls").write_text("")
        command = [sys.executable, str(SCRIPT), str(tmp_path / "cases"), str(tmp_path / "out"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        lines = (tmp_path / "out" / "processes.tsv").read_text().splitlines()
        calls = (tmp_path / "calls").read_text().splitlines()
        return done.returncode, done.stdout + done.stderr, [line.split("\t") for line in lines], calls

    return run


def test_all_is_well(sanitize, tmp_path):
    status, text, processes, calls = sanitize("--commit", "abc")
    # racecheck takes plain attention in eight parts and the other one in four, synccheck no decode by clusters
    assert status == 0, text
    assert len(processes) == len(calls) == 3 + 3 + 2 + 13
    assert {(*line[3:6], line[7]) for line in processes} == {("2", "0", "0", "abc")}
    assert "racecheck | 26 passed, 0 failed, 0 errors in 13 of 13 processes" in text
    assert not list((tmp_path / "out").glob("*.log"))
    calls = [call.replace(" --gtest_filter=", " ") for call in calls]
    assert any(call.startswith("initcheck attention_fwd/cuda/sm90a/decode") for call in calls)
    assert not any(call.startswith("synccheck attention_fwd/cuda/sm90a/decode") for call in calls)
    norms = [call.split()[0] for call in calls if "_longest_residual_" in call]
    assert norms == ["synccheck"]
    assert all(("*.long_*" in call) == call.startswith("racecheck attention_fwd/cuda/generic") for call in calls)


@pytest.mark.parametrize(
    ("tool", "row", "left_out"),
    [
        ("racecheck", "attention_bwd/cuda/generic", "*.tiles_*"),
        ("racecheck", "linear/cuda/generic/tiles", "*.wide_*"),
        ("racecheck", "linear/cuda/sm80/f16/tiles", None),
        ("memcheck", "linear/cuda/generic/tiles", None),
    ],
)
def test_what_is_long_for_others(tool, row, left_out):
    found = runpy.run_path(str(SCRIPT))["long_for_others"](tool, row)
    assert left_out in found.split(":") if left_out else found is None


def test_a_failed_case(sanitize, tmp_path):
    status, text, processes, _ = sanitize(failing="norm/cuda/sm90a/long_rows")
    assert status == 1
    assert "memcheck | 5 passed, 1 failed, 0 errors in 3 of 3 processes" in text
    assert (tmp_path / "out" / "memcheck_norm_cuda_sm90a_long_rows_0_of_1.log").exists()
    assert len(processes) == 21


def test_an_error_of_a_tool(sanitize):
    status, text, _, _ = sanitize(reporting="initcheck")
    assert status == 1
    assert "initcheck | 6 passed, 0 failed, 9 errors in 3 of 3 processes" in text
    assert "memcheck | 6 passed, 0 failed, 0 errors" in text


def test_it_goes_on_where_it_stopped(sanitize, tmp_path):
    status, text, processes, _ = sanitize("--seconds", "8", slow="norm/cuda/sm90a/long_rows")
    assert status == 1 and "memcheck | 4 passed, 0 failed, 0 errors in 2 of 3 processes" in text
    assert not any(line[1] == "norm/cuda/sm90a/long_rows" for line in processes)
    earlier = tmp_path / "earlier.tsv"
    earlier.write_text((tmp_path / "out" / "processes.tsv").read_text())
    status, text, processes, calls = sanitize("--earlier", str(earlier))
    assert status == 0, text
    assert len(processes) == 21 and len(calls) == 21 - len(earlier.read_text().splitlines())


def test_it_goes_on_inside_a_row(sanitize, tmp_path):
    row = "norm/cuda/sm90a/long_rows"
    status, text, processes, _ = sanitize("--seconds", "8", halting=row)
    assert status == 1 and "memcheck | 5 passed, 0 failed, 0 errors in 2 of 3 processes" in text
    assert ["memcheck", row, "0/1", "1", "0", "0"] in [line[:6] for line in processes if line[8:] == ["one"]]
    earlier = tmp_path / "earlier.tsv"
    earlier.write_text((tmp_path / "out" / "processes.tsv").read_text())
    status, text, processes, calls = sanitize("--earlier", str(earlier))
    assert any(call.startswith(f"memcheck --gtest_filter={row}.*-") and f":{row}.one" in call for call in calls)
    assert status == 0 and "memcheck | 6 passed, 0 failed, 0 errors in 3 of 3 processes" in text, text
    assert len(processes) == 21 and all(line[3] == "2" and len(line) == 8 for line in processes)


def test_what_was_not_clean_runs_again(sanitize, tmp_path):
    assert sanitize(failing="norm/cuda/sm90a/long_rows")[0] == 1
    earlier = tmp_path / "earlier.tsv"
    earlier.write_text((tmp_path / "out" / "processes.tsv").read_text())
    status, text, processes, calls = sanitize("--earlier", str(earlier))
    assert status == 0, text
    assert len(processes) == 21 and len(calls) == 4  # norm's, by each tool


def test_a_row_stays_in_the_parts_that_it_began_in(sanitize, tmp_path):
    earlier = tmp_path / "earlier.tsv"
    row = "attention_fwd/cuda/sm90a/decode/f16/d64"
    earlier.write_text(f"racecheck\t{row}\t1/2\t2\t0\t0\t7\tabc\n")
    status, text, processes, calls = sanitize("--earlier", str(earlier))
    assert status == 0, text
    parts = [line[2] for line in processes if line[:2] == ["racecheck", row]]
    assert sorted(parts) == ["0/2", "1/2"] and len(calls) == 18
