"""One valid call of every op of `flashkernel`, as keywords, for tests that hold for all of them."""

from __future__ import annotations

import inspect
from typing import Any

import torch

import flashkernel as fk
from flashkernel.ops import OPS
from flashkernel.selfcheck import SAMPLES, Inputs


def calls() -> dict[str, tuple[str, dict[str, Any]]]:
    """Case -> (op, keywords) with new torch tensors; every array that an op can take or write is there."""
    generator = torch.Generator().manual_seed(0)

    def f(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def i(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    x, q, packed = f(3, 4), f(1, 2, 4, 8), f(4, 2, 8)
    out, lse = fk.attention(q, q, q, return_lse=True)
    packed_out, packed_lse = fk.attention_varlen(packed, packed, packed, i(0, 4), i(0, 4), 4, 4, return_lse=True)
    lengths = {"cu_seqlens_q": i(0, 4), "cu_seqlens_k": i(0, 4), "max_seqlen_q": 4, "max_seqlen_k": 4}
    of_heads, bits = {"alibi_slopes": f(2), "sinks": f(2)}, torch.full((4, 1), 7, dtype=torch.int32)
    extras = {"bias": f(4, 4), "alibi_slopes": f(2), "sinks": f(2)}
    pages = {"k_pages": f(2, 16, 2, 8), "v_pages": f(2, 16, 2, 8)}
    bytes_ = {name: torch.zeros(2, 16, 2, 8, dtype=torch.int8) for name in pages}
    table = {"block_table": torch.tensor([[1, 0]], dtype=torch.int32), "seq_lens": i(20)}
    turned = {"positions": i(0, 1, 2, 3), "inv_freq": f(4)}
    mean, rstd = f(3), f(3).abs()
    row = {"weight": f(4), "residual": f(3, 4), "out": f(3, 4), "residual_out": f(3, 4)}
    token_scales = (torch.ones(2, 2, 16), torch.ones(2, 2, 16))
    fused = {"x": x, "weight": f(5, 4), "targets": i(0, 1, 4), "bias": f(5)}
    listed: dict[str, tuple[str, dict[str, Any]]] = {
        "add": ("add", {"a": f(3, 4), "b": x, "out": f(3, 4)}),
        "argmax": ("argmax", {"x": x, "axis": 1, "out": torch.zeros(3, dtype=torch.int64)}),
        "attention": ("attention", {"q": f(1, 2, 4, 8), "k": q, "v": f(1, 2, 4, 8), **extras, "out": f(1, 2, 4, 8)}),
        "attention_backward": (
            "attention_backward",
            {"grad_out": f(1, 2, 4, 8), "q": q, "k": f(1, 2, 4, 8), "v": f(1, 2, 4, 8), "out": out, "lse": lse}
            | {**extras, "grad_lse": f(1, 2, 4), "grads": (f(1, 2, 4, 8), f(1, 2, 4, 8), f(1, 2, 4, 8))},
        ),
        "attention, masked": ("attention", {"q": f(1, 2, 4, 8), "k": q, "v": f(1, 2, 4, 8), "mask": bits}),
        "attention_backward, masked": (
            "attention_backward",
            {"grad_out": f(1, 2, 4, 8), "q": q, "k": f(1, 2, 4, 8), "v": f(1, 2, 4, 8), "out": out, "lse": lse}
            | {"mask": bits, **extras},
        ),
        "attention, blocks": (
            "attention",
            {"q": f(1, 2, 4, 8), "k": q, "v": f(1, 2, 4, 8), "block_mask": torch.ones(1, 1, dtype=torch.uint8)}
            | {"block_size": (64, 128)},
        ),
        "attention_backward, blocks": (
            "attention_backward",
            {"grad_out": f(1, 2, 4, 8), "q": q, "k": f(1, 2, 4, 8), "v": f(1, 2, 4, 8), "out": out, "lse": lse}
            | {"block_mask": torch.ones(1, 1, dtype=torch.uint8), **extras},
        ),
        "attention_cascade": (
            "attention_cascade",
            {"q": f(2, 2, 1, 8), **pages, "prefix_table": table["block_table"][:, :1], "prefix_lens": i(16)}
            | {"block_table": torch.zeros(2, 1, dtype=torch.int32), "seq_lens": i(3, 4), "cu_prefix_q": i(0, 2)}
            | {"sinks": f(2), "out": f(2, 2, 1, 8)},
        ),
        "attention_cascade, 8 bits": (
            "attention_cascade",
            {"q": packed, **bytes_, "prefix_table": table["block_table"], "prefix_lens": i(20), **table}
            | {"cu_seqlens_q": i(0, 4), "kv_scales": token_scales, "out": f(4, 2, 8)},
        ),
        "attention_fp8": (
            "attention_fp8",
            {
                **{name: f(1, 2, 4, 16).to(torch.float8_e4m3fn).view(torch.uint8) for name in "qkv"},
                **{"q_scale": f(1, 2), "k_scale": f(1, 2), "v_scale": f(1, 2)},
                **of_heads,
                "out": f(1, 2, 4, 16).bfloat16(),
            },
        ),
        "attention_fp8, lengths": (
            "attention_fp8",
            {
                **{name: f(4, 2, 16).to(torch.float8_e4m3fn).view(torch.uint8) for name in "qkv"},
                **{"cu_seqlens_q": i(0, 4), "cu_seqlens_k": i(0, 4), "seqused_q": i(4), "seqused_k": i(3)},
            },
        ),
        "attention_mla_decode": (
            "attention_mla_decode",
            {
                "q": f(1, 2, 4, 8),
                "latent_pages": f(2, 16, 8),
                **table,
                "scale": 0.5,
                "head_dim_v": 6,
                "out": f(1, 2, 4, 6),
            },
        ),
        "attention_mla_decode, one scale": (
            "attention_mla_decode",
            {
                "q": f(1, 2, 4, 8),
                "latent_pages": f(2, 16, 8).to(torch.float8_e4m3fn),
                **table,
                "scale": 0.5,
                "latent_scale": f(1),
                "head_dim_v": 4,
            },
        ),
        "latent_append": (
            "latent_append",
            {
                "latent": f(3, 8),
                "key": f(3, 4),
                "latent_pages": torch.zeros(2, 16, 20, dtype=torch.uint8),
                "slots": i(3, -1, 17),
            },
        ),
        "latent_append, one scale": (
            "latent_append",
            {
                "latent": f(3, 8),
                "key": f(3, 4),
                "latent_pages": torch.zeros(2, 16, 12, dtype=torch.uint8),
                "slots": i(3, -1, 17),
                "latent_scale": f(1),
            },
        ),
        "attention_paged": (
            "attention_paged",
            {"q": f(1, 2, 4, 8), **pages, **table, "alibi_slopes": f(2), "sinks": f(2), "out": f(1, 2, 4, 8)},
        ),
        "attention_paged, masked": (
            "attention_paged",
            {"q": f(1, 2, 4, 8), **pages, **table, "mask": torch.full((4, 1), 7, dtype=torch.int32)},
        ),
        "attention_paged, 8 bits": (
            "attention_paged",
            {"q": packed, **bytes_, **table, "cu_seqlens_q": i(0, 4), "kv_scales": token_scales, "out": f(4, 2, 8)},
        ),
        "attention_varlen": (
            "attention_varlen",
            {"q": f(4, 2, 8), "k": packed, "v": f(4, 2, 8), **lengths, **of_heads, "out": f(4, 2, 8)},
        ),
        "attention_varlen_backward": (
            "attention_varlen_backward",
            {"grad_out": f(4, 2, 8), "q": packed, "k": f(4, 2, 8), "v": f(4, 2, 8), "out": packed_out}
            | {"lse": packed_lse, **lengths, **of_heads, "grad_lse": f(2, 4)}
            | {"grads": (f(4, 2, 8), f(4, 2, 8), f(4, 2, 8))},
        ),
        "check_block_table": ("check_block_table", {**table, "num_pages": 2, "page_size": 16}),
        "cross_entropy": ("cross_entropy", {"logits": x, "targets": i(0, 1, 2)}),
        "cross_entropy_backward": (
            "cross_entropy_backward",
            {"grad_loss": f(), "logits": x, "targets": i(0, 1, 2), "lse": f(3), "out": f(3, 4)},
        ),
        "decode_step": (
            "decode_step",
            {"tokens": i(4, 0), "positions": i(5, 1), "slots": i(13, 2), "seq_lens": i(6, 3)}
            | {"block_table": torch.tensor([[1, 3], [0, 2]], dtype=torch.int32), "embedding": f(5, 8), "norms": f(5, 8)}
            | {"qkv_weight": f(2, 32, 8), "out_weight": f(2, 8, 16), "gate_up_weight": f(2, 12, 8)}
            | {"down_weight": f(2, 8, 6), "head_weight": f(7, 8), "inv_freq": f(4), "k_pages": f(2, 4, 4, 1, 8)}
            | {"v_pages": f(2, 4, 4, 1, 8), "out": f(2, 7), "timeline": torch.zeros(1, 11, 4, dtype=torch.int64)},
        ),
        "kv_append": (
            "kv_append",
            {
                "k": packed,
                "v": f(4, 2, 8),
                "k_pages": f(2, 16, 2, 8),
                "v_pages": f(2, 16, 2, 8),
                "slots": i(0, 1, 2, 17),
            }
            | {"rope": {**turned, "q": f(4, 2, 8), "q_out": f(4, 2, 8)}},
        ),
        "kv_append, norms": (
            "kv_append",
            {"k": packed, "v": f(4, 2, 8), "k_pages": f(2, 16, 2, 8), "v_pages": f(2, 16, 2, 8)}
            | {"slots": i(0, 1, 2, 17), "rope": {**turned, "q": f(4, 2, 8), "q_norm": f(8), "k_norm": f(8)}},
        ),
        "kv_append, tables": (
            "kv_append",
            {"k": packed, "v": f(4, 2, 8), "k_pages": f(2, 16, 2, 8), "v_pages": f(2, 16, 2, 8)}
            | {"slots": i(0, 1, 2, 17), "rope": {"positions": i(0, 1, 2, 3), "cos": f(4, 4), "sin": f(4, 4)}},
        ),
        "qkv_append": (
            "qkv_append",
            {"x": f(4, 6), "weight": f(56, 6), "k_pages": f(2, 16, 2, 8), "v_pages": f(2, 16, 2, 8)}
            | {"slots": i(0, 1, 2, 17), "bias": f(56), "norm_weight": f(6), "norm_bias": f(6), "norm": "layer"}
            | {"rope": turned, "constant_weights": True, "out": f(4, 3, 8)},
        ),
        "kv_append, 8 bits": (
            "kv_append",
            {"k": packed, "v": f(4, 2, 8), **bytes_, "slots": i(0, 1, 2, 17), "kv_scales": token_scales},
        ),
        "kv_copy_pages": (
            "kv_copy_pages",
            {"k_pages": f(2, 16, 2, 8), "v_pages": f(2, 16, 2, 8), "src": i(0), "dst": i(1)},
        ),
        "kv_copy_pages, 8 bits": (
            "kv_copy_pages",
            {**{k: v.clone() for k, v in bytes_.items()}, "src": i(0), "dst": i(1)}
            | {"kv_scales": (torch.ones(2, 2, 16), torch.ones(2, 2, 16))},
        ),
        "kv_read": ("kv_read", {**pages, **table, "max_seq": 20, "out": (f(1, 20, 2, 8), f(1, 20, 2, 8))}),
        "kv_read, 8 bits": (
            "kv_read",
            {**bytes_, **table, "max_seq": 20, "kv_scales": token_scales, "out": (f(1, 20, 2, 8), f(1, 20, 2, 8))},
        ),
        "layer_norm": ("layer_norm", {"x": x, "bias": f(4), **row}),
        "layer_norm_backward": (
            "layer_norm_backward",
            {"grad_out": f(3, 4), "h": x, "weight": f(4), "mean": mean, "rstd": rstd, "grad_residual_out": f(3, 4)},
        ),
        "layer_norm_quantized": (
            "layer_norm_quantized",
            {"x": x, "bias": f(4), **row, "out_dtype": "int8"}
            | {"out": torch.zeros(3, 4, dtype=torch.int8), "scales": f(3)},
        ),
        "layer_norm_quantized, one scale": ("layer_norm_quantized", {"x": x, "scale": f(1)}),
        "linear": ("linear", {"x": x, "weight": f(5, 4), "bias": f(5), "out": f(3, 5)}),
        "fused_linear": (
            "fused_linear",
            {"x": x, "weight": f(6, 4), "bias": f(6), "norm_weight": f(4), "residual": f(3, 3), "eps": 1e-5}
            | {"activation": "swiglu", "constant_weights": True, "out": f(3, 3)},
        ),
        "fused_linear, LayerNorm": (
            "fused_linear",
            {"x": x, "weight": f(5, 4), "norm_weight": f(4), "norm_bias": f(4), "norm": "layer"},
        ),
        "linear_backward": (
            "linear_backward",
            {"grad_out": f(3, 5), "x": x, "weight": f(5, 4), "preactivation": f(3, 5), "activation": "silu"},
        ),
        "linear_cross_entropy": ("linear_cross_entropy", {**fused, "class_weights": f(5).abs()}),
        "linear_cross_entropy_backward": (
            "linear_cross_entropy_backward",
            {"grad_loss": f(), **fused, "lse": f(3), "class_weights": f(5).abs()},
        ),
        "linear_selected_log_prob": ("linear_selected_log_prob", fused),
        "linear_selected_log_prob_backward": (
            "linear_selected_log_prob_backward",
            {"grad_log_prob": f(3), **fused, "lse": f(3)},
        ),
        "log_softmax": ("log_softmax", {"x": x, "out": f(3, 4)}),
        "log_softmax_backward": ("log_softmax_backward", {"grad_out": f(3, 4), "out": x}),
        "merge_states": (
            "merge_states",
            {"out_a": x, "lse_a": f(3), "out_b": f(3, 4), "lse_b": f(3), "out": (f(3, 4), f(3))},
        ),
        "pack_mask": ("pack_mask", {"mask": x > 0, "out": torch.zeros(3, 1, dtype=torch.int32)}),
        "linear_fp8": (
            "linear_fp8",
            {"x": f(3, 8), "weight": torch.full((5, 8), 0x38, dtype=torch.uint8), "x_scale": None}
            | {"weight_scale": f(5, 1), "bias": f(5), "out": f(3, 5)},
        ),
        "linear_fp8, 8 bits": (  # bytes: torch has no arithmetic in float8
            "linear_fp8",
            {"bias": f(5), "x": torch.full((3, 8), 0x3C, dtype=torch.uint8), "x_scale": f(3, 1)}
            | {"weight": torch.full((5, 8), 0x38, dtype=torch.uint8), "weight_scale": f(5, 1)}
            | {"out": f(3, 5), "out_dtype": torch.float32},
        ),
        "quantize_fp8_blocks": (
            "quantize_fp8_blocks",
            {"x": f(3, 8), "out": torch.zeros(3, 8, dtype=torch.uint8), "scales": f(3, 1)},
        ),
        "quantized_linear": (
            "quantized_linear",
            {"x": f(3, 32), "weight": torch.full((5, 16), 0x5B, dtype=torch.uint8), "scales": f(5, 1)}
            | {"zeros": f(5, 1), "bias": f(5), "out": f(3, 5)},
        ),
        "reduce_max": ("reduce_max", {"x": x, "axis": 1, "out": f(3)}),
        "reduce_mean": ("reduce_mean", {"x": x, "axis": 1, "out": f(3)}),
        "reduce_sum": ("reduce_sum", {"x": x, "axis": 1, "out": f(3)}),
        "rms_norm": ("rms_norm", {"x": x, **row}),
        "rms_norm_backward": (
            "rms_norm_backward",
            {"grad_out": f(3, 4), "h": x, "weight": f(4), "rstd": rstd, "grad_residual_out": f(3, 4)},
        ),
        "rms_norm_quantized": (
            "rms_norm_quantized",
            {"x": x, **row, "out_dtype": "int8", "out": torch.zeros(3, 4, dtype=torch.int8), "scales": f(3)},
        ),
        "rms_norm_quantized, one scale": ("rms_norm_quantized", {"x": x, "scale": f(1)}),
        "rope": ("rope", {"q": f(1, 2, 4, 8), "k": q, **turned, "out": (f(1, 2, 4, 8), f(1, 2, 4, 8))}),
        "rope_table": (
            "rope_table",
            {"q": f(1, 2, 4, 8), "k": q, "cos": f(4, 4), "sin": f(4, 4), "positions": i(0, 1, 2, 3)}
            | {"out": (f(1, 2, 4, 8), f(1, 2, 4, 8))},
        ),
        "sample": (
            "sample",
            {name: torch.full((3,), value) for name, value in (("temperature", 0.7), ("top_p", 0.9), ("min_p", 0.01))}
            | {f"{name}_penalty": torch.full((3,), 1.5) for name in ("repetition", "frequency", "presence")}
            | {"logits": x, "top_k": i(0, 2, 3), "bias": f(3, 4), "history": torch.ones(3, 4, dtype=torch.int32)}
            | {name: torch.arange(3) for name in ("seed", "offset")}
            | {"out": torch.zeros(3, dtype=torch.int64), "logprob": f(3)},
        ),
        "softmax": ("softmax", {"x": x, "out": f(3, 4)}),
        "softmax_backward": ("softmax_backward", {"grad_out": f(3, 4), "out": x}),
        "swiglu": ("swiglu", {"gate": x, "up": f(3, 4), "out": f(3, 4)}),
        "swiglu_backward": ("swiglu_backward", {"grad_out": f(3, 4), "gate": x, "up": f(3, 4)}),
    }
    ops_here = {op for op, _ in listed.values()}
    return {**listed, **{op: (op, _sampled(op)) for op in OPS if op not in ops_here}}


def _sampled(op: str) -> dict[str, Any]:
    """Doctor's call of an op that has none here."""
    inputs = Inputs("float32", "cpu", as_torch=True)
    sample = SAMPLES[op](inputs)
    names = inspect.signature(getattr(fk, op)).parameters
    return {**dict(zip(names, (array for array, _ in sample.arguments), strict=False)), **sample.options}


Path = tuple[Any, ...]


def arrays(keywords: Any, path: Path = ()) -> dict[Path, torch.Tensor]:
    """Where the tensors of a call are: ("q",), ("out", 1), ("rope", "q_out")."""
    if isinstance(keywords, torch.Tensor):
        return {path: keywords}
    items: Any = keywords.items() if isinstance(keywords, dict) else ()
    if isinstance(keywords, tuple):
        items = enumerate(keywords)
    return {at: tensor for key, value in items for at, tensor in arrays(value, (*path, key)).items()}


def replaced(keywords: Any, path: Path, value: Any) -> Any:
    """The same call with another value at a path."""
    if not path:
        return value
    if isinstance(keywords, tuple):
        return tuple(replaced(v, path[1:], value) if i == path[0] else v for i, v in enumerate(keywords))
    return {k: replaced(v, path[1:], value) if k == path[0] else v for k, v in keywords.items()}


def written(case: str) -> list[Path]:
    """The arrays that a call writes."""
    op, keywords = calls()[case]
    paths = [
        path
        for path in arrays(keywords)
        if path[0] in ("out", "grads", "residual_out", "logprob")
        or path[-1] == "q_out"
        or (path[0] == "scales" and op.endswith(("norm_quantized", "fp8_blocks")))
    ]
    if op.endswith("_backward"):  # whose `out` is what the forward pass gave
        paths = [path for path in paths if path[0] == "grads" or op == "cross_entropy_backward"]
    if op in ("kv_append", "kv_copy_pages", "decode_step", "qkv_append"):
        in_place = "k_pages", "v_pages", "kv_scales", "timeline"
        paths += [path for path in arrays(keywords) if path[0] in in_place]
    return paths
