"""How long calls take: rounds of one measurement of each provider of a row, each round in an order of its own (A B C,
B C A, ...), so that a change of clock or load meets them all, and none always follows the same other one: what comes
after work that leaves the chip cool starts at a higher clock.

The rule and the loop are the same on every device; what a device does differently (how it marks time, how it launches
many calls) stands behind `Device`: CpuDevice here, CudaDevice in cuda_device.py, a fake one in the tests.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Protocol

from .case import Provider

__all__ = ["PAUSE", "CpuDevice", "Device", "Measured", "Program", "Rule", "Timing", "measure", "summarize"]

# Before each measurement of a CPU op on several threads. The worker threads of an OpenMP runtime spin for milliseconds
# after an op before they sleep, on the cores that the next op needs: without a pause the other library ran with a part
# of its cores (one-token decode took up to 1.6 times as long). Longer pauses made no difference.
PAUSE = 0.02


@dataclass(frozen=True)
class Timing:
    """Seconds per call, over `calls` measurements."""

    calls: int
    mean: float
    std: float
    min: float
    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True)
class Rule:
    """When a provider has been measured enough: after `calls` measurements; or when they have taken `seconds`, but not
    before `least_calls`; or, for very long ones, when they have taken LONG times `seconds`, but not before 3.
    """

    warmup: int = 100
    calls: int = 1000
    seconds: float = 2.0
    least_calls: int = 30

    LONG = 5
    FEWEST = 3  # no statistic from one call

    def enough(self, calls: int, seconds: float) -> bool:
        if calls >= self.calls:
            return True
        if calls < min(self.FEWEST, self.calls):
            return False
        return seconds >= self.seconds * (1 if calls >= self.least_calls else self.LONG)


@dataclass(frozen=True)
class Program:
    """Calls that are launched and timed together."""

    run: Callable[[], None]
    inner: int  # calls in it
    graph: bool = False


class Device(Protocol):
    queue: int  # measurements queued between two synchronisations
    pause: float  # seconds of sleep before each measurement

    @property
    def spacer(self) -> Callable[[], Any] | None:
        """A small kernel that has nothing to do with what is measured; None where there is no queue of kernels."""

    def program(self, calls: Sequence[Callable[[], Any]], inner: int, graph: bool) -> Program:
        """Calls enough for one measurement, in whole walks through `calls` where the device captures them. inner: how
        many; 0: the device decides."""

    def mark(self) -> Any:
        """A point on the device's time line, between the calls launched before and after."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks, after `synchronize`."""

    def synchronize(self) -> None: ...

    def sleep(self, seconds: float) -> None: ...


class CpuDevice:
    def __init__(self, pause: float = 0.0) -> None:
        self.queue = 1
        self.pause = pause
        self.spacer: Callable[[], Any] | None = None

    def program(self, calls: Sequence[Callable[[], Any]], inner: int, graph: bool) -> Program:
        inner = inner or 1
        if len(calls) == 1:
            call = calls[0]

            def run() -> None:
                for _ in range(inner):
                    call()

        else:
            walk = cycle(calls)

            def run() -> None:
                for _ in range(inner):
                    next(walk)()

        return Program(run, inner)

    def mark(self) -> int:
        return time.perf_counter_ns()

    def seconds(self, begin: int, end: int) -> float:
        return (end - begin) * 1e-9

    def synchronize(self) -> None:
        pass

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(frozen=True)
class Measured:
    timing: Timing
    inner: int
    graph: bool


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


class _Running:
    """A provider with its program, its samples and the time they took."""

    def __init__(self, provider: Provider, program: Program) -> None:
        self.provider = provider
        self.program = program
        self.samples: list[float] = []
        self.spent = 0.0


def measure(
    device: Device,
    providers: Sequence[Provider],
    rule: Rule,
    *,
    inner: int = 0,
    graph: bool = True,
    force: Callable[[str], None] = lambda patterns: None,
) -> tuple[dict[str, Measured], dict[str, str]]:
    """Times the providers in rounds, each until `rule` says that it is enough. Returns what was measured, and why
    calls could not be made into a program (a capture that a library does not allow).

    force: puts a provider's `forced` kernels in force before it runs, outside the time that is taken.
    """

    def start(running: _Running) -> tuple[Any, Any]:
        force(running.provider.forced)
        if device.pause:
            device.sleep(device.pause)
        begin = device.mark()
        running.program.run()
        return begin, device.mark()

    runnings = []
    failed: dict[str, str] = {}
    for provider in providers:
        force(provider.forced)
        try:
            runnings.append(_Running(provider, device.program(provider.calls, inner, graph)))
        except RuntimeError as error:
            failed[provider.name] = str(error).strip().splitlines()[0][:160]
    for running in runnings:  # to warm clocks and caches, a fifth of the time at most
        spent = 0.0
        for done in range(rule.warmup):
            if done and spent > rule.seconds / 5:
                break
            begin, end = start(running)
            device.synchronize()
            spent += device.seconds(begin, end) + device.pause
    active = runnings
    longest = 0.0
    order = random.Random(0)  # the same orders in every run
    while active:
        left = rule.calls - min(len(running.samples) for running in active)
        # Long programs are asked one by one whether it is enough.
        queue = 1 if longest > 0.01 or not active[0].samples else min(device.queue, left)
        rounds = (order.sample(active, len(active)) for _ in range(queue))
        marks = [(running, start(running)) for turn in rounds for running in turn]
        device.synchronize()
        for running, (begin, end) in marks:
            seconds = device.seconds(begin, end)
            running.samples.append(seconds / running.program.inner)
            running.spent += seconds + device.pause
            longest = max(longest, seconds)
        active = [running for running in active if not rule.enough(len(running.samples), running.spent)]
    measured = {
        running.provider.name: Measured(summarize(running.samples), running.program.inner, running.program.graph)
        for running in runnings
    }
    return measured, failed
