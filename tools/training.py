"""What scripts/compare_training.py measured: tables, the plot of the loss curves, and the sentence for BENCHMARKS.md.

Called by report.py. A result has runs of the stock kernels and of FlashKernel's, each by several ways to run a step,
with the loss of every step; all share weights and batches.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import peers
from .places import RESULTS
from .plots import Figure

__all__ = ["SCHEMA", "figures", "report", "sentence", "smoothed"]

SCHEMA = "train-1"
POINTS = 100  # of a curve in a plot


def smoothed(losses: list[float], window: int) -> list[float]:
    """Means of all runs of `window` neighbours."""
    width = min(window, len(losses))
    return [statistics.fmean(losses[i : i + width]) for i in range(len(losses) - width + 1)]


def _results(root: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted((root / RESULTS).rglob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(result, dict) and result.get("schema") == SCHEMA:
            yield path, result


def _run(result: dict[str, Any], kernels: str, way: str) -> dict[str, Any] | None:
    return next((run for run in result["runs"] if (run["kernels"], run["way"]) == (kernels, way)), None)


def _way(result: dict[str, Any]) -> str:
    """The fastest way of FlashKernel's that both sides went with all steps."""
    both = [
        run
        for run in result["runs"]
        if run["kernels"] == "flashkernel"
        and _run(result, "stock", run["way"]) is not None
        and len(run["losses"]) == result["method"]["steps"]
    ]
    return str(max(both, key=lambda run: run["tokens_per_second"])["way"]) if both else ""


def _figure(path: Path, result: dict[str, Any]) -> Figure | None:
    way, window = _way(result), result["method"]["window"]
    if not way:
        return None
    curves = {k: smoothed((_run(result, k, way) or {})["losses"], window) for k in ("stock", "flashkernel")}
    other = next(
        (r for r in result["runs"] if r["kernels"] == "stock" and r["way"] not in (way, "eager")),
        None,
    )
    every = max(1, len(curves["stock"]) // POINTS)

    def points(values: list[float]) -> list[tuple[float, float]]:
        return [(float(i + window), round(values[i], 4)) for i in range(0, len(values), every)]

    apart = {"flashkernel": [b - a for a, b in zip(curves["stock"], curves["flashkernel"], strict=True)]}
    if other is not None:
        same = zip(curves["stock"], smoothed(other["losses"], window), strict=False)
        apart[f"stock, {other['way']}"] = [b - a for a, b in same]
    return Figure(
        f"{path.parent.name}_{path.stem}",
        f"training loss, mean of {window} steps ({way})",
        "step",
        "nats per token",
        panels={
            "loss": {name: points(values) for name, values in curves.items()},
            "loss less stock's": {name: points(values) for name, values in apart.items()},
        },
        lines_only=True,
        labels={name: peers.label(name, result["machine"]) for name in (*curves, *apart)},
        note=f"{result['machine'].get('gpu') or result['machine']['cpu']}, {result['machine']['date'][:10]}",
    )


def figures(root: Path) -> list[Figure]:
    return [figure for path, result in _results(root) if (figure := _figure(path, result)) is not None]


def _memory(run: dict[str, Any]) -> str:
    return f"{run['peak_bytes'] / 2**30:.2f} GiB" if run["peak_bytes"] else "-"


def report(root: Path) -> str:
    """The part of lab/tables/whole_models.md: tables and plot of every result."""
    parts = []
    for path, result in _results(root):
        machine, method = result["machine"], result["method"]
        precision = "bf16 autocast" if method["bf16"] else "fp32"
        parts.append(
            f"`{result['command']}` on {machine.get('gpu') or machine['cpu']}, {machine['date'][:10]}, commit "
            f"{machine['commit']}, torch {machine['torch']}, transformers {machine['transformers']}: {method['steps']} "
            f"steps of {method['batch']} x {method['context']} tokens, {method['layers']} layers of width "
            f"{method['width']}, dropout {method['dropout']}, {precision}, the same "
            "weights and batches in every run (eager ones: a quarter of the steps). Ready: until step 20. Validation "
            "loss: of the weights rounded to fp16, by stock kernels.\n"
        )
        window = method["window"]
        lines = [
            "| a step | kernels | tokens/s | ready | peak memory | last loss | validation loss |",
            "|---|---|---|---|---|---|---|",
        ]
        for run in result["runs"]:
            lines.append(
                f"| {run['way']} | {run['kernels']} | {run['tokens_per_second'] / 1e6:.2f} M | "
                f"{run['ready_seconds']:.1f} s | {_memory(run)} | {smoothed(run['losses'], window)[-1]:.4f} | "
                f"{run['val_loss']:.4f} |"
            )
        parts.append("\n".join(lines) + "\n")
        lines = [f"| curves, means of {window} steps | farthest apart | at the end |", "|---|---|---|"]
        lines += [
            f"| {gap['to']} less {gap['from']} | {gap['max_distance']:.4f} | {gap['last_distance']:+.4f} |"
            for gap in result["distances"]
            if gap["steps"] == method["steps"]
        ]
        parts.append("\n".join(lines) + "\n")
        if result["failed"]:  # or no time left
            parts.append(f"Not measured: {'; '.join(result['failed'])}.\n")
        if (figure := _figure(path, result)) is not None:
            parts.append(f"![{figure.title}](../plots/{figure.name}.svg)\n")
    return "\n".join(["\n## Training\n", *parts]) if parts else ""


def sentence(root: Path) -> str:
    """BENCHMARKS.md's, of the results from a GPU."""
    parts = []
    for _, result in _results(root):
        if "gpu" not in result["machine"] or not _way(result):
            continue
        speeds = [
            f"{way} {ours['tokens_per_second'] / 1e6:.2f} M ({stock['tokens_per_second'] / 1e6:.2f} M)"
            for way in dict.fromkeys(run["way"] for run in result["runs"])
            if (ours := _run(result, "flashkernel", way)) and (stock := _run(result, "stock", way))
        ]
        losses = [(_run(result, k, _way(result)) or {})["val_loss"] for k in ("flashkernel", "stock")]
        parts.append(
            f"Training a GPT-2 of width {result['method']['width']} on one {result['machine']['gpu']}, tokens/s with "
            f"FlashKernel's kernels (with stock ones), by the way a step runs: {', '.join(speeds)}. After "
            f"{result['method']['steps']} steps validation losses of {losses[0]:.3f} and {losses[1]:.3f}; "
            "curves and tables in [lab/tables/whole_models.md](lab/tables/whole_models.md#training)."
        )
    return "\n\n".join(parts)
