"""add, swiglu and its gradients in Triton: one pass over memory, any strides. Shazeer, GLU Variants Improve
Transformer (2020).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ._device import narrow, offsets, widen
from ._host import Call, cdiv, merge_dims

ADD, SWIGLU, SWIGLU_BACKWARD = 0, 1, 2
BLOCK = 1024


@triton.jit
def _elementwise(
    a_ptr, b_ptr, grad_ptr, out_ptr, out_b_ptr, sizes, a_strides, b_strides, grad_strides, out_strides, out_b_strides,
    n,
    DIMS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """KIND 0: a + b. 1: silu(a) b. 2: the gradients of silu(a) b by a and b."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = widen(tl.load(a_ptr + offsets(i, sizes, a_strides, DIMS), mask=i < n, other=0.0))
    b = widen(tl.load(b_ptr + offsets(i, sizes, b_strides, DIMS), mask=i < n, other=0.0))
    out_at = out_ptr + offsets(i, sizes, out_strides, DIMS)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    if KIND == 0:
        tl.store(out_at, narrow(a + b, kind), mask=i < n)
    else:
        s = 1.0 / (1.0 + tl.exp(-a))
        if KIND == 1:
            tl.store(out_at, narrow(a * s * b, kind), mask=i < n)
        else:
            grad = widen(tl.load(grad_ptr + offsets(i, sizes, grad_strides, DIMS), mask=i < n, other=0.0))
            tl.store(out_at, narrow(grad * b * (s * (1.0 + a * (1.0 - s))), kind), mask=i < n)
            tl.store(out_b_ptr + offsets(i, sizes, out_b_strides, DIMS), narrow(grad * (a * s), kind), mask=i < n)


def _launch(call: Call, kind: int, a: Any, b: Any, out: Any, grad: Any = None, out_b: Any = None) -> None:
    given = [x if x is not None else a for x in (a, b, grad, out, out_b)]
    sizes, *strides = merge_dims(a.shape, *(x.stride() for x in given))
    names = ("a_strides", "b_strides", "grad_strides", "out_strides", "out_b_strides")
    call.launch(
        _elementwise, cdiv(a.numel(), BLOCK), a_ptr=a, b_ptr=b, grad_ptr=grad, out_ptr=out, out_b_ptr=out_b,
        sizes=sizes,
        **dict(zip(names, strides, strict=True)), n=a.numel(), DIMS=len(sizes), KIND=kind, BLOCK=BLOCK,
    )  # fmt: skip


def _pair(call: Call, names: tuple[str, str], a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    a = call.floats(names[0], a, (0, 8), rows=False)
    b = call.floats(names[1], b, (0, 8), like=a, rows=False)
    call.shape(names[1], b, a.shape)
    return a, b


def add(a: Any, b: Any, *, out: Any = None, stream: Any = None, dtype: Any = None) -> Any:
    """a + b, elementwise, as `flashkernel.add`; same shape and dtype, any strides, up to 8 dims; out may be a or b.

    Returns out. Added in float32, rounded once. Raises: ValueError for arguments that don't fit, NotImplementedError
    for arrays that Triton does not serve.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> x = torch.arange(3.0, device=fk_triton.default_device())
    >>> fk_triton.add(x, x, out=x).tolist()
    [0.0, 2.0, 4.0]
    """
    call = Call("add", stream, dtype)
    a, b = _pair(call, ("a", "b"), a, b)
    result = call.output("out", out, a.shape, a.dtype, rows=False, may_be=("a", "b"))
    _launch(call, ADD, a, b, result)
    return result


def swiglu(gate: Any, up: Any, *, out: Any = None, stream: Any = None, dtype: Any = None) -> Any:
    """gate / (1 + exp(-gate)) * up, elementwise, as `flashkernel.swiglu`; out may be gate or up. Raises: as `add`.

    Returns out. Computed in float32, rounded once.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> zero = torch.zeros(2, device=fk_triton.default_device())
    >>> fk_triton.swiglu(zero, zero + 1).tolist()
    [0.0, 0.0]
    """
    call = Call("swiglu", stream, dtype)
    gate, up = _pair(call, ("gate", "up"), gate, up)
    result = call.output("out", out, gate.shape, gate.dtype, rows=False, may_be=("gate", "up"))
    _launch(call, SWIGLU, gate, up, result)
    return result


def swiglu_backward(grad_out: Any, gate: Any, up: Any, *, stream: Any = None, dtype: Any = None) -> tuple[Any, Any]:
    """Gradients of `swiglu`, as `flashkernel.swiglu_backward`: (grad_gate, grad_up). Raises: as `add`.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> one = torch.ones(1, device=fk_triton.default_device())
    >>> [g.item() for g in fk_triton.swiglu_backward(one, 0 * one, one)]
    [0.5, 0.0]
    """
    call = Call("swiglu_backward", stream, dtype)
    gate, up = _pair(call, ("gate", "up"), gate, up)
    grad_out = call.floats("grad_out", grad_out, (0, 8), like=gate, rows=False)
    call.shape("grad_out", grad_out, gate.shape)
    grad_gate, grad_up = call.empty(gate.shape, gate.dtype), call.empty(up.shape, up.dtype)
    _launch(call, SWIGLU_BACKWARD, gate, up, grad_gate, grad_out, grad_up)
    return grad_gate, grad_up
