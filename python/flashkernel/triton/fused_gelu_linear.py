"""Linear layers in Triton: activation(x weight^T + bias) in one kernel, and the gradients.

One program makes a BLOCK_M x BLOCK_N tile of the output; programs run in groups of rows so that neighbours find their
weights in L2. The activation works on the float32 sums before they are rounded. Hendrycks and Gimpel, GELU (2016).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ._device import dot, narrow, tanh, widen
from ._host import IS_INTERPRETED, Call, cdiv, device_function, power_of_two
from .reduce import sum_rows

ACTIVATIONS: dict[str | None, int] = {None: 0, "gelu_tanh": 1, "gelu": 2, "silu": 3}
GELU_TANH = tl.constexpr(1)
GELU = tl.constexpr(2)
SILU = tl.constexpr(3)
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
SQRT_HALF = tl.constexpr(0.7071067811865476)
INVERSE_SQRT_2_PI = tl.constexpr(0.3989422804014327)
CUBIC = tl.constexpr(0.044715)  # Hendrycks and Gimpel's fit


@device_function
def activate(x, ACTIVATION: tl.constexpr):
    """The activation in float32."""
    if ACTIVATION == GELU_TANH:
        return 0.5 * x * (1.0 + tanh((x + x * x * x * CUBIC) * SQRT_2_OVER_PI))
    elif ACTIVATION == GELU:
        return 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    elif ACTIVATION == SILU:
        return x / (1.0 + tl.exp(-x))
    else:
        return x


@device_function
def activation_gradient(x, ACTIVATION: tl.constexpr):
    """Its derivative in float32; the limits 0 and 1 at infinity, where the formulas would give inf * 0."""
    if ACTIVATION == GELU_TANH:
        t = tanh((x + x * x * x * CUBIC) * SQRT_2_OVER_PI)
        slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * SQRT_2_OVER_PI * (1.0 + 3.0 * x * x * CUBIC)
    elif ACTIVATION == GELU:
        slope = 0.5 * (1.0 + tl.erf(x * SQRT_HALF)) + x * INVERSE_SQRT_2_PI * tl.exp(-0.5 * x * x)
    elif ACTIVATION == SILU:
        s = 1.0 / (1.0 + tl.exp(-x))
        slope = s + x * s * (1.0 - s)
    else:
        slope = tl.full(x.shape, 1.0, tl.float32)
    if ACTIVATION != 0:
        slope = tl.where(x == float("inf"), 1.0, tl.where(x == float("-inf"), 0.0, slope))
    return slope


@triton.jit
def _matmul(
    a_ptr, b_ptr, bias_ptr, out_ptr, pre_ptr, a_m, a_k, b_k, b_n, out_m, pre_m, rows, cols, inner,
    HAS_BIAS: tl.constexpr, HAS_PRE: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out [rows, cols] = activation(a b + bias), a [rows, inner] and b [inner, cols] by any strides; pre receives a b
    + bias.
    """
    blocks_m = tl.cdiv(rows, BLOCK_M)
    blocks_n = tl.cdiv(cols, BLOCK_N)
    group = tl.program_id(0) // (GROUP * blocks_n)
    first = group * GROUP
    height = tl.minimum(blocks_m - first, GROUP)
    within = tl.program_id(0) % (GROUP * blocks_n)
    m = (first + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    a_row = a_ptr + m.to(tl.int64)[:, None] * a_m
    b_col = b_ptr + n.to(tl.int64)[None, :] * b_n
    acc = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for start in range(0, inner, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_at = a_row + k.to(tl.int64)[None, :] * a_k
        b_at = b_col + k.to(tl.int64)[:, None] * b_k
        a = tl.load(a_at, mask=(m[:, None] < rows) & (k[None, :] < inner), other=0.0)
        b = tl.load(b_at, mask=(k[:, None] < inner) & (n[None, :] < cols), other=0.0)
        acc = dot(a, b, acc)
    if HAS_BIAS:
        acc += widen(tl.load(bias_ptr + n, mask=n < cols, other=0.0))[None, :]
    keep = (m[:, None] < rows) & (n[None, :] < cols)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    if HAS_PRE:
        tl.store(pre_ptr + m.to(tl.int64)[:, None] * pre_m + n[None, :], narrow(acc, kind), mask=keep)
    value = narrow(activate(acc, ACTIVATION), kind)
    tl.store(out_ptr + m.to(tl.int64)[:, None] * out_m + n[None, :], value, mask=keep)


@triton.jit
def _activation_gradients(
    grad_ptr, pre_ptr, out_ptr, sums_ptr, grad_m, pre_m, rows, cols, rows_each,
    ACTIVATION: tl.constexpr, HAS_SUMS: tl.constexpr, HAS_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out = grad * activation'(pre) for `rows_each` rows and BLOCK_N columns; sums [chunks, cols] gets the column
    sums.
    """
    blocks_n = tl.cdiv(cols, BLOCK_N)
    chunk = tl.program_id(0) // blocks_n
    n = tl.program_id(0) % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.full([BLOCK_N], 0.0, tl.float32)
    for start in range(chunk * rows_each, tl.minimum(rows, (chunk + 1) * rows_each), BLOCK_M):
        m = (start + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        keep = (m < rows) & (n[None, :] < cols)
        g = widen(tl.load(grad_ptr + m * grad_m + n[None, :], mask=keep, other=0.0))
        if ACTIVATION != 0:
            g = g * activation_gradient(
                widen(tl.load(pre_ptr + m * pre_m + n[None, :], mask=keep, other=0.0)), ACTIVATION
            )
        if HAS_OUT:
            tl.store(out_ptr + m * cols + n[None, :], narrow(g, out_ptr.dtype.element_ty), mask=keep)
        total += tl.sum(g, 0)
    if HAS_SUMS:
        tl.store(sums_ptr + chunk.to(tl.int64) * cols + n, total, mask=n < cols)


def _tile(call: Call, dtype: torch.dtype, rows: int, activation: int) -> dict[str, int]:
    """Tile shapes by dtype, rows and compute capability. Shared memory: num_stages x (BLOCK_M + BLOCK_N) x BLOCK_K x
    size.
    """
    if IS_INTERPRETED:
        return {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP": 2, "num_warps": 4, "num_stages": 1}
    few = rows <= 32
    capability = call.capability
    if dtype == torch.float32 or capability < 80:  # no tensor cores
        shape = (16, 64, 32, 8, 4, 2) if few else (64, 64, 16, 8, 4, 2)
    elif 90 <= capability < 120:
        wide = rows >= 1024 and activation == 0  # the activations spill registers at 128 x 256
        shape = (16, 64, 128, 8, 4, 4) if few else (128, 256, 64, 8, 8, 3) if wide else (128, 128, 64, 8, 8, 4)
    else:  # up to 96 KiB: what sm86 and sm89 have
        shape = (16, 64, 64, 8, 4, 4) if few else (128, 128, 32, 8, 8, 3)
    return dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP", "num_warps", "num_stages"), shape, strict=True))


def _multiply(
    call: Call,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: Any = None,
    pre: Any = None,
    activation: int = 0,
) -> None:
    """out = activation(a b + bias); 2-D tensors by their strides, out and pre with contiguous rows."""
    rows, inner = a.shape
    cols = b.shape[1]
    shape = _tile(call, a.dtype, rows, activation)
    call.launch(
        _matmul, cdiv(rows, shape["BLOCK_M"]) * cdiv(cols, shape["BLOCK_N"]), a_ptr=a, b_ptr=b, bias_ptr=bias,
        out_ptr=out, pre_ptr=pre, a_m=a.stride(0), a_k=a.stride(1), b_k=b.stride(0), b_n=b.stride(1),
        out_m=out.stride(0), pre_m=0 if pre is None else pre.stride(0), rows=rows, cols=cols, inner=inner,
        HAS_BIAS=bias is not None, HAS_PRE=pre is not None, ACTIVATION=activation, **shape,
    )  # fmt: skip


def _activation(call: Call, name: str | None) -> int:
    call.need(name in ACTIVATIONS, f"activation={name!r}; None, 'gelu_tanh', 'gelu' or 'silu' is needed")
    return ACTIVATIONS[name]


def _operands(call: Call, x: Any, weight: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = call.floats("x", x, (1, 8))
    weight = call.floats("weight", weight, 2, like=x, rows=False)
    call.need(
        weight.shape[1] == x.shape[-1],
        f"weight.shape[1]={weight.shape[1]} but x.shape[{x.dim() - 1}]={x.shape[-1]}; they must match",
    )
    unit = weight.stride(0) == 1 or weight.stride(1) == 1 or min(weight.shape) <= 1
    call.need(unit, f"weight.strides={tuple(weight.stride())}; a contiguous dim is needed")
    return x, weight


def linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    activation: str | None = None,
    return_preactivation: bool = False,
    out: Any = None,
    stream: Any = None,
    dtype: Any = None,
) -> Any:
    """activation(x weight^T + bias), as `flashkernel.linear`; x [..., in_features], weight [out_features, in_features].

    activation: None, "gelu_tanh", "gelu" or "silu"; bias [out_features], x's dtype or float32. Sums and activation are
    float32, rounded once; float32 inputs are multiplied as float32, not TF32.

    Returns out, or (out, preactivation). Raises: ValueError for arguments that don't fit, NotImplementedError for
    leading dims that no one stride can walk and for arrays that Triton does not serve.

    Source: Hendrycks and Gimpel, GELU (2016).

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> device = fk_triton.default_device()
    >>> x, weight = torch.ones(2, 3, device=device), torch.ones(4, 3, device=device)
    >>> fk_triton.linear(x, weight)[0].tolist()
    [3.0, 3.0, 3.0, 3.0]
    """
    call = Call("linear", stream, dtype)
    kind = _activation(call, activation)
    x, weight = _operands(call, x, weight)
    if bias is not None:
        bias = call.floats("bias", bias, 1, like=x, or_float32=True)
        call.shape("bias", bias, weight.shape[:1])
    shape = (*x.shape[:-1], weight.shape[0])
    result = call.output("out", out, shape, x.dtype)
    pre = call.empty(shape, x.dtype) if return_preactivation else None
    if result.numel():
        rows = result.numel() // result.shape[-1]
        a = call.as_rows("x", x) if x.shape[-1] else x.new_empty((rows, 0))
        pre_rows = None if pre is None else call.as_rows("preactivation", pre)
        _multiply(call, a, weight.T, call.as_rows("out", result), bias=bias, pre=pre_rows, activation=kind)
    return result if pre is None else (result, pre)


def linear_backward(
    grad_out: Any,
    x: Any,
    weight: Any,
    preactivation: Any = None,
    *,
    activation: str | None = None,
    need_x: bool = True,
    need_weight: bool = True,
    need_bias: bool = True,
    stream: Any = None,
    dtype: Any = None,
) -> tuple[Any, Any, Any]:
    """Gradients of `linear`, as `flashkernel.linear_backward`: g = grad_out * activation'(preactivation), then g
    weight, g^T x, sums.

    grad_out, preactivation: [..., out_features], x's dtype. g is rounded to x's dtype for the products; the bias's
    sums take it unrounded.

    Returns (grad_x, grad_weight, grad_bias), None for those not asked for. Raises: as `linear`.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> device = fk_triton.default_device()
    >>> x, weight = torch.ones(2, 3, device=device), torch.ones(4, 3, device=device)
    >>> fk_triton.linear_backward(torch.ones(2, 4, device=x.device), x, weight)[2].tolist()
    [2.0, 2.0, 2.0, 2.0]
    """
    call = Call("linear_backward", stream, dtype)
    kind = _activation(call, activation)
    x, weight = _operands(call, x, weight)
    shape = (*x.shape[:-1], weight.shape[0])
    grad_out = call.floats("grad_out", grad_out, x.dim(), like=x)
    call.shape("grad_out", grad_out, shape)
    call.need(kind == 0 or preactivation is not None, f"activation={activation!r} without preactivation; it is needed")
    if kind:
        preactivation = call.floats("preactivation", preactivation, x.dim(), like=x)
        call.shape("preactivation", preactivation, shape)
    grad_x = call.empty(x.shape, x.dtype) if need_x else None
    grad_weight = call.empty(weight.shape, weight.dtype) if need_weight else None
    grad_bias = call.empty(weight.shape[:1], weight.dtype) if need_bias else None
    if grad_out.numel() == 0 or x.shape[-1] == 0:  # sums over nothing
        for grad in (grad_x, grad_weight, grad_bias):
            if grad is not None:
                call.fill(grad, 0.0)
        if grad_out.numel() == 0 or not need_bias:
            return grad_x, grad_weight, grad_bias
    g = call.as_rows("grad_out", grad_out)
    rows, cols = g.shape
    if kind or need_bias:
        pre = call.as_rows("preactivation", preactivation) if kind else None
        rounded = call.empty((rows, cols), x.dtype) if kind else None
        block_m, block_n = 32, min(128, power_of_two(cols))
        chunks = max(1, min(cdiv(rows, block_m), cdiv(4 * call.num_multiprocessors, cdiv(cols, block_n))))
        sums = call.empty((chunks, cols), torch.float32) if need_bias else None
        call.launch(
            _activation_gradients, chunks * cdiv(cols, block_n), grad_ptr=g, pre_ptr=pre, out_ptr=rounded,
            sums_ptr=sums,
            grad_m=g.stride(0), pre_m=pre.stride(0) if pre is not None else 0, rows=rows, cols=cols,
            rows_each=cdiv(cdiv(rows, chunks), block_m) * block_m, ACTIVATION=kind, HAS_SUMS=need_bias,
            HAS_OUT=bool(kind),
            BLOCK_M=block_m, BLOCK_N=block_n,
        )  # fmt: skip
        if sums is not None and grad_bias is not None:
            sum_rows(call, sums, grad_bias)
        g = g if rounded is None else rounded
    if x.shape[-1]:
        if grad_x is not None:
            _multiply(call, g, weight, call.as_rows("grad_x", grad_x))
        if grad_weight is not None:
            _multiply(call, g.T, call.as_rows("x", x), grad_weight)
    return grad_x, grad_weight, grad_bias
