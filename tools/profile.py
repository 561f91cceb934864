"""`python -m tools profile`: runs ncu over kernel ids, one call each, and keeps lab/profiles/<kernel id>/metrics.csv.

Kernels share a process (profile_target.py); a raw report is kept for those that --raw names, since each holds its
module's machine code and is hundreds of times the size of the CSV. Clock control is off: the clocks are those that a
user sees, and cycles stand beside the time.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .places import PROFILES, ROOT
from .profile_report import METRICS, STALLS, Launch, page, parse, summary, write_csv

__all__ = ["add_arguments", "command", "run", "select", "store"]

HINT = "install Nsight Compute (part of the CUDA toolkit) or name it with --ncu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", nargs="*", help="ids or patterns with *; none: every CUDA kernel of this build")
    parser.add_argument("--out", type=Path, default=PROFILES, metavar="DIR", help="folder of the results")
    parser.add_argument("--raw", action="append", metavar="PATTERN", help="keep ncu's raw report of these kernels too")
    parser.add_argument("--raw-limit", type=float, default=2.0, metavar="MB", help="largest raw report that is kept")
    parser.add_argument("--ncu", default="ncu", help="Nsight Compute's command line")
    parser.add_argument("--batch", type=int, default=40, metavar="N", help="kernels a process")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="of one process")
    parser.add_argument("--list", action="store_true", help="only print the ids that would be profiled")
    parser.add_argument(
        "--page", action="store_true", help="only write README.md in --out anew, from the CSV files there"
    )


def select(ids: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The ids that some pattern matches, in the registry's order; a pattern that matches none is an error."""
    for pattern in patterns:
        if not fnmatch.filter(ids, pattern):
            raise ValueError(f"profile: {pattern!r} matches no CUDA kernel of this build; see `flashkernel kernels`")
    return [id for id in ids if not patterns or any(fnmatch.fnmatchcase(id, p) for p in patterns)]


def command(ncu: str, kernels: Sequence[str], metrics: Sequence[str], report: Path | None = None) -> list[str]:
    """ncu's command line for one process over `kernels`; with `report` the raw report goes to that file."""
    line = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--nvtx", "--target-processes", "all"]
    if report is not None:
        line += ["--set", "basic", "--section", "WarpStateStats", "--section", "SchedulerStats", "--force-overwrite"]
        line += ["--export", str(report)]
    else:
        line += ["--csv", "--page", "raw", "--metrics", ",".join(metrics)]
    return [*line, sys.executable, "-m", "tools.profile_target", *kernels]


def _unknown(text: str, metrics: Sequence[str]) -> list[str]:
    """Metrics that ncu says it does not know."""
    lines = [
        line
        for line in text.splitlines()
        if re.search(r"==ERROR==|[Ff]ailed to find|[Uu]nknown metric|not (?:found|available)", line)
    ]
    return [
        name for name in metrics if any(re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", line) for line in lines)
    ]


def _ncu(line: list[str], timeout: float) -> tuple[int, str]:
    try:
        environment = {**os.environ, "FLASHKERNEL_NVTX": "0"}  # the target's own ranges are the ones that are read
        done = subprocess.run(line, capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT)
    except FileNotFoundError:
        raise ValueError(f"profile: no {line[0]!r} on this machine; {HINT}") from None
    except subprocess.TimeoutExpired as expired:
        text = expired.stdout or b""
        return 124, text.decode(errors="replace") if isinstance(text, bytes) else text
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        raise ValueError(
            "profile: this user may not read the GPU's performance counters (ERR_NVGPUCTRPERM); run it as root, or "
            "load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    for said in done.stderr.splitlines():
        if "/" in said and not said.startswith("=="):
            print(said, file=sys.stderr)
    return done.returncode, done.stdout + done.stderr


def usable_metrics(ncu: str, kernels: Sequence[str], timeout: float) -> list[str]:
    """The metrics that this ncu has for this GPU, found on the first of some kernels that can be profiled."""
    metrics = [*METRICS.values(), *STALLS.values()]
    waiting = list(kernels[:5])
    for _ in range(10):
        status, text = _ncu(command(ncu, waiting[:1], metrics), timeout)
        unknown = _unknown(text, metrics)
        if not unknown:
            if '"ID","' in text:
                return metrics
            waiting.pop(0)
            if not waiting:
                raise RuntimeError(f"profile: ncu wrote no table (exit code {status}): {text.strip()[-400:]}")
            continue
        print(f"profile: left out, unknown to this ncu: {', '.join(unknown)}", file=sys.stderr)
        metrics = [name for name in metrics if name not in unknown]
    raise RuntimeError("profile: ncu refuses the metrics one after the other; is it older than the GPU?")


def store(
    out: Path, kernels: Sequence[str], launches: list[Launch], about: Mapping[str, Any] | None = None
) -> dict[str, list[Launch]]:
    """Writes metrics.csv of every kernel that has launches; returns them by kernel id."""
    found: dict[str, list[Launch]] = {}
    for launch in launches:
        if launch.range_name in kernels:
            found.setdefault(launch.range_name, []).append(launch)
    if launches and not found and len(kernels) == 1:
        found[kernels[0]] = launches  # this ncu does not print ranges
    for kernel, own in found.items():
        write_csv(out / kernel / "metrics.csv", own, about)
    return found


def _require_gpu() -> None:
    import flashkernel as fk
    from flashkernel.bench import baselines

    if not fk.num_cuda_devices():
        raise ValueError("profile: no CUDA device, or a build without CUDA; `flashkernel doctor` says which")
    if not baselines.require_torch().cuda.is_available():
        raise ValueError("profile: torch finds no CUDA device; the inputs are its tensors")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 if a kernel could not be profiled."""
    if args.page:
        if not list(args.out.glob("**/metrics.csv")):
            raise ValueError(f"profile: no metrics.csv under {args.out}")
        (args.out / "README.md").write_text(page(args.out), encoding="utf-8")
        return 0
    import flashkernel as fk
    from flashkernel.bench.machine import machine_info

    ids = [kernel.id for kernel in fk.kernels() if kernel.device == "cuda" and (kernel.available or args.list)]
    if not ids and not args.list:
        _require_gpu()
    chosen = select(ids, args.kernel)
    if args.list:
        print("\n".join(chosen))
        return 0
    if not shutil.which(args.ncu):
        raise ValueError(f"profile: no {args.ncu!r} on this machine; {HINT}")
    _require_gpu()
    raw = set(select(ids, args.raw)) if args.raw else set()
    metrics = usable_metrics(args.ncu, chosen, args.timeout)
    about = machine_info("cuda")
    done: dict[str, list[Launch]] = {}
    waiting = list(chosen)
    while waiting:
        batch, waiting = waiting[: max(1, args.batch)], waiting[max(1, args.batch) :]
        _, text = _ncu(command(args.ncu, batch, metrics), args.timeout)
        found = store(args.out, batch, parse(text) if '"ID","' in text else [], about)
        done |= found
        print(f"profile: {len(done)} of {len(chosen)} kernels", file=sys.stderr, flush=True)
        lost = [kernel for kernel in batch if kernel not in found and f"\n{kernel}: " not in text]
        if lost and len(batch) > 1:  # the first of them may have taken the others with it: it alone, then they
            _, text = _ncu(command(args.ncu, lost[:1], metrics), args.timeout)
            done |= store(args.out, lost[:1], parse(text) if '"ID","' in text else [], about)
            waiting = lost[1:] + waiting
    kept = [_keep_raw(args, kernel) for kernel in chosen if kernel in raw]
    failed = [kernel for kernel in chosen if kernel not in done]
    if done:
        (args.out / "README.md").write_text(page(args.out), encoding="utf-8")
    print(summary(launch for launches in done.values() for launch in launches))
    for text in kept:
        print(text, file=sys.stderr)
    for kernel in failed:
        print(f"profile: {kernel}: no launch was profiled", file=sys.stderr)
    return 1 if failed else 0


def _keep_raw(args: argparse.Namespace, kernel: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.ncu-rep"
        _ncu(command(args.ncu, [kernel], [], report), args.timeout)
        if not report.is_file():
            return f"profile: {kernel}: ncu wrote no raw report"
        size = report.stat().st_size / 1e6
        if size > args.raw_limit:
            return (
                f"profile: {kernel}: a raw report of {size:.1f} MB, more than --raw-limit {args.raw_limit:g}: not kept"
            )
        target = args.out / kernel / "report.ncu-rep"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(report, target)
        return f"profile: {target}: {size:.1f} MB"
