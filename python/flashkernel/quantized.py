"""Weights in 4 or 8 bits for `flashkernel.quantized_linear` and `flashkernel.linear_fp8`: quantising, dequantising, and
other layouts read.

Everything here but `hadamard` runs once, when a model is loaded, on NumPy arrays of the host; torch tensors are taken
too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _C

__all__ = [
    "FORMATS",
    "QuantizedWeight",
    "dequantize",
    "dequantize_tensor",
    "from_awq",
    "from_fp8",
    "from_gptq",
    "hadamard",
    "quantize",
    "tiled",
    "untiled",
]

# Bytes of a block of 32 elements: before the elements, and theirs.
FORMATS = {"int4": (0, 16), "int8": (0, 32), "q4_0": (2, 16), "q4_1": (4, 16), "q8_0": (2, 32)}
BLOCK = 32
TILE_ROWS = 16
FP8, FP8_BLOCK = "fp8_block", 128  # float8_e4m3fn with a scale for 128 x 128, and its side
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where a column's four bits lie in a word


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight [out_features, in_features] as `quantized_linear` takes it, or in the format "fp8_block" `linear_fp8`.

    weight: [out_features, bytes of a row], or tiles of 16 rows (`tiled`); scales and zeros: [out_features, groups], or
    None as the format wants it. "fp8_block": float8_e4m3fn (or its bits in uint8) [out_features, in_features], scales
    float32 [out_features / 128, in_features / 128], rounded up.
    """

    weight: Any
    scales: Any
    zeros: Any
    format: str

    @property
    def shape(self) -> tuple[int, int]:
        if len(self.weight.shape) == 3:
            groups, blocks, _ = self.weight.shape
            return groups * TILE_ROWS, blocks * BLOCK
        rows, size = self.weight.shape
        return rows, size if self.format in ("int8", FP8) else size // sum(FORMATS[self.format]) * BLOCK

    def __getitem__(self, rows: slice) -> QuantizedWeight:
        """Some rows of it, on the same memory. Raises ValueError for rows of tiles, and of "fp8_block" for a first one
        that begins no block of 128."""
        if len(self.weight.shape) == 3:
            raise ValueError("QuantizedWeight: rows of a tiled weight were asked for; `untiled` of it is needed")
        if self.format == FP8:
            first, last, step = rows.indices(self.shape[0])
            if first % FP8_BLOCK or step != 1:
                raise ValueError(
                    f"QuantizedWeight: rows {first}:{last}:{step}; a first one of a block of 128 is needed"
                )
            scales = self.scales[first // FP8_BLOCK : -(-last // FP8_BLOCK)]
            return QuantizedWeight(self.weight[rows], scales, None, self.format)
        scales, zeros = (None if part is None else part[rows] for part in (self.scales, self.zeros))
        return QuantizedWeight(self.weight[rows], scales, zeros, self.format)

    def linear(self, x: Any, bias: Any = None, **options: Any) -> Any:
        """`quantized_linear`, or `linear_fp8`, of x with this weight.

        >>> import numpy as np
        >>> from flashkernel.quantized import quantize
        >>> quantize(np.eye(32, dtype=np.float32)).linear(np.ones((1, 32), np.float32)).round(2)[0, :3].tolist()
        [1.0, 1.0, 1.0]
        """
        if self.format == FP8:
            return _C.linear_fp8(x, self.weight, None, self.scales, bias, **options)
        return _C.quantized_linear(x, self.weight, self.scales, self.zeros, bias, format=self.format, **options)


def _numpy(values: Any) -> np.ndarray:
    if isinstance(values, np.ndarray):
        return values
    values = values.detach().cpu()
    return np.asarray(values.float().numpy() if str(values.dtype) == "torch.bfloat16" else values.numpy())


def tiled(weight: QuantizedWeight) -> QuantizedWeight:
    """The same numbers with blocks of 16 rows side by side, which CPUs with AVX512-VNNI and AMX read fastest.

    weight: "q4_0", "q4_1" or "q8_0" [out_features, bytes of a row], out_features a multiple of 16. The result's array
    is [out_features / 16, in_features / 32, bytes of 16 blocks]: the blocks' numbers of 2 bytes, first of each row,
    second of each row, then their elements, 4 bytes of each row at a time.

    Raises ValueError for another format or number of rows.

    >>> import numpy as np
    >>> from flashkernel.quantized import QuantizedWeight, tiled
    >>> rows = QuantizedWeight(np.zeros((32, 2 * 34), np.uint8), None, None, "q8_0")
    >>> tiled(rows).weight.shape, tiled(rows).shape
    ((2, 2, 544), (32, 64))
    """
    packed = _numpy(weight.weight)
    rows, (head, size) = packed.shape[0], FORMATS[weight.format]
    if not head or packed.ndim != 2 or rows % TILE_ROWS:
        raise ValueError(
            f"tiled: format={weight.format!r}, weight {list(packed.shape)}; q4_0, q4_1 or q8_0 with rows in "
            f"multiples of {TILE_ROWS} is needed"
        )
    blocks = packed.reshape(rows // TILE_ROWS, TILE_ROWS, -1, head + size).swapaxes(1, 2)
    groups, count = blocks.shape[:2]
    parts = [
        np.ascontiguousarray(blocks[..., begin:end]).reshape(groups, count, TILE_ROWS, -1, unit).swapaxes(2, 3)
        for begin, end, unit in ((0, head, 2), (head, head + size, 4))
    ]
    whole = np.concatenate([part.reshape(groups, count, -1) for part in parts], axis=-1)
    return QuantizedWeight(whole, None, None, weight.format)


def untiled(weight: QuantizedWeight) -> QuantizedWeight:
    """The rows of blocks that `tiled` made tiles of.

    >>> import numpy as np
    >>> from flashkernel.quantized import QuantizedWeight, tiled, untiled
    >>> rows = QuantizedWeight(np.arange(16 * 18, dtype=np.uint16).astype(np.uint8).reshape(16, 18), None, None, "q4_0")
    >>> bool((untiled(tiled(rows)).weight == rows.weight).all())
    True
    """
    whole = _numpy(weight.weight)
    head, size = FORMATS[weight.format]
    groups, count = whole.shape[:2]
    parts = [
        np.ascontiguousarray(whole[..., begin * TILE_ROWS : end * TILE_ROWS])
        .reshape(groups, count, -1, TILE_ROWS, unit)
        .swapaxes(2, 3)
        .reshape(groups, count, TILE_ROWS, end - begin)
        for begin, end, unit in ((0, head, 2), (head, head + size, 4))
    ]
    rows = np.concatenate(parts, axis=-1).swapaxes(1, 2)
    return QuantizedWeight(rows.reshape(groups * TILE_ROWS, -1), None, None, weight.format)


def _pack_int4(q: np.ndarray) -> np.ndarray:
    """Numbers 0 to 15, uint8 [out, in], two a byte: of a block of 32 the first half low, the second one high."""
    halves = q.reshape(q.shape[0], -1, 2, BLOCK // 2)
    return np.ascontiguousarray(halves[:, :, 0] | halves[:, :, 1] << 4).reshape(q.shape[0], -1)


def _unpack_int4(packed: np.ndarray) -> np.ndarray:
    blocks = packed.reshape(packed.shape[0], -1, BLOCK // 2)
    return np.concatenate([blocks & 15, blocks >> 4], axis=-1).reshape(packed.shape[0], -1)


def quantize(
    weight: Any, format: str = "int4", *, group_size: int | None = None, symmetric: bool = True, dtype: Any = np.float32
) -> QuantizedWeight:
    """A weight [out_features, in_features] rounded to the nearest of its group's steps.

    format: "int4" or "int8". group_size: a multiple of 32 that divides in_features; None: 32 for int4, the whole row
    for int8. symmetric: no zero points. dtype: of scales and zeros, float32 or float16.

    Raises ValueError for another format, a group that does not fit, and numbers that are not finite or whose step is
    beyond dtype.

    >>> import numpy as np
    >>> from flashkernel.quantized import dequantize, quantize
    >>> weight = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 64)
    >>> bool(np.abs(dequantize(quantize(weight, "int8")) - weight).max() < 0.005)
    True
    """
    values = _numpy(weight).astype(np.float32)
    if format not in ("int4", "int8") or values.ndim != 2:
        raise ValueError(
            f"quantize: format={format!r}, weight of {values.ndim} dims; int4 or int8 of a matrix is needed"
        )
    rows, columns = values.shape
    group = (BLOCK if format == "int4" else columns) if group_size is None else group_size
    if group < 1 or columns % group or (group % BLOCK and not (format == "int8" and group == columns)):
        raise ValueError(
            f"quantize: group_size={group} for rows of {columns}; a multiple of 32 that divides the row is needed"
        )
    if not np.isfinite(values).all():
        raise ValueError("quantize: the weight has a NaN or an infinity; finite numbers are needed")
    parts = values.reshape(rows, -1, group)
    least, most = (-8, 7) if format == "int4" else (-127, 127)
    if symmetric:
        steps = np.abs(parts).max(axis=-1) / most
    else:
        steps = (parts.max(axis=-1).clip(0) - parts.min(axis=-1).clip(None, 0)) / (most - least)
    with np.errstate(over="ignore"):
        scales = np.maximum(steps.astype(dtype), np.finfo(dtype).smallest_subnormal)  # of a group of zeros: not 0
    if not np.isfinite(scales).all():
        raise ValueError(f"quantize: a step of {float(steps.max()):g} is beyond {np.dtype(dtype)}; float32 is needed")
    wide = scales.astype(np.float32)[..., None]
    zeros = np.zeros_like(scales) if symmetric else np.rint(least - parts.min(axis=-1).clip(None, 0) / wide[..., 0])
    q = np.clip(np.rint(parts / wide) + zeros[..., None], least, most).reshape(rows, columns)
    given = None if symmetric else (zeros + (8 if format == "int4" else 0)).astype(dtype)
    if format == "int8":
        return QuantizedWeight(q.astype(np.int8), scales, given, format)
    return QuantizedWeight(_pack_int4((q + 8).astype(np.uint8)), scales, given, format)


def dequantize(weight: QuantizedWeight) -> np.ndarray:
    """The numbers that a quantised weight stands for, float32 [out_features, in_features].

    >>> import numpy as np
    >>> from flashkernel.quantized import QuantizedWeight, dequantize
    >>> packed = np.full((1, 16), 0x9A, np.uint8)
    >>> dequantize(QuantizedWeight(packed, np.ones((1, 1), np.float32), None, "int4"))[0, [0, 16]].tolist()
    [2.0, 1.0]
    """
    if len(weight.weight.shape) == 3:
        weight = untiled(weight)
    if weight.format == FP8:
        return from_fp8(weight.weight, weight.scales)
    packed = _numpy(weight.weight)
    rows, columns = weight.shape
    head, size = FORMATS[weight.format]
    if head:
        blocks = np.ascontiguousarray(packed).reshape(rows, -1, head + size)
        numbers = blocks[..., :head].copy().view(np.float16).astype(np.float32)
        elements = blocks[..., head:].reshape(rows, -1)
        if weight.format == "q8_0":
            q = elements.view(np.int8).astype(np.float32)
        else:
            q = _unpack_int4(elements).astype(np.float32) - np.float32(8 if weight.format == "q4_0" else 0)
        values = q.reshape(rows, -1, BLOCK) * numbers[..., :1]
        return (values + numbers[..., 1:] if head == 4 else values).reshape(rows, columns)
    q = (_unpack_int4(packed) if weight.format == "int4" else packed).astype(np.float32)
    scales = _numpy(weight.scales).astype(np.float32)
    zeros = np.float32(8 if weight.format == "int4" else 0)
    if weight.zeros is not None:
        zeros = _numpy(weight.zeros).astype(np.float32)[..., None]
    return ((q.reshape(rows, scales.shape[1], -1) - zeros) * scales[..., None]).reshape(rows, columns)


def dequantize_tensor(weight: Any, scales: Any, zeros: Any, format: str, dtype: Any) -> Any:
    """`dequantize` for torch tensors, on their device: a tensor of `dtype`, rounded once.

    >>> import torch
    >>> from flashkernel.quantized import dequantize_tensor
    >>> packed = torch.full((1, 16), 0x9A, dtype=torch.uint8)
    >>> dequantize_tensor(packed, torch.ones(1, 1), None, "int4", torch.float16)[0, [0, 16]].tolist()
    [2.0, 1.0]
    """
    import torch

    rows, (head, size) = weight.shape[0], FORMATS[format]
    if weight.dim() == 3:
        groups, count, _ = weight.shape
        parts = [
            weight[..., begin * TILE_ROWS : end * TILE_ROWS].reshape(groups, count, -1, TILE_ROWS, unit)
            for begin, end, unit in ((0, head, 2), (head, head + size, 4))
        ]
        joined = [part.transpose(2, 3).reshape(groups, count, TILE_ROWS, -1) for part in parts]
        rows = groups * TILE_ROWS
        weight = torch.cat(joined, -1).transpose(1, 2).reshape(rows, -1)
    blocks = weight if format == "int8" else weight.reshape(rows, -1, head + size)
    elements = blocks[..., head:].contiguous()
    if size == BLOCK:
        q = elements.view(torch.int8).float()
    else:
        q = torch.cat([elements & 15, elements >> 4], -1).float()
    zero = 8.0 if format in ("int4", "q4_0") else 0.0
    if head:
        own = blocks[..., :head].contiguous().view(torch.float16).float()
        values = (q - zero) * own[..., :1]
        values = values + own[..., 1:] if head == 4 else values
    else:
        values = q.reshape(rows, scales.shape[1], -1) - (zero if zeros is None else zeros.float()[..., None])
        values = values * scales.float()[..., None]
    return values.reshape(rows, -1).to(dtype)


def fp8_numbers() -> np.ndarray:
    """What each byte of float8_e4m3fn stands for, float32 [256]."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, (bits & 7).astype(np.float32)
    size = np.where(exponent > 0, np.ldexp(8 + mantissa, exponent - 10), np.ldexp(mantissa, -9))
    return np.where(bits & 127 == 127, np.nan, np.where(bits & 128, -size, size)).astype(np.float32)


def as_bytes(array: Any) -> Any:
    """The memory of an array of NumPy or torch as uint8; its last dim is contiguous."""
    if isinstance(array, np.ndarray):
        return array.view(np.uint8)
    import torch

    return array.view(torch.uint8)


def latent_numbers(rows: Any, rank: int) -> Any:
    """The numbers of rows that `latent_append` wrote with their own scales, float32 [rows, columns].

    rows: their bytes, uint8 [rows, rank + 4 * groups + 2 * turned], of NumPy or torch; rank: columns of latents.
    """
    key_at = rank + 4 * -(-rank // 128)
    if isinstance(rows, np.ndarray):
        scales = np.ascontiguousarray(rows[:, rank:key_at]).view(np.float32)
        key = np.ascontiguousarray(rows[:, key_at:]).view(np.uint16).astype(np.uint32) << 16
        latent = fp8_numbers()[rows[:, :rank]] * np.repeat(scales, 128, axis=1)[:, :rank]
        return np.concatenate([latent, key.view(np.float32)], axis=1)
    import torch

    scales = rows[:, rank:key_at].contiguous().view(torch.float32)
    key = rows[:, key_at:].contiguous().view(torch.bfloat16)
    latent = rows[:, :rank].view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, 1)[:, :rank]
    return torch.cat([latent, key.float()], 1)


def from_fp8(weight: Any, scales: Any) -> np.ndarray:
    """The numbers of float8_e4m3fn [..., rows, columns] with a scale for each 128 x 128, float32.

    weight: its bits in uint8, or a torch tensor of float8_e4m3fn; scales: [..., rows / 128, columns / 128], rounded up.

    >>> import numpy as np
    >>> from flashkernel.quantized import from_fp8
    >>> from_fp8(np.full((1, 2), 0x38, np.uint8), np.full((1, 1), 0.5, np.float32)).tolist()
    [[0.5, 0.5]]
    """
    if not isinstance(weight, np.ndarray):
        import torch

        weight = weight.view(torch.uint8).cpu().numpy()
    rows, columns = weight.shape[-2:]
    wide = np.repeat(np.repeat(_numpy(scales).astype(np.float32), FP8_BLOCK, -2), FP8_BLOCK, -1)
    return fp8_numbers()[weight] * wide[..., :rows, :columns]


def _nibbles(words: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """int32 [n, m] as numbers of 4 bits, uint8 [n, m, 8]: number i in the bits from 4 * order[i] on."""
    shifts = np.array(order, np.uint32) * np.uint32(4)
    return ((np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts) & 15).astype(np.uint8)


def _of_groups(scales: np.ndarray, zeros: np.ndarray, q: np.ndarray, name: str) -> QuantizedWeight:
    """q [in, out], scales and zeros [groups, out]."""
    columns, groups = q.shape[0], scales.shape[0]
    if columns % groups or columns // groups % BLOCK:
        raise ValueError(f"{name}: {groups} groups of {columns} inputs; groups of a multiple of 32 are needed")
    kind = scales.dtype
    return QuantizedWeight(
        _pack_int4(np.ascontiguousarray(q.T)),
        np.ascontiguousarray(scales.T),
        np.ascontiguousarray(zeros.T).astype(kind),
        "int4",
    )


def from_gptq(qweight: Any, qzeros: Any, scales: Any, g_idx: Any = None, *, zero_offset: int = 1) -> QuantizedWeight:
    """A linear layer of GPTQ in 4 bits.

    qweight: int32 [in / 8, out]; qzeros: int32 [groups, out / 8]; scales: float16 [groups, out]; g_idx: int32 [in], the
    group of each input, or None. zero_offset: what AutoGPTQ's format takes off a zero before it packs it; 0 for
    "gptq_v2".

    Raises ValueError for groups that do not lie side by side (act-order).

    >>> import numpy as np
    >>> from flashkernel.quantized import from_gptq
    >>> ones = np.full((4, 8), 0x11111111, np.int32)
    >>> from_gptq(ones, ones[:1, :1], np.ones((1, 8), np.float16)).shape
    (8, 32)
    """
    words, packed, scale = _numpy(qweight), _numpy(qzeros), _numpy(scales)
    q = _nibbles(words.T).reshape(words.shape[1], -1).T
    zeros = (_nibbles(packed).reshape(packed.shape[0], -1) + np.uint8(zero_offset)) & np.uint8(0x1F)
    if g_idx is not None:
        given, size = _numpy(g_idx), q.shape[0] // scale.shape[0]
        if not np.array_equal(given, np.arange(q.shape[0]) // size):
            raise ValueError("from_gptq: g_idx is not [0, 0, ..., 1, 1, ...]; a checkpoint without act-order is needed")
    return _of_groups(scale, zeros, q, "from_gptq")


def from_awq(qweight: Any, qzeros: Any, scales: Any) -> QuantizedWeight:
    """A linear layer of AWQ in 4 bits ("gemm" version).

    qweight: int32 [in, out / 8]; qzeros: int32 [groups, out / 8]; scales: float16 [groups, out].

    >>> import numpy as np
    >>> from flashkernel.quantized import from_awq
    >>> ones = np.full((32, 1), 0x11111111, np.int32)
    >>> from_awq(ones, ones[:1], np.ones((1, 8), np.float16)).shape
    (8, 32)
    """
    words, packed, scale = _numpy(qweight), _numpy(qzeros), _numpy(scales)
    q = _nibbles(words, _AWQ_ORDER).reshape(words.shape[0], -1)
    zeros = _nibbles(packed, _AWQ_ORDER).reshape(packed.shape[0], -1)
    return _of_groups(scale, zeros, q, "from_awq")


def hadamard(x: Any, signs: Any = None) -> Any:
    """x turned along its last dim by a Hadamard matrix, so that no element of a row is much larger than the others.

    Queries and keys that are turned alike have the same products, and are rounded to 8 bits with less error where a few
    of their columns are large (`attention_fp8`).

    x: [..., n] NumPy array or torch tensor; n is a power of two.
    signs: [n] of 1 and -1, multiplied with x first; None: all 1.

    Returns x * signs @ H / sqrt(n), of x's kind and dtype, by the framework's own product. Raises ValueError for
    another n.

    Source: Shah et al., FlashAttention-3 (2024), section 3.3; Tseng et al., QuIP# (2024).

    >>> import numpy as np
    >>> from flashkernel.quantized import hadamard
    >>> hadamard(np.array([0.0, 4.0, 0.0, 0.0])).tolist()
    [2.0, -2.0, 2.0, -2.0]
    """
    n = x.shape[-1]
    if n < 1 or n & (n - 1):
        raise ValueError(f"hadamard: x.shape[-1]={n}; must be a power of two")
    signed = x if signs is None else x * signs
    i = np.arange(n)
    ones = np.array([bin(j).count("1") for j in range(n)])
    matrix = (1.0 - 2.0 * (ones[i[:, None] & i] % 2)) / np.sqrt(n)
    if isinstance(x, np.ndarray):
        return signed @ matrix.astype(x.dtype)
    import torch

    return signed @ torch.from_numpy(matrix).to(x.device, x.dtype)
