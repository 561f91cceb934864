"""Result files: JSON (the truth, under benchmarks/) and CSV (for spreadsheets). One schema for CPU and CUDA.

`{"schema": 2, "command", "method", "machine", "ceilings", "left_out", "rows"}`; a row has its group, case, dtype,
shape, work, limit and one object for each provider: seconds per call, rates, shares, memory. Written after every row,
so that an interrupted run leaves what it has measured.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["SCHEMA", "check_places", "is_result", "read", "write_csv", "write_json"]

SCHEMA = 2


def _rounded(value: Any) -> Any:
    """Six significant digits: more than any clock knows, in half the space."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(x) for x in value]
    return value


def _lines(row: dict[str, Any]) -> str:
    """A row with one line for each provider, so that a diff shows what changed."""
    fields = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in row.items() if key != "providers"]
    providers = ",\n".join(f"    {json.dumps(name)}: {json.dumps(p)}" for name, p in row["providers"].items())
    inner = f"\n{providers}\n   " if providers else ""
    return "  {" + ", ".join(fields) + f',\n   "providers": {{{inner}}}}}'


def check_places(*files: str | None) -> None:
    """Raises ValueError, before anything is measured, for a file that could not be written afterwards."""
    for file in files:
        if file not in (None, "-") and (Path(file).is_dir() or not os.access(Path(file).parent, os.W_OK)):
            raise ValueError(
                f"bench: the results cannot be written to {file}; a file in a folder that exists is needed"
            )


def write_json(path: Path, run: dict[str, Any]) -> None:
    """Writes a run in one step, so that a reader never sees half a file. The path - is stdout."""
    head = {key: value for key, value in run.items() if key != "rows"}
    text = json.dumps({"schema": SCHEMA, **_rounded(head)}, indent=1)[:-2]
    rows = ",\n".join(_lines(row) for row in _rounded(run["rows"]))
    text = f'{text},\n "rows": [\n{rows}\n ]\n}}\n'
    if str(path) == "-":
        sys.stdout.write(text)
        return
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def is_result(value: Any) -> bool:
    return isinstance(value, dict) and value.get("schema") == SCHEMA


def read(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    if not is_result(value):
        raise ValueError(f"bench: {path} is not a result file of this bench (schema {SCHEMA})")
    return dict(value)


_TIMES = ("mean", "std", "min", "p50", "p95", "p99", "max")
_PROVIDER = (
    "kind", "kernels", "calls", "inner", "graph", "tflops", "gbytes_per_second", "share_of_limit",
    "ratio_to_best_peer", "relative_error", "peak_bytes", "workspace_bytes",
)  # fmt: skip
_MACHINE = ("gpu", "driver_version", "clocks.sm", "cpu", "threads", "torch", "flashkernel", "commit", "date")


def write_csv(path: Path, runs: Iterable[dict[str, Any]]) -> None:
    """One line for each provider of each row; times in microseconds."""
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        head: Sequence[str] = (
            "device", "group", "case", "dtype", "provider", *(f"{x}_us" for x in _TIMES), *_PROVIDER, "bound",
            "library_peak_bytes", *_MACHINE,
        )  # fmt: skip
        out.writerow(head)
        for run in runs:
            for row in run["rows"]:
                for name, p in row["providers"].items():
                    line: list[Any] = [row["device"], row["group"], row["case"], row["dtype"], name]
                    line += [f"{p[key] * 1e6:.6g}" for key in _TIMES]
                    line += [" ".join(p[x]) if x == "kernels" and x in p else p.get(x, "") for x in _PROVIDER]
                    line += [(row["limit"] or {}).get("bound", ""), row.get("library_peak_bytes", "")]
                    out.writerow(line + [run["machine"].get(key, "") for key in _MACHINE])
