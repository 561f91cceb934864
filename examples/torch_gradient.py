"""FlashKernel's ops in torch: autograd, and the same function under torch.compile."""

import torch

import flashkernel.torch as fkt

torch.manual_seed(0)
x = torch.randn(2, 16, 64, requires_grad=True)
w_qkv, w_out = (torch.randn(rows, 64).div(8).requires_grad_() for rows in (192, 64))


def block(x: torch.Tensor) -> torch.Tensor:
    """Pre-norm attention with a residual, four heads of 16."""
    q, k, v = fkt.linear(fkt.rms_norm(x), w_qkv).reshape(2, 16, 3, 4, 16).permute(2, 0, 3, 1, 4)
    q, k = fkt.rope(q, k)
    out = fkt.attention(q, k, v, causal=True).transpose(1, 2).reshape(2, 16, 64)
    return x + fkt.linear(out, w_out)


eager = torch.autograd.grad(block(x).square().mean(), [x, w_qkv, w_out])
compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
for a, b in zip(eager, torch.autograd.grad(compiled(x).square().mean(), [x, w_qkv, w_out]), strict=True):
    torch.testing.assert_close(a, b)
print("gradients:", ", ".join(f"{tuple(g.shape)} norm {g.norm():.3f}" for g in eager), "- compiled ones agree")
