"""torch's scaled_dot_product_attention over FlashKernel: its signature, mask rules and alignment; nested tensors."""

from __future__ import annotations

from typing import Any

import torch

from flashkernel import _C

from ._library import dense, direct, like
from .attention import attention, attention_varlen, pack_mask

__all__ = ["mask_option", "scaled_dot_product_attention", "top_left"]


_top_left: Any = vars(_C)["_attention_top_left"]  # no part of the package's interface


def _out(query: Any, value: Any) -> Any:
    """Memory for the result, where it is not simply contiguous: in query's order of dims if it has query's shape."""
    return like(query) if not query.is_contiguous() and value.shape[-1] == query.shape[-1] else None


def top_left(seq_q: int, seq_k: int, k: Any, v: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Keys, values and options of `attention` such that query i sees the keys 0 to i. Nothing is copied.

    The library aligns to the bottom right: query i stands at i + seq_k - seq_q.
    """
    if seq_q < seq_k:
        return k.narrow(-2, 0, seq_q), v.narrow(-2, 0, seq_q), {"causal": True}
    if seq_q == seq_k:
        return k, v, {"causal": True}
    return k, v, {"window": (None, seq_q - seq_k)}


def mask_option(mask: torch.Tensor | None, dtype: torch.dtype, seq_k: int) -> dict[str, Any]:
    """A mask as the library takes it: a bool one as `mask`, a bit a key; another as `bias`, float32 or `dtype` and
    contiguous in its last dim. What is made anew has none of the dims that the mask was expanded to, unless a gradient
    of the mask is recorded, which has all of its entries.
    """
    if mask is None:
        return {}
    if mask.dtype == torch.bool:
        if mask.dim() == 0 or mask.shape[-1] == 1:
            mask = mask.expand(*mask.shape[:-1], seq_k)
        return {"mask": pack_mask(_without_expanded(mask, mask.dim() - 1))}
    if torch.is_grad_enabled() and mask.requires_grad:
        wide = mask if mask.dtype in (torch.float32, dtype) else mask.float()
        return {"bias": wide if wide.dim() == 0 else dense(wide)}
    if mask.dtype not in (torch.float32, dtype):
        return {"bias": _without_expanded(mask, mask.dim()).float().contiguous()}
    if mask.dim() and mask.stride(-1) == 0 and mask.shape[-1] > 1:
        return {"bias": mask.narrow(-1, 0, 1)}
    return {"bias": dense(mask)}


def _without_expanded(mask: torch.Tensor, dims: int) -> torch.Tensor:
    """The mask with size 1 in those of its first `dims` dims that it was expanded to."""
    for dim in range(dims):
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` by FlashKernel's attention, with its gradients (a float mask's
    included); works under torch.compile and torch.autocast.

    query: [..., heads, seq_q, head_dim]; key: [..., heads_kv, seq_k, head_dim]; value: [..., heads_kv, seq_k,
       head_dim_v]; float32, float16 or bfloat16; 2 to 4 dims or more, leading ones broadcast. Or nested tensors of
       layout torch.jagged, [batch, heads, ragged, head_dim].
    attn_mask: bool (True: seen) or float32 or query's dtype (added), broadcastable to [..., heads, seq_q, seq_k]. A
       float mask is read as it lies. A bool mask is packed to a bit a key first (`pack_mask`), which the kernels read.
    is_causal: query i sees the keys 0 to i, whatever the lengths (aligned to the top left, as torch has it).
    enable_gqa: heads may be a multiple of heads_kv.

    Returns [..., heads, seq_q, head_dim_v] in query's dtype; a row that sees no key gives 0. Raises NotImplementedError
    for dropout_p other than 0, ValueError for attn_mask beside is_causal and for shapes and dtypes that don't fit.

    >>> import torch, flashkernel.torch as fkt
    >>> q, k = torch.ones(2, 4, 3, 8), torch.ones(2, 2, 5, 8)
    >>> fkt.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True).shape
    torch.Size([2, 4, 3, 8])
    """
    if attn_mask is None and not dropout_p and direct(query, key, value) and not query.is_nested:
        if not torch._C._is_any_autocast_enabled():
            found = _top_left(query, key, value, _out(query, value), scale, is_causal, enable_gqa)
            if found is not None:
                return found
    if dropout_p:
        raise NotImplementedError(
            f"scaled_dot_product_attention: dropout_p={dropout_p}; 0 is needed: attention dropout is not implemented"
        )
    if is_causal and attn_mask is not None:
        raise ValueError("scaled_dot_product_attention: attn_mask beside is_causal=True; only one of them is possible")
    if query.is_nested or key.is_nested or value.is_nested:
        return _jagged(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    if not (query.dim() == key.dim() == value.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]):
        return _other_dims(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    heads = query.shape[1]
    if (key.shape[1] != heads or value.shape[1] != heads) and not enable_gqa:
        key, value = _same_heads(heads, key, value)
    query, key, value = dense(query), dense(key), dense(value)
    if attn_mask is not None:
        return attention(query, key, value, scale=scale, **mask_option(attn_mask, query.dtype, key.shape[2]))
    if not is_causal:
        return attention(query, key, value, scale=scale)
    key, value, options = top_left(query.shape[2], key.shape[2], key, value)
    return attention(query, key, value, scale=scale, **options)


def _other_dims(query: Any, key: Any, value: Any, attn_mask: Any, is_causal: bool, scale: Any, enable_gqa: bool) -> Any:
    """Attention of tensors of 2, 3 or more than 4 dims: size 1 is put for missing dims; leading ones are joined."""
    dims = max(query.dim(), key.dim(), value.dim())
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise ValueError(
            f"scaled_dot_product_attention: query {list(query.shape)}, key {list(key.shape)}, value "
            f"{list(value.shape)}; at least [seq, head_dim] is needed"
        )
    query, key, value = (x.reshape((1,) * (4 - x.dim()) + tuple(x.shape)) for x in (query, key, value))
    lead = torch.functional.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    if attn_mask is not None and attn_mask.dim() > 4:
        attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-3:]).flatten(0, -4)
    query, key, value = (x.expand(*lead, *x.shape[-3:]).flatten(0, -4) for x in (query, key, value))
    out = scaled_dot_product_attention(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return out.reshape((*lead, *out.shape[1:])[-dims:] if dims >= 4 else out.shape[4 - dims :])


def _same_heads(heads: int, key: Any, value: Any) -> tuple[Any, Any]:
    if key.shape[1] not in (1, heads) or value.shape[1] not in (1, heads):
        raise ValueError(
            f"scaled_dot_product_attention: {heads} heads of queries, {key.shape[1]} of keys and {value.shape[1]} of "
            "values; as many are needed, or enable_gqa=True"
        )
    return key.expand(-1, heads, -1, -1), value.expand(-1, heads, -1, -1)


def _jagged(query: Any, key: Any, value: Any, attn_mask: Any, is_causal: bool, scale: Any, enable_gqa: bool) -> Any:
    """Nested tensors [batch, heads, ragged, head_dim] of layout torch.jagged, as sequences side by side."""
    if attn_mask is not None:
        raise ValueError("scaled_dot_product_attention: attn_mask beside nested tensors; their lengths are the mask")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not x.is_nested or x.layout != torch.jagged or x.dim() != 4 or x.lengths() is not None or x._ragged_idx != 2:
            raise ValueError(
                f"scaled_dot_product_attention: {name} is {'nested' if x.is_nested else 'not nested'}, of layout "
                f"{x.layout} and {x.dim()} dims; three nested tensors [batch, heads, ragged, head_dim] of layout "
                "torch.jagged, without holes, are needed"
            )
    if key.shape[2] != value.shape[2]:
        raise ValueError("scaled_dot_product_attention: key and value have different lengths in their sequences")
    if is_causal and query.shape[2] != key.shape[2]:
        raise ValueError(
            "scaled_dot_product_attention: is_causal=True, but query and key differ in their lengths; for nested "
            "tensors they must be those of one tensor"
        )
    if not enable_gqa and not query.shape[1] == key.shape[1] == value.shape[1]:
        raise ValueError(
            f"scaled_dot_product_attention: {query.shape[1]} heads of queries, {key.shape[1]} of keys and "
            f"{value.shape[1]} of values; as many are needed, or enable_gqa=True"
        )
    q, k, v = (dense(x.transpose(1, 2).values()) for x in (query, key, value))
    longest_q, longest_k = query._get_max_seqlen(), key._get_max_seqlen()
    out = attention_varlen(
        q,
        k,
        v,
        query.offsets(),
        key.offsets(),
        longest_q,
        longest_k,
        causal=is_causal,
        scale=scale,
    )
    nested = torch.nested.nested_tensor_from_jagged(out, query.offsets(), max_seqlen=longest_q)
    return nested.transpose(1, 2)
