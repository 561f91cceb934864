"""GPU time of calls: CUDA-graph replays between events.

One measurement replays a graph of so many calls that it lasts LEAST_SECONDS (events resolve about half a microsecond)
or as long as is asked for, in whole walks through the input sets, so that memory-bound calls do not find their inputs
in the L2 cache. What cannot be captured is launched call by call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from .timing import Program

__all__ = ["CudaDevice"]

LEAST_SECONDS = 100e-6
SLOW_SECONDS = 0.5


class CudaDevice:
    """The current device of torch. `torch`: the module, or what a test puts in its place. least_seconds: of a
    measurement, half as long at worst.
    """

    def __init__(self, torch: Any, least_seconds: float = LEAST_SECONDS) -> None:
        self._torch = torch
        self._least_seconds = least_seconds
        self.queue = 10
        self.pause = 0.0
        self._few: Any = None

    @property
    def spacer(self) -> Callable[[], Any]:
        if self._few is None:
            self._few = self._torch.zeros(16, device="cuda")
        few = self._few
        return lambda: few.add_(1.0)

    def program(self, calls: Sequence[Callable[[], Any]], inner: int, graph: bool) -> Program:
        make = self._captured if graph else self._launched
        # Plans, workspace and lazily loaded code before anything is captured. Long calls need no third try.
        slow = self._once(self._launched(calls, len(calls))) > SLOW_SECONDS
        if not slow:
            self._once(self._launched(calls, max(3, len(calls))))
        walk = make(calls, inner or len(calls))
        if inner:
            return Program(walk, inner, graph)
        seconds = min(self._once(walk) for _ in range(1 if slow else 3))
        walks = max(1, round(self._least_seconds / max(seconds, 1e-9)))
        return Program(walk if walks == 1 else make(calls, walks * len(calls)), walks * len(calls), graph)

    def mark(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) * 1e-3

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _once(self, run: Callable[[], None]) -> float:
        begin = self.mark()
        run()
        end = self.mark()
        self.synchronize()
        return self.seconds(begin, end)

    def _captured(self, calls: Sequence[Callable[[], Any]], inner: int) -> Callable[[], None]:
        cuda = self._torch.cuda
        stream = cuda.Stream()
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):  # once on a side stream: capture runs on one
            calls[0]()
        cuda.current_stream().wait_stream(stream)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, stream=stream):
            for i in range(inner):
                calls[i % len(calls)]()
        replay: Callable[[], None] = graph.replay
        return replay

    def _launched(self, calls: Sequence[Callable[[], Any]], inner: int) -> Callable[[], None]:
        def run() -> None:
            for i in range(inner):
                calls[i % len(calls)]()

        return run
