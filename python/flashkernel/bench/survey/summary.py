"""What the survey ends in: one number, the least ten, the rows behind, and what has no figure. From result rows alone.

A measurement is a row and a way to call: in a chain of such calls, or alone behind an unrelated small kernel, where
both were taken. Its ratio is the fastest peer's median divided by ours: above 1, ours is faster.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ...terminal import fitted
from ..case import PEER
from ..tables import seconds

__all__ = ["Measurement", "geometric_mean", "measurements", "text", "without_figure"]

BEHIND = 0.995


@dataclass(frozen=True)
class Measurement:
    family: str
    case: str
    dtype: str
    way: str  # "chain" or "alone"
    ours: float  # seconds, median
    spread: float  # standard deviation of ours over its median
    peer: str
    theirs: float

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours


def _family(row: dict[str, Any]) -> str:
    return str(row["group"]).removeprefix("survey_")


def measurements(rows: Iterable[dict[str, Any]]) -> Iterator[Measurement]:
    for row in rows:
        providers = row["providers"]
        ours = providers.get("flashkernel")
        peers = {name: p for name, p in providers.items() if p["kind"] == PEER}
        if ours is None or not peers:
            continue
        for way in ("chain", "alone"):
            mine = ours if way == "chain" else ours.get("alone")
            theirs = peers if way == "chain" else {name: p["alone"] for name, p in peers.items() if "alone" in p}
            if mine is None or not theirs:
                continue
            best = min(theirs, key=lambda name: theirs[name]["p50"])
            spread = mine["std"] / mine["p50"]
            yield Measurement(
                _family(row), row["case"], row["dtype"], way, mine["p50"], spread, best, theirs[best]["p50"]
            )


def without_figure(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str]]:
    """Rows that have no ratio, and why; and those whose results are wrong."""
    for row in rows:
        providers = row["providers"]
        wrong = [
            f"{name}: {reason}" for name, reason in row["refused"].items() if reason.startswith(("DIFFERS", "FAILS"))
        ]
        if wrong:
            yield row, "; ".join(wrong)
        elif "flashkernel" not in providers:
            yield row, row["refused"].get("flashkernel", "ours was not timed")
        elif not any(p["kind"] == PEER for p in providers.values()):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in row["refused"].items())
            yield row, f"no peer: {reasons or 'none is installed'}"


def geometric_mean(ratios: Iterable[float]) -> float:
    found = [math.log(ratio) for ratio in ratios]
    return math.exp(math.fsum(found) / len(found)) if found else math.nan


def _families(found: list[Measurement]) -> list[list[str]]:
    lines = [["family", "measured", "mean", "least", "under 1.0", "under 0.95"]]
    for family in dict.fromkeys(m.family for m in found):
        ratios = [m.ratio for m in found if m.family == family]
        under = [str(sum(ratio < bar for ratio in ratios)) for bar in (BEHIND, 0.95)]
        lines.append([family, str(len(ratios)), f"{geometric_mean(ratios):.2f}", f"{min(ratios):.2f}", *under])
    return lines


def _lines(found: Iterable[Measurement]) -> list[list[str]]:
    lines = [["x", "way", "ours", "best peer", "case"]]
    for m in found:
        ours = f"{seconds(m.ours)} ±{m.spread:.0%}"
        lines.append([f"{m.ratio:.2f}", m.way, ours, f"{m.peer} {seconds(m.theirs)}", f"{m.case}, {m.dtype}"])
    return lines


def text(rows: list[dict[str, Any]], columns: int) -> str:
    found = sorted(measurements(rows), key=lambda m: m.ratio)
    parts = []
    if found:
        behind = [m for m in found if m.ratio < BEHIND]
        parts += [fitted(_families(sorted(found, key=lambda m: m.family)), columns)]
        parts += ["The least ten:\n" + fitted(_lines(found[:10]), columns)]
        if behind[10:]:
            parts += [f"Also behind ({len(behind) - 10}):\n" + fitted(_lines(behind[10:]), columns)]
    none = [f"  {row['case']}, {row['dtype']}: {reason}" for row, reason in without_figure(rows)]
    if none:
        folded = [
            "\n".join(textwrap.wrap(line, columns, subsequent_indent="    ", break_on_hyphens=False)) for line in none
        ]
        parts += [f"Without a figure, or wrong ({len(none)}):\n" + "\n".join(folded)]
    for way in ("chain", "alone"):
        ratios = [m.ratio for m in found if m.way == way]
        if ratios:
            parts += [f"{way}: {geometric_mean(ratios):.3f} over {len(ratios)} rows"]
    mean = geometric_mean(m.ratio for m in found)
    under = sum(m.ratio < BEHIND for m in found)
    parts += [f"x best peer, geometric mean: {mean:.3f} ({len(found)} measurements, {under} behind)"]
    return "\n\n".join(parts)
