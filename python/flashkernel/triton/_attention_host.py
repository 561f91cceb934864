"""The host side that every Triton attention op shares: views, options, checks, tile shapes.

Called by flash_attention.py, flash_attention_backward.py and paged_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..attention_options import AttentionOptions
from ._host import IS_INTERPRETED, Call, name_of, power_of_two


def as_4d(call: Call, name: str, x: Any, like: torch.Tensor | None = None) -> torch.Tensor:
    """[batch, heads, seq, head_dim]; missing leading dims are 1."""
    x = call.floats(name, x, (2, 4), like=like)
    while x.dim() < 4:
        x = x.unsqueeze(0)
    return x


def check_shapes(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: tuple[str, str] = ("k", "v"), head: int = 1
) -> None:
    """Heads and head dims of q against k and v, whose heads are dim `head`. names: what k and v are called."""
    k_name, v_name = names
    call.need(
        k.shape[-1] == q.shape[-1], f"{k_name}.shape[3]={k.shape[-1]} but q.shape[3]={q.shape[-1]}; they must match"
    )
    for d in range(k.dim() - 1):
        call.need(
            v.shape[d] == k.shape[d],
            f"{v_name}.shape[{d}]={v.shape[d]} but {k_name}.shape[{d}]={k.shape[d]}; they must match",
        )
    for name, x in (("q", q), (v_name, v)):
        call.need(1 <= x.shape[-1] <= 512, f"{name} has head_dim {x.shape[-1]}; 1 to 512 is needed")
        if x.shape[-1] > 256:
            call.refuse(f"{name} has head_dim {x.shape[-1]}; the Triton kernels take 1 to 256")
    heads_q, heads_kv = q.shape[1], k.shape[head]
    call.need(
        heads_kv > 0 and heads_q % heads_kv == 0 or heads_q == 0,
        f"{heads_q} query heads with {heads_kv} key heads; a multiple is needed",
    )


def dense(call: Call, q: Any, k: Any, v: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v) as [batch, heads, seq, head_dim], checked."""
    q4 = as_4d(call, "q", q)
    k4, v4 = as_4d(call, "k", k, q4), as_4d(call, "v", v, q4)
    call.need(k4.shape[0] == q4.shape[0], f"k.shape[0]={k4.shape[0]} but q.shape[0]={q4.shape[0]}; they must match")
    check_shapes(call, q4, k4, v4)
    return q4, k4, v4


def packed(
    call: Call, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """(q, k, v, (cu_q, cu_k)) checked, the first three as views [1, heads, total, head_dim]."""
    q = call.floats("q", q, 3)
    k, v = call.floats("k", k, 3, like=q), call.floats("v", v, 3, like=q)
    cu_q, cu_k = call.index("cu_seqlens_q", cu_q), call.index("cu_seqlens_k", cu_k)
    call.need(cu_q.shape[0] >= 1, "cu_seqlens_q is empty; [batch + 1] is needed")
    call.shape("cu_seqlens_k", cu_k, cu_q.shape)
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        call.need(cu.shape[0] < 2 or cu.stride(0) == 1, f"{name}.strides[0]={cu.stride(0)}; 1 is needed")
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    check_shapes(call, q, k, v)
    return q, k, v, (cu_q, cu_k)


@dataclass
class Options:
    """The keyword arguments of a call as the kernels take them; `arguments` are a kernel's own keywords."""

    scale: float
    softcap: float
    left: int
    right: int
    bias: torch.Tensor | None
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    has_left: bool
    has_right: bool

    def arguments(self) -> dict[str, Any]:
        bias = (0, 0, 0, 0) if self.bias is None else self.bias.stride()
        slopes = (0, 0) if self.slopes is None else self.slopes.stride()
        return {
            "scale": self.scale,
            "softcap": self.softcap,
            "left": self.left,
            "right": self.right,
            "bias_ptr": self.bias,
            "bias_b": bias[0],
            "bias_h": bias[1],
            "bias_q": bias[2],
            "bias_k": bias[3],
            "slopes_ptr": self.slopes,
            "slopes_b": slopes[0],
            "slopes_h": slopes[1],
            "sinks_ptr": self.sinks,
            "HAS_SOFTCAP": self.softcap > 0,
            "HAS_BIAS": self.bias is not None,
            "HAS_SLOPES": self.slopes is not None,
            "HAS_SINKS": self.sinks is not None,
            "HAS_LEFT": self.has_left,
            "HAS_RIGHT": self.has_right,
        }


def options(call: Call, q: torch.Tensor, seq_k: int, given: AttentionOptions, *, batch: int | None = None) -> Options:
    """Checks the options of an attention call and expands what broadcasts. q [batch, heads, seq_q, head_dim]; packed
    sequences are one long one there, and `batch` says how many they are."""
    heads, seq_q, head_dim = q.shape[1:]
    batch = q.shape[0] if batch is None else batch
    refusal = given.refusal()
    if refusal is not None:
        call.fail(refusal)
    if given.mask is not None:
        call.refuse("mask is given; the Triton kernels read no packed mask")
    if given.block_mask is not None:
        call.refuse("block_mask is given; the Triton kernels read no block mask")
    if given.alibi != "distance":
        call.refuse(f'alibi={given.alibi!r}; the Triton kernels have "distance" alone')
    left, right = given.sides()
    bias, alibi_slopes, sinks = given.bias, given.alibi_slopes, given.sinks
    # No token is further away than the sequences are long: the kernels add these in 32 bits.
    far = seq_q + seq_k
    if bias is not None:
        bias = call.any_input("bias", bias)
        call.floats("bias", bias, (1, 4), rows=False)
        try:
            bias = bias.expand(batch, heads, seq_q, seq_k)
        except RuntimeError:
            call.fail(
                f"bias has shape {tuple(bias.shape)}; one that broadcasts to {(batch, heads, seq_q, seq_k)} is needed"
            )
    if alibi_slopes is not None:
        slopes = call.any_input("alibi_slopes", alibi_slopes)
        call.need(slopes.dtype == torch.float32, f"alibi_slopes is {name_of(slopes.dtype)}; float32 is needed")
        if tuple(slopes.shape) not in ((heads,), (batch, heads)):
            call.fail(f"alibi_slopes has shape {tuple(slopes.shape)}; {(heads,)} or {(batch, heads)} is needed")
        alibi_slopes = slopes.expand(batch, heads)
    if sinks is not None:
        sinks = call.float32("sinks", sinks, (heads,))
        call.need(heads <= 1 or sinks.stride(0) == 1, f"sinks.strides[0]={sinks.stride(0)}; 1 is needed")
    return Options(
        scale=given.factor(head_dim),
        softcap=float(given.softcap),
        left=min(left, far) if left is not None else 0,
        right=min(right, far) if right is not None else 0,
        bias=bias,
        slopes=alibi_slopes,
        sinks=sinks,
        has_left=left is not None,
        has_right=right is not None,
    )


def given_gradients(call: Call, grads: Any, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor] | None:
    """The caller's arrays for the gradients of q, k and v, checked before anything is written."""
    if grads is None:
        return None
    if not isinstance(grads, tuple | list):
        call.fail(f"grads={type(grads).__name__}; (grad_q, grad_k, grad_v) is needed")
    if len(grads) != 3:
        call.fail(f"grads has {len(grads)} entries; (grad_q, grad_k, grad_v) is needed")
    return [
        call.output(f"grads[{i}]", to, x.shape, x.dtype) for i, (to, x) in enumerate(zip(grads, inputs, strict=True))
    ]


def written_gradients(call: Call, given: list[torch.Tensor] | None, results: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results, in the caller's arrays where there are some."""
    if given is None:
        return results
    with call.on_device():  # on the stream of the kernels
        for to, result in zip(given, results, strict=True):
            to.copy_(result)
    return given


def head_blocks(q: torch.Tensor, v: torch.Tensor) -> dict[str, int]:
    """The head dims and the powers of two that hold them, 16 at least for the tensor cores."""
    return {
        "HEAD_DIM": q.shape[-1],
        "HEAD_DIM_V": v.shape[-1],
        "BLOCK_D": power_of_two(q.shape[-1], 16),
        "BLOCK_DV": power_of_two(v.shape[-1], 16),
    }


# Tile shapes (BLOCK_M, BLOCK_N, num_warps, num_stages) by the wider head dim's power of two. Shared memory holds
# num_stages tiles of keys and values: 2 x BLOCK_N x head_dim x 2 bytes each. It must fit 64 KiB on a T4 (sm75), 99 KiB
# on sm86 and sm89, 163 KiB on sm80, 227 KiB on sm90.
_FORWARD_HALF = {
    86: {64: (128, 64, 4, 2), 128: (64, 64, 4, 2), 256: (32, 32, 4, 2)},
    80: {64: (128, 64, 4, 3), 128: (128, 64, 8, 2), 256: (64, 32, 4, 2)},
    90: {64: (128, 64, 4, 3), 128: (64, 64, 4, 3), 256: (64, 64, 8, 2)},
}
_BACKWARD_HALF = {
    86: {64: (32, 64, 4, 1), 128: (32, 32, 4, 1), 256: (32, 32, 8, 1)},
    80: {64: (32, 64, 4, 2), 128: (32, 64, 8, 1), 256: (32, 32, 8, 1)},
    90: {64: (64, 64, 4, 2), 128: (32, 64, 4, 2), 256: (32, 32, 8, 1)},
}
# float32 without TF32 runs on the ordinary cores, each operand by way of shared memory or registers: small tiles. So
# does everything on a T4, whose tensor cores Triton does not use.
_FORWARD_FLOAT32 = {64: (32, 32, 4, 1), 128: (32, 16, 4, 1), 256: (16, 16, 4, 1)}
_BACKWARD_FLOAT32 = {64: (32, 32, 4, 1), 128: (16, 16, 4, 1), 256: (16, 16, 4, 1)}


def tile_shape(call: Call, dtype: torch.dtype, width: int, *, has_bias: bool, backward: bool = False) -> dict[str, int]:
    """BLOCK_M (queries), BLOCK_N (keys), warps and pipeline stages, by head dim and compute capability: no search at
    run time.
    """
    if IS_INTERPRETED:
        return {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}
    column = 64 if width <= 64 else 128 if width <= 128 else 256
    capability = call.capability
    if backward and column == 256 and capability < 80:
        call.refuse(
            f"head_dim={width} on compute capability {capability / 10}; 128 or less, or 8.0 and later, is needed"
        )
    if dtype == torch.float32 or capability < 80:
        shape = (_BACKWARD_FLOAT32 if backward else _FORWARD_FLOAT32)[column]
    else:
        table = _BACKWARD_HALF if backward else _FORWARD_HALF
        row = 80 if capability in (80, 87) else 86 if capability < 90 else 90
        row = 86 if capability >= 120 else row  # consumer Blackwell has 99 KiB
        shape = table[row][column]
    if has_bias:  # its tiles, up to 64 KiB each, would be staged too
        shape = (*shape[:3], 1)
    return dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), shape, strict=True))
