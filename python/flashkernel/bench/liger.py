"""Liger's Triton kernels as peers, where `liger_kernel` is installed: the functions under its autograd classes.

Several write over what they are given. They get copies of their own, so that the first call, which is checked, finds
what everybody finds; later calls work on what is left there, which takes them as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import baselines
from .baselines import Arguments, Op

__all__ = ["MODULE", "OPS"]

MODULE = "liger_kernel.ops.utils"


def _op(module: str) -> Any:
    return baselines.optional(f"liger_kernel.ops.{module}")


def _block(columns: int) -> tuple[int, int]:
    """(block, warps) of a row; raises where rows are too long for it."""
    block, warps = _op("utils").calculate_settings(columns)
    return int(block), int(warps)


def rms_norm(x: Any, weight: Any) -> Any:
    return _op("rms_norm").rms_norm_forward(x, weight, 1e-6, 0.0, "llama", None)[0]


def rms_norm_residual(x: Any, residual: Any, weight: Any) -> Any:
    return _op("fused_add_rms_norm").fused_add_rms_norm_forward(x, residual, weight, 1e-6, 0.0, "llama")[:2]


def rms_norm_backward(grad_out: Any, x: Any, weight: Any, rstd: Any) -> Any:
    """Writes over grad_out, which is its default. Out of place it would fill the gradient with zeros first."""
    module, in_place = _op("rms_norm"), True
    mode = module._str_to_casting_mode["llama"]
    return module.rms_norm_backward(grad_out, x, weight, rstd, 0.0, mode, *_block(x.shape[-1]), in_place, None)


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    return _op("layer_norm").layer_norm_forward(x, weight, bias, 1e-5)[0]


def layer_norm_backward(grad_out: Any, x: Any, weight: Any, bias: Any, mean: Any, rstd: Any) -> Any:
    return _op("layer_norm").layer_norm_backward(grad_out, x, weight, bias, mean, rstd)


def softmax(x: Any) -> Any:
    return _op("softmax")._softmax_forward(x)[0]


def softmax_backward(grad_out: Any, out: Any) -> Any:
    several_blocks = False
    return _op("softmax")._softmax_backward(grad_out, out, *_block(out.shape[-1]), several_blocks)


def swiglu(gate: Any, up: Any) -> Any:
    return _op("swiglu").swiglu_forward(gate, up)[2]


def swiglu_backward(grad_out: Any, gate: Any, up: Any) -> Any:
    return _op("swiglu").swiglu_backward(gate, up, grad_out)


def rope(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return _op("rope").rope_forward(q, k, cos, sin)[:2]


def cross_entropy(logits: Any, targets: Any) -> Any:
    """cross_entropy_forward but for its checks of the targets: it waits for their answers, which no graph can hold."""
    torch = baselines.require_torch()
    module = _op("cross_entropy")
    rows, classes = logits.shape
    losses = torch.zeros(rows, dtype=logits.dtype, device=logits.device)
    module.liger_cross_entropy_kernel[(rows,)](
        X_ptr=logits, X_stride=logits.stride(0), Y_ptr=targets, Y_stride=1, weight_ptr=None,
        loss_ptr=losses, z_loss_ptr=None, loss_stride=1, token_accuracy_ptr=None, token_accuracy_stride=0,
        predicted_tokens_ptr=None, predicted_tokens_stride=0, n_cols=classes, n_non_ignore=rows,
        sum_non_ignore_weight=rows, weight_sum=0.0, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
        reduction="mean", softcap=None, RETURN_Z_LOSS=False, RETURN_TOKEN_ACCURACY=False,
        RETURN_PREDICTED_TOKENS=False, BLOCK_SIZE=min(module.MAX_FUSED_SIZE, 1 << (classes - 1).bit_length()),
        HAS_WEIGHT=False, HAS_SOFTCAPPING=False, HAS_GRADIENTS=False, num_warps=32,
    )  # fmt: skip
    return losses.sum()


def cross_entropy_backward(*arguments: Any) -> Any:
    return baselines.refuse("Liger makes the gradient in its forward pass; it has no backward to time alone")


def _copied(*which: int) -> Callable[[Arguments], Arguments]:
    """Copies of the arguments that it writes over."""
    return lambda arguments: tuple(x.clone() if i in which else x for i, x in enumerate(arguments))


OPS: dict[str, Op] = {
    "rms_norm": (rms_norm, None),
    "rms_norm_residual": (rms_norm_residual, None),
    "rms_norm_backward": (rms_norm_backward, _copied(0)),
    "layer_norm": (layer_norm, None),
    "layer_norm_backward": (layer_norm_backward, None),
    "softmax": (softmax, None),
    "softmax_backward": (softmax_backward, None),
    "swiglu": (swiglu, None),
    "swiglu_backward": (swiglu_backward, _copied(1, 2)),
    "rope": (rope, baselines.rope_as_models_have_it),
    "cross_entropy": (cross_entropy, None),
    "cross_entropy_backward": (cross_entropy_backward, None),
}
