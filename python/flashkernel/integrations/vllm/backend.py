"""The classes that vLLM asks for: what is served (backend), what a batch is (builder), the calls (implementation).

vLLM keeps keys and values of a layer in one tensor, logically [num_blocks, heads_kv, block_size, 2 * head_size] with
the key before the value in the last dim. Its two halves, seen with the tokens before the heads, are what `kv_append`
and `attention_paged` take as pages: views, whatever the order in memory is (pages.py, which also has those with scales
of tokens). Nothing is planned on the host and no length is read there, so that a captured CUDA graph serves any batch
of its size.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import vllm.envs
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

import flashkernel as fk

from . import pages
from .fused import FusedUpdates

__all__ = ["Batch", "Builder", "CustomBackend", "FlashKernelBackend", "Implementation"]

_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
_FP8 = ("fp8", "fp8_e4m3")
_TOKEN_SCALES = ("int8_per_token_head", "fp8_per_token_head")
MAX_HEAD_DIM = 512
_MODE = ExitStack()  # holds the invariant mode while vLLM is in its own


def follow_batch_invariance() -> None:
    """Puts the process into the invariant mode where VLLM_BATCH_INVARIANT=1 has put vLLM into its own."""
    if getattr(vllm.envs, "VLLM_BATCH_INVARIANT", False) and not fk.is_invariant():
        _MODE.enter_context(fk.invariant())


class FlashKernelBackend(AttentionBackend):
    """Attention of float32, float16 and bfloat16 over pages of the same dtype, of float8_e4m3fn or of int8."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *_FP8, *_TOKEN_SCALES]

    @staticmethod
    def get_name() -> str:
        return "FLASHKERNEL"

    @staticmethod
    def get_impl_cls() -> type[Implementation]:
        return Implementation

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Of one layer's cache. Releases such as 0.26 ask for it and for the order below, 0.32 does not."""
        return num_blocks, num_kv_heads, block_size, pages.content(head_size, cache_dtype_str in _TOKEN_SCALES)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Which dim of that shape is each one's in memory: vLLM's own choice for all its backends."""
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        heads_first = get_kv_cache_layout() == "HND"
        if include_num_layers_dimension:
            return (1, 2, 0, 3, 4) if heads_first else (1, 0, 3, 2, 4)
        return (0, 1, 2, 3) if heads_first else (0, 2, 1, 3)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The bytes of a token and head: with scales of tokens, two float32 more."""
        mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "")
        if spec.state_content_bytes is not None or mode.lower() not in _TOKEN_SCALES:
            return spec
        return replace(spec, state_content_bytes=spec.head_size + spec.head_size_v + 2 * pages.SCALE_BYTES)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability is None or tuple(capability) >= (7, 5)  # None: the CPU

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, *_ENCODERS)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


class CustomBackend(FlashKernelBackend):
    """The same under the name that releases of vLLM without names of plugins keep for one."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"


@dataclass
class Batch:
    """One step's queries and where their keys lie. num_actual_tokens: of them, without padding."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor  # int32 [sequences + 1]
    seq_lens: torch.Tensor  # int32 [sequences]
    block_table: torch.Tensor  # int32 [sequences, blocks]
    causal: bool


class Builder(AttentionMetadataBuilder):
    """Passes on vLLM's own buffers, which a graph's replay finds with new values."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # One graph for decode steps and prompts alike. Older releases of vLLM capture it with short queries alone.
        self._has_mixed_graphs = vllm_config.compilation_config.cudagraph_mode is CUDAGraphMode.FULL

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Batch:
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise NotImplementedError(
                "flashkernel: causal differs between the sequences of a batch; one value is needed"
            )
        return Batch(
            common.num_actual_tokens,
            common.max_query_len,
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            bool(common.causal),
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Batch:
        batch = self.build(0, common_attn_metadata)
        batch.seq_lens.fill_(1)  # a capture runs the kernels: not over max_model_len keys
        if self._has_mixed_graphs:
            batch.max_query_len = batch.num_actual_tokens  # a replay may hold one prompt that fills the graph
        return batch

    def update_draft_decode_metadata(self, metadata: Batch) -> None:
        """Nothing to do: `metadata` holds the buffers themselves."""


class _Converted:
    """A tensor in the form that the kernels take, made again when it has been written or replaced."""

    def __init__(self) -> None:
        self._of: tuple[torch.Tensor, int, int] | None = None
        self._value: torch.Tensor | None = None

    def get(self, tensor: torch.Tensor, count: int) -> torch.Tensor:
        """float32 [count] of a tensor of that many elements, or of one."""
        version = 0 if tensor.is_inference() else tensor._version  # an inference tensor counts no writes
        of, place = self._of, tensor.data_ptr()
        if self._value is None or of is None or of[0] is not tensor or of[1:] != (place, version):
            self._of = tensor, place, version
            self._value = tensor.detach().float().reshape(-1).expand(count).contiguous()
        return self._value


class Implementation(FusedUpdates, AttentionImpl):
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        use_alibi_sqrt: bool = False,
    ):
        follow_batch_invariance()
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._encoder = attn_type in _ENCODERS
        self._is_fp8, self._token_scales = kv_cache_dtype in _FP8, kv_cache_dtype in _TOKEN_SCALES
        if self._encoder and (self._is_fp8 or self._token_scales):
            raise NotImplementedError(
                f"flashkernel: kv_cache_dtype={kv_cache_dtype!r} in an encoder, which has no cache"
            )
        left = -1 if sliding_window is None else sliding_window - 1  # vLLM counts the token itself
        self._window = None if left < 0 else (left, left if self._encoder else -1)
        self._options: dict[str, Any] = {"scale": self.scale, "window": self._window, "softcap": logits_soft_cap or 0.0}
        if use_alibi_sqrt:
            self._options["alibi"] = "sqrt"
        self._slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self._sinks, self._k_scales, self._v_scales = _Converted(), _Converted(), _Converted()

    def _scores(self, device: torch.device) -> dict[str, Any]:
        """Options of a call, their tensors on its device."""
        options = self._options
        if self._slopes is not None:
            if self._slopes.device != device:
                self._slopes = self._slopes.to(device)
            options["alibi_slopes"] = self._slopes
        if self.sinks is not None:
            options["sinks"] = self._sinks.get(self.sinks, self.num_heads)
        return options

    def _pages(self, layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """The pages of keys and of values, and how their elements are read."""
        if self._token_scales:
            k, v, scales = pages.with_token_scales(kv_cache, self.head_size)
        else:
            k, v = pages.halves(kv_cache, self.head_size)
            if not self._is_fp8:
                return k, v, {}
            scales = (
                self._k_scales.get(layer._k_scale, self.num_kv_heads),
                self._v_scales.get(layer._v_scale, self.num_kv_heads),
            )
        return k, v, {"kv_scales": scales, **({"kv_dtype": "float8_e4m3fn"} if k.dtype == torch.uint8 else {})}

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes the tokens with a slot; padding has none, or a negative one."""
        if self._encoder:
            return
        count = slot_mapping.shape[0]
        k, v, elements = self._pages(layer, kv_cache)
        fk.kv_append(key[:count], value[:count], k, v, slot_mapping, **elements)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Batch | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query and output: [tokens, heads, head_size]; output is written and returned."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("flashkernel: quantised attention output is not supported")
        if attn_metadata is None:  # a run that only measures memory
            return output.zero_()
        batch, count = attn_metadata, attn_metadata.num_actual_tokens
        out = output[:count].view(count, self.num_heads, self.head_size)
        options = self._scores(query.device)
        starts, longest = batch.query_start_loc, batch.max_query_len
        if self._encoder:
            assert key is not None and value is not None
            fk.attention_varlen(
                query[:count], key[:count], value[:count], starts, starts, longest, longest, out=out, **options
            )
            return output
        k, v, elements = self._pages(layer, kv_cache)
        fk.attention_paged(
            query[:count],
            k,
            v,
            batch.block_table,
            batch.seq_lens,
            cu_seqlens_q=starts,
            max_seqlen_q=longest,
            causal=batch.causal,
            out=out,
            **options,
            **elements,
        )
        return output
