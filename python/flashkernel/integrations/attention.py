"""The attention implementation "fkernel" of Transformers: its mask function and its attention function.

What a query may see is said by the mask alone, as in Transformers' "eager": no flag of a module is believed, for models
mean different things by them.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from typing import Any

import torch
import transformers
from packaging.version import Version

import flashkernel as fk
import flashkernel.torch as fkt

from ..torch._library import autocast, dense, direct
from .causal_mask import CausalMask, additive, written

__all__ = ["NAME", "Chosen", "attention_forward", "attention_mask", "register"]

NAME = "fkernel"
# Models of 4.x say is_causal=False beside a causal mask, which is what a contradiction looks like in later releases.
MINIMUM = "5.0"

if Version(transformers.__version__) < Version(MINIMUM):
    raise ImportError(
        f"flashkernel.integrations.transformers: transformers {transformers.__version__}; {MINIMUM} or later is needed"
    )

from transformers import AttentionInterface, PreTrainedModel  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask  # noqa: E402

# Arguments by which a model says something about the scores that "eager" does by a mask or by code of its own.
_NOT_SERVED = ("indices", "block_indices", "sinks", "head_mask", "layer_head_mask")


class Chosen(str):
    """The name "fkernel" in a model's config while a context of `accelerated` is open. A copy or a pickle of it is the
    stock name.
    """

    stock: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _same, (self.stock,)


def _same(value: Any) -> Any:
    return value


def attention_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The mask of "fkernel": None where every query sees every key, else additive float32, [batch, 1, seq_q or 1,
    seq_k]; a `CausalMask`, which takes no memory, where `causal` says it all.

    Takes what Transformers gives to the mask functions of its own implementations; the rules are those of "sdpa". The
    translation to additive form happens here, once per forward pass and not once per layer.
    """
    kwargs.pop("dtype", None)
    mask = sdpa_mask(*args, **kwargs)
    if mask is not None:
        return additive(mask)
    given = inspect.signature(sdpa_mask).bind(*args, **kwargs).arguments if args else kwargs
    if not given.get("allow_is_causal_skip", True):
        return None
    if given.get("allow_is_bidirectional_skip", False):
        mask = sdpa_mask(*args, **{**kwargs, "allow_is_bidirectional_skip": False})
        if mask is not None:
            return additive(mask)
    make = functools.partial(
        sdpa_mask, *args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    )
    seq_q = given["q_length"] if "q_length" in given else given["cache_position"].shape[0]
    seq_k = given["kv_length"]
    if torch.compiler.is_compiling() or not _sees_from_the_start(given, seq_q, seq_k):
        return additive(make())
    device = torch.device(
        kwargs.get("device", "cpu") if "cache_position" not in given else given["cache_position"].device
    )
    return CausalMask((given["batch_size"], 1, seq_q, seq_k), device, make)


def _sees_from_the_start(given: dict[str, Any], seq_q: int, seq_k: int) -> bool:
    """Whether query i sees the keys 0 to i and a single query sees all of them: what a CausalMask means."""
    if "q_offset" not in given:
        return True
    offset = given["q_offset"] - given.get("kv_offset", 0)
    if isinstance(offset, torch.Tensor):  # of a static cache; asking for its value would wait for the device
        return seq_q > 1
    return bool(offset == 0 if seq_q > 1 else offset >= seq_k - 1)


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
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the form that Transformers calls: query [batch, heads, seq, head_dim]; returns [batch, seq, heads,
    head_dim].

    Grouped heads go to the kernel as they are. A query row that may see no key (padding on the left) gives 0.

    Where the model's masks come from this module's `attention_mask`, a query sees what the mask says, and everything
    where there is none. Registered under a name without a mask function, for which Transformers makes no masks, this
    function goes by `is_causal`, the argument or the module's attribute, and by `sliding_window`.

    Raises NotImplementedError for attention dropout, for attention weights as a result, and for what models say to
    kernels of their own (`indices` of sparse attention). Raises ValueError where the mask and the flags differ, and
    where neither says what a query may see.
    """
    if dropout > 0.0:
        raise NotImplementedError(
            f"fkernel: attention dropout is {dropout}; 0 is needed (set the config's attn_pdrop or "
            f"attention_dropout to 0)"
        )
    if kwargs:
        _refuse(kwargs)
    query, key, value = (dense(x) for x in autocast(query, key, value))
    seq_q, seq_k = query.shape[2], key.shape[2]
    bias = None
    window: tuple[int | None, int | None] | None = None
    if isinstance(attention_mask, CausalMask) and attention_mask.plain and attention_mask.shape[-2] == seq_q:
        causal = seq_q > 1
        if is_causal is False and causal:
            raise ValueError(
                "fkernel: is_causal=False beside a causal mask; leave it out, or give the mask that you mean"
            )
    elif attention_mask is None:
        causal, window = _without_a_mask(module, seq_q, seq_k, is_causal, sliding_window)
    else:
        causal = False
        bias = additive(written(attention_mask))
        if bias is not None and bias.dim() != 4:
            raise ValueError(
                f"fkernel: attention_mask has shape {tuple(bias.shape)}; [batch, heads or 1, seq_q, seq_k] is needed"
            )
    if causal and seq_k > seq_q:
        # More keys than queries are the unused end of a static cache.
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
    options = {
        "causal": causal, "window": window, "scale": scaling, "bias": bias, "softcap": softcap or 0.0, "sinks": sinks,
    }  # fmt: skip
    if direct(query, key, value, bias, sinks):
        # Written in the order that the caller wants, so that nothing is copied afterwards.
        out = query.new_empty((query.shape[0], seq_q, query.shape[1], value.shape[-1]))
        fk.attention(query, key, value, **options, out=out.transpose(1, 2))
        return out, None
    out = fkt.attention(query, key, value, **options)
    return out.transpose(1, 2), None


def _refuse(kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            "fkernel: output_attentions=True, but the weights are never written; use attn_implementation='eager'"
        )
    for name in _NOT_SERVED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"fkernel: the model passes {name}, which no kernel here reads; use attn_implementation='eager'"
            )


def _without_a_mask(
    module: torch.nn.Module, seq_q: int, seq_k: int, is_causal: bool | None, sliding_window: int | None
) -> tuple[bool, tuple[int | None, int | None] | None]:
    """`causal` and `window` of a call without a mask."""
    config = getattr(module, "config", None)
    name = getattr(config, "_attn_implementation", None)
    hidden = sliding_window is not None and sliding_window < seq_k
    if isinstance(name, Chosen):
        # A forward pass of another thread may have begun before the context: its mask, or none, is sdpa's. The models
        # that `accelerated` takes mean by the flag what sdpa takes it for.
        return seq_q > 1 and bool(module.is_causal) and getattr(config, "is_causal", True), None
    if AttentionMaskInterface._global_mapping.get(name) is attention_mask:
        if is_causal and seq_q > 1:
            raise ValueError(
                f"fkernel: {type(module).__name__} asks for is_causal=True without a mask, which attn_implementation="
                f"'eager' would not do; pass a causal mask"
            )
        if hidden:
            raise ValueError(
                f"fkernel: {type(module).__name__} asks for sliding_window={sliding_window} over {seq_k} keys without "
                f"a mask, which attn_implementation='eager' would not do; pass the window's mask"
            )
        return False, None
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if seq_q == 1:
        return False, (sliding_window - 1, None) if hidden and sliding_window is not None else None
    if causal is None:
        raise ValueError(
            f"fkernel: no mask, and {type(module).__name__} does not set is_causal, so that what a query may see is "
            f"unknown; pass is_causal, or register attention_mask for {name!r}"
        )
    if causal and seq_k != seq_q:
        raise ValueError(
            f"fkernel: {seq_q} causal queries and {seq_k} keys without a mask, so that where the queries stand is "
            f"unknown; register attention_mask for {name!r}"
        )
    if hidden and not causal:
        raise ValueError(
            f"fkernel: sliding_window={sliding_window} over {seq_k} keys without a mask, and not causal; pass the "
            f"window's mask"
        )
    return bool(causal), (sliding_window - 1, None) if hidden and sliding_window is not None else None


def register() -> None:
    """Registers "fkernel"; importing this module does it, and doing it again changes nothing."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    check = getattr(PreTrainedModel, "_check_and_adjust_attn_implementation", None)
    if check is not None and not hasattr(check, "_flashkernel"):
        PreTrainedModel._check_and_adjust_attn_implementation = _telling(check)


_told: set[str] = set()


def _telling(check: Any) -> Any:
    """Transformers' check of an attention implementation, which takes any registered name for any model. A model that
    computes attention by code of its own gets the implementation that it has by default, and a warning says so, once
    for each class.
    """

    @functools.wraps(check)
    def checked(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = check(self, attn_implementation, *args, **kwargs)
        kind = type(self)
        if chosen != NAME or _dispatches(kind):
            return chosen
        own = check(self, None, *args, **kwargs)
        if kind.__name__ not in _told:
            _told.add(kind.__name__)
            warnings.warn(
                f"fkernel: {kind.__name__} computes attention by code of its own and never asks for "
                f"attn_implementation={NAME!r}; it runs without FlashKernel, as attn_implementation={own!r}",
                stacklevel=2,
            )
        return own

    checked._flashkernel = True  # type: ignore[attr-defined]
    return checked


def _dispatches(kind: Any) -> bool:
    """Whether a model's class asks Transformers for its attention function. Where its source can't be read: yes."""
    try:
        inspect.getsource(sys.modules[kind.__module__])
    except (KeyError, OSError, TypeError):
        return True
    return bool(kind._can_set_attn_implementation())


register()
