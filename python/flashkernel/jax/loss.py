"""Cross-entropy for JAX."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .call import Arrays, check, ffi_call, varying

__all__ = ["cross_entropy"]

_REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}


def cross_entropy(
    logits: Any, targets: Any, *, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "mean"
) -> Any:
    """lse(logits[r]) - logits[r, targets[r]] per row, without writing the probabilities.

    logits: [rows, classes]; float32, float16 or bfloat16. targets: int32 or int64 [rows].
    ignore_index: rows with this target count nothing. label_smoothing: in [0, 1]. reduction: "none", "sum" or "mean"
    over the rows that count.

    Returns float32, [rows] for "none", else a scalar. Gradient: of logits.
    Raises ValueError for shapes that do not fit; a target outside of the classes fails when the call runs.
    Source: Szegedy et al., Rethinking the Inception Architecture (2016), for the smoothing.
    """
    arrays = varying({"logits": logits, "targets": targets})
    logits, targets = arrays["logits"], arrays["targets"]
    check(
        logits.ndim == 2 and targets.shape == logits.shape[:1],
        f"cross_entropy: logits {logits.shape} and targets {targets.shape}; [rows, classes] and [rows] are needed",
    )
    known = ", ".join(map(repr, _REDUCTIONS))
    check(reduction in _REDUCTIONS, f"cross_entropy: reduction {reduction!r}; one of {known} is needed")
    return _loss((int(ignore_index), float(label_smoothing), reduction), logits, targets)


def _attributes(options: Any) -> dict[str, Any]:
    ignore, smoothing, reduction = options
    return {
        "ignore_index": np.int64(ignore),
        "label_smoothing": np.float32(smoothing),
        "reduction": np.int32(_REDUCTIONS[reduction]),
    }


def _run(options: Any, logits: Any, targets: Any) -> Arrays:
    rows = logits.shape[:1]
    results = {"loss": (rows if options[2] == "none" else (), jnp.float32), "lse": (rows, jnp.float32)}
    return ffi_call("cross_entropy", {"logits": logits, "targets": targets}, results, **_attributes(options))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(options: Any, logits: Any, targets: Any) -> Any:
    return _run(options, logits, targets)["loss"]


def _forward(options: Any, logits: Any, targets: Any) -> tuple[Any, Any]:
    found = _run(options, logits, targets)
    return found["loss"], (logits, targets, found["lse"])


def _backward(options: Any, saved: Any, gradient: Any) -> tuple[Any, None]:
    logits, targets, lse = saved
    given = {"grad_loss": gradient, "logits": logits, "targets": targets, "lse": lse}
    results = {"grad_logits": (logits.shape, logits.dtype)}
    return ffi_call("cross_entropy_backward", given, results, **_attributes(options))["grad_logits"], None


_loss.defvjp(_forward, _backward)
