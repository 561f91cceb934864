"""What a run was made on: processor and its cache, GPU with driver and clocks, versions, commit. Every result file
carries it.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["gpu_clocks", "last_level_cache_bytes", "machine_info"]

_GPU_FIELDS = (
    "name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit",
    "temperature.gpu",
)  # fmt: skip
# Libraries that rows are compared with, by their distributions: a figure without the peer's version says little.
_PEERS = {
    "flash_attn": ("flash-attn",),
    "flash_attn_3": ("flash-attn-3", "xformers"),  # xformers carries it compiled
    "flash_attn_4": ("flash-attn-4",),
    "flashinfer": ("flashinfer-python", "flashinfer"),
    "liger_kernel": ("liger-kernel",),
    "quack_kernels": ("quack-kernels",),
}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _peers() -> dict[str, str]:
    """Versions of those that are installed; "xformers 0.0.34" where another package carries the library."""
    found = {}
    for name, distributions in _PEERS.items():
        for i, distribution in enumerate(distributions):
            version = _version(distribution)
            if version and name not in found:
                found[name] = f"{distribution} {version}" if i and distribution == "xformers" else version
    return found


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """FLASHKERNEL_COMMIT where it is set (a copy without .git); else the commit of the checkout that this package is
    run from, "+" where it has changes; None for an installed package.
    """
    if os.environ.get("FLASHKERNEL_COMMIT"):
        return os.environ["FLASHKERNEL_COMMIT"]
    here = Path(__file__).resolve()
    git = ["git", "-C", str(here.parent)]
    try:
        if subprocess.run([*git, "ls-files", "--error-unmatch", str(here)], capture_output=True).returncode:
            return None
        commit, dirty = (
            subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout.strip()
            for command in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "-uno"])
        )
        return commit + ("+" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def gpu_clocks(fields: tuple[str, ...] = ("clocks.sm", "power.draw", "temperature.gpu")) -> dict[str, str]:
    """What nvidia-smi says of the current device now; empty where there is none."""
    import torch

    try:
        lines = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        values = lines[torch.cuda.current_device()].split(",")
        return dict(zip(fields, (value.strip() for value in values), strict=True))
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return {}


def machine_info(device: str) -> dict[str, Any]:
    import torch

    import flashkernel as fk

    info: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "cpu_features": fk.cpu_features(),
        "threads": fk.get_num_threads(),
        "torch_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "flashkernel": fk.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "numpy": _version("numpy"),
        "peers": _peers(),
    }
    if device == "cuda":
        found = gpu_clocks(_GPU_FIELDS)
        info["gpu"] = found.pop("name", None) or torch.cuda.get_device_name()
        info |= found
        info["torch_cuda"] = torch.version.cuda
        info["cudnn"] = torch.backends.cudnn.version()
        info["triton"] = _version("triton")
    return info


def last_level_cache_bytes() -> int:
    """Bytes of the last-level cache of the first processor, from Linux; 64 MiB where that is unknown."""
    sizes = [64 << 10]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        sizes.append(int(file.read_text().strip().removesuffix("K")))
    return max(sizes) << 10
