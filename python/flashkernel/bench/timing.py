"""How long calls take, and how much memory one needs at its peak.

Two functions are timed in turn (A B A B ...), so that a change of clock or load meets both alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAUSE", "Timing", "alternate", "peak_extra_bytes", "summarize"]

MIN_CALLS = 3  # even if the budget is spent: no statistic from a single call

# Before each measurement of an op on several threads. The worker threads of an OpenMP runtime spin for milliseconds
# after an op before they sleep, on the cores that the next op needs: without a pause the other library ran with a part
# of its cores (one-token decode took up to 1.6 times as long). Longer pauses made no difference.
PAUSE = 0.02


@dataclass(frozen=True)
class Timing:
    """Seconds per call."""

    calls: int
    mean: float
    std: float
    min: float
    p50: float
    p95: float
    p99: float
    max: float


def _percentile(ordered: list[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks."""
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(seconds: list[float]) -> Timing:
    ordered = sorted(seconds)
    return Timing(
        len(ordered),
        statistics.fmean(ordered),
        statistics.pstdev(ordered),
        ordered[0],
        _percentile(ordered, 50),
        _percentile(ordered, 95),
        _percentile(ordered, 99),
        ordered[-1],
    )


def alternate(
    functions: list[Callable[[], object]],
    *,
    warmup: int,
    calls: int,
    budget: float,
    inner: int = 1,
    pause: float = 0.0,
) -> list[Timing]:
    """Times each function `calls` times, in turn, after `warmup` calls of each.

    budget: seconds for all of it; the warm-up takes a fifth at most, and at least MIN_CALLS calls are timed.
    inner: calls per measurement, for functions that take about as long as reading the clock.
    pause: seconds of sleep before each measurement, see PAUSE.
    """
    start = time.perf_counter()
    for _ in range(warmup):
        for function in functions:
            function()
        if time.perf_counter() - start > budget / 5:
            break
    samples: list[list[float]] = [[] for _ in functions]
    for done in range(calls):
        if done >= MIN_CALLS and time.perf_counter() - start > budget:
            break
        for function, seconds in zip(functions, samples, strict=True):
            if pause:
                time.sleep(pause)
            begin = time.perf_counter_ns()
            for _ in range(inner):
                function()
            seconds.append((time.perf_counter_ns() - begin) * 1e-9 / inner)
    return [summarize(seconds) for seconds in samples]


def _status_kib(key: str) -> int | None:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1])
    except OSError:
        pass
    return None


def peak_extra_bytes(function: Callable[[], object]) -> int | None:
    """Most resident memory of this process during one call, above what it was before. Linux only; None elsewhere.

    Measured by the kernel's high-water mark, which writing 5 to clear_refs sets back (proc(5)).
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = _status_kib("VmRSS")
    function()
    peak = _status_kib("VmHWM")
    return None if before is None or peak is None else max(0, peak - before) * 1024
