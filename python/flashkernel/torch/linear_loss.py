"""The losses that take hidden states and the output layer's weight, for torch, with their gradients: the logits are
never held whole.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

import flashkernel as fk

from ._library import autocast, define, dense, direct, empty, no_second_derivative
from ._linear_loss_at_once import linear_loss_at_once, serves, why_not

__all__ = ["LinearCrossEntropyLoss", "linear_cross_entropy", "linear_selected_log_prob"]

Reduction = Literal["none", "sum", "mean"]
_LOSS = "SymInt ignore_index, float label_smoothing, float z_loss, float softcap, str reduction"
_NEEDS = "ScalarType? bias_dtype, bool float32_weight, bool need_x, bool need_weight, bool need_bias"
_LOG_PROB = "float softcap, float temperature, SymInt ignore_index"


def _options(
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, reduction: Reduction
) -> dict[str, Any]:
    return {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "softcap": softcap,
        "reduction": reduction,
    }


def _gradients(
    op: Any, grad: Any, tensors: Any, options: dict[str, Any], bias_dtype: Any, float32_weight: bool, needs: Any
) -> Any:
    x = tensors[0]
    need_x, need_weight, need_bias = needs
    grads = op(
        dense(grad),
        *tensors,
        **options,
        need_x=need_x,
        need_weight=need_weight,
        need_bias=need_bias,
        float32_weight=float32_weight,
    )
    grad_x, grad_weight, grad_bias = (empty(x) if grad is None else grad for grad in grads)
    return grad_x, grad_weight, grad_bias.to(bias_dtype) if need_bias else grad_bias


def _gradients_fake(x: Any, weight: Any, bias_dtype: Any, float32_weight: bool, needs: Any) -> Any:
    need_x, need_weight, need_bias = needs
    return (
        x.new_empty(x.shape) if need_x else empty(x),
        weight.new_empty(weight.shape, dtype=torch.float32 if float32_weight else weight.dtype)
        if need_weight
        else empty(x),
        x.new_empty(weight.shape[0], dtype=bias_dtype) if need_bias else empty(x),
    )


def _loss_kernel(x: Any, weight: Any, targets: Any, bias: Any, class_weights: Any, *options: Any) -> Any:
    return fk.linear_cross_entropy(
        x,
        weight,
        targets,
        bias,
        class_weights=class_weights,
        **_options(*options),
        return_z_loss=True,
        return_lse=True,
    )


def _loss_fake(x: Any, weight: Any, targets: Any, bias: Any, class_weights: Any, *options: Any) -> Any:
    rows = x.new_empty(x.shape[:1], dtype=torch.float32)
    loss = torch.empty_like(rows) if options[-1] == "none" else x.new_empty((), dtype=torch.float32)
    return loss, torch.empty_like(loss), rows


def _loss_backward_kernel(
    grad: Any, x: Any, weight: Any, targets: Any, lse: Any, bias: Any, class_weights: Any, *rest: Any
) -> Any:
    options = {**_options(*rest[:5]), "class_weights": class_weights}
    return _gradients(
        fk.linear_cross_entropy_backward, grad, (x, weight, targets, lse, bias), options, rest[5], rest[6], rest[7:]
    )


def _loss_backward_fake(
    grad: Any, x: Any, weight: Any, targets: Any, lse: Any, bias: Any, class_weights: Any, *rest: Any
) -> Any:
    return _gradients_fake(x, weight, rest[5], rest[6], rest[7:])


def _loss_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, targets, bias, class_weights, *ctx.options = inputs
    ctx.save_for_backward(x, weight, targets, output[2], bias, class_weights)
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)


def _loss_grad(ctx: Any, grad: Any, *_: Any) -> Any:
    if grad is None:
        return (None,) * 10
    x, weight, targets, lse, bias, class_weights = ctx.saved_tensors
    needs = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]
    grads = _loss_backward(
        grad, x, weight, targets, lse, bias, class_weights, *ctx.options,
        None if bias is None else bias.dtype, False, *needs,
    )  # fmt: skip
    grad_x, grad_weight, grad_bias = (g if needed else None for g, needed in zip(grads, needs, strict=True))
    return grad_x, grad_weight, None, grad_bias, *(None,) * 6


def _log_prob_kernel(
    x: Any, weight: Any, targets: Any, bias: Any, softcap: float, temperature: float, ignore: int
) -> Any:
    return fk.linear_selected_log_prob(
        x, weight, targets, bias, softcap=softcap, temperature=temperature, ignore_index=ignore, return_lse=True
    )


def _log_prob_fake(x: Any, *_: Any) -> Any:
    rows = x.new_empty(x.shape[:1], dtype=torch.float32)
    return rows, torch.empty_like(rows)


def _log_prob_backward_kernel(
    grad: Any, x: Any, weight: Any, targets: Any, lse: Any, bias: Any, softcap: float, temperature: float, ignore: int,
    *rest: Any,
) -> Any:  # fmt: skip
    options = {"softcap": softcap, "temperature": temperature, "ignore_index": ignore}
    return _gradients(
        fk.linear_selected_log_prob_backward, grad, (x, weight, targets, lse, bias), options, rest[0], rest[1], rest[2:]
    )


def _log_prob_backward_fake(grad: Any, x: Any, weight: Any, *rest: Any) -> Any:
    return _gradients_fake(x, weight, rest[6], rest[7], rest[8:])


def _log_prob_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, targets, bias, *ctx.options = inputs
    ctx.save_for_backward(x, weight, targets, output[1], bias)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _log_prob_grad(ctx: Any, grad: Any, _: Any) -> Any:
    if grad is None:
        return (None,) * 7
    x, weight, targets, lse, bias = ctx.saved_tensors
    needs = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]
    grads = _log_prob_backward(
        grad, x, weight, targets, lse, bias, *ctx.options, None if bias is None else bias.dtype, False, *needs
    )
    grad_x, grad_weight, grad_bias = (g if needed else None for g, needed in zip(grads, needs, strict=True))
    return grad_x, grad_weight, None, grad_bias, None, None, None


_loss_backward = define(
    "linear_cross_entropy_backward(Tensor grad_loss, Tensor x, Tensor weight, Tensor targets, Tensor lse, "
    f"Tensor? bias, Tensor? class_weights, {_LOSS}, {_NEEDS}) -> (Tensor, Tensor, Tensor)",
    _loss_backward_kernel,
    _loss_backward_fake,
    backward=no_second_derivative("linear_cross_entropy_backward"),
)
_loss = define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor targets, Tensor? bias, Tensor? class_weights, "
    f"{_LOSS}) -> (Tensor, Tensor, Tensor)",
    _loss_kernel,
    _loss_fake,
    backward=_loss_grad,
    setup_context=_loss_setup,
    constants=("class_weights",),
)
_log_prob_backward = define(
    "linear_selected_log_prob_backward(Tensor grad_log_prob, Tensor x, Tensor weight, Tensor targets, Tensor lse, "
    f"Tensor? bias, {_LOG_PROB}, {_NEEDS}) -> (Tensor, Tensor, Tensor)",
    _log_prob_backward_kernel,
    _log_prob_backward_fake,
    backward=no_second_derivative("linear_selected_log_prob_backward"),
)
_log_prob = define(
    f"linear_selected_log_prob(Tensor x, Tensor weight, Tensor targets, Tensor? bias, {_LOG_PROB}) -> (Tensor, Tensor)",
    _log_prob_kernel,
    _log_prob_fake,
    backward=_log_prob_grad,
    setup_context=_log_prob_setup,
)


def _rows(x: torch.Tensor) -> torch.Tensor:
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    class_weights: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: Reduction = "mean",
    return_z_loss: bool = False,
    return_lse: bool = False,
    recompute: bool | None = None,
) -> Any:
    """Cross-entropy of the logits x weight^T + bias against class indices, with gradients of x, weight and bias;
    `flashkernel.linear_cross_entropy` has the options. x is [..., features], targets [...]; a loss a token has the
    shape of targets. Under torch.autocast in its dtype. The z-loss and lse that are returned carry no gradient.

    recompute: True: the logits are computed a chunk at a time, and again for the gradients. False: the gradients are
        worked out with the loss and kept until they are asked for, which takes three products, not four, and for
        logits memory of twice the weight's; "sum" and "mean" without class_weights, z_loss and softcap have it. None:
        False on a GPU where it is to be had and gradients are wanted (not in the invariant mode), else True.

    >>> import torch, flashkernel.torch as fkt
    >>> weight = torch.ones(4, 8, requires_grad=True)
    >>> fkt.linear_cross_entropy(torch.zeros(2, 3, 8), weight, torch.zeros(2, 3, dtype=torch.int64)).backward()
    >>> weight.grad.shape
    torch.Size([4, 8])
    """
    x, weight, bias = autocast(x, weight, bias)
    flat, indices = _rows(x), targets.reshape(-1)
    options = ignore_index, label_smoothing, z_loss, softcap, reduction
    if recompute is False and (reason := why_not(class_weights, z_loss, softcap, reduction)) is not None:
        raise NotImplementedError(f"linear_cross_entropy: recompute=False with {reason}; True or None is needed")
    if recompute is None:
        recompute = not serves(flat, weight, bias, class_weights, z_loss, softcap, reduction)
    if not recompute:
        needs = flat.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad
        loss, lse = linear_loss_at_once(flat, weight, indices, bias, ignore_index, label_smoothing, reduction, *needs)[
            :2
        ]
        results = loss, torch.zeros_like(loss), lse
    elif direct(flat, weight, bias, class_weights):
        results = _loss_kernel(flat, weight, indices, bias, class_weights, *options)
    else:
        results = _loss(flat, weight, indices, bias, class_weights, *options)
    loss, z, lse = results
    if reduction == "none":
        loss, z = loss.reshape(targets.shape), z.reshape(targets.shape)
    more = ([z] if return_z_loss else []) + ([lse.reshape(targets.shape)] if return_lse else [])
    return (loss, *more) if more else loss


def linear_selected_log_prob(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    softcap: float = 0.0,
    temperature: float = 1.0,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Each token's log-probability under softmax((x weight^T + bias) / temperature), float32, of the shape of targets,
    with gradients of x, weight and bias. x is [..., features], targets [...].

    >>> import torch, flashkernel.torch as fkt
    >>> x, weight = torch.zeros(2, 3, 8), torch.ones(4, 8)
    >>> fkt.linear_selected_log_prob(x, weight, torch.zeros(2, 3, dtype=torch.int64)).shape
    torch.Size([2, 3])
    """
    x, weight, bias = autocast(x, weight, bias)
    flat, indices = _rows(x), targets.reshape(-1)
    call = _log_prob_kernel if direct(flat, weight, bias) else _log_prob
    return call(flat, weight, indices, bias, softcap, temperature, ignore_index)[0].reshape(targets.shape)


class LinearCrossEntropyLoss(torch.nn.Module):
    """`torch.nn.CrossEntropyLoss` of an output layer: called with its weight, hidden states and targets.

    >>> import torch, flashkernel.torch as fkt
    >>> head, loss = torch.nn.Linear(8, 4), fkt.LinearCrossEntropyLoss(z_loss=1e-4)
    >>> loss(torch.randn(2, 3, 8), head.weight, torch.zeros(2, 3, dtype=torch.int64), head.bias).shape
    torch.Size([])
    """

    class_weights: torch.Tensor | None

    def __init__(
        self,
        class_weights: torch.Tensor | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float = 0.0,
        reduction: Reduction = "mean",
        recompute: bool | None = None,
    ):
        super().__init__()
        self.register_buffer("class_weights", class_weights)
        self.options = {
            **_options(ignore_index, label_smoothing, z_loss, softcap, reduction),
            "recompute": recompute,
        }

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return linear_cross_entropy(x, weight, targets, bias, class_weights=self.class_weights, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
