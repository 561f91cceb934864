"""Linear with a weight in few bits, beside the same product with a 16-bit weight: the layers of Llama-1B and 8B."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import flashkernel as fk
from flashkernel.quantized import FORMATS, QuantizedWeight, dequantize_tensor, tiled

from .. import baselines
from ..case import OURS, TOLERANCE, Case, Inputs, Provider, Settings, Work, each, nbytes

__all__ = ["quantized_linear", "quantized_linear_work"]


def _blocks(s: Settings, outputs: int, features: int, format: str) -> Any:
    """Random blocks of a GGUF type whose numbers are of the size of a layer's."""
    torch = baselines.require_torch()
    head, size = FORMATS[format]
    device = {"device": s.device}
    blocks = torch.randint(256, (outputs, features // 32, head + size), dtype=torch.uint8, **device)
    scales = (torch.rand(outputs, features // 32, head // 2, **device) + 0.5) / (
        (64 if size == 32 else 8) * features**0.5
    )
    blocks[..., :head] = scales.half().view(torch.uint8).reshape(outputs, features // 32, head)
    return blocks.reshape(outputs, -1)


def quantized_linear_work(
    s: Settings, dtype: str, rows: int, features: int, outputs: int, format: str, tiles: bool = False
) -> Work:
    inputs = Inputs(s.device, dtype)
    x = inputs.randn(rows, features)
    weight = _blocks(s, outputs, features, format)
    wide = dequantize_tensor(weight, None, None, format, x.dtype)
    if tiles:
        weight = baselines.require_torch().as_tensor(tiled(QuantizedWeight(weight, None, None, format)).weight)
    copies = [weight.clone() for _ in range(inputs.sets(nbytes(weight), from_memory=s.cuda))]
    wide_copies = [wide.clone() for _ in range(inputs.sets(nbytes(wide), from_memory=s.cuda))]
    ours = each(fk.quantized_linear, [(x, one) for one in copies], format=format)
    providers = [Provider("flashkernel", ours, OURS)]
    providers += baselines.stock(s, baselines.linear, [(x, one, None) for one in wide_copies])
    return Work(
        providers,
        TOLERANCE[dtype],
        flop=2.0 * rows * features * outputs,
        read=nbytes(x, weight),
        written=rows * outputs * x.element_size(),
    )


def quantized_linear(s: Settings) -> Iterator[Case]:
    few = (1, 8, 16, 32, 64)
    layers = ((2048, 2048), (8192, 2048), (2048, 16384), (4096, 6144), (14336, 4096), (4096, 28672))
    for rows, features, outputs in s.pick(
        quick=[(3, 256, 128)],
        cpu=[(1, 576, 1536), (32, 576, 1536), (1, 2048, 8192)],
        cuda=[(rows, *layer) for layer in layers for rows in few],
    ):
        for format in ("q4_0", "q8_0"):
            for dtype in s.dtypes_of(("bfloat16",) if s.cuda else ("float32",)):
                named = {"rows": rows, "features": features, "outputs": outputs}
                build = partial(quantized_linear_work, s, dtype, rows, features, outputs, format)
                name = f"{format}, {rows} x {features} -> {outputs}"
                yield Case("quantized_linear", name, dtype, s.device, build, named)
