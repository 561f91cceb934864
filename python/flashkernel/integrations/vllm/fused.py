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
        queries = query.view(query.shape[0], self.num_heads, self.head_size)
        k, v = (x.view(key.shape[0], self.num_kv_heads, self.head_size) for x in (key, value))
        self._update(layer, queries, queries, k, v, positions, cos_sin_cache, is_neox, kv_cache, layer_slot_mapping, {})

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
        """One kernel: RMSNorm of each head of the queries and keys, and the update above. With pages of 8 bits, three.

        qkv: [tokens, (heads + 2 * kv heads) * head_size], read where it lies. q_weight, k_weight: [head_size]. q_out
        gets the queries, normed and turned. Keys go into the pages, where attention reads them: k_out is scratch, which
        nobody reads. Between the steps numbers are rounded to qkv's dtype, as the unfused graph rounds them.
        """
        if self._encoder:
            return
        tokens, size = qkv.shape[0], self.head_size
        heads = qkv.view(tokens, self.num_heads + 2 * self.num_kv_heads, size)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        queries, keys = q_out.view(tokens, self.num_heads, size), k_out.view(tokens, self.num_kv_heads, size)
        norms: dict[str, Any] = {"q_norm": q_weight, "k_norm": k_weight, "norm_eps": rms_norm_eps}
        if self._pages(layer, kv_cache)[2]:
            q = fk.rms_norm(q, q_weight, eps=rms_norm_eps, out=queries)
            k, norms = fk.rms_norm(k, k_weight, eps=rms_norm_eps, out=keys), {}
        self._update(layer, q, queries, k, v, positions, cos_sin_cache, is_neox, kv_cache, layer_slot_mapping, norms)

    def _update(
        self,
        layer: Any,
        query: torch.Tensor,
        query_out: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        norms: dict[str, Any],
    ) -> None:
        """Heads [tokens, heads, head_size]; those of padding, past the slots, are left as they are."""
        count, half = slots.shape[0], cos_sin_cache.shape[-1] // 2
        k, v, elements = self._pages(layer, kv_cache)
        rope: Any = {
            "positions": positions[:count],
            "cos": cos_sin_cache[:, :half],
            "sin": cos_sin_cache[:, half:],
            "interleaved": not is_neox,
            "q": query[:count],
            "q_out": query_out[:count],
            **norms,
        }
        fk.kv_append(key[:count], value[:count], k, v, slots, rope=rope, **elements)
