"""FlashKernel's ops for JAX: under `jit`, `grad`, `vmap` and `shard_map`, by XLA's foreign function interface.

Each op is one custom call with a gradient of its own (`jax.custom_vjp`), so `jax.grad` works once, and `jax.jvp` and
second derivatives are refused by JAX. `vmap` calls the kernel for each slice, inside one custom call. On the CPU, and
on CUDA in a build with it.

>>> import jax.numpy as jnp                # doctest: +SKIP
>>> import flashkernel.jax as fkj          # doctest: +SKIP
>>> fkj.rms_norm(jnp.ones((2, 4)))         # doctest: +SKIP

It needs jax, and a build with `-DFLASHKERNEL_JAX=ON`: docs/jax.md. Raises ImportError where either is missing.
"""

from .attention import attention
from .linear import linear
from .loss import cross_entropy
from .norm import layer_norm, rms_norm

__all__ = ["attention", "cross_entropy", "layer_norm", "linear", "rms_norm"]
