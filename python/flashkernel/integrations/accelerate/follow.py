"""Whether a model is still the one that an engine was built on, and an engine that looks.

`Watch.changed` compares what torch keeps anyway: which modules and parameters there are, their classes and hooks, where
each parameter lies, its dtype and shape, and its version counter, which every in-place operation counts. It reads no
weight: some 0.3 ms for the 360 modules and parameters of a Llama of 1B.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...generate.engine import Engine
from .build import build
from .fingerprint import Fingerprint
from .supported import can_drop, drops

__all__ = ["FollowingEngine", "Watch"]


def _look(module: torch.nn.Module) -> tuple[Any, ...]:
    own = module.__dict__
    return (
        module.__class__,
        len(own["_forward_hooks"]),
        len(own["_forward_pre_hooks"]),
        "forward" in own,
        [id(member) for key in ("_modules", "_parameters", "_buffers") for member in own[key].values()],
    )


def _about(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _numbers(config: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(config).items() if key[0] != "_"}


class Watch:
    """What a model was when this was made. It keeps the modules and tensors, so that no other one gets their ids."""

    def __init__(self, model: Any):
        self._model = model
        self._config = _numbers(model.config)
        named = dict(model.named_modules())
        self._names, self._modules = list(named), list(named.values())
        self._looks = [_look(module) for module in self._modules]
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._tensor_names, self._tensors = list(tensors), list(tensors.values())
        self._about = [_about(tensor) for tensor in self._tensors]
        self._versions = [_version(tensor) for tensor in self._tensors]
        self._fingerprint: Fingerprint | None = None
        self._droppers = [(name, module) for name, module in named.items() if can_drop(module)]

    def check_training(self) -> None:
        """Raises NotImplementedError where the stock model would drop values out."""
        for name, module in self._droppers:
            if module.training and drops(module) > 0:
                raise NotImplementedError(
                    f"accelerate: {name} drops out {drops(module)} of its values in training mode, which FlashKernel's "
                    f"engine does not do; call model.eval() before generate"
                )

    def changed(self) -> str | None:
        """What must be built anew, by name; None: nothing."""
        scope = torch.nn.modules.module
        if scope._global_forward_hooks or scope._global_forward_pre_hooks:
            return "torch's global forward hooks"
        modules = [_look(module) for module in self._modules]
        if modules != self._looks:
            pairs = enumerate(zip(modules, self._looks, strict=True))
            return self._names[next(i for i, (now, before) in pairs if now != before)] or "the model"
        about = [_about(tensor) for tensor in self._tensors]
        if about != self._about:
            pairs = enumerate(zip(about, self._about, strict=True))
            return self._tensor_names[next(i for i, (now, before) in pairs if now != before)]
        return None if _numbers(self._model.config) == self._config else "the config"

    def written(self) -> bool:
        """Whether some tensor was written in place since the last call."""
        versions = [_version(tensor) for tensor in self._tensors]
        written, self._versions = versions != self._versions, versions
        return written

    def fingerprint(self) -> list[int]:
        """What tells of writes through `.data`; only while nothing `changed`."""
        if self._fingerprint is None:
            self._fingerprint = Fingerprint(self._tensors)
        return self._fingerprint.read()


@torch.no_grad()
def _refresh(model: Any) -> None:
    """Writes anew what was worked out of parameters, where it lies: a CUDA graph reads it there."""
    found = [entry for entry in model.derived if entry[0].data_ptr() != entry[1].data_ptr()]
    if not found:
        return
    made = [entry[0] for entry in found]
    torch._foreach_copy_(made, [entry[1] for entry in found])
    torch._foreach_add_(made, [entry[2] for entry in found])


class FollowingEngine(Engine):
    """An `Engine` on the parameters of a stock model, whatever happens to that model between two requests.

    Before work begins it looks at the model (`Watch`). Weights that were written in place: pages that are kept for
    prompts to come go. Anything else: the engine's model is built anew from the stock one, or that is refused.
    """

    def __init__(self, stock: Any, before: Engine | None = None, **options: Any):
        self._stock, self._given = stock, options
        inner = self._build(None if before is None else before.model)
        super().__init__(inner, **self._options_for(inner))
        self._watch: Watch | None = Watch(stock)
        self._stale = False  # whether pages may be of weights from before
        self._fingerprint: list[int] | None = None  # of the weights that kept pages were computed with
        self._looks_once, self._has_looked = False, False

    def _build(self, before: Any) -> Any:
        given = {name: self._given[name] for name in ("one_launch", "kv_dtype") if name in self._given}
        return build(self._stock, before, **given)

    def _options_for(self, inner: Any) -> dict[str, Any]:
        """Layers that are not stacked by now stay apart: the parameters would not follow."""
        return {**self._given, "one_launch": getattr(inner, "piled", None) is not None}

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """For a request whose first step comes right behind its call: nothing changes the model between them, so one
        look is enough.
        """
        self._looks_once, self._has_looked = True, False
        try:
            yield
        finally:
            self._looks_once = False

    def follow(self, tokens: int = 0) -> None:
        """tokens: of the longest request that may find or leave pages."""
        if not (self._looks_once and self._has_looked):
            self._look()
            self._has_looked = True
        assert self._watch is not None
        if tokens > self.page_size and self._options["prefix_sharing"]:
            found = self._watch.fingerprint()
            if found != self._fingerprint:
                self.forget_prefixes()
            self._fingerprint = found

    def _look(self) -> None:
        reason = "what the last call refused" if self._watch is None else self._watch.changed()
        if reason is not None:
            self._refuse_while_running(reason)
            self._watch = None
            self._rebuild(reason)
        else:
            assert self._watch is not None
            self._stale = self._watch.written() or self._stale
            if self._stale:
                self._refuse_while_running("its weights")
                self.forget_prefixes()
                self._stale = False
        assert self._watch is not None
        self._watch.check_training()
        _refresh(self.model)

    def _refuse_while_running(self, what: str) -> None:
        if not self.idle:
            raise RuntimeError(
                f"accelerate: the model changed ({what}) while requests run; let them end or cancel them first"
            )

    def _rebuild(self, reason: str) -> None:
        try:
            inner = self._build(self.model)
        except NotImplementedError as error:
            text = str(error).removeprefix("accelerate: ")
            raise NotImplementedError(f"accelerate: the model changed ({reason}): {text}") from error
        self.model.arrays.wait()
        submitted = self._submitted
        Engine.__init__(self, inner, **self._options_for(inner))  # on another device the options have other defaults
        self._submitted = submitted
        self._watch, self._fingerprint, self._stale = Watch(self._stock), None, False
