"""The sum over ranks with residual and norm, in Triton's interpreter: processes that send each other words through
shared memory, as GPUs do. On GPUs: test_tensor_parallel_gpus.py."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import rank_sum_cases as cases
from conftest import HAS_GPU, HAS_TRITON_WHEELS, NO_TRITON_WHEELS
from flashkernel import testing
from ranks import Ranks

if not HAS_TRITON_WHEELS:
    pytest.skip(NO_TRITON_WHEELS, allow_module_level=True)
if HAS_GPU:
    pytest.skip("kernels are compiled here, not interpreted", allow_module_level=True)

from flashkernel.triton.rank_sum import MOST_ROWS, MOST_WORDS, RankSum, inbox_words

SIZE = 3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Any:
    os.environ["TRITON_INTERPRET"] = "1"
    group = Ranks(SIZE, tmp_path_factory.mktemp("ranks"))
    yield group
    group.close()


@pytest.fixture
def memory(tmp_path) -> str:
    """A file that the processes map; zeros."""
    path = tmp_path / "inboxes"
    with path.open("wb") as file:
        file.truncate(8 * SIZE * inbox_words(SIZE))
    return str(path)


@pytest.mark.parametrize(("dtype", "features"), [("float32", 37), ("float16", 64), ("bfloat16", 70)])
def test_sum_residual_and_norm(ranks, memory, dtype, features) -> None:
    """Calls of other numbers of rows, so that places hold words of earlier calls and rows count for themselves."""
    calls = [1, 3, 2, 1, 3]
    answers = ranks.ask(cases.sums, memory, dtype, features, calls, 60.0, -1)
    assert all(isinstance(answer, tuple) and not answer[1] for answer in answers), answers
    kind, epsilon = getattr(torch, dtype), testing.EPSILON[dtype]
    for i, rows in enumerate(calls):
        parts = [cases.operands(i, rank, rows, features) for rank in range(SIZE)]
        x = [part[0].to(kind).double() for part in parts]
        plain = sum(x)
        total = plain + parts[0][1].to(kind).double()
        weight = (parts[0][2] if i % 2 else parts[0][2].to(kind)).double()
        for answer in answers:
            normed, found, found_plain = answer[0][i]
            for got, ours in zip(answer[0][i], answers[0][0][i], strict=True):
                np.testing.assert_array_equal(got, ours)  # the same bits on every rank
            scale = sum(part.abs() for part in x) + 1
            assert (np.abs(found_plain - plain.numpy()) <= 2 * epsilon * scale.numpy()).all()
            assert (np.abs(found - total.numpy()) <= 3 * epsilon * scale.numpy()).all()
            h = torch.from_numpy(found).double()  # what is normed is what was rounded
            exact = h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
            assert (np.abs(normed - exact.numpy()) <= 4 * epsilon * (exact.abs().numpy() + 1e-3)).all()


def test_a_rank_that_does_not_come_ends_the_wait(ranks, memory) -> None:
    """And later calls don't wait: a graph full of them ends at once."""
    answers = ranks.ask(cases.sums, memory, "float32", 32, [1, 1, 1], 5e-5, 1)  # seconds of a GPU
    assert all(isinstance(answer, tuple) for answer in answers), answers
    for rank in (0, 2):
        _, failed, took = answers[rank]
        assert failed and took[1] + took[2] < 0.5 * took[0], took


def test_what_it_takes() -> None:
    one = RankSum(0, [0, 0], "cpu", 1.0)
    x = torch.zeros(4, 64)
    assert one.takes(x) and one.takes(x.half()) and not one.failed
    for refused in (
        x[:, :32], x[0], x.double(), x[:0], torch.zeros(1, 3).half(), torch.zeros(MOST_ROWS + 1, 4),
        torch.zeros(1, MOST_WORDS + 1),
    ):  # fmt: skip
        assert not one.takes(refused)
    assert one.takes(torch.zeros(1, 2 * MOST_WORDS).half())


def test_a_trial_in_vain_leaves_the_plain_sums() -> None:
    """A rank that can't compile the kernel lets the others wait for it: no fused sums, but no lost rank either."""
    import torch.distributed as dist

    from flashkernel.generate.tensor_parallel import PeerError, TensorParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for fused in (None, True):
            shared = TensorParallel(fused=fused)

            def wait_in_vain(arrays: Any, shared: Any = shared) -> None:
                shared._lost = True
                raise PeerError("in vain")

            shared._map_inboxes, shared._try_fused = (lambda arrays: None), wait_in_vain  # type: ignore[method-assign]
            if fused:
                with pytest.raises(ValueError, match=r"fused=True, and sums .* \(in vain\); False is needed"):
                    shared._prepare_fused(None)
            else:
                shared._prepare_fused(None)
            assert shared._fused is None and not shared._lost
    finally:
        dist.destroy_process_group()
