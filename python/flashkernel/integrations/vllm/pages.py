"""How the tensor that vLLM keeps for the keys and values of a layer is seen as pages. Views alone; nothing is copied.

The tensor is logically [num_blocks, heads_kv, block_size, content], in one of several orders in memory.
"""

from __future__ import annotations

import torch

__all__ = ["SCALE_BYTES", "content", "halves", "with_token_scales"]

SCALE_BYTES = 4  # a float32


def content(head_size: int, token_scales: bool) -> int:
    """Elements that a token of one head takes: its key, its value, and with 8-bit elements perhaps their two scales."""
    return 2 * (head_size + SCALE_BYTES * token_scales)


def halves(cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages [num_blocks, block_size, heads_kv, head_size] of keys and of values; content: the key, then the value."""
    tokens = cache.transpose(1, 2)
    return tokens[..., :head_size], tokens[..., head_size:]


def with_token_scales(
    cache: torch.Tensor, head_size: int
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Pages of 8-bit keys and values, and a float32 scale of each token and head, [num_blocks, heads_kv, block_size].

    cache: int8 or uint8, with a content of 2 * (head_size + 4) bytes. vLLM's own kernels keep the scale of a key behind
    the key, so that rows begin at multiples of 4 bytes. Here each block is four parts, one after another: its keys, its
    values, the scales of the keys, those of the values. Rows begin where vectors of 16 bytes can be read, and a block
    stays what vLLM copies, moves or shares whole. Its bytes have to be one run of memory, as they are in vLLM's orders
    LBNHC, LBHNC, BLNHC and BLHNC.

    Raises: NotImplementedError where they are not.
    """
    blocks, heads, tokens, size = cache.shape
    bytes_, stride = heads * tokens * size, cache.stride(0)
    if (
        cache.element_size() != 1
        or size != content(head_size, True)
        or cache.stride()[1:] not in ((tokens * size, size, 1), (size, heads * size, 1))
        or (blocks > 1 and stride < bytes_)
        or stride % SCALE_BYTES
        or cache.storage_offset() % SCALE_BYTES
    ):
        raise NotImplementedError(
            f"flashkernel: a KV-cache of {cache.dtype} {list(cache.shape)} with strides {list(cache.stride())} for "
            "scales of tokens; blocks of one run of memory with a content of "
            f"{content(head_size, True)} bytes are needed"
        )
    at, part = cache.storage_offset(), heads * tokens * head_size
    shape, strides = (blocks, tokens, heads, head_size), (stride, heads * head_size, head_size, 1)
    k, v = cache.as_strided(shape, strides, at), cache.as_strided(shape, strides, at + part)
    scales = cache.as_strided((blocks, bytes_ - 2 * part), (stride, 1), at + 2 * part).view(torch.float32)
    k_scales, v_scales = scales.view(blocks, 2, heads, tokens).unbind(1)
    return k, v, (k_scales, v_scales)
