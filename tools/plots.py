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

__all__ = ["Figure", "digest", "digest_in", "draw", "figures"]

Points = list[tuple[float, float]]


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
    return f"d{shape['head_dim']} {'causal' if shape.get('causal') else 'full'} {row['dtype']}{at}"


def figures(section: str, rows: Iterable[dict[str, Any]]) -> list[Figure]:
    """Of the rows that have a sequence and a head_dim; only panels with two points or more on some line."""
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
            name = f"{section}_{row['group']}_{kind}"
            figure = found.setdefault(name, Figure(name, f"{row['group'].replace('_', ' ')}: {title}", x, label, log))
            lines = figure.panels.setdefault(_panel(row, kind), {})
            for provider, p in row["providers"].items():
                y = value(row, p) if p["kind"] in (OURS, VARIANT, PEER, BESIDE) else None
                if y is not None and p["kind"] != LIMIT:
                    lines.setdefault(provider, []).append((float(shape[x]), float(f"{y:.4g}")))
    for figure in found.values():
        panels = {
            panel: {name: sorted(points) for name, points in lines.items()}
            for panel, lines in figure.panels.items()
            if any(len({x for x, _ in points}) > 1 for points in lines.values())
        }
        figure.panels = dict(sorted(panels.items(), key=lambda x: [int(n) for n in re.findall(r"\d+", x[0])]))
    return [figure for figure in found.values() if figure.panels]


def digest(figure: Figure) -> str:
    data = [
        figure.title,
        figure.x_label,
        figure.y_label,
        figure.log_y,
        figure.panels,
        *([True] if figure.lines_only else []),
    ]
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


def digest_in(svg: str) -> str | None:
    found = re.search(r"data ([0-9a-f]{32})", svg)
    return found[1] if found else None


# One colour for a provider in every plot.
COLOURS = {
    "flashkernel": "#d62728", "any_order": "#ff9896", "triton": "#9467bd", "naive": "#c7c7c7", "tiled": "#7f7f7f",
    "sdpa": "#1f77b4", "sdpa_cudnn": "#2ca02c", "sdpa_flash": "#1f77b4", "sdpa_efficient": "#17becf",
    "sdpa_math": "#bcbd22", "fa3": "#ff7f0e", "fa4": "#8c564b", "eager": "#bcbd22", "compile": "#e377c2",
    "liger": "#bc80bd", "quack": "#e7969c", "fa3_paged": "#ffbb78", "fa3_planned": "#ff7f0e", "flashinfer": "#8c564b",
    "flashinfer_cuda_cores": "#c49c94",
    "stock": "#1f77b4", "stock, graph": "#7f7f7f", "stock, compile + graph": "#7f7f7f",
}  # fmt: skip


def draw(figure: Figure, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    with pyplot.rc_context({"svg.hashsalt": "flashkernel", "svg.fonttype": "none", "font.size": 8}):
        columns = 2 if len(figure.panels) == 4 else min(3, len(figure.panels))
        rows = -(-len(figure.panels) // columns)
        canvas, axes = pyplot.subplots(
            rows, columns, figsize=(4 * columns, 2.8 * rows + 0.5), squeeze=False, layout="constrained"
        )
        for ax in axes.flat[len(figure.panels) :]:
            ax.set_axis_off()
        named: dict[str, Any] = {}
        for ax, (panel, lines) in zip(axes.flat, figure.panels.items(), strict=False):
            for name, points in lines.items():
                x, y = zip(*points, strict=True)
                width = 2.0 if name == "flashkernel" else 1.0
                if figure.lines_only:  # ours lies on it
                    width = 4.0 if name == "stock" else 1.0
                marker = None if figure.lines_only else "o"
                (named[name],) = ax.plot(
                    x, y, marker=marker, markersize=3, linewidth=width, color=COLOURS.get(name), label=name
                )
            ax.set_title(panel)
            ax.set_xlabel(figure.x_label)
            ax.grid(alpha=0.3)
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
        canvas.suptitle(figure.title)
        canvas.legend(list(named.values()), list(named), loc="outside lower center", ncols=min(8, len(named)))
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Description": f"data {digest(figure)}", "Date": None, "Creator": "python -m tools report"}
        canvas.savefig(path, format="svg", metadata=metadata)
        pyplot.close(canvas)
