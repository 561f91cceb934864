#!/usr/bin/env python3
"""Host time of small calls of two builds, side by side: python scripts/compare_calls.py BEFORE AFTER

BEFORE, AFTER: folders with the package `flashkernel`, such as build/dev/python of two checkouts. Processes of the two
take turns, so that what else the machine does falls on both. Of each call the least of the rounds' medians counts.
Ends with 1 where a call takes more than --limit times as long as before. `flashkernel bench call_overhead` times such
calls beside another library; this compares a commit with the one before it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def calls() -> dict[str, Callable[[], Any]]:
    """Calls so small that the work in them takes no time."""
    import numpy as np
    import torch

    import flashkernel as fk
    import flashkernel.torch as fkt

    x, weight, q = torch.ones(1, 16), torch.ones(16), torch.ones(1, 1, 1, 16)
    pages, table, lengths = torch.ones(1, 16, 1, 16), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([16])
    row, targets = np.ones((1, 16), np.float32), torch.zeros(1, dtype=torch.int64)
    listed: dict[str, Callable[[], Any]] = {
        "add, NumPy": lambda: fk.add(row, row),
        "rms_norm": lambda: fk.rms_norm(x, weight),
        "attention": lambda: fk.attention(q, q, q),
        "attention into out": lambda: fk.attention(q, q, q, out=q.clone()),
        "attention_paged": lambda: fk.attention_paged(q, pages, pages, table, lengths),
        "cross_entropy": lambda: fk.cross_entropy(x, targets),
        "torch: attention": lambda: fkt.attention(q, q, q),
        "torch: rms_norm": lambda: fkt.rms_norm(x, weight),
    }
    try:
        from flashkernel.flash_attn import flash_attn_func, flash_attn_with_kvcache
    except ImportError:
        return listed
    cache, seqlens = torch.ones(1, 16, 1, 16), torch.tensor([3], dtype=torch.int32)
    listed["flash_attn_func"] = lambda: flash_attn_func(q, q, q)
    listed["flash_attn_with_kvcache"] = lambda: flash_attn_with_kvcache(
        q, cache, cache.clone(), q, q, cache_seqlens=seqlens
    )
    return listed


def measure(count: int) -> dict[str, float]:
    """Median nanoseconds of each call."""
    medians = {}
    for name, call in calls().items():
        times = []
        for _ in range(count + 20):
            begin = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - begin)
        medians[name] = statistics.median(times[20:])
    return medians


def measured_by(folder: Path, count: int) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--measure", str(count)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"compare_calls: with {folder}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?")
    parser.add_argument("after", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=7, help="processes of each build (7)")
    parser.add_argument("--calls", type=int, default=2000, help="calls of each kind in a process (2000)")
    parser.add_argument("--limit", type=float, default=1.05, help="how many times as long a call may take (1.05)")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure)))
        return 0
    if given.before is None or given.after is None:
        parser.error("two folders are needed: the build before, and the one after")
    rounds = []
    for number in range(given.rounds):
        pair: list[dict[str, float]] = [{}, {}]
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            pair[side] = measured_by((given.before, given.after)[side], given.calls)
        rounds.append(pair)
    slower = 0
    print(f"{'call':28}{'before, us':>12}{'after, us':>12}{'ratio':>8}")
    for name in rounds[0][0]:
        if name not in rounds[0][1]:
            continue
        before, after = (min(pair[side][name] for pair in rounds) / 1000 for side in (0, 1))
        slower += after > given.limit * before
        print(f"{name:28}{before:12.2f}{after:12.2f}{after / before:8.3f}")
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main())
