"""A linear layer with its activation for JAX."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from .call import Arrays, check, ffi_call, varying

__all__ = ["linear"]

_ACTIVATIONS = {None: 0, "gelu_tanh": 1, "gelu": 2, "silu": 3}


def linear(x: Any, weight: Any, bias: Any = None, activation: str | None = None) -> Any:
    """activation(x weight^T + bias) in one kernel.

    x: [..., in_features]; float32, float16 or bfloat16. weight: [out_features, in_features], x's dtype.
    bias: [out_features], x's dtype or float32. activation: None, "gelu_tanh", "gelu" or "silu".

    Returns [..., out_features], x's dtype; sums and the activation are float32, rounded once. Gradients: of all arrays.
    Raises ValueError for shapes and dtypes that do not fit. Source: Hendrycks and Gimpel, GELU (2016).
    """
    arrays = varying({"x": x, "weight": weight, "bias": bias})
    x, weight = arrays["x"], arrays["weight"]
    check(
        x.ndim >= 1 and weight.ndim == 2 and x.shape[-1] == weight.shape[1] and x.dtype == weight.dtype,
        f"linear: x is {x.dtype}{list(x.shape)} and weight {weight.dtype}{list(weight.shape)}; [..., in_features] and "
        "[out_features, in_features] of one dtype are needed",
    )
    if bias is not None:
        shape = arrays["bias"].shape
        check(shape == weight.shape[:1], f"linear: bias has shape {shape}; {weight.shape[:1]} is needed")
    known = ", ".join(map(repr, _ACTIVATIONS))
    check(activation in _ACTIVATIONS, f"linear: activation {activation!r}; one of {known} is needed")
    return _linear(activation, arrays)


def _run(activation: str | None, arrays: Arrays, keep: bool) -> Arrays:
    x, weight = arrays["x"], arrays["weight"]
    kind = (*x.shape[:-1], weight.shape[0]), x.dtype
    results = {"out": kind, **({"preactivation": kind} if keep else {})}
    return ffi_call("linear", arrays, results, activation=np.int32(_ACTIVATIONS[activation]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(activation: str | None, arrays: Arrays) -> Any:
    return _run(activation, arrays, False)["out"]


def _forward(activation: str | None, arrays: Arrays) -> tuple[Any, Any]:
    found = _run(activation, arrays, activation is not None)
    return found["out"], (arrays, found.get("preactivation"))


def _backward(activation: str | None, saved: Any, gradient: Any) -> tuple[Arrays]:
    arrays, preactivation = saved
    given = {"grad_out": gradient, "x": arrays["x"], "weight": arrays["weight"]}
    given |= {} if preactivation is None else {"preactivation": preactivation}
    results = {f"grad_{name}": (array.shape, array.dtype) for name, array in arrays.items()}
    found = ffi_call("linear_backward", given, results, activation=np.int32(_ACTIVATIONS[activation]))
    return ({name: found[f"grad_{name}"] for name in arrays},)


_linear.defvjp(_forward, _backward)
