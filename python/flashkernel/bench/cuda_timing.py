"""GPU time of calls: CUDA-graph replays between events, providers in turn, so that clocks and heat meet all alike.

A provider is a function of the index of an input set. One measurement replays a graph of `inner` calls that walk
through the sets, so that small calls last long enough to be timed and memory-bound ones do not find their inputs in
the L2 cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .timing import MIN_CALLS, Timing, summarize

__all__ = ["GpuTiming", "measure", "peak_bytes"]


@dataclass(frozen=True)
class GpuTiming:
    seconds: Timing  # per call
    inner: int  # calls per measurement
    graph: bool  # False: the calls were launched one by one (autograd's backward cannot be captured from outside)


def _capture(call: Callable[[int], Any], inner: int) -> Any:
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(3):
            call(i)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(inner):
            call(i)
    return graph


def _events(count: int) -> list[Any]:
    import torch

    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]


def _once(run: Callable[[], Any]) -> float:
    import torch

    begin, end = _events(2)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def measure(
    providers: Mapping[str, Callable[[int], Any]],
    *,
    warmup: int,
    calls: int,
    budget: float,
    graph: bool = True,
    least_seconds: float = 100e-6,
    sets: int = 1,
) -> dict[str, GpuTiming]:
    """Times every provider `calls` times after `warmup` calls, within `budget` seconds for all of them.

    least_seconds: a measurement replays as many calls as last that long, in whole walks through the input sets.
    """
    import torch

    runs: dict[str, tuple[Callable[[], Any], int]] = {}
    for name, call in providers.items():
        for i in range(max(3, sets)):
            call(i)
        torch.cuda.synchronize()
        if graph:
            single = _capture(call, sets)
            seconds = min(_once(single.replay) for _ in range(3)) / sets
        else:

            def walk(call: Callable[[int], Any] = call) -> None:
                for i in range(sets):
                    call(i)

            seconds = min(_once(walk) for _ in range(3)) / sets
        inner = sets * max(1, round(least_seconds / (seconds * sets)))
        if graph:
            captured = single if inner == sets else _capture(call, inner)
            runs[name] = (captured.replay, inner)
        else:

            def several(call: Callable[[int], Any] = call, inner: int = inner) -> None:
                for i in range(inner):
                    call(i)

            runs[name] = (several, inner)
    start = time.perf_counter()
    for _ in range(warmup):
        for run, _ in runs.values():
            run()
        torch.cuda.synchronize()
        if time.perf_counter() - start > budget / 5:
            break
    samples: dict[str, list[float]] = {name: [] for name in runs}
    batch = 10  # measurements queued between two synchronisations
    done = 0
    while done < calls and (done < MIN_CALLS or time.perf_counter() - start < budget):
        marks: list[tuple[str, Any, Any, int]] = []
        for _ in range(min(batch, calls - done)):
            for name, (run, inner) in runs.items():
                begin, end = _events(2)
                begin.record()
                run()
                end.record()
                marks.append((name, begin, end, inner))
        torch.cuda.synchronize()
        for name, begin, end, inner in marks:
            samples[name].append(begin.elapsed_time(end) * 1e-3 / inner)
        done += batch
    return {name: GpuTiming(summarize(samples[name]), runs[name][1], graph) for name in runs}


def peak_bytes(call: Callable[[int], Any]) -> int:
    """Most memory of torch's allocator that one call holds beyond what was held before, its result included."""
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call(0)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return int(peak)
