"""Layers for `kernels.use_kernel_mapping`: each replaces the forward of a module that has the attributes it names."""

from __future__ import annotations

import torch

from . import rms_norm, swiglu

__all__ = ["RMSNorm", "SiluAndMul"]


class RMSNorm(torch.nn.Module):
    """A norm whose module has `weight` and `variance_epsilon`."""

    can_torch_compile = False
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class SiluAndMul(torch.nn.Module):
    """silu of the first half of the last dim times the second half."""

    can_torch_compile = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return swiglu(*x.chunk(2, dim=-1))
