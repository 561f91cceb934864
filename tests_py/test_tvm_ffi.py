"""The module of TVM-FFI and the kernel repository of the Hugging Face Hub that holds it.

Needs apache-tvm-ffi and kernels: `bash scripts/test_tvm_ffi.sh` builds the module and runs this file with
FLASHKERNEL_HUB, the repository's folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if "FLASHKERNEL_HUB" not in os.environ:
    pytest.skip("FLASHKERNEL_HUB is not set (scripts/test_tvm_ffi.sh builds the module)", allow_module_level=True)
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import tvm_ffi
from kernels import LocalLayerRepository, Mode, get_local_kernel, kernelize, use_kernel_mapping
from kernels import use_kernel_forward_from_hub as from_hub

HUB = Path(os.environ["FLASHKERNEL_HUB"])
kernel = get_local_kernel(HUB)
LIBRARY = Path(kernel.__file__).with_name("flashkernel_tvm_ffi.so")
ops = tvm_ffi.load_module(str(LIBRARY))


def random(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_(grad)


# --- the module, from torch and NumPy


def test_every_op_is_there() -> None:
    header = Path(__file__).parents[1] / "src" / "ops" / "op_list.hpp"
    names = {name for line in header.read_text().splitlines() if "Op<" in line for name in line.split('"')[1::2]}
    left = {name for name in names if not hasattr(ops, name)}
    # Ops of an engine's cache that is kept elsewhere, and what torch has.
    assert left == {"argmax", "check_block_table", "kv_read", "log_softmax_backward", "reduce_max", "reduce_mean",
                    "reduce_sum", "rope_table", "softmax_backward"}  # fmt: skip


def test_numpy_and_torch_give_the_same_bits() -> None:
    q, k, v = (random(2, 4, 9, 16) for _ in range(3))
    out, lse = torch.empty_like(q), torch.empty(2, 4, 9)
    options = (True, -1, -1, 0.0, None, None, None, None)
    ops.attention(q, k, v, out, lse, *options)
    arrays = [np.empty_like(x.numpy()) for x in (out, lse)]
    ops.attention(*(x.numpy() for x in (q, k, v)), *arrays, *options)
    assert (arrays[0] == out.numpy()).all() and (arrays[1] == lse.numpy()).all()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_strides_and_dtypes(dtype: torch.dtype) -> None:
    a, b = random(6, 8, dtype=dtype).t()[:, ::2], random(8, 3, dtype=dtype)
    out = torch.zeros(8, 6, dtype=dtype)[:, ::2]
    ops.add(a, b, out)
    assert torch.equal(out, a + b)


def test_pages() -> None:
    k, v = random(5, 2, 8), random(5, 2, 8) + 1
    pages = torch.zeros(2, 3, 4, 2, 8)
    ops.kv_append(k, v, pages[0], pages[1], torch.tensor([8, 9, 10, 11, 0]), None, None)
    table, lengths = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    q, out = random(1, 4, 1, 8), torch.empty(1, 4, 1, 8)
    ops.attention_paged(
        q, pages[0], pages[1], table, lengths, None, None, None, out, None, 1, True, -1, -1, 0.0, None, None, None
    )
    heads = [x.transpose(0, 1)[None].repeat_interleave(2, 1) for x in (k, v)]
    assert torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, *heads), atol=1e-5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.add(random(2), random(3), random(2)), ValueError, "add: "),
        (lambda: ops.add(random(2).double(), random(2).double(), random(2).double()), TypeError, "64 bits"),
        (
            lambda: ops.linear(random(2, 4), random(3, 4), None, random(2, 3), None, "relu"),
            ValueError,
            "activation='relu'",
        ),
        (lambda: ops.add(random(*[1] * 9), random(1), random(*[1] * 9)), ValueError, "9 dims"),
    ],
)
def test_errors_are_pythons(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_nothing_of_the_library_shows() -> None:
    """Another copy of it may be in the process; a kernel of the Hub may need no other shared library."""
    listed = subprocess.run(["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True).stdout
    assert {line.split()[-1][:10] for line in listed.splitlines()} == {"__tvm_ffi_"}
    needed = subprocess.run(["readelf", "-d", LIBRARY], capture_output=True, text=True, check=True).stdout
    names = {line.split("[")[1].split("]")[0] for line in needed.splitlines() if "NEEDED" in line}
    assert names <= {
        "libtvm_ffi.so",
        "libstdc++.so.6",
        "libm.so.6",
        "libgcc_s.so.1",
        "libc.so.6",
        "ld-linux-x86-64.so.2",
    }
    assert "RUNPATH" not in needed


# --- the repository of the Hub


def test_metadata_and_layout() -> None:
    (variant,) = (HUB / "build").iterdir()
    metadata = json.loads((variant / "metadata.json").read_text())
    assert variant.name.startswith("tvm-ffi") and metadata["name"] == "flashkernel" and metadata["python-depends"] == []
    assert metadata["backend"]["type"] in variant.name or metadata["backend"]["type"] == "cuda"
    assert {path.name for path in variant.iterdir() if path.is_file()} == {
        "__init__.py", "layers.py", "metadata.json", "flashkernel_tvm_ffi.so"}  # fmt: skip


def test_a_name_leads_to_the_folder() -> None:
    code = "from kernels import get_kernel; print(get_kernel('me/flashkernel', version=1).__all__)"
    environment = {**os.environ, "LOCAL_KERNELS": f"me/flashkernel={HUB}"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=600)
    assert run.returncode == 0 and "flash_attn_func" in run.stdout, run.stderr[-2000:]


def test_layers_replace_forwards() -> None:
    @from_hub("RMSNorm")
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(random(32)), 1e-6

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(hidden_states, (32,), self.weight, self.variance_epsilon)

    @from_hub("SiluAndMul")
    class Gate(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = x.chunk(2, -1)
            return torch.nn.functional.silu(gate) * up

    model = torch.nn.Sequential(Norm(), Gate())
    x = random(3, 32)
    expected = model(x)
    mapping = {
        name: {"cpu": LocalLayerRepository(repo_path=HUB, layer_name=name)} for name in ("RMSNorm", "SiluAndMul")
    }
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING, device="cpu", use_fallback=False)
    assert (
        "flashkernel" in model[0].forward.__func__.__module__ and "flashkernel" in model[1].forward.__func__.__module__
    )
    assert torch.allclose(model(x), expected, atol=1e-6)


def gradients(function: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    out = function(*inputs)
    weights = random(*out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), [x for x in inputs if x.requires_grad])]


def agree(ours: Any, theirs: Any, *inputs: torch.Tensor) -> None:
    for found, expected in zip(gradients(ours, *inputs), gradients(theirs, *inputs), strict=True):
        assert torch.allclose(found, expected, atol=2e-5, rtol=1e-4), (found - expected).abs().max()


F = torch.nn.functional


def test_gradients() -> None:
    x, w, b = random(5, 32, grad=True), random(32, grad=True), random(32, grad=True)
    agree(lambda x, w: kernel.rms_norm(x, w), lambda x, w: F.rms_norm(x, (32,), w, 1e-6), x, w)
    agree(kernel.layer_norm, lambda x, w, b: F.layer_norm(x, (32,), w, b), x, w, b)
    agree(kernel.layer_norm, lambda x, w: F.layer_norm(x, (32,), w), x, w.detach())
    agree(kernel.swiglu, lambda g, u: F.silu(g) * u, x, random(5, 32, grad=True))
    weight = random(16, 32, grad=True)
    bias = random(16, grad=True)
    agree(lambda *a: kernel.linear(*a, activation="gelu"), lambda *a: F.gelu(F.linear(*a)), x, weight, bias)
    agree(kernel.linear, F.linear, x, weight)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "softmax_scale": 0.3}])
def test_attention_of_flash_attns_layout(options: dict[str, Any]) -> None:
    q, k, v = random(2, 7, 4, 16, grad=True), random(2, 7, 2, 16, grad=True), random(2, 7, 2, 16, grad=True)

    def stock(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(
            *heads_first, is_causal=options.get("causal", False), scale=options.get("softmax_scale"), enable_gqa=True
        )
        return out.transpose(1, 2)

    agree(lambda *a: kernel.flash_attn_func(*a, **options), stock, q, k, v)
    starts = torch.tensor([0, 7, 14], dtype=torch.int32)
    flat = [x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v)]
    agree(
        lambda *a: kernel.flash_attn_varlen_func(*a, starts, starts, 7, 7, **options),
        lambda *a: stock(*(x.unflatten(0, (2, 7)) for x in a)).flatten(0, 1),
        *flat,
    )
    out, lse, _ = kernel.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert lse.shape == (2, 4, 7) and out.shape == q.shape
    with pytest.raises(NotImplementedError, match=r"dropout_p=0\.1"):
        kernel.flash_attn_func(q, k, v, dropout_p=0.1)
