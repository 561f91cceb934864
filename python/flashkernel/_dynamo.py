"""Tells torch.compile what to say about the plain ops: Dynamo can't look into them, `flashkernel.torch` is what it can
trace.

Nothing of torch is imported for it: it happens when torch's compiler is, which takes seconds by itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"


def watch(ops: dict[str, Any]) -> None:
    """Registers the ops with torch's compiler, now or when somebody imports it."""
    if COMPILER in sys.modules:
        register(ops)
    else:
        sys.meta_path.insert(0, _Watch(ops))


class _Watch:
    """A finder that finds nothing itself: it waits for the import of the compiler and then is gone."""

    def __init__(self, ops: dict[str, Any]) -> None:
        self.ops = ops

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != COMPILER:
            return None
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader, ops = spec.loader, self.ops
        run = loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            register(ops)

        loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def register(ops: dict[str, Any]) -> None:
    """Where a compiled function calls an op, Dynamo breaks the graph with our sentence: it is the error of
    ``fullgraph=True``, and without that the op runs between two graphs, as before.
    """
    try:
        from torch._dynamo import graph_break
        from torch._dynamo.decorators import substitute_in_graph
    except ImportError:  # a torch without them says what it always said
        return
    for name, op in ops.items():

        def stand_in(*args: Any, _message: str = message(name), **kwargs: Any) -> Any:
            graph_break(msg=_message)

        with contextlib.suppress(ValueError, TypeError):  # registered before, or refused by this torch
            substitute_in_graph(op, skip_signature_check=True)(stand_in)


TRACEABLE: tuple[str, ...] = (
    "attention",
    "attention_cascade",
    "attention_fp8",
    "attention_mla_decode",
    "attention_paged",
    "attention_varlen",
    "cross_entropy",
    "fused_linear",
    "kv_append",
    "kv_read",
    "latent_append",
    "layer_norm",
    "layer_norm_quantized",
    "linear",
    "linear_cross_entropy",
    "linear_fp8",
    "linear_selected_log_prob",
    "log_softmax",
    "pack_mask",
    "quantize_fp8_blocks",
    "quantized_linear",
    "rms_norm",
    "rms_norm_quantized",
    "rope",
    "rope_table",
    "sample",
    "softmax",
    "swiglu",
)
"""`flashkernel.torch.__all__`, less its modules: that must not be imported to know it."""


def message(name: str) -> str:
    if name in TRACEABLE:
        return f"flashkernel.{name} can't be traced; call flashkernel.torch.{name}, which torch.compile can compile"
    return f"flashkernel.{name} can't be traced, and flashkernel.torch has no op of that name; call it uncompiled"
