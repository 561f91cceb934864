"""Linear with bias and tanh-GELU, the layer back down with bias alone, and the gradient of a plain linear; hidden sizes
of GPT-2, Llama-1B and larger."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import flashkernel as fk

from .. import baselines, row_peers
from ..case import BESIDE, DTYPES, TOLERANCE, Case, Inputs, Provider, Settings, Work, each, nbytes

__all__ = ["linear", "linear_backward", "linear_backward_work", "linear_work"]


def _arguments(s: Settings, dtype: str, rows: int, features: int, outputs: int) -> list[tuple[Any, Any, Any]]:
    """Sets of (x, weight, bias). On a GPU so many that the weights come from memory."""
    inputs = Inputs(s.device, dtype)
    moved = (rows * features + features * outputs + rows * outputs) * (4.0 if dtype == "float32" else 2.0)
    return [
        (
            inputs.randn(rows, features),
            inputs.randn(outputs, features, scale=1 / math.sqrt(features)),
            inputs.randn(outputs),
        )
        for _ in range(inputs.sets(moved, from_memory=s.cuda))
    ]


def linear_work(s: Settings, dtype: str, rows: int, features: int, outputs: int, gelu: bool = True) -> Work:
    sets = _arguments(s, dtype, rows, features, outputs)
    providers = [*baselines.ours(s, fk.linear, sets, activation="gelu_tanh" if gelu else None)]
    if gelu and s.cuda and dtype != "float32" and "cublaslt_gelu" not in s.without:
        providers.append(Provider("cublaslt_gelu", each(baselines.addmm_gelu, sets)))
    providers += baselines.stock(s, baselines.gelu_linear if gelu else baselines.linear, sets)
    if dtype != "float32":
        providers += row_peers.providers(s, "gelu_linear" if gelu else "linear", sets)
    if gelu and "matmul" not in s.without:
        providers.append(Provider("matmul", each(baselines.linear, sets), BESIDE))
    return Work(
        providers,
        TOLERANCE[dtype],
        flop=2.0 * rows * features * outputs,
        read=nbytes(*sets[0]),
        written=rows * outputs * sets[0][0].element_size(),
    )


def linear(s: Settings) -> Iterator[Case]:
    few_and_many = (1, 4, 16, 64, 512, 1024, 4096, 16384)
    shapes = s.pick(
        quick=[(8, 64, 256)],
        cpu=[(1, 768, 3072), (8, 768, 3072), (512, 768, 3072), (512, 4096, 4096)],
        cuda=[(rows, *size) for size in ((768, 3072), (2048, 8192), (4096, 16384)) for rows in few_and_many],
    )
    layers = [(*shape, True) for shape in shapes] + [(rows, out, width, False) for rows, width, out in shapes]
    # A decode step's on a CPU: weights beyond the L2 cache of a core.
    decoded = s.pick(quick=[], cpu=[(576, 49152), (2048, 8192), (8192, 2048)], cuda=[])
    layers += [(rows, *size, False) for size in decoded for rows in (1, 4, 8)]
    for rows, features, outputs, gelu in layers:
        for dtype in s.dtypes_of(("float16", "bfloat16") if s.cuda else DTYPES):
            name = f"{rows} x {features} -> {outputs}" + (", GELU" if gelu else "")
            named = {"rows": rows, "features": features, "outputs": outputs}
            build = partial(linear_work, s, dtype, rows, features, outputs, gelu)
            yield Case("linear", name, dtype, s.device, build, named)


def linear_backward_work(s: Settings, dtype: str, rows: int, features: int, outputs: int) -> Work:
    inputs = Inputs(s.device, dtype)
    arguments = (
        inputs.randn(rows, outputs),
        inputs.randn(rows, features),
        inputs.randn(outputs, features, scale=1 / math.sqrt(features)),
    )
    providers = [*baselines.ours(s, fk.linear_backward, [arguments])]
    providers += baselines.stock(s, baselines.linear_backward, [arguments])
    return Work(
        providers,
        4 * TOLERANCE[dtype],
        flop=4.0 * rows * features * outputs,
        read=nbytes(*arguments),
        written=nbytes(*arguments[1:]),
    )


def linear_backward(s: Settings) -> Iterator[Case]:
    for rows, features, outputs in s.pick(
        quick=[(16, 64, 128)], cpu=[(512, 768, 3072)], cuda=[(4096, 768, 3072), (4096, 2048, 8192), (4096, 4096, 4096)]
    ):
        for dtype in s.dtypes_of(("float16", "bfloat16") if s.cuda else DTYPES):
            named = {"rows": rows, "features": features, "outputs": outputs}
            build = partial(linear_backward_work, s, dtype, rows, features, outputs)
            name = f"gradients {rows} x {features} -> {outputs}"
            yield Case("linear_backward", name, dtype, s.device, build, named)
