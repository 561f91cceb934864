"""What FlashKernel is compared with: the fastest stock way that torch offers for the same result."""

from __future__ import annotations

from typing import Any

from ..generate.errors import MissingDependencyError

__all__ = ["gelu_linear", "layer_norm_residual", "require_torch", "rms_norm_residual", "rope", "sdpa", "swiglu"]


def require_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(
            "bench: torch is what the ops are measured against, and it is not installed; run `pip install torch`"
        ) from error
    return torch


def sdpa(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    return require_torch().nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def gelu_linear(x: Any, weight: Any, bias: Any) -> Any:
    functional = require_torch().nn.functional
    return functional.gelu(functional.linear(x, weight, bias), approximate="tanh")


def layer_norm_residual(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
    hidden = x + residual
    return require_torch().nn.functional.layer_norm(hidden, (x.shape[-1],), weight, bias), hidden


def rms_norm_residual(x: Any, residual: Any, weight: Any) -> Any:
    hidden = x + residual
    return require_torch().nn.functional.rms_norm(hidden, (x.shape[-1],), weight, 1e-6), hidden


def rope(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """As Transformers does it: rotate_half with tables of the full head dim, made beforehand."""
    cat = require_torch().cat

    def rotate(x: Any) -> Any:
        half = x.shape[-1] // 2
        return x * cos + cat((-x[..., half:], x[..., :half]), dim=-1) * sin

    return rotate(q), rotate(k)


def swiglu(gate: Any, up: Any) -> Any:
    return require_torch().nn.functional.silu(gate) * up
