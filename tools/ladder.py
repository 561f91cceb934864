"""The tables of lab/optimisation.md: what each rung gave, from the naive kernel to that for 9.0. From committed
runs alone. Called by roofline.py. Where a rung has no run yet the table says so; the next run fills it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from .measured import BY_HAND, Point, points
from .places import RESULTS

__all__ = ["NOT_MEASURED", "RUNGS", "attention", "render"]

# (part of the kernel's id, name), from the bottom up, by op.
RUNGS = {
    "attention_fwd": (
        ("generic/naive", "naive"),
        ("generic/tiled", "tiled"),
        ("sm75", "sm75: m16n8k8"),
        ("sm80", "sm80: m16n8k16, cp.async"),
        ("sm90a", "sm90a: wgmma, TMA"),
    ),
    "attention_bwd": (
        ("generic", "tiled"),
        ("sm75", "sm75: m16n8k8"),
        ("sm80", "sm80: m16n8k16, cp.async"),
        ("sm90a", "sm90a: wgmma, TMA"),
    ),
}
# head_dim, length, causal: what `flashkernel bench attention_ladder` measures.
CASES = tuple((dim, seq, causal) for dim in (64, 128) for seq in (512, 4096) for causal in (False, True))
NOT_MEASURED = "not measured"


def _rung(kernel: str) -> int | None:
    archs = [arch for arch, _ in RUNGS.get(kernel.split("/")[0], ())]
    return next((i for i, arch in enumerate(archs) if f"/cuda/{arch}" in kernel and "decode" not in kernel), None)


Ladder = dict[tuple[int, int, bool], dict[int, Point]]


def attention(found: Iterable[Point], wanted: str) -> Ladder:
    """The rungs of an op by (head_dim, length, causal): fp16, 16384 tokens and heads x head_dim = 2048. Runs of the
    bench go before the older files, which were measured apart; in one run the first provider counts.
    """
    same: Ladder = {}
    for point in sorted(found, key=lambda p: p.source.removesuffix(".json") not in BY_HAND):
        op, rung = point.kernel.split("/")[0], _rung(point.kernel)
        if op != wanted or rung is None or not point.exponentials or "/f32" in point.kernel or "/bf16" in point.kernel:
            continue
        if "float32" in point.case or "bfloat16" in point.case:
            continue
        # The work tells head_dim and length.
        dim = round(point.flop / point.exponentials / (10 if op == "attention_bwd" else 4))
        causal = "causal" in point.case
        seq = round(point.exponentials * (2 if causal else 1) / (16384 * 2048 / dim))
        usual = (8 if op == "attention_bwd" else 4) * 16384 * 2048 * 2
        if 0.95 < point.bytes / usual < 1.05:
            rungs = same.setdefault((dim, seq, causal), {})
            if rung not in rungs or rungs[rung].source != point.source:
                rungs[rung] = point
    return same


def _attention(found: Iterable[Point], op: str) -> list[str]:
    """A row a case, a column a rung; behind a rate, what the step from the rung before gave."""
    ladder, names = attention(found, op), [name for _, name in RUNGS[op]]
    more = [case for case, rungs in ladder.items() if case[1] in (512, 4096) and len(rungs) > 1]
    lines = [f"| TFLOP/s | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for case in sorted({*CASES, *more}):
        dim, seq, causal = case
        rungs = ladder.get(case, {})
        cells = []
        for i in range(len(names)):
            step = f" (x {rungs[i].tflops / rungs[i - 1].tflops:.2f})" if i in rungs and i - 1 in rungs else ""
            cells.append(f"{rungs[i].tflops:.4g}{step}" if i in rungs else NOT_MEASURED)
        lines.append(f"| d{dim}, seq {seq}, {'causal' if causal else 'full'} | {' | '.join(cells)} |")
    return lines


def _schedule(folder: Path) -> list[str]:
    """The forward for 9.0: its first version against the schedule across tiles, both of the same run."""
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
    folder = root / RESULTS / "h200"
    found = points(folder)
    tables = {
        "attention": _attention(found, "attention_fwd"),
        "attention_bwd": _attention(found, "attention_bwd"),
        "schedule": _schedule(folder),
        "linear": _pairs(found),
        "merging": _merging(folder),
    }
    return {name: "\n".join(lines) for name, lines in tables.items()}
