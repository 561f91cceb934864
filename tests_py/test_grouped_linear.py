"""Grouped linear in Triton: each row by the weight of its group equals one product for each group."""

from __future__ import annotations

import doctest

import pytest
import torch

import flashkernel as fk
from conftest import HAS_GPU, HAS_TRITON_WHEELS, NO_TRITON_WHEELS, TORCH

if not HAS_TRITON_WHEELS:
    pytest.skip(NO_TRITON_WHEELS, allow_module_level=True)

from flashkernel.triton import default_device, grouped_linear
from flashkernel.triton.grouped_linear import group_rows

DEVICE = default_device()


def case(
    rows: int, groups: int, inner: int, cols: int, dtype: str, hit: list[int] | None = None
) -> tuple[torch.Tensor, ...]:
    """Rows of x, their groups (of those in `hit`, where given), weights and biases."""
    generator = torch.Generator().manual_seed(rows + groups)
    group = torch.randint(0, groups, (rows,), generator=generator)
    if hit is not None:
        group = torch.tensor(hit)[group % len(hit)]
    tensors = [
        torch.randn(*shape, generator=generator) for shape in ((rows, inner), (groups, cols, inner), (groups, cols))
    ]
    return (group.to(DEVICE), *(tensor.to(DEVICE, TORCH[dtype]) for tensor in tensors))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "groups", "hit"),
    [(1, 8, None), (7, 4, None), (40, 2, [1]), (90, 3, [0, 2]), (64, 1, None), (200, 3, None)],
)
def test_rows_by_their_groups(rows: int, groups: int, hit: list[int] | None, dtype: str) -> None:
    group, x, weight, bias = case(rows, groups, 40, 35, dtype, hit)
    found = group_rows(group, groups)
    assert torch.equal(found.order, torch.sort(group, stable=True)[1])
    each = found.tiles[2] - found.tiles[1]
    assert each.sum() == rows and each.max() <= found.block
    for broken in set(range(groups)) - set(group.tolist()):  # a weight that no row needs is not read
        weight[broken] = float("nan")
    out = found.linear(x, weight, bias, rows=found.order, back=True)
    exact = torch.einsum("mk,mnk->mn", x.double(), weight[group].double()) + bias[group].double()
    limit = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    assert ((out.double() - exact).abs() <= limit * exact.abs().clamp(min=1)).all()
    # By places, and from places: what an MLP of two layers does between them.
    assert torch.equal(found.linear(x, weight, bias, rows=found.order), out[found.order])
    assert torch.equal(found.linear(x[found.order], weight, bias, back=True), out)
    assert torch.equal(found.linear(x[found.order], weight, bias), out[found.order])


def test_weights_by_any_strides_and_without_bias() -> None:
    group, x, weight, _ = case(20, 3, 48, 33, "float32")
    found = group_rows(group, 3)
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    assert turned.stride() != weight.stride()
    assert torch.equal(found.linear(x, turned, rows=found.order), found.linear(x, weight, rows=found.order))


def test_no_rows() -> None:
    group, x, weight, bias = case(0, 3, 8, 5, "float32")
    assert group_rows(group, 3).linear(x, weight, bias).shape == (0, 5)


def test_what_does_not_fit_is_refused() -> None:
    group, x, weight, bias = case(6, 3, 8, 5, "float32")
    found = group_rows(group, 3)
    for options, text in (
        (dict(weight=weight[:2]), "weight is of 2 groups; 3 are needed"),
        (dict(x=x[:, :7]), r"x has shape \(6, 7\); \(6, 8\) is needed"),
        (dict(x=x[:5]), r"x has shape \(5, 8\); \(6, 8\) is needed"),
        (dict(bias=bias[:, :4]), r"bias has shape \(3, 4\); \(3, 5\) is needed"),
        (dict(rows=found.order[:4]), r"rows has shape \(4,\); \(6,\) is needed"),
        (dict(weight=weight.half()), "weight is float16 but x is float32"),
    ):
        with pytest.raises(ValueError, match="grouped_linear: " + text):
            found.linear(**{"x": x, "weight": weight, "bias": bias, **options})
    with pytest.raises(ValueError, match="group_rows: num_groups=0"):
        group_rows(group, 0)


def test_the_example_runs() -> None:
    assert doctest.testmod(grouped_linear).failed == 0


@pytest.mark.skipif(not (HAS_GPU and fk.num_cuda_devices()), reason="no GPU, or a build without CUDA")
def test_a_graph_holds_for_other_groups() -> None:
    group, x, weight, bias = case(24, 16, 128, 96, "bfloat16")

    def call() -> torch.Tensor:
        found = group_rows(group, 16)
        return found.linear(x, weight, bias, rows=found.order, back=True)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for hit in ([3], [0, 15], list(range(16))):
        group.copy_(torch.tensor(hit, device=DEVICE)[torch.arange(24, device=DEVICE) % len(hit)])
        graph.replay()
        assert torch.equal(out, call())
