"""Where a model can run: the devices of this build and machine, and the arrays of each."""

from __future__ import annotations

import flashkernel as fk

from .arrays import CudaArrays, HostArrays

__all__ = ["arrays_for", "available_devices"]

_NAMESPACES: dict[str, type[HostArrays]] = {"cuda": CudaArrays, "cpu": HostArrays}


def available_devices() -> list[str]:
    """Devices that have both an attention kernel that this machine can run and an array type here, best first."""
    runnable = {kernel.device for kernel in fk.kernels() if kernel.op == "attention_fwd" and kernel.available}
    return [device for device in _NAMESPACES if device in runnable and (device != "cuda" or CudaArrays.usable())]


def arrays_for(device: str, dtype: str) -> HostArrays:
    """The arrays of "cpu", "cuda" or "auto" (a CUDA device if this build and machine have one, else the CPU)."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"generate: device {device!r}; auto, cpu or cuda is needed")
    found = available_devices()
    if device == "auto":
        device = found[0] if found else "cpu"
    if device not in found:
        raise NotImplementedError(
            f"generate: device {device!r} was asked for, but text generation can run on "
            f"{', '.join(found) or 'no device'} here; a GPU needs a CUDA build, and torch with CUDA for its arrays "
            f"(`flashkernel doctor` tells)"
        )
    return _NAMESPACES[device](dtype)
