#!/usr/bin/env python3
"""Writes README.md's bench table from the runs under benchmarks/cpu/, or checks it (--check).

Each run is what `flashkernel bench attention attention_memory decode call_overhead --threads 2 --json FILE` wrote. A
cell is the median over the runs; the ratio's spread over the runs stands beside it, because the machine is shared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
GROUPS = {"attention": "attention", "decode": "one-token decode", "call_overhead": "whole call"}


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-4 else f"{seconds * 1e3:.1f} ms"


def render(runs: list[dict[str, Any]]) -> str:
    machine = runs[0]["machine"]
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for run in runs:
        for row in run["rows"]:
            rows.setdefault((row["group"], row["case"], row["dtype"]), []).append(row)
    lines = [
        "## Measured on a CPU",
        "",
        f"`flashkernel bench` on two threads, alternating with PyTorch {machine['torch']}'s "
        f"`scaled_dot_product_attention`; {machine['cpu']} ({' '.join(machine['cpu_features'])}), a shared virtual "
        f"machine with {machine['cpus']} cores, {machine['date'][:10]}, commit {machine['commit']}. Medians of "
        f"{len(runs)} runs; in brackets the least and the largest ratio of a run. Decoding reads caches that together "
        "are twice the last-level cache, so from memory; beside it what part of the speed of a plain sum over the same "
        "bytes, timed in turn with it, each side reaches. The runs had real-time priority, since other work ran on the "
        "machine; they are in [benchmarks/cpu/](benchmarks/cpu).",
        "",
        "| | case | dtype | FlashKernel | PyTorch | PyTorch / FlashKernel | of a plain sum: FlashKernel, PyTorch |",
        "|---|---|---|---|---|---|---|",
    ]
    for (group, case, dtype), found in rows.items():
        if group not in GROUPS:
            continue
        ours, torch = (statistics.median(row[side]["p50"] for row in found) for side in ("ours", "torch"))
        ratios = [row["ratio_to_torch"] for row in found]
        shares = ""
        if all("share_of_read" in row for row in found):
            sides = ("share_of_read", "torch_share_of_read")
            shares = ", ".join(f"{statistics.median(row[side] for row in found):.0%}" for side in sides)
        lines.append(
            f"| {GROUPS[group]} | {case} | {dtype} | {milliseconds(ours)} | {milliseconds(torch)} "
            f"| **{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f}) | {shares} |"
        )
    memory = [(case, found) for (group, case, dtype), found in rows.items() if group == "attention_memory"]
    if memory:
        lines += [
            "",
            "Memory beyond the result, at its peak, grows with the number of threads and not with the sequence:",
            "",
            "| attention | dtype | workspace of the op | resident memory of the process |",
            "|---|---|---|---|",
        ]
        for case, found in memory:
            row = found[-1]
            peak, workspace = row["peak_extra_bytes"], row["workspace_peak_bytes"]
            lines.append(
                f"| {case} | {row['dtype']} | {'-' if workspace is None else f'{workspace / 1e6:.2f} MB'} "
                f"| {'-' if peak is None else f'{peak / 1e6:.2f} MB'} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if README.md differs")
    args = parser.parse_args()
    files = sorted((ROOT / "benchmarks" / "cpu").glob("*.json"))
    if not files:
        print("no runs under benchmarks/cpu", file=sys.stderr)
        return 1
    table = render([json.loads(file.read_text()) for file in files])
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    new = f"{before}{BEGIN}\n{table}\n{END}{after}"
    if args.check:
        return 0 if new == text else 1
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
