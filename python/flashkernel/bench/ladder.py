"""The tables of docs/optimisation.md: what each rung, from the naive kernel to Hopper's, gave. From committed runs
alone. Called by roofline.py. A rung without a measurement has no row; the next run adds it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from .measured import Point, points

__all__ = ["render"]

RUNGS = (
    ("generic/naive", "naive"),
    ("generic/tiled", "tiled"),
    ("sm75", "tensor cores, m16n8k8 (sm75)"),
    ("sm80", "m16n8k16, cp.async (sm80)"),
    ("sm90a", "wgmma, TMA (sm90a)"),
)


def _rung(kernel: str) -> int | None:
    return next((i for i, (arch, _) in enumerate(RUNGS) if f"/cuda/{arch}" in kernel and "decode" not in kernel), None)


def _attention(found: Iterable[Point]) -> list[str]:
    """One table: same work on every rung, fp16."""
    same: dict[tuple[str, int, int, bool], dict[int, Point]] = {}
    for point in found:
        op, rung = point.kernel.split("/")[0], _rung(point.kernel)
        if rung is None or not point.exponentials or "/f32" in point.kernel or "/bf16" in point.kernel:
            continue
        if "float32" in point.case or "bfloat16" in point.case:
            continue
        # 16384 tokens and heads x head_dim = 2048: the work tells head_dim and length.
        dim = round(point.flop / point.exponentials / (10 if op == "attention_bwd" else 4))
        causal = "causal" in point.case
        seq = round(point.exponentials * (2 if causal else 1) / (16384 * 2048 / dim))
        usual = (8 if op == "attention_bwd" else 4) * 16384 * 2048 * 2
        if 0.95 < point.bytes / usual < 1.05:
            same.setdefault((op, dim, seq, causal), {})[rung] = point
    lines = ["| | rung | TFLOP/s | times the rung before | times the first here |", "|---|---|---|---|---|"]
    for (op, dim, seq, causal), rungs in sorted(same.items()):
        if len(rungs) < 2 or seq not in (512, 4096):
            continue
        what = (
            f"{'backward' if op == 'attention_bwd' else 'forward'} d{dim}, seq {seq}, {'causal' if causal else 'full'}"
        )
        order = sorted(rungs)
        for i, rung in enumerate(order):
            rate, first = rungs[rung].tflops, rungs[order[0]].tflops
            gain = f"{rate / rungs[order[i - 1]].tflops:.2f}" if i else "-"
            lines.append(f"| {what if not i else ''} | {RUNGS[rung][1]} | {rate:.4g} | {gain} | {rate / first:.2f} |")
    return lines


def _schedule(folder: Path) -> list[str]:
    """Hopper's forward: its first version against the schedule across tiles, both of the same run."""
    rows = json.loads((folder / "attention_fwd.json").read_text(encoding="utf-8"))["rows"]
    groups: dict[tuple[int, bool], list[float]] = {}
    for row in rows:
        groups.setdefault((row["head_dim"], row["causal"]), []).append(row["flashkernel"] / row["first_version"])
    lines = ["| | cases | gain, geometric mean | least | most |", "|---|---|---|---|---|"]
    for (dim, causal), gains in sorted(groups.items()):
        mean = math.exp(sum(math.log(gain) for gain in gains) / len(gains))
        what = f"d{dim} {'causal' if causal else 'full'}"
        lines.append(f"| {what} | {len(gains)} | {mean:.2f} | {min(gains):.2f} | {max(gains):.2f} |")
    return lines


def _pairs(found: list[Point]) -> list[str]:
    """Linear and its gradient: sm80 and sm90a on the same case."""
    lines = ["| | sm80, us | sm90a, us | gain |", "|---|---|---|---|"]
    for below in found:
        if not below.kernel.startswith("linear") or "/sm80/" not in below.kernel or "/f32" in below.kernel:
            continue
        above = next(
            (p for p in found if p.kernel == below.kernel.replace("sm80", "sm90a") and p.case == below.case), None
        )
        if above:
            kind = "gradient" if below.kernel.startswith("linear_bwd") else "few rows"
            gain = below.seconds / above.seconds
            lines.append(
                f"| {kind}, {below.case} | {below.seconds * 1e6:.4g} | {above.seconds * 1e6:.4g} | {gain:.2f} |"
            )
    return lines


def _merging(folder: Path) -> list[str]:
    """Decode: what the choice of where partial results meet saves, where both were measured."""
    rows = json.loads((folder / "attention_decode.json").read_text(encoding="utf-8"))["rows"]
    lines = ["| merging that is chosen | cases | time of the other, geometric mean |", "|---|---|---|"]
    for name in ("apart", "last block"):
        ratios = [
            row["other_merging_us"] / row["microseconds"]
            for row in rows
            if row["merging"] == name and row["other_merging_us"]
        ]
        mean = math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))
        lines.append(f"| {name} | {len(ratios)} | {mean:.2f} |")
    return lines


def render(root: Path) -> dict[str, str]:
    folder = root / "benchmarks" / "h200"
    found = points(folder)
    tables = {
        "attention": _attention(found),
        "schedule": _schedule(folder),
        "linear": _pairs(found),
        "merging": _merging(folder),
    }
    return {name: "\n".join(lines) for name, lines in tables.items()}
