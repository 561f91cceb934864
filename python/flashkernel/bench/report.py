"""`flashkernel bench`: runs the cases, prints a table and writes JSON with the machine that it ran on."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["add_arguments", "machine_info", "measure", "relative_error", "run", "table"]

GROUP_NAMES = (
    "attention",
    "attention_memory",
    "attention_backward",
    "decode",
    "call_overhead",
    "linear",
    "norm",
    "rope",
    "elementwise",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "group",
        nargs="*",
        help=f"what to measure: on the CPU {', '.join(GROUP_NAMES)} (default: all); on CUDA see bench/cuda_report.py",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to measure")
    parser.add_argument("--case", help="only cases whose name contains this (CUDA)")
    parser.add_argument("--threads", type=int, help="CPU threads of both sides")
    parser.add_argument(
        "--dtype",
        action="append",
        choices=["float32", "bfloat16", "float16"],
        help="only these dtypes; may be given several times",
    )
    parser.add_argument("--warmup", type=int, default=100, help="calls before timing")
    parser.add_argument("--calls", type=int, default=1000, help="timed calls")
    parser.add_argument("--budget", type=float, default=10.0, help="most seconds per row")
    parser.add_argument(
        "--quick", action="store_true", help="small shapes and few calls: a look at whether all of it runs"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine as JSON")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the checkout that this package is run from, "+" where it has changes; None for an installed
    package.
    """
    here = Path(__file__).resolve().parent
    try:
        git = ["git", "-C", str(here)]
        if subprocess.run(
            [*git, "ls-files", "--error-unmatch", str(Path(__file__).resolve())], capture_output=True
        ).returncode:
            return None
        commit = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        ).stdout.strip()
        return commit + ("+" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def machine_info() -> dict[str, Any]:
    import torch

    import flashkernel as fk

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "cpu_features": fk.cpu_features(),
        "threads": fk.get_num_threads(),
        "torch_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "flashkernel": fk.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "numpy": _version("numpy"),
    }


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def relative_error(ours: Any, theirs: Any) -> float:
    """Largest difference of the first results, relative to torch's largest value; inf where a NaN stands on one side
    only.
    """
    import torch

    a, b = _first(ours).double().flatten(), _first(theirs).double().flatten()
    if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    return float((a - b).nan_to_num().abs().max() / b.nan_to_num().abs().max().clamp(min=1e-30))


def measure(case: Any, args: argparse.Namespace) -> dict[str, Any]:
    """One row: both sides' times, throughput, the ratio, the error, and which kernels ran."""
    import flashkernel as fk

    from .memory import measure_apart
    from .timing import PAUSE, alternate

    before = {kernel.id: kernel.calls for kernel in fk.kernels()}
    error = relative_error(case.ours(), case.torch())
    kernels = [kernel.id for kernel in fk.kernels() if kernel.calls > before[kernel.id]]
    quick = args.quick
    warmup, calls, budget = (2, 5, 0.5) if quick else (args.warmup, args.calls, args.budget)
    if case.memory:
        warmup, calls = min(warmup, 1), min(calls, 3)
    pause = PAUSE if fk.get_num_threads() > 1 and case.inner == 1 and not quick else 0.0
    functions = [case.ours, case.torch, *case.reads]
    ours, theirs, *reads = alternate(
        functions, warmup=warmup, calls=calls, budget=budget, inner=case.inner, pause=pause
    )
    row: dict[str, Any] = {
        "group": case.group,
        "case": case.name,
        "dtype": case.dtype,
        "kernels": kernels,
        "ours": dataclasses.asdict(ours),
        "torch": dataclasses.asdict(theirs),
        "ratio_to_torch": theirs.p50 / ours.p50,
        "relative_error": error,
        "agrees": error <= case.tolerance,
        "peak_extra_bytes": measure_apart("ours", case.memory, fk.get_num_threads()) if case.memory else None,
        "torch_peak_extra_bytes": measure_apart("torch", case.memory, fk.get_num_threads()) if case.memory else None,
        "workspace_peak_bytes": fk.memory_stats("cpu").peak_allocated_bytes if case.memory else None,
    }
    for name, work in (("gflops", case.flop), ("gbytes_per_second", case.bytes)):
        row[name] = work / ours.p50 * 1e-9 if work else None
        row["torch_" + name] = work / theirs.p50 * 1e-9 if work else None
    if reads:
        row["reads"] = [dataclasses.asdict(read) for read in reads]
        limit = min(read.p50 for read in reads)
        row["read_gbytes_per_second"] = case.bytes / limit * 1e-9
        row["share_of_read"], row["torch_share_of_read"] = limit / ours.p50, limit / theirs.p50
    return row


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e9:.0f} ns"


def _work(row: dict[str, Any]) -> str:
    if row["gflops"] and not (row["group"] == "decode"):
        return f"{row['gflops']:.1f} GFLOP/s"
    share = f" ({row['share_of_read']:.0%} of a plain sum)" if "reads" in row else ""
    return f"{row['gbytes_per_second']:.1f} GB/s{share}" if row["gbytes_per_second"] else "-"


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown, so that it can go into a README as it is. Times are of one call; "x torch" above 1 means faster than
    torch.
    """
    head = [
        "op",
        "case",
        "dtype",
        "mean",
        "std",
        "min",
        "p50",
        "p95",
        "p99",
        "max",
        "calls",
        "rate",
        "torch p50",
        "x torch",
        "extra memory",
        "kernel",
    ]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        t = row["ours"]
        extra = row["peak_extra_bytes"]
        lines.append(
            [
                row["group"],
                row["case"],
                row["dtype"],
                *(_seconds(t[key]) for key in ("mean", "std", "min", "p50", "p95", "p99", "max")),
                str(t["calls"]),
                _work(row),
                _seconds(row["torch"]["p50"]),
                f"{row['ratio_to_torch']:.2f}",
                "-"
                if extra is None
                else f"{extra / 2**20:.1f} MiB (torch {row['torch_peak_extra_bytes'] / 2**20:.1f})",
                " ".join(row["kernels"])
                + ("" if row["agrees"] else f" DIFFERS FROM TORCH by {row['relative_error']:.1e}"),
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def run(args: argparse.Namespace) -> int:
    """Exit code 1 if a result differs from torch's."""
    from . import baselines

    if args.device == "cuda":
        from .cuda_report import run as run_cuda

        baselines.require_torch()
        return run_cuda(args)
    groups = args.group or list(GROUP_NAMES)
    unknown = [group for group in groups if group not in GROUP_NAMES]
    if unknown:
        raise ValueError(f"bench: no group {unknown[0]!r}; one of {', '.join(GROUP_NAMES)} is needed")
    for name in ("warmup", "calls", "threads"):
        value = getattr(args, name)
        if value is not None and value < (0 if name == "warmup" else 1):
            raise ValueError(f"bench: --{name} {value}; an integer >= {0 if name == 'warmup' else 1} is needed")
    torch = baselines.require_torch()

    import flashkernel as fk

    from .cases import GROUPS

    if args.threads:
        fk.set_num_threads(args.threads)
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for group in groups:
        for case in GROUPS[group](args.quick):
            if args.dtype and case.dtype not in args.dtype:
                continue
            print(f"{case.group}: {case.name} {case.dtype} ...", file=sys.stderr, flush=True)
            with torch.no_grad():
                rows.append(measure(case, args))
    info = machine_info()
    print(", ".join(f"{key} {value}" for key, value in info.items() if value is not None))
    print(table(rows))
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": info, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["agrees"] for row in rows) else 1
