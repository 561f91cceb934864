"""The sum over ranks with residual and norm, by two ranks of one process: plain memory of one GPU stands for that of
two, which each rank maps; without a GPU, the host's, in Triton's interpreter. test_rank_sum.py has ranks of their own.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import rank_sum_cases as cases
from conftest import HAS_GPU, HAS_TRITON_WHEELS, NO_TRITON_WHEELS
from flashkernel import testing

if not HAS_TRITON_WHEELS:
    pytest.skip(NO_TRITON_WHEELS, allow_module_level=True)

from flashkernel.triton.rank_sum import RankSum, inbox_words

SIZE = 2
DEVICE = "cuda" if HAS_GPU else "cpu"
CALLS = [1, 3, 2, 1]


class Two:
    """Both ranks, and for each a twin that sends what its rank sends and waits for nobody."""

    def __init__(self, seconds: float):
        self.inboxes = [torch.zeros(inbox_words(SIZE), dtype=torch.int64, device=DEVICE) for _ in range(SIZE)]
        addresses = [inbox.data_ptr() for inbox in self.inboxes]
        self.ranks = [RankSum(rank, addresses, DEVICE, seconds) for rank in range(SIZE)]
        self.senders = [RankSum(rank, addresses, DEVICE, 0.0) for rank in range(SIZE)]


def given(call: int, rank: int, rows: int, features: int, dtype: Any) -> tuple[Any, Any, Any]:
    x, residual, weight = (y.to(DEVICE) for y in cases.operands(call, rank, rows, features))
    return x.to(dtype), residual.to(dtype), weight


def check(call: int, rows: int, features: int, dtype: Any, answers: list[Any]) -> None:
    """Both ranks have one result, and it is the sum's."""
    epsilon = testing.EPSILON[str(dtype).removeprefix("torch.")]
    parts = [given(call, rank, rows, features, dtype) for rank in range(SIZE)]
    exact = sum(part[0].double() for part in parts) + parts[0][1].double()
    scale = sum(part[0].double().abs() for part in parts) + 1
    for normed, total in answers:
        assert torch.equal(normed, answers[0][0]) and torch.equal(total, answers[0][1])
        assert ((total.double() - exact).abs() <= 3 * epsilon * scale).all()
        h = total.double()  # what is normed is what was rounded
        wanted = h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt() * parts[0][2].double()
        assert ((normed.double() - wanted).abs() <= 4 * epsilon * (wanted.abs() + 1e-3)).all()


@pytest.mark.parametrize(("dtype", "features"), [(torch.float32, 37), (torch.bfloat16, 70)])
def test_calls_one_behind_the_other(dtype: Any, features: int) -> None:
    """Rank 1's twin has sent before rank 0 works, and rank 0 before rank 1: each wait is over when it begins."""
    two = Two(60.0)
    for call, rows in enumerate(CALLS):
        operands = [given(call, rank, rows, features, dtype) for rank in range(SIZE)]
        two.senders[1].sum_norm(*operands[1], 1e-5)
        answers = [two.ranks[rank].sum_norm(*operands[rank], 1e-5) for rank in range(SIZE)]
        check(call, rows, features, dtype, answers)
    assert not any(one.failed for one in two.ranks) and two.senders[1].failed


def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    """After the time that was asked for, and not much more; later calls don't wait."""
    seconds = 0.2 if HAS_GPU else 2e-5  # the interpreter's tries take thousands of times as long
    warm, two = Two(0.0), Two(seconds)
    x = torch.ones(1, 32, device=DEVICE)
    warm.ranks[0].sum(x)  # compiles
    took = []
    for _ in range(3):
        begin = time.perf_counter()
        two.ranks[0].sum(x)
        if HAS_GPU:
            torch.cuda.synchronize()
        took.append(time.perf_counter() - begin)
    assert two.ranks[0].failed
    assert took[1] + took[2] < 0.5 * took[0], took
    if HAS_GPU:
        assert seconds <= took[0] < 10 * seconds, took


@pytest.mark.skipif(not HAS_GPU, reason="the interpreter runs one kernel after the other")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_that_wait_for_each_other(dtype: Any) -> None:
    """On two streams of one GPU, which has room for both: rank 0 is launched first, and waits."""
    features, two, streams = 4096, Two(5.0), [torch.cuda.Stream() for _ in range(SIZE)]
    operands = [[given(i, rank, rows, features, dtype) for rank in range(SIZE)] for i, rows in enumerate([1, 32, 3])]
    warm = Two(0.0)
    for rank in range(SIZE):  # compiles: a rank that compiles lets the other one wait
        for each in operands:
            warm.ranks[rank].sum_norm(*each[rank], 1e-5)
    torch.cuda.synchronize()
    answers: list[list[Any]] = [[], []]
    for each in operands:
        for rank in range(SIZE):
            with torch.cuda.stream(streams[rank]):
                answers[rank].append(two.ranks[rank].sum_norm(*each[rank], 1e-5))
    torch.cuda.synchronize()
    assert not any(one.failed for one in two.ranks)
    for i, rows in enumerate([1, 32, 3]):
        check(i, rows, features, dtype, [answers[rank][i] for rank in range(SIZE)])
