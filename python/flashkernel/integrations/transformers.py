"""FlashKernel in Hugging Face Transformers.

Importing this module registers the attention implementation "fkernel" (a name with "flash" in it is taken for one of
Transformers' own):

>>> import flashkernel.integrations.transformers                                              # doctest: +SKIP
>>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="fkernel")         # doctest: +SKIP

`accelerated(model)` uses it for a while, together with fused MLPs, norms and RoPE, and puts everything back afterwards.
`accelerate(model)` lets the model generate by FlashKernel's engine (accelerate.py).
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from packaging.version import Version

import flashkernel as fk
import flashkernel.torch as fkt

from ..torch._library import autocast, direct
from .accelerate import accelerate, restore

__all__ = ["NAME", "accelerate", "accelerated", "attention_forward", "attention_mask", "register", "restore"]

NAME = "fkernel"
MINIMUM = "4.53"  # the first release with AttentionMaskInterface, without which padding would be silently ignored

if Version(transformers.__version__) < Version(MINIMUM):
    raise ImportError(
        f"flashkernel.integrations.transformers: transformers {transformers.__version__}; {MINIMUM} or later is needed"
    )

from transformers import AttentionInterface  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask  # noqa: E402


def attention_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The mask of "fkernel": None where `causal` says it all, else additive float32, [batch, 1, seq_q or 1, seq_k].

    Takes what Transformers gives to the mask functions of its own implementations; the rules are those of "sdpa". The
    translation to additive form happens here, once per forward pass and not once per layer.
    """
    kwargs.pop("dtype", None)
    return _additive(sdpa_mask(*args, **kwargs))


def _additive(mask: torch.Tensor | None) -> torch.Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    # A mask of padding only is the same row for each query, which torch holds as an expanded dim: keep one of them.
    for dim in range(mask.dim()):
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(~mask, float("-inf"))


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the form that Transformers calls: query [batch, heads, seq, head_dim]; returns [batch, seq, heads,
    head_dim].

    Grouped heads go to the kernel as they are. A query row that may see no key (padding on the left) gives 0.
    Raises NotImplementedError for attention dropout and for attention weights as a result.
    """
    if dropout > 0.0:
        raise NotImplementedError(
            f"fkernel: attention dropout is {dropout}; 0 is needed (set the config's attn_pdrop or "
            f"attention_dropout to 0)"
        )
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            "fkernel: output_attentions=True, but the weights are never written; use attn_implementation='eager'"
        )
    query, key, value = autocast(query, key, value)
    seq_q = query.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    bias = _additive(attention_mask)
    causal = bool(causal) and bias is None and seq_q > 1
    if causal and key.shape[2] > seq_q:
        # Without a mask, more keys than queries are the unused end of a static cache.
        key, value = key[:, :, :seq_q], value[:, :, :seq_q]
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    if bias is not None:
        bias = bias[..., : key.shape[2]]
        if bias.dtype not in (torch.float32, query.dtype):
            bias = bias.float()
        if bias.shape[-1] > 1 and bias.stride(-1) != 1:
            bias = bias.contiguous()
    sinks = None if s_aux is None else s_aux.float()
    softcap = softcap or 0.0
    if direct(query, key, value, bias, sinks):
        # Written in the order that the caller wants, so that nothing is copied afterwards.
        out = query.new_empty((query.shape[0], seq_q, query.shape[1], value.shape[-1]))
        fk.attention(
            query,
            key,
            value,
            causal=causal,
            scale=scaling,
            bias=bias,
            softcap=softcap,
            sinks=sinks,
            out=out.transpose(1, 2),
        )
        return out, None
    out = fkt.attention(query, key, value, causal=causal, scale=scaling, bias=bias, softcap=softcap, sinks=sinks)
    return out.transpose(1, 2), None


def register() -> None:
    """Registers "fkernel"; importing this module does it, and doing it again changes nothing."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


register()


# --- Fused modules: subclasses that an instance is switched to, so that its parameters and hooks stay where they are.

_GELUS = {
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUActivation": "gelu",
}


class _LayerNorm(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fkt.layer_norm(x, self.weight, self.bias, eps=self.eps)


def _gpt2_classes(module: Any) -> dict[type, type]:
    class FusedMLP(module.GPT2MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # Conv1D's weight is [in, out]: its transpose is a view.
            x = fkt.linear(x, self.c_fc.weight.t(), self.c_fc.bias, activation=_GELUS[type(self.act).__name__])
            return self.dropout(fkt.linear(x, self.c_proj.weight.t(), self.c_proj.bias))

    return {module.GPT2MLP: FusedMLP, torch.nn.LayerNorm: _LayerNorm}


def _llama_classes(module: Any) -> dict[type, type]:
    class FusedRMSNorm(module.LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fkt.rms_norm(x, self.weight, eps=self.variance_epsilon)

    class FusedMLP(module.LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = fkt.linear(x, self.gate_proj.weight, self.gate_proj.bias)
            up = fkt.linear(x, self.up_proj.weight, self.up_proj.bias)
            return fkt.linear(fkt.swiglu(gate, up), self.down_proj.weight, self.down_proj.bias)

    return {module.LlamaRMSNorm: FusedRMSNorm, module.LlamaMLP: FusedMLP}


def _fits(module: torch.nn.Module) -> bool:
    """Whether a fused class computes what this instance does: its activation is known, its weights are plain."""
    act = getattr(module, "act", None)
    if act is not None:
        return type(act).__name__ in _GELUS
    act = getattr(module, "act_fn", None)
    if act is not None:
        return type(act).__name__ in ("SiLU", "SiLUActivation")
    return not isinstance(module, torch.nn.LayerNorm) or len(module.normalized_shape) == 1


class _LlamaRope:
    """Replaces modeling_llama.apply_rotary_pos_emb while at least one `accelerated` of a Llama is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._stock: Callable[..., Any] | None = None

    def enter(self, module: Any) -> None:
        with self._lock:
            if self._users == 0:
                self._stock = module.apply_rotary_pos_emb
                module.apply_rotary_pos_emb = self._rotate
            self._users += 1

    def leave(self, module: Any) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                module.apply_rotary_pos_emb = self._stock

    @staticmethod
    def _rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
        # Transformers repeats the table for both halves of a head; the kernel takes it once.
        half = cos.shape[-1] // 2
        cos, sin = cos[..., :half], sin[..., :half]
        if unsqueeze_dim == 2:  # [batch, seq, heads, head_dim]
            q, k = fkt.rope_table(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
            return q.transpose(1, 2), k.transpose(1, 2)
        return fkt.rope_table(q, k, cos, sin)


def _restore(swapped: list[tuple[torch.nn.Module, type]]) -> None:
    for module, stock in swapped:
        module.__class__ = stock


_llama_rope = _LlamaRope()
_families: dict[str, tuple[str, Callable[[Any], dict[type, type]]]] = {
    "gpt2": ("transformers.models.gpt2.modeling_gpt2", _gpt2_classes),
    "llama": ("transformers.models.llama.modeling_llama", _llama_classes),
}
_fused: dict[str, dict[type, type]] = {}


@contextlib.contextmanager
def accelerated(model: torch.nn.Module, *, attention: bool = True) -> Iterator[dict[str, int]]:
    """Runs a GPT-2 or Llama model of Transformers on FlashKernel's kernels while the context is open.

    Swaps attention (unless attention=False), the MLP (linear + GELU in one kernel; SwiGLU), the norms and, for Llama,
    RoPE. Everything is put back afterwards, also after an exception. Gradients flow, so training works; attention
    dropout must be 0. Modules that no fused kernel fits (another activation) stay as they are.

    Yields how many modules of each class were swapped. RoPE is a function of the Llama module and so swapped for every
    Llama of the process while the context is open.

    Raises NotImplementedError for a model of another family.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type not in _families:
        raise NotImplementedError(
            f"accelerated: a model of type {model_type!r}; one of {', '.join(_families)} is needed "
            f"(attn_implementation={NAME!r} alone works for others)"
        )
    module_name, make = _families[model_type]
    family = importlib.import_module(module_name)
    classes = _fused.get(model_type) or _fused.setdefault(model_type, make(family))
    stock_attention = model.config._attn_implementation
    swapped: list[tuple[torch.nn.Module, type]] = []
    with contextlib.ExitStack() as undo:
        undo.callback(_restore, swapped)
        counts: Counter[str] = Counter()
        for module in model.modules():
            stock = type(module)
            if stock in classes and _fits(module):
                swapped.append((module, stock))
                module.__class__ = classes[stock]
                counts[stock.__name__] += 1
        if attention:
            undo.callback(model.set_attn_implementation, stock_attention)
            model.set_attn_implementation(NAME)
            counts["attention"] = int(model.config.num_hidden_layers)
        if model_type == "llama":
            _llama_rope.enter(family)
            undo.callback(_llama_rope.leave, family)
            counts["apply_rotary_pos_emb"] = 1
        yield dict(counts)
