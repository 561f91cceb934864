"""The fused losses of logits x weight^T + bias, by their formulas: the logits are written whole."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flashkernel.reference._common import Float, f64

__all__ = [
    "linear_cross_entropy",
    "linear_cross_entropy_backward",
    "linear_selected_log_prob",
    "linear_selected_log_prob_backward",
]


def _logits(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None, softcap: float, temperature: float
) -> tuple[Float, Float]:
    """What the softmax sees, and its derivative by x weight^T + bias."""
    z = f64(x) @ f64(weight).T
    if bias is not None:
        z = z + f64(bias)
    if softcap == 0:
        return z / temperature, np.full_like(z, 1 / temperature)
    t = np.tanh(z / softcap)
    return softcap * t / temperature, (1 - t * t) / temperature


def _log_softmax(u: Float) -> tuple[Float, Float]:
    top = u.max(-1, keepdims=True)
    lse = top + np.log(np.exp(u - top).sum(-1, keepdims=True))
    return u - lse, lse[:, 0]


def _shares(
    targets: NDArray[Any], classes: int, class_weights: ArrayLike | None, ignore_index: int, label_smoothing: float
) -> tuple[Float, Float, NDArray[np.bool_]]:
    """What each -log p_c of a row is multiplied by, each row's weight in a mean, and which rows count."""
    targets = np.asarray(targets)
    counted = targets != ignore_index
    w = np.ones(classes) if class_weights is None else f64(class_weights)
    shares = np.tile(label_smoothing / classes * w, (len(targets), 1))
    rows = np.nonzero(counted)[0]
    shares[rows, targets[rows]] += (1 - label_smoothing) * w[targets[rows]]
    shares[~counted] = 0
    weights = np.zeros(len(targets))
    weights[rows] = w[targets[rows]]
    return shares, weights, counted


def _gradients(grad_logits: Float, slope: Float, x: ArrayLike, weight: ArrayLike) -> tuple[Float, Float, Float]:
    g = grad_logits * slope
    return g @ f64(weight), g.T @ f64(x), g.sum(0)


def linear_cross_entropy(
    x: ArrayLike,
    weight: ArrayLike,
    targets: NDArray[Any],
    bias: ArrayLike | None = None,
    *,
    class_weights: ArrayLike | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
) -> tuple[Float, Float, Float]:
    """(loss, z_loss, lse)."""
    log_p, lse = _log_softmax(_logits(x, weight, bias, softcap, 1.0)[0])
    shares, weights, counted = _shares(targets, log_p.shape[1], class_weights, ignore_index, label_smoothing)
    loss, z = -(shares * log_p).sum(-1), np.where(counted, z_loss * lse * lse, 0.0)
    if reduction == "none":
        return loss + z, z, lse
    divisors = (weights.sum(), np.float64(counted.sum())) if reduction == "mean" else (1.0, 1.0)
    with np.errstate(invalid="ignore"):
        total, total_z = loss.sum() / divisors[0], z.sum() / divisors[1]
    return np.asarray(total + total_z if z_loss > 0 else total), np.asarray(total_z), lse


def linear_cross_entropy_backward(
    grad_loss: ArrayLike,
    x: ArrayLike,
    weight: ArrayLike,
    targets: NDArray[Any],
    lse: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    class_weights: ArrayLike | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
) -> tuple[Float, Float, Float]:
    """(grad_x, grad_weight, grad_bias)."""
    u, slope = _logits(x, weight, bias, softcap, 1.0)
    log_p, true_lse = _log_softmax(u)
    shares, weights, counted = _shares(targets, u.shape[1], class_weights, ignore_index, label_smoothing)
    grad = np.broadcast_to(f64(grad_loss).reshape(-1), counted.shape)[:, None] * counted[:, None]
    by_weight, by_rows = (max(weights.sum(), 1e-300), max(counted.sum(), 1)) if reduction == "mean" else (1.0, 1)
    p = np.exp(log_p)
    g = grad / by_weight * (shares.sum(-1, keepdims=True) * p - shares)
    g = g + grad / by_rows * 2 * z_loss * true_lse[:, None] * p
    return _gradients(g, slope, x, weight)


def linear_selected_log_prob(
    x: ArrayLike,
    weight: ArrayLike,
    targets: NDArray[Any],
    bias: ArrayLike | None = None,
    *,
    softcap: float = 0.0,
    temperature: float = 1.0,
    ignore_index: int = -100,
) -> tuple[Float, Float]:
    """(log_prob, lse)."""
    log_p, lse = _log_softmax(_logits(x, weight, bias, softcap, temperature)[0])
    shares, _, _ = _shares(targets, log_p.shape[1], None, ignore_index, 0.0)
    return (shares * log_p).sum(-1), lse


def linear_selected_log_prob_backward(
    grad_log_prob: ArrayLike,
    x: ArrayLike,
    weight: ArrayLike,
    targets: NDArray[Any],
    lse: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    softcap: float = 0.0,
    temperature: float = 1.0,
    ignore_index: int = -100,
) -> tuple[Float, Float, Float]:
    """(grad_x, grad_weight, grad_bias)."""
    u, slope = _logits(x, weight, bias, softcap, temperature)
    log_p, _ = _log_softmax(u)
    shares, _, counted = _shares(targets, u.shape[1], None, ignore_index, 0.0)
    grad = f64(grad_log_prob)[:, None] * counted[:, None]
    return _gradients(grad * (shares - np.exp(log_p)), slope, x, weight)
