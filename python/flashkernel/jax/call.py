"""One custom call of XLA: named operands in, named results out."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flashkernel

try:
    import jax
except ImportError as error:
    raise ImportError("flashkernel.jax: the package jax is not installed; run `pip install jax`") from error

__all__ = ["Arrays", "check", "ffi_call", "varying"]

Arrays = dict[str, Any]
OPS = ("attention", "layer_norm", "rms_norm", "linear", "cross_entropy")

if not hasattr(jax.sharding, "ManualAxisType"):
    raise ImportError(f"flashkernel.jax: jax is {jax.__version__}; 0.10 or newer is needed")


def _register() -> None:
    name = "_jax.dylib" if sys.platform == "darwin" else "_jax.dll" if sys.platform == "win32" else "_jax.so"
    places = [Path(folder) / name for folder in flashkernel.__path__]
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise ImportError(
            f"flashkernel.jax: this build has no {name}; build with -DFLASHKERNEL_JAX=ON where jax is installed: "
            "pip install . -C cmake.define.FLASHKERNEL_JAX=ON --no-build-isolation"
        )
    library = ctypes.CDLL(str(found))
    for op in OPS:
        for symbol in (f"flashkernel_jax_{op}", f"flashkernel_jax_{op}_backward"):
            for platform, handler in (("cpu", symbol), ("CUDA", f"{symbol}_cuda")):
                jax.ffi.register_ffi_target(symbol, jax.ffi.pycapsule(getattr(library, handler)), platform=platform)


_register()


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _varies(array: Any) -> frozenset[str]:
    """Axes of a shard_map over which the array differs."""
    kind = jax.typeof(array).manual_axis_type
    return frozenset(kind.varying) if kind else frozenset()


def varying(arrays: Mapping[str, Any]) -> Arrays:
    """The arrays without those that are None. Under shard_map each varies over the axes of all of them, so that the
    gradient of one that is whole on every device is summed over them by JAX.
    """
    given = {name: jax.numpy.asarray(array) for name, array in arrays.items() if array is not None}
    axes = frozenset[str]().union(*(_varies(array) for array in given.values()))
    for name, array in given.items():
        missing = tuple(sorted(axes - _varies(array)))
        if missing:
            given[name] = jax.lax.pcast(array, missing, to="varying")
    return given


def ffi_call(op: str, operands: Arrays, results: Mapping[str, tuple[Sequence[int], Any]], **attributes: Any) -> Arrays:
    """Calls a handler. results: shape and dtype of each name. attributes: of the types that the handler reads."""
    kinds = [_result(tuple(shape), dtype, operands) for shape, dtype in results.values()]
    call = jax.ffi.ffi_call(f"flashkernel_jax_{op}", kinds, vmap_method="expand_dims")
    found = call(
        *operands.values(),
        operands=" ".join(f"{name}{array.ndim}" for name, array in operands.items()),
        results=" ".join(f"{name}{len(kind.shape)}" for name, kind in zip(results, kinds, strict=True)),
        **attributes,
    )
    return dict(zip(results, found, strict=True))


def _result(shape: tuple[int, ...], dtype: Any, operands: Arrays) -> Any:
    """A result varies over the axes of shard_map over which any operand does."""
    arrays = list(operands.values())
    axes = frozenset[str]().union(*map(_varies, arrays))
    if not axes:
        return jax.ShapeDtypeStruct(shape, dtype)
    mesh = next(jax.typeof(array).sharding.mesh for array in arrays if _varies(array))
    sharding = jax.sharding.NamedSharding(mesh, jax.P(*[None] * len(shape)))
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=sharding, manual_axis_type=jax.sharding.ManualAxisType(varying=axes)
    )
