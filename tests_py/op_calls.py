"""One call of every op by named arguments, for tests that hold for all of them: strides, overlap, other threads."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

import flashkernel as fk


class OpCall(NamedTuple):
    """``run`` takes the arguments as attributes; what it returns and ``written`` are the results."""

    name: str
    run: Callable[[Any], Any]
    inputs: dict[str, np.ndarray]
    written: dict[str, np.ndarray]  # with what they hold before the call: pages of a pool keep what is not written
    rows: tuple[str, ...] = ()  # arguments whose last dim must be contiguous, the others may have any strides
    flat: tuple[str, ...] = ()  # arguments that must be contiguous

    def arguments(self) -> dict[str, np.ndarray]:
        return {name: value.copy() for name, value in {**self.inputs, **self.written}.items()}

    def results(self, arguments: dict[str, np.ndarray]) -> list[np.ndarray]:
        returned = self.run(SimpleNamespace(**arguments))
        listed = returned if isinstance(returned, tuple) else (returned,)
        return [np.array(x) for x in (*listed, *(arguments[name] for name in self.written)) if x is not None]


def _numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def _whole(*shape: int, seed: int = 0) -> np.ndarray:
    """Whole numbers: their sums are exact in any order."""
    return np.random.default_rng([seed, *shape]).integers(-8, 9, shape).astype(np.float32)


def _empty(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.full(shape, -7, dtype)


def _float8(*shape: int, seed: int = 0) -> np.ndarray:
    """Bits of e4m3 numbers of either sign, from 1/2 to 1.875."""
    rng = np.random.default_rng([seed, *shape])
    return (rng.integers(0x30, 0x40, shape) + 128 * rng.integers(0, 2, shape)).astype(np.uint8)


def _i32(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def _elementwise() -> list[OpCall]:
    a, b, c = (_numbers(2, 3, 4, 16, seed=i) for i in range(3))
    out = {"out": _empty(2, 3, 4, 16)}
    return [
        OpCall("add", lambda a: fk.add(a.a, a.b, out=a.out), {"a": a, "b": b}, out),
        OpCall("swiglu", lambda a: fk.swiglu(a.gate, a.up, out=a.out), {"gate": a, "up": b}, out),
        OpCall(
            "swiglu_backward",
            lambda a: fk.swiglu_backward(a.grad, a.gate, a.up),
            {"grad": a, "gate": b, "up": c},
            {},
        ),
    ]


def _reductions() -> list[OpCall]:
    x, y = _whole(2, 3, 4, 16), _numbers(2, 3, 4, 16, seed=1)
    calls = []
    for axis, kept in ((1, (2, 4, 16)), ((0, 3), (3, 4)), (-1, (2, 3, 4))):
        for name in ("reduce_sum", "reduce_mean", "reduce_max", "argmax"):
            dtype = np.int64 if name == "argmax" else np.float32
            out = {"out": _empty(*kept, dtype=dtype)}
            run = lambda a, name=name, axis=axis: getattr(fk, name)(a.x, axis, out=a.out)
            calls.append(OpCall(f"{name}_over_{axis}", run, {"x": x}, out))
    for axis in (1, -1):
        for name in ("softmax", "log_softmax"):
            run = lambda a, name=name, axis=axis: getattr(fk, name)(a.x, axis, out=a.out)
            calls.append(OpCall(f"{name}_over_{axis}", run, {"x": y}, {"out": _empty(*y.shape)}))
            forward = np.array(getattr(fk, name)(y, axis))
            run = lambda a, name=name, axis=axis: getattr(fk, f"{name}_backward")(a.grad, a.y, axis)
            calls.append(OpCall(f"{name}_backward_over_{axis}", run, {"grad": x, "y": forward}, {}))
    return calls


def _norms() -> list[OpCall]:
    x, residual, weight, bias = _numbers(2, 3, 4, 16), _numbers(2, 3, 4, 16, seed=1), _numbers(16), _numbers(16, seed=1)
    grad, extra = _numbers(2, 3, 4, 16, seed=2), _numbers(2, 3, 4, 16, seed=3)
    written = {"out": _empty(2, 3, 4, 16), "residual_out": _empty(2, 3, 4, 16)}
    out = {"out": _empty(2, 3, 4, 16)}
    _, mean, rstd = (np.array(r) for r in fk.layer_norm(x, weight, bias, return_stats=True))
    rms = np.array(fk.rms_norm(x, weight, return_stats=True)[1])
    inputs = {"x": x, "weight": weight, "bias": bias}
    back = {"grad": grad, "h": x, "weight": weight, "mean": mean, "rstd": rstd, "extra": extra}
    rms_back = {"grad": grad, "h": x, "weight": weight, "rstd": rms, "extra": extra}
    vectors, rows = ("weight", "bias", "mean", "rstd"), ("x", "residual", "out", "residual_out", "grad", "h", "extra")
    return [
        OpCall(
            "layer_norm",
            lambda a: fk.layer_norm(a.x, a.weight, a.bias, return_stats=True, out=a.out),
            inputs, out, rows, vectors,
        ),
        OpCall(
            "layer_norm_residual",
            lambda a: fk.layer_norm(
                a.x, a.weight, a.bias, residual=a.residual, return_stats=True, out=a.out, residual_out=a.residual_out
            ),
            {**inputs, "residual": residual}, written, rows, vectors,
        ),
        OpCall(
            "rms_norm",
            lambda a: fk.rms_norm(a.x, a.weight, return_stats=True, out=a.out),
            {"x": x, "weight": weight}, out, rows, vectors,
        ),
        OpCall(
            "rms_norm_residual",
            lambda a: fk.rms_norm(
                a.x, a.weight, residual=a.residual, return_stats=True, out=a.out, residual_out=a.residual_out
            ),
            {"x": x, "weight": weight, "residual": residual}, written, rows, vectors,
        ),
        OpCall(
            "layer_norm_quantized",
            lambda a: fk.layer_norm_quantized(a.x, a.weight, a.bias, out_dtype="int8"),
            inputs, {}, rows, vectors,
        ),
        OpCall(
            "rms_norm_quantized",
            lambda a: fk.rms_norm_quantized(a.x, a.weight, residual=a.residual, residual_out=a.residual_out),
            {"x": x, "weight": weight, "residual": residual}, {"residual_out": _empty(2, 3, 4, 16)}, rows, vectors,
        ),
        OpCall(
            "layer_norm_backward",
            lambda a: fk.layer_norm_backward(
                a.grad, a.h, a.weight, a.mean, a.rstd, grad_residual_out=a.extra, need_weight=False, need_bias=False
            ),
            back, {}, rows, vectors,
        ),
        OpCall(
            "rms_norm_backward",
            lambda a: fk.rms_norm_backward(
                a.grad, a.h, a.weight, a.rstd, grad_residual_out=a.extra, need_weight=False
            ),
            rms_back, {}, rows, vectors,
        ),
    ]  # fmt: skip


def _loss() -> list[OpCall]:
    logits, targets = _numbers(6, 32), np.array([3, 0, 31, 7, -100, 5])
    lse = np.array(fk.cross_entropy(logits, targets, reduction="none", return_lse=True)[1])
    inputs = {"logits": logits, "targets": targets}
    rows, flat = ("logits",), ("targets", "lse")
    return [
        OpCall("cross_entropy", lambda a: fk.cross_entropy(a.logits, a.targets), inputs, {}, rows, flat),
        OpCall(
            "cross_entropy_rows",
            lambda a: fk.cross_entropy(a.logits, a.targets, reduction="none", return_lse=True),
            inputs, {}, rows, flat,
        ),
        OpCall(
            "cross_entropy_backward",
            lambda a: fk.cross_entropy_backward(a.grad, a.logits, a.targets, a.lse, reduction="none"),
            {"grad": _numbers(6), **inputs, "lse": lse}, {}, rows, flat,
        ),
    ]  # fmt: skip


def _fused_losses() -> list[OpCall]:
    x, weight, bias, classes = _numbers(6, 16), _numbers(24, 16), _numbers(24), np.abs(_numbers(24, seed=1))
    targets = np.array([3, 0, 23, 7, -100, 5])
    inputs = {"x": x, "weight": weight, "targets": targets, "bias": bias}
    weighted = {**inputs, "classes": classes}
    rows, flat = ("x", "weight"), ("targets", "lse", "bias", "classes")
    lse = np.array(fk.linear_cross_entropy(x, weight, targets, bias, reduction="none", return_lse=True)[1])
    return [
        OpCall(
            "linear_cross_entropy",
            lambda a: fk.linear_cross_entropy(
                a.x, a.weight, a.targets, a.bias, class_weights=a.classes, reduction="none", return_lse=True
            ),
            weighted, {}, rows, flat,
        ),
        OpCall(
            "linear_cross_entropy_backward",
            lambda a: fk.linear_cross_entropy_backward(
                a.grad, a.x, a.weight, a.targets, a.lse, a.bias, class_weights=a.classes, reduction="none"
            ),
            {"grad": _numbers(6), **weighted, "lse": lse}, {}, rows, flat,
        ),
        OpCall(
            "linear_selected_log_prob",
            lambda a: fk.linear_selected_log_prob(a.x, a.weight, a.targets, a.bias, return_lse=True),
            inputs, {}, rows, flat,
        ),
        OpCall(
            "linear_selected_log_prob_backward",
            lambda a: fk.linear_selected_log_prob_backward(a.grad, a.x, a.weight, a.targets, a.lse, a.bias),
            {"grad": _numbers(6), **inputs, "lse": lse}, {}, rows, flat,
        ),
    ]  # fmt: skip


def _masks() -> list[OpCall]:
    mask = _numbers(2, 3, 4, 70) > 0
    out = {"out": _empty(2, 3, 4, 3, dtype=np.int32)}
    return [OpCall("pack_mask", lambda a: fk.pack_mask(a.mask, out=a.out), {"mask": mask}, out, ("out",))]


def _sampling() -> list[OpCall]:
    logits, bias, history = (
        _numbers(6, 32),
        _numbers(6, 32, seed=1),
        np.arange(6 * 32, dtype=np.int32).reshape(6, 32) % 5,
    )
    numbers = {name: np.full(6, value, np.float32) for name, value in (("t", 0.7), ("p", 0.9), ("r", 1.3))}
    inputs = {"logits": logits, "bias": bias, "history": history, **numbers, "seed": np.arange(6, dtype=np.int64)}
    return [
        OpCall(
            "sample",
            lambda a: fk.sample(
                a.logits, a.t, top_p=a.p, bias=a.bias, history=a.history, repetition_penalty=a.r, seed=a.seed, out=a.out
            ),
            inputs, {"out": _empty(6, dtype=np.int64)}, ("logits", "bias", "history"), ("t", "p", "r", "seed", "out"),
        )
    ]  # fmt: skip


def _linear() -> list[OpCall]:
    x, weight, bias, grad = _numbers(2, 3, 4, 16), _numbers(24, 16), _numbers(24), _numbers(2, 3, 4, 24)
    pre = np.array(fk.linear(x, weight, bias, activation="gelu", return_preactivation=True)[1])
    rows = ("x", "out", "grad", "pre", "weight")
    packed = {
        "x": _numbers(2, 3, 4, 64),
        "weight": (np.arange(24 * 32) * 37 % 256).astype(np.uint8).reshape(24, 32),
        "scales": np.linspace(0.01, 0.03, 48, dtype=np.float32).reshape(24, 2),
        "zeros": np.arange(48, dtype=np.float32).reshape(24, 2) % 16,
        "bias": bias,
    }
    narrow = {
        "x": (np.arange(24 * 136) * 37 % 120).astype(np.uint8).reshape(2, 3, 4, 136),
        "weight": (np.arange(24 * 136) * 41 % 120 + 128 * (np.arange(24 * 136) % 2)).astype(np.uint8).reshape(24, 136),
        "x_scale": np.linspace(0.001, 0.002, 48, dtype=np.float32).reshape(2, 3, 4, 2),
        "weight_scale": np.linspace(0.001, 0.003, 48, dtype=np.float32).reshape(24, 2),
        "bias": bias,
    }
    return [
        OpCall(
            "linear",
            lambda a: fk.linear(a.x, a.weight, a.bias, activation="gelu", return_preactivation=True, out=a.out),
            {"x": x, "weight": weight, "bias": bias}, {"out": _empty(2, 3, 4, 24)}, rows, ("bias",),
        ),
        OpCall(
            "linear_backward",
            lambda a: fk.linear_backward(
                a.grad, a.x, a.weight, a.pre, activation="gelu", need_weight=False, need_bias=False
            ),
            {"grad": grad, "x": x, "weight": weight, "pre": pre}, {}, rows,
        ),
        OpCall(
            "linear_fp8",
            lambda a: fk.linear_fp8(
                a.x, a.weight, a.x_scale, a.weight_scale, a.bias, activation="silu", out_dtype="float32", out=a.out
            ),
            narrow, {"out": _empty(2, 3, 4, 24)}, ("x", "weight", "out"), ("bias",),
        ),
        OpCall(
            "quantize_fp8_blocks",
            lambda a: fk.quantize_fp8_blocks(a.x, scales=a.scales),
            {"x": _numbers(2, 3, 4, 136)}, {"scales": _empty(2, 3, 4, 2)}, ("x",),
        ),
        OpCall(
            "quantized_linear",
            lambda a: fk.quantized_linear(
                a.x, a.weight, a.scales, a.zeros, a.bias, format="int4", activation="silu", out=a.out
            ),
            packed, {"out": _empty(2, 3, 4, 24)}, ("x", "weight", "scales", "zeros", "out"), ("bias",),
        ),
        OpCall(
            "fused_linear",
            lambda a: fk.fused_linear(a.x, a.weight, a.bias, a.norm, residual=a.residual, activation="gelu", out=a.out),
            {"x": x, "weight": weight, "bias": bias, "norm": _numbers(x.shape[-1]), "residual": _numbers(2, 3, 4, 24)},
            {"out": _empty(2, 3, 4, 24)}, ("x", "weight", "residual", "out"), ("bias", "norm"),
        ),
    ]  # fmt: skip


def _rope() -> list[OpCall]:
    q, k = _numbers(2, 4, 5, 16), _numbers(2, 2, 5, 16)
    positions = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    angles = np.arange(10)[:, None] * np.linspace(1, 0.01, 8)[None]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    inv_freq = np.linspace(1, 0.01, 8).astype(np.float32)
    written = {"q_out": _empty(*q.shape), "k_out": _empty(*k.shape)}
    rows = ("q", "k", "q_out", "k_out", "positions", "cos", "sin")
    return [
        OpCall(
            "rope",
            lambda a: fk.rope(a.q, a.k, a.positions, inv_freq=a.inv_freq, out=(a.q_out, a.k_out)),
            {"q": q, "k": k, "positions": positions, "inv_freq": inv_freq}, written, rows, ("inv_freq",),
        ),
        OpCall(
            "rope_table",
            lambda a: fk.rope_table(a.q, a.k, a.cos, a.sin, a.positions, out=(a.q_out, a.k_out)),
            {"q": q, "k": k, "cos": cos, "sin": sin, "positions": positions}, written, rows,
        ),
    ]  # fmt: skip


def _attention() -> list[OpCall]:
    q, k, v = _numbers(2, 4, 5, 16), _numbers(2, 2, 7, 16), _numbers(2, 2, 7, 8)
    bias, grad = _numbers(2, 4, 5, 7), _numbers(2, 4, 5, 8)
    out, lse = (np.array(r) for r in fk.attention(q, k, v, bias=bias, return_lse=True))
    other, other_lse = _numbers(2, 4, 5, 8, seed=4), _numbers(2, 4, 5, seed=4)
    grads = {"grad_q": _empty(*q.shape), "grad_k": _empty(*k.shape), "grad_v": _empty(*v.shape)}
    rows = (
        "q",
        "k",
        "v",
        "out",
        "grad",
        "grad_q",
        "grad_k",
        "grad_v",
        "a",
        "b",
        "k_pages",
        "v_pages",
        "table",
        "prefix",
    )
    cu_q, cu_k = _i32(0, 4, 10), _i32(0, 5, 14)
    vq, vk, vv, vgrad = _numbers(10, 4, 16), _numbers(14, 2, 16), _numbers(14, 2, 8), _numbers(10, 4, 8)
    vout, vlse = (np.array(r) for r in fk.attention_varlen(vq, vk, vv, cu_q, cu_k, 6, 9, return_lse=True))
    varlen = {"q": vq, "k": vk, "v": vv, "cu_q": cu_q, "cu_k": cu_k}
    vgrads = {"grad_q": _empty(*vq.shape), "grad_k": _empty(*vk.shape), "grad_v": _empty(*vv.shape)}
    pages = {"k_pages": _numbers(6, 4, 2, 16), "v_pages": _numbers(6, 4, 2, 8)}
    paged = {**pages, "table": _i32([5, 2, 0], [1, 3, 4]), "lens": _i32(7, 10)}
    flat = ("cu_q", "cu_k", "lens", "prefix_lens", "groups")
    return [
        OpCall(
            "attention",
            lambda a: fk.attention(a.q, a.k, a.v, bias=a.bias, return_lse=True, out=a.out),
            {"q": q, "k": k, "v": v, "bias": bias}, {"out": _empty(2, 4, 5, 8)}, rows,
        ),
        OpCall(
            "attention_backward",
            lambda a: fk.attention_backward(
                a.grad, a.q, a.k, a.v, a.out, a.lse, bias=a.bias, need_bias=True, grads=(a.grad_q, a.grad_k, a.grad_v)
            ),
            {"grad": grad, "q": q, "k": k, "v": v, "out": out, "lse": lse, "bias": bias}, grads, rows,
        ),
        OpCall(
            "attention_varlen",
            lambda a: fk.attention_varlen(a.q, a.k, a.v, a.cu_q, a.cu_k, 6, 9, return_lse=True, out=a.out),
            varlen, {"out": _empty(10, 4, 8)}, rows, flat,
        ),
        OpCall(
            "attention_varlen_backward",
            lambda a: fk.attention_varlen_backward(
                a.grad, a.q, a.k, a.v, a.out, a.lse, a.cu_q, a.cu_k, 6, 9, grads=(a.grad_q, a.grad_k, a.grad_v)
            ),
            {"grad": vgrad, **varlen, "out": vout, "lse": vlse}, vgrads, rows, flat,
        ),
        OpCall(
            "attention_cascade",
            lambda a: fk.attention_cascade(
                a.q, a.k_pages, a.v_pages, a.prefix, a.prefix_lens, a.table, a.lens,
                cu_prefix_q=a.groups, cu_seqlens_q=a.cu_q, return_lse=True, out=a.out,
            ),
            {
                "q": vq, **paged, "cu_q": cu_q, "prefix": _i32([4, 5], [5, 0]), "prefix_lens": _i32(7, 2),
                "groups": cu_q,
            },
            {"out": _empty(10, 4, 8)}, rows, flat,
        ),
        OpCall(
            "attention_fp8",
            lambda a: fk.attention_fp8(a.q, a.k, a.v, a.qs, a.ks, a.vs, scale=0.3, return_lse=True, out=a.out),
            {
                **{"q": _float8(2, 4, 5, 16), "k": _float8(2, 2, 7, 16), "v": _float8(2, 2, 7, 16)},
                **{"qs": _numbers(2, 2), "ks": _numbers(2, 2), "vs": _numbers(2, 2)},
            },
            {"out": _empty(2, 4, 5, 16, dtype=np.float16)}, ("q", "k", "v", "out"), flat,
        ),
        OpCall(
            "attention_mla_decode",
            lambda a: fk.attention_mla_decode(
                a.q, a.latent, a.table, a.lens, scale=0.3, head_dim_v=5, causal=True, return_lse=True, out=a.out
            ),
            {"q": q, "latent": _numbers(6, 4, q.shape[-1]), "table": paged["table"], "lens": paged["lens"]},
            {"out": _empty(2, 4, 5, 5)}, (*rows, "latent"), flat,
        ),
        OpCall(
            "latent_append",
            lambda a: fk.latent_append(a.latent, a.key, a.pages, a.slots, latent_scale=0.5),  # scales need alignment
            {"latent": _numbers(3, 8), "key": _numbers(3, 4), "slots": np.array([5, 0, 11])},
            {"pages": np.zeros((3, 4, 12), np.uint8)}, ("latent", "key", "pages"), ("slots",),
        ),
        OpCall(
            "attention_paged",
            lambda a: fk.attention_paged(a.q, a.k_pages, a.v_pages, a.table, a.lens, return_lse=True, out=a.out),
            {"q": q, **paged}, {"out": _empty(2, 4, 5, 8)}, rows, flat,
        ),
        OpCall(
            "attention_paged_varlen",
            lambda a: fk.attention_paged(
                a.q, a.k_pages, a.v_pages, a.table, a.lens, cu_seqlens_q=a.cu_q, return_lse=True, out=a.out
            ),
            {"q": vq, **paged, "cu_q": cu_q}, {"out": _empty(10, 4, 8)}, rows, flat,
        ),
        OpCall(
            "merge_states",
            lambda a: fk.merge_states(a.a, a.a_lse, a.b, a.b_lse, out=(a.out, a.lse)),
            {"a": out, "a_lse": lse, "b": other, "b_lse": other_lse},
            {"out": _empty(2, 4, 5, 8), "lse": _empty(2, 4, 5)}, rows,
        ),
    ]  # fmt: skip


def _pages() -> list[OpCall]:
    k, v, q = _numbers(5, 2, 16), _numbers(5, 2, 8), _numbers(5, 4, 16)
    pools = {"k_pages": _numbers(6, 4, 2, 16), "v_pages": _numbers(6, 4, 2, 8)}
    slots, positions = np.array([9, -1, 0, 23, 4]), np.array([3, 1, 4, 1, 5])
    inv_freq = np.linspace(1, 0.01, 8).astype(np.float32)
    table, lens = _i32([5, 2, 0], [1, 3, 4]), _i32(7, 10)
    bytes_ = {
        "k_pages": np.arange(6 * 4 * 2 * 16, dtype=np.int8).reshape(6, 4, 2, 16),
        "v_pages": np.arange(6 * 4 * 2 * 8, dtype=np.int8).reshape(6, 4, 2, 8),
    }
    scales = {"k_scales": np.full((6, 2, 4), 0.5, np.float32), "v_scales": np.full((6, 2, 4), 0.25, np.float32)}
    rows = ("k", "v", "q", "q_out", "k_pages", "v_pages", "k_out", "v_out", "table", "k_scales", "v_scales")
    flat = ("slots", "positions", "inv_freq", "lens", "src", "dst")
    return [
        OpCall(
            "kv_append",
            lambda a: fk.kv_append(a.k, a.v, a.k_pages, a.v_pages, a.slots),
            {"k": k, "v": v, "slots": slots}, pools, rows, flat,
        ),
        OpCall(
            "kv_append_with_rope",
            lambda a: fk.kv_append(
                a.k, a.v, a.k_pages, a.v_pages, a.slots,
                rope={"positions": a.positions, "q": a.q, "q_out": a.q_out, "inv_freq": a.inv_freq},
            ),
            {"k": k, "v": v, "q": q, "slots": slots, "positions": positions, "inv_freq": inv_freq},
            {**pools, "q_out": _empty(*q.shape)}, rows, flat,
        ),
        OpCall(
            "kv_append_with_norms",
            lambda a: fk.kv_append(
                a.k, a.v, a.k_pages, a.v_pages, a.slots,
                rope={"positions": a.positions, "q": a.q, "q_out": a.q_out, "q_norm": a.weight, "k_norm": a.weight},
            ),
            {"k": k, "v": v, "q": q, "slots": slots, "positions": positions, "weight": _numbers(16)},
            {**pools, "q_out": _empty(*q.shape)}, rows, (*flat, "weight"),
        ),
        OpCall(
            "qkv_append",
            lambda a: fk.qkv_append(
                a.x, a.weight, a.k_pages, a.v_pages, a.slots, a.bias, a.norm, out=a.q_out,
                rope={"positions": a.positions, "inv_freq": a.inv_freq},
            ),
            {
                "x": _numbers(5, 12), "weight": _numbers(8 * 16, 12), "slots": slots, "bias": _numbers(8 * 16),
                "norm": _numbers(12), "positions": positions, "inv_freq": inv_freq,
            },
            {"k_pages": pools["k_pages"], "v_pages": _numbers(6, 4, 2, 16), "q_out": _empty(*q.shape)},
            ("x", "weight", "k_pages", "v_pages"), (*flat, "bias", "norm", "q_out"),
        ),
        OpCall(
            "kv_append_of_bytes",
            lambda a: fk.kv_append(a.k, a.v, a.k_pages, a.v_pages, a.slots, kv_scales=(a.k_scales, a.v_scales)),
            {"k": k, "v": v, "slots": slots}, {**bytes_, **scales}, rows, flat,
        ),
        OpCall(
            "kv_read",
            lambda a: fk.kv_read(a.k_pages, a.v_pages, a.table, a.lens, max_seq=12),
            {**pools, "table": table, "lens": lens}, {}, rows, flat,
        ),
        OpCall(
            "kv_read_of_the_longest",
            lambda a: fk.kv_read(a.k_pages, a.v_pages, a.table, a.lens),
            {**pools, "table": table, "lens": lens}, {}, rows, flat,
        ),
        OpCall(
            "kv_read_of_bytes",
            lambda a: fk.kv_read(a.k_pages, a.v_pages, a.table, a.lens, max_seq=12, kv_scales=(a.k_scales, a.v_scales)),
            {**bytes_, **scales, "table": table, "lens": lens}, {}, rows, flat,
        ),
        OpCall(
            "kv_copy_pages",
            lambda a: fk.kv_copy_pages(a.k_pages, a.v_pages, a.src, a.dst),
            {"src": np.array([0, 3]), "dst": np.array([5, 1])}, pools, rows, flat,
        ),
        OpCall(
            "check_block_table",
            lambda a: fk.check_block_table(a.table, a.lens, 6, 4),
            {"table": table, "lens": lens}, {}, rows, flat,
        ),
    ]  # fmt: skip


def _steps() -> list[OpCall]:
    names = ("embedding", "norms", "qkv", "output", "gate_up", "down", "head", "inv_freq")
    shapes = (5, 8), (5, 8), (2, 48, 8), (2, 8, 16), (2, 12, 8), (2, 8, 6), (7, 8), (4,)
    inputs = {name: _numbers(*shape, seed=i) for i, (name, shape) in enumerate(zip(names, shapes, strict=True))}
    inputs |= {"tokens": np.array([4, 0]), "positions": np.array([5, 1]), "slots": np.array([13, 2])}
    inputs |= {"table": _i32([1, 3], [0, 2]), "lens": _i32(6, 3)}
    pages = {name: _numbers(2, 4, 4, 2, 8, seed=i) for i, name in enumerate(("k_pages", "v_pages"))}
    return [
        OpCall(
            "decode_step",
            lambda a: fk.decode_step(
                a.tokens, a.positions, a.slots, a.table, a.lens, *(getattr(a, name) for name in names), a.k_pages,
                a.v_pages, out=a.out,
            ),
            inputs, {**pages, "out": _empty(2, 7)},
            (*names[:-1], "table", "k_pages", "v_pages", "out"), ("tokens", "positions", "slots", "lens", "inv_freq"),
        ),
    ]  # fmt: skip


def op_calls() -> list[OpCall]:
    return [
        call
        for family in (
            _elementwise,
            _reductions,
            _norms,
            _loss,
            _fused_losses,
            _masks,
            _sampling,
            _linear,
            _rope,
            _attention,
            _pages,
            _steps,
        )
        for call in family()
    ]
