"""Runs cases: checks every provider's answer, times those that are right, and makes the row that is written.

A wrong answer has no time: where one of ours differs from the first peer, the row says so and the run fails; a peer
that differs or refuses is left out with its reason.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import flashkernel as fk

from . import ceilings as ceilings_of
from .case import CHECK, LIMIT, OURS, PEER, VARIANT, Case, Provider, Settings, Work
from .machine import gpu_clocks, last_level_cache_bytes
from .memory import cuda_peak_bytes, measure_apart
from .timing import Device, Measured, Rule, measure

__all__ = ["Session", "difference", "forcing"]


MINE = (OURS, VARIANT)
ALONE_SECONDS = 200e-6  # of a call: a longer one's beginning is a small part of it


@contextmanager
def forcing() -> Iterator[Callable[[str], None]]:
    """A function that puts a provider's kernels in force, on top of what was; all is back at the end."""
    before = fk.forced_kernels()
    now = before

    def force(patterns: str) -> None:
        nonlocal now
        wanted = ",".join(x for x in (before, patterns) if x) if patterns else before
        if wanted != now:
            fk.force_kernels(wanted)
            now = wanted

    try:
        yield force
    finally:
        fk.force_kernels(before)


def _flat(result: Any) -> list[Any]:
    return [x for x in (result if isinstance(result, (tuple, list)) else [result]) if x is not None]


def difference(ours: Any, theirs: Any) -> float:
    """Largest difference of the results both have, each relative to its largest finite value; inf where a shape
    differs, or a NaN or an infinity stands on one side only.
    """
    import torch

    worst = 0.0
    for a, b in zip(_flat(ours), _flat(theirs), strict=False):
        a, b = (torch.as_tensor(x).double().flatten() for x in (a, b))
        if a.shape != b.shape:
            return float("inf")
        finite = b.isfinite()
        if not torch.equal(finite, a.isfinite()) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
            return float("inf")
        if finite.any():
            a, b = a[finite], b[finite]
            worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)))
    return worst


def _reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


def _ran(before: dict[str, int]) -> list[str]:
    return [kernel.id for kernel in fk.kernels() if kernel.calls > before[kernel.id]]


def _workspace(call: Callable[[], Any]) -> int | None:
    """The library's own memory beside the result, as `explain` tells it; None for calls that are not one plain op."""
    if not isinstance(call, partial) or getattr(fk, getattr(call.func, "__name__", ""), None) is not call.func:
        return None
    return int(fk.explain(call.func.__name__, *call.args, **call.keywords).workspace_bytes)


@dataclasses.dataclass
class Session:
    """One run on one device: its rule, its ceilings, and the rows so far."""

    settings: Settings
    device: Device
    rule: Rule
    ceilings: dict[str, float] = dataclasses.field(default_factory=dict)
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)
    clock: Callable[[], float] = time.monotonic
    asked: tuple[float, dict[str, str]] | None = None
    alone: bool = False  # also time each call behind a kernel that has nothing to do with it

    def run(self, cases: Sequence[Case], budget: float | None, each: Callable[[Case | None], None]) -> None:
        """budget: seconds for all of it, shared evenly among what is left; a row that would begin later is left out.
        each: told of every case before it runs, and of None at the end.
        """
        begin = self.clock()
        for done, case in enumerate(cases):
            left = None if budget is None else budget - (self.clock() - begin)
            if left is not None and left <= 0:
                self.left_out.append(f"{case.group}: {case.name} {case.dtype}")
                continue
            each(case)
            # A third of a row's time goes into tensors, checks and captures.
            self.rows.append(self.row(case, None if left is None else left / (len(cases) - done) * 2 / 3))
            if self.settings.cuda:
                import torch

                torch.cuda.empty_cache()  # the next row's tensors have other sizes
        each(None)

    def row(self, case: Case, seconds: float | None = None) -> dict[str, Any]:
        import torch

        with torch.no_grad(), forcing() as force:
            work = case.build()
            self._measure_ceilings(case, work)
            checked, refused, errors, kernels, agrees = self._check(work, force)
            rule = self.rule
            if seconds is not None:
                rule = replace(rule, seconds=min(rule.seconds, seconds / max(1, len(checked))))
            if work.memory_apart:  # for its memory; a few calls tell the time of long ones
                rule = replace(rule, warmup=min(rule.warmup, 1), calls=min(rule.calls, 3))
            results: dict[str, Measured] = {}
            if checked:
                results, failed = measure(self.device, checked, rule, inner=work.inner, graph=work.graph, force=force)
                refused |= failed
                agrees = agrees and not any(p.kind in MINE and p.name in failed for p in checked)
            clocks = self._clocks()
            providers = {}
            for provider in checked:
                if provider.name in results:
                    force(provider.forced)
                    described = self._describe(case, work, provider, results[provider.name])
                    described["relative_error"] = errors.get(provider.name)
                    if provider.name in kernels:
                        described["kernels"] = kernels[provider.name]
                        described["workspace_bytes"] = _workspace(provider.calls[0])
                    providers[provider.name] = described
            if self.alone and work.graph and results:
                self._measure_alone([p for p in checked if p.name in results], results, rule, providers, force)
        row: dict[str, Any] = {
            "group": case.group,
            "case": f"{case.name} {work.sizes}".rstrip(),
            "dtype": case.dtype,
            "device": case.device,
            "shape": case.shape,
            "flop": round(work.flop) or None,
            "bytes": round(work.read + work.written) or None,
            "limit": self._limit(case, work, providers),
            "agrees": agrees,
            "providers": providers,
            "refused": refused,
            "library_peak_bytes": fk.memory_stats(case.device).peak_allocated_bytes,
            "clocks": clocks,
        }
        _ratios(row)
        return row

    def _measure_alone(
        self,
        checked: list[Provider],
        chained: dict[str, Measured],
        rule: Rule,
        providers: dict[str, Any],
        force: Callable[[str], None],
    ) -> None:
        """`alone` of each provider: its median behind an unrelated small kernel, less that kernel's own. A call behind
        itself may begin before the one in front has ended; in a model it seldom can. Long calls are not worth it.
        """
        spacer = self.device.spacer
        if spacer is None or min(m.timing.p50 for m in chained.values()) > ALONE_SECONDS:
            return

        def behind(call: Callable[[], Any]) -> Callable[[], Any]:
            def both() -> Any:
                spacer()
                return call()

            return both

        spaced = [replace(p, calls=[behind(call) for call in p.calls]) for p in checked]
        walk = [spacer] * max(len(p.calls) for p in checked)
        measured, _ = measure(self.device, [*spaced, Provider("spacer", walk)], rule, force=force)
        if "spacer" not in measured:
            return
        less = measured.pop("spacer").timing.p50
        for name, result in measured.items():
            timing = result.timing
            providers[name]["alone"] = {"p50": max(timing.p50 - less, 1e-9), "std": timing.std}

    def _clocks(self) -> dict[str, str]:
        """What nvidia-smi said after this row or one of the last ten seconds: it takes a while to answer."""
        if self.settings.cuda and (self.asked is None or self.clock() - self.asked[0] > 10):
            self.asked = self.clock(), gpu_clocks()
        return self.asked[1] if self.asked else {}

    def _measure_ceilings(self, case: Case, work: Work) -> None:
        if not self.ceilings:
            self.ceilings |= ceilings_of.memory_ceilings(self.settings, self.device, self.rule)
        if work.flop and f"matmul {case.dtype}" not in self.ceilings:
            rate = ceilings_of.matmul_ceiling(self.settings, self.device, self.rule, case.dtype)
            self.ceilings[f"matmul {case.dtype}"] = rate

    def _check(
        self, work: Work, force: Callable[[str], None]
    ) -> tuple[list[Provider], dict[str, str], dict[str, float], dict[str, list[str]], bool]:
        """(providers to time, refusals, errors, kernels that ran, whether ours agree). Peers first: the first of them
        that answers is what the others are held against.
        """
        import torch

        refused: dict[str, str] = {}
        errors: dict[str, float] = {}
        kernels: dict[str, list[str]] = {}
        passed: set[str] = set()
        agrees = True
        reference: Any = None
        against = ""
        for provider in sorted(work.providers, key=lambda p: p.kind in MINE):
            if provider.name in self.settings.without:
                continue
            if work.restore:
                work.restore()
            try:
                force(provider.forced)
            except ValueError as error:  # a kernel that this build does not have
                refused[provider.name] = _reason(error)
                continue
            before = {kernel.id: kernel.calls for kernel in fk.kernels()}
            try:
                result = provider.calls[0]()
                self.device.synchronize()
            except Exception as error:
                # Others may refuse a shape in any way; of ours, only a refusal in words or a lack of memory is one.
                kinds = NotImplementedError, MemoryError, torch.cuda.OutOfMemoryError
                refusal = provider.kind not in MINE or isinstance(error, kinds)
                refused[provider.name] = _reason(error) if refusal else f"FAILS: {_reason(error)}"
                agrees = agrees and refusal
                continue
            if provider.kind in MINE:
                kernels[provider.name] = _ran(before)
                if provider.forced and provider.forced not in kernels[provider.name]:
                    refused[provider.name] = f"forced, but {' '.join(kernels[provider.name]) or 'no kernel'} ran"
                    agrees = False
                    continue
            if work.valid is not None:
                if not work.valid(result):
                    refused[provider.name] = "DIFFERS from what the row allows"
                    agrees = agrees and provider.kind not in MINE
                    continue
            elif provider.kind in (*MINE, PEER, CHECK):
                if reference is None and provider.kind in (PEER, CHECK):
                    reference, against = [x.clone() if hasattr(x, "clone") else x for x in _flat(result)], provider.name
                elif reference is not None:
                    error_size = difference(result, reference)
                    errors[provider.name] = error_size
                    if not error_size <= work.tolerance:
                        refused[provider.name] = f"DIFFERS from {against} by {error_size:.1e}"
                        agrees = agrees and provider.kind not in MINE
                        continue
            if provider.kind != CHECK:
                passed.add(provider.name)
        force("")
        return [p for p in work.providers if p.name in passed], refused, errors, kernels, agrees

    def _describe(self, case: Case, work: Work, provider: Provider, result: Measured) -> dict[str, Any]:
        p50 = result.timing.p50
        moved = work.read + work.written
        described: dict[str, Any] = {
            "kind": provider.kind,
            **dataclasses.asdict(result.timing),
            "inner": result.inner,
            "graph": result.graph,
            "tflops": work.flop / p50 * 1e-12 if work.flop else None,
            "gbytes_per_second": moved / p50 * 1e-9 if moved else None,
            "peak_bytes": None,
        }
        if self.settings.cuda:
            described["peak_bytes"] = cuda_peak_bytes(provider.calls[0])
        elif work.memory_apart and provider.name in ("flashkernel", "sdpa"):
            described["peak_bytes"] = measure_apart(provider.name, work.memory_apart, fk.get_num_threads())
        return described

    def _limit(self, case: Case, work: Work, providers: dict[str, Any]) -> dict[str, Any] | None:
        """A row's limit: from providers that do less work, timed in turn with it, if it has any; else ceilings."""
        timed = {name: p["p50"] for name, p in providers.items() if p["kind"] == LIMIT}
        if timed:
            return {"bound": "memory", "seconds": min(timed.values()), "by": min(timed, key=timed.__getitem__)}
        moved = work.read, work.written
        if case.device == "cpu" and sum(moved) < last_level_cache_bytes():
            moved = 0.0, 0.0  # stays in the cache, whose speed is not measured
        return ceilings_of.limit(self.ceilings, case.dtype, work.flop, *moved)


def _ratios(row: dict[str, Any]) -> None:
    """Each provider's share of the limit, and of ours how many times faster than the best peer."""
    peers = {name: p["p50"] for name, p in row["providers"].items() if p["kind"] == PEER}
    best = min(peers, key=peers.__getitem__) if peers else None
    row["best_peer"] = best
    for provider in row["providers"].values():
        provider["share_of_limit"] = row["limit"]["seconds"] / provider["p50"] if row["limit"] else None
        if provider["kind"] in MINE:
            provider["ratio_to_best_peer"] = peers[best] / provider["p50"] if best else None
        if row["group"] == "doors" and provider["kind"] == VARIANT and "flashkernel" in row["providers"]:
            provider["over_plain"] = provider["p50"] - row["providers"]["flashkernel"]["p50"]
