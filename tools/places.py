"""Where the checkout keeps what was measured. Every tool takes its paths from here."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CHECKS", "KERNEL_CHANGES", "PICTURES", "PLOTS", "PROFILES", "RESULTS", "ROOT", "TABLES", "find_root"]

ROOT = Path(__file__).resolve().parents[1]
LAB = Path("lab")
RESULTS = LAB / "results"  # JSON, a folder a machine
PLOTS = LAB / "plots"  # drawn from RESULTS
TABLES = LAB / "tables"  # written from RESULTS, a page a suite
PROFILES = LAB / "profiles"  # Nsight Compute's counters, a folder a kernel
CHECKS = LAB / "checks"  # what the last checks on a GPU said
PICTURES = LAB / "pictures"  # of roofline and ladder
KERNEL_CHANGES = LAB / "kernel_changes.json"  # which results are older than their kernel; written by changes.py


def find_root(start: Path | None = None) -> Path:
    """The checkout: the nearest folder at or above `start` (default: the working directory) that holds lab/results."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / RESULTS).is_dir():
            return folder
    raise ValueError(f"tools: no {RESULTS.as_posix()} at or above {here}; run it in a checkout or give --root")
