"""Peak memory: of torch's CUDA allocator, of this process (Linux), and of one attention call in a process of its own,
where no earlier call has left memory.

`python -m flashkernel.bench.memory flashkernel|sdpa BATCH HEADS SEQ DIM THREADS` prints bytes, or "unknown" (not
Linux); `measure_apart` runs it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flashkernel as fk

from . import baselines

__all__ = ["cuda_peak_bytes", "measure_apart", "peak_extra_bytes"]


def cuda_peak_bytes(call: Callable[[], Any]) -> int:
    """Most memory of torch's allocator that one call holds beyond what was held before, its result included."""
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return int(peak)


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


def measure_apart(provider: str, shape: tuple[int, ...], threads: int) -> int | None:
    """Resident memory beyond the result of one causal float32 attention call."""
    command = [sys.executable, "-m", "flashkernel.bench.memory", provider, *map(str, shape), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"bench: measuring the memory of {provider} failed: {done.stderr.strip()}")
    answer = done.stdout.split()[-1]
    return None if answer == "unknown" else int(answer)


def main(provider: str, *numbers: str) -> None:
    torch = baselines.require_torch()
    *shape, threads = map(int, numbers)
    fk.set_num_threads(threads)
    torch.set_num_threads(threads)
    providers: dict[str, Callable[..., Any]] = {"flashkernel": fk.attention, "sdpa": baselines.sdpa}
    attention = providers[provider]
    small = torch.randn(1, 1, 64, shape[-1])
    attention(small, small, small, causal=True)  # starts the threads, so that their stacks don't count
    q, k, v = (torch.randn(shape) for _ in range(3))
    with torch.no_grad():
        peak = peak_extra_bytes(lambda: attention(q, k, v, causal=True))
    print("unknown" if peak is None else max(0, peak - q.numel() * q.element_size()))


if __name__ == "__main__":
    main(*sys.argv[1:])
