"""GGUF's tensor types: how a block of each lies in a file, and its values in float32.

Called by gguf_file.py. The layouts and the formulas are those of ggml (ggml-common.h, ggml-quants.c); the values equal
those of the package gguf bit for bit. A block is 32 or 256 neighbours of a row with a scale d, some with a minimum m
and, in the K types, with scales of sub-blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["TYPES", "BlockType", "to_float32"]

_PIECE = 1 << 20  # elements at a time: what lies between a block and its values then fits a cache


@dataclass(frozen=True)
class BlockType:
    name: str
    elements: int  # of a block
    layout: np.dtype[Any]  # of a block; its itemsize is the bytes of the file
    values: Callable[[np.ndarray], np.ndarray]  # blocks [n] to float32 [n, elements]


def _f32(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)


def _scale(blocks: np.ndarray, field: str) -> np.ndarray:
    return _f32(blocks[field])[:, None]


def _bfloat16(blocks: np.ndarray) -> np.ndarray:
    return (blocks.astype(np.uint32) << 16).view(np.float32)[:, None]


def _halves(packed: np.ndarray) -> np.ndarray:
    """Bytes [n, k] as 4-bit numbers [n, 2 * k]: the low halves of all, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(words: np.ndarray) -> np.ndarray:
    """Words of 32 bits [n] as [n, 32]: 16 where a bit is set."""
    return (((words[:, None] >> np.arange(32, dtype=np.uint32)) & 1) << 4).astype(np.uint8)


def _q4_0(b: np.ndarray) -> np.ndarray:
    return _scale(b, "d") * (_halves(b["qs"]).astype(np.int8) - np.int8(8))


def _q4_1(b: np.ndarray) -> np.ndarray:
    return _scale(b, "d") * _halves(b["qs"]) + _scale(b, "m")


def _q5_0(b: np.ndarray) -> np.ndarray:
    return _scale(b, "d") * ((_halves(b["qs"]) | _fifth_bits(b["qh"])).astype(np.int8) - np.int8(16))


def _q5_1(b: np.ndarray) -> np.ndarray:
    return _scale(b, "d") * (_halves(b["qs"]) | _fifth_bits(b["qh"])) + _scale(b, "m")


def _q8_0(b: np.ndarray) -> np.ndarray:
    return _scale(b, "d") * b["qs"]


def _sub_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 12 bytes of a K block as 8 scales and 8 minima of 6 bits, uint8 [n, 8] each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return scales, minima


def _sub_blocks(b: np.ndarray, quants: np.ndarray) -> np.ndarray:
    """quants [n, 8, 32] times the scale of their sub-block, less its minimum."""
    scales, minima = _sub_scales(b["scales"])
    scaled = (_scale(b, "d") * scales)[..., None] * quants
    return (scaled - (_scale(b, "dmin") * minima)[..., None]).reshape(len(b), 256)


def _k_halves(packed: np.ndarray) -> np.ndarray:
    """128 bytes as 8 sub-blocks of 32: each run of 32 bytes holds one in its low halves, the next in its high ones."""
    runs = packed.reshape(-1, 4, 32)
    return np.stack([runs & 15, runs >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(b: np.ndarray) -> np.ndarray:
    return _sub_blocks(b, _k_halves(b["qs"]))


def _q5_k(b: np.ndarray) -> np.ndarray:
    fifth = ((b["qh"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1) << 4
    return _sub_blocks(b, _k_halves(b["qs"]) | fifth)


def _q6_k(b: np.ndarray) -> np.ndarray:
    low = b["ql"].reshape(-1, 2, 2, 32)  # half of the block, run
    low = np.concatenate([low & 15, low >> 4], axis=2)
    high = (b["qh"].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    quants = ((low | (high << 4)).astype(np.int8) - np.int8(32)).reshape(-1, 16, 16)
    return ((_scale(b, "d") * b["scales"])[..., None] * quants).reshape(len(b), 256)


def _plain(name: str, dtype: str, values: Callable[[np.ndarray], np.ndarray]) -> BlockType:
    return BlockType(name, 1, np.dtype(dtype), values)


def _block(name: str, elements: int, fields: list[Any], values: Callable[[np.ndarray], np.ndarray]) -> BlockType:
    return BlockType(name, elements, np.dtype(fields), values)


_D, _M, _QS = ("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)
_SUB = [_D, ("dmin", "<f2"), ("scales", "u1", 12)]

# By ggml's number of the type.
TYPES: dict[int, BlockType] = {
    0: _plain("F32", "<f4", lambda b: _f32(b)[:, None]),
    1: _plain("F16", "<f2", lambda b: _f32(b)[:, None]),
    30: _plain("BF16", "<u2", _bfloat16),
    2: _block("Q4_0", 32, [_D, _QS], _q4_0),
    3: _block("Q4_1", 32, [_D, _M, _QS], _q4_1),
    6: _block("Q5_0", 32, [_D, ("qh", "<u4"), _QS], _q5_0),
    7: _block("Q5_1", 32, [_D, _M, ("qh", "<u4"), _QS], _q5_1),
    8: _block("Q8_0", 32, [_D, ("qs", "i1", 32)], _q8_0),
    12: _block("Q4_K", 256, [*_SUB, ("qs", "u1", 128)], _q4_k),
    13: _block("Q5_K", 256, [*_SUB, ("qh", "u1", 32), ("qs", "u1", 128)], _q5_k),
    14: _block("Q6_K", 256, [("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), _D], _q6_k),
}


def to_float32(blocks: np.ndarray, kind: BlockType) -> np.ndarray:
    """Blocks [n] of a type as float32 [n * elements], in memory of its own."""
    out = np.empty((len(blocks), kind.elements), np.float32)
    step = _PIECE // kind.elements
    for i in range(0, len(blocks), step):
        out[i : i + step] = kind.values(blocks[i : i + step])
    return out.reshape(-1)
