"""Where FlashKernel stands beside its peers: BENCHMARKS.md's overview, every row where a peer is ahead, README's table.

From result rows alone; called by report.py. A ratio is the fastest peer's time divided by ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flashkernel.bench.survey import summary
from flashkernel.bench.tables import markdown, seconds

from .changes import MARK, NOTE, Changes, kernels_of
from .peers import NAMES

__all__ = ["Row", "Suite", "headline", "overview", "rows_with_a_peer", "where_others_are_faster"]

SHOWN = 20  # shapes of BENCHMARKS.md's "Where others are faster"
ALONE = ", alone"  # how the survey's case of a call by itself ends; without it, of a call in a chain
# README's rows: what, suite, groups.
HEADLINE = (
    ("Attention forward", "h200/attention", ("attention_forward", "attention_gqa")),
    ("Attention backward", "h200/attention_backward", ("attention_backward",)),
    ("One-token decode, paged and not", "h200/decode", ("decode",)),
    ("Linear, 512 to 16384 rows", "h200/linear_large", ("linear",)),
    ("Linear, 1 to 64 rows", "h200/linear_decode", ("linear",)),
    ("Norms and their gradients", "h200/memory_bound", ("norm", "norm_backward")),
    ("Softmax, sums, SwiGLU, RoPE", "h200/memory_bound", ("elementwise", "rope")),
    ("Cross-entropy", "h200/cross_entropy", ("cross_entropy",)),
    ("Attention forward", "cpu/run", ("attention_forward",)),
    ("One-token decode", "cpu/run", ("decode",)),
)


@dataclass(frozen=True)
class Suite:
    name: str
    slug: str
    runs: list[dict[str, Any]]
    rows: list[dict[str, Any]]  # medians over the runs

    @property
    def machine(self) -> str:
        return str(self.runs[0]["machine"].get("gpu") or self.runs[0]["machine"]["cpu"])

    @property
    def commit(self) -> str:
        return ", ".join(dict.fromkeys(str(run["machine"]["commit"])[:7] for run in self.runs))

    @property
    def date(self) -> str:
        return max(str(run["machine"]["date"])[:10] for run in self.runs)

    @property
    def is_survey(self) -> bool:
        """Whether `flashkernel bench survey` wrote it: shapes from models and servers."""
        return str(self.runs[0]["command"]).startswith("flashkernel bench survey")

    @property
    def is_steady(self) -> bool:
        return bool(self.runs[0]["method"].get("steady"))


@dataclass(frozen=True)
class Row:
    suite: Suite
    group: str
    case: str
    dtype: str
    ours: float  # seconds
    peer: str
    theirs: float
    kernels: tuple[str, ...] = ()

    def is_older(self, newer: Changes) -> bool:
        """Than a kernel that it timed."""
        return newer.is_older(self.kernels, (run["machine"].get("commit") for run in self.suite.runs))

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours


def rows_with_a_peer(suite: Suite) -> Iterator[Row]:
    """Ours against the fastest peer of each row that has one. Where the row has our backward pass in any order, which
    is what its peers do, the faster of our two counts."""
    for row in suite.rows:
        mine = [row["providers"][name]["p50"] for name in ("flashkernel", "any_order") if name in row["providers"]]
        peers = {name: p["p50"] for name, p in row["providers"].items() if p["kind"] == "peer" and p["p50"]}
        if not mine or not peers:
            continue
        best = min(peers, key=lambda name: peers[name])
        kernels = tuple(kernels_of(row))
        yield Row(suite, row["group"], row["case"], row["dtype"], min(mine), best, peers[best], kernels)
        if suite.is_survey:
            yield from _alone(suite, row, kernels)


def _alone(suite: Suite, row: dict[str, Any], kernels: tuple[str, ...]) -> Iterator[Row]:
    """The survey's second way to measure a row: each call behind an unrelated kernel."""
    for found in summary.measurements([row]):
        if found.way == "alone":
            case = found.case + ALONE
            yield Row(suite, row["group"], case, row["dtype"], found.ours, found.peer, found.theirs, kernels)


def _newest(suites: Iterable[Suite]) -> list[Row]:
    """Each case once for each machine and way to measure: its newest run."""
    found: dict[tuple[str, ...], Row] = {}
    for suite in sorted(suites, key=lambda suite: suite.date):
        for row in rows_with_a_peer(suite):
            found[suite.machine, str(suite.is_steady), row.group, row.case, row.dtype] = row
    return list(found.values())


def _mean(ratios: list[float]) -> float:
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


def _peer(name: str) -> str:
    return NAMES.get(name, name)


def _behind(rows: Iterable[Row], tables: str, newer: Changes) -> str:
    lines = [["x best peer", "what", "case", "dtype", "ours", "best peer", "suite", "measured"]]
    for row in rows:
        case = row.case.replace("|", "/")
        lines.append(
            [
                f"{row.ratio:.2f}",
                row.group,
                case,
                row.dtype,
                seconds(row.ours),
                f"{_peer(row.peer)} {seconds(row.theirs)}",
                f"[{row.suite.name}]({tables}{row.suite.slug}.md)",
                row.suite.date + (f" {MARK}" if row.is_older(newer) else ""),
            ]
        )
    return markdown(lines)


def _ahead_and_behind(suites: Iterable[Suite]) -> tuple[list[Row], list[Row]]:
    """(all rows, those where a peer is more than 0.5 % ahead, the farthest first)."""
    rows = _newest(suites)
    return rows, sorted((row for row in rows if row.ratio < 0.995), key=lambda row: row.ratio)


def _farthest(behind: list[Row]) -> list[Row]:
    """The first rows of different shapes: of a shape in a chain and alone, the one that is farther behind."""
    by_shape: dict[tuple[str, str, str, str], Row] = {}
    for row in behind:
        by_shape.setdefault((row.suite.name, row.group, row.case.removesuffix(ALONE), row.dtype), row)
    return list(by_shape.values())[:SHOWN]


def _surveyed(suites: Iterable[Suite]) -> bool:
    return any(suite.is_survey for suite in suites)


def where_others_are_faster(suites: list[Suite], newer: Changes) -> str:
    rows, behind = _ahead_and_behind(suites)
    return (
        "# Where others are faster\n\n"
        "Written by `python -m tools report`; do not edit. Every measured row where a peer is more than 0.5 % ahead: "
        f"{len(behind)} of {len(rows)}. Each case stands once for each machine and way to measure, by its newest run. "
        '"x best peer" is the fastest peer\'s time divided by ours. '
        f"{'' if _surveyed(suites) else 'Shapes beside the suites are not in here. '}"
        f"{NOTE}\n\n" + _behind(behind, "", newer) + "\n"
    )


def overview(suites: list[Suite], newer: Changes) -> str:
    """The beginning of BENCHMARKS.md."""
    lines = [["suite", "machine", "date", "commit", "rows with a peer", "x best peer, mean", "least", "behind", MARK]]
    for suite in suites:
        compared = list(rows_with_a_peer(suite))
        ratios = [row.ratio for row in compared]
        older = str(sum(row.is_older(newer) for row in compared))
        numbers = ["-", "-", "-"]
        if ratios:
            numbers = [f"{_mean(ratios):.2f}", f"{min(ratios):.2f}", str(sum(ratio < 0.995 for ratio in ratios))]
        link = f"[{suite.name}](lab/tables/{suite.slug}.md)"
        lines.append([link, _short(suite.machine), suite.date, suite.commit, str(len(ratios)), *numbers, older])
    rows, behind = _ahead_and_behind(suites)
    return "\n".join(
        [
            "# Benchmarks",
            "",
            "Written by `python -m tools report` from [lab/results](lab/results); do not edit. "
            "[docs/benchmarks.md](docs/benchmarks.md) says how to measure and what the method is. "
            '"x best peer" is the fastest peer\'s time divided by ours, as a geometric mean over rows: above 1, '
            "FlashKernel is faster. A suite's page has every row, its peers by name, and the machine. "
            f"{NOTE} The column counts such rows.",
            "",
            "## Suites",
            "",
            markdown(lines),
            "",
            "Whole models and training: [lab/tables/whole_models.md](lab/tables/whole_models.md).",
            "",
            "## Where others are faster",
            "",
            f"In {len(behind)} of {len(rows)} rows a peer is more than 0.5 % ahead. The farthest {SHOWN} shapes are "
            "below, [all of them here](lab/tables/where_others_are_faster.md). "
            + ("The survey's shapes count too." if _surveyed(suites) else "Shapes that no suite has are not counted."),
            "",
            _behind(_farthest(behind), "lab/tables/", newer),
        ]
    )


def _short(machine: str) -> str:
    return machine.removeprefix("NVIDIA ").removesuffix(" 80GB HBM3") if machine.startswith("NVIDIA ") else "CPU"


def headline(suites: list[Suite]) -> str:
    """README's table."""
    by_name = {suite.name: suite for suite in suites}
    lines = [["what", "on", "against", "rows", "x best peer, mean", "least"]]
    for what, name, groups in HEADLINE:
        suite = by_name.get(name)
        rows = [row for row in rows_with_a_peer(suite) if row.group in groups] if suite else []
        if suite is None or not rows:
            continue
        kinds = {
            peer
            for row in suite.rows
            if row["group"] in groups
            for peer, provider in row["providers"].items()
            if provider["kind"] == "peer"
        }
        ratios = [row.ratio for row in rows]
        lines.append(
            [
                f"[{what}](lab/tables/{suite.slug}.md)",
                _short(suite.machine),
                ", ".join(sorted(map(_peer, kinds))),
                str(len(rows)),
                f"**{_mean(ratios):.2f}**",
                f"{min(ratios):.2f}",
            ]
        )
    return markdown(lines)
