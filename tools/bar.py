"""The comparison of attention at its agreed points: ours against the best of cuDNN, FlashAttention-2, -3 and -4.

Where FlashAttention-3 or -4 is not in a run on an H200, its ratio to cuDNN at that point in
lab/results/h200/peers.json (all measured in one run on one H200) times cuDNN's rate in this run stands for it, marked
with ~. Called by report.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashkernel.bench.tables import markdown

from .places import RESULTS

__all__ = ["Point", "bar", "points", "recorded"]

PEERS = ("sdpa_cudnn", "sdpa_flash", "fa3", "fa4")
PASSES = {"attention_forward": "forward", "attention_backward": "backward", "attention_gqa": "gqa"}


@dataclass(frozen=True)
class Point:
    name: str
    group: str
    seq: int
    causal: bool
    ours: float  # TFLOP/s, here and below
    measured: dict[str, float]
    estimated: dict[str, float]

    @property
    def ratio(self) -> float:
        return self.ours / max([*self.measured.values(), *self.estimated.values()])


def recorded(root: Path) -> dict[str, dict[str, float]]:
    path = root / RESULTS / "h200" / "peers.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))["points"]) if path.is_file() else {}


def _name(row: dict[str, Any]) -> str:
    shape = row["shape"]
    heads = f"{shape['heads']}/{shape['heads_kv']} heads " if row["group"] == "attention_gqa" else ""
    kind = "causal" if shape["causal"] else "full"
    return f"{PASSES[row['group']]} {heads}d{shape['head_dim']} seq {shape['seq']} {kind}"


def points(rows: Iterable[dict[str, Any]], known: dict[str, dict[str, float]]) -> list[Point]:
    """Points of a GPU's rows that have our rate and a peer's; ours is the faster of our modes where the peer's is not
    deterministic either. known: what `recorded` has, for an H200's rows; else nothing."""
    found = []
    for row in rows:
        if row["group"] not in PASSES or row["device"] != "cuda" or row["shape"].get("page"):
            continue
        rates = {name: p["tflops"] for name, p in row["providers"].items()}
        mine = [rates[name] for name in ("flashkernel", "any_order") if name in rates]
        measured = {name: rates[name] for name in PEERS if name in rates}
        if not mine or not measured:
            continue
        name = _name(row)
        before = known.get(name, {})
        estimated = {
            peer: measured["sdpa_cudnn"] * before[peer] / before["sdpa_cudnn"]
            for peer in PEERS
            if peer in before and peer not in measured and "sdpa_cudnn" in measured
        }
        shape = row["shape"]
        found.append(Point(name, row["group"], shape["seq"], shape["causal"], max(mine), measured, estimated))
    return found


def _mean(ratios: list[float]) -> float:
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


def bar(found: list[Point]) -> str:
    """Markdown: the points, then each pass's geometric mean, least ratio and how many reach 1.00."""
    lines = [["TFLOP/s", "FlashKernel", "cuDNN", "FlashAttention-2", "-3", "-4", "ours / best"]]
    for p in found:
        peers = [
            f"{p.measured[name]:.0f}" if name in p.measured
            else f"~{p.estimated[name]:.0f}" if name in p.estimated
            else "-"
            for name in PEERS
        ]  # fmt: skip
        lines.append([p.name, f"{p.ours:.0f}", *peers, f"{p.ratio:.2f}"])
    summary = []
    for group, name in PASSES.items():
        ratios = [p.ratio for p in found if p.group == group]
        if ratios:
            reach = sum(ratio >= 1 for ratio in ratios)
            summary.append(
                f"{name}: geometric mean {_mean(ratios):.3f}, least {min(ratios):.2f}, "
                f"{reach} of {len(ratios)} points at 1.00 or more"
            )
    short = [p.ratio for p in found if p.group == "attention_forward" and p.causal and p.seq <= 2048]
    if short:
        summary.append(f"forward, causal, seq to 2048: least {min(short):.2f}, mean {_mean(short):.3f}")
    return markdown(lines) + "\n\n" + "; ".join(summary) + "."
