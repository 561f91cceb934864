"""What vLLM's compiler puts in place of RoPE and the cache's update, and of the norms of queries and keys before them.

vLLM's passes `fuse_rope_kvcache` and `fuse_qk_norm_rope_kvcache` call these methods of a layer that says it has them.
Releases 0.32 and 0.33 run the passes on ROCm alone: on a GPU of NVIDIA and on the CPU nothing calls them yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import flashkernel as fk

__all__ = ["FusedUpdates"]


class FusedUpdates:
    """Part of `backend.Implementation`."""

    if TYPE_CHECKING:
        num_heads: int
        num_kv_heads: int
        head_size: int
        _encoder: bool

        def _pages(self, layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]: ...

    def fused_rope_kvcache_supported(self) -> bool:
        return not self._encoder

    def fused_qk_norm_rope_kvcache_supported(self) -> bool:
        return not self._encoder

    def do_rope_and_kv_cache_update(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """One kernel: turns query [tokens, heads, head_size] in place, and writes turned keys, and values, to their
        slots.

        positions: [tokens]. cos_sin_cache: [positions, rotary_dim], the cosines before the sines. key itself stays as
        it is: attention reads the pages.
        """
        if self._encoder:
            return
        count, half = layer_slot_mapping.shape[0], cos_sin_cache.shape[-1] // 2
        queries = query.view(query.shape[0], self.num_heads, self.head_size)[:count]
        k, v, elements = self._pages(layer, kv_cache)
        rope: Any = {
            "positions": positions[:count],
            "cos": cos_sin_cache[:, :half],
            "sin": cos_sin_cache[:, half:],
            "interleaved": not is_neox,
            "q": queries,
            "q_out": queries,
        }
        shape = key.shape[0], self.num_kv_heads, self.head_size
        new_k, new_v = (x.view(shape)[:count] for x in (key, value))
        fk.kv_append(new_k, new_v, k, v, layer_slot_mapping, rope=rope, **elements)

    def do_qk_norm_rope_kvcache_update(
        self,
        layer: Any,
        qkv: torch.Tensor,
        q_out: torch.Tensor,
        k_out: torch.Tensor,
        positions: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        rms_norm_eps: float,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """Three kernels: RMSNorm of each head of the queries, of the keys, and the update above.

        qkv: [tokens, (heads + 2 * kv heads) * head_size], read where it lies. q_weight, k_weight: [head_size]. q_out is
        the queries, normed and turned; k_out the keys, normed alone: the turned ones are in the pages, where attention
        reads them. Between the steps numbers are rounded to qkv's dtype, as the unfused graph rounds them.
        """
        tokens, size = qkv.shape[0], self.head_size
        heads = qkv.view(tokens, self.num_heads + 2 * self.num_kv_heads, size)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        normed_q, normed_k = q_out.view(tokens, self.num_heads, size), k_out.view(tokens, self.num_kv_heads, size)
        fk.rms_norm(q, q_weight, eps=rms_norm_eps, out=normed_q)
        fk.rms_norm(k, k_weight, eps=rms_norm_eps, out=normed_k)
        self.do_rope_and_kv_cache_update(
            layer, normed_q, normed_k, v, positions, cos_sin_cache, is_neox, kv_cache, layer_slot_mapping
        )
