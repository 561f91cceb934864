"""Oracle of the ops around attention: RoPE, linear, elementwise ops, reductions, softmax, norms and the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flashkernel.reference._common import Float, f64
from flashkernel.reference.kv_ops import kv_append, kv_quantize

__all__ = [
    "activate",
    "add",
    "argmax",
    "cross_entropy",
    "cross_entropy_backward",
    "fused_linear",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_quantized",
    "linear",
    "linear_backward",
    "linear_fp8",
    "log_softmax",
    "log_softmax_backward",
    "qkv_append",
    "quantize_fp8_blocks",
    "quantized_linear",
    "reduce_max",
    "reduce_mean",
    "reduce_sum",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_quantized",
    "rope",
    "rope_table",
    "sample",
    "softmax",
    "softmax_backward",
    "swiglu",
    "swiglu_backward",
]


def _rotate(x: ArrayLike, cos: Float, sin: Float, interleaved: bool, inverse: bool) -> Float:
    """Rotates pairs of [batch, heads, seq, dim] by angles [batch or 1, seq, pairs]."""
    y = f64(x).copy()
    pairs = cos.shape[-1]
    a, b = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    c, s = cos[:, None], -sin[:, None] if inverse else sin[:, None]
    first, second = y[..., a].copy(), y[..., b].copy()
    y[..., a], y[..., b] = first * c - second * s, second * c + first * s
    return y


def _positions(q: ArrayLike, positions: ArrayLike | None) -> NDArray[np.int64]:
    return np.atleast_2d(np.arange(np.shape(q)[2]) if positions is None else np.asarray(positions, np.int64))


def rope(
    q: ArrayLike,
    k: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    *,
    theta: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    inv_freq: ArrayLike | None = None,
) -> tuple[Float, Float | None]:
    """(q, k) rotated by position * frequency."""
    dim = np.shape(q)[-1] if rotary_dim is None else rotary_dim
    frequency = theta ** (-np.arange(0, dim, 2) / max(dim, 1)) if inv_freq is None else f64(inv_freq)
    angle = _positions(q, positions)[..., None] * frequency
    cos, sin = np.cos(angle), np.sin(angle)
    rotated = None if k is None else _rotate(k, cos, sin, interleaved, inverse)
    return _rotate(q, cos, sin, interleaved, inverse), rotated


_rope = rope  # where an argument has its name


def rope_table(
    q: ArrayLike,
    k: ArrayLike | None,
    cos: ArrayLike,
    sin: ArrayLike,
    positions: ArrayLike | None = None,
    *,
    interleaved: bool = False,
    inverse: bool = False,
) -> tuple[Float, Float | None]:
    """(q, k) rotated by tables: [positions, pairs] looked up, or [batch or 1, seq, pairs] as they are."""
    c, s = f64(cos), f64(sin)
    if c.ndim == 2:
        at = _positions(q, positions)
        c, s = c[at], s[at]
    rotated = None if k is None else _rotate(k, c, s, interleaved, inverse)
    return _rotate(q, c, s, interleaved, inverse), rotated


def _erf(x: Float) -> Float:
    return np.vectorize(math.erf, otypes=[np.float64])(x) if x.size else x


def _sigmoid(x: Float) -> Float:
    return np.exp(-np.logaddexp(0.0, -x))


def activate(x: ArrayLike, activation: str | None) -> tuple[Float, Float]:
    """activation(x) and its derivative."""
    y = f64(x)
    if activation is None:
        return y, np.ones_like(y)
    if activation == "gelu":
        cdf = 0.5 * (1.0 + _erf(y / math.sqrt(2.0)))
        return y * cdf, cdf + y * np.exp(-0.5 * y * y) / math.sqrt(2.0 * math.pi)
    if activation == "gelu_tanh":
        c = math.sqrt(2.0 / math.pi)
        t = np.tanh(c * (y + 0.044715 * y**3))
        return 0.5 * y * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * y * (1.0 - t * t) * c * (1.0 + 3 * 0.044715 * y * y)
    if activation == "silu":
        s = _sigmoid(y)
        return y * s, s * (1.0 + y * (1.0 - s))
    raise ValueError(f"activation={activation!r}")


def linear(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, *, activation: str | None = None
) -> tuple[Float, Float]:
    """(out, preactivation) of activation(x weight^T + bias)."""
    pre = f64(x) @ f64(weight).T
    if bias is not None:
        pre = pre + f64(bias)
    return activate(pre, activation)[0], pre


def float8_numbers(x: ArrayLike) -> Float:
    """float8_e4m3fn as numbers: uint8 arrays hold their bits, others the numbers themselves."""
    bits = np.asarray(x)
    if bits.dtype != np.uint8:
        return f64(bits)
    exponent, mantissa = (bits >> 3 & 15).astype(np.int64), (bits & 7).astype(np.float64)
    size = np.where(exponent > 0, np.ldexp(8 + mantissa, exponent - 10), np.ldexp(mantissa, -9))
    return np.where(bits & 127 == 127, np.nan, np.where(bits & 128, -size, size))


def _per_element(scale: ArrayLike, shape: tuple[int, ...], block_rows: bool) -> Float:
    """A scale for each element; block_rows: rows of `scale` may be for 128 rows."""
    s = f64(scale)
    if s.size == 1:
        return np.broadcast_to(s.reshape(()), shape)
    if s.ndim < len(shape):
        s = s[..., None]
    if block_rows and s.shape[0] != shape[0]:
        s = np.repeat(s, 128, axis=0)[: shape[0]]
    if s.shape[-1] != 1:
        s = np.repeat(s, 128, axis=-1)[..., : shape[-1]]
    return np.broadcast_to(s, shape)


def linear_fp8(
    x: ArrayLike,
    weight: ArrayLike,
    x_scale: ArrayLike | None,
    weight_scale: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: str | None = None,
    out_dtype: Any = None,
) -> Float:
    """activation(x W^T + bias) of float8_e4m3fn; x of more bits (x_scale None) is rounded first. uint8 arrays are bits,
    others hold the numbers. out_dtype has no meaning here."""
    if x_scale is None:
        x, x_scale = quantize_fp8_blocks(x)
    q, w = float8_numbers(x), float8_numbers(weight)
    q, w = q * _per_element(x_scale, q.shape, False), w * _per_element(weight_scale, w.shape, True)
    return linear(q, w, bias, activation=activation)[0]


def quantize_fp8_blocks(x: ArrayLike) -> tuple[Float, Float]:
    """(elements, scales) of each 128 neighbours of a row, rounded as `kv_quantize` says."""
    values = np.asarray(x)
    features = values.shape[-1]
    blocks = -(-features // 128)
    padded = np.zeros((*values.shape[:-1], blocks * 128), np.float64)
    padded[..., :features] = f64(values)
    elements, scales = kv_quantize(padded.reshape(*values.shape[:-1], blocks, 128), "float8_e4m3fn")
    return elements.reshape(padded.shape)[..., :features], scales


def quantized_linear(
    x: ArrayLike,
    weight: ArrayLike,
    scales: ArrayLike | None = None,
    zeros: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    format: str = "int4",
    activation: str | None = None,
) -> Float:
    """activation(x W^T + bias) of a weight in few bits; `flashkernel.quantized_linear` has the formats."""
    packed = np.asarray(weight)
    if packed.ndim == 3:  # tiles: blocks of 16 rows side by side, 2 bytes and then 4 at a time
        head = {"q4_0": 2, "q4_1": 4, "q8_0": 2}[format]
        heads = packed[..., : 16 * head].reshape(*packed.shape[:2], -1, 16, 2)
        words = packed[..., 16 * head :].reshape(*packed.shape[:2], -1, 16, 4)
        parts = [part.swapaxes(2, 3).reshape(*packed.shape[:2], 16, -1) for part in (heads, words)]
        packed = np.concatenate(parts, -1).swapaxes(1, 2).reshape(packed.shape[0] * 16, -1)
    rows = packed.shape[0]
    if format == "int8":
        q = f64(packed.astype(np.int8))
    else:
        head = {"int4": 0, "q4_0": 2, "q4_1": 4, "q8_0": 2}[format]
        blocks = packed.astype(np.uint8).reshape(rows, -1, head + (32 if format == "q8_0" else 16))
        own = f64(np.ascontiguousarray(blocks[..., :head]).view(np.float16))
        elements = blocks[..., head:]
        q = f64(elements.view(np.int8) if format == "q8_0" else np.concatenate([elements & 15, elements >> 4], -1))
    if format.startswith("q"):
        numbers = own[..., :1] * (q - 8 if format == "q4_0" else q) + (own[..., 1:] if format == "q4_1" else 0)
    else:
        assert scales is not None
        scale = f64(scales)[..., None]
        zero = (8.0 if format == "int4" else 0.0) if zeros is None else f64(zeros)[..., None]
        numbers = scale * (q.reshape(rows, scale.shape[1], -1) - zero)
    return linear(x, numbers.reshape(rows, -1), bias, activation=activation)[0]


def fused_linear(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    norm_weight: ArrayLike | None = None,
    norm_bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    *,
    norm: str = "rms",
    eps: float = 1e-6,
    activation: str | None = None,
) -> Float:
    """activation(norm(x) weight^T + bias) + residual; "swiglu" is silu(gate) * up. Nothing is rounded."""
    y = f64(x)
    if norm_weight is not None and norm == "layer":
        y = layer_norm(y, norm_weight, norm_bias, eps=eps)[0]
    elif norm_weight is not None:
        y = rms_norm(y, norm_weight, eps=eps)[0]
    gated = activation == "swiglu"
    out = linear(y, weight, bias, activation=None if gated else activation)[0]
    if gated:
        out = swiglu(*np.split(out, 2, axis=-1))
    return out if residual is None else out + f64(residual)


def qkv_append(
    x: ArrayLike,
    weight: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    slots: Sequence[int],
    bias: ArrayLike | None = None,
    norm_weight: ArrayLike | None = None,
    norm_bias: ArrayLike | None = None,
    *,
    rope: Mapping[str, Any] | None = None,
    norm: str = "rms",
    eps: float = 1e-6,
) -> tuple[Float, Float, Float]:
    """(q, and copies of the pages with k and v written) of the heads of norm(x) weight^T + bias. Nothing is rounded."""
    heads_kv, head_dim = np.shape(k_pages)[2:]
    product = fused_linear(x, weight, bias, norm_weight, norm_bias, norm=norm, eps=eps)
    heads = product.reshape(len(product), -1, head_dim).swapaxes(0, 1)[None]  # as rope has them
    q, k, v = np.split(heads, [-2 * heads_kv, -heads_kv], axis=1)
    if rope is not None:
        q, turned = (rope_table if "cos" in rope else _rope)(q, k, **rope)
        assert turned is not None
        k = turned
    q, k, v = (part[0].swapaxes(0, 1) for part in (q, k, v))
    return (q, *kv_append(k, v, k_pages, v_pages, slots))


def linear_backward(
    grad_out: ArrayLike,
    x: ArrayLike,
    weight: ArrayLike,
    preactivation: ArrayLike | None = None,
    *,
    activation: str | None = None,
) -> tuple[Float, Float, Float]:
    """(grad_x, grad_weight, grad_bias)."""
    g = f64(grad_out)
    if activation is not None:
        assert preactivation is not None
        g = g * activate(preactivation, activation)[1]
    rows, x_rows = g.reshape(-1, g.shape[-1]), f64(x).reshape(-1, np.shape(x)[-1])
    return g @ f64(weight), rows.T @ x_rows, rows.sum(0)


def add(a: ArrayLike, b: ArrayLike) -> Float:
    """a + b."""
    return f64(a) + f64(b)


def _philox(seed: int, offset: int) -> int:
    """64 random bits: the first two words of Philox4x32-10."""
    c, k = [offset & 0xFFFFFFFF, offset >> 32 & 0xFFFFFFFF, 0, 0], [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [k[0] + 0x9E3779B9 & 0xFFFFFFFF, k[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return c[1] << 32 | c[0]


def _sample_row(scores: Float, temperature: float, top_k: int, top_p: float, min_p: float, bits: int) -> int:
    refused = np.flatnonzero(~(scores < np.inf))
    if refused.size or scores.max() == -np.inf:
        return -1 - (int(refused[0]) if refused.size else 0)
    if temperature == 0 or top_k == 1:
        return int(np.argmax(scores))
    order = np.argsort(-scores, kind="stable")
    with np.errstate(over="ignore"):
        likely = np.exp((scores[order] - scores.max()) / temperature)
    likely[likely < 2.0**-40] = 0
    if 0 < top_k < scores.size:
        likely[scores[order] < scores[order[top_k - 1]]] = 0
    before = np.cumsum(likely) - likely
    if top_p < 1:
        likely[(before >= top_p * likely.sum()) & (before > 0)] = 0
    likely[likely < min(min_p, 1.0)] = 0
    ends = np.cumsum(likely[np.argsort(order)])
    return int(np.searchsorted(ends, bits / 2.0**64 * ends[-1], side="right"))


def sample(
    logits: ArrayLike,
    temperature: ArrayLike | None = None,
    top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    history: ArrayLike | None = None,
    repetition_penalty: ArrayLike | None = None,
    frequency_penalty: ArrayLike | None = None,
    presence_penalty: ArrayLike | None = None,
    seed: ArrayLike | None = None,
    offset: ArrayLike | None = None,
) -> NDArray[np.int64]:
    """The token that each row of logits [rows, vocab] draws, by a sort and in float64. `flashkernel.sample` rounds, so
    draws within 1e-7 of the end of a token's probability may differ.
    """
    scores = f64(logits).copy()
    rows = len(scores)

    def column(values: ArrayLike | None, default: float) -> Float:
        return np.full(rows, default) if values is None else f64(values)

    if bias is not None:
        scores += f64(bias)
    if history is not None:
        seen = np.asarray(history, np.int64)
        repetition = column(repetition_penalty, 1)[:, None]
        scores = np.where(seen != 0, np.where(scores < 0, scores * repetition, scores / repetition), scores)
        scores = scores - (seen >> 1) * column(frequency_penalty, 0)[:, None]
        scores = scores - ((seen >> 1) > 0) * column(presence_penalty, 0)[:, None]
    options = [column(v, d) for v, d in ((temperature, 0), (top_k, 0), (top_p, 1), (min_p, 0))]
    keys = [np.zeros(rows, np.int64) if v is None else np.asarray(v, np.int64) for v in (seed, offset)]
    return np.array(
        [
            _sample_row(row, float(t), int(k), float(p), float(m), _philox(int(key), int(place)))
            for row, t, k, p, m, key, place in zip(scores, *options, *keys, strict=True)
        ],
        np.int64,
    )


def swiglu(gate: ArrayLike, up: ArrayLike) -> Float:
    """silu(gate) * up."""
    return activate(gate, "silu")[0] * f64(up)


def swiglu_backward(grad_out: ArrayLike, gate: ArrayLike, up: ArrayLike) -> tuple[Float, Float]:
    """(grad_gate, grad_up)."""
    value, slope = activate(gate, "silu")
    return f64(grad_out) * f64(up) * slope, f64(grad_out) * value


def reduce_sum(x: ArrayLike, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> Float:
    """Sum over axes."""
    with np.errstate(invalid="ignore"):
        return np.asarray(f64(x).sum(axis, keepdims=keepdims))


def reduce_mean(x: ArrayLike, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> Float:
    """Mean over axes; NaN over nothing."""
    total = reduce_sum(x, axis, keepdims=keepdims)
    count = np.size(x) // max(total.size, 1)
    with np.errstate(invalid="ignore"):
        return np.asarray(total / np.float64(count))


def reduce_max(x: ArrayLike, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> Float:
    """Maximum over axes; a NaN wins."""
    return np.asarray(f64(x).max(axis, keepdims=keepdims))


def argmax(x: ArrayLike, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> NDArray[np.int64]:
    """Row-major index within the reduced dims of the first maximum, or of the first NaN."""
    y = f64(x)
    axes = range(y.ndim) if axis is None else [axis] if isinstance(axis, int) else axis
    reduced = sorted(d % y.ndim for d in axes)
    kept = [d for d in range(y.ndim) if d not in reduced]
    rows = y.transpose(kept + reduced).reshape(*(y.shape[d] for d in kept), -1)
    out = rows.argmax(-1)
    return np.asarray(out.reshape([1 if d in reduced else y.shape[d] for d in range(y.ndim)]) if keepdims else out)


def log_softmax(x: ArrayLike, axis: int = -1) -> Float:
    """x - log(sum(exp(x))); a row of -inf only gives -inf."""
    y = f64(x)
    with np.errstate(invalid="ignore", divide="ignore"):
        top = y.max(axis, keepdims=True, initial=-np.inf)
        shifted = y - np.where(np.isneginf(top), 0.0, top)
        out = shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))
    return np.where(np.isneginf(top), -np.inf, out)


def softmax(x: ArrayLike, axis: int = -1) -> Float:
    """exp(x) / sum(exp(x)); a row of -inf only gives 0."""
    return np.exp(log_softmax(x, axis))


def softmax_backward(grad_out: ArrayLike, out: ArrayLike, axis: int = -1) -> Float:
    """out * (grad_out - sum(grad_out * out))."""
    g, y = f64(grad_out), f64(out)
    return y * (g - (g * y).sum(axis, keepdims=True))


def log_softmax_backward(grad_out: ArrayLike, out: ArrayLike, axis: int = -1) -> Float:
    """grad_out - exp(out) * sum(grad_out)."""
    g = f64(grad_out)
    return g - np.exp(f64(out)) * g.sum(axis, keepdims=True)


def layer_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
) -> tuple[Float, Float, Float]:
    """(out, mean, rstd) over the last dim."""
    h = f64(x)
    mean = h.mean(-1)
    rstd = 1.0 / np.sqrt(((h - mean[..., None]) ** 2).mean(-1) + eps)
    out = (h - mean[..., None]) * rstd[..., None]
    out = out if weight is None else out * (f64(weight) + weight_offset)
    return out if bias is None else out + f64(bias), mean, rstd


def rms_norm(
    x: ArrayLike, weight: ArrayLike | None = None, *, eps: float = 1e-6, weight_offset: float = 0.0
) -> tuple[Float, Float]:
    """(out, rstd) over the last dim."""
    h = f64(x)
    rstd = 1.0 / np.sqrt((h * h).mean(-1) + eps)
    out = h * rstd[..., None]
    return out if weight is None else out * (f64(weight) + weight_offset), rstd


def layer_norm_quantized(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    out_dtype: str = "float8_e4m3fn",
    scale: ArrayLike | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
) -> tuple[Float, Float]:
    """(elements, scale): the norm is element * scale. Elements are rounded as `kv_quantize` says."""
    out, _, _ = layer_norm(x, weight, bias, eps=eps, weight_offset=weight_offset)
    return _quantize(out, out_dtype, scale)


def rms_norm_quantized(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    out_dtype: str = "float8_e4m3fn",
    scale: ArrayLike | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> tuple[Float, Float]:
    """As `layer_norm_quantized`."""
    return _quantize(rms_norm(x, weight, eps=eps, weight_offset=weight_offset)[0], out_dtype, scale)


def _quantize(values: Float, out_dtype: str, scale: ArrayLike | None) -> tuple[Float, Float]:
    elements, scales = kv_quantize(values, out_dtype, None if scale is None else f64(scale).reshape(()))
    return elements, scales if scale is None else f64(scale)


def layer_norm_backward(
    grad_out: ArrayLike,
    h: ArrayLike,
    weight: ArrayLike | None,
    mean: ArrayLike,
    rstd: ArrayLike,
    *,
    grad_residual_out: ArrayLike | None = None,
    weight_offset: float = 0.0,
) -> tuple[Float, Float, Float]:
    """(grad_x, grad_weight, grad_bias)."""
    g, r = f64(grad_out), f64(rstd)[..., None]
    n = (f64(h) - f64(mean)[..., None]) * r
    gw = g if weight is None else g * (f64(weight) + weight_offset)
    grad_x = r * (gw - gw.mean(-1, keepdims=True) - n * (gw * n).mean(-1, keepdims=True))
    grad_x = grad_x if grad_residual_out is None else grad_x + f64(grad_residual_out)
    features = g.shape[-1]
    return grad_x, (g * n).reshape(-1, features).sum(0), g.reshape(-1, features).sum(0)


def rms_norm_backward(
    grad_out: ArrayLike,
    h: ArrayLike,
    weight: ArrayLike | None,
    rstd: ArrayLike,
    *,
    grad_residual_out: ArrayLike | None = None,
    weight_offset: float = 0.0,
) -> tuple[Float, Float]:
    """(grad_x, grad_weight)."""
    g, r = f64(grad_out), f64(rstd)[..., None]
    n = f64(h) * r
    gw = g if weight is None else g * (f64(weight) + weight_offset)
    grad_x = r * (gw - n * (gw * n).mean(-1, keepdims=True))
    grad_x = grad_x if grad_residual_out is None else grad_x + f64(grad_residual_out)
    return grad_x, (g * n).reshape(-1, g.shape[-1]).sum(0)


def _target_weights(
    targets: NDArray[Any], classes: int, ignore_index: int, label_smoothing: float
) -> tuple[Float, NDArray[np.bool_]]:
    """Target distribution per row, and which rows count."""
    counted = np.asarray(targets) != ignore_index
    share = np.full((len(targets), classes), label_smoothing / max(classes, 1))
    share[np.nonzero(counted)[0], np.asarray(targets)[counted]] += 1.0 - label_smoothing
    share[~counted] = 0.0
    return share, counted


def cross_entropy(
    logits: ArrayLike,
    targets: NDArray[Any],
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> tuple[Float, Float]:
    """(loss, lse)."""
    x = f64(logits)
    share, counted = _target_weights(targets, x.shape[1], ignore_index, label_smoothing)
    log_p = log_softmax(x)
    with np.errstate(invalid="ignore"):
        loss = -np.where(share == 0, 0.0, share * log_p).sum(-1)
        lse = np.logaddexp.reduce(x, -1)
        if reduction == "none":
            return loss, lse
        total = np.float64(loss[counted].sum())
        return np.asarray(total if reduction == "sum" else total / np.float64(counted.sum())), lse


def cross_entropy_backward(
    grad_loss: ArrayLike,
    logits: ArrayLike,
    targets: NDArray[Any],
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Float:
    """Gradient of the logits."""
    x = f64(logits)
    share, counted = _target_weights(targets, x.shape[1], ignore_index, label_smoothing)
    weight = np.broadcast_to(f64(grad_loss), counted.shape) * counted
    if reduction == "mean":
        weight = weight / max(int(counted.sum()), 1)
    return np.where(counted[:, None], weight[:, None] * (softmax(x) - share), 0.0)
