"""Peak memory of one attention call beyond its result, in a process of its own: no earlier call has left memory there;
and the size of the last-level cache.

`python -m flashkernel.bench.memory ours|torch BATCH HEADS SEQ DIM THREADS` prints bytes, or "unknown" (not Linux).
Called by report.py through `measure_apart`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["last_level_cache_bytes", "measure_apart"]


def measure_apart(side: str, shape: tuple[int, ...], threads: int) -> int | None:
    command = [sys.executable, "-m", "flashkernel.bench.memory", side, *map(str, shape), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"bench: measuring the memory of {side} failed: {done.stderr.strip()}")
    answer = done.stdout.split()[-1]
    return None if answer == "unknown" else int(answer)


def last_level_cache_bytes() -> int:
    """As Linux tells it of the first processor; 64 MiB where nobody does."""
    sizes = [64 << 10]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        sizes.append(int(file.read_text().strip().removesuffix("K")))
    return max(sizes) << 10


def main(side: str, *numbers: str) -> None:
    from . import baselines
    from .timing import peak_extra_bytes

    torch = baselines.require_torch()
    import flashkernel as fk

    *shape, threads = map(int, numbers)
    fk.set_num_threads(threads)
    torch.set_num_threads(threads)
    attention = {"ours": fk.attention, "torch": baselines.sdpa}[side]
    small = torch.randn(1, 1, 64, shape[-1])
    attention(small, small, small, causal=True)  # starts the threads, so that their stacks don't count
    q, k, v = (torch.randn(shape) for _ in range(3))
    with torch.no_grad():
        peak = peak_extra_bytes(lambda: attention(q, k, v, causal=True))
    print("unknown" if peak is None else max(0, peak - q.numel() * q.element_size()))


if __name__ == "__main__":
    main(*sys.argv[1:])
