"""The class that SGLang asks for: what is served, what a batch is, and the calls.

SGLang keeps the keys of a layer as [slots, heads_kv, head_dim], the values likewise, and of each request a row of
slots. A page of its allocator is a run of slots, so that every page_size-th slot of a row, divided by page_size, is
the block table that `attention_paged` takes, and the keys seen as [pages, page_size, heads_kv, head_dim] are its
pages. For decode the table is made by operations on the device alone, which a CUDA graph replays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

import flashkernel as fk

__all__ = ["Batch", "FlashKernelBackend"]

_EXTENDS = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL)


@dataclass
class Batch:
    """Where the keys of a step's queries lie. `starts` says where each sequence's queries begin, for an extend."""

    block_table: torch.Tensor  # int32 [sequences, blocks]
    seq_lens: torch.Tensor  # int32 [sequences]
    starts: torch.Tensor | None = None  # int32 [sequences + 1]
    count: int = 0  # queries without padding
    longest: int = 1  # most queries of a sequence


class FlashKernelBackend(AttentionBackend):
    """Attention of float32, float16 and bfloat16 over pages of the same dtype or of float8_e4m3fn."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any):
        super().__init__()
        pool = runner.token_to_kv_pool
        layout = getattr(pool, "kv_cache_layout", "nhd")
        refused = None
        if getattr(runner, "use_mla_backend", False):
            refused = "a model with MLA"
        elif isinstance(pool, SWAKVPool):
            refused = "a pool apart for sliding windows; --disable-hybrid-swa-memory is needed"
        elif layout != "nhd":
            refused = f"a KV-cache in the order {layout}; nhd is needed"
        elif getattr(pool, "is_quantized_kv_cache", False):
            refused = "a KV-cache with scales of blocks"
        if refused is not None:
            raise NotImplementedError(f"flashkernel: SGLang asks for {refused}")
        self.pool, self.page_size = pool, int(runner.page_size)
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.device = self.req_to_token.device
        self.forward_metadata: Batch | None = None
        self._graph: Batch | None = None
        self._scales: dict[tuple[float, int], torch.Tensor] = {}

    # --- what a batch is

    def _table(self, forward_batch: Any) -> torch.Tensor:
        rows = self.req_to_token[:, :: self.page_size].index_select(0, forward_batch.req_pool_indices)
        return torch.div(rows, self.page_size, rounding_mode="floor")

    def init_forward_metadata(self, forward_batch: Any) -> None:
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
            return
        batch = Batch(self._table(forward_batch), forward_batch.seq_lens.int())
        if not mode.is_decode():
            if mode not in _EXTENDS:
                raise NotImplementedError(f"flashkernel: SGLang's forward mode {mode.name} is not supported")
            lengths = forward_batch.extend_seq_lens
            batch.starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=self.device)
            torch.cumsum(lengths, 0, dtype=torch.int32, out=batch.starts[1:])
            on_host = forward_batch.extend_seq_lens_cpu
            known = lengths.tolist() if on_host is None else [int(length) for length in on_host]
            batch.count, batch.longest = sum(known), max(known, default=0)
        self.forward_metadata = batch

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        blocks = -(-self.req_to_token.shape[1] // self.page_size)
        self._graph = Batch(
            torch.zeros(max_bs, blocks, dtype=torch.int32, device=self.device),
            torch.ones(max_bs, dtype=torch.int32, device=self.device),
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if not forward_batch.forward_mode.is_decode_or_idle():
            mode = forward_batch.forward_mode.name
            raise NotImplementedError(f"flashkernel: a CUDA graph of SGLang's forward mode {mode} is not supported")

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Fills the buffers of the graph; recorded once, replayed with the table and the lengths of the day."""
        assert self._graph is not None, "init_cuda_graph_state comes first"
        count = forward_batch.req_pool_indices.shape[0]
        batch = Batch(self._graph.block_table[:count], self._graph.seq_lens[:count])
        batch.block_table.copy_(self._table(forward_batch))
        batch.seq_lens.copy_(forward_batch.seq_lens)
        self.forward_metadata = batch

    # --- the calls

    def _write(self, k: Any, v: Any, layer: Any, forward_batch: Any) -> None:
        place = KVWriteLoc(forward_batch.out_cache_loc, None)
        self.pool.set_kv_buffer(layer, place, k, v, layer.k_scale, layer.v_scale)

    def _scale(self, value: float | None, heads: int) -> torch.Tensor:
        key = (1.0 if value is None else float(value), heads)
        if key not in self._scales:
            self._scales[key] = torch.full((heads,), key[0], device=self.device)
        return self._scales[key]

    def _attend(self, q: torch.Tensor, layer: Any, **options: Any) -> None:
        batch = self.forward_metadata
        assert batch is not None, "init_forward_metadata comes first"
        k, v = (
            buffer.view(-1, self.page_size, *buffer.shape[1:])
            for buffer in (self.pool.get_key_buffer(layer.layer_id), self.pool.get_value_buffer(layer.layer_id))
        )
        if k.dtype == torch.float8_e4m3fn:
            heads = layer.tp_k_head_num
            options["kv_scales"] = self._scale(layer.k_scale_float, heads), self._scale(layer.v_scale_float, heads)
        elif k.dtype != q.dtype:
            raise NotImplementedError(
                f"flashkernel: SGLang's KV-cache is {k.dtype}; {q.dtype}, the query's, or torch.float8_e4m3fn is needed"
            )
        if layer.sliding_window_size is not None and layer.sliding_window_size >= 0:  # tokens before the query's own
            options["window"] = (layer.sliding_window_size, -1)
        fk.attention_paged(
            q, k, v, batch.block_table, batch.seq_lens, scale=layer.scaling, softcap=layer.logit_cap or 0.0, **options
        )

    def _checked(self, layer: Any, options: dict[str, Any]) -> dict[str, Any]:
        asked = {name: value for name, value in options.items() if value is not None and value is not False}
        sinks = asked.pop("sinks", None)
        refused = None
        if asked:
            refused = f"attention with {', '.join(sorted(asked))}"
        elif layer.is_cross_attention:
            refused = "cross-attention"
        elif layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL:
            refused = "a decoder that is not causal"
        elif layer.attn_type == AttentionType.ENCODER_ONLY and (layer.sliding_window_size or -1) >= 0:
            refused = "an encoder with a sliding window"
        elif layer.xai_temperature_len > 0:
            refused = "a temperature by position"
        elif layer.logit_cap and layer.logit_capping_method != "tanh":
            refused = f"logits capped by {layer.logit_capping_method}"
        if refused is not None:
            raise NotImplementedError(f"flashkernel: SGLang asks for {refused}, which is not supported")
        return {} if sinks is None else {"sinks": sinks.detach().float()}

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **options: Any
    ) -> torch.Tensor:
        """q: [sequences, heads * head_dim]; returns [sequences, heads * v_head_dim]."""
        given = self._checked(layer, options)
        if save_kv_cache and k is not None:
            self._write(k, v, layer, forward_batch)
        q = q.reshape(-1, layer.tp_q_head_num, 1, layer.qk_head_dim)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, 1, layer.v_head_dim)
        self._attend(q, layer, out=out, causal=True, **given)
        return out.view(q.shape[0], -1)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **options: Any
    ) -> torch.Tensor:
        """q: [tokens, heads * head_dim]; returns [tokens, heads * v_head_dim], what is padding unset."""
        given = self._checked(layer, options)
        if save_kv_cache and k is not None:
            self._write(k, v, layer, forward_batch)
        batch = self.forward_metadata
        assert batch is not None and batch.starts is not None, "init_forward_metadata comes first"
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        self._attend(
            q[: batch.count],
            layer,
            out=out[: batch.count],
            causal=layer.attn_type != AttentionType.ENCODER_ONLY,
            cu_seqlens_q=batch.starts,
            max_seqlen_q=batch.longest,
            **given,
        )
        return out.view(q.shape[0], -1)

    def support_triton(self) -> bool:
        return self.device.type == "cuda"
