"""What the options mean for every kind of run: the suites' and the survey's."""

from __future__ import annotations

from typing import Any

__all__ = ["device_of", "part_of"]


def part_of(asked: str | None, cases: list[Any]) -> list[Any]:
    """What --part asks for."""
    if not asked:
        return cases
    part, _, parts = asked.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise ValueError(f"bench: --part {asked}; I/N with 1 <= I <= N is needed, such as 2/3")
    return cases[int(part) - 1 :: int(parts)]


def device_of(settings: Any, steady: float | None) -> Any:
    """What launches and marks time on the device of the settings."""
    import flashkernel as fk

    from . import baselines
    from .cuda_device import LEAST_SECONDS, CudaDevice
    from .timing import PAUSE, CpuDevice

    if settings.cuda:
        return CudaDevice(baselines.require_torch(), steady or LEAST_SECONDS)
    return CpuDevice(pause=PAUSE if fk.get_num_threads() > 1 else 0.0)
