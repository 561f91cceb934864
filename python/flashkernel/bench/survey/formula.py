"""Attention by its formula, with every score in memory, in float32."""

from __future__ import annotations

from typing import Any

from .. import baselines

__all__ = ["alibi_bias", "backward", "forward"]


def alibi_bias(slopes: Any, queries: int, keys: int, dtype: Any) -> Any:
    """[1, heads, queries, keys]"""
    torch = baselines.require_torch()
    at = torch.arange(queries, device=slopes.device)[:, None] + (keys - queries)
    distance = (at - torch.arange(keys, device=slopes.device)[None, :]).abs().float()
    return (-slopes[None, :, None, None] * distance).to(dtype)


def _hidden(row: Any, queries: int, keys: int, device: Any) -> Any:
    """bool [queries, keys]: what a query does not see; None: it sees all."""
    torch = baselines.require_torch()
    left, right = row.window
    right = 0 if row.causal else right
    if left < 0 and right < 0:
        return None
    at = torch.arange(queries, device=device)[:, None] + (keys - queries)
    key = torch.arange(keys, device=device)[None, :]
    hidden = torch.zeros(queries, keys, dtype=torch.bool, device=device)
    if right >= 0:
        hidden |= key > at + right
    if left >= 0:
        hidden |= key < at - left
    return hidden


def _one(row: Any, tensors: Any, q: Any, k: Any, v: Any, bias: Any) -> tuple[Any, Any]:
    """(out, LSE) of [batch, heads, seq, dim] in float32."""
    torch = baselines.require_torch()
    queries, keys, groups = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
    scores = (q * row.dim**-0.5) @ k.transpose(-1, -2)
    if row.softcap:
        scores = row.softcap * torch.tanh(scores / row.softcap)
    if bias is not None:
        scores = scores + bias
    if row.alibi:
        scores = scores + alibi_bias(tensors.slopes, queries, keys, torch.float32)
    hidden = _hidden(row, queries, keys, q.device)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    if row.blocks:
        seen = tensors.blocks.repeat_interleave(128, 2)[:, :, :queries].repeat_interleave(128, 3)[..., :keys]
        scores = scores.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    if row.sinks:
        lse = torch.logaddexp(lse, tensors.sinks[None, :, None])
    return torch.exp(scores - lse[..., None]) @ v, lse


def _all(row: Any, tensors: Any, q: Any, k: Any, v: Any, bias: Any) -> tuple[Any, Any]:
    """Packed sequences one by one."""
    torch = baselines.require_torch()
    if not row.lengths:
        return _one(row, tensors, q, k, v, bias)
    parts = []
    for one in zip(*(torch.split(x, list(row.lengths)) for x in (q, k, v)), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in one)
        parts.append(_one(row, tensors, q, k, v, None))
    outs, lses = zip(*parts, strict=True)
    return torch.cat([x[0].transpose(0, 1) for x in outs]), torch.cat([x[0] for x in lses], -1)


def forward(row: Any, tensors: Any) -> Any:
    q, k, v = tensors.sets[0]
    bias = None if tensors.bias is None else tensors.bias[0].float()
    out, lse = _all(row, tensors, q.float(), k.float(), v.float(), bias)
    return (out.to(q.dtype), lse) if row.lse else out.to(q.dtype)


def backward(row: Any, tensors: Any) -> Any:
    torch = baselines.require_torch()
    leaves = [x.float().requires_grad_() for x in tensors.sets[0]]
    bias = None if tensors.bias is None else tensors.bias[0].float().requires_grad_()
    with torch.enable_grad():
        q, k, v = leaves
        out, _ = _all(row, tensors, q, k, v, bias)
        wanted = leaves + ([] if bias is None else [bias])
        grads = torch.autograd.grad(out, wanted, tensors.grad.float())
    return tuple(grad.to(tensors.grad.dtype) for grad in grads)
