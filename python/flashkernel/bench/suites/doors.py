"""What a way into the library costs over the plain op: host time of calls so small that nothing else counts.

Beside `flashkernel.attention`: `flashkernel.torch`'s op, flash-attn's function, torch's SDPA as this library serves it,
JAX and TVM-FFI where they are open (FLASHKERNEL_BENCH_TVM_FFI names the module's file).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import flashkernel as fk

from .. import baselines
from ..case import OURS, TOLERANCE, VARIANT, Case, Inputs, Provider, Settings, Work, each, nbytes

__all__ = ["DOORS", "doors"]

# Each takes q, k and v of [1, 1, 1, 16], which is the same memory in either order of heads and seq.
DOORS = ("torch_op", "flash_attn_func", "sdpa_door", "jax", "tvm_ffi")


def _tvm_ffi(q: Any, k: Any, v: Any) -> Callable[[], Any]:
    module = baselines.optional("tvm_ffi").load_module(os.environ["FLASHKERNEL_BENCH_TVM_FFI"])
    out, attention = baselines.require_torch().empty_like(q), module.attention

    def call() -> Any:
        attention(q, k, v, out, None, False, -1, -1, 0.0, None, None, None, None)
        return out

    return call


def _jax(q: Any, k: Any, v: Any) -> Callable[[], Any]:
    """Traced once; the result is handed back as a torch tensor, without a copy."""
    torch, jax = baselines.require_torch(), baselines.optional("jax")
    attention = jax.jit(baselines.optional("flashkernel.jax").attention)
    own = [jax.dlpack.from_dlpack(x) for x in (q, k, v)]
    return lambda: torch.from_dlpack(attention(*own))


def _calls(s: Settings, qkv: tuple[Any, Any, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    found: dict[str, Callable[[], Callable[[], Any]]] = {
        "torch_op": lambda: partial(baselines.optional("flashkernel.torch").attention, *qkv),
        "flash_attn_func": lambda: partial(baselines.optional("flashkernel.flash_attn").flash_attn_func, *qkv),
        "sdpa_door": lambda: partial(baselines.optional("flashkernel.torch").scaled_dot_product_attention, *qkv),
    }
    # Not where jax is installed and this build has no handlers for it: a door that is not open is no row.
    if baselines.optional("jax") is not None and baselines.optional("flashkernel.jax") is not None:
        found["jax"] = lambda: _jax(*qkv)
    if os.environ.get("FLASHKERNEL_BENCH_TVM_FFI") and baselines.optional("tvm_ffi") is not None:
        found["tvm_ffi"] = lambda: _tvm_ffi(*qkv)
    for name, make in found.items():
        if name in s.without:
            continue
        try:
            call = make()
        except Exception as error:
            call = partial(baselines.refuse, str(error))  # of ours: the row does not agree
        yield name, call


def _work(s: Settings, dtype: str) -> Work:
    torch = baselines.require_torch()
    qkv = tuple(Inputs(s.device, dtype).randn(1, 1, 1, 16) for _ in range(3))
    providers = [Provider("flashkernel", each(fk.attention, [qkv]), OURS)]
    providers += [Provider(name, [call], VARIANT) for name, call in _calls(s, qkv)]
    providers.append(Provider("sdpa", each(torch.nn.functional.scaled_dot_product_attention, [qkv])))
    size = nbytes(*qkv)
    return Work(providers, TOLERANCE[dtype], read=size, written=size / 3, graph=False, inner=20)


def doors(s: Settings) -> Iterator[Case]:
    """A row; `over_plain` of each door is in the results, in seconds."""
    dtype = "float16" if s.cuda else "float32"
    if s.dtypes_of((dtype,)):
        name = "attention (1, 1, 1, 16) by each door"
        yield Case("doors", name, dtype, s.device, partial(_work, s, dtype), {"op": "attention"})
