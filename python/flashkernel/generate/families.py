"""The families of decoders that `DecoderModel` computes: one entry of a table for each model_type of config.json.

A `Family` says what differs from Llama: where the norms stand, what is multiplied and capped, which layers have a
window or RoPE, how the checkpoint names its tensors. Its `fields` are what is read of a config.json. A field that
another family computes with, and this one does not, is refused where it says anything (`check_foreign`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .config import NEEDED, Field, array, flag, integer, mapping, number, read_field, text
from .errors import CheckpointError, UnsupportedModelError
from .experts import Experts
from .files import describe
from .latent_attention import LATENT_FIELDS
from .rope_scaling import ROPE_TYPES, Rope, read_rope, rope_parameters
from .routing import read_v2, read_v3

__all__ = ["FAMILIES", "MAX_HEAD_DIM", "Family", "check_foreign", "layer_ropes", "layer_windows"]

MAX_HEAD_DIM = 65536  # far above what the kernels take; frequencies are made for each
_SILU = {"silu": "silu", "swish": "silu"}
_GELU = {"gelu_pytorch_tanh": "gelu_tanh"}


def _everywhere(_config: Mapping[str, Any], _layer: int) -> bool:
    return True


@dataclass(frozen=True)
class Family:
    """What a model_type computes, beyond the numbers of a config."""

    fields: dict[str, Field]
    module: str  # of transformers.models, where the stock classes are
    activation_field: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=lambda: _SILU)  # of the gate, by their names in a config
    # Names of a layer's norms: before attention, of its result, before the MLP, of its result. None: there is none.
    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm",
        None,
        "post_attention_layernorm",
        None,
    )
    norm_offset: float = 0.0  # added to the weight of every norm
    qk_norm: Literal["head", "whole"] | None = None  # whether each head of Q and K is normed, or all at once
    qkv_bias: bool = False  # whatever attention_bias says, which stands for Q, K, V and output
    fused: bool = False  # whether the checkpoint has Q, K and V as one matrix, and gate and up
    latent: bool = False  # whether keys and values come out of latent rows (latent_attention.py)
    sinks: bool = False  # whether each head has one more key without a value
    embedding_root: bool = False  # whether embeddings are multiplied by the root of hidden_size
    slides: Callable[[Mapping[str, Any], int], bool] = _everywhere  # layers with the window, unless layer_types says so
    theta: float = 10000.0
    rope: Mapping[str, Any] | None = None  # RoPE's fields where the config has none
    rope_types: tuple[str, ...] = ROPE_TYPES
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    partial_rotary: bool = False
    rope_by_layer_type: bool = False
    experts: Experts | None = None


_LLAMA = {
    "vocab_size": integer(32000),
    "hidden_size": integer(4096),
    "intermediate_size": integer(11008),
    "num_hidden_layers": integer(32),
    "num_attention_heads": integer(32),
    "num_key_value_heads": integer(None, null=True),
    "head_dim": integer(None, high=MAX_HEAD_DIM, null=True),
    "hidden_act": text("silu"),
    "max_position_embeddings": integer(2048),
    "rms_norm_eps": number(1e-6, 0, 1),
    "tie_word_embeddings": flag(False),
}
_BIASES = {"attention_bias": flag(False), "mlp_bias": flag(False)}
_WINDOW = {"sliding_window": integer(4096, null=True), "layer_types": array()}
_MISTRAL = {
    **_LLAMA,
    "intermediate_size": integer(14336),
    "num_key_value_heads": integer(8, null=True),
    "max_position_embeddings": integer(131072),
}
_QWEN = {
    **_LLAMA,
    **_WINDOW,
    "vocab_size": integer(151936),
    "intermediate_size": integer(22016),
    "num_key_value_heads": integer(32, null=True),
    "max_position_embeddings": integer(32768),
    "use_sliding_window": flag(False),
    "max_window_layers": integer(28, low=0),
}
_GEMMA = {
    **{name: entry for name, entry in _LLAMA.items() if name != "hidden_act"},
    **_WINDOW,
    "vocab_size": integer(256000),
    "hidden_size": integer(2304),
    "intermediate_size": integer(9216),
    "num_hidden_layers": integer(26),
    "num_attention_heads": integer(8),
    "num_key_value_heads": integer(4),
    "head_dim": integer(256, high=MAX_HEAD_DIM),
    "hidden_activation": text("gelu_pytorch_tanh"),
    "max_position_embeddings": integer(8192),
    "tie_word_embeddings": flag(True),
    "attention_bias": flag(False),
    "query_pre_attn_scalar": number(256, 1e-6),
    "attn_logit_softcapping": number(50.0, 1e-6, null=True),
    "final_logit_softcapping": number(30.0, 1e-6, null=True),
}
_DEEPSEEK = {
    **{name: entry for name, entry in _LLAMA.items() if name != "head_dim"},
    **LATENT_FIELDS,
    "attention_bias": flag(False),
    "n_shared_experts": integer(2),
    "num_experts_per_tok": integer(NEEDED),
    "first_k_dense_replace": integer(0, low=0),
    "moe_layer_freq": integer(1),
    "routed_scaling_factor": number(1.0, -1e6, 1e6),
    "n_group": integer(None, null=True),
    "topk_group": integer(None, null=True),
    "norm_topk_prob": flag(False),
}
_DEEPSEEK_ROPES = ("default", "linear", "dynamic", "llama3", "yarn")
_GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _from_max_window_layers(config: Mapping[str, Any], layer: int) -> bool:
    return bool(layer >= config["max_window_layers"])


def _every_other(_config: Mapping[str, Any], layer: int) -> bool:
    return (layer + 1) % 2 != 0


FAMILIES: dict[str, Family] = {
    "llama": Family({**_LLAMA, **_BIASES}, "llama"),
    "mistral": Family({**_MISTRAL, **_WINDOW}, "mistral"),
    "qwen2": Family(_QWEN, "qwen2", qkv_bias=True, slides=_from_max_window_layers),
    "qwen3": Family(
        {**_QWEN, "head_dim": integer(128, high=MAX_HEAD_DIM), "attention_bias": flag(False)},
        "qwen3",
        qk_norm="head",
        slides=_from_max_window_layers,
    ),
    "gemma2": Family(
        _GEMMA,
        "gemma2",
        activation_field="hidden_activation",
        activations=_GELU,
        norms=_GEMMA_NORMS,
        norm_offset=1.0,
        embedding_root=True,
        slides=_every_other,
    ),
    "gemma3_text": Family(
        {
            **{name: entry for name, entry in _GEMMA.items() if name != "attn_logit_softcapping"},
            "vocab_size": integer(262208),
            "max_position_embeddings": integer(131072),
            "final_logit_softcapping": number(None, 1e-6, null=True),
            "sliding_window_pattern": integer(6),
        },
        "gemma3",
        activation_field="hidden_activation",
        activations=_GELU,
        norms=_GEMMA_NORMS,
        norm_offset=1.0,
        qk_norm="head",
        embedding_root=True,
        slides=lambda config, layer: (layer + 1) % config["sliding_window_pattern"] != 0,
        rope_by_layer_type=True,
    ),
    "phi3": Family(
        {
            **_LLAMA,
            "vocab_size": integer(32064),
            "hidden_size": integer(3072),
            "intermediate_size": integer(8192),
            "max_position_embeddings": integer(4096),
            "original_max_position_embeddings": integer(4096),
            "rms_norm_eps": number(1e-5, 0, 1),
            "sliding_window": integer(None, null=True),
        },
        "phi3",
        fused=True,
        rope_types=("default", "longrope"),
        rope_aliases={"su": "longrope", "yarn": "longrope"},
        partial_rotary=True,
    ),
    "smollm3": Family(
        {
            **_LLAMA,
            **_BIASES,
            **_WINDOW,
            "vocab_size": integer(128256),
            "hidden_size": integer(2048),
            "num_hidden_layers": integer(36),
            "num_attention_heads": integer(16),
            "num_key_value_heads": integer(4, null=True),
            "max_position_embeddings": integer(32768),
            "tie_word_embeddings": flag(True),
            "use_sliding_window": flag(False),
            "sliding_window": integer(None, null=True),
            "no_rope_layers": array(),
            "no_rope_layer_interval": integer(4),
        },
        "smollm3",
        slides=lambda config, layer: not _turns(config, layer),
        theta=2000000.0,
    ),
    "olmo2": Family(
        {**_LLAMA, "vocab_size": integer(50304), "rms_norm_eps": number(1e-5, 0, 1), "attention_bias": flag(False)},
        "olmo2",
        norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        qk_norm="whole",
    ),
    "granite": Family(
        {
            **_LLAMA,
            **_BIASES,
            "embedding_multiplier": number(1.0, -1e6, 1e6),
            "residual_multiplier": number(1.0, -1e6, 1e6),
            "attention_multiplier": number(1.0, 1e-6, 1e6),
            "logits_scaling": number(1.0, 1e-6, 1e6),
        },
        "granite",
    ),
    "mixtral": Family(
        {
            **_MISTRAL,
            "rms_norm_eps": number(1e-5, 0, 1),
            "sliding_window": integer(None, null=True),
            "num_experts_per_tok": integer(2),
            "num_local_experts": integer(8, alias="num_experts"),
        },
        "mixtral",
        theta=1000000.0,
        experts=Experts("block_sparse_moe", "gate", ("w1", "w3", "w2"), normalised=True),
    ),
    "qwen3_moe": Family(
        {
            **_LLAMA,
            "vocab_size": integer(151936),
            "hidden_size": integer(2048),
            "intermediate_size": integer(6144),
            "num_hidden_layers": integer(24),
            "num_key_value_heads": integer(4),
            "max_position_embeddings": integer(32768),
            "attention_bias": flag(False),
            "use_sliding_window": flag(False),
            "sliding_window": integer(4096, null=True),
            "decoder_sparse_step": integer(1),
            "mlp_only_layers": array(),
            "moe_intermediate_size": integer(768),
            "num_experts_per_tok": integer(8),
            "num_experts": integer(128, alias="num_local_experts"),
            "norm_topk_prob": flag(False),
        },
        "qwen3_moe",
        qk_norm="head",
        experts=Experts("mlp", "gate", ("gate_proj", "up_proj", "down_proj")),
    ),
    "gpt_oss": Family(
        {
            **_LLAMA,
            **_WINDOW,
            "vocab_size": integer(201088),
            "hidden_size": integer(2880),
            "intermediate_size": integer(2880),
            "num_hidden_layers": integer(36),
            "num_attention_heads": integer(64),
            "num_key_value_heads": integer(8, null=True),
            "head_dim": integer(64, high=MAX_HEAD_DIM, null=True),
            "max_position_embeddings": integer(131072),
            "rms_norm_eps": number(1e-5, 0, 1),
            "sliding_window": integer(128, null=True),
            "attention_bias": flag(True),
            "num_experts_per_tok": integer(4),
            "num_local_experts": integer(128, alias="num_experts"),
            "swiglu_alpha": number(1.702, -1e6, 1e6),
            "swiglu_limit": number(7.0, 1e-6),
        },
        "gpt_oss",
        sinks=True,
        slides=_every_other,
        theta=150000.0,
        rope={
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        experts=Experts("mlp", "router", None, softmax_first=False, clamped=True),
    ),
    "deepseek_v2": Family(
        {
            **_DEEPSEEK,
            "vocab_size": integer(102400),
            "mlp_bias": flag(False),
            "moe_intermediate_size": integer(1407),
            "n_routed_experts": integer(64, alias="num_experts"),
            "scoring_func": text("softmax"),
            "topk_method": text("greedy"),
        },
        "deepseek_v2",
        latent=True,
        rope_types=_DEEPSEEK_ROPES,
        experts=Experts("mlp", "gate", ("gate_proj", "up_proj", "down_proj"), routing=read_v2),
    ),
    "deepseek_v3": Family(
        {
            **_DEEPSEEK,
            "vocab_size": integer(129280),
            "hidden_size": integer(7168),
            "intermediate_size": integer(18432),
            "num_hidden_layers": integer(61),
            "num_attention_heads": integer(128),
            "num_key_value_heads": integer(128, null=True),
            "max_position_embeddings": integer(4096),
            "moe_intermediate_size": integer(2048),
            "n_routed_experts": integer(256, alias="num_local_experts"),
            "n_shared_experts": integer(1),
            "num_experts_per_tok": integer(8),
            "first_k_dense_replace": integer(3, low=0),
            "routed_scaling_factor": number(2.5, -1e6, 1e6),
            "n_group": integer(8),
            "topk_group": integer(4),
            "norm_topk_prob": flag(True),
            "scoring_func": text("sigmoid"),
            "topk_method": text("noaux_tc"),
            "rope_interleave": flag(True),
        },
        "deepseek_v3",
        latent=True,
        rope_types=_DEEPSEEK_ROPES,
        experts=Experts("mlp", "gate", ("gate_proj", "up_proj", "down_proj"), routing=read_v3),
    ),
}  # fmt: skip

# Fields that change what a model computes, with the values that say nothing.
_MEANINGFUL: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "kv_lora_rank": (None,),
    "logits_scaling": (None, 1),
    "n_routed_experts": (None, 0),
    "n_shared_experts": (None, 0),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1),
    "use_bidirectional_attention": (None, False),
}


def check_foreign(config: Mapping[str, Any], fields: Mapping[str, Field]) -> None:
    """Refuses a field that other families compute with, where this one does not and the field says anything."""
    known = {*fields, *(entry.alias for entry in fields.values())}
    for name, neutral in _MEANINGFUL.items():
        if name in config and name not in known and config[name] not in neutral:
            raise UnsupportedModelError(
                f"load_model: config.json has {name}={describe(config[name])}, which model_type="
                f"{config.get('model_type')!r} does not compute with; {describe(neutral[-1])} is needed"
            )


def layer_windows(family: Family, config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """The sliding window of each layer, from the fields that have been read: of those that layer_types names, else of
    those that the family says."""
    window = config.get("sliding_window")
    if not config.get("use_sliding_window", True):
        window = None
    kinds = config.get("layer_types")
    if kinds is None:
        return [window if family.slides(config, i) else None for i in range(num_layers)]
    allowed = ("full_attention",) if window is None else ("full_attention", "sliding_attention")
    if len(kinds) != num_layers or any(kind not in allowed for kind in kinds):
        raise UnsupportedModelError(
            f"load_model: config.json has layer_types={describe(kinds)} and sliding_window={window}; {num_layers} of "
            f"{' or '.join(allowed)} are needed"
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _turns(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of SmolLM3 has RoPE."""
    given = config["no_rope_layers"]
    return bool((layer + 1) % config["no_rope_layer_interval"] if given is None else given[layer])


def layer_ropes(
    family: Family, raw: Mapping[str, Any], config: Mapping[str, Any], windows: list[int | None], head_dim: int
) -> tuple[dict[str, Rope], list[str | None]]:
    """RoPE by name, and the name of each layer's; None: the layer has none.

    raw: config.json; config: the fields that have been read. The names are what the stock model's buffers of
    frequencies begin with: nothing, or a layer type.
    """
    options: dict[str, Any] = {
        "kinds": family.rope_types,
        "aliases": family.rope_aliases,
        "partial": family.partial_rotary,
    }
    # What a missing field means, for all fields that `read_rope` looks at.
    context = {**raw, **{name: config[name] for name in _CONTEXT if name in config}}
    if family.rope_by_layer_type:
        by_name = {
            name: read_rope(context, head_dim, parameters, **options)
            for name, parameters in _by_layer_type(context).items()
        }
        return by_name, ["full_attention" if window is None else "sliding_attention" for window in windows]
    parameters = rope_parameters(raw) or family.rope or {}
    rope = read_rope(context, head_dim, parameters, theta=family.theta, **options)
    names: list[str | None] = [""] * len(windows)
    if "no_rope_layers" in family.fields:
        given = config["no_rope_layers"]
        if given is not None and (len(given) != len(windows) or any(x not in (0, 1) for x in given)):
            raise CheckpointError(
                f"load_model: config.json has no_rope_layers={describe(given)}; {len(windows)} of 0 or 1 are needed"
            )
        names = ["" if _turns(config, i) else None for i in range(len(windows))]
    return {"": rope}, names


_CONTEXT = ("max_position_embeddings", "original_max_position_embeddings")


def _by_layer_type(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """RoPE's fields by layer type, from Gemma 3's older layout (rope_theta, rope_local_base_freq) or the new one."""
    older = {name: config[name] for name in ("rope_theta", "rope_local_base_freq") if config.get(name) is not None}
    scaling = _mapping(config, "rope_scaling")
    given = _mapping(config, "rope_parameters")
    kinds = ("full_attention", "sliding_attention")
    if any(name not in kinds or not isinstance(value, (Mapping, type(None))) for name, value in given.items()):
        raise UnsupportedModelError(
            f"load_model: config.json has rope_parameters={describe(given)}; an object with full_attention and "
            "sliding_attention is needed"
        )
    full = {"rope_theta": older.get("rope_theta", 1000000.0), **(given.get("full_attention") or {}), **scaling}
    sliding = {"rope_theta": older.get("rope_local_base_freq", 10000.0), **(given.get("sliding_attention") or {})}
    return {"full_attention": full, "sliding_attention": sliding}


def _mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return read_field(config, name, mapping()) or {}
