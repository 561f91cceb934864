"""Whatever a Triton op does to a device it does inside `Call.on_device`: on the tensors' device and the given stream.

Torch's own fills, copies and allocations count, too: outside of it they go to torch's current stream and device, where
nothing orders them with the kernels.
"""

from __future__ import annotations

import contextlib
import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import flashkernel.triton as fk_triton
from conftest import HAS_GPU
from flashkernel.triton._host import Call
from keyword_calls import calls

QUEUED = ("empty", "zero", "fill", "copy", "full", "ones", "clone", "_to_copy", "add", "sum", "mul")


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.depth, self.outside = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.rstrip("_")
        results = func(*args, **(kwargs or {}))
        is_meta = isinstance(results, torch.Tensor) and results.device.type == "meta"
        # An empty tensor of no elements queues nothing.
        is_nothing = isinstance(results, torch.Tensor) and results.numel() == 0
        if self.depth == 0 and name.startswith(QUEUED) and not is_meta and not is_nothing:
            self.outside.append(str(func))
        return results


def watched(monkeypatch, run):
    watch = Watch()
    stock = Call.on_device

    @contextlib.contextmanager
    def on_device(self):
        with stock(self):
            watch.depth += 1
            try:
                yield
            finally:
                watch.depth -= 1

    def launch(self, kernel, programs, **arguments):
        """The interpreter does a kernel's work, and calls torch for it."""

    monkeypatch.setattr(Call, "on_device", on_device)
    monkeypatch.setattr(Call, "launch", launch)
    with watch:
        run()
    return watch.outside


DEVICE = "cuda" if HAS_GPU else "cpu"  # Triton's interpreter, where there is no GPU, takes tensors of the CPU


def placed(value):
    """The value with its tensors on DEVICE."""
    if isinstance(value, dict):
        return {name: placed(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(placed(item) for item in value)
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


def ones(*shape):
    return torch.ones(shape, device=DEVICE)


# The fused losses are refused: test_triton.py runs the example of each, which says so. So are packed masks
# and block masks (test_recording.py).
REFUSED = {name for name in fk_triton.OPS if name.startswith(("linear_cross_entropy", "linear_selected_log_prob"))}
CASES = {
    name: case
    for name, case in calls().items()
    if case[0] in set(fk_triton.OPS) - REFUSED and not {"mask", "block_mask"} & {*case[1]}
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("given", [True, False], ids=["given", "new"])
def test_fills_and_allocations(name, given, monkeypatch):
    op, keywords = CASES[name]
    function = getattr(fk_triton, op)
    takes = inspect.signature(function).parameters
    if not given:
        optional = {name for name, parameter in takes.items() if parameter.default is not parameter.empty}
        keywords = {k: v for k, v in keywords.items() if k not in {"out", "grads", "residual_out"} & optional}
    given_for = {"need_bias": "bias", "need_sinks": "sinks"}
    flags = [flag for flag, name in given_for.items() if flag in takes and (name in keywords or name not in takes)]
    keywords = {name: placed(value) for name, value in keywords.items()} | dict.fromkeys(flags, True)
    assert watched(monkeypatch, lambda: function(**keywords, stream=0)) == []


@pytest.mark.parametrize(
    "run",
    [
        lambda: fk_triton.reduce_sum(ones(0, 3), axis=0),
        lambda: fk_triton.rms_norm_backward(ones(0, 4), ones(0, 4), ones(4), ones(0)),
        lambda: fk_triton.layer_norm_backward(ones(0, 4), ones(0, 4), ones(4), ones(0), ones(0), need_bias=True),
        lambda: fk_triton.linear_backward(ones(0, 5), ones(0, 4), ones(5, 4)),
    ],
    ids=["reduce_sum", "rms_norm_backward", "layer_norm_backward", "linear_backward"],
)
def test_sums_over_nothing(run, monkeypatch):
    # The arguments themselves are made under watch, too, by ones().
    assert [name for name in watched(monkeypatch, run) if "fill_" in name or "zero" in name] == []
