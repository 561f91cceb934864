"""Oracle of attention (dense, variable-length, paged), its gradients and the merging of partial results."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flashkernel.attention_options import AttentionOptions
from flashkernel.reference._common import Float, Lengths, f64
from flashkernel.reference.kv_ops import kv_read
from flashkernel.reference.latent import latent_numbers

__all__ = [
    "attention",
    "attention_backward",
    "attention_cascade",
    "attention_fp8",
    "attention_mla_decode",
    "attention_paged",
    "attention_varlen",
    "attention_varlen_backward",
    "merge_states",
    "pack_mask",
]


def _as_4d(x: Float) -> Float:
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _visible(seq_q: int, seq_k: int, options: AttentionOptions) -> NDArray[np.bool_]:
    """Which keys each query sees; query i stands at position i + seq_k - seq_q."""
    distance = np.arange(seq_k)[None, :] - (np.arange(seq_q)[:, None] + seq_k - seq_q)
    visible = np.ones((seq_q, seq_k), bool)
    left, right = options.sides()
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    return visible


def _unpack(mask: ArrayLike, seq_k: int) -> NDArray[np.bool_]:
    """Whether each key is seen, from the bits of `pack_mask`."""
    j = np.arange(seq_k)
    return (np.asarray(mask).astype(np.int64)[..., j // 32] >> (j % 32) & 1) != 0


def _shown(options: AttentionOptions, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Which keys the packed mask and the block mask show to each query, broadcast to [batch, heads, seq_q, seq_k]."""
    blocks, sizes, mask = options.block_mask, options.block_sizes(), options.mask
    if hasattr(blocks, "blocks"):  # a BlockMask
        blocks, sizes, own = blocks
        mask = own if mask is None else mask
    seen = np.ones(shape, bool) if mask is None else np.broadcast_to(_unpack(mask, shape[-1]), shape)
    if blocks is None:
        return seen
    wide = np.asarray(blocks).astype(int)
    for axis, size, length in ((-2, sizes[0], shape[-2]), (-1, sizes[1], shape[-1])):
        wide = np.take(np.repeat(wide, size, axis), np.arange(length), axis)
    return np.broadcast_to(wide, shape) > np.where(seen, 0, 1)


def pack_mask(mask: ArrayLike) -> NDArray[np.int32]:
    """The bits of a boolean mask: key j of a row is bit j % 32 of word j // 32."""
    seen = np.asarray(mask) != 0
    full = np.zeros((*seen.shape[:-1], -(-seen.shape[-1] // 32), 32), np.int64)
    full.reshape(*seen.shape[:-1], -1)[..., : seen.shape[-1]] = seen
    return (full << np.arange(32)).sum(-1).astype(np.uint32).view(np.int32)


def _scores(q: Float, k: Float, options: AttentionOptions) -> tuple[Float, Float]:
    """Scores with -inf where a key is not seen, and d(score) / d(scale * q k); k already has q's heads."""
    batch, heads, seq_q, head_dim = q.shape
    seq_k = k.shape[2]
    factor, softcap = options.factor(head_dim), options.softcap
    visible = _visible(seq_q, seq_k, options)
    visible = visible & _shown(options, (*q.shape[:3], seq_k))
    with np.errstate(invalid="ignore", over="ignore"):
        score = factor * np.einsum("bhid,bhjd->bhij", q, k)
        slope = np.ones_like(score)
        if softcap > 0:
            bounded = np.tanh(score / softcap)
            score, slope = softcap * bounded, 1.0 - bounded**2
        if options.bias is not None:
            score = score + np.broadcast_to(f64(options.bias), score.shape)
        if options.alibi_slopes is not None:
            distance = np.arange(seq_q)[:, None] + seq_k - seq_q - np.arange(seq_k)[None, :]
            if options.alibi != "signed":
                distance = np.abs(distance) if options.alibi == "distance" else np.sqrt(np.maximum(distance, 0))
            slopes = np.broadcast_to(np.atleast_2d(f64(options.alibi_slopes)), (batch, heads))
            score = score - slopes[:, :, None, None] * distance
    # What is masked is gone before anything is summed, so a NaN behind a mask does not count.
    return np.where(visible, score, -np.inf), np.where(visible, slope, 0.0)


def _normalise(score: Float, sinks: ArrayLike | None) -> tuple[Float, Float, Float | None]:
    """Probabilities and LSE of rows of scores, and the sinks' probabilities; a row that sees nothing gives 0 and -inf.

    A sink's probability is not exp(sink - lse): an LSE of -3e38 has lost the logarithm of its sum.
    """
    sink = None if sinks is None else f64(sinks)[None, :, None]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        top = np.max(score, axis=-1, initial=-np.inf)
        if sink is not None:
            top = np.where(np.isnan(top), top, np.maximum(top, sink))
        base = np.where(np.isneginf(top), 0.0, top)
        weight = np.exp(score - base[..., None])
        weight = np.where(np.isneginf(score), 0.0, weight)
        total = weight.sum(-1)
        share = None
        if sink is not None:
            share = np.exp(sink - base)
            total = total + share
            share = np.where(total == 0, 0.0, share / total)
        lse = np.where(total == 0, -np.inf, base + np.log(total))
        return np.where(total[..., None] == 0, 0.0, weight / total[..., None]), lse, share


def _weigh(probability: Float, v: Float, seen: NDArray[np.bool_]) -> Float:
    """probability @ v, where a value that is not seen does not count even if it is NaN."""
    if np.isfinite(v).all():
        return np.einsum("bhij,bhjd->bhid", probability, v)
    out = np.zeros((*probability.shape[:3], v.shape[3]))
    with np.errstate(invalid="ignore"):
        for j in range(v.shape[2]):
            term = probability[:, :, :, j, None] * v[:, :, None, j, :]
            out += np.where(seen[:, :, :, j, None], term, 0.0)
    return out


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    bias: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    alibi: str = "distance",
    block_mask: Any = None,
    block_size: int | tuple[int, int] = 128,
) -> tuple[Float, Float]:
    """(out, lse) of `flashkernel.attention`: softmax(scale * q k^T) v with every feature."""
    shape = np.shape(q)
    q4, k4, v4 = _as_4d(f64(q)), _as_4d(f64(k)), _as_4d(f64(v))
    group = q4.shape[1] // max(k4.shape[1], 1)
    k4, v4 = np.repeat(k4, group, 1), np.repeat(v4, group, 1)
    options = AttentionOptions(
        causal, window, softcap, scale, alibi_slopes, sinks, bias, mask, alibi, block_mask, block_size
    )
    score, _ = _scores(q4, k4, options)
    probability, lse, _ = _normalise(score, sinks)
    out = _weigh(probability, v4, ~np.isneginf(score))
    return out.reshape(*shape[:-1], v4.shape[-1]), lse.reshape(shape[:-1])


def attention_backward(
    grad_out: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    bias: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    grad_lse: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    alibi: str = "distance",
    block_mask: Any = None,
    block_size: int | tuple[int, int] = 128,
) -> dict[str, Float | None]:
    """Gradients of q, k, v, bias and sinks by name; out and lse are computed again, in float64."""
    q4, k4, v4, g4 = (_as_4d(f64(x)) for x in (q, k, v, grad_out))
    batch, heads, _, head_dim = q4.shape
    heads_kv, seq_k = k4.shape[1], k4.shape[2]
    group = heads // max(heads_kv, 1)
    options = AttentionOptions(
        causal, window, softcap, scale, alibi_slopes, sinks, bias, mask, alibi, block_mask, block_size
    )
    wide_k, wide_v = np.repeat(k4, group, 1), np.repeat(v4, group, 1)
    score, slope = _scores(q4, wide_k, options)
    probability, _, share = _normalise(score, sinks)
    out = np.einsum("bhij,bhjd->bhid", probability, wide_v)
    row = (g4 * out).sum(-1)
    if grad_lse is not None:
        # d lse / d score is the probability, so it adds to what each score's gradient is measured against.
        row = row - f64(grad_lse).reshape(row.shape)
    grad_score = probability * (np.einsum("bhid,bhjd->bhij", g4, wide_v) - row[..., None])
    grad_raw = grad_score * slope * options.factor(head_dim)

    def fold(x: Float) -> Float:  # heads of one group share a key head
        return x.reshape(batch, heads_kv, group, seq_k, x.shape[3]).sum(2)

    grad_bias = None
    if bias is not None:
        shape = np.shape(bias)
        wide = (1,) * (4 - len(shape)) + shape
        axes = tuple(d for d in range(4) if wide[d] == 1)
        grad_bias = grad_score.sum(axes, keepdims=True).reshape(shape)
    grad_sinks = None if share is None else -(share * row).sum((0, 2))
    return {
        "q": np.einsum("bhij,bhjd->bhid", grad_raw, wide_k).reshape(np.shape(q)),
        "k": fold(np.einsum("bhij,bhid->bhjd", grad_raw, q4)).reshape(np.shape(k)),
        "v": fold(np.einsum("bhij,bhid->bhjd", probability, g4)).reshape(np.shape(v)),
        "bias": grad_bias,
        "sinks": grad_sinks,
    }


def _sequence(x: ArrayLike, begin: int, end: int) -> Float:
    """Tokens of [tokens, heads, dim] as [1, heads, tokens, dim]."""
    return f64(x)[begin:end].transpose(1, 0, 2)[None]


def attention_varlen(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, cu_seqlens_q: Lengths, cu_seqlens_k: Lengths, **options: Any
) -> tuple[Float, Float]:
    """(out, lse) of `flashkernel.attention_varlen`, sequence by sequence; options as for `attention`, less bias."""
    total_q, heads, _ = np.shape(q)
    out, lse = np.zeros((total_q, heads, np.shape(v)[2])), np.full((heads, total_q), -np.inf)
    slopes = options.pop("alibi_slopes", None)
    for b in range(len(cu_seqlens_q) - 1):
        begin, end = int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1])
        keys = int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1])
        own = None if slopes is None else np.broadcast_to(np.atleast_2d(slopes), (len(cu_seqlens_q) - 1, heads))[b]
        o, s = attention(
            _sequence(q, begin, end), _sequence(k, *keys), _sequence(v, *keys), alibi_slopes=own, **options
        )
        out[begin:end], lse[:, begin:end] = o[0].transpose(1, 0, 2), s[0]
    return out, lse


def attention_varlen_backward(
    grad_out: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths,
    **options: Any,
) -> dict[str, Float | None]:
    """Gradients of q, k, v and sinks by name."""
    grads: dict[str, Float | None] = {n: np.zeros(np.shape(x)) for n, x in (("q", q), ("k", k), ("v", v))}
    grads["sinks"] = None
    slopes, grad_lse = options.pop("alibi_slopes", None), options.pop("grad_lse", None)
    heads = np.shape(q)[1]
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        keys = slice(int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1]))
        own = None if slopes is None else np.broadcast_to(np.atleast_2d(slopes), (len(cu_seqlens_q) - 1, heads))[b]
        part = attention_backward(
            _sequence(grad_out, rows.start, rows.stop),
            _sequence(q, rows.start, rows.stop),
            _sequence(k, keys.start, keys.stop),
            _sequence(v, keys.start, keys.stop),
            alibi_slopes=own,
            grad_lse=None if grad_lse is None else f64(grad_lse)[None, :, rows],
            **options,
        )
        for name, where in (("q", rows), ("k", keys), ("v", keys)):
            whole, piece = grads[name], part[name]
            assert whole is not None and piece is not None
            whole[where] = piece[0].transpose(1, 0, 2)
        if part["sinks"] is not None:
            grads["sinks"] = part["sinks"] + (0 if grads["sinks"] is None else grads["sinks"])
    return grads


def attention_paged(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    block_table: NDArray[Any],
    seq_lens: NDArray[Any],
    *,
    cu_seqlens_q: Lengths | None = None,
    **options: Any,
) -> tuple[Float, Float]:
    """(out, lse) of `flashkernel.attention_paged`: gathers each sequence and attends to it."""
    if (mask := options.pop("mask", None)) is not None:
        return _paged_with_mask(
            q, k_pages, v_pages, block_table, seq_lens, np.asarray(mask), cu_seqlens_q=cu_seqlens_q, **options
        )
    k, v = kv_read(k_pages, v_pages, block_table, seq_lens)
    lengths = np.concatenate([[0], np.cumsum(seq_lens)])
    k_all = np.concatenate([k[b, :n] for b, n in enumerate(seq_lens)])
    v_all = np.concatenate([v[b, :n] for b, n in enumerate(seq_lens)])
    if cu_seqlens_q is not None:
        return attention_varlen(q, k_all, v_all, cu_seqlens_q, lengths, **options)
    batch, heads, seq_q, head_dim = np.shape(q)
    flat = f64(q).transpose(0, 2, 1, 3).reshape(batch * seq_q, heads, head_dim)
    starts = [b * seq_q for b in range(batch + 1)]
    out, lse = attention_varlen(flat, k_all, v_all, starts, lengths, **options)
    out = out.reshape(batch, seq_q, heads, -1).transpose(0, 2, 1, 3)
    return out, lse.reshape(heads, batch, seq_q).transpose(1, 0, 2)


def _paged_with_mask(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    block_table: NDArray[Any],
    seq_lens: NDArray[Any],
    mask: NDArray[Any],
    *,
    cu_seqlens_q: Lengths | None,
    **options: Any,
) -> tuple[Float, Float]:
    """`attention_paged` whose mask has the bits of each sequence's last keys; the keys before are seen."""
    k, v = kv_read(k_pages, v_pages, block_table, seq_lens)
    slopes, heads = options.pop("alibi_slopes", None), np.shape(q)[1]
    out, lse = np.zeros((*np.shape(q)[:-1], v.shape[3])), np.full(np.shape(q)[:-1], -np.inf)
    bits = np.broadcast_to(mask, (*np.shape(q)[:-1], mask.shape[-1])) if cu_seqlens_q is None else mask
    if cu_seqlens_q is not None:
        lse = lse.T.copy()
    for b, length in enumerate(map(int, seq_lens)):
        if cu_seqlens_q is None:
            queries, words = f64(q)[b], bits[b]
        else:
            rows = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
            queries, words = f64(q)[rows].transpose(1, 0, 2), bits[..., rows, :]
        count = queries.shape[1]
        last = _unpack(words, max(count, 1))[..., :count]
        seen = np.concatenate(
            [np.ones((*last.shape[:-1], max(0, length - count)), bool), last[..., count - min(count, length) :]], -1
        )
        own = None if slopes is None else np.broadcast_to(np.atleast_2d(slopes), (len(seq_lens), heads))[b]
        keys, values = (x[b, :length].transpose(1, 0, 2)[None] for x in (k, v))
        if not seen.shape[-1]:
            seen = np.ones((count, 1), bool)
        o, s = attention(
            queries[None], keys, values, mask=pack_mask(seen)[..., : -(-length // 32)], alibi_slopes=own, **options
        )
        if cu_seqlens_q is None:
            out[b], lse[b] = o[0], s[0]
        else:
            out[rows], lse[:, rows] = o[0].transpose(1, 0, 2), s[0]
    return out, lse


def attention_cascade(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    prefix_table: NDArray[Any],
    prefix_lens: NDArray[Any],
    block_table: NDArray[Any],
    seq_lens: NDArray[Any],
    *,
    cu_prefix_q: Lengths | None = None,
    cu_seqlens_q: Lengths | None = None,
    **options: Any,
) -> tuple[Float, Float]:
    """(out, lse) of `flashkernel.attention_cascade`: a sequence's keys are its group's prefix, then its own."""
    batch, dense = len(seq_lens), cu_seqlens_q is None
    rows = np.arange(batch + 1) * np.shape(q)[-2] if cu_seqlens_q is None else np.asarray(cu_seqlens_q)
    groups = np.array([0, rows[-1]]) if cu_prefix_q is None else np.asarray(cu_prefix_q)
    prefixes, own = (
        kv_read(k_pages, v_pages, prefix_table, prefix_lens),
        kv_read(k_pages, v_pages, block_table, seq_lens),
    )
    keys: list[Float] = []
    values: list[Float] = []
    lengths = [0]
    for b in range(batch):
        # A sequence without queries has no group, and its keys are seen by nobody.
        g = min(int(np.searchsorted(groups, rows[b], side="right")) - 1, len(prefix_lens) - 1)
        for parts, of in ((keys, 0), (values, 1)):
            parts.append(np.concatenate([prefixes[of][g, : prefix_lens[g]], own[of][b, : seq_lens[b]]]))
        lengths.append(lengths[-1] + len(keys[-1]))
    if not batch:
        return np.zeros((*np.shape(q)[:-1], np.shape(v_pages)[3])), np.full(np.shape(q)[:-1], -np.inf)
    flat = f64(q)
    if dense:
        _, heads, seq_q, head_dim = np.shape(q)
        flat = flat.transpose(0, 2, 1, 3).reshape(batch * seq_q, heads, head_dim)
    out, lse = attention_varlen(flat, np.concatenate(keys), np.concatenate(values), rows, lengths, **options)
    if not dense:
        return out, lse
    out = out.reshape(batch, seq_q, heads, -1).transpose(0, 2, 1, 3)
    return out, lse.reshape(heads, batch, seq_q).transpose(1, 0, 2)


def attention_mla_decode(
    q: ArrayLike,
    latent_pages: ArrayLike,
    block_table: NDArray[Any],
    seq_lens: NDArray[Any],
    scale: float,
    *,
    latent_scale: ArrayLike | None = None,
    head_dim_v: int = 512,
    causal: bool = False,
) -> tuple[Float, Float]:
    """(out, lse) of `flashkernel.attention_mla_decode`: paged attention whose values are the keys' first columns.

    latent_pages: numbers, or bytes (uint8) of 8-bit rows in either form.
    """
    keys = np.asarray(latent_pages)
    if keys.dtype == np.uint8:
        keys = latent_numbers(keys, np.shape(q)[-1], head_dim_v, latent_scale)
    keys = f64(keys)[:, :, None]
    return attention_paged(q, keys, keys[..., :head_dim_v], block_table, seq_lens, scale=scale, causal=causal)


def attention_fp8(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    q_scale: ArrayLike = 1.0,
    k_scale: ArrayLike = 1.0,
    v_scale: ArrayLike = 1.0,
    *,
    cu_seqlens_q: Lengths | None = None,
    cu_seqlens_k: Lengths | None = None,
    **options: Any,
) -> tuple[Float, Float]:
    """(out, lse) of `flashkernel.attention_fp8`: attention of the numbers that elements stand for.

    q, k, v: elements as numbers. Options as for `attention` or `attention_varlen`.
    """
    varlen = cu_seqlens_q is not None
    batch = len(cu_seqlens_q) - 1 if cu_seqlens_q is not None else _as_4d(f64(q)).shape[0]
    heads_kv = np.shape(k)[1] if varlen else _as_4d(f64(k)).shape[1]

    def numbers(x: ArrayLike, scale: ArrayLike, starts: Lengths | None) -> Float:
        heads = np.shape(x)[1] if starts is not None else _as_4d(f64(x)).shape[1]
        factors = np.repeat(np.broadcast_to(f64(scale), (batch, heads_kv)), heads // max(heads_kv, 1), 1)
        if starts is None:
            return (_as_4d(f64(x)) * factors[:, :, None, None]).reshape(np.shape(x))
        return f64(x) * np.repeat(factors, np.diff(np.asarray(starts)), 0)[:, :, None]

    operands = (
        numbers(q, q_scale, cu_seqlens_q),
        numbers(k, k_scale, cu_seqlens_k),
        numbers(v, v_scale, cu_seqlens_k),
    )
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return attention(*operands, **options)
    return attention_varlen(*operands, cu_seqlens_q, cu_seqlens_k, **options)


def merge_states(
    out_a: ArrayLike, lse_a: ArrayLike, out_b: ArrayLike | None = None, lse_b: ArrayLike | None = None
) -> tuple[Float, Float]:
    """(out, lse) of disjoint sets of keys together: of two, or of all along the first dim of out_a and lse_a."""
    outs, lses = f64(out_a), f64(lse_a)
    if out_b is not None and lse_b is not None:
        outs, lses = np.stack([outs, f64(out_b)]), np.stack([lses, f64(lse_b)])
    lse = np.logaddexp.reduce(lses, axis=0, initial=-np.inf)
    out = np.zeros(outs.shape[1:])
    with np.errstate(invalid="ignore"):
        for part, own in zip(outs, lses, strict=True):
            share = np.where(np.isneginf(own), 0.0, np.exp(own - lse))[..., None]
            out += np.where(share == 0, 0.0, share * part)
    return out, lse
