"""Attention for JAX."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashkernel.attention_options import ALIBI

from .call import Arrays, check, ffi_call, varying

__all__ = ["attention"]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    scale: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Sequence[float] | None = None,
    alibi: str = "distance",
    sinks: Any = None,
    return_lse: bool = False,
) -> Any:
    """softmax(scale * q k^T) v, without ever writing the scores.

    q: [batch, heads_q, seq_q, head_dim]; float32, float16 or bfloat16.
    k: [batch, heads_kv, seq_k, head_dim], v: [batch, heads_kv, seq_k, head_dim_v], q's dtype; heads_q a multiple of
       heads_kv; head dims of 1 to 512.
    causal: query i sees keys up to i + seq_k - seq_q.
    window: (left, right) tokens seen on either side of that position; None: all.
    softcap: scores s become softcap * tanh(s / softcap); 0: off.
    scale: factor of the scores; default 1 / sqrt(head_dim).
    bias: added to the scores; float32 or q's dtype, broadcastable to [batch, heads_q, seq_q, seq_k].
    mask: bool, broadcastable to [batch, heads_q, seq_q, seq_k]; True: the key is seen. Read as bits.
    alibi_slopes: heads_q numbers; adds -slope * abs(d), d = i + seq_k - seq_q - j. Constants, which have no gradient.
    alibi: "distance" is that; "signed" adds -slope * d, "sqrt" adds -slope * sqrt(d) for keys before the position and 0
       for others.
    sinks: float32 [heads_q]; the logit of one more key without a value.
    return_lse: also return the logarithm of the softmax's denominator, float32 [batch, heads_q, seq_q].

    Returns out [batch, heads_q, seq_q, head_dim_v], or (out, lse). Gradients: of q, k, v, bias and sinks, through out
    and lse.

    Raises ValueError for shapes and dtypes that do not fit. Source: Dao, FlashAttention-2 (2023).
    """
    check(alibi in ALIBI, f'attention: alibi={alibi!r}; "distance", "signed" or "sqrt" is needed')
    arrays = varying({"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks, "mask": mask})
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    for name in "qkv":
        x = arrays[name]
        check(x.ndim == 4, f"attention: {name} has shape {x.shape}; [batch, heads, seq, head_dim] is needed")
        check(x.dtype == q.dtype, f"attention: {name} is {x.dtype} and q {q.dtype}; one dtype is needed")
    check(
        q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3],
        f"attention: q {q.shape}, k {k.shape}, v {v.shape}; one batch, one seq and heads of k and v, and one head_dim "
        "of q and k are needed",
    )
    heads = q.shape[1], k.shape[1]
    check(
        heads[1] > 0 and heads[0] % heads[1] == 0,
        f"attention: {heads[0]} heads of q and {heads[1]} of k; a multiple is needed",
    )
    if mask is not None:
        arrays["mask"] = _packed(arrays["mask"], k.shape[2])
    slopes = None if alibi_slopes is None else tuple(float(slope) for slope in alibi_slopes)
    options = (
        ("causal", bool(causal)),
        ("window_left", -1 if window[0] is None else int(window[0])),
        ("window_right", -1 if window[1] is None else int(window[1])),
        ("softcap", float(softcap)),
        ("scale", float(q.shape[3] ** -0.5 if scale is None else scale)),
        ("alibi", ALIBI.index(alibi)),
    )
    out, lse = _attention(options, slopes, arrays)
    return (out, lse) if return_lse else out


_KINDS = {"causal": np.bool_, "window_left": np.int64, "window_right": np.int64, "alibi": np.int64}


def _packed(mask: Any, keys: int) -> Any:
    """The bits of a mask [..., keys], as `flashkernel.pack_mask` makes them; dims of size 1 stay so."""
    check(
        mask.dtype == jnp.bool_ and 1 <= mask.ndim <= 4 and mask.shape[-1] in (1, keys),
        f"attention: mask is {mask.dtype} {mask.shape}; bool, broadcast to [batch, heads_q, seq_q, {keys}], is needed",
    )
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    mask = jnp.broadcast_to(mask, (*mask.shape[:3], keys))
    packed = jnp.packbits(jnp.pad(mask, ((0, 0),) * 3 + ((0, -keys % 32),)), axis=-1, bitorder="little")
    return jax.lax.bitcast_convert_type(packed.reshape(*packed.shape[:3], -1, 4), jnp.int32)


def _attributes(options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return {name: _KINDS.get(name, np.float32)(value) for name, value in options}


def _with_slopes(arrays: Arrays, slopes: tuple[float, ...] | None) -> Arrays:
    return arrays if slopes is None else {**arrays, "alibi_slopes": jnp.asarray(slopes, jnp.float32)}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(options: Any, slopes: Any, arrays: Arrays) -> tuple[Any, Any]:
    q, v = arrays["q"], arrays["v"]
    results = {"out": ((*q.shape[:3], v.shape[3]), q.dtype), "lse": (q.shape[:3], jnp.float32)}
    found = ffi_call("attention", _with_slopes(arrays, slopes), results, **_attributes(options))
    return found["out"], found["lse"]


def _forward(options: Any, slopes: Any, arrays: Arrays) -> tuple[Any, Any]:
    out, lse = _attention(options, slopes, arrays)
    return (out, lse), (arrays, out, lse)


def _backward(options: Any, slopes: Any, saved: Any, gradients: Any) -> tuple[Arrays]:
    arrays, out, lse = saved
    given = {**_with_slopes(arrays, slopes), "out": out, "lse": lse, "grad_out": gradients[0], "grad_lse": gradients[1]}
    results = {f"grad_{name}": (array.shape, array.dtype) for name, array in arrays.items() if name != "mask"}
    found = ffi_call("attention_backward", given, results, **_attributes(options))
    none = {name: np.zeros(array.shape, jax.dtypes.float0) for name, array in arrays.items() if name == "mask"}
    return ({**none, **{name: found[f"grad_{name}"] for name in arrays if name not in none}},)


_attention.defvjp(_forward, _backward)
