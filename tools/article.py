"""The figures of lab/article.md: each stands between <!--=name--> and <!--=--> and is written from committed JSON (and
the report of the last GPU checks) by `python -m tools roofline`. Called by roofline.py. A name that nothing gives is an
error.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import ladder, peers, plots, t4_model, whole_models
from .measured import ceilings, points
from .places import CHECKS, RESULTS
from .sm_model import MACHINES

__all__ = ["MARK", "facts", "fill"]

MARK = re.compile(r"<!--=([\w.]+)-->(.*?)<!--=-->")


def _read(root: Path, *parts: str) -> Any:
    return json.loads(root.joinpath(*parts).read_text(encoding="utf-8"))


def _ratios(name: str, ratios: Iterable[float]) -> dict[str, str]:
    """Geometric mean, least, most and number of ratios."""
    found = list(ratios)
    mean = math.exp(sum(map(math.log, found)) / len(found))
    return {
        f"{name}.mean": f"{mean:.2f}", f"{name}.least": f"{min(found):.2f}", f"{name}.most": f"{max(found):.2f}",
        f"{name}.cases": str(len(found)),
    }  # fmt: skip


def _ladder(root: Path) -> dict[str, str]:
    """Rates at seq 4096 without mask, and what each step gave over all cases that have both rungs."""
    made: dict[str, str] = {}
    found = points(root / RESULTS / "h200")
    for op, rungs in ladder.RUNGS.items():
        cases = ladder.attention(found, op)
        for i, (arch, _) in enumerate(rungs):
            name = f"{op[-3:]}.{arch.split('/')[-1]}"
            for dim in (64, 128):
                point = cases.get((dim, 4096, False), {}).get(i)
                made[f"{name}.d{dim}"] = f"{point.tflops:.0f} TFLOP/s" if point else ladder.NOT_MEASURED
            steps = [case[i].tflops / case[i - 1].tflops for case in cases.values() if i in case and i - 1 in case]
            made |= _ratios(f"{name}.step", steps) if steps else {f"{name}.step.mean": ladder.NOT_MEASURED}
    return made


def _attention(root: Path) -> dict[str, str]:
    made: dict[str, str] = {}
    for way, run in (("forward", "attention.json"), ("backward", "attention_backward.json")):
        rows = _read(root, *RESULTS.parts, "h200", run)["rows"]
        points = [
            {name: provider["tflops"] for name, provider in row["providers"].items()}
            for row in rows
            if row["group"] == f"attention_{way}"
        ]
        made |= _ratios(f"cudnn.{way}", (p["flashkernel"] / p["sdpa_cudnn"] for p in points))
        made[f"cudnn.{way}.behind"] = str(sum(p["flashkernel"] < p["sdpa_cudnn"] for p in points))
        made[f"{way}.best"] = f"{max(p['flashkernel'] for p in points):.0f} TFLOP/s"
        if way == "backward":
            made |= _ratios("cudnn.any_order", (p["any_order"] / p["sdpa_cudnn"] for p in points))
    rows = _read(root, *RESULTS.parts, "h200", "attention_fwd.json")["rows"]
    causal = [r["flashkernel"] / r["first_version"] for r in rows if r["causal"] and r["head_dim"] == 128]
    made |= _ratios("schedule", causal)
    rows = _read(root, *RESULTS.parts, "h200", "attention_sm80.json")["rows"]
    for name in ("forward", "backward"):
        both = [r["tflops"] for r in rows if r["pass"] == name]
        made |= _ratios(f"fa2.{name}", (r["flashkernel"] / r["fa2"] for r in both))
    rows = _read(root, *RESULTS.parts, "h200", "attention_f32.json")["rows"]
    for name in ("forward", "backward"):
        pairs = [(r[name], r[f"torch_efficient_{name}"]) for r in rows if r.get(name) and r[f"torch_efficient_{name}"]]
        made |= _ratios(f"f32.{name}", (ours / theirs for ours, theirs in pairs))
    made["f32.best"] = f"{max(r['forward'] for r in rows):.0f} TFLOP/s"
    rows = [r for r in _read(root, *RESULTS.parts, "h200", "attention_sm75.json")["rows"] if r.get("sdpa_efficient")]
    for name in ("forward", "backward"):
        made |= _ratios(f"sm75.{name}", (r["tflops"] / r["sdpa_efficient"] for r in rows if r["pass"] == name))
    data = _read(root, *RESULTS.parts, "h200", "attention_decode.json")
    rows = data["rows"]
    best = max(rows, key=lambda r: r["gb_per_s"])
    short = next(r for r in rows if (r["batch"], r["context"], r["heads_kv"], r["page_size"]) == (1, 1024, 8, 16))
    made |= {
        "decode.best": f"{best['gb_per_s'] / 1e3:.2f} TB/s",
        "decode.share": f"{best['gb_per_s'] / data['read_gb_per_s']:.0%}",
        "decode.short": f"{short['microseconds']:.1f} us",
        "decode.short_bytes": f"{short['microseconds'] * short['gb_per_s'] / data['read_gb_per_s']:.1f} us",
    }
    return made


def _others(root: Path) -> dict[str, str]:
    made: dict[str, str] = {}
    cases = _read(root, *RESULTS.parts, "h200", "linear.json")["cases"]
    large = [c["us"] for c in cases if c["case"].startswith("M")]
    made |= _ratios("linear", (us["addmm_act"] / us["ours"] for us in large))
    made |= _ratios("few", (c["us"]["addmm_act"] / c["us"]["ours"] for c in cases if c["case"].startswith("few")))
    gradient = [c["us"] for c in cases if c["case"].startswith("bwd")]
    made |= _ratios("gradient", (us["torch"] / us["ours"] for us in gradient))
    made |= _ratios("gradient.sm80", (us["sm80"] / us["ours"] for us in gradient))
    runs = [_read(root, *RESULTS.parts, "h200", f"memory_bound.{n}.json")["rows"] for n in (1, 2)]
    rows = [r for run in runs for r in run if r["dtype"] == "bfloat16"]
    times = {r["case"]: {k: p["p50"] for k, p in r["providers"].items()} for r in rows}
    made |= _ratios("memory", (t["eager"] / t["flashkernel"] for t in times.values()))
    slow = [t for t in times.values() if t["flashkernel"] > t["eager"]]
    made["memory.behind"] = str(len(slow))
    for name in ("rms_norm", "softmax"):
        row = next(r for r in rows if r["case"] == f"{name} 32768 x 4096")
        made[f"memory.{name}"] = f"{row['bytes'] / times[row['case']]['flashkernel'] * 1e-12:.2f} TB/s"
    top = ceilings(root / RESULTS / "h200")
    made |= {
        "top.matmul": f"{top['matmul'] * 1e-12:.0f} TFLOP/s",
        "top.copy": f"{top['copy'] * 1e-12:.2f} TB/s",
        "top.read": f"{top['read'] * 1e-12:.2f} TB/s",
        "gpt2.weights": f"{124.4e6 * 2 / top['read'] * 1e6:.0f} us",  # 124.4 million parameters in 16 bits
    }
    for name, step in _read(root, *RESULTS.parts, "h200", "steps.json")["steps"].items():
        unit = step["unit"]
        made[f"step.{name}.before"] = f"{step['before']:g}"
        made[f"step.{name}.after"] = f"{step['after']:g}{unit if unit.startswith('%') else f' {unit}'}"
    return made


def _t4(root: Path, measured: dict[str, tuple[float, float]]) -> dict[str, str]:
    kernels = t4_model.by_kernel(_read(root, *RESULTS.parts, "model", "sm75.json"))
    gpu = MACHINES["t4"]
    made = {
        "t4.peak": f"{gpu.sms * 1024 * t4_model.CLOCKS[0] * 1e-6:.0f} TFLOP/s",
        "t4.dram": f"{gpu.dram_gb:g} GB/s",
        "t4.sms": str(gpu.sms),
    }
    for kernel, short in (
        ("attention_fwd/cuda/sm75/f16/d64", "fwd64"), ("attention_fwd/cuda/sm75/f16/d128", "fwd128"),
        ("attention_bwd/cuda/sm75/f16/d128", "bwd128"), ("linear/cuda/sm75/f16", "linear"),
    ):  # fmt: skip
        for clock in t4_model.CLOCKS:
            rate = t4_model.expected(kernels[kernel], "t4", clock * 1e-3)
            made[f"t4.{short}.{clock}"] = f"{rate:.1f} TFLOP/s"
    errors = [
        t4_model.expected(parts, "h200", measured[kernel][1]) / measured[kernel][0] - 1
        for kernel, parts in kernels.items()
        if kernel in measured
    ]
    made |= {
        "t4.error": f"{statistics.fmean(map(abs, errors)):.0%}",
        "t4.error.least": f"{min(errors):+.0%}",
        "t4.error.most": f"{max(errors):+.0%}",
        "t4.error.kernels": str(len(errors)),
    }
    return made


def _checks(root: Path) -> dict[str, str]:
    """The last report of scripts/gpu_checks.sh, and what the emulator found."""
    text = (root / CHECKS / "gpu_checks_h200.md").read_text(encoding="utf-8")
    cells = {row[0]: row[1] for row in (re.findall(r"[^|]+", line) for line in text.splitlines()) if len(row) > 1}
    cells = {name.strip(): value.strip() for name, value in cells.items()}
    made = {f"checks.{name}": cells[name] for name in ("commit", "date")}
    for arch in ("generic", "sm75", "sm80", "sm90a"):
        passed, failed = re.findall(r"\d+", cells[f"conformance, {arch}"])
        made |= {f"checks.{arch}.passed": passed, f"checks.{arch}.failed": failed}
    found = _read(root, *CHECKS.parts, "emulator_findings.json")
    return made | {f"emulator.{name}": str(value) for name, value in found.items() if name != "what"}


def _cpu(root: Path) -> dict[str, str]:
    """README's rows: medians over the runs."""
    files = sorted((root / RESULTS / "cpu").glob("run.*.json"))
    rows: dict[tuple[str, str], list[float]] = {}
    for file in files:
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
            times = {name: p["p50"] for name, p in row["providers"].items()}
            if "sdpa" in times and row["group"] in ("attention_forward", "decode"):
                rows.setdefault((row["group"], f"{row['case']} {row['dtype']}"), []).append(
                    times["sdpa"] / times["flashkernel"]
                )
    made = {"cpu.runs": str(len(files))}
    for group, name in (("attention_forward", "cpu.attention"), ("decode", "cpu.decode")):
        made |= _ratios(name, (statistics.median(x) for (g, _), x in rows.items() if g == group))
    return made


def _end_to_end(root: Path) -> dict[str, str]:
    """Tokens a second of one sequence after its first token, of the committed runs of `flashkernel bench e2e`; of
    several runs of a row beside the same peer, the one with the least ratio.
    """
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for file in sorted((root / RESULTS / "h200").glob("*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        if run.get("schema") != whole_models.SCHEMA or run["method"]["quick"]:
            continue
        for row in run["rows"]:
            ours = row["providers"].get("flashkernel")
            if ours and row["shape"]["batch"] == 1 and ours.get("ratio_to_best_peer"):
                key = row["case"], row["best_peer"]
                pair = ours["ratio_to_best_peer"], ours["decode_tokens_per_second"]
                found[key] = min(found.get(key, pair), pair)
    rows = (f"{case} {rate:.0f} (x {ratio:.2f} of {peer})" for (case, peer), (ratio, rate) in found.items())
    return {"e2e.gpu": "; ".join(rows) or ladder.NOT_MEASURED}


def facts(root: Path, measured: dict[str, tuple[float, float]]) -> dict[str, str]:
    """Every name that the article may use. measured: of roofline.measured_sm75."""
    return {
        **_ladder(root), **_attention(root), **_others(root), **_t4(root, measured), **_checks(root), **_cpu(root),
        **_end_to_end(root),
    }  # fmt: skip


def fill(text: str, known: dict[str, str]) -> str:
    """The article with every marked figure as `known` has it."""

    def put(match: re.Match[str]) -> str:
        if match[1] not in known:
            raise ValueError(f"roofline: lab/article.md: {match[1]!r} is no figure that article.py knows")
        return f"<!--={match[1]}-->{known[match[1]]}<!--=-->"

    return MARK.sub(put, text)


def draw(root: Path, file: Path, save: Any) -> None:
    """The forward's rungs over the length, with cuDNN and FlashAttention-2 from the same runs as ours."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams |= {"svg.hashsalt": "flashkernel", "font.size": 8}
    save(canvas(root, plt), file)


def canvas(root: Path, plt: Any) -> Any:
    """The picture, drawn."""
    folder = root / RESULTS / "h200"
    cases = ladder.attention(points(folder), "attention_fwd")
    lines: dict[tuple[int, bool, str], dict[int, float]] = {}
    for (dim, seq, causal), rungs in cases.items():
        for i, point in rungs.items():
            name = ladder.RUNGS["attention_fwd"][i][1]
            lines.setdefault((dim, causal, name), {})[seq] = point.tflops
    for r in json.loads((folder / "attention_fwd.json").read_text(encoding="utf-8"))["rows"]:
        lines.setdefault((r["head_dim"], r["causal"], "cuDNN"), {})[r["seq"]] = r["sdpa_cudnn"]
    for r in json.loads((folder / "attention_sm80.json").read_text(encoding="utf-8"))["rows"]:
        if r["pass"] == "forward":
            lines.setdefault((r["D"], r["causal"], "FlashAttention-2"), {})[r["S"]] = r["tflops"]["fa2"]
    names = [*(name for _, name in ladder.RUNGS["attention_fwd"]), "cuDNN", "FlashAttention-2"]
    drawn = dict(zip(names, ("naive", "tiled", "sm75", "sm80", "flashkernel", "sdpa_cudnn", "sdpa_flash"), strict=True))
    figure, grid = plt.subplots(2, 2, figsize=(9, 6.5), sharex=True, sharey=True, layout="constrained")
    named: dict[str, Any] = {}
    for axes, (dim, causal) in zip(grid.flat, ((64, False), (128, False), (64, True), (128, True)), strict=True):
        for name in names:
            found = sorted(lines.get((dim, causal, name), {}).items())
            style = peers.style(drawn[name])
            if found:
                (named[name],) = axes.plot(
                    *zip(*found, strict=True), style.line, color=style.colour, marker=style.marker, markersize=4,
                    linewidth=style.width, label=name,
                )  # fmt: skip
        axes.set(xscale="log", ylim=(0, 850), title=f"d{dim}, {'causal' if causal else 'full'}")
        axes.grid(True, alpha=0.2)
    for axes in grid[1]:
        axes.set_xlabel("sequence length")
    for axes in grid[:, 0]:
        axes.set_ylabel("TFLOP/s, H200, fp16")
    plots.legend_below(figure, list(named.values()), list(named))
    return figure
