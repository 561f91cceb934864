"""Plots of attention rows: latency, throughput and speedup against the sequence, scaling with the batch, memory.

`figures` says what is drawn, from result rows alone; `draw` needs matplotlib. Each SVG carries the digest of its data,
so that a test can tell without drawing whether a committed plot shows the committed results.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashkernel.bench.case import BESIDE, LIMIT, OURS, PEER, VARIANT

from . import peers

__all__ = ["HERO", "Figure", "canvas", "digest", "digest_in", "draw", "figures", "hero", "legend_below"]

Points = list[tuple[float, float]]
HERO = "hero"  # README's picture
LOOK = 2  # counts changes of how figures are drawn, so that committed ones are drawn again


@dataclass
class Figure:
    """One file: panels of lines."""

    name: str
    title: str
    x_label: str
    y_label: str
    log_y: bool = False
    panels: dict[str, dict[str, Points]] = field(default_factory=dict)
    lines_only: bool = False  # curves over a linear x, their points unmarked
    labels: dict[str, str] = field(default_factory=dict)  # of providers: names with versions
    note: str = ""  # below the title


def _positive(value: float | None) -> float | None:
    return value if value and value > 0 else None


def _latency(row: dict[str, Any], p: dict[str, Any]) -> float | None:
    return float(p["p50"]) * 1e6


def _throughput(row: dict[str, Any], p: dict[str, Any]) -> float | None:
    return _positive(p["tflops"])


def _speedup(row: dict[str, Any], p: dict[str, Any]) -> float | None:
    """Ours over this provider: its time divided by ours."""
    ours = row["providers"].get("flashkernel")
    return float(p["p50"]) / float(ours["p50"]) if ours and p is not ours else None


def _memory(row: dict[str, Any], p: dict[str, Any]) -> float | None:
    size = p["peak_bytes"]
    return None if size is None else (size + (p.get("workspace_bytes") or 0)) / 2**20


KINDS: dict[str, tuple[str, str, bool, Callable[[dict[str, Any], dict[str, Any]], float | None]]] = {
    # y label, what it is, log scale
    "latency": ("microseconds (median)", "time of a call", True, _latency),
    "throughput": ("TFLOP/s", "throughput", False, _throughput),
    "speedup": ("times faster than", "FlashKernel against each baseline", True, _speedup),
    "scaling": ("TFLOP/s", "scaling with the batch", False, _throughput),
    "memory": ("MiB", "peak memory of a call (CPU: beyond its result)", True, _memory),
}


def _panel(row: dict[str, Any], kind: str) -> str:
    shape = row["shape"]
    at = f", seq {shape['seq']}" if kind == "scaling" else ""
    # The ladder measures both passes in one group.
    backward = ", backward" if row["case"].startswith("attention_bwd") else ""
    return f"head dim {shape['head_dim']}, {'causal' if shape.get('causal') else 'full'}, {row['dtype']}{at}{backward}"


def _note(machine: dict[str, Any], labels: dict[str, str]) -> str:
    """The line below a plot: machine and date, and the peers whose version the run does not record."""
    where = str(machine.get("gpu") or f"{machine.get('cpu', '?')}, {machine.get('threads', '?')} threads")
    bare = [
        label for name, label in sorted(labels.items()) if label in peers.NAMES.values() and peers.has_version(name)
    ]
    kept = f"; this run kept no version of {' and '.join(bare)}" if bare else ""
    return f"{where}, {str(machine.get('date', ''))[:10]}{kept}"


def figures(section: str, rows: Iterable[dict[str, Any]], machine: dict[str, Any] | None = None) -> list[Figure]:
    """Figures of the rows that have a sequence and a head_dim. A panel needs a line of two points or more."""
    found: dict[str, Figure] = {}
    for row in rows:
        shape = row["shape"]
        if not {"seq", "head_dim", "batch"} <= shape.keys() or shape.get("page") or "gqa" in row["group"]:
            continue
        sizes = row["group"] == "attention_sizes"
        for kind, (label, title, log, value) in KINDS.items():
            if (kind == "scaling") != (sizes and shape["batch"] > 1) and not (kind == "scaling" and sizes):
                continue
            if kind == "memory" and row["group"] not in ("attention_sizes", "attention_memory"):
                continue
            if kind != "memory" and row["group"] == "attention_memory":
                continue
            x = "batch" if kind == "scaling" else "seq"
            x_label = "batch" if kind == "scaling" else "sequence length"
            name = f"{section}_{row['group']}_{kind}"
            figure = found.setdefault(
                name, Figure(name, f"{row['group'].replace('_', ' ')}: {title}", x_label, label, log)
            )
            lines = figure.panels.setdefault(_panel(row, kind), {})
            for provider, p in row["providers"].items():
                y = value(row, p) if p["kind"] in (OURS, VARIANT, PEER, BESIDE) else None
                if y is not None and p["kind"] != LIMIT:
                    lines.setdefault(peers.same_line(provider), []).append((float(shape[x]), float(f"{y:.4g}")))
    for figure in found.values():
        panels = {
            panel: {name: sorted(points) for name, points in lines.items()}
            for panel, lines in figure.panels.items()
            if any(len({x for x, _ in points}) > 1 for points in lines.values())
        }
        figure.panels = dict(sorted(panels.items(), key=lambda x: [int(n) for n in re.findall(r"\d+", x[0])]))
        drawn = {name for lines in panels.values() for name in lines}
        figure.labels = {name: peers.label(name, machine or {}) for name in sorted(drawn)}
        figure.note = _note(machine or {}, figure.labels)
    return [figure for figure in found.values() if figure.panels]


def digest(figure: Figure) -> str:
    data = [
        figure.title,
        figure.x_label,
        figure.y_label,
        figure.log_y,
        figure.panels,
        *([True] if figure.lines_only else []),
        figure.labels,
        figure.note,
        LOOK,
    ]
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


def digest_in(svg: str) -> str | None:
    found = re.search(r"data ([0-9a-f]{32})", svg)
    return found[1] if found else None


def hero(forward: list[Figure], backward: list[Figure]) -> Figure | None:
    """README's picture: causal attention of both passes at head dim 128, from the figures of two suites."""
    panels: dict[str, dict[str, Points]] = {}
    labels: dict[str, str] = {}
    note = ""
    for title, found in (("forward", forward), ("backward", backward)):
        for figure in found:
            if not figure.name.endswith("_throughput"):
                continue
            lines = figure.panels.get("head dim 128, causal, float16")
            if lines:
                panels[f"{title}, head dim 128, causal, float16"] = lines
                labels = {**figure.labels, **labels}
                note = note or figure.note
    if len(panels) < 2:
        return None
    return Figure(HERO, "attention: throughput", "sequence length", "TFLOP/s", panels=panels, labels=labels, note=note)


def legend_below(figure: Any, handles: list[Any], labels: list[str]) -> Any:
    """A legend under the axes, where no curve can be, as wide as the figure. The figure needs constrained layout."""
    widest = 0.45 + 0.065 * max(map(len, labels))  # inches, at font size 8
    columns = max(1, min(len(labels), int(figure.get_figwidth() / widest)))
    return figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, columnspacing=1.2)


def canvas(figure: Figure) -> Any:
    """The figure, drawn, as matplotlib has it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    columns = 2 if len(figure.panels) == 4 else min(3, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    made, axes = pyplot.subplots(
        rows, columns, figsize=(max(4 * columns, 6), 2.8 * rows + 1), squeeze=False, layout="constrained"
    )
    for ax in axes.flat[len(figure.panels) :]:
        ax.set_axis_off()
    named: dict[str, Any] = {}
    for ax, (panel, lines) in zip(axes.flat, figure.panels.items(), strict=False):
        for name, points in lines.items():
            x, y = zip(*points, strict=True)
            style = peers.style(name)
            width = style.width
            if figure.lines_only and name == "flashkernel":
                width = 1.3  # it lies on the stock kernels' line, which is wide
            (named[name],) = ax.plot(
                x, y, style.line, marker=None if figure.lines_only else style.marker, markersize=4, linewidth=width,
                color=style.colour, label=figure.labels.get(name, name), zorder=3 if name == "flashkernel" else 2,
            )  # fmt: skip
        ax.set_title(panel)
        ax.set_xlabel(figure.x_label)
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
        if figure.lines_only:
            continue
        ticks = sorted({x for points in lines.values() for x, _ in points})
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [f"{int(x)}" for x in ticks])
        ax.set_xticks([], minor=True)
        if figure.log_y:
            ax.set_yscale("log")
            for axis in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
                axis(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else ""))
        else:
            ax.set_ylim(bottom=0)
        if figure.y_label.startswith("times"):
            ax.axhline(1.0, color="black", linewidth=0.6)
    for ax in axes[:, 0]:
        ax.set_ylabel(figure.y_label)
    made.suptitle(f"{figure.title}\n{figure.note}" if figure.note else figure.title)
    order = sorted(named, key=lambda name: (name != "flashkernel", list(peers.STYLES).index(name)))
    legend_below(made, [named[name] for name in order], [figure.labels.get(name, name) for name in order])
    return made


def draw(figure: Figure, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "flashkernel", "svg.fonttype": "none", "font.size": 8}):
        made = canvas(figure)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Description": f"data {digest(figure)}", "Date": None, "Creator": "python -m tools report"}
        made.savefig(path, format="svg", metadata=metadata)
        pyplot.close(made)
