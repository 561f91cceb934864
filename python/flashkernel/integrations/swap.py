"""`accelerated(model)`: the modules of a GPT-2 or Llama model compute by fused kernels while a context is open.

An instance is switched to a subclass of its class, so that its parameters and hooks stay where they are, and only where
every part that the fused kernel computes for is exactly Transformers' own (plain.py). What is switched is counted: a
module goes back to its own class when the last of the contexts that hold it ends, in whatever order and thread.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

import flashkernel.torch as fkt

from .attention import NAME, Chosen
from .plain import GELUS, SILUS, called_plainly, defined_in, replaced, unlike, weights

__all__ = ["Swapped", "accelerated"]

_lock = threading.RLock()


class Swapped(dict[str, int]):
    """How many modules of each class were swapped; `left_out` says by name which were not, and why."""

    left_out: dict[str, str]


# --- The fused classes


class _Fused(torch.nn.Module):  # a Module, for an instance to be switched needs the layout of one
    """A subclass that instances are switched to. A copy or a pickle of such an instance is of the stock class.

    Its forward calls the stock one by name, not by super(): it may be called when its instance is stock again.
    """

    stock: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (_blank, (self.stock,), *super().__reduce_ex__(max(protocol, 2))[2:])


def _blank(kind: Any) -> Any:
    return kind.__new__(kind)


def _on(module: torch.nn.Module) -> bool:
    """Whether a context holds this module: a bound `forward`, or a copy made field by field, may outlive it."""
    return torch.compiler.is_compiling() or module in _held


def _gpt2_classes(family: Any) -> list[type]:
    class FusedMLP(_Fused, family.GPT2MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not (_on(self) and called_plainly(self, ("c_fc", "c_proj"), Conv1D, "act", GELUS)):
                return family.GPT2MLP.forward(self, x)
            # Conv1D's weight is [in, out]: its transpose is a view.
            x = fkt.linear(x, self.c_fc.weight.t(), self.c_fc.bias, activation=GELUS[type(self.act)])
            return self.dropout(fkt.linear(x, self.c_proj.weight.t(), self.c_proj.bias))

        @staticmethod
        def misfit(mlp: Any) -> str | None:
            return unlike(mlp, {"c_fc": Conv1D, "c_proj": Conv1D}, "act", GELUS)

    class FusedLayerNorm(_Fused, torch.nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not _on(self):
                return torch.nn.LayerNorm.forward(self, x)
            return fkt.layer_norm(x, self.weight, self.bias, eps=self.eps)

        @staticmethod
        def misfit(norm: Any) -> str | None:
            if len(norm.normalized_shape) != 1:
                return f"normalized_shape={tuple(norm.normalized_shape)}; one dim is needed"
            return None

    return [FusedMLP, FusedLayerNorm, _layer(family.GPT2Block)]


def _llama_classes(family: Any) -> list[type]:
    class FusedRMSNorm(_Fused, family.LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not _on(self):
                return family.LlamaRMSNorm.forward(self, x)
            return fkt.rms_norm(x, self.weight, eps=self.variance_epsilon)

        @staticmethod
        def misfit(norm: Any) -> str | None:
            return None

    class FusedMLP(_Fused, family.LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not (
                _on(self)
                and called_plainly(self, ("gate_proj", "up_proj", "down_proj"), torch.nn.Linear, "act_fn", SILUS)
            ):
                return family.LlamaMLP.forward(self, x)
            gate = fkt.linear(x, self.gate_proj.weight, self.gate_proj.bias)
            up = fkt.linear(x, self.up_proj.weight, self.up_proj.bias)
            return fkt.linear(fkt.swiglu(gate, up), self.down_proj.weight, self.down_proj.bias)

        @staticmethod
        def misfit(mlp: Any) -> str | None:
            linear = torch.nn.Linear
            return unlike(mlp, {"gate_proj": linear, "up_proj": linear, "down_proj": linear}, "act_fn", SILUS)

    return [FusedRMSNorm, FusedMLP, _llama_attention(family), _layer(family.LlamaDecoderLayer)]


def _llama_attention(family: Any) -> type:
    """LlamaAttention with fused RoPE: the stock forward, in which one name means another function. The function of the
    family's module stays what it is, for other models and for who patches it.
    """
    stock_rope = family.apply_rotary_pos_emb
    stock_forward = inspect.unwrap(family.LlamaAttention.forward)
    names: dict[str, Any] = {}
    forward = types.FunctionType(
        stock_forward.__code__, names, "forward", stock_forward.__defaults__, stock_forward.__closure__
    )
    forward.__kwdefaults__ = stock_forward.__kwdefaults__
    old_names = {"past_key_value", "past_key_values"}.difference(inspect.signature(stock_forward).parameters)

    class FusedAttention(_Fused, family.LlamaAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            # An old name of an argument is translated by a decorator of the stock forward.
            if not _on(self) or family.apply_rotary_pos_emb is not stock_rope or not old_names.isdisjoint(kwargs):
                return family.LlamaAttention.forward(self, *args, **kwargs)
            return forward(self, *args, **kwargs)

        @staticmethod
        def misfit(attention: Any) -> str | None:
            if family.apply_rotary_pos_emb is not stock_rope or not defined_in(stock_rope, family):
                return "apply_rotary_pos_emb was replaced"
            if any(parameter.dtype == torch.float64 for parameter in attention.parameters()):
                return "a weight is torch.float64"
            # The names as they are when a context opens, without __name__: torch.compile would look them up by it.
            names.update({key: value for key, value in vars(family).items() if key != "__name__"})
            names["apply_rotary_pos_emb"] = rotate
            return None

    return FusedAttention


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
    """Llama's apply_rotary_pos_emb."""
    # Transformers repeats the table for both halves of a head; the kernel takes it once.
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    if unsqueeze_dim == 2:  # [batch, seq, heads, head_dim]
        q, k = fkt.rope_table(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)
    return fkt.rope_table(q, k, cos, sin)


def _layer(stock: Any) -> Any:
    """A decoder layer whose checkpointed forward, computed again during a backward pass after the context has ended,
    finds its modules fused as they were: other modules would save other tensors, which torch refuses.
    """
    attribute = "_gradient_checkpointing_func"

    class FusedLayer(_Fused, stock):
        @property
        def _gradient_checkpointing_func(self) -> Any:
            if attribute not in self.__dict__:
                raise AttributeError(attribute)
            function = self.__dict__[attribute]
            if torch.compiler.is_compiling() or not _on(self):
                return function
            return functools.partial(_checkpoint, function, _Lease.of(self))

        @_gradient_checkpointing_func.setter
        def _gradient_checkpointing_func(self, function: Any) -> None:
            self.__dict__[attribute] = function

        @_gradient_checkpointing_func.deleter
        def _gradient_checkpointing_func(self) -> None:
            self.__dict__.pop(attribute, None)

        @staticmethod
        def misfit(layer: Any) -> str | None:
            return None

    return FusedLayer


def _is_layer(fused: type) -> bool:
    return "_gradient_checkpointing_func" in vars(fused)


def _checkpoint(function: Any, lease: _Lease, forward: Any, *args: Any, **kwargs: Any) -> Any:
    def held(*args: Any, **kwargs: Any) -> Any:
        with lease:
            return forward(*args, **kwargs)

    return function(held, *args, **kwargs)


# --- Who holds what


class _Hold:
    """One switched module or config, and how many leases hold it."""

    def __init__(self, stock: Any, ours: Any) -> None:
        self.stock, self.ours, self.count = stock, ours, 0


_held: dict[torch.nn.Module, _Hold] = {}
_configs: dict[int, _Hold] = {}  # by id: a config has no hash


class _Lease:
    """Holds modules and configs switched, from `enter` to `leave`; in a with statement as often as it likes."""

    def __init__(self, modules: Iterable[tuple[torch.nn.Module, Any]], configs: Iterable[Any]) -> None:
        self.modules = list(modules)
        self.configs = list(configs)

    @classmethod
    def of(cls, layer: torch.nn.Module) -> _Lease:
        """The lease of what is switched in a layer now."""
        with _lock:
            modules = [(module, _held[module].ours) for module in layer.modules() if module in _held]
            return cls(modules, [config for config in configs_of(layer) if id(config) in _configs])

    def __enter__(self) -> None:
        with _lock:
            for module, fused in self.modules:
                if module not in _held:
                    _held[module] = _Hold(fused.stock, fused)
                    if type(module) is fused.stock:
                        module.__class__ = fused
                _held[module].count += 1
            for config in self.configs:
                if id(config) not in _configs:
                    ours = Chosen(NAME)
                    ours.stock = config._attn_implementation
                    _configs[id(config)] = _Hold(ours.stock, ours)
                    config._attn_implementation = ours
                _configs[id(config)].count += 1

    def __exit__(self, *error: Any) -> None:
        with _lock:
            for module, _ in self.modules:
                hold = _held[module]
                hold.count -= 1
                if hold.count == 0:
                    del _held[module]
                    _put_back(module, hold)
            for config in self.configs:
                hold = _configs[id(config)]
                hold.count -= 1
                if hold.count == 0:
                    del _configs[id(config)]
                    if config._attn_implementation is hold.ours:  # else somebody has chosen another one since
                        config._attn_implementation = hold.stock


def _put_back(module: torch.nn.Module, hold: _Hold) -> None:
    kind = type(module)
    if kind is hold.ours:
        module.__class__ = hold.stock
    elif hold.ours in kind.__bases__:  # parametrised since: torch has made a subclass for this instance alone
        kind.__bases__ = tuple(hold.stock if base is hold.ours else base for base in kind.__bases__)


def configs_of(model: torch.nn.Module) -> list[Any]:
    """The configs by which the modules of a model choose their attention."""
    configs = (module.__dict__.get("config") for module in model.modules())
    return list({id(config): config for config in configs if hasattr(config, "_attn_implementation")}.values())


# --- The context

_families: dict[str, tuple[str, Callable[[Any], list[type]], tuple[str, ...]]] = {
    "gpt2": ("transformers.models.gpt2.modeling_gpt2", _gpt2_classes, ()),
    "llama": ("transformers.models.llama.modeling_llama", _llama_classes, ("LlamaRotaryEmbedding",)),
}
_fused: dict[str, dict[type, Any]] = {}


def _classes(model_type: str, family: Any) -> dict[type, Any]:
    """The fused class of each stock class of a family."""
    if model_type not in _fused:
        classes: dict[type, Any] = {}
        for fused in _families[model_type][1](family):
            fused.stock = fused.__mro__[2]  # type: ignore[attr-defined]
            classes[fused.stock] = fused  # type: ignore[attr-defined]
        _fused[model_type] = classes
    return _fused[model_type]


@contextlib.contextmanager
def accelerated(model: torch.nn.Module, *, attention: bool = True) -> Iterator[Swapped]:
    """Runs a GPT-2 or Llama model of Transformers on FlashKernel's kernels while the context is open.

    Swaps attention (unless attention=False), the MLP (linear + GELU in one kernel; SwiGLU), the norms and, for Llama,
    RoPE. Everything is put back afterwards, also after an exception. Gradients flow, so training works; attention
    dropout must be 0.

    A module is swapped only where every part of it is exactly the stock class: no hooks, adapters (LoRA), subclasses,
    quantised, pruned or parametrised weights, replaced `forward`. The others stay as they are, and so does an MLP from
    the call on in which such a change to its projections is seen.

    Yields how many modules of each class were swapped, "attention" (layers) and "apply_rotary_pos_emb" (attention
    modules) among them; the `left_out` of this dict says by module name what was not, and why.

    Contexts of one model may overlap, in threads, tasks and in any order of their ends: the model is stock again after
    the last. A copy or a pickle of the model, made inside, is stock. With Transformers' gradient checkpointing the
    backward pass may come after the context has closed; with `torch.utils.checkpoint` around modules of the model by
    the caller's own hand it must come inside.

    Raises NotImplementedError for a model of another family.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type not in _families:
        raise NotImplementedError(
            f"accelerated: a model of type {model_type!r}; one of {', '.join(_families)} is needed "
            f"(attn_implementation={NAME!r} alone works for others)"
        )
    family = importlib.import_module(_families[model_type][0])
    counts, left_out = Counter[str](), dict[str, str]()
    with contextlib.ExitStack() as stack:
        with _lock:
            classes = _classes(model_type, family)
            modules = _choose(model, model_type, family, classes, counts, left_out)
            configs = [c for c in configs_of(model) if id(c) in _configs or c._attn_implementation != NAME]
            stack.enter_context(_Lease(modules, configs if attention else []))
        if attention:
            counts["attention"] = int(model.config.num_hidden_layers)
        swapped = Swapped(counts)
        swapped.left_out = left_out
        yield swapped


def _choose(
    model: torch.nn.Module,
    model_type: str,
    family: Any,
    classes: dict[type, Any],
    counts: Counter[str],
    left_out: dict[str, str],
) -> list[tuple[torch.nn.Module, type]]:
    tables = [why for why in (_odd_table(m, family, _families[model_type][2]) for m in model.modules()) if why]
    chosen: list[tuple[torch.nn.Module, type]] = []
    for name, module in model.named_modules():
        hold = _held.get(module)
        stock = type(module) if hold is None else hold.stock
        if stock not in classes:
            if any(kind in classes and not _is_layer(classes[kind]) for kind in stock.__mro__):
                left_out[name] = f"it is a {stock.__name__}"
            continue
        fused = classes[stock]
        rotates, layer = stock.__name__.endswith("Attention"), _is_layer(fused)
        # A layer or an attention module gives its class alone: the modules inside are called as they are.
        why = replaced(stock, family) or replaced(module) or (None if rotates or layer else weights(module))
        why = why or fused.misfit(module) or (tables[0] if rotates and tables else None)
        if why is None:
            chosen.append((module, fused))
            if not layer:
                counts["apply_rotary_pos_emb" if rotates else stock.__name__] += 1
        elif not layer:
            left_out[name] = why
    return chosen


def _odd_table(module: torch.nn.Module, family: Any, names: tuple[str, ...]) -> str | None:
    """Why the table of a rotary embedding may not be cos and sin of the angles, twice over."""
    if not any(name in base.__name__ for name in names for base in type(module).__mro__):
        return None
    if all(type(module) is not getattr(family, name) for name in names):
        return f"the rotary embedding is a {type(module).__name__}"
    return replaced(type(module), family) or unlike(module, {}, None, {}) or replaced(module)
