"""Whether a module is exactly the stock one: what a fused kernel that takes its weights would pass over otherwise."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.nn.modules import module as _torch_module
from transformers import activations

__all__ = ["GELUS", "SILUS", "called_plainly", "defined_in", "replaced", "unlike", "weights"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (
    _torch_module._global_forward_hooks,
    _torch_module._global_forward_pre_hooks,
    _torch_module._global_backward_hooks,
    _torch_module._global_backward_pre_hooks,
)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _known(**names: str) -> dict[type, str]:
    """The classes of transformers.activations that this release has, each with its meaning."""
    return {getattr(activations, name): what for name, what in names.items() if hasattr(activations, name)}


GELUS = _known(
    NewGELUActivation="gelu_tanh",
    FastGELUActivation="gelu_tanh",
    GELUTanh="gelu_tanh",
    PytorchGELUTanh="gelu_tanh",
    GELUActivation="gelu",
)
SILUS = {torch.nn.SiLU: "silu", **_known(SiLUActivation="silu")}


def defined_in(function: Any, family: Any) -> bool:
    """Whether a function, below its decorators, was written in the Python module `family`."""
    return getattr(inspect.unwrap(function), "__globals__", None) is vars(family)


def replaced(what: Any, family: Any = None) -> str | None:
    """Why calling a module of this class (or this instance) is not calling the forward that its class came with."""
    if isinstance(what, type):
        home = sys.modules.get(what.__module__)
        if family is not None and not what.__module__.startswith("torch.nn.") and home is not family:
            return f"{what.__name__} comes from {what.__module__}"
        return None if defined_in(what.forward, home) else f"{what.__name__}.forward was replaced"  # type: ignore[attr-defined]
    return "its forward was replaced" if "forward" in what.__dict__ or "_call_impl" in what.__dict__ else None


def _hooked(module: torch.nn.Module) -> bool:
    return any(module.__dict__.get(name) for name in _HOOKS)


def weights(module: torch.nn.Module) -> str | None:
    """Why a module's hooks or the weights in it and its parts are not those of a plain module."""
    if any(_GLOBAL_HOOKS):
        return "hooks of all modules are registered"
    if _hooked(module):
        return "it has hooks"
    parameters = list(module.parameters())
    for parameter in parameters:
        if type(parameter) is not torch.nn.Parameter or parameter.layout != torch.strided:
            return f"a weight is a {type(parameter.data).__name__}, {parameter.layout}"
        if parameter.dtype not in _DTYPES or parameter.device.type not in ("cpu", "cuda"):
            return f"a weight is {parameter.dtype} on {parameter.device}"
    kinds = {f"{p.dtype} on {p.device}" for p in parameters}
    return f"its weights are {' and '.join(sorted(kinds))}" if len(kinds) > 1 else None


def unlike(
    module: torch.nn.Module, parts: Mapping[str, Any], activation: str | None, known: Mapping[type, str]
) -> str | None:
    """Why a part of a module is not exactly of its class, or the activation not one of the `known`."""
    if any(_GLOBAL_HOOKS):
        return "hooks of all modules are registered"
    if _hooked(module):
        return "it has hooks"
    for name, kind in parts.items():
        part: Any = module._modules.get(name)
        if type(part) is not kind:
            return f"{name} is a {type(part).__name__}"
        if "weight" not in part._parameters or _hooked(part):
            return f"{name} has hooks"
        if why := replaced(part) or replaced(kind):
            return f"{name}: {why}"
    if activation is None:
        return None
    act = module._modules.get(activation)
    if type(act) not in known:
        return f"{activation} is a {type(act).__name__}"
    if _hooked(act):
        return f"{activation} has hooks"
    inner = act.__dict__.get("act")  # GELUActivation's own way of computing it
    if inner is not None and getattr(inner, "__self__", None) is not act and inner is not torch.nn.functional.gelu:
        return f"{activation}.act was replaced"
    why = replaced(act) or replaced(type(act))
    return f"{activation}: {why}" if why else None


def called_plainly(
    module: torch.nn.Module, names: Collection[str], kind: Any, activation: str, known: Mapping[type, str]
) -> bool:
    """Whether, at this call, the named parts and the activation are still what `unlike` found. Made for every call."""
    if any(_GLOBAL_HOOKS):
        return False
    parts: Any = module._modules
    act = parts[activation]
    if type(act) not in known or "forward" in act.__dict__ or act._forward_hooks or act._forward_pre_hooks:
        return False
    if act._backward_hooks or act._backward_pre_hooks:
        return False
    for name in names:
        part: Any = parts[name]
        if (
            type(part) is not kind
            or part._forward_hooks
            or part._forward_pre_hooks
            or part._backward_hooks
            or part._backward_pre_hooks
            or "forward" in part.__dict__
        ):
            return False
    return True
