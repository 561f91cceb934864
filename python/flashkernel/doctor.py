"""`flashkernel doctor` and `flashkernel kernels`: what this build and machine are, and whether each kernel computes
right.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import flashkernel as fk

__all__ = ["describe", "kernel_rows", "kernel_table", "run"]

FRAMEWORKS = ("numpy", "torch", "jax", "cupy", "triton", "transformers", "tokenizers", "safetensors", "ml_dtypes")


def kernel_rows() -> list[dict[str, Any]]:
    return [
        {
            "id": k.id,
            "op": k.op,
            "device": k.device,
            "cc_min": k.cc_min,
            "cc_max": k.cc_max,
            "cpu_features": k.cpu_features,
            "arithmetic": k.arithmetic,
            "available": k.available,
            "calls": k.calls,
        }
        for k in fk.kernels()
    ]


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def kernel_table(rows: list[dict[str, Any]]) -> str:
    lines = [["kernel", "device", "needs", "arithmetic", "runs here", "calls"]]
    for row in rows:
        needs = row["cpu_features"] if row["device"] == "cpu" else f"sm_{row['cc_min']}..{row['cc_max']}"
        lines.append(
            [
                row["id"],
                row["device"],
                needs or "-",
                row["arithmetic"],
                "yes" if row["available"] else "no",
                str(row["calls"]),
            ]
        )
    return _aligned(lines)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in FRAMEWORKS:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _cuda(build: dict[str, Any]) -> str:
    """How many CUDA devices can be used, or why none."""
    count = fk.num_cuda_devices()
    if count:
        return f"{count} device{'s' if count > 1 else ''}"
    if not build["cuda"]:
        return f"none: this build has no CUDA backend ({build['cuda_reason']})"
    if not any(Path("/dev").glob("nvidia[0-9]*")) and platform.system() == "Linux":
        return "none: the build has a CUDA backend, but this machine shows no NVIDIA GPU (/dev/nvidia*)"
    return (
        "none: the build has a CUDA backend, but finds no usable device (is the driver recent enough? try nvidia-smi)"
    )


def describe() -> dict[str, Any]:
    build = fk.build_info()
    return {
        "version": fk.__version__,
        "package": str(Path(fk.__file__).resolve().parent),
        "build": build,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "threads": fk.get_num_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "forced_kernels": fk.forced_kernels(),
        "cpu_features": list(fk.cpu_features()),
        "cuda": _cuda(build),
        "frameworks": _versions(),
        "kernels": kernel_rows(),
    }


def run(args: argparse.Namespace) -> int:
    """Exit code 1 if a kernel's self-check fails."""
    facts = describe()
    as_json = args.json
    if not as_json:
        options = facts["build"]
        build = f"{options['compiler']}, {options['build_type']}, CUDA backend {'ON' if options['cuda'] else 'OFF'}"
        frameworks = ", ".join(f"{name} {version}" for name, version in facts["frameworks"].items() if version)
        missing = ", ".join(name for name, version in facts["frameworks"].items() if not version)
        print(
            _aligned(
                [
                    ["flashkernel", facts["version"]],
                    ["package", facts["package"]],
                    ["build", build],
                    ["python", facts["python"]],
                    ["system", facts["system"]],
                    ["CPU features", " ".join(facts["cpu_features"]) or "none beyond the baseline"],
                    ["CPU threads", f"{facts['threads']} (OMP_NUM_THREADS {facts['omp_num_threads'] or 'not set'})"],
                    ["CUDA", facts["cuda"]],
                    ["frameworks", frameworks + (f"; not installed: {missing}" if missing else "")],
                    ["forced", facts["forced_kernels"] or "nothing"],
                ]
            )
        )
        print("\n" + kernel_table(facts["kernels"]) + "\n")
    failed = 0
    if not args.no_check:
        from .selfcheck import check_kernels

        results = []
        width = max(len(row["id"]) for row in facts["kernels"])
        for result in check_kernels():
            results.append(result)
            failed += not result.passed
            if not as_json:
                print(f"{'PASS' if result.passed else 'FAIL'}  {result.kernel:<{width}}  {result.detail}", flush=True)
        facts["checks"] = [dataclasses.asdict(result) for result in results]
        if not as_json:
            unavailable = sum(not row["available"] for row in facts["kernels"])
            note = f"; {unavailable} of this build's kernels can't run on this machine" if unavailable else ""
            print(f"\n{len(results) - failed} of {len(results)} kernels right{note}")
    if as_json:
        print(json.dumps(facts, indent=2))
    return 1 if failed else 0
