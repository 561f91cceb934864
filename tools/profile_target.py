"""The program that `python -m tools profile` starts under ncu (or a user under nsys): calls each kernel id once to
warm up, then once within an NVTX range that has its name.

    python -m flashkernel.bench.profile_target KERNEL...

One process for all: starting Python, torch and CUDA takes longer than profiling a kernel. ncu is told to profile only
between cudaProfilerStart and cudaProfilerStop, so warm-ups and inputs cost nothing. A kernel that fails is named on
stderr and the others go on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import flashkernel as fk
from flashkernel.bench import baselines
from flashkernel.bench.suites.kernels import call_for

__all__ = ["main"]


def main(kernels: Sequence[str]) -> int:
    torch = baselines.require_torch()
    failed = 0
    call: Callable[[], Any] | None
    for kernel in kernels:
        try:
            call = call_for(kernel)
            with fk.force(kernel):
                call()
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
                with torch.cuda.nvtx.range(kernel):
                    call()
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()
        except Exception as error:  # whatever one kernel raises, the others are still wanted
            print(f"{kernel}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            failed += 1
        call = None  # frees its inputs
        torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
