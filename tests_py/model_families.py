"""Tiny models of every family that the engine computes, with weights at which each of its features matters.

`FAMILIES` is by a name of the case: the name of the class without ForCausalLM, and the config's fields. Windows are
shorter than the texts, softcaps are within reach of the scores, contexts before scaling are shorter than the texts.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=96,
    eos_token_id=96,
    pad_token_id=95,
)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.0, 4.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}  # fmt: skip
GEMMA = dict(head_dim=16, query_pre_attn_scalar=12, sliding_window=7)
EXPERTS = dict(num_experts_per_tok=2, num_local_experts=4)

MLA_YARN = {**YARN, "mscale": 0.8, "mscale_all_dim": 1.3}
LATENT = dict(
    num_key_value_heads=6, kv_lora_rank=40, q_lora_rank=None, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
    first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24,
)  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", dict(GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=5.0)),
    "gemma2-no-caps": (
        "Gemma2",
        dict(GEMMA, attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=False),
    ),
    "gemma3": ("Gemma3", dict(GEMMA, sliding_window_pattern=2, final_logit_softcapping=5.0)),
    "gemma3-scaled": (
        "Gemma3",
        dict(
            GEMMA,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            attention_bias=True,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            },
        ),
    ),
    "phi3": ("Phi3", dict(sliding_window=11)),
    "phi3-partial": ("Phi3", dict(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})),
    "phi3-longrope": ("Phi3", dict(original_max_position_embeddings=128, rope_parameters=LONGROPE)),
    "phi3-longrope-partial": (
        "Phi3",
        dict(
            head_dim=16,
            num_attention_heads=3,
            num_key_value_heads=1,
            original_max_position_embeddings=128,
            rope_parameters={**LONGROPE, "partial_rotary_factor": 0.5},
        ),
    ),
    "smollm3": ("SmolLM3", dict(no_rope_layer_interval=2)),
    "smollm3-window": (
        "SmolLM3",
        dict(no_rope_layers=[1, 0, 0], use_sliding_window=True, sliding_window=9, attention_bias=True, mlp_bias=True),
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2-biases": ("Olmo2", dict(attention_bias=True, tie_word_embeddings=True)),
    "granite": (
        "Granite",
        dict(embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.2, logits_scaling=1.7),
    ),
    "granite-biases": ("Granite", dict(attention_multiplier=0.5, attention_bias=True, mlp_bias=True)),
    "llama-yarn": ("Llama", dict(rope_parameters=YARN)),
    "llama-dynamic": ("Llama", dict(rope_parameters=DYNAMIC)),
    "qwen3-yarn": ("Qwen3", dict(head_dim=16, rope_parameters={**YARN, "attention_factor": 1.4})),
    "mixtral": ("Mixtral", EXPERTS),
    "mixtral-window": ("Mixtral", dict(EXPERTS, sliding_window=9, num_local_experts=3)),
    "qwen3-moe": ("Qwen3Moe", dict(num_experts=4, num_experts_per_tok=3, moe_intermediate_size=32)),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        dict(
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, mlp_only_layers=[1],
            head_dim=16, use_sliding_window=True, sliding_window=9, attention_bias=True,
        ),
    ),
    "gpt-oss": ("GptOss", dict(EXPERTS, head_dim=16, sliding_window=9, swiglu_limit=1.5, swiglu_alpha=1.2)),
    "gpt-oss-no-window": (
        "GptOss",
        dict(EXPERTS, layer_types=["full_attention"] * 3, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    ),
    "deepseek-v2-lite": (
        "DeepseekV2",
        dict(LATENT, n_shared_experts=2, routed_scaling_factor=1.5, rope_parameters=MLA_YARN),
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **LATENT, "q_lora_rank": 32, "n_shared_experts": 1, "routed_scaling_factor": 4.0, "num_experts_per_tok": 3,
            "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "attention_bias": True,
            "mlp_bias": True, "rms_norm_eps": 1e-4,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        dict({**LATENT, "q_lora_rank": 32}, n_shared_experts=1, n_group=4, topk_group=2, rope_parameters=MLA_YARN),
    ),
    "deepseek-v3-halves": (
        "DeepseekV3",
        dict(LATENT, n_shared_experts=1, n_group=2, topk_group=1, rope_interleave=False, norm_topk_prob=False),
    ),
}  # fmt: skip

# What each family has besides Llama: the field that takes it away, and how. Only fields that change no shape.
FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "softcap of scores": ("gemma2", dict(attn_logit_softcapping=1e4)),
    "softcap of logits": ("gemma2", dict(final_logit_softcapping=1e4)),
    "scale of scores": ("gemma2", dict(query_pre_attn_scalar=16)),
    "window": ("gemma2", dict(sliding_window=64)),
    "windowed layers": ("gemma3", dict(layer_types=["full_attention"] * 3)),
    "two bases": (
        "gemma3-scaled",
        dict(
            rope_parameters={
                name: {"rope_type": "default", "rope_theta": 1e4} for name in ("full_attention", "sliding_attention")
            }
        ),
    ),
    "partial rotation": ("phi3-partial", dict(rope_parameters={"rope_theta": 1e4})),
    "longrope": ("phi3-longrope", dict(rope_parameters={"rope_theta": 1e4})),
    "layers without RoPE": ("smollm3", dict(no_rope_layers=[1, 1, 1])),
    "embedding multiplier": ("granite", dict(embedding_multiplier=1.0)),
    "residual multiplier": ("granite", dict(residual_multiplier=1.0)),
    "attention multiplier": ("granite", dict(attention_multiplier=1.0)),
    "logits scaling": ("granite", dict(logits_scaling=1.0)),
    "yarn": ("llama-yarn", dict(rope_parameters={"rope_theta": 1e4})),
    "attention factor of yarn": ("qwen3-yarn", dict(rope_parameters={**YARN, "attention_factor": 1.0})),
    "experts of a token": ("mixtral", dict(num_experts_per_tok=1)),
    "weights of experts": ("qwen3-moe", dict(norm_topk_prob=True)),
    "limit of the gate": ("gpt-oss", dict(swiglu_limit=7.0)),
    "alpha of the gate": ("gpt-oss", dict(swiglu_alpha=1.7)),
    "scale of scores by YaRN": ("deepseek-v2-lite", dict(rope_parameters={**MLA_YARN, "mscale_all_dim": 0.8})),
    "factor of experts": ("deepseek-v2-lite", dict(routed_scaling_factor=1.0)),
    "groups of experts": ("deepseek-v2", dict(topk_method="greedy")),
    "pairs of RoPE": ("deepseek-v3", dict(rope_interleave=False)),
    "best groups of experts": ("deepseek-v3", dict(topk_group=4)),
    "weights of corrected experts": ("deepseek-v3", dict(norm_topk_prob=False)),
}


def family_model(case: str, **changes: Any) -> Any:
    """The stock model of a case with changes of its config, float32. The same weights each time."""
    kind, options = FAMILIES[case]
    options = {**SIZES, **options, **changes}
    config = getattr(transformers, f"{kind}{'Text' if kind == 'Gemma3' else ''}Config")(**options)
    stock = getattr(transformers, f"{kind}ForCausalLM")
    model = stock._from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    if kind == "GptOss":  # the experts of Transformers 5.17 read neither number from the configuration
        for layer in model.model.layers:
            layer.mlp.experts.alpha = options.get("swiglu_alpha", 1.702)
            layer.mlp.experts.limit = options.get("swiglu_limit", 7.0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # near the 1 that they stand for
                mean = 0.0 if kind.startswith("Gemma") else 1.0
                parameter.normal_(mean=mean, std=0.2, generator=generator)
            elif "experts" in name or "sinks" in name:
                parameter.normal_(std=0.5, generator=generator)
            elif "embed" in name and kind.startswith("Gemma"):  # they are multiplied, and must not drown the rest
                parameter.normal_(std=0.05, generator=generator)
            elif parameter.dim() > 1:
                parameter.normal_(std=0.25, generator=generator)
            else:
                parameter.normal_(std=0.1, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2, generator=generator)
    return model
