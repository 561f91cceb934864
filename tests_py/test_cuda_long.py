"""Attention over 131072 tokens in fp32 on a GPU: rows spot-checked against float64, and memory linear in the length."""

from __future__ import annotations

import pytest
import torch

import flashkernel as fk

pytestmark = pytest.mark.skipif(
    not (fk.num_cuda_devices() and torch.cuda.is_available()), reason="needs a CUDA build, torch with CUDA and a GPU"
)

SEQ, DIM = 131072, 128
ROWS = (0, 1, 777, 65535, 65536, 100000, SEQ - 1)


def inputs(heads: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    q, k, v = (torch.randn(1, heads, SEQ, DIM, generator=generator, device="cuda") for _ in range(3))
    return [q, k, v + 1]  # values that do not cancel: a sum that drifts over 131072 terms would show


def scores(q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, causal: bool) -> torch.Tensor:
    s = q[0][:, rows].double() @ k[0].double().transpose(1, 2) / DIM**0.5
    if causal:
        s.masked_fill_(torch.arange(SEQ, device="cuda") > rows[:, None], float("-inf"))
    return s


@pytest.mark.parametrize("causal", [False, True])
def test_forward_and_its_memory(causal):
    q, k, v = inputs(heads=2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, held = fk.memory_stats("cuda:0"), torch.cuda.memory_allocated()
    out, lse = fk.attention(q, k, v, causal=causal, return_lse=True)
    torch.cuda.synchronize()
    after = fk.memory_stats("cuda:0")
    # Nothing but the results, and workspace of a few numbers a query: the scores alone would be 137 GB.
    assert torch.cuda.max_memory_allocated() - held <= out.nbytes + lse.nbytes + (1 << 20)
    linear = 2 * SEQ * 16
    assert after.peak_allocated_bytes <= max(before.peak_allocated_bytes, before.allocated_bytes + linear)

    rows = torch.tensor(ROWS, device="cuda")
    s = scores(q, k, rows, causal)
    assert (out[0][:, rows] - torch.softmax(s, -1) @ v[0].double()).abs().max() <= 1e-5
    assert (lse[0][:, rows] - torch.logsumexp(s, -1)).abs().max() <= 1e-5 * 12  # LSE itself is about 12


@pytest.mark.parametrize("causal", [False, True])
def test_backward_and_its_memory(causal):
    q, k, v = inputs(heads=1)
    grad = torch.randn_like(q)
    out, lse = fk.attention(q, k, v, causal=causal, return_lse=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, held = fk.memory_stats("cuda:0"), torch.cuda.memory_allocated()
    grad_q, grad_k, grad_v = fk.attention_backward(grad, q, k, v, out, lse, causal=causal)[:3]
    torch.cuda.synchronize()
    after = fk.memory_stats("cuda:0")
    assert torch.cuda.max_memory_allocated() - held <= 3 * q.nbytes + (1 << 20)
    assert after.peak_allocated_bytes <= max(before.peak_allocated_bytes, before.allocated_bytes + SEQ * DIM * 8)

    rows = torch.tensor(ROWS, device="cuda")
    q64, k64, v64, grad64 = (x[0, 0].double() for x in (q, k, v, grad))
    delta = (grad64 * out[0, 0].double()).sum(-1)
    p = torch.softmax(scores(q, k, rows, causal)[0], -1)
    ds = p * (grad64[rows] @ v64.T - delta[rows, None])
    close(grad_q[0, 0][rows], ds @ k64 / DIM**0.5)
    # As keys: the columns of the same matrices.
    s = q64 @ k64[rows].T / DIM**0.5
    if causal:
        s.masked_fill_(torch.arange(SEQ, device="cuda")[:, None] < rows, float("-inf"))
    p = torch.exp(s - lse[0, 0].double()[:, None])
    ds = p * (grad64 @ v64[rows].T - delta[:, None])
    close(grad_v[0, 0][rows], p.T @ grad64)
    close(grad_k[0, 0][rows], ds.T @ q64 / DIM**0.5)


def close(result: torch.Tensor, truth: torch.Tensor) -> None:
    assert (result - truth).abs().max() <= 1e-5 * truth.abs().max().clamp(min=1.0)
