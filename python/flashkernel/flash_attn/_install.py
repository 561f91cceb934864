"""Makes `import flash_attn` and `import flash_attn_interface` find this package."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

from . import bert_padding, flash_attn_3_interface, flash_attn_interface, rotary

__all__ = ["VERSION", "install", "installed", "uninstall"]

VERSION = "2.8.4+flashkernel"
"""The release of flash-attn whose functions these are."""

_NAMES = ("flash_attn", "flash_attn_3", "flash_attn_interface")
_MINE: dict[str, types.ModuleType] = {}
_REPLACED: dict[str, types.ModuleType] = {}


def install(*, force: bool = False) -> None:
    """Makes `import flash_attn` and `import flash_attn_interface` (flash-attn 3), in this process, find FlashKernel,
    whether the packages are installed or not.

    There are `flash_attn`, `flash_attn.flash_attn_interface`, `flash_attn.bert_padding`, `flash_attn.layers.rotary`,
    and flash-attn 3 by both of its names, `flash_attn_interface` and `flash_attn_3.flash_attn_interface`; other modules
    of the packages are not found. Private functions that other libraries import are there, too. Calling it again
    changes nothing.

    force: also where the packages are already imported. Names that were taken from them before keep what they are.

    Raises RuntimeError where one of them is already imported, without force.

    >>> import flashkernel.flash_attn
    >>> flashkernel.flash_attn.install()
    >>> from flash_attn import flash_attn_func
    >>> flash_attn_func is flashkernel.flash_attn.flash_attn_func
    True
    >>> flashkernel.flash_attn.uninstall()
    """
    if installed():
        return
    there = [name for name in sys.modules if name.split(".")[0] in _NAMES]
    if there and not force:
        raise RuntimeError(
            f"flashkernel.flash_attn.install: {there[0]} is already imported from elsewhere; call install() before, or "
            "with force=True"
        )
    for name in there:
        _REPLACED[name] = sys.modules.pop(name)
    public = {name: getattr(flash_attn_interface, name) for name in flash_attn_interface.__all__}
    layers = _module("flash_attn.layers", {}, package=True)
    layers.rotary = _like("flash_attn.layers.rotary", rotary)  # type: ignore[attr-defined]
    root = _module("flash_attn", {**public, "__version__": VERSION}, package=True)
    root.layers = layers  # type: ignore[attr-defined]
    root.flash_attn_interface = _like("flash_attn.flash_attn_interface", flash_attn_interface)  # type: ignore[attr-defined]
    root.bert_padding = _like("flash_attn.bert_padding", bert_padding)  # type: ignore[attr-defined]
    third = _module("flash_attn_3", {}, package=True)
    third.flash_attn_interface = _like("flash_attn_3.flash_attn_interface", flash_attn_3_interface)  # type: ignore[attr-defined]
    _like("flash_attn_interface", flash_attn_3_interface)
    sys.modules.update(_MINE)


def uninstall() -> None:
    """Undoes `install`: the modules that were there before are back. Names that were taken stay what they are."""
    for name, module in _MINE.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    sys.modules.update(_REPLACED)
    _MINE.clear()
    _REPLACED.clear()


def installed() -> bool:
    """Whether `import flash_attn` finds FlashKernel in this process."""
    return bool(_MINE) and sys.modules.get("flash_attn") is _MINE["flash_attn"]


def _module(name: str, names: dict[str, Any], *, package: bool = False) -> types.ModuleType:
    module = types.ModuleType(name, "flash-attn's module of this name, over FlashKernel.")
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin="flashkernel", is_package=package)
    if package:
        module.__path__ = []  # other modules of the package are not found
    vars(module).update(names)
    _MINE[name] = module
    return module


def _like(name: str, module: types.ModuleType) -> types.ModuleType:
    names = (*module.__all__, *getattr(module, "PRIVATE", ()))
    return _module(name, {each: getattr(module, each) for each in names})
