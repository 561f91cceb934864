"""Whether each module of a model is what FlashKernel's engine computes: the stock class, without hooks.

The engine reads parameters and never calls a module. A hook, an adapter, a quantised or pruned layer would be passed
by, so every module must be exactly the class that Transformers makes for the family.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["TORCH_CLASSES", "can_drop", "check_modules", "drops", "passes_by"]

TORCH_CLASSES = (
    torch.nn.Dropout,
    torch.nn.Embedding,
    torch.nn.GELU,
    torch.nn.Identity,
    torch.nn.LayerNorm,
    torch.nn.Linear,
    torch.nn.ModuleList,
    torch.nn.SiLU,
    torch.nn.Tanh,
)
# Hooks that only note what a module gave.
_RECORDERS = ("transformers.utils.output_capturing",)


def _stock(kind: type, model_type: str) -> bool:
    family = f"transformers.models.{model_type}.modeling_{model_type}"
    return (
        kind in TORCH_CLASSES
        or kind.__module__ in (family, "transformers.pytorch_utils", "transformers.activations")
        or (kind.__module__.startswith("flashkernel.") and any(_stock(base, model_type) for base in kind.__bases__))
    )


def _plain_head(kind: type, model_type: str) -> bool:
    """A subclass of a stock model that leaves the computation alone."""
    for base in kind.__mro__:
        if _stock(base, model_type):
            return True
        if {"forward", "__call__", "__getattr__", "__getattribute__"} & vars(base).keys():
            return False
    return False


def _hooks(module: torch.nn.Module) -> list[Any]:
    return [
        hook
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if getattr(hook, "__module__", None) not in _RECORDERS
    ]


def passes_by(name: str, module: torch.nn.Module, model_type: str) -> str | None:
    """What of this module the engine would pass by, as a sentence; None: nothing. `name` is empty for the model."""
    kind = type(module)
    where = f"{name or 'the model'} is a {kind.__module__}.{kind.__qualname__}"
    if not (_stock(kind, model_type) or (not name and _plain_head(kind, model_type))):
        if hasattr(module, "base_layer"):
            return f"{where}; merge the adapter into plain layers (merge_and_unload of peft)"
        return f"{where}; the stock layer of Transformers is needed"
    if _hooks(module):
        return f"{name or 'the model'} has forward hooks, which would not run; remove them"
    if "forward" in vars(module):
        return f"{name or 'the model'} has a forward function of its own, which would not run; remove it"
    for key, parameter in module._parameters.items():
        if parameter is not None and not (
            type(parameter) is torch.nn.Parameter and type(parameter.data) is torch.Tensor
        ):
            kinds = f"{type(parameter).__name__} of {type(parameter.data).__name__}"
            return f"{name}.{key} is a {kinds}; a torch.nn.Parameter of a plain tensor is needed"
    return None


def can_drop(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Dropout) or hasattr(module, "attention_dropout")


def drops(module: torch.nn.Module) -> float:
    """The part of its values that a module drops out as it is now."""
    p = module.p if isinstance(module, torch.nn.Dropout) else getattr(module, "attention_dropout", 0.0)
    return float(p) if module.training and isinstance(p, (int, float)) else 0.0


def check_modules(model: torch.nn.Module, model_type: str) -> None:
    """Raises NotImplementedError with the first module that the engine would pass by."""
    scope = torch.nn.modules.module
    if scope._global_forward_hooks or scope._global_forward_pre_hooks:
        raise NotImplementedError("accelerate: torch has global forward hooks, which would not run; remove them")
    for name, module in model.named_modules():
        found = passes_by(name, module, model_type)
        if found:
            raise NotImplementedError(f"accelerate: {found}, or call restore(model) for the stock generate")
