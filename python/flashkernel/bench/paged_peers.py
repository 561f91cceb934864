"""Decode over pages by others' kernels, where they are installed: FlashAttention-3 and FlashInfer.

What may be planned once for many calls is planned here, outside of the time that is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from . import baselines
from .case import Provider, Settings, each

__all__ = ["providers"]

WORKSPACE = 128 * 2**20  # bytes, as FlashInfer's documentation advises

Pages = tuple[Any, Any]


def _fa3(q: Any, pages: Pages, table: Any, lengths: Any, metadata: Any) -> Any:
    function = baselines.optional("flash_attn_interface").flash_attn_with_kvcache
    options = {"cache_seqlens": lengths, "page_table": table, "causal": True, "scheduler_metadata": metadata}
    result = function(q.transpose(1, 2), *pages, **options)
    return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)


def _fa3_planned(q: Any, pools: Sequence[Pages], table: Any, lengths: Any) -> Any:
    """A call's metadata, of the sizes alone."""
    batch, heads, _, dim = q.shape
    _, page, heads_kv, _ = pools[0][0].shape
    return baselines.optional("flash_attn_interface").get_scheduler_metadata(
        batch, 1, table.shape[1] * page, heads, heads_kv, dim, lengths, qkv_dtype=q.dtype, page_size=page, causal=True
    )


def _flashinfer(wrapper: Any, q: Any, pages: Pages) -> Any:
    return wrapper.run(q[:, :, 0], pages).unsqueeze(2)


def _flashinfer_planned(tensor_cores: bool, q: Any, pools: Sequence[Pages], table: Any) -> Any:
    """A wrapper with its plan. Every sequence fills its pages."""
    torch = baselines.require_torch()
    batch, heads, _, dim = q.shape
    _, page, heads_kv, _ = pools[0][0].shape
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=q.device)
    library = baselines.optional("flashinfer")
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * table.shape[1]
    last = torch.full((batch,), page, dtype=torch.int32, device=q.device)
    wrapper.plan(indptr, table.flatten(), last, heads, heads_kv, dim, page, q_data_type=q.dtype)
    return wrapper


def providers(s: Settings, q: Any, pools: Sequence[Pages], table: Any, lengths: Any) -> Iterator[Provider]:
    """q: [batch, heads, 1, head_dim]; pools: (k, v) of [pages, page_size, heads_kv, head_dim], full to the last row."""
    if not s.cuda:
        return
    if baselines.optional("flash_attn_interface") is not None:
        if "fa3_paged" not in s.without:
            yield Provider("fa3_paged", each(_fa3, [(q, pages, table, lengths, None) for pages in pools]))
        if "fa3_planned" not in s.without:
            try:
                metadata = _fa3_planned(q, pools, table, lengths)
                calls = each(_fa3, [(q, pages, table, lengths, metadata) for pages in pools])
            except Exception as error:  # of a shape, or a version without that function
                calls = [partial(baselines.refuse, str(error))]
            yield Provider("fa3_planned", calls)
    if baselines.optional("flashinfer") is not None:
        for name, tensor_cores in (("flashinfer", True), ("flashinfer_cuda_cores", False)):
            if name in s.without:
                continue
            try:
                wrapper = _flashinfer_planned(tensor_cores, q, pools, table)
                calls = each(_flashinfer, [(wrapper, q, pages) for pages in pools])
            except Exception as error:  # a shape without a kernel
                calls = [partial(baselines.refuse, str(error))]
            yield Provider(name, calls)
