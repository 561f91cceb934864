"""linear_cross_entropy and linear_selected_log_prob have no Triton kernels: each call says so.

Their speed is that of a product whose chunks a loss takes up, and `backend="triton"` has neither `linear`'s gradient by
chunks nor a workspace to hold them. `linear` and `cross_entropy` are there, with the logits between them.
"""

from __future__ import annotations

from typing import Any, NoReturn

from ._host import Call


def _refuse(op: str, stream: Any, dtype: Any, instead: str) -> NoReturn:
    Call(op, stream, dtype).refuse(f"backend='triton' has no kernel for it; backend=None is needed, or {instead}")


def linear_cross_entropy(
    x: Any,
    weight: Any,
    targets: Any,
    bias: Any = None,
    *,
    class_weights: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    return_z_loss: bool = False,
    return_lse: bool = False,
    stream: Any = None,
    dtype: Any = None,
) -> Any:
    """Refused: `flashkernel.linear_cross_entropy` has no Triton kernel. Raises: NotImplementedError.

    >>> import torch, flashkernel.triton as fk_triton
    >>> x, weight = torch.ones(2, 8), torch.ones(4, 8)
    >>> fk_triton.linear_cross_entropy(x, weight, torch.tensor([0, 1]))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    NotImplementedError: linear_cross_entropy: backend='triton' has no kernel for it; backend=None is needed, or ...
    """
    _refuse("linear_cross_entropy", stream, dtype, "linear and cross_entropy")


def linear_cross_entropy_backward(
    grad_loss: Any,
    x: Any,
    weight: Any,
    targets: Any,
    lse: Any,
    bias: Any = None,
    *,
    class_weights: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    need_x: bool = True,
    need_weight: bool = True,
    need_bias: bool = True,
    float32_weight: bool = False,
    stream: Any = None,
    dtype: Any = None,
) -> Any:
    """Refused: `flashkernel.linear_cross_entropy_backward` has no Triton kernel. Raises: NotImplementedError.

    >>> import torch, flashkernel.triton as fk_triton
    >>> x, weight, lse = torch.ones(2, 8), torch.ones(4, 8), torch.ones(2)
    >>> fk_triton.linear_cross_entropy_backward(lse, x, weight, torch.tensor([0, 1]), lse)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    NotImplementedError: linear_cross_entropy_backward: backend='triton' has no kernel for it; ...
    """
    _refuse("linear_cross_entropy_backward", stream, dtype, "cross_entropy_backward and linear_backward")


def linear_selected_log_prob(
    x: Any,
    weight: Any,
    targets: Any,
    bias: Any = None,
    *,
    softcap: float = 0.0,
    temperature: float = 1.0,
    ignore_index: int = -100,
    return_lse: bool = False,
    stream: Any = None,
    dtype: Any = None,
) -> Any:
    """Refused: `flashkernel.linear_selected_log_prob` has no Triton kernel. Raises: NotImplementedError.

    >>> import torch, flashkernel.triton as fk_triton
    >>> x, weight = torch.ones(2, 8), torch.ones(4, 8)
    >>> fk_triton.linear_selected_log_prob(x, weight, torch.tensor([0, 1]))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    NotImplementedError: linear_selected_log_prob: backend='triton' has no kernel for it; ...
    """
    _refuse("linear_selected_log_prob", stream, dtype, "linear and log_softmax")


def linear_selected_log_prob_backward(
    grad_log_prob: Any,
    x: Any,
    weight: Any,
    targets: Any,
    lse: Any,
    bias: Any = None,
    *,
    softcap: float = 0.0,
    temperature: float = 1.0,
    ignore_index: int = -100,
    need_x: bool = True,
    need_weight: bool = True,
    need_bias: bool = True,
    float32_weight: bool = False,
    stream: Any = None,
    dtype: Any = None,
) -> Any:
    """Refused: `flashkernel.linear_selected_log_prob_backward` has no Triton kernel. Raises: NotImplementedError.

    >>> import torch, flashkernel.triton as fk_triton
    >>> x, weight, lse = torch.ones(2, 8), torch.ones(4, 8), torch.ones(2)
    >>> fk_triton.linear_selected_log_prob_backward(lse, x, weight, torch.tensor([0, 1]), lse)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    NotImplementedError: linear_selected_log_prob_backward: backend='triton' has no kernel for it; ...
    """
    _refuse("linear_selected_log_prob_backward", stream, dtype, "log_softmax_backward and linear_backward")
