"""Norms for JAX."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .call import Arrays, check, ffi_call, varying

__all__ = ["layer_norm", "rms_norm"]


def layer_norm(x: Any, weight: Any = None, bias: Any = None, *, residual: Any = None, eps: float = 1e-5) -> Any:
    """(h - mean(h)) / sqrt(var(h) + eps) * weight + bias over the last dim, where h = x + residual.

    x: [..., features]; float32, float16 or bfloat16. weight, bias: [features], x's dtype or float32.
    residual: x's shape and dtype.

    Returns out, or (out, h) if residual is given; x's shape and dtype. Gradients: of all arrays.
    Raises ValueError for shapes and dtypes that do not fit. Source: Ba, Kiros and Hinton, Layer Normalization (2016).
    """
    return _norm("layer_norm", x, weight, bias, residual, eps)


def rms_norm(x: Any, weight: Any = None, *, residual: Any = None, eps: float = 1e-6) -> Any:
    """h / sqrt(mean(h^2) + eps) * weight over the last dim, where h = x + residual.

    x: [..., features]; float32, float16 or bfloat16. weight: [features], x's dtype or float32. residual: x's shape and
    dtype.

    Returns out, or (out, h) if residual is given; x's shape and dtype. Gradients: of all arrays.
    Raises ValueError for shapes and dtypes that do not fit. Source: Zhang and Sennrich, Root Mean Square Layer
    Normalization (2019).
    """
    return _norm("rms_norm", x, weight, None, residual, eps)


def _norm(op: str, x: Any, weight: Any, bias: Any, residual: Any, eps: float) -> Any:
    arrays = varying({"x": x, "weight": weight, "bias": bias, "residual": residual})
    x = arrays["x"]
    check(x.ndim >= 1, f"{op}: x has shape {x.shape}; [..., features] is needed")
    for name in ("weight", "bias"):
        if name in arrays:
            shape = arrays[name].shape
            check(shape == x.shape[-1:], f"{op}: {name} has shape {shape}; {x.shape[-1:]} is needed")
    if residual is not None:
        y = arrays["residual"]
        check(
            (y.shape, y.dtype) == (x.shape, x.dtype),
            f"{op}: residual is {y.dtype}{list(y.shape)} and x {x.dtype}{list(x.shape)}; the same are needed",
        )
    out, h = _normed(op, float(eps), arrays)
    return out if residual is None else (out, h)


def _run(op: str, eps: float, arrays: Arrays) -> Arrays:
    x = arrays["x"]
    results = {"out": (x.shape, x.dtype)}
    if "residual" in arrays:
        results["residual_out"] = (x.shape, x.dtype)
    if op == "layer_norm":
        results["mean"] = (x.shape[:-1], jnp.float32)
    results["rstd"] = (x.shape[:-1], jnp.float32)
    found = ffi_call(op, arrays, results, eps=np.float32(eps))
    return {"h": found.get("residual_out", x), **found}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normed(op: str, eps: float, arrays: Arrays) -> tuple[Any, Any]:
    found = _run(op, eps, arrays)
    return found["out"], found["h"]


def _forward(op: str, eps: float, arrays: Arrays) -> tuple[Any, Any]:
    found = _run(op, eps, arrays)
    return (found["out"], found["h"]), (arrays, {name: found[name] for name in ("h", "mean", "rstd") if name in found})


def _backward(op: str, eps: float, saved: Any, gradients: Any) -> tuple[Arrays]:
    arrays, statistics = saved
    given = {**statistics, "grad_out": gradients[0], "grad_residual_out": gradients[1]}
    given |= {"weight": arrays["weight"]} if "weight" in arrays else {}
    wanted = [name for name in ("x", "weight", "bias") if name in arrays]
    results = {f"grad_{name}": (arrays[name].shape, arrays[name].dtype) for name in wanted}
    found = ffi_call(f"{op}_backward", given, results)
    return ({name: found[f"grad_{'x' if name == 'residual' else name}"] for name in arrays},)


_normed.defvjp(_forward, _backward)
