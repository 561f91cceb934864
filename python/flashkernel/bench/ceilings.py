"""What this machine reaches, measured in the run itself: a read and a copy by kernels, and a large matmul. Rows are a
percentage of these.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flashkernel as fk

from . import baselines
from .case import Inputs, Provider, Settings, each
from .machine import last_level_cache_bytes
from .timing import Device, Rule, measure

__all__ = ["limit", "matmul_ceiling", "memory_ceilings"]


def _best(device: Device, providers: list[Provider], rule: Rule) -> float:
    """Seconds of the fastest."""
    return min(result.timing.p50 for result in measure(device, providers, rule)[0].values())


def memory_ceilings(s: Settings, device: Device, rule: Rule) -> dict[str, float]:
    """Bytes per second of a plain sum and of a negation into another array, from memory."""
    torch = baselines.require_torch()
    # 1 GiB; on a CPU twice its last-level cache, if that is less.
    count = s.pick(quick=2**18, cpu=min(2**28, last_level_cache_bytes() // 2 // 1024 * 1024), cuda=2**28)
    x = Inputs(s.device, "float32").randn(1024, count // 1024)
    y = torch.empty_like(x)
    rule = replace(rule, calls=min(rule.calls, 100), seconds=min(rule.seconds, 1.0))
    read = [Provider("flashkernel", each(fk.reduce_sum, [(x, -1)])), Provider("torch", each(torch.sum, [(x, -1)]))]
    copy = [Provider("torch", each(torch.neg, [(x,)], out=y))]
    return {"read": 4.0 * count / _best(device, read, rule), "copy": 8.0 * count / _best(device, copy, rule)}


def matmul_ceiling(s: Settings, device: Device, rule: Rule, dtype: str) -> float:
    """FLOP per second of a large square product, sustained: the better of torch's (TF32 off) and ours."""
    torch = baselines.require_torch()
    size = s.pick(quick=128, cpu=2048, cuda=8192)
    inputs = Inputs(s.device, dtype)
    a, b = inputs.randn(size, size), inputs.randn(size, size, scale=size**-0.5)
    providers = [Provider("torch", each(torch.mm, [(a, b.t())])), Provider("flashkernel", each(fk.linear, [(a, b)]))]
    return (
        2.0
        * size**3
        / _best(device, providers, replace(rule, calls=min(rule.calls, 200), seconds=min(rule.seconds, 1.0)))
    )


def limit(ceilings: dict[str, float], dtype: str, flop: float, read: float, written: float) -> dict[str, Any] | None:
    """The least seconds for this work, and what bounds it: products at the matmul's rate, or bytes: each byte written
    goes with a byte read at the copy's rate, what is read beyond at the read's. None where nothing is known.
    """
    pairs, rest = min(read, written), abs(read - written)
    memory = 2 * pairs / ceilings["copy"] + rest / (ceilings["read"] if read >= written else ceilings["copy"])
    matmul = flop / ceilings[f"matmul {dtype}"] if flop and f"matmul {dtype}" in ceilings else 0.0
    seconds = max(memory, matmul)
    return {"bound": "matmul" if matmul > memory else "memory", "seconds": seconds} if seconds else None
