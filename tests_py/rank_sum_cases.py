"""What each rank of test_rank_sum.py does: the kernel in Triton's interpreter, over memory that the processes share."""

from __future__ import annotations

import time
from typing import Any

import numpy as np


def sums(pairs: Any, path: str, dtype: str, features: int, calls: list[int], seconds: float, missing: int) -> Any:
    """Calls of so many rows each, which the rank `missing` does not make. What comes out, in float32; whether a wait
    was in vain; the seconds of each call.
    """
    import torch
    import torch.distributed as dist

    from flashkernel.triton.rank_sum import RankSum, inbox_words

    rank, size, kind = dist.get_rank(), dist.get_world_size(), getattr(torch, dtype)
    memory = np.memmap(path, np.int64, "r+")  # the inboxes of all ranks, one behind the other
    addresses = [memory.ctypes.data + 8 * inbox_words(size) * other for other in range(size)]
    one = RankSum(rank, addresses, "cpu", seconds)
    found: list[Any] = []
    took: list[float] = []
    for i, rows in enumerate(calls):
        if rank == missing:
            continue
        begin = time.perf_counter()
        x, residual, weight = operands(i, rank, rows, features)
        weight = weight if i % 2 else weight.to(kind)  # float32 or the rows' dtype
        assert one.takes(x.to(kind))
        normed, total = one.sum_norm(x.to(kind), residual.to(kind), weight, 1e-5)
        plain = one.sum(x.to(kind))
        took.append(time.perf_counter() - begin)
        found.append([y.float().numpy() for y in (normed, total, plain)])
    return found, one.failed, took


def operands(call: int, rank: int, rows: int, features: int) -> Any:
    """x of a rank, residual and weight, which all ranks have."""
    import torch

    generator = torch.Generator().manual_seed(call)
    residual, weight = torch.randn(rows, features, generator=generator), torch.rand(features, generator=generator) + 0.5
    generator.manual_seed(1000 * call + rank + 1)
    return torch.randn(rows, features, generator=generator), residual, weight


def chain(pairs: Any, dtype: str, features: int, calls: list[int], replays: int) -> Any:
    """The calls in a CUDA graph on a GPU of each rank: what the replays give, and how far the first is from float64."""
    import torch
    import torch.distributed as dist

    from tensor_parallel_cases import prepared

    tp, rank, kind = prepared(fused=True), dist.get_rank(), getattr(torch, dtype)
    given = [[y.cuda() for y in operands(i, rank, rows, features)] for i, rows in enumerate(calls)]
    given = [[x.to(kind), residual.to(kind), weight] for x, residual, weight in given]
    found: list[Any] = []

    def step() -> None:
        found[:] = [tp.sum_norm(*operand, 1e-5) for operand in given]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        step()
    first: list[Any] = []
    for _ in range(replays):
        for normed, total in found:
            normed.zero_(), total.zero_()
        graph.replay()
        torch.cuda.synchronize()
        results = [y.clone() for pair in found for y in pair]
        assert not first or all(torch.equal(a, b) for a, b in zip(first, results, strict=True))
        first = results
    worst = 0.0
    epsilon = torch.finfo(kind).eps / 2
    for i, rows in enumerate(calls):
        parts = [operands(i, other, rows, features)[0].to(kind).double() for other in range(dist.get_world_size())]
        residual = given[i][1].double().cpu()
        scale = sum(part.abs() for part in parts) + residual.abs()
        error = (first[2 * i + 1].double().cpu() - sum(parts) - residual).abs() / (scale * epsilon)
        h = first[2 * i + 1].double()
        normed = h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt() * given[i][2].double()
        norm_error = (first[2 * i].double() - normed).abs() / ((normed.abs() + 1e-3) * epsilon)
        worst = max(worst, error.max().item(), norm_error.max().item())
    return [y.float().cpu().numpy() for y in first], worst
