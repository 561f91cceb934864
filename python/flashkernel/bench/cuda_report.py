"""`flashkernel bench --device cuda`: runs the GPU cases, checks each against its first baseline before it is timed,
prints a table and writes JSON with the GPU, its clocks and the driver.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["GROUP_NAMES", "gpu_info", "run", "table"]

GROUP_NAMES = (
    "ceilings",
    "attention",
    "attention_gqa",
    "attention_f32",
    "attention_backward",
    "decode",
    "linear",
    "memory_bound",
    "norm_backward",
    "cross_entropy",
)


def gpu_info() -> dict[str, Any]:
    """Name, driver and clocks as nvidia-smi tells them, and the CUDA version that torch was built for."""
    import torch

    info: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch_cuda": torch.version.cuda}
    fields = ("driver_version", "clocks.sm", "clocks.mem", "power.limit", "temperature.gpu")
    try:
        line = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()[torch.cuda.current_device()]
        info.update(zip(fields, (value.strip() for value in line.split(",")), strict=True))
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        pass
    return info


def _measure(case: Any, args: argparse.Namespace) -> dict[str, Any]:
    import flashkernel as fk

    from .cuda_timing import measure, peak_bytes
    from .report import relative_error

    names = list(case.providers)
    before = {kernel.id: kernel.calls for kernel in fk.kernels()}
    first = case.providers[names[0]](0)
    kernels = [kernel.id for kernel in fk.kernels() if kernel.calls > before[kernel.id]]
    peers = [name for name in names if not name.startswith("flashkernel")]
    failed: dict[str, str] = {}
    error: float | None = None
    providers = dict(case.providers)
    for name in peers:
        try:
            result = case.providers[name](0)
        except RuntimeError as reason:  # a backend that refuses this shape or dtype
            failed[name] = str(reason).splitlines()[0]
            del providers[name]
            continue
        if error is None and case.tolerance:
            error = relative_error(first, result)
        del result
    del first
    timings = measure(
        providers,
        warmup=5 if args.quick else args.warmup,
        calls=20 if args.quick else args.calls,
        budget=0.5 if args.quick else args.budget,
        graph=case.graph,
        sets=case.sets,
    )
    row: dict[str, Any] = {
        "group": case.group,
        "case": case.name,
        "dtype": case.dtype,
        "kernels": kernels,
        "flop": case.flop,
        "bytes": case.bytes,
        "relative_error": error,
        "agrees": error is None or error <= case.tolerance,
        "providers": {
            name: {
                **dataclasses.asdict(timing.seconds),
                "inner": timing.inner,
                "graph": timing.graph,
                "tflops": case.flop / timing.seconds.p50 * 1e-12 if case.flop else None,
                "tbytes_per_second": case.bytes / timing.seconds.p50 * 1e-12 if case.bytes else None,
                "peak_bytes": peak_bytes(providers[name]) if case.memory else None,
            }
            for name, timing in timings.items()
        },
        "refused": failed,
    }
    if names[0] in timings:
        ours = timings[names[0]].seconds.p50
        others = [timings[name].seconds.p50 for name in peers if name in timings]
        row["ratio_to_best"] = min(others) / ours if others and names[0] == "flashkernel" else None
    return row


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.4g}"


def _rate(row: dict[str, Any], result: dict[str, Any]) -> str:
    """Work per second by what the row is bound by: products where there are any, unless the bytes are the point."""
    if row["group"] == "decode" or not row["flop"]:
        return f"{result['tbytes_per_second']:.3g} TB/s" if result["tbytes_per_second"] else "-"
    return f"{result['tflops']:.3g}"


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown. Times in microseconds; rates in TFLOP/s unless they say TB/s; the last column is above 1 where we are
    ahead of the best of the others.
    """
    head = [
        "op",
        "case",
        "dtype",
        "p50",
        "mean",
        "std",
        "min",
        "p95",
        "p99",
        "max",
        "rate",
        "others",
        "x best",
        "kernel",
    ]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        name, ours = next(iter(row["providers"].items()))
        others = ", ".join(f"{n} {_rate(row, r)}" for n, r in row["providers"].items() if n != name)
        ratio = row.get("ratio_to_best")
        note = "" if row["agrees"] else f" DIFFERS by {row['relative_error']:.1e}"
        lines.append(
            [
                row["group"],
                row["case"],
                row["dtype"],
                *(_microseconds(ours[key]) for key in ("p50", "mean", "std", "min", "p95", "p99", "max")),
                _rate(row, ours),
                others or "-",
                "-" if ratio is None else f"{ratio:.2f}",
                " ".join(row["kernels"]) + note,
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def run(args: argparse.Namespace) -> int:
    """Exit code 1 if a result differs from its baseline's."""
    import torch

    from .cuda_cases import GROUPS
    from .report import machine_info

    groups = args.group or list(GROUP_NAMES)
    unknown = [group for group in groups if group not in GROUPS]
    if unknown:
        raise ValueError(f"bench: no group {unknown[0]!r} on CUDA; one of {', '.join(GROUP_NAMES)} is needed")
    if not torch.cuda.is_available():
        raise ValueError("bench: --device cuda, but torch finds no CUDA device")
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for group in groups:
        for case in GROUPS[group](args.quick):
            if args.dtype and case.dtype not in args.dtype:
                continue
            if args.case and args.case not in case.name:
                continue
            print(f"{case.group}: {case.name} {case.dtype} ...", file=sys.stderr, flush=True)
            with torch.no_grad():
                rows.append(_measure(case, args))
    info = {**machine_info(), **gpu_info()}
    print(", ".join(f"{key} {value}" for key, value in info.items() if value is not None))
    print(table(rows))
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": info, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["agrees"] for row in rows) else 1
