"""The paged KV-cache for torch: attention over its pages, kv_append, kv_read; pages of 4 to 32 bits, no gradients.

Shapes and options are those of `flashkernel.attention_paged` and its siblings; what a cache has no gradient for is
refused, not dropped. Kwon et al., PagedAttention (2023).
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

import flashkernel as fk
from flashkernel.attention_options import AttentionOptions
from flashkernel.typing import KvAppendRope, KvAppendRopeWithQ

from ._attention_options import VARLEN, from_schema, to_schema
from ._library import define, direct, empty, refuse_gradient

__all__ = ["attention_paged", "kv_append", "kv_read"]

Scales = tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, float, float] | None
PACKED = ("int4", "float4_e2m1fn_x2")  # two elements a byte


def split_scales(op: str, kv_scales: Any) -> tuple[Any, Any]:
    """(k_scales, v_scales), or two times None: a schema has no pairs."""
    if kv_scales is None:
        return None, None
    if not isinstance(kv_scales, tuple | list) or len(kv_scales) not in (2, 4):
        raise ValueError(f"{op}: kv_scales is a {type(kv_scales).__name__}; a pair (k_scales, v_scales) is needed")
    return kv_scales[0], kv_scales[1]


def refuse_tensor_scales(op: str, kv_scales: Any) -> None:
    """A traced call has no place for the scales of whole tensors."""
    if kv_scales is not None and len(kv_scales) != 2:
        raise ValueError(
            f"{op}: kv_scales has the scales of whole tensors, which a compiled call does not take; that of the keys "
            "can join `scale`, and that of the values be multiplied with the result"
        )


def columns(pages: Any, kv_dtype: str | None) -> int:
    """Numbers in a row of pages: in a byte there may be two."""
    packed = kv_dtype in PACKED or str(pages.dtype).removeprefix("torch.") in PACKED
    return int(pages.shape[-1]) * 2 if packed else pages.shape[-1]


def join_scales(k_scales: Any, v_scales: Any) -> Any:
    return None if k_scales is None and v_scales is None else (k_scales, v_scales)


def dtype_name(dtype: Any) -> str | None:
    """int8 for torch.int8 and for "int8"."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def needs_gradient(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


# --- attention


def _paged_kernel(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: int | None,
    k_scales: Any,
    v_scales: Any,
    kv_dtype: str | None,
    mask: Any,
    *options: Any,
) -> Any:
    return fk.attention_paged(
        q,
        k_pages,
        v_pages,
        block_table,
        seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        kv_scales=join_scales(k_scales, v_scales),
        kv_dtype=kv_dtype,
        **{**from_schema(*options), "mask": mask},
        return_lse=True,
    )


def _paged_fake(
    q: Any, k_pages: Any, v_pages: Any, block_table: Any, seq_lens: Any, cu_seqlens_q: Any, *options: Any
) -> Any:
    lse = q.shape[:-1] if cu_seqlens_q is None else (q.shape[1], q.shape[0])
    width = columns(v_pages, options[3])
    return q.new_empty((*q.shape[:-1], width)), q.new_empty(lse, dtype=torch.float32)


_PAGED_HAS_NO_GRADIENT = (
    "attention_paged: an argument requires a gradient, and attention over a cache has none; "
    "call it under torch.no_grad() or use attention_varlen"
)
_paged = define(
    "attention_paged(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor seq_lens, Tensor? "
    "cu_seqlens_q, SymInt? max_seqlen_q, Tensor? k_scales, Tensor? v_scales, str? kv_dtype, Tensor? mask, "
    f"{VARLEN}) -> (Tensor, Tensor)",
    _paged_kernel,
    _paged_fake,
    backward=refuse_gradient(_PAGED_HAS_NO_GRADIENT),
)


@overload
def attention_paged(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    alibi: str = "distance",
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    kv_scales: Scales = None,
    kv_dtype: Any = None,
) -> torch.Tensor: ...


@overload
def attention_paged(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    alibi: str = "distance",
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    return_lse: Literal[True],
    kv_scales: Scales = None,
    kv_dtype: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def attention_paged(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    alibi: str = "distance",
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    return_lse: bool = False,
    kv_scales: Scales = None,
    kv_dtype: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def attention_paged(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    alibi: str = "distance",
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    return_lse: bool = False,
    kv_scales: Scales = None,
    kv_dtype: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flashkernel.attention_paged` for inference; works under torch.compile.

    q: [batch, heads_q, seq_q, head_dim], or with cu_seqlens_q [total_q, heads_q, head_dim]; float32, float16, bfloat16.
    k_pages, v_pages: [num_pages, page_size, heads_kv, head_dim or head_dim_v]; q's dtype, or torch.float8_e4m3fn or
       torch.int8, both the same; or half as wide with two 4-bit elements a byte, torch.uint8 with kv_dtype "int4", or
       torch.float4_e2m1fn_x2.
    block_table: int32 [batch, max_pages]; seq_lens: int32 or int64 [batch].
    mask: int32, bits for the last keys of each sequence, as many as it has queries (a tree of drafts).
    kv_scales: with 8-bit and 4-bit pages, and only with them: (k_scales, v_scales), float32 [heads_kv] or [num_pages,
       heads_kv, page_size]; number = element * scale. Of 4-bit pages as `flashkernel.attention_paged` has them.
    kv_dtype: torch.float8_e4m3fn, torch.int8, "int4" or torch.float4_e2m1fn_x2: what torch.uint8 pages hold.

    Returns out (q's shape with head_dim_v, q's dtype), or (out, lse). Raises NotImplementedError where a gradient is
    needed (scales included), ValueError for arguments that don't fit: 8-bit pages without scales, scales with wider
    pages, another dtype or shape of the scales.

    >>> import torch, flashkernel.torch as fkt
    >>> pages = torch.full((3, 16, 2, 8), 2, dtype=torch.int8)
    >>> table, lengths = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([20])
    >>> scales = torch.full((2,), 0.5), torch.full((2,), 0.25)
    >>> fkt.attention_paged(torch.ones(1, 4, 1, 8), pages, pages, table, lengths, kv_scales=scales)[0, 0]
    tensor([[0.5000, 0.5000, 0.5000, 0.5000, 0.5000, 0.5000, 0.5000, 0.5000]])
    """
    k_scales, v_scales = split_scales("attention_paged", kv_scales)
    if needs_gradient(q, k_pages, v_pages, alibi_slopes, sinks, k_scales, v_scales):
        raise NotImplementedError(_PAGED_HAS_NO_GRADIENT)
    if direct(q, k_pages, v_pages, alibi_slopes, sinks, k_scales, v_scales):
        return fk.attention_paged(
            q,
            k_pages,
            v_pages,
            block_table,
            seq_lens,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            alibi_slopes=alibi_slopes,
            alibi=alibi,
            sinks=sinks,
            mask=mask,
            causal=causal,
            window=window,
            softcap=softcap,
            scale=scale,
            return_lse=return_lse,
            kv_scales=kv_scales,
            kv_dtype=kv_dtype,
        )
    refuse_tensor_scales("attention_paged", kv_scales)
    out, lse = _paged(
        q,
        k_pages,
        v_pages,
        block_table,
        seq_lens,
        cu_seqlens_q,
        max_seqlen_q,
        k_scales,
        v_scales,
        dtype_name(kv_dtype),
        mask,
        *to_schema(AttentionOptions(causal, window, softcap, scale, alibi_slopes, sinks, alibi=alibi)),
    )
    return (out, lse) if return_lse else out


# --- append


def _append_kernel(
    k: Any,
    v: Any,
    k_pages: Any,
    v_pages: Any,
    slots: Any,
    k_scales: Any,
    v_scales: Any,
    kv_dtype: str | None,
    positions: Any,
    theta: float,
    rotary_dim: int | None,
    interleaved: bool,
    inv_freq: Any,
    q: Any,
    cos: Any = None,
    sin: Any = None,
    q_norm: Any = None,
    k_norm: Any = None,
    norm_eps: float = 1e-6,
) -> Any:
    rope: Any = None
    if positions is not None:
        rope = {"positions": positions, "theta": theta, "rotary_dim": rotary_dim, "interleaved": interleaved}
        rope |= {"inv_freq": inv_freq, "q": q, "cos": cos, "sin": sin}
        rope |= {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": norm_eps}
    out = fk.kv_append(
        k, v, k_pages, v_pages, slots, rope=rope, kv_scales=join_scales(k_scales, v_scales), kv_dtype=kv_dtype
    )
    return empty(k) if out is None else out


def _append_fake(k: Any, v: Any, *others: Any) -> Any:
    q = others[11]
    return empty(k) if q is None else q.new_empty(q.shape)


_append = define(
    "kv_append(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor slots, Tensor(c!)? k_scales, "
    "Tensor(d!)? v_scales, str? kv_dtype, Tensor? positions, float theta, SymInt? rotary_dim, bool interleaved, "
    "Tensor? inv_freq, Tensor? q, Tensor? cos=None, Tensor? sin=None, Tensor? q_norm=None, Tensor? k_norm=None, "
    "float norm_eps=1e-6) -> Tensor",
    _append_kernel,
    _append_fake,
)
_NORM_KEYS = ("q_norm", "k_norm", "norm_eps")
_ROPE_KEYS = ("positions", "theta", "rotary_dim", "interleaved", "inv_freq", "cos", "sin", *_NORM_KEYS, "q")


@overload
def kv_append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    rope: KvAppendRope | None = None,
    kv_scales: Scales = None,
    kv_dtype: Any = None,
) -> None: ...


@overload
def kv_append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    rope: KvAppendRopeWithQ,
    kv_scales: Scales = None,
    kv_dtype: Any = None,
) -> torch.Tensor: ...


def kv_append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    rope: KvAppendRopeWithQ | KvAppendRope | None = None,
    kv_scales: Scales = None,
    kv_dtype: Any = None,
) -> torch.Tensor | None:
    """`flashkernel.kv_append`: writes tokens to their slots of the pages, in place; works under torch.compile.

    k, v: [tokens, heads_kv, head_dim or head_dim_v]; float32, float16 or bfloat16.
    k_pages, v_pages: [num_pages, page_size, heads_kv, head_dim or head_dim_v]; k's dtype, or torch.float8_e4m3fn or
       torch.int8, or of "int4" bytes of two elements; written in place.
    slots: int32 or int64 [tokens]; negative: skipped.
    rope: as there, without "q_out": the rotated q is a new tensor.
    kv_scales: with 8-bit pages: (k_scales, v_scales), float32 [heads_kv], which are read, or [num_pages, heads_kv,
       page_size], which are written. With int4: float16 [num_pages, heads_kv, page_size, groups, 2], written.
    kv_dtype: torch.float8_e4m3fn, torch.int8 or "int4": what the bytes of torch.uint8 pages are.

    Returns the rotated q if rope has one, else None. Raises NotImplementedError where a gradient is needed, ValueError
    for arguments that don't fit.

    >>> import torch, flashkernel.torch as fkt
    >>> k_pages, v_pages = torch.zeros(2, 2, 16, 1, 4, dtype=torch.float8_e4m3fn)
    >>> scales = torch.zeros(2, 1, 16), torch.zeros(2, 1, 16)
    >>> k = torch.tensor([[[0.0, 1.0, 2.0, 4.0]]])
    >>> fkt.kv_append(k, k, k_pages, v_pages, torch.tensor([17]), kv_scales=scales)
    >>> k_pages[1, 1, 0].float() * scales[0][1, 0, 1]
    tensor([0., 1., 2., 4.])
    """
    k_scales, v_scales = split_scales("kv_append", kv_scales)
    if rope is not None:
        if not isinstance(rope, dict):
            raise ValueError(f"kv_append: rope={rope!r}; None or a dict with 'positions' is needed")
        for key in rope:
            if key not in _ROPE_KEYS:
                raise ValueError(f"kv_append: rope has the key {key!r}; {', '.join(_ROPE_KEYS)} are known here")
        if rope.get("positions") is None:
            raise ValueError("kv_append: rope has no 'positions'; int32 or int64 [tokens] is needed")
    turn: Any = rope or {}
    q = turn.get("q")
    names = ("cos", "sin", "q_norm", "k_norm")
    tensors = (k, v, k_pages, v_pages, k_scales, v_scales, q, *map(turn.get, names))
    if needs_gradient(*tensors):
        raise NotImplementedError(
            "kv_append: an argument requires a gradient, and a cache has none; call it under torch.no_grad()"
        )
    if direct(*tensors):
        return fk.kv_append(k, v, k_pages, v_pages, slots, rope=rope, kv_scales=kv_scales, kv_dtype=kv_dtype)
    refuse_tensor_scales("kv_append", kv_scales)
    out = _append(
        k,
        v,
        k_pages,
        v_pages,
        slots,
        k_scales,
        v_scales,
        dtype_name(kv_dtype),
        turn.get("positions"),
        turn.get("theta", 10000.0),
        turn.get("rotary_dim"),
        turn.get("interleaved", False),
        turn.get("inv_freq"),
        q,
        *map(turn.get, names),
        turn.get("norm_eps", 1e-6),
    )
    return None if q is None else out


# --- read


def _read_kernel(
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    seq_lens: Any,
    max_seq: int,
    k_scales: Any,
    v_scales: Any,
    kv_dtype: str | None,
    out_dtype: Any,
) -> Any:
    return fk.kv_read(
        k_pages,
        v_pages,
        block_table,
        seq_lens,
        max_seq=max_seq,
        kv_scales=join_scales(k_scales, v_scales),
        kv_dtype=kv_dtype,
        out_dtype=dtype_name(out_dtype),
    )


def _read_fake(
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    seq_lens: Any,
    max_seq: int,
    k_scales: Any,
    v_scales: Any,
    kv_dtype: str | None,
    out_dtype: Any,
) -> Any:
    dtype = out_dtype if out_dtype is not None else k_pages.dtype if k_scales is None else torch.float32
    shape = (block_table.shape[0], max_seq, k_pages.shape[2])
    return (
        k_pages.new_empty((*shape, columns(k_pages, kv_dtype)), dtype=dtype),
        v_pages.new_empty((*shape, columns(v_pages, kv_dtype)), dtype=dtype),
    )


_read = define(
    "kv_read(Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor seq_lens, SymInt max_seq, Tensor? k_scales, "
    "Tensor? v_scales, str? kv_dtype, ScalarType? out_dtype) -> (Tensor, Tensor)",
    _read_kernel,
    _read_fake,
    backward=refuse_gradient("kv_read: an argument requires a gradient, and a cache has none"),
)


def kv_read(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seq: int | None = None,
    kv_scales: Scales = None,
    kv_dtype: Any = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flashkernel.kv_read`: sequences gathered from pages into new tensors; works under torch.compile.

    k_pages, v_pages, block_table, seq_lens, kv_scales, kv_dtype: as in `attention_paged`.
    max_seq: the results' second dim, at most max_pages * page_size; needed on a GPU and where the call is compiled.
        Default: the largest length.
    out_dtype: of what 8-bit pages become; None: torch.float32.

    Returns (k, v) [batch, max_seq, heads_kv, head_dim or head_dim_v], 0 past a sequence's length. Raises
    NotImplementedError where a gradient is needed, ValueError for arguments that don't fit.

    >>> import torch, flashkernel.torch as fkt
    >>> pages = torch.full((2, 16, 1, 2), 3, dtype=torch.int8)
    >>> table, scale = torch.tensor([[1]], dtype=torch.int32), torch.tensor([0.5])
    >>> fkt.kv_read(pages, pages, table, torch.tensor([1]), max_seq=2, kv_scales=(scale, scale))[0][0, :, 0]
    tensor([[1.5000, 1.5000],
            [0.0000, 0.0000]])
    """
    k_scales, v_scales = split_scales("kv_read", kv_scales)
    if needs_gradient(k_pages, v_pages, k_scales, v_scales):
        raise NotImplementedError(
            "kv_read: an argument requires a gradient, and a cache has none; call it under torch.no_grad()"
        )
    if direct(k_pages, v_pages, k_scales, v_scales):
        return fk.kv_read(
            k_pages,
            v_pages,
            block_table,
            seq_lens,
            max_seq=max_seq,
            kv_scales=kv_scales,
            kv_dtype=kv_dtype,
            out_dtype=dtype_name(out_dtype),
        )
    if max_seq is None:
        raise ValueError("kv_read: max_seq is missing; it is needed where the call is traced or compiled")
    refuse_tensor_scales("kv_read", kv_scales)
    read: tuple[torch.Tensor, torch.Tensor] = _read(
        k_pages, v_pages, block_table, seq_lens, max_seq, k_scales, v_scales, dtype_name(kv_dtype), out_dtype
    )
    return read
