"""Tiny models of Transformers, of any type: the config's usual fields made small, random weights, and their inputs."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import transformers

_FIELDS: dict[int, str] = {
    1: "bos_token_id n_group topk_group first_k_dense_replace tubelet_size",
    2: "eos_token_id num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_key_value_heads num_experts_per_tok num_frames index_n_heads num_conv_pos_embedding_groups "
    "global_attn_every_n_layers num_codevector_groups",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts sliding_window local_attention attention_chunk_size index_topk",
    8: "head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim patch_size rotary_dim num_conv_pos_embeddings "
    "query_pre_attn_scalar hidden_size_per_layer_input",
    16: "image_size num_mel_bins projection_dim q_lora_rank kv_lora_rank qk_head_dim index_head_dim",
    32: "hidden_size d_model n_embd embed_dim dim embedding_size word_embed_proj_dim moe_intermediate_size",
    48: "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim hidden_dim ffn_hidden_size n_inner "
    "shared_expert_intermediate_size",
    64: "max_position_embeddings n_positions max_source_positions max_target_positions",
    99: "vocab_size vocab_size_per_layer_input",
}
_SMALL: dict[str, Any] = {
    **{name: value for value, names in _FIELDS.items() for name in names.split()},
    **{"attention_dropout": 0.0, "dropout": 0.0, "pad_token_id": 0, "num_kv_shared_layers": 0},
    **{"conv_dim": [16, 16], "conv_stride": [2, 2], "conv_kernel": [3, 3]},
}


def _fields(kind: type, changes: dict[str, Any]) -> dict[str, Any]:
    stock = kind()
    known = {**stock.to_dict(), **dict.fromkeys(inspect.signature(kind.__init__).parameters)}
    fields = {}
    for name, value in _SMALL.items():
        if name not in known or (name == "head_dim" and known[name] is None):
            continue
        if name == "sliding_window" and known[name] is None and not getattr(stock, "layer_types", None):
            continue
        if not isinstance(known[name], (list, tuple)) or isinstance(value, list):
            fields[name] = value
    if "kv_lora_rank" in known:  # each head has keys and values of its own
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    if "attention_types" in known:  # GPT-Neo's
        fields["attention_types"] = [[["global", "local"], 1]]
    if layers := getattr(stock, "layer_types", None):
        fields["layer_types"] = (list(dict.fromkeys(layers)) * 2)[:2]
    for name in getattr(kind, "sub_configs", None) or {}:
        if getattr(stock, name, None) is not None:
            fields[name] = _fields(type(getattr(stock, name)), {})
    return {**fields, **changes}


def tiny_config(model_type: str, **changes: Any) -> Any:
    kind = transformers.CONFIG_MAPPING[model_type]
    return kind(**_fields(kind, changes))


def tiny_model(model_type: str, implementation: str, **changes: Any) -> Any:
    """The base model of a type. The same weights for each attention implementation, large enough to matter."""
    config = copy.deepcopy(tiny_config(model_type, **changes))
    kind = transformers.MODEL_MAPPING[type(config)]
    kind = kind[0] if isinstance(kind, tuple) else kind
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=implementation).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(2)
    return model


def inputs_of(model: Any, padding: bool) -> dict[str, Any] | None:
    """Inputs of what kind the model takes, with padding on the right of one sequence; None if it can't have any."""
    takes = inspect.signature(model.forward).parameters
    random = torch.Generator().manual_seed(3)
    inputs: dict[str, Any] = {}
    if "input_ids" in takes:
        inputs["input_ids"] = torch.randint(3, 90, (2, 10), generator=random)
        if padding:
            inputs["attention_mask"] = torch.ones(2, 10, dtype=torch.long)
            inputs["attention_mask"][1, 6:] = 0
    if "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = torch.randint(3, 90, (2, 7), generator=random)
    if "pixel_values_videos" in takes or type(model).__name__ in ("VideoMAEModel", "VivitModel"):
        name = "pixel_values_videos" if "pixel_values_videos" in takes else "pixel_values"
        inputs[name] = torch.randn(2, 2, 3, 16, 16, generator=random)
    elif "pixel_values" in takes:
        inputs["pixel_values"] = torch.randn(2, 3, 16, 16, generator=random)
    if "input_features" in takes:
        inputs["input_features"] = torch.randn(2, 16, 128, generator=random)
    if "input_values" in takes:
        inputs["input_values"] = torch.randn(2, 64, generator=random)
    return None if padding and "attention_mask" not in inputs else inputs


def results(output: Any) -> list[Any]:
    """The tensors of a model's output that say the most."""
    names = ("logits", "last_hidden_state", "text_embeds", "image_embeds", "logits_per_image")
    found = [getattr(output, name) for name in names if torch.is_tensor(getattr(output, name, None))]
    return found or [tensor for tensor in output.to_tuple() if torch.is_tensor(tensor)][:2]
