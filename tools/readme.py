"""The CPU's table of BENCHMARKS.md, and how a table is put between README's marks. Called by report.py.

The runs lab/results/cpu/run.*.json are what `flashkernel bench attention_forward attention_memory decode call_overhead
--threads 2` wrote. A cell is the median over the runs; the ratio's spread stands beside it: the machine is shared.
"""

from __future__ import annotations

import statistics
from typing import Any

__all__ = ["BEGIN", "END", "put", "render"]

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
GROUPS = {"attention_forward": "attention", "decode": "one-token decode", "call_overhead": "whole call"}


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-4 else f"{seconds * 1e3:.1f} ms"


def _peer(row: dict[str, Any]) -> dict[str, Any]:
    """torch's best: SDPA, or the one op that there is."""
    name = "sdpa" if "sdpa" in row["providers"] else "eager"
    return dict(row["providers"][name])


def _cells(group: str, case: str, dtype: str, found: list[dict[str, Any]]) -> str:
    pairs = [(row["providers"]["flashkernel"], _peer(row)) for row in found]
    ours, peer = (statistics.median(pair[side]["p50"] for pair in pairs) for side in (0, 1))
    ratios = [theirs["p50"] / mine["p50"] for mine, theirs in pairs]
    shares = ""
    if all("by" in (row["limit"] or {}) for row in found):  # a plain sum, timed in turn
        limits = [row["limit"]["seconds"] for row in found]
        medians = (
            statistics.median(limit / pair[side]["p50"] for limit, pair in zip(limits, pairs, strict=True))
            for side in (0, 1)
        )
        shares = ", ".join(f"{share:.0%}" for share in medians)
    return (
        f"| {GROUPS[group]} | {case} | {dtype} | {_time(ours)} | {_time(peer)} "
        f"| **{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f}) | {shares} |"
    )


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
        "machine; they are in [lab/results/cpu](lab/results/cpu).",
        "",
        "| | case | dtype | FlashKernel | PyTorch | PyTorch / FlashKernel | of a plain sum: FlashKernel, PyTorch |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_cells(*key, found) for key, found in rows.items() if key[0] in GROUPS]
    memory = [(case, dtype, found[-1]) for (group, case, dtype), found in rows.items() if group == "attention_memory"]
    if memory:
        lines += [
            "",
            "Memory beyond the result, at its peak, grows with the number of threads and not with the sequence:",
            "",
            "| attention | dtype | workspace of the op | resident memory of the process |",
            "|---|---|---|---|",
        ]
        for case, dtype, row in memory:
            sizes = row["library_peak_bytes"], row["providers"]["flashkernel"]["peak_bytes"]
            workspace, peak = ("-" if size is None else f"{size / 1e6:.2f} MB" for size in sizes)
            lines.append(f"| {case} | {dtype} | {workspace} | {peak} |")
    return "\n".join(lines)


def put(text: str, table: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """README's text with the table between its marks."""
    begin, end = marks
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
