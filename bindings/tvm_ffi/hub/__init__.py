"""FlashKernel as a kernel of the Hugging Face Hub: attention, norms, SwiGLU and linear for torch, with gradients.

The names and layouts of the attention functions are those of the package flash-attn, by which Transformers finds them
(`attn_implementation="OWNER/flashkernel"`); the layers are those of `kernels.use_kernel_mapping`. The compiled ops lie
beside this file and need tvm_ffi and torch alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import tvm_ffi

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "layer_norm", "layers", "linear", "ops", "rms_norm", "swiglu"]

ops = tvm_ffi.load_module(str(Path(__file__).with_name("flashkernel_tvm_ffi.so")))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose last dim is contiguous, as the kernels read it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class _Attention(torch.autograd.Function):
    """cu_seqlens: a pair, or None where tensors are [batch, heads, seq, head_dim]."""

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, slopes: Any, cu_seqlens: Any, lengths: Any, options: Any, exact: bool
    ) -> Any:
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
        if cu_seqlens is None:
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
            ops.attention(q, k, v, out, lse, *options, None, slopes, None)
        else:
            lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
            ops.attention_varlen(q, k, v, *cu_seqlens, out, lse, *lengths, *options, slopes, None)
        ctx.save_for_backward(q, k, v, out, lse, slopes, *(cu_seqlens or ()))
        ctx.lengths, ctx.options, ctx.exact = lengths, options, exact
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Any, _: Any) -> Any:
        q, k, v, out, lse, slopes, *cu_seqlens = ctx.saved_tensors
        grads = [
            torch.empty_like(x) if need else None for x, need in zip((q, k, v), ctx.needs_input_grad[:3], strict=True)
        ]
        grad_out = _rows(grad_out)
        if cu_seqlens:
            ops.attention_varlen_backward(
                grad_out,
                q,
                k,
                v,
                out,
                lse,
                None,
                *cu_seqlens,
                *grads,
                None,
                *ctx.lengths,
                ctx.exact,
                *ctx.options,
                slopes,
                None,
            )
        else:
            ops.attention_backward(
                grad_out, q, k, v, out, lse, None, *grads, None, None, ctx.exact, *ctx.options, None, slopes, None
            )
        return *grads, None, None, None, None, None


def _options(
    dropout_p: float, scale: float | None, causal: bool, window: tuple[int, int], softcap: float
) -> tuple[Any, ...]:
    if dropout_p:
        raise NotImplementedError(f"flashkernel: dropout_p={dropout_p}; attention without dropout is needed")
    return bool(causal), int(window[0]), int(window[1]), float(softcap), None if scale is None else float(scale)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """q: [batch, seq_q, heads, head_dim]; k, v: [batch, seq_k, heads_kv, head_dim]. Returns q's shape; with
    return_attn_probs also the LSE, float32 [batch, heads, seq_q], and None for probabilities that are never made."""
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap)
    heads_first = [_rows(x).transpose(1, 2) for x in (q, k, v)]
    out, lse = _Attention.apply(*heads_first, alibi_slopes, None, (), options, deterministic)
    return (out.transpose(1, 2), lse, None) if return_attn_probs else out.transpose(1, 2)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """q: [total_q, heads, head_dim]; k, v: [total_k, heads_kv, head_dim]; cu_seqlens: int32 [batch + 1]."""
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap)
    starts, lengths = (cu_seqlens_q, cu_seqlens_k), (int(max_seqlen_q), int(max_seqlen_k))
    out, lse = _Attention.apply(*map(_rows, (q, k, v)), alibi_slopes, starts, lengths, options, deterministic)
    return (out, lse, None) if return_attn_probs else out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, eps: float) -> Any:
        out, rstd = torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        ops.rms_norm(x, None, weight, out, None, rstd, eps)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Any) -> Any:
        x, weight, rstd = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        ops.rms_norm_backward(_rows(grad_out), x, weight, rstd, None, grad_x, grad_weight)
        return grad_x, grad_weight, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; weight: [features], x's dtype or float32."""
    return _RmsNorm.apply(x.contiguous(), weight, float(eps))


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, eps: float) -> Any:
        out = torch.empty_like(x)
        mean, rstd = (torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(2))
        ops.layer_norm(x, None, weight, bias, out, None, mean, rstd, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Any) -> Any:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grads = [
            torch.empty_like(p) if need else None
            for p, need in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        ]
        ops.layer_norm_backward(_rows(grad_out), x, weight, mean, rstd, None, grad_x, *grads)
        return grad_x, *grads, None


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """LayerNorm over the last dim; weight and bias: [features], x's dtype or float32."""
    return _LayerNorm.apply(x.contiguous(), weight, bias, float(eps))


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Any, up: Any) -> Any:
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        ops.swiglu(gate, up, out)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Any) -> Any:
        gate, up = ctx.saved_tensors
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up)]
        ops.swiglu_backward(_rows(grad_out), gate, up, *grads)
        return tuple(grads)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return _Swiglu.apply(_rows(gate), _rows(up))


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "none"
) -> torch.Tensor:
    """activation(x weight^T + bias) in one kernel; weight: [out_features, in_features]; activation: "none", "gelu",
    "gelu_tanh" or "silu"."""
    return _Linear.apply(_rows(x), weight, bias, activation)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, activation: str) -> Any:
        out = torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype, device=x.device)
        before = torch.empty_like(out) if activation != "none" and any(ctx.needs_input_grad) else None
        ops.linear(x, weight, bias, out, before, activation)
        ctx.save_for_backward(x, weight, bias, before)
        ctx.activation = activation
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Any) -> Any:
        x, weight, bias, before = ctx.saved_tensors
        grads = [
            torch.empty(p.shape, dtype=p.dtype, device=p.device) if need else None
            for p, need in zip((x, weight, bias), ctx.needs_input_grad[:3], strict=True)
        ]
        ops.linear_backward(_rows(grad_out), x, weight, before, *grads, ctx.activation)
        return *grads, None


from . import layers  # noqa: E402
