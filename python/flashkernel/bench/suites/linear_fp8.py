"""Linear in 8-bit floats, beside the same product in bfloat16 and torch's own in 8 bits: layers of Llama-8B and
DeepSeek-V3, and what makes 8 bits of an x."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import flashkernel as fk

from .. import baselines
from ..case import BESIDE, OURS, PEER, Case, Inputs, Provider, Settings, Work, each, nbytes

__all__ = ["linear_fp8", "linear_fp8_work", "quantize_fp8_work"]

BLOCK = 128
# Results of two libraries that add 8-bit numbers in tensor cores of 9.0 are some 2^-10 of the largest apart, and those
# in bfloat16 a rounding.
TOLERANCE = 4e-2


def _quantized(torch: Any, numbers: Any, scale: Any) -> Any:
    return (numbers / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def _scaled_mm(x: Any, weight: Any, x_scale: Any, weight_scale: Any) -> Any:
    torch = baselines.require_torch()
    return torch._scaled_mm(x, weight.t(), x_scale, weight_scale.t(), out_dtype=torch.bfloat16)


def _scaled_mm_of_blocks(x: Any, weight: Any, x_scale: Any, weight_scale: Any) -> Any:
    """1 x 128 and 128 x 128, which torch has for cuBLAS of CUDA 12.9 and later, on 9.0 alone."""
    functional = baselines.require_torch().nn.functional
    kinds = functional.ScalingType
    return functional.scaled_mm(
        x, weight.t(), x_scale, kinds.BlockWise1x128, weight_scale.t(), kinds.BlockWise128x128,
        output_dtype=baselines.require_torch().bfloat16,
    )  # fmt: skip


def linear_fp8_work(s: Settings, rows: int, features: int, outputs: int, scales: str) -> Work:
    """scales: "blocks" (1 x 128 and 128 x 128) or "rows"."""
    torch = baselines.require_torch()
    inputs = Inputs(s.device, "float32")
    x, weight = inputs.randn(rows, features), inputs.randn(outputs, features, scale=features**-0.5)
    if scales == "blocks":
        blocks = -(-features // BLOCK)
        x_scale = (torch.rand(rows, blocks, device=s.device) + 0.5) / 100
        weight_scale = (torch.rand(-(-outputs // BLOCK), blocks, device=s.device) + 0.5) / 100 * features**-0.5
        x_wide = x_scale.repeat_interleave(BLOCK, 1)[:, :features]
        weight_wide = weight_scale.repeat_interleave(BLOCK, 0)[:outputs].repeat_interleave(BLOCK, 1)[:, :features]
    else:
        x_scale = x_wide = x.abs().amax(1, True) / 448
        weight_scale = weight_wide = weight.abs().amax(1, True) / 448
    narrow, packed = _quantized(torch, x, x_wide), _quantized(torch, weight, weight_wide)
    wide_x, wide = (narrow.float() * x_wide).bfloat16(), (packed.float() * weight_wide).bfloat16()
    sets = [
        (narrow, one, x_scale, weight_scale)
        for one in [packed.clone() for _ in range(inputs.sets(nbytes(packed), from_memory=s.cuda and rows <= 64))]
    ]
    wide_sets = [
        (wide_x, one, None)
        for one in [wide.clone() for _ in range(inputs.sets(nbytes(wide), from_memory=s.cuda and rows <= 64))]
    ]
    providers = [Provider("flashkernel", each(fk.linear_fp8, sets), OURS)]
    providers.append(Provider("flashkernel bf16", each(fk.linear, [(a, b) for a, b, _ in wide_sets]), BESIDE))
    if narrow.is_cuda:
        peer = _scaled_mm if scales == "rows" else _scaled_mm_of_blocks
        columns = x_scale.new_empty(x_scale.shape[::-1]).copy_(x_scale.t()).t()  # strides of 1 row even of one row
        laid = sets if scales == "rows" else [(a, b, columns, d) for a, b, _, d in sets]
        providers.append(Provider("torch scaled_mm", each(peer, laid), PEER))
    providers += baselines.stock(s, baselines.linear, wide_sets)
    return Work(
        providers,
        TOLERANCE,
        flop=2.0 * rows * features * outputs,
        read=nbytes(narrow, packed, x_scale, weight_scale),
        written=2.0 * rows * outputs,
    )


def _quantize(x: Any) -> Any:
    """(elements, scales) in torch: a scale for 128 neighbours."""
    torch = baselines.require_torch()
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1) / 448.0).clamp_min(2.0**-100)
    return _quantized(torch, blocks, scales[..., None]).flatten(-2), scales


def quantize_fp8_work(s: Settings, dtype: str, rows: int, features: int) -> Work:
    inputs = Inputs(s.device, dtype)
    x = inputs.randn(rows, features)
    sets = [(x.clone(),) for _ in range(inputs.sets(nbytes(x), from_memory=s.cuda))]
    providers = [Provider("flashkernel", each(fk.quantize_fp8_blocks, sets), OURS)]
    providers += baselines.stock(s, _quantize, sets)
    return Work(providers, 2.0**-3, read=nbytes(x), written=rows * features * (1 + 4 / BLOCK))


def linear_fp8(s: Settings) -> Iterator[Case]:
    layers = ((4096, 4096), (4096, 16384), (7168, 4096), (2048, 7168), (7168, 24576))
    for rows, features, outputs in s.pick(
        quick=[(3, 256, 192)],
        cpu=[(1, 576, 1536), (32, 576, 1536)],
        cuda=[(rows, *layer) for layer in layers for rows in (1, 16, 64, 128, 4096)],
    ):
        for scales in ("blocks", "rows"):
            for dtype in s.dtypes_of(("bfloat16",)):
                named = {"rows": rows, "features": features, "outputs": outputs}
                build = partial(linear_fp8_work, s, rows, features, outputs, scales)
                name = f"scales of {scales}, {rows} x {features} -> {outputs}"
                yield Case("linear_fp8", name, dtype, s.device, build, named)
