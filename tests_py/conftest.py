"""What the tests share: arrays in both frameworks and every dtype, and a check that the forced kernels are put back."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/, which the wheel does not hold

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:  # Triton's interpreter, which must be asked for before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ.setdefault("FLASHKERNEL_STEPS_PER_THREAD", "0")  # tests are small: without it, each call has one thread

import flashkernel as fk
from flashkernel import testing
from kernel_path import KernelPath
from share import Share

settings.register_profile(
    "default", max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
DTYPES = tuple(TORCH)


# The same tests run on a GPU where this build and machine have one, and with backend="triton": on the GPU, or in the
# interpreter where there is none.
# Where Triton has wheels its absence fails.
HAS_TRITON_WHEELS = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
NO_TRITON_WHEELS = "Triton has wheels for Linux on x86_64 and aarch64 only"
needs_triton = pytest.mark.skipif(not HAS_TRITON_WHEELS, reason=NO_TRITON_WHEELS)
TRITON = pytest.param("triton", marks=needs_triton)
FRAMEWORKS = ("numpy", "torch", *(("torch_cuda",) if fk.num_cuda_devices() and HAS_GPU else ()), TRITON)


class Maker:
    """Random arrays of one framework and dtype, with the keywords that they need: ``backend`` or NumPy's bfloat16."""

    def __init__(self, framework: str, dtype: str, seed: int = 0) -> None:
        self.framework, self.dtype = framework, dtype
        self.rng = np.random.default_rng(seed)
        self.on_gpu = framework == "torch_cuda" or framework == "triton" and HAS_GPU
        self.host_reads = framework in ("numpy", "torch")  # indices and lengths; elsewhere they stay on the device
        self.kwargs = {"dtype": "bfloat16"} if (framework, dtype) == ("numpy", "bfloat16") else {}
        if framework == "triton":
            self.kwargs = {"backend": "triton"}

    def normal(self, *shape: int):
        return self.array(self.rng.standard_normal(shape))

    def array(self, values, dtype: str | None = None):
        """float64 values rounded to the dtype."""
        dtype = dtype or self.dtype
        values = np.asarray(values)
        if self.framework != "numpy":
            return self._place(torch.from_numpy(np.ascontiguousarray(values)).to(TORCH[dtype]))
        if dtype == "bfloat16":
            return testing.bfloat16_bits(values)
        return values.astype(NUMPY[dtype])

    def index(self, values, dtype=np.int64):
        values = np.asarray(values, dtype)
        return values if self.framework == "numpy" else self._place(torch.from_numpy(values))

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cuda() if self.on_gpu else tensor

    def check(self, result, truth, **options) -> None:
        """The tolerance rule, plus: the result is of the caller's framework and dtype."""
        if self.framework != "numpy":
            assert isinstance(result, torch.Tensor) and result.dtype == TORCH[self.dtype]
            assert result.is_cuda == self.on_gpu
        else:
            assert isinstance(result, np.ndarray) and result.dtype == NUMPY[self.dtype]
        testing.assert_close(result, truth, self.dtype, **options)


def on_host(indices) -> np.ndarray:
    return np.asarray(indices.cpu() if isinstance(indices, torch.Tensor) else indices)


def f64(x):
    return testing.to_float64(x)


@pytest.fixture(params=DTYPES)
def dtype(request) -> str:
    return request.param


@pytest.fixture(params=FRAMEWORKS)
def make(request, dtype) -> Maker:
    return Maker(request.param, dtype)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernel-path", metavar="PATH", help="hold the choice of kernels to one arch, as cuda/sm75")
    parser.addoption("--share", metavar="N", type=int, default=1, help="one in N of a test's cases, where it has many")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "chooses_kernels: runs as if --kernel-path were not given")
    config.addinivalue_line(
        "markers", "long: takes 5 s or more of a core, and others show much of the same; --share leaves it out"
    )
    if path := config.getoption("--kernel-path"):
        config.pluginmanager.register(KernelPath(path), "kernel_path")
    if (share := config.getoption("--share")) > 1:
        config.pluginmanager.register(Share(share), "share")


@pytest.fixture(autouse=True)
def nothing_left_forced(request):
    path = request.config.pluginmanager.get_plugin("kernel_path")
    lifted = path is not None and request.node.get_closest_marker("chooses_kernels") is not None
    with path.lifted() if lifted else contextlib.nullcontext():
        before = fk.forced_kernels(), fk.get_num_threads()
        yield
        assert (fk.forced_kernels(), fk.get_num_threads()) == before
