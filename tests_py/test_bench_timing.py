"""The bench's method, driven by fake clocks and a fake GPU: who is measured how often, what a graph holds, what a
budget does, and that a wrong answer has no time."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flashkernel as fk
from flashkernel.bench import baselines, runner
from flashkernel.bench import case as bench_case
from flashkernel.bench.case import LIMIT, OURS, PEER, VARIANT, Case, Provider, Settings, Work
from flashkernel.bench.ceilings import limit
from flashkernel.bench.cuda_device import LEAST_SECONDS, CudaDevice
from flashkernel.bench.runner import Session
from flashkernel.bench.suites import GROUPS
from flashkernel.bench.timing import CpuDevice, Program, Rule, measure, summarize


class FakeDevice:
    """Time passes only where a call says so."""

    def __init__(self, queue: int = 1, pause: float = 0.0) -> None:
        self.now, self.queue, self.pause = 0.0, queue, pause
        self.log: list[str] = []
        self.synchronized = True

    def work(self, name: str, seconds: float) -> Callable[[], str]:
        def call() -> str:
            self.log.append(name)
            self.now += seconds
            return name

        return call

    def program(self, calls: Sequence[Callable[[], Any]], inner: int, graph: bool) -> Program:
        return CpuDevice().program(calls, inner, graph)

    def mark(self) -> float:
        self.synchronized = False
        return self.now

    def seconds(self, begin: float, end: float) -> float:
        assert self.synchronized, "read before the device was done"
        return end - begin

    def synchronize(self) -> None:
        self.synchronized = True

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_summary_of_known_times() -> None:
    timing = summarize([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (timing.calls, timing.min, timing.p50, timing.mean, timing.max) == (5, 1.0, 3.0, 3.0, 5.0)
    assert math.isclose(timing.p95, 4.8) and math.isclose(timing.p99, 4.96) and math.isclose(timing.std, math.sqrt(2))
    assert summarize([7.0]).p99 == 7.0


def test_providers_alternate_after_their_warm_up() -> None:
    device = FakeDevice()
    providers = [Provider(name, [device.work(name, 1e-3)]) for name in "ab"]
    measured, failed = measure(device, providers, Rule(warmup=2, calls=40, seconds=60))
    assert device.log[:4] == ["a"] * 2 + ["b"] * 2 and not failed
    rounds = [tuple(device.log[at : at + 2]) for at in range(4, len(device.log), 2)]
    assert len(rounds) == 40 and set(rounds) == {("a", "b"), ("b", "a")}  # and nobody always comes after the same one
    assert measured["a"].timing.calls == measured["b"].timing.calls == 40
    assert measured["a"].timing.p50 == pytest.approx(1e-3)
    again = FakeDevice()
    measure(again, [Provider(name, [again.work(name, 1e-3)]) for name in "ab"], Rule(warmup=2, calls=40, seconds=60))
    assert again.log == device.log


@pytest.mark.parametrize(
    ("seconds_per_call", "calls"),
    [
        (1e-6, 1000),  # all of them
        (10e-3, 200),  # what fits into two seconds
        (0.1, 30),  # the least, though it takes longer
        (0.5, 20),  # what fits into five times two seconds
        (60.0, 3),  # no statistic from one call
    ],
)
@pytest.mark.parametrize("queue", [1, 10])
def test_the_rule(seconds_per_call: float, calls: int, queue: int) -> None:
    device = FakeDevice(queue)
    rule = Rule(warmup=0, calls=1000, seconds=2.0)
    measured, _ = measure(device, [Provider("a", [device.work("a", seconds_per_call)])], rule)
    assert calls <= measured["a"].timing.calls <= calls + 10
    if queue == 1 or seconds_per_call > 0.01:  # long ones are not queued
        assert measured["a"].timing.calls in (calls, calls + 1)


def test_a_slow_provider_drops_out_and_the_others_go_on() -> None:
    device = FakeDevice()
    providers = [Provider("fast", [device.work("fast", 1e-5)]), Provider("slow", [device.work("slow", 1.0)])]
    measured, _ = measure(device, providers, Rule(warmup=1, calls=500, seconds=1.0))
    assert measured["fast"].timing.calls == 500 and measured["slow"].timing.calls == 5


def test_the_pause_is_spent_but_not_measured() -> None:
    device = FakeDevice(pause=0.02)
    measured, _ = measure(device, [Provider("a", [device.work("a", 1e-6)])], Rule(warmup=0, calls=1000, seconds=1.0))
    assert measured["a"].timing.max == pytest.approx(1e-6) and measured["a"].timing.calls in (50, 51)


def test_input_sets_are_walked_through() -> None:
    seen: list[int] = []
    calls = [lambda i=i: seen.append(i) for i in range(3)]
    measured, _ = measure(CpuDevice(), [Provider("a", calls)], Rule(warmup=1, calls=5, seconds=60))
    assert seen == [0, 1, 2, 0, 1, 2] and measured["a"].inner == 1
    seen.clear()
    measured, _ = measure(CpuDevice(), [Provider("a", calls)], Rule(warmup=0, calls=1, seconds=60), inner=4)
    assert seen == [0, 1, 2, 0] and measured["a"].inner == 4


def test_kernels_are_in_force_outside_the_time() -> None:
    device = FakeDevice()
    forced: list[str] = []
    providers = [Provider("a", [device.work("a", 1.0)], OURS, "x/y"), Provider("b", [device.work("b", 1.0)])]

    def force(patterns: str) -> None:
        forced.append(patterns)
        device.now += 100.0

    measured, _ = measure(device, providers, Rule(0, 2, 60.0), force=force)
    assert [sorted(forced[at : at + 2]) for at in range(0, 6, 2)] == [["", "x/y"]] * 3
    assert measured["a"].timing.max == 1.0


def test_a_peer_that_cannot_be_captured_is_left_out() -> None:
    class Strict(FakeDevice):
        def program(self, calls: Sequence[Callable[[], Any]], inner: int, graph: bool) -> Program:
            if graph and calls is bad:
                raise RuntimeError("operation not permitted when stream is capturing\nmore")
            return super().program(calls, inner, graph)

    device = Strict()
    good, bad = ([device.work(name, 1e-3)] for name in ("good", "bad"))
    measured, failed = measure(device, [Provider("good", good, OURS), Provider("bad", bad)], Rule(0, 3, 1.0))
    assert set(measured) == {"good"} and failed == {"bad": "operation not permitted when stream is capturing"}
    good, bad = ([lambda: (device.work("", 1e-3)(), torch.ones(1))[1]] for _ in range(2))
    wrong = [Provider("flashkernel", bad, OURS), Provider("good", good)]
    row = session(device).row(case(Work(wrong, 1.0)))  # ours must be capturable
    assert not row["agrees"] and "capturing" in row["refused"]["flashkernel"] and list(row["providers"]) == ["good"]


class FakeCuda:
    """torch.cuda with one time line: a replay costs what its calls cost, a launched call the same."""

    def __init__(self) -> None:
        self.now = 0.0
        self.captured: list[int] | None = None
        self.replays = 0
        outer = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = outer.now

            def elapsed_time(self, end: Any) -> float:
                return (end.at - self.at) * 1e3

        class Graph:
            calls: list[int]

            def replay(self) -> None:
                outer.replays += 1
                for _ in self.calls:
                    outer.now += 10e-6

        class Capture:
            def __init__(self, graph: Graph, stream: Stream) -> None:
                self.graph = graph

            def __enter__(self) -> None:
                outer.captured = []

            def __exit__(self, *_: object) -> None:
                assert outer.captured is not None
                self.graph.calls, outer.captured = outer.captured, None

        class Stream:
            def wait_stream(self, other: Any) -> None:
                pass

            def __enter__(self) -> None:
                pass

            def __exit__(self, *_: object) -> None:
                pass

        self.Event, self.CUDAGraph, self.graph, self.Stream = Event, Graph, Capture, Stream
        self.stream = lambda stream: stream
        self.current_stream = Stream

    def synchronize(self) -> None:
        pass

    def call(self, i: int) -> None:
        if self.captured is not None:
            self.captured.append(i)
        else:
            self.now += 10e-6


@pytest.mark.parametrize("sets", [1, 4, 30])
@pytest.mark.parametrize("graph", [True, False])
def test_gpu_programs_last_long_enough_in_whole_walks(sets: int, graph: bool) -> None:
    cuda = FakeCuda()
    device = CudaDevice(SimpleNamespace(cuda=cuda))
    calls = [lambda i=i: cuda.call(i) for i in range(sets)]
    program = device.program(calls, 0, graph)
    assert program.graph == graph and program.inner % sets == 0
    begin = cuda.now
    program.run()
    assert cuda.now - begin == pytest.approx(program.inner * 10e-6)
    assert program.inner * 10e-6 >= LEAST_SECONDS / 2 and program.inner <= max(sets, 12)
    rule = Rule(warmup=10, calls=100, seconds=1.0)
    measured, _ = measure(device, [Provider("a", calls, OURS), Provider("b", calls)], rule, graph=graph)
    assert measured["a"].timing.calls == measured["b"].timing.calls == 100
    assert measured["a"].timing.p50 == pytest.approx(10e-6) and measured["a"].graph == graph
    assert (cuda.replays > 0) == graph


def test_a_steady_measurement_lasts_as_long_as_is_asked_for() -> None:
    cuda = FakeCuda()
    device = CudaDevice(SimpleNamespace(cuda=cuda), 0.003)
    program = device.program([lambda i=i: cuda.call(i) for i in range(4)], 0, True)
    assert program.inner == 300  # of 10 us


def session(device: FakeDevice, rule: Rule | None = None) -> Session:
    ceilings = {"read": 1e9, "copy": 5e8, "matmul float32": 1e12}
    return Session(Settings(), device, rule or Rule(0, 3, 1.0), ceilings, clock=lambda: device.now)


def case(work: Work, name: str = "case") -> Case:
    return Case("group", name, "float32", "cpu", lambda: work)


def test_a_wrong_answer_has_no_time() -> None:
    device = FakeDevice()

    def answer(name: str, seconds: float, value: float) -> list[Callable[[], Any]]:
        def call() -> Any:
            device.now += seconds
            return torch.full((4,), value)

        return [call]

    def refuse() -> Any:
        raise NotImplementedError("not on Tuesdays\nat all")

    right = [
        Provider("flashkernel", answer("ours", 1.0, 1.0), OURS),
        Provider("slow", answer("slow", 4.0, 1.0)),
        Provider("best", answer("best", 2.0, 1.0)),
        Provider("sum", answer("sum", 0.5, 7.0), LIMIT),
        Provider("odd", answer("odd", 1.0, 3.0)),
        Provider("shy", [refuse]),
    ]
    row = session(device).row(case(Work(right, 1e-3, flop=8.0, read=4.0)))
    assert row["agrees"] and list(row["providers"]) == ["flashkernel", "slow", "best", "sum"]
    assert row["refused"] == {"odd": "DIFFERS from slow by 2.0e+00", "shy": "not on Tuesdays"}
    ours = row["providers"]["flashkernel"]
    assert row["best_peer"] == "best" and ours["ratio_to_best_peer"] == pytest.approx(2.0)
    assert row["limit"] == {"bound": "memory", "seconds": pytest.approx(0.5), "by": "sum"}
    assert ours["share_of_limit"] == pytest.approx(0.5) and ours["tflops"] == pytest.approx(8e-12)
    for kind in (OURS, VARIANT):
        wrong = [Provider("mine", answer("ours", 1.0, 1.1), kind), Provider("peer", answer("peer", 1.0, 1.0))]
        row = session(device).row(case(Work(wrong, 1e-3)))
        assert not row["agrees"] and list(row["providers"]) == ["peer"] and "DIFFERS" in row["refused"]["mine"]

    def broken() -> Any:
        raise RuntimeError("broken")

    # Ours may refuse in words, not break.
    row = session(device).row(case(Work([Provider("mine", [broken], OURS), Provider("shy", [refuse], OURS)])))
    assert not row["agrees"] and row["refused"] == {"mine": "FAILS: broken", "shy": "not on Tuesdays"}
    assert session(device).row(case(Work([Provider("shy", [refuse], OURS)])))["agrees"]


def test_what_calls_write_in_place_is_put_back_before_each_check() -> None:
    page = torch.zeros(4)

    def write(value: float) -> Callable[[], Any]:
        def call() -> Any:
            page[1] = value
            return page

        return call

    def nothing() -> Any:
        return page

    def restore() -> None:
        page.zero_()

    providers = [Provider("flashkernel", [nothing], OURS), Provider("peer", [write(1.0)])]
    row = session(FakeDevice()).row(case(Work(providers, 0.0, restore=restore)))
    assert not row["agrees"]  # the peer's result does not stand in for ours


def test_a_forced_kernel_must_be_the_one_that_runs() -> None:
    x = torch.randn(4, 8)
    wrong = [Provider("add/cpu/scalar", [lambda: fk.softmax(x)], OURS, forced="add/cpu/scalar")]
    row = session(FakeDevice()).row(case(Work([*wrong, Provider("eager", [lambda: torch.softmax(x, -1)])], 1e-4)))
    assert not row["agrees"] and "forced, but softmax/cpu" in row["refused"]["add/cpu/scalar"]


def test_a_budget_is_shared_evenly() -> None:
    device = FakeDevice()
    works = [Work([Provider(n, [device.work(n, 0.01)], kind) for n, kind in (("a", OURS), ("b", PEER))], 1.0)] * 4

    def numbers(work: Work) -> Work:
        answers = [Provider(p.name, [lambda c=p.calls[0]: (c(), torch.ones(1))[1]], p.kind) for p in work.providers]
        return Work(answers, 1.0)

    run = session(device, Rule(warmup=0, calls=1000, seconds=100.0, least_calls=3))
    run.run([case(numbers(work)) for work in works], 12.0, lambda case: None)
    spent = [sum(p["calls"] for p in row["providers"].values()) * 0.01 for row in run.rows]
    assert len(spent) == 4 and sum(spent) < 12 and spent[0] == pytest.approx(2.0, rel=0.1)
    slow = [case(numbers(Work([Provider("a", [device.work("a", 5.0)], OURS)])), f"row {i}") for i in range(4)]
    told: list[str] = []
    run = session(device, Rule(warmup=0, calls=1000, seconds=100.0))
    run.run(slow, 12.0, lambda case: told.append(case.name if case else "end"))
    assert run.left_out == ["group: row 1 float32", "group: row 2 float32", "group: row 3 float32"]
    assert told == ["row 0", "end"] and len(run.rows) == 1


@dataclass(frozen=True)
class LikeCuda(Settings):
    """The rows, providers and method of a GPU over CPU tensors."""

    @property
    def cuda(self) -> bool:
        return True


@pytest.mark.parametrize("group", GROUPS)
def test_gpu_rows_over_cpu_tensors(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a GPU run does but the GPU: its providers are made, checked, put into graphs, timed and described."""
    monkeypatch.setattr(runner, "cuda_peak_bytes", lambda call: (call(), 7)[1])
    monkeypatch.setattr(runner, "gpu_clocks", lambda: {"clocks.sm": "1 MHz"})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench_case, "last_level_cache_bytes", lambda: 2**10)  # a few sets of inputs, not 64
    found = baselines.optional  # other libraries' kernels want a GPU's tensors, where such a library is installed
    monkeypatch.setattr(baselines, "optional", lambda module: found(module) if "flashkernel" in module else None)
    cuda = FakeCuda()
    # Triton wants tensors on a GPU, or its interpreter, which is slow: two groups are enough there.
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and group in ("norm", "kv")
    settings = LikeCuda(device="cpu", quick=True, without=frozenset() if interpreted else frozenset({"triton"}))
    ceilings = {"read": 4e12, "copy": 4e12, "matmul float32": 1e12, "matmul float16": 1e12, "matmul bfloat16": 1e12}
    run = Session(settings, CudaDevice(SimpleNamespace(cuda=cuda)), Rule(1, 3, 1.0), ceilings)

    def timed(calls: Sequence[Callable[[], Any]], inner: int, graph: bool) -> Program:
        for call in calls:  # each set of inputs works
            call()
        return CudaDevice.program(run.device, [lambda i=i: cuda.call(i) for i in range(len(calls))], inner, graph)

    monkeypatch.setattr(run.device, "program", timed)
    run.run([*GROUPS[group](settings)], None, lambda case: None)
    assert run.rows
    for row in run.rows:
        # cuDNN and memory-efficient attention have no CPU path, nor has CPU autograd through flash some shapes: peers.
        told = row["case"], row["refused"], {name: p["relative_error"] for name, p in row["providers"].items()}
        assert row["agrees"] and all(name.startswith(("sdpa_", "naive", "tiled")) for name in row["refused"]), told
        ours = [p for p in row["providers"].values() if p["kind"] == OURS]
        assert ours and all(p["peak_bytes"] == 7 for p in ours)
        assert row["clocks"] and (row["limit"] or row["group"] == "call_overhead" or row["device"] == "cpu")


def test_optional_providers_appear_where_their_module_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_func(q: Any, k: Any, v: Any, causal: bool) -> Any:
        return baselines.sdpa(*(x.transpose(1, 2) for x in (q, k, v)), causal).transpose(1, 2), None

    modules = {
        "flashkernel.triton": SimpleNamespace(attention=lambda q, k, v, causal: baselines.sdpa(q, k, v, causal)),
        "flash_attn_interface": SimpleNamespace(flash_attn_func=flash_attn_func),
    }
    for found in ({}, modules):
        monkeypatch.setattr(baselines, "optional", found.get)
        first = next(iter(GROUPS["attention_forward"](LikeCuda(device="cpu", quick=True))))
        names = {p.name: p for p in first.build().providers}
        assert ("triton" in names) == ("fa3" in names) == bool(found) and "fa4" not in names
        backward = next(iter(GROUPS["attention_backward"](LikeCuda(device="cpu", quick=True)))).build().providers
        assert ("fa3" in {p.name for p in backward}) == bool(found)
    assert names["triton"].kind == VARIANT and names["fa3"].kind == PEER
    reference = names["sdpa_flash"].calls[0]()
    for name in ("triton", "fa3"):
        assert runner.difference(names[name].calls[0](), reference) < 4e-3
    gradients = {p.name: p.calls[0] for p in backward}
    for of_ours, of_fa3 in zip(gradients["flashkernel"](), gradients["fa3"](), strict=True):
        assert runner.difference(of_ours, of_fa3) < 1e-2
    left_out = LikeCuda(device="cpu", quick=True, without=frozenset({"triton", "fa3", "sdpa_flash"}))
    providers = next(iter(GROUPS["attention_forward"](left_out))).build().providers
    assert not {"triton", "fa3", "sdpa_flash"} & {p.name for p in providers}


def test_a_door_that_is_not_open_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax is installed, and this build of the library has no handlers for it."""
    found = {"flashkernel.torch": importlib.import_module("flashkernel.torch"), "jax": SimpleNamespace()}
    found["flashkernel.flash_attn"] = importlib.import_module("flashkernel.flash_attn")
    monkeypatch.setattr(baselines, "optional", found.get)
    (door,) = GROUPS["doors"](Settings(device="cpu", quick=True))
    row = Session(Settings(), CpuDevice(), Rule(0, 3, 1.0), {"read": 1e9, "copy": 5e8}).row(door)
    assert row["agrees"] and not row["refused"] and {"torch_op", "sdpa_door"} < row["providers"].keys()


def test_every_shape_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past torch's limit of compilations of the same code (eight), too, where it would run it uncompiled."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: real(f, backend="eager", dynamic=False))

    def compiling(x: torch.Tensor) -> torch.Tensor:
        return x + (1 if torch.compiler.is_compiling() else 0)

    for n in range(1, 12):
        assert baselines.compiled(compiling, "cpu")(torch.zeros(n)).sum() == n


def test_limits() -> None:
    ceilings = {"read": 4e12, "copy": 3e12, "matmul float16": 600e12}
    assert limit(ceilings, "float16", 0, 4e9, 0) == {"bound": "memory", "seconds": pytest.approx(1e-3)}
    assert limit(ceilings, "float16", 0, 3e9, 3e9) == {"bound": "memory", "seconds": pytest.approx(2e-3)}
    # Two bytes read for one written: a pair at the copy's rate, the rest at the read's.
    assert limit(ceilings, "float16", 0, 7e9, 3e9) == {"bound": "memory", "seconds": pytest.approx(3e-3)}
    assert limit(ceilings, "float16", 6e12, 1e6, 1e6) == {"bound": "matmul", "seconds": pytest.approx(1e-2)}
    assert limit(ceilings, "float32", 6e12, 0, 0) is None
