"""A check of every kernel on this machine in about a second: small random inputs against `flashkernel.reference`.

`SAMPLES` has one call of an op, by the op's name: doctor checks its kernels with it, `flashkernel bench kernels` times
them on it where the op has no row of its own, and tests of what holds for all ops call it. `CASES` has what else doctor
checks, by the op as kernel ids name it.

Called by `flashkernel doctor`. Each kernel is forced in turn, must accept at least one case of its op and must keep the
rule of `flashkernel.testing`. This finds a broken build, driver or processor feature; the real tests are
kernel_conformance and tests_py.
"""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

import flashkernel as fk

from . import reference, testing
from .ops import OPS
from .quantized import QuantizedWeight, tiled
from .reference.ops import float8_numbers
from .selfcheck_inputs import Inputs
from .selfcheck_steps import attention_blocks, attention_paged_int4, decode_step
from .typing import KvAppendRope

__all__ = ["SAMPLES", "CheckResult", "Inputs", "Sample", "check_kernel", "check_kernels", "samples_of"]

DTYPES = tuple(testing.CAP)


@dataclass(frozen=True)
class CheckResult:
    kernel: str
    passed: bool
    detail: str
    seconds: float


# A case gives pairs of (result, expected in float64), or a call that the oracle can answer.
_Pairs = list[tuple[Any, np.ndarray]]

GRADIENT_SCALE = 4.0  # of attention's gradients, whose terms are larger than their sums (testing.assert_close)


@dataclass(frozen=True)
class Sample:
    """A call of an op whose namesake in the oracle takes the same arguments."""

    op: str
    arguments: tuple[tuple[Any, np.ndarray], ...]  # by position: (array for the op, its values in float64)
    options: dict[str, Any] = field(
        default_factory=dict
    )  # for both; the oracle returns all of its results, whatever return_... says
    only: tuple[int, ...] = (0,)  # which of the oracle's results the op returns
    floats: bool = True  # the op takes `dtype`, which says what arrays of 16-bit integers are

    def run(self, inputs: Inputs) -> Any:
        options = {**self.options, **(inputs.options if self.floats else {})}
        return getattr(fk, self.op)(*(x[0] for x in self.arguments), **options)

    def pairs(self, inputs: Inputs) -> _Pairs:
        options = {name: value for name, value in self.options.items() if not name.startswith("return_")}
        truth = _tuple(getattr(reference, self.op)(*(x[1] for x in self.arguments), **options))
        return list(zip(_tuple(self.run(inputs)), [truth[i] for i in self.only], strict=True))


_Case = Callable[[Inputs], _Pairs]


def _tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def _both(inputs: Inputs, op: str, *arguments: Any, only: tuple[int, ...] = (0,), **options: Any) -> _Pairs:
    return Sample(op, arguments, options, only).pairs(inputs)


def _indices(inputs: Inputs, values: Any) -> tuple[Any, np.ndarray]:
    return inputs.index(values), np.asarray(values)


def _float32(inputs: Inputs, values: np.ndarray) -> tuple[Any, np.ndarray]:
    return inputs.float32(values), values


def _attention(inputs: Inputs, seq_q: int, seq_k: int, dim: int) -> _Pairs:
    qkv = inputs.randn(1, 4, seq_q, dim), inputs.randn(1, 2, seq_k, dim), inputs.randn(1, 2, seq_k, dim)
    return _both(inputs, "attention", *qkv, causal=True, return_lse=True, only=(0, 1))


def _attention_bias(inputs: Inputs) -> _Pairs:
    """Rows of the bias are whole vectors, for kernels that copy tiles of it."""
    dim = inputs.head_dim
    qkv = inputs.randn(1, 4, 33, dim), inputs.randn(1, 2, 72, dim), inputs.randn(1, 2, 72, dim)
    bias, bias64 = inputs.randn(1, 4, 33, 72)
    out = fk.attention(*(x[0] for x in qkv), bias=bias, **inputs.options)
    return [(out, reference.attention(*(x[1] for x in qkv), bias=bias64)[0])]


def _attention_paged(inputs: Inputs) -> _Pairs:
    q, k, v = inputs.randn(1, 4, 1, 64), inputs.randn(4, 16, 2, 64), inputs.randn(4, 16, 2, 64)
    return _both(inputs, "attention_paged", q, k, v, _indices(inputs, [[2, 0, 3]]), _indices(inputs, [37]))


def _attention_paged_int8(inputs: Inputs) -> _Pairs:
    """Pages of 8-bit integers with a scale a head."""
    (q, q64), dim = inputs.randn(1, 4, 1, inputs.head_dim), inputs.head_dim
    (k, k64), (v, v64) = inputs.int8(4, 16, 2, dim), inputs.int8(4, 16, 2, dim)
    scales, table, lengths = np.array([0.01, 0.02]), np.array([[2, 0, 3]]), np.array([37])
    kv_scales = inputs.float32(scales), inputs.float32(scales)
    index = inputs.index(table), inputs.index(lengths)
    out = fk.attention_paged(q, k, v, *index, kv_scales=kv_scales, **inputs.options)
    k64, v64 = k64 * scales[:, None], v64 * scales[:, None]
    return [(out, reference.attention_paged(q64, k64, v64, table, lengths)[0])]


def _attention_mla_decode(inputs: Inputs, seq_q: int = 2) -> Sample:
    """DeepSeek's latent rows."""
    arguments = (
        inputs.randn(1, 16, seq_q, 576),
        inputs.randn(4, 16, 576),
        _indices(inputs, [[2, 0, 3]]),
        _indices(inputs, [37]),
    )
    return Sample("attention_mla_decode", arguments, {"scale": 0.0722, "causal": seq_q > 1})


def _latent_rows(inputs: Inputs) -> tuple[Any, Any, Any, np.ndarray]:
    """(latent, key, slots, bytes of empty pages) of 37 tokens: some are not there."""
    slots = _indices(inputs, np.where(np.arange(37) % 5 == 3, -1, 63 - np.arange(37)))
    return inputs.randn(37, 512), inputs.randn(37, 64), slots, np.zeros((4, 16, 656), np.uint8)


def _latent_append(inputs: Inputs, one_scale: bool = False) -> _Pairs:
    latent, key, slots, pages = _latent_rows(inputs)
    pages = pages[..., :576].copy() if one_scale else pages
    scale = 0.01 if one_scale else None
    written = inputs.float8(pages) if one_scale else inputs.bytes(pages)
    fk.latent_append(latent[0], key[0], written, slots[0], latent_scale=scale, **inputs.options)
    truth = reference.latent_append(latent[1], key[1], pages, slots[1], latent_scale=scale)
    if one_scale:
        numbers = float8_numbers(written) if isinstance(written, np.ndarray) else inputs.get(written)
        return [(inputs.float32(numbers), float8_numbers(truth))]
    return [(inputs.float32(inputs.get(written)), truth.astype(np.float64))]


def _attention_mla_narrow(inputs: Inputs, one_scale: bool = False) -> _Pairs:
    """Rows of 8 bits: each is a query's key once."""
    latent, key, _, pages = _latent_rows(inputs)
    pages = pages[..., :576].copy() if one_scale else pages
    scale = 0.01 if one_scale else None
    pages = reference.latent_append(latent[1], key[1], pages, np.arange(37), latent_scale=scale)
    numbers = reference.latent_numbers(pages, 576, 512, scale)
    narrow = inputs.float8(pages) if one_scale else inputs.bytes(pages)
    (q, q64), table, lengths = inputs.randn(1, 16, 1, 576), np.array([[0, 1, 2]]), np.array([37])
    options: dict[str, Any] = {"scale": 0.0722}
    out = fk.attention_mla_decode(
        q, narrow, inputs.index(table), inputs.index(lengths), latent_scale=scale, **options, **inputs.options
    )
    rounded = inputs.get(inputs.rounded(numbers))
    return [(out, reference.attention_mla_decode(q64, rounded, table, lengths, **options)[0])]


def _attention_fp8(inputs: Inputs) -> _Pairs:
    """Scores are whole numbers times ln 2: weights are powers of two, and rounding them to e4m3 is exact."""
    if inputs.dtype == "float32":
        raise NotImplementedError("attention_fp8: its output has 16 bits")
    place = np.arange(2 * 33 * inputs.head_dim)
    q64 = np.where(place % 13 == 0, np.where(place % 2, 1.0, -1.0), 0.0)[: 2 * 9 * inputs.head_dim]
    k64 = np.where(place % 7 == 0, np.where(place % 4 < 2, 1.0, -1.0), 0.0)[: 33 * inputs.head_dim]
    v64 = (place * 5 % 17 - 8.0)[: 33 * inputs.head_dim] / 4
    q, k, v = (x.reshape(1, -1, n, inputs.head_dim) for x, n in ((q64, 9), (k64, 33), (v64, 33)))
    q8, k8, v8 = (inputs.bytes(_e4m3_bits(x)) for x in (q, k, v))
    options: dict[str, Any] = {"scale": float(np.log(2.0)), "causal": True}
    out = fk.attention_fp8(q8, k8, v8, 2.0, 0.5, 0.25, out_dtype=inputs.dtype, **options, **inputs.options)
    return [(out, reference.attention_fp8(q, k, v, 2.0, 0.5, 0.25, **options)[0])]


def _e4m3_bits(values: np.ndarray) -> np.ndarray:
    """Of numbers that e4m3 has: 0, or 2^-6 and more."""
    mantissa, exponent = np.frexp(np.abs(values))
    bits = np.where(values == 0, 0, (exponent + 6) * 8 + np.rint(mantissa * 16).astype(np.int64) - 8)
    return (bits + np.where(values < 0, 128, 0)).astype(np.uint8)


def _attention_bwd(inputs: Inputs) -> _Pairs:
    (q, q64), (k, k64), (v, v64), (g, g64) = (inputs.randn(1, 2, 33, inputs.head_dim) for _ in range(4))
    out, lse = reference.attention(q64, k64, v64, causal=True)
    grads = fk.attention_backward(g, q, k, v, inputs.rounded(out), inputs.float32(lse), causal=True, **inputs.options)
    truth = reference.attention_backward(g64, q64, k64, v64, causal=True)
    return [(grad, np.asarray(truth[name])) for grad, name in zip(grads, "qkv", strict=True)]


def _linear(inputs: Inputs, rows: int = 9, features: int = 64) -> _Pairs:
    x, w, b = inputs.randn(rows, features), inputs.randn(48, features), inputs.randn(48)
    return _both(inputs, "linear", x, w, b, activation="gelu_tanh")


def _linear_transposed(inputs: Inputs) -> _Pairs:
    x, (w, w64) = inputs.randn(9, 64), inputs.randn(64, 48)
    return _both(inputs, "linear", x, (w.T, w64.T))


def _reduce_scattered(inputs: Inputs) -> _Pairs:
    """Over axes that do not lie side by side."""
    return _both(inputs, "reduce_sum", inputs.randn(5, 7, 33), axis=(0, 2))


_WHOLE_VECTORS = (7, 64)
_LONG_ROWS = (2, 40000)  # longer than a block of threads holds
_ROWS_OF_A_CLUSTER = (2, 81920), (2, 140000)  # over 256 KB in fp32, in 16 bits
_ROWS = _WHOLE_VECTORS, _LONG_ROWS, *_ROWS_OF_A_CLUSTER


def _softmax_fwd(inputs: Inputs, shape: tuple[int, int] = (7, 33)) -> _Pairs:
    x = inputs.randn(*shape)
    return _both(inputs, "softmax", x) + _both(inputs, "log_softmax", x)


def _softmax_bwd(inputs: Inputs, shape: tuple[int, int] = (7, 33)) -> _Pairs:
    g, y = inputs.randn(*shape), inputs.randn(*shape)
    return _both(inputs, "softmax_backward", g, y) + _both(inputs, "log_softmax_backward", g, y)


def _norm(inputs: Inputs, shape: tuple[int, int] = (7, 64)) -> _Pairs:
    x, (r, r64), w, b = inputs.randn(*shape), inputs.randn(*shape), inputs.randn(shape[1]), inputs.randn(shape[1])
    layer, hidden = fk.layer_norm(x[0], w[0], b[0], residual=r, **inputs.options)
    h = x[1] + r64
    return [(layer, reference.layer_norm(h, w[1], b[1])[0]), (hidden, h), *_both(inputs, "rms_norm", x, w)]


def _norm_quantized(inputs: Inputs, shape: tuple[int, int] = (7, 64)) -> _Pairs:
    """What the elements stand for, which may be half of an int8 step off."""
    x, w = inputs.randn(*shape), inputs.randn(shape[1])
    elements, scales = fk.rms_norm_quantized(x[0], w[0], out_dtype="int8", **inputs.options)
    truth, true_scales = reference.rms_norm_quantized(x[1], w[1], out_dtype="int8")
    off = np.abs(inputs.get(elements) - truth)
    return [(scales, true_scales), (inputs.float32(np.maximum(off, 1)), np.ones_like(truth))]


def _norm_bwd(inputs: Inputs, features: int = 64) -> _Pairs:
    g, x, w = inputs.randn(7, features), inputs.randn(7, features), inputs.randn(features)
    _, mean, rstd = (_float32(inputs, value) for value in reference.layer_norm(x[1]))
    pairs = _both(inputs, "layer_norm_backward", g, x, w, mean, rstd, only=(0, 1, 2))
    rstd = _float32(inputs, reference.rms_norm(x[1])[1])
    return pairs + _both(inputs, "rms_norm_backward", g, x, w, rstd, only=(0, 1))


def _cross_entropy(inputs: Inputs) -> _Pairs:
    x, targets = inputs.randn(7, 33), _indices(inputs, np.arange(7) * 4)
    return _both(inputs, "cross_entropy", x, targets, reduction="none", return_lse=True, only=(0, 1))


def _cross_entropy_bwd(inputs: Inputs) -> _Pairs:
    (x, x64), targets, ones = inputs.randn(7, 33), np.arange(7) * 4, np.ones(7)
    lse = reference.cross_entropy(x64, targets, reduction="none")[1]
    arguments = inputs.float32(ones), x, inputs.index(targets), inputs.float32(lse)
    grad = fk.cross_entropy_backward(*arguments, reduction="none", **inputs.options)
    return [(grad, reference.cross_entropy_backward(ones, x64, targets, reduction="none"))]


def _linear_loss(inputs: Inputs) -> list[tuple[Any, np.ndarray]]:
    """x, weight, targets and bias; values of weight small enough for logits of about unit variance."""
    weight = inputs.randn(70, 64)[1] / 8
    bits = inputs.rounded(weight)
    return [inputs.randn(7, 64), (bits, inputs.get(bits)), _indices(inputs, np.arange(7) * 11), inputs.randn(70)]


def _linear_cross_entropy(inputs: Inputs) -> _Pairs:
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0, "return_z_loss": True, "return_lse": True}
    return _both(inputs, "linear_cross_entropy", *_linear_loss(inputs), only=(0, 1, 2), **options)


def _linear_selected_log_prob(inputs: Inputs) -> _Pairs:
    options = {"temperature": 1.5, "return_lse": True}
    return _both(inputs, "linear_selected_log_prob", *_linear_loss(inputs), only=(0, 1), **options)


def _linear_cross_entropy_bwd(inputs: Inputs) -> _Pairs:
    x, weight, targets, bias = _linear_loss(inputs)
    lse = reference.linear_selected_log_prob(x[1], weight[1], targets[1], bias[1])[1]
    arguments = _float32(inputs, np.ones(7)), x, weight, targets, _float32(inputs, lse), bias
    return [
        *_both(inputs, "linear_cross_entropy_backward", *arguments, only=(0, 1, 2), reduction="none", z_loss=0.01),
        *_both(inputs, "linear_selected_log_prob_backward", *arguments, only=(0, 1, 2)),
    ]


def _kv_append(inputs: Inputs) -> _Pairs:
    (k, k64), (v, v64) = inputs.randn(3, 2, 64), inputs.randn(3, 2, 64)
    (kp, kp64), (vp, vp64) = inputs.randn(2, 16, 2, 64), inputs.randn(2, 16, 2, 64)
    slots = [20, -1, 3]
    fk.kv_append(k, v, kp, vp, inputs.index(slots), **inputs.options)
    return list(zip((kp, vp), reference.kv_append(k64, v64, kp64, vp64, slots), strict=True))


def _qkv_append(inputs: Inputs, tokens: int = 3, rope: bool = True) -> _Pairs:
    """A step's queries, keys and values, turned or not; one slot is skipped."""
    (x, x64), (w, w64), (g, g64) = inputs.randn(tokens, 64), inputs.randn(8 * 32, 64), inputs.randn(64)
    (kp, kp64), (vp, vp64) = inputs.randn(2, 16, 2, 32), inputs.randn(2, 16, 2, 32)
    slots, at = [20, -1, 3, 8][:tokens], [5, 0, 77, 3][:tokens]
    turned: KvAppendRope | None = {"positions": inputs.index(at)} if rope else None
    q = fk.qkv_append(x, w, kp, vp, inputs.index(slots), None, g, rope=turned, **inputs.options)
    truth = reference.qkv_append(
        x64, w64, kp64, vp64, slots, None, g64, rope={"positions": np.array(at)} if rope else None
    )
    return list(zip((q, kp, vp), truth, strict=True))


def _kv_read(inputs: Inputs) -> _Pairs:
    pages = inputs.randn(3, 16, 2, 64), inputs.randn(3, 16, 2, 64)
    table, lengths = _indices(inputs, [[2, 0]]), _indices(inputs, [21])
    return _both(inputs, "kv_read", *pages, table, lengths, max_seq=21, only=(0, 1))


def _kv_copy_pages(inputs: Inputs) -> _Pairs:
    (kp, kp64), (vp, vp64) = inputs.randn(3, 16, 2, 64), inputs.randn(3, 16, 2, 64)
    fk.kv_copy_pages(kp, vp, inputs.index([2]), inputs.index([0]), **inputs.options)
    return list(zip((kp, vp), reference.kv_copy_pages(kp64, vp64, [2], [0]), strict=True))


def _find_bad_page(inputs: Inputs) -> _Pairs:
    table = inputs.index([[2, 0], [1, 7]])
    fk.check_block_table(table, inputs.index([21, 16]), 3, 16)
    try:
        fk.check_block_table(table, inputs.index([21, 17]), 3, 16)
        found = (-1, -1, -1)
    except fk.BlockTableError as error:
        found = (error.sequence, error.slot, error.page)
    return [(inputs.float32(np.array(found)), np.array([1.0, 1.0, 7.0]))]


def _matrices(op: str, count: int, **fields: Any) -> Callable[[Inputs], Sample]:
    """The sample of an op on matrices [rows, columns] of any size."""
    return lambda inputs: Sample(op, tuple(inputs.randn(*inputs.rows) for _ in range(count)), **fields)


def _merge_states(inputs: Inputs) -> Sample:
    lse_a, lse_b = np.linspace(-3, 3, 10).reshape(1, 2, 5), np.linspace(2, -2, 10).reshape(1, 2, 5)
    a, b = inputs.randn(1, 2, 5, 64), inputs.randn(1, 2, 5, 64)
    return Sample("merge_states", (a, _float32(inputs, lse_a), b, _float32(inputs, lse_b)), only=(0, 1))


def _pack_mask(inputs: Inputs) -> Sample:
    row, column = np.indices(inputs.rows)
    seen = (row + column) % 3 == 0
    return Sample("pack_mask", ((inputs.bytes(seen), seen),), floats=False)


def _linear_backward(inputs: Inputs) -> Sample:
    arguments = inputs.randn(9, 48), inputs.randn(9, 64), inputs.randn(48, 64)
    return Sample("linear_backward", arguments, only=(0, 1, 2))


def _quantized_linear(inputs: Inputs) -> Sample:
    """int4 with zeros, groups of 64."""
    packed = np.arange(48 * 64).reshape(48, 64) * 37 % 256
    scales, zeros = np.linspace(0.01, 0.03, 96).reshape(48, 2), np.arange(96).reshape(48, 2) % 16
    arguments = (
        inputs.randn(9, 128),
        (inputs.bytes(packed), packed),
        _float32(inputs, scales),
        _float32(inputs, zeros.astype(np.float64)),
    )
    return Sample("quantized_linear", arguments)


def _quantized_linear_tiles(inputs: Inputs) -> _Pairs:
    """q8_0 with the blocks of 16 rows side by side."""
    blocks = (np.arange(32 * 2 * 34).reshape(32, 2, 34) * 37 % 251).astype(np.uint8)
    blocks[..., :2] = np.linspace(0.01, 0.03, 64).astype(np.float16).reshape(32, 2, 1).view(np.uint8)
    tiles = tiled(QuantizedWeight(blocks.reshape(32, -1), None, None, "q8_0")).weight
    arguments = inputs.randn(16, 64), (inputs.bytes(tiles), tiles)
    return Sample("quantized_linear", arguments, {"format": "q8_0"}).pairs(inputs)


def _linear_fp8(inputs: Inputs, rows: int = 5, outputs: int = 192) -> Sample:
    """Small integers, whose sums are exact in the tensor cores of 9.0 too; blocks of 128 x 128, the last ones short."""
    whole = np.array([0x00, 0x38, 0x40, 0x44, 0x48, 0xB8, 0xC0, 0xC4, 0xC8], np.uint8)  # 0, 1 to 4, -1 to -4
    x = whole[np.arange(rows * 208).reshape(rows, 208) * 37 % 101 % 9]
    weight = whole[np.arange(outputs * 208).reshape(outputs, 208) * 41 % 103 % 9]
    arguments = (
        (inputs.float8(x), x),
        (inputs.float8(weight), weight),
        _float32(inputs, np.linspace(0.1, 0.2, rows * 2).reshape(rows, 2)),
        _float32(inputs, np.linspace(0.1, 0.3, -(-outputs // 128) * 2).reshape(-1, 2)),
    )
    return Sample("linear_fp8", arguments, {"out_dtype": inputs.dtype})


def _quantize_fp8_blocks(inputs: Inputs, features: int = 256) -> _Pairs:
    x = inputs.randn(7, features)
    elements, scales = fk.quantize_fp8_blocks(x[0], **inputs.options)
    truth, true_scales = reference.quantize_fp8_blocks(x[1])
    numbers = float8_numbers(elements) if isinstance(elements, np.ndarray) else inputs.get(elements)
    return [(scales, true_scales), (inputs.float32(numbers), truth)]


def _fused_linear(inputs: Inputs, rows: int = 1) -> Sample:
    """The first half of an MLP: norm, gate and up, SwiGLU."""
    arguments = inputs.randn(rows, 64), inputs.randn(96, 64), inputs.randn(96), inputs.randn(64)
    return Sample("fused_linear", arguments, {"activation": "swiglu"})


def _sample(inputs: Inputs) -> Sample:
    """Draws from the whole row, from the best five, and from 0.6 of the probability, in turns."""
    row = np.arange(inputs.rows[0])
    temperature, top_p = np.full(row.size, 0.75), np.where(row % 3 == 2, 0.625, 1.0)
    top_k = _indices(inputs, np.where(row % 3 == 1, 5, 0))
    arguments = inputs.randn(*inputs.rows), _float32(inputs, temperature), top_k, _float32(inputs, top_p)
    return Sample("sample", arguments)


SAMPLES: dict[str, Callable[[Inputs], Sample]] = {
    "add": _matrices("add", 2),
    "argmax": _matrices("argmax", 1, options={"axis": -1}),
    "attention_mla_decode": _attention_mla_decode,
    "fused_linear": _fused_linear,
    "linear_backward": _linear_backward,
    "linear_fp8": _linear_fp8,
    "merge_states": _merge_states,
    "pack_mask": _pack_mask,
    "quantized_linear": _quantized_linear,
    "reduce_max": _matrices("reduce_max", 1, options={"axis": -1}),
    "reduce_mean": _matrices("reduce_mean", 1),
    "reduce_sum": _matrices("reduce_sum", 1, options={"axis": -1}),
    "sample": _sample,
    "rope": lambda inputs: Sample("rope", (inputs.randn(1, 3, 9, 64),)),
    "swiglu": _matrices("swiglu", 2),
    "swiglu_backward": _matrices("swiglu_backward", 3, only=(0, 1)),
}


def samples_of(op: str) -> list[Callable[[Inputs], Sample]]:
    """The samples of an op as kernel ids name it."""
    return [SAMPLES[name] for name, kernel_op in OPS.items() if kernel_op == op and name in SAMPLES]


CASES: dict[str, list[_Case]] = {
    "attention_fwd": [
        lambda inputs: _attention(inputs, 33, 65, inputs.head_dim),
        lambda inputs: _attention(inputs, 1, 65, inputs.head_dim),
        lambda inputs: _attention(inputs, 20, 40, 128),
        _attention_bias,
        _attention_paged,
        _attention_paged_int8,
        attention_paged_int4,
        partial(attention_paged_int4, seq_q=33),
        attention_blocks,
    ],
    "attention_bwd": [_attention_bwd],
    "attention_fp8": [_attention_fp8],
    "attention_mla_decode": [
        lambda inputs: _attention_mla_decode(inputs, 1).pairs(inputs),
        _attention_mla_narrow,
        partial(_attention_mla_narrow, one_scale=True),
    ],
    "latent_append": [_latent_append, partial(_latent_append, one_scale=True)],
    "linear": [
        _linear,
        lambda inputs: _linear(inputs, 2),  # kernels for few rows
        lambda inputs: _linear(inputs, 96),
        lambda inputs: _linear(inputs, 2, 2048),  # of which a part is long enough for a stream, or to be shared
        lambda inputs: _linear(inputs, 96, 2048),
        _linear_transposed,
    ],
    "linear_fp8": [lambda inputs: _linear_fp8(inputs, 150).pairs(inputs)],
    "quantize_fp8_blocks": [_quantize_fp8_blocks, lambda inputs: _quantize_fp8_blocks(inputs, 150)],
    "fused_linear": [lambda inputs: _fused_linear(inputs, 4).pairs(inputs)],
    "quantized_linear": [_quantized_linear_tiles],
    "reduce": [_reduce_scattered],
    "softmax": [_softmax_fwd, *(partial(_softmax_fwd, shape=shape) for shape in _ROWS)],
    "softmax_bwd": [_softmax_bwd, *(partial(_softmax_bwd, shape=shape) for shape in _ROWS)],
    "norm": [
        *(partial(_norm, shape=shape) for shape in _ROWS),
        *(partial(_norm_quantized, shape=shape) for shape in (_WHOLE_VECTORS, _LONG_ROWS)),
    ],
    "norm_bwd": [_norm_bwd, partial(_norm_bwd, features=1024)],
    "cross_entropy": [_cross_entropy],
    "cross_entropy_bwd": [_cross_entropy_bwd],
    "linear_cross_entropy": [_linear_cross_entropy, _linear_selected_log_prob],
    "linear_cross_entropy_bwd": [_linear_cross_entropy_bwd],
    "kv_append": [_kv_append],
    "qkv_append": [_qkv_append, lambda inputs: _qkv_append(inputs, 1, rope=False)],
    "kv_read": [_kv_read],
    "kv_copy_pages": [_kv_copy_pages],
    "find_bad_page": [_find_bad_page],
    "decode_step": [decode_step],
}


def _cases(op: str) -> list[_Case]:
    def pairs(sample: Callable[[Inputs], Sample], inputs: Inputs) -> _Pairs:
        return sample(inputs).pairs(inputs)

    return [*(partial(pairs, sample) for sample in samples_of(op)), *CASES.get(op, [])]


def _error(inputs: Inputs, pairs: _Pairs, dtype: str, scale: float | None = None) -> float:
    """Largest difference, relative to the largest expected value (at least 1). Raises AssertionError by the rule."""
    worst = 0.0
    for result, expected in pairs:
        got = inputs.get(result)
        testing.assert_close(got, expected, dtype, scale=scale)
        worst = max(worst, testing.max_error(got, expected) / max(1.0, float(np.abs(expected).max(initial=0.0))))
    return worst


def _calls(kernel_id: str) -> int:
    return next(int(kernel.calls) for kernel in fk.kernels() if kernel.id == kernel_id)


def head_dim_of(kernel_id: str) -> int:
    """The head_dim that an instance is for, of any that a kernel for all of them takes.

    >>> head_dim_of("attention_fwd/cuda/sm90a/decode/f16/d128/group"), head_dim_of("linear/cpu/scalar")
    (128, 64)
    """
    found = re.search(r"/d(\d+)(/|$)", kernel_id)
    return int(found[1]) if found else 64


def check_kernel(kernel: Any) -> CheckResult:
    """Runs one available kernel on the cases of its op that it accepts, in each dtype."""
    begin = time.perf_counter()

    def result(passed: bool, detail: str) -> CheckResult:
        return CheckResult(kernel.id, passed, detail, time.perf_counter() - begin)

    cases = _cases(kernel.op)
    if not cases:
        return result(False, f"no case for the op {kernel.op}")
    head_dim = head_dim_of(kernel.id)
    scale = GRADIENT_SCALE if kernel.op == "attention_bwd" else None
    ran: dict[str, float] = {}
    refusal = ""
    for dtype in DTYPES:
        for case in cases:
            inputs = Inputs(dtype, kernel.device, head_dim)
            try:
                before = _calls(kernel.id)
                with fk.force(kernel.id):
                    error = _error(inputs, case(inputs), dtype, scale)
            except NotImplementedError as refused:
                refusal = str(refused)
                continue
            except AssertionError as wrong:
                return result(False, f"{dtype}: {wrong}")
            except Exception as failure:  # a broken kernel may raise anything; doctor goes on with the next one
                return result(False, f"{dtype}: {type(failure).__name__}: {failure}")
            if _calls(kernel.id) == before:
                return result(False, f"{dtype}: forced, but another kernel ran")
            ran[dtype] = max(ran.get(dtype, 0.0), error)
    if not ran:
        return result(False, f"accepts no case: {refusal}")
    return result(True, ", ".join(f"{dtype} {error:.0e}" for dtype, error in ran.items()))


def unchecked() -> str | None:
    """Which of the kernels that this machine can run are not checked, and why; None: all are."""
    count = sum(kernel.available and kernel.device != "cpu" for kernel in fk.kernels())
    if count == 0 or importlib.util.find_spec("torch") is not None:
        return None
    return f"{count} kernels for GPUs are not checked: PyTorch, whose tensors the check takes there, is not installed."


def check_kernels() -> Iterator[CheckResult]:
    """Checks every kernel that this machine can run, those in `unchecked` apart."""
    on_cpu = unchecked() is not None
    for kernel in fk.kernels():
        if kernel.available and not (on_cpu and kernel.device != "cpu"):
            yield check_kernel(kernel)
