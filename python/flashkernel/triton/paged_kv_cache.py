"""The paged KV cache in Triton: kv_append (with RoPE on the way), kv_read, kv_copy_pages.

One program moves one token (or one token of a page). Slots, tables and lengths stay on the device: what is out of
range moves nothing and reads zeros. Kwon et al., PagedAttention (2023). Attention over the pages is in
paged_attention.py, the kernels for 8-bit pages in quantized_kv_cache.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ._host import Call, device_function, power_of_two
from ._pages import check_pages, check_table, page_arguments, write_pages
from .norm import rms_norm
from .quantized_kv_cache import append_quantized, copy_scales, read_quantized
from .rope import angles, check_inv_freq, log2_theta, rotate_heads, rotation, table_row

_NORM_KEYS = ("q_norm", "k_norm", "norm_eps")
_ROPE_KEYS = ("positions", "theta", "rotary_dim", "interleaved", "inv_freq", "cos", "sin", *_NORM_KEYS, "q", "q_out")


@device_function
def _copy_heads(
    from_ptr, to_ptr, from_h, to_h, heads, live_heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Copies one token's heads, bit for bit; those from live_heads on become zeros."""
    dim = tl.arange(0, BLOCK_D)
    for start in range(0, heads, BLOCK_HEADS):
        head = (start + tl.arange(0, BLOCK_HEADS)).to(tl.int64)[:, None]
        keep = (head < heads) & (dim[None, :] < HEAD_DIM)
        value = tl.load(from_ptr + head * from_h + dim[None, :], mask=keep & (head < live_heads), other=0.0)
        tl.store(to_ptr + head * to_h + dim[None, :], value, mask=keep)


@triton.jit
def _append(
    k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, slots_ptr, positions_ptr, inv_freq_ptr, cos_ptr, sin_ptr, q_ptr,
    q_out_ptr, cos_t, sin_t, table_rows,
    k_t, k_h, v_t, v_h, k_pages_p, k_pages_t, k_pages_h, v_pages_p, v_pages_t, v_pages_h, q_t, q_h, q_out_t, q_out_h,
    heads, heads_q, page_size, num_slots,
    HAS_ROPE: tl.constexpr, HAS_Q: tl.constexpr, IS_TABLE: tl.constexpr, LOG2_THETA: tl.constexpr,
    HAS_INV_FREQ: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, COPY_HEADS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    if HAS_ROPE:
        position = tl.load(positions_ptr + t).to(tl.int64)
        if IS_TABLE:
            cos, sin = table_row(position, cos_ptr, sin_ptr, cos_t, sin_t, table_rows, PAIRS, BLOCK)
        else:
            cos, sin = angles(position, inv_freq_ptr, LOG2_THETA, PAIRS, BLOCK, HAS_INV_FREQ)
        cos = cos[None, :]
        sin = sin[None, :]
        if HAS_Q:
            rotate_heads(
                q_ptr + t * q_t, q_out_ptr + t * q_out_t, q_h, q_out_h, heads_q, cos, sin, HEAD_DIM, PAIRS, BLOCK,
                BLOCK_REST, BLOCK_HEADS, IS_INTERLEAVED,
            )  # fmt: skip
    if (slot >= 0) & (slot < num_slots):
        k_to = k_pages_ptr + slot // page_size * k_pages_p + slot % page_size * k_pages_t
        v_to = v_pages_ptr + slot // page_size * v_pages_p + slot % page_size * v_pages_t
        if HAS_ROPE:
            rotate_heads(
                k_ptr + t * k_t, k_to, k_h, k_pages_h, heads, cos, sin, HEAD_DIM, PAIRS, BLOCK, BLOCK_REST, BLOCK_HEADS,
                IS_INTERLEAVED,
            )  # fmt: skip
        else:
            _copy_heads(k_ptr + t * k_t, k_to, k_h, k_pages_h, heads, heads, HEAD_DIM, BLOCK_D, COPY_HEADS)
        _copy_heads(v_ptr + t * v_t, v_to, v_h, v_pages_h, heads, heads, HEAD_DIM_V, BLOCK_DV, COPY_HEADS)


@triton.jit(do_not_specialize=["max_seq"])
def _read(
    k_pages_ptr, v_pages_ptr, table_ptr, lens_ptr, k_out_ptr, v_out_ptr, k_pages_p, k_pages_t, k_pages_h,
    v_pages_p, v_pages_t, v_pages_h, table_b, table_p, lens_b, k_out_b, k_out_t, k_out_h, v_out_b, v_out_t, v_out_h,
    heads, page_size, num_pages, max_pages, max_seq,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    COPY_HEADS: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // max_seq).to(tl.int64)
    j = (tl.program_id(0) % max_seq).to(tl.int64)
    inside = (j < tl.load(lens_ptr + b * lens_b)) & (j // page_size < max_pages)
    page = tl.load(table_ptr + b * table_b + j // page_size * table_p, mask=inside, other=0).to(tl.int64)
    inside = inside & (page >= 0) & (page < num_pages)
    live = tl.where(inside, heads, 0)
    _copy_heads(
        k_pages_ptr + page * k_pages_p + j % page_size * k_pages_t, k_out_ptr + b * k_out_b + j * k_out_t, k_pages_h,
        k_out_h, heads, live, HEAD_DIM, BLOCK_D, COPY_HEADS,
    )  # fmt: skip
    _copy_heads(
        v_pages_ptr + page * v_pages_p + j % page_size * v_pages_t, v_out_ptr + b * v_out_b + j * v_out_t, v_pages_h,
        v_out_h, heads, live, HEAD_DIM_V, BLOCK_DV, COPY_HEADS,
    )  # fmt: skip


@triton.jit
def _copy_pages(
    k_pages_ptr, v_pages_ptr, src_ptr, dst_ptr, src_n, dst_n, k_pages_p, k_pages_t, k_pages_h,
    v_pages_p, v_pages_t, v_pages_h, heads, page_size, num_pages,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    COPY_HEADS: tl.constexpr,
):  # fmt: skip
    i = (tl.program_id(0) // page_size).to(tl.int64)
    token = (tl.program_id(0) % page_size).to(tl.int64)
    src = tl.load(src_ptr + i * src_n).to(tl.int64)
    dst = tl.load(dst_ptr + i * dst_n).to(tl.int64)
    if (src >= 0) & (src < num_pages) & (dst >= 0) & (dst < num_pages):
        k_token = k_pages_ptr + token * k_pages_t
        v_token = v_pages_ptr + token * v_pages_t
        _copy_heads(
            k_token + src * k_pages_p, k_token + dst * k_pages_p, k_pages_h, k_pages_h, heads, heads, HEAD_DIM, BLOCK_D,
            COPY_HEADS,
        )  # fmt: skip
        _copy_heads(
            v_token + src * v_pages_p, v_token + dst * v_pages_p, v_pages_h, v_pages_h, heads, heads, HEAD_DIM_V,
            BLOCK_DV, COPY_HEADS,
        )  # fmt: skip


def _copy_blocks(k_pages: torch.Tensor, v_pages: torch.Tensor) -> dict[str, int]:
    block = max(power_of_two(k_pages.shape[3]), power_of_two(v_pages.shape[3]))
    return {
        "HEAD_DIM": k_pages.shape[3],
        "HEAD_DIM_V": v_pages.shape[3],
        "BLOCK_D": power_of_two(k_pages.shape[3]),
        "BLOCK_DV": power_of_two(v_pages.shape[3]),
        "COPY_HEADS": min(power_of_two(k_pages.shape[2]), max(1, 1024 // block)),
    }


def kv_append(
    k: Any,
    v: Any,
    k_pages: Any,
    v_pages: Any,
    slots: Any,
    *,
    rope: Any = None,
    kv_scales: Any = None,
    kv_dtype: Any = None,
    stream: Any = None,
    dtype: Any = None,
) -> Any:
    """pages[slots[t] // page_size, slots[t] % page_size] = token t, as `flashkernel.kv_append`; k [tokens, heads_kv,
    head_dim].

    rope: a dict with "positions" and, as there, "theta", "rotary_dim", "interleaved", "inv_freq", "q", "q_out",
    "q_norm", "k_norm", "norm_eps"; here a norm is a kernel of its own. A slot that is negative or past the last page is
    skipped: the host reads no slots.

    Returns the rotated q if rope has one, else None. Copies are exact, rotation is float32; what goes into pages of 8
    bits (kv_scales, kv_dtype) is rounded as there, to the same bits. Raises: ValueError for arguments that don't fit,
    NotImplementedError for arrays that Triton does not serve.

    Source: Kwon et al., PagedAttention (2023).

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> pages = torch.zeros(2, 16, 1, 4, device=fk_triton.default_device())
    >>> k = torch.ones(2, 1, 4, device=pages.device)
    >>> fk_triton.kv_append(k, k, pages, pages.clone(), torch.tensor([17, -1], device=pages.device))
    >>> pages[1, 1, 0].tolist(), pages.sum().item()
    ([1.0, 1.0, 1.0, 1.0], 4.0)
    """
    call = Call("kv_append", stream, dtype)
    k = call.floats("k", k, 3)
    v = call.floats("v", v, 3, like=k)
    k_pages, v_pages, scales = check_pages(call, k_pages, v_pages, kv_scales, kv_dtype)
    for name, x, pages in (("k", k, k_pages), ("v", v, v_pages)):
        call.need(
            scales is not None or pages.dtype == x.dtype,
            f"{name}_pages is {pages.dtype} but {name} is {x.dtype}; they must match",
        )
        call.shape(name, x, (k.shape[0], pages.shape[2], pages.shape[3]))
    slots = call.index("slots", slots)
    call.shape("slots", slots, k.shape[:1])
    call.need(slots.shape[0] < 2 or slots.stride(0) == 1, f"slots.strides[0]={slots.stride(0)}; 1 is needed")
    positions = inv_freq = cos = sin = q = q_out = None
    norms: dict[str, Any] = {}
    log_theta = 0.0
    turned: dict[str, int] = {"PAIRS": 1, "BLOCK": 1, "BLOCK_REST": 1, "BLOCK_HEADS": 1}
    if rope is not None:
        if not isinstance(rope, dict):
            call.fail(f"rope={rope!r}; None or a dict with 'positions' is needed")
        for key in rope:
            call.need(key in _ROPE_KEYS, f"rope has the key {key!r}; {', '.join(_ROPE_KEYS[:-1])} and q_out are known")
        call.need("positions" in rope, "rope has no 'positions'; int32 or int64 [tokens] is needed")
        positions = call.index("rope['positions']", rope["positions"])
        call.shape("rope['positions']", positions, k.shape[:1])
        step = positions.stride(0)
        call.need(positions.shape[0] < 2 or step == 1, f"rope['positions'].strides[0]={step}; 1 is needed")
        rotary_dim = rope.get("rotary_dim")
        if rope.get("cos") is not None or rope.get("sin") is not None:
            for name in ("cos", "sin"):
                call.need(rope.get(name) is not None, f"rope['{name}'] is absent; both tables are needed")
            cos = call.floats("rope['cos']", rope.get("cos"), 2)
            sin = call.floats("rope['sin']", rope.get("sin"), 2)
            call.need(sin.dtype == cos.dtype, f"rope['sin'] is {sin.dtype} but rope['cos'] is {cos.dtype}")
            call.shape("rope['sin']", sin, cos.shape)
            call.need(rope.get("inv_freq") is None, "rope has 'inv_freq' and 'cos'; frequencies or tables are needed")
            columns = 2 * cos.shape[1]
            call.need(rotary_dim in (None, columns), f"rotary_dim={rotary_dim}; rope['cos'] has half of {columns}")
            rotary_dim = columns
        turned = rotation(call, k.shape[2], rotary_dim)
        del turned["HEAD_DIM"]
        log_theta = log2_theta(call, float(rope.get("theta", 10000.0)))
        inv_freq = check_inv_freq(call, "rope['inv_freq']", rope.get("inv_freq"), turned["PAIRS"])
        norms = {name: rope[name] for name in ("q_norm", "k_norm") if rope.get(name) is not None}
        for name, weight in norms.items():
            norms[name] = call.floats(f"rope['{name}']", weight, 1)
            call.shape(f"rope['{name}']", norms[name], k.shape[2:])
        if rope.get("q") is not None:
            q = call.floats("rope['q']", rope["q"], 3, like=k)
            call.shape("rope['q']", q, (k.shape[0], q.shape[1], k.shape[2]))
            q_out = call.output("rope['q_out']", rope.get("q_out"), q.shape, q.dtype, may_be=("rope['q']",))
        else:
            call.need(rope.get("q_out") is None, "rope has 'q_out' without 'q'")
        call.need(not norms or scales is None, "rope has norms, which go with pages of k's dtype only")
        call.need("q_norm" not in norms or q is not None, "rope has 'q_norm' without 'q'")
    quantized = {} if scales is None else {**scales.arguments(), "PER_TOKEN": scales.per_token}
    write_pages(call, k_pages, v_pages, scales)
    eps = rope.get("norm_eps", 1e-6) if norms else 0.0
    if "q_norm" in norms:
        q = rms_norm(q, norms["q_norm"], eps=eps, stream=stream, dtype=dtype)
    if "k_norm" in norms:
        k = rms_norm(k, norms["k_norm"], eps=eps, stream=stream, dtype=dtype)
    call.launch(
        _append if scales is None else append_quantized, k.shape[0], k_ptr=k, v_ptr=v,
        slots_ptr=slots, positions_ptr=positions, inv_freq_ptr=inv_freq, cos_ptr=cos, sin_ptr=sin,
        q_ptr=q, q_out_ptr=q_out, cos_t=0 if cos is None else cos.stride(0), sin_t=0 if sin is None else sin.stride(0),
        table_rows=0 if cos is None else cos.shape[0], IS_TABLE=cos is not None,
        k_t=k.stride(0), k_h=k.stride(1), v_t=v.stride(0), v_h=v.stride(1),
        q_t=0 if q is None else q.stride(0), q_h=0 if q is None else q.stride(1),
        q_out_t=0 if q_out is None else q_out.stride(0), q_out_h=0 if q_out is None else q_out.stride(1),
        heads=k.shape[1], heads_q=0 if q is None else q.shape[1], num_slots=k_pages.shape[0] * k_pages.shape[1],
        HAS_ROPE=rope is not None, HAS_Q=q is not None, LOG2_THETA=log_theta, HAS_INV_FREQ=inv_freq is not None,
        IS_INTERLEAVED=bool(rope and rope.get("interleaved", False)), **turned, **page_arguments(k_pages, v_pages),
        **_copy_blocks(k_pages, v_pages), **quantized,
    )  # fmt: skip
    return q_out


def kv_read(
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    max_seq: int | None = None,
    out: Any = None,
    kv_scales: Any = None,
    kv_dtype: Any = None,
    out_dtype: Any = None,
    stream: Any = None,
    dtype: Any = None,
) -> tuple[Any, Any]:
    """out[b, j] = pages[block_table[b, j // page_size], j % page_size], as `flashkernel.kv_read`; zeros past a
    sequence's length.

    max_seq: the output's second dim, at most max_pages * page_size; needed unless `out` is given: the host reads no
    lengths. A page id out of range reads zeros. Pages of 8 bits (kv_scales, kv_dtype) become float32, or out_dtype, or
    `out`'s dtype: element * scale, rounded.

    Returns (k_out, v_out) [batch, max_seq, heads_kv, head_dim or head_dim_v]. Copies are exact. Raises: as `kv_append`.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> pages = torch.arange(32.0, device=fk_triton.default_device()).view(2, 16, 1, 1)
    >>> table = torch.tensor([[1, 0]], dtype=torch.int32, device=pages.device)
    >>> k, v = fk_triton.kv_read(pages, pages, table, torch.tensor([18], device=pages.device), max_seq=18)
    >>> k[0, 14:, 0, 0].tolist()
    [30.0, 31.0, 0.0, 1.0]
    """
    call = Call("kv_read", stream, dtype)
    k_pages, v_pages, scales = check_pages(call, k_pages, v_pages, kv_scales, kv_dtype)
    result = k_pages.dtype if scales is None else torch.float32
    if out_dtype is not None:
        call.need(scales is not None, "out_dtype is given; it is for pages of float8_e4m3fn and int8")
        result = call.named_float("out_dtype", out_dtype)
    elif scales is not None and out is not None:
        result = call.floats("k_out", call.pair("out", out, "a pair (k_out, v_out)")[0], 4).dtype
    table, lens = check_table(call, block_table, seq_lens)
    k_out, v_out = call.pair("out", out, "a pair (k_out, v_out)")
    if max_seq is None:
        if not isinstance(k_out, torch.Tensor) or k_out.dim() != 4:
            call.fail("max_seq is missing; it is needed by the Triton kernel, which reads seq_lens on the device only")
        max_seq = k_out.shape[1]
    call.need(max_seq >= 0, f"max_seq={max_seq}; must not be negative")
    capacity = table.shape[1] * k_pages.shape[1]
    call.need(
        max_seq <= capacity or out is not None,
        f"max_seq={max_seq}; needs {capacity} or less, the tokens that block_table can hold "
        "(block_table.shape[1] * page_size)",
    )
    k_out = call.output("k_out", k_out, (table.shape[0], max_seq, *k_pages.shape[2:]), result)
    v_out = call.output("v_out", v_out, (table.shape[0], max_seq, *v_pages.shape[2:]), result)
    steps = {
        f"{name}_{s}": x.stride(d) for name, x in (("k_out", k_out), ("v_out", v_out)) for d, s in enumerate("bth")
    }
    quantized = {} if scales is None else scales.arguments()
    call.launch(
        _read if scales is None else read_quantized, table.shape[0] * max_seq, table_ptr=table,
        lens_ptr=lens, k_out_ptr=k_out, v_out_ptr=v_out,
        table_b=table.stride(0), table_p=table.stride(1), lens_b=lens.stride(0), **steps, heads=k_pages.shape[2],
        num_pages=k_pages.shape[0], max_pages=table.shape[1], max_seq=max_seq, **page_arguments(k_pages, v_pages),
        **_copy_blocks(k_pages, v_pages), **quantized,
    )  # fmt: skip
    return k_out, v_out


def kv_copy_pages(
    k_pages: Any,
    v_pages: Any,
    src: Any,
    dst: Any,
    *,
    kv_scales: Any = None,
    kv_dtype: Any = None,
    stream: Any = None,
    dtype: Any = None,
) -> None:
    """pages[dst[i]] = pages[src[i]] in k_pages and v_pages, in place, as `flashkernel.kv_copy_pages`; ids out of range
    move nothing. Scales of tokens go along.

    Raises: as `kv_append`.

    Example:

    >>> import torch, flashkernel.triton as fk_triton
    >>> pages = torch.arange(2.0, device=fk_triton.default_device()).view(2, 1, 1, 1).repeat(1, 16, 1, 1)
    >>> zero, one = (torch.tensor([i], device=pages.device) for i in (0, 1))
    >>> fk_triton.kv_copy_pages(pages, pages.clone(), one, zero)
    >>> pages[0].min().item()
    1.0
    """
    call = Call("kv_copy_pages", stream, dtype)
    k_pages, v_pages, scales = check_pages(call, k_pages, v_pages, kv_scales, kv_dtype)
    src, dst = call.index("src", src), call.index("dst", dst)
    call.shape("dst", dst, src.shape)
    write_pages(call, k_pages, v_pages, scales)
    call.launch(
        _copy_pages, src.shape[0] * k_pages.shape[1], src_ptr=src, dst_ptr=dst, src_n=src.stride(0),
        dst_n=dst.stride(0),
        heads=k_pages.shape[2], num_pages=k_pages.shape[0], **page_arguments(k_pages, v_pages),
        **_copy_blocks(k_pages, v_pages),
    )  # fmt: skip
    if scales is not None and scales.per_token:
        arguments = scales.arguments()
        del arguments["IS_E4M3"]
        call.launch(
            copy_scales, src.shape[0] * k_pages.shape[1], src_ptr=src, dst_ptr=dst, src_n=src.stride(0),
            dst_n=dst.stride(0), heads=k_pages.shape[2], num_pages=k_pages.shape[0], page_size=k_pages.shape[1],
            COPY_HEADS=power_of_two(k_pages.shape[2]), **arguments,
        )  # fmt: skip
