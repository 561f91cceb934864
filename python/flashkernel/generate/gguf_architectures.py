"""What llama.cpp calls the families of `families.py`, and what its converter changes in each: one entry of a table.

Called by gguf_checkpoint.py. An `Architecture` holds names of tensors and the fields of a file's metadata that one
architecture alone has; its `config` makes fields of a config.json out of them. Values that llama.cpp has in its code
and not in the file (Gemma's pattern of windows, Qwen3-MoE's weights that add up to 1) stand here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .config import Field, integer, number

__all__ = ["ARCHITECTURES", "EXPERTS", "MIXTRAL", "OTHER_TENSORS", "Architecture"]

# A layer's tensors without "blk.N." and the ending, by Transformers' names of them.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_AROUND = {  # norms before and after
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROUTED = {**_LAYER, "ffn_gate_inp": "mlp.gate"}
# Tensors of all experts of a layer: those that lie beside each other in Transformers' tensor of this name.
EXPERTS = {"mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "mlp.experts.down_proj": ("ffn_down_exps",)}
OTHER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def _nothing(_found: Mapping[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Architecture:
    """What an architecture of llama.cpp is in Transformers."""

    model_type: str
    names: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    pairs: bool = False  # whether rows of Q and K lie so that RoPE turns neighbours: the converter has moved them
    norm_offset: float = 0.0  # what the converter has added to the weights of norms
    biases: tuple[str, ...] = ()  # of "attention_bias" and "mlp_bias", those that the model_type reads
    windows: bool = False  # whether llama.cpp computes with attention.sliding_window
    partial_rotary: bool = False  # whether rope.dimension_count may be less than a head
    experts: bool = False
    fields: Mapping[str, Field] = field(default_factory=dict)  # of the metadata, besides those of all
    config: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing  # from all fields that were read
    first: str = "attn_norm"  # a tensor that each layer has


def _gemma2(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _scores_size(found, 46),
        "sliding_window": found["attention.sliding_window"] or 4096,
        "attn_logit_softcapping": found["attn_logit_softcapping"] or None,
        "final_logit_softcapping": found["final_logit_softcapping"] or None,
    }


def _gemma3(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _scores_size(found, 62),
        "sliding_window": found["attention.sliding_window"] or None,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": found["final_logit_softcapping"] or None,
        "rope_parameters": {
            "full_attention": found["rope"],
            # The layers with a window have a base of their own, and no scaling.
            "sliding_attention": {"rope_type": "default", "rope_theta": found["rope.freq_base_swa"]},
        },
    }


def _scores_size(found: Mapping[str, Any], layers_of_27b: int) -> int:
    """query_pre_attn_scalar, which no file has: llama.cpp knows the models of 27B, which differ, by their layers."""
    if found["block_count"] == layers_of_27b:
        return int(found["embedding_length"] // found["attention.head_count"])
    return int(found["head_dim"])


def _phi3(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window": found["attention.sliding_window"] or None,
        "partial_rotary_factor": (found["rope.dimension_count"] or found["head_dim"]) / found["head_dim"],
        **({"original_max_position_embeddings": found["original"]} if found["original"] else {}),
    }


def _granite(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": found["attention.scale"] or float(found["head_dim"]) ** -0.5,
        "embedding_multiplier": found["embedding_scale"] or 1.0,
        "residual_multiplier": found["residual_scale"] or 1.0,
        "logits_scaling": found["logit_scale"] or 1.0,
    }


def _mixtral(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": found["expert_count"],
        "num_experts_per_tok": found["expert_used_count"],
        "intermediate_size": found["expert_feed_forward_length"] or found["feed_forward_length"],
        "sliding_window": None,
    }


def _qwen3_moe(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": found["expert_count"],
        "num_experts_per_tok": found["expert_used_count"],
        "moe_intermediate_size": found["expert_feed_forward_length"],
        # llama.cpp lets the weights of a token's experts add up to 1, whatever the model's config said.
        "norm_topk_prob": True,
    }


_SOFTCAP = number(0.0, 0)
_FACTOR = number(0.0, 0, 1e6)
_WITH_EXPERTS = {
    "expert_used_count": integer(None),
    "expert_feed_forward_length": integer(None),
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", pairs=True, biases=("attention_bias", "mlp_bias")),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", biases=("attention_bias",)),
    "gemma2": Architecture(
        "gemma2",
        _AROUND,
        norm_offset=1.0,
        windows=True,
        fields={"attn_logit_softcapping": number(50.0, 0), "final_logit_softcapping": number(30.0, 0)},
        config=_gemma2,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _AROUND,
        norm_offset=1.0,
        windows=True,
        fields={"final_logit_softcapping": _SOFTCAP, "rope.freq_base_swa": number(10000.0, 1e-6)},
        config=_gemma3,
    ),
    "phi3": Architecture(
        "phi3",
        {**_LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        windows=True,
        partial_rotary=True,
        config=_phi3,
    ),
    "granite": Architecture(
        "granite",
        pairs=True,
        biases=("attention_bias", "mlp_bias"),
        fields={
            "attention.scale": _FACTOR,
            "embedding_scale": _FACTOR,
            "residual_scale": _FACTOR,
            "logit_scale": _FACTOR,
        },
        config=_granite,
    ),
    "olmo2": Architecture("olmo2", _AROUND, first="post_attention_norm"),
    "qwen3moe": Architecture("qwen3_moe", _ROUTED, experts=True, fields=_WITH_EXPERTS, config=_qwen3_moe),
}
# Files of "llama" with experts.
MIXTRAL = Architecture("mixtral", _ROUTED, pairs=True, experts=True, fields=_WITH_EXPERTS, config=_mixtral)
