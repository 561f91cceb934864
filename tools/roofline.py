"""`python -m tools roofline`: each kernel's arithmetic intensity and rate against what the same machine reaches.

Writes the table of lab/roofline.md and its picture, the ladder of lab/optimisation.md and the figures of
lab/article.md; `--t4` writes the T4's model (lab/t4.md) and its picture. From committed JSON only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import article, changes, ladder, t4_model
from .measured import Point, ceilings, points
from .peers import FAMILIES
from .places import PICTURES, PROFILES, RESULTS, find_root
from .profile_report import counters, read_csv
from .sm_model import MACHINES, PARTS

__all__ = ["add_arguments", "measured_kernels", "render", "render_t4", "replace_section", "run"]


@dataclass(frozen=True)
class Limits:
    """Work a second that the units of one GPU can do."""

    tensor: float  # fp16 FLOP
    fp32: float
    special: float  # exponentials
    copy: float  # bytes
    read: float


def limits_of(folder: Path) -> Limits:
    """matmul, copy and read as measured; fp32 and special functions from the lanes and the clock (not measured)."""
    top, gpu = ceilings(folder), MACHINES["h200"]
    lanes = gpu.sms * gpu.clock_ghz * 1e9
    return Limits(top["matmul"], 2 * 128 * lanes, 16 * lanes, top["copy"], top["read"])


@dataclass(frozen=True)
class Placed:
    point: Point
    ceiling: float  # FLOP/s that the intensity allows; 0 for kernels without FLOP
    share: float  # of the time that the tightest limit alone would take
    bound: str


def tensor_factor(kernel: str) -> float:
    """Tensor-core work a FLOP, in fp16's: fp32 attention is three products in fp16, fp32 linear three in TF32 at half
    the rate. 0: on the fp32 lanes."""
    if "/generic" in kernel:
        return 0.0
    if "/f32" in kernel:
        return 6.0 if kernel.startswith("linear") else 3.0
    return 1.0


def tensor_peak(kernel: str, limits: Limits) -> float:
    """FLOP/s in fp16. The matrix instruction of 7.5 reaches less here: 1024 FMA in the cycles that the model has."""
    gpu = MACHINES["h200"]
    turing = gpu.sms * PARTS * 2048 / gpu.tensor * gpu.clock_ghz * 1e9
    return min(limits.tensor, turing) if "/sm75/" in kernel else limits.tensor


def place(point: Point, limits: Limits) -> Placed:
    bandwidth = limits.read if point.read_only else limits.copy
    factor = tensor_factor(point.kernel)
    peak = tensor_peak(point.kernel, limits) / factor if factor else limits.fp32
    times = {
        "memory": point.bytes / bandwidth,
        "tensor" if factor else "fp32": point.flop / peak,
        "special function unit": point.exponentials / limits.special,
    }
    bound = max(times, key=lambda name: times[name])
    share = times[bound] / point.seconds
    if share < 0.3:  # no unit explains a third of the time: what is left is waiting
        bound = f"latency ({bound})"
    return Placed(point, min(peak, point.intensity * bandwidth), share, bound)


def by_kernel(found: Iterable[Point], limits: Limits) -> dict[str, list[Placed]]:
    kernels: dict[str, list[Placed]] = {}
    for point in found:
        kernels.setdefault(point.kernel, []).append(place(point, limits))
    return {kernel: sorted(kernels[kernel], key=lambda p: p.share) for kernel in sorted(kernels)}


def _rate(p: Placed) -> str:
    if not p.point.flop:
        return f"{p.point.bytes / p.point.seconds * 1e-12:.2f} TB/s"
    if p.bound.endswith("memory") or p.bound.endswith("memory)"):
        return f"{p.point.tflops:.3g} TFLOP/s, {p.point.bytes / p.point.seconds * 1e-12:.2f} TB/s"
    return f"{p.point.tflops:.3g} TFLOP/s"


def measured_kernels(root: Path) -> list[tuple[str, str]]:
    """(kernel, commit) of the points of the table."""
    return [(point.kernel, point.commit) for point in points(root / RESULTS / "h200")]


def render(root: Path) -> str:
    """The table of lab/roofline.md."""
    folder = root / RESULTS / "h200"
    limits = limits_of(folder)
    counted = counters(root / PROFILES)
    newer = changes.read(root)
    lines = [
        f"Ceilings: matmul {limits.tensor * 1e-12:.0f} TFLOP/s (fp16), copy {limits.copy * 1e-12:.2f} TB/s, read "
        f"{limits.read * 1e-12:.2f} TB/s, all by torch on the same GPU; fp32 {limits.fp32 * 1e-12:.0f} TFLOP/s and "
        f"{limits.special * 1e-12:.1f} T exponentials a second from the number of lanes at 1980 MHz.",
        "",
        changes.NOTE,
        "",
        "| kernel | best case | FLOP / byte by formula | by counters | achieved | of its limit | bound | all cases |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kernel, placed in by_kernel(points(folder), limits).items():
        best, worst = placed[-1], placed[0]
        ai = f"{best.point.intensity:.3g}" if best.point.flop else "0"
        mark = f" {changes.MARK}" if newer.is_older([kernel], {p.point.commit for p in placed}) else ""
        lines.append(
            f"| `{kernel}`{mark} | {best.point.case} | {ai} | {counted.get(kernel, '-')} | {_rate(best)} | "
            f"{best.share:.0%} | {best.bound} | {len(placed)}: {worst.share:.0%} to {best.share:.0%} |"
        )
    return "\n".join(lines)


def replace_section(text: str, name: str, body: str) -> str:
    """`text` with what stands between the marks <!-- name:begin --> and <!-- name:end --> replaced."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"roofline: the page needs one {begin} and one {end}")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{body}\n{end}{rest.split(end)[1]}"


def _model(root: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((root / RESULTS / "model" / "sm75.json").read_text(encoding="utf-8"))
    return loaded


def measured_sm75(root: Path) -> dict[str, tuple[float, float]]:
    """TFLOP/s on the H200 of each sm75 kernel in its longest unmasked case, and the clock in GHz: the
    run's, where it was taken down."""
    data = json.loads((root / RESULTS / "h200" / "attention_sm75.json").read_text(encoding="utf-8"))
    rows = [row for row in data["rows"] if not row.get("causal")]
    found: dict[str, tuple[float, float]] = {}
    for row in sorted(rows, key=lambda row: row.get("seq", 0)):  # the longest last
        found[row["kernel"]] = row["tflops"], row.get("mhz", 1e3 * MACHINES["h200"].clock_ghz) * 1e-3
    return found


def counted_sm75(root: Path) -> dict[str, float]:
    """Cycles of the H200 for each sm75 kernel's call in its profile, where one is committed."""
    found: dict[str, float] = {}
    for kernel in t4_model.by_kernel(_model(root)):
        file = root / PROFILES / kernel / "metrics.csv"
        if file.is_file():
            own = [x for x in read_csv(file) if re.search(r"attention_(fwd|bwd)_kernel|gemm_kernel", x.kernel)]
            if own and all("sm_cycles" in x for x in own):
                found[kernel] = sum(x["sm_cycles"] for x in own)
    return found


def render_t4(root: Path) -> dict[str, str]:
    """The tables of lab/t4.md, by name."""
    model = _model(root)
    tables = t4_model.report(model, measured_sm75(root), counted_sm75(root))
    tables["source"] = f"Machine code of commit {model['commit']}, nvcc {model['nvcc']}."
    return tables


def pages(root: Path, t4: bool) -> dict[Path, str]:
    """New texts of the pages."""
    if t4:
        page = root / "lab" / "t4.md"
        text = page.read_text(encoding="utf-8")
        for name, body in render_t4(root).items():
            text = replace_section(text, name, body)
        return {page: text}
    page = root / "lab" / "roofline.md"
    found = {page: replace_section(page.read_text(encoding="utf-8"), "roofline", render(root))}
    page = root / "lab" / "optimisation.md"
    text = page.read_text(encoding="utf-8")
    for name, body in ladder.render(root).items():
        text = replace_section(text, name, body)
    found[page] = text
    page = root / "lab" / "article.md"
    found[page] = article.fill(page.read_text(encoding="utf-8"), article.facts(root, measured_sm75(root)))
    return found


def _axes(title: str) -> Any:
    try:
        import matplotlib

        matplotlib.use("svg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("roofline: the picture needs matplotlib: pip install 'flashkernel[bench]'") from error
    matplotlib.rcParams |= {"svg.hashsalt": "flashkernel", "font.size": 8}
    figure, axes = plt.subplots(figsize=(10, 6), layout="constrained")
    axes.set(xscale="log", yscale="log", xlabel="FLOP / byte", ylabel="TFLOP/s", title=title)
    axes.grid(True, which="both", alpha=0.2)
    return figure, axes


def _roof(axes: Any, peak: float, bandwidth: float, label: str, style: str = "-") -> None:
    """Lines of `bandwidth` (TB/s) up to `peak` (TFLOP/s)."""
    corner = peak / bandwidth
    axes.plot([0.1, corner, 2e5], [0.1 * bandwidth, peak, peak], "k" + style, linewidth=1)
    axes.annotate(label, (2e5, peak), ha="right", va="bottom")


def _save(figure: Any, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    file.write_text("\n".join(line.rstrip() for line in file.read_text(encoding="utf-8").splitlines()) + "\n")


def canvas(root: Path) -> Any:
    folder = root / RESULTS / "h200"
    limits = limits_of(folder)
    figure, axes = _axes("H200: each kernel's cases; large marks are the best ones")
    _roof(axes, limits.tensor * 1e-12, limits.read * 1e-12, "torch matmul, fp16")
    _roof(axes, limits.fp32 * 1e-12, limits.copy * 1e-12, "fp32 lanes (nominal)", "--")
    families: dict[str, list[list[Placed]]] = {}
    for kernel, placed in by_kernel(points(folder), limits).items():
        op, _, arch = kernel.split("/")[:3]
        drawn = [p for p in placed if p.point.flop]
        if drawn:
            families.setdefault(op if arch == "generic" else f"{op} {arch}", []).append(drawn)
    colours = FAMILIES
    for i, (family, kernels) in enumerate(families.items()):
        marker = "osD^v*"[i // 10]
        for j, placed in enumerate(kernels):
            style = {"color": colours[i % 10], "marker": marker}
            x, y = [p.point.intensity for p in placed], [p.point.tflops for p in placed]
            axes.scatter(x, y, s=6, alpha=0.4, **style)
            axes.scatter(x[-1:], y[-1:], s=40, label=family if j == 0 else None, **style)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def draw(root: Path, file: Path) -> None:
    _save(canvas(root), file)


def canvas_t4(root: Path) -> Any:
    gpu = MACHINES["t4"]
    figure, axes = _axes("T4: the model, NOT measured (fp16, seq 4096; bars: 650 to 1590 MHz; head dims side by side)")
    for clock in (t4_model.CLOCKS[0], t4_model.CLOCKS[-1]):
        peak = gpu.sms * 1024 * clock * 1e-6
        _roof(axes, peak, 0.32, f"tensor cores at {clock} MHz", "-" if clock == t4_model.CLOCKS[0] else "--")
    axes.plot([0.1, 65.1 / (gpu.dram_gb * 1e-3)], [0.1 * gpu.dram_gb * 1e-3, 65.1], "k:", linewidth=1)
    beside: dict[str, int] = {}
    for i, (kernel, parts) in enumerate(t4_model.by_kernel(_model(root)).items()):
        rates = [t4_model.expected(parts, "t4", clock * 1e-3) for clock in (650, 1590)]
        op = kernel.split("/")[0]
        flop, size = t4_model.work_of(kernel)
        # head dims share an intensity: side by side, so that each can be seen
        x = flop / size * 1.12 ** beside.setdefault(op, 0)
        beside[op] += 1
        style = {"color": FAMILIES[i % 10], "marker": "os"[i // 10]}
        axes.plot([x, x], rates, color=style["color"], linewidth=2, alpha=0.6)
        axes.scatter([x], rates[-1:], s=30, label=kernel.replace("/cuda/sm75/f16", ""), **style)
    axes.set(xlim=(10, 2e5), ylim=(1, 100))
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def draw_t4(root: Path, file: Path) -> None:
    _save(canvas_t4(root), file)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--t4", action="store_true", help="the model of a T4 instead: lab/t4.md and its picture")
    parser.add_argument(
        "--root", type=Path, metavar="DIR", help="the checkout (default: the one around the current folder)"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page's tables differ")
    parser.add_argument("--no-picture", action="store_true", help="only the tables (needs no matplotlib)")


def run(args: argparse.Namespace) -> int:
    root = find_root(args.root)
    different = False
    for page, text in pages(root, args.t4).items():
        if page.read_text(encoding="utf-8") == text:
            continue
        different = True
        if not args.check:
            page.write_text(text, encoding="utf-8")
        print(f"{page.relative_to(root)} {'differs from the JSON' if args.check else 'written'}", file=sys.stderr)
    if args.check:
        return 1 if different else 0
    if not args.no_picture:
        file = root / PICTURES / ("roofline_t4.svg" if args.t4 else "roofline_h200.svg")
        (draw_t4 if args.t4 else draw)(root, file)
        print(f"{file.relative_to(root)} written", file=sys.stderr)
        if not args.t4:
            file = file.with_name("ladder_h200.svg")
            article.draw(root, file, _save)
            print(f"{file.relative_to(root)} written", file=sys.stderr)
    print(render(root) if not args.t4 else "\n\n".join(render_t4(root).values()))
    return 0
