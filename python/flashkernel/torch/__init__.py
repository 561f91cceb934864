"""FlashKernel's ops as `torch.library` custom ops: autograd, fake tensors, torch.compile(fullgraph=True).

Calls that record no gradient and are not compiled go straight to the compiled op. Importing this module changes
nothing in torch beyond registering the ops as `torch.ops.flashkernel.*`, and the name "flashkernel" with torch's
registry of flash attention implementations: ``torch.nn.attention.activate_flash_attention_impl("flashkernel")`` (torch
2.11 and later) then moves every scaled_dot_product_attention and `varlen_attn` of the process to FlashKernel.
"""

from __future__ import annotations

from . import flash_impl as _flash_impl
from .attention import attention, attention_varlen, pack_mask
from .attention_fp8 import attention_fp8
from .cascade import attention_cascade
from .elementwise import log_softmax, softmax, swiglu
from .fused_linear import fused_linear
from .kv_cache import attention_paged, kv_append, kv_read
from .linear import Linear, linear
from .linear_fp8 import linear_fp8, quantize_fp8_blocks
from .linear_loss import LinearCrossEntropyLoss, linear_cross_entropy, linear_selected_log_prob
from .loss import cross_entropy
from .mla import attention_mla_decode, latent_append
from .norm import RMSNorm, layer_norm, layer_norm_quantized, rms_norm, rms_norm_quantized
from .quantized_linear import quantized_linear
from .rope import rope, rope_table
from .sampling import sample
from .sdpa import scaled_dot_product_attention

_flash_impl.register()

__all__ = [
    "Linear",
    "LinearCrossEntropyLoss",
    "RMSNorm",
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
    "scaled_dot_product_attention",
    "softmax",
    "swiglu",
]
