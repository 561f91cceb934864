"""Context parallel attention: one sequence over the ranks of a torch.distributed group, with gradients.

Every rank holds some tokens of q, k and v and gets the outputs of its own queries over all keys. `shard` cuts a whole
tensor, `positions` says which tokens a rank holds, `unshard` joins what came out:

    import flashkernel.torch.context_parallel as cp

    q, k, v = (cp.shard(x, group, dim=2) for x in (q, k, v))  # [batch, heads, tokens, head_dim]
    out = cp.attention(q, k, v, group, causal=True)
    whole = cp.unshard(out, group, dim=2)

Transport is torch.distributed's: NCCL on GPUs, gloo on CPUs. docs/context_parallel.md says what each method costs.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist

from flashkernel.attention_options import AttentionOptions
from flashkernel.torch._library import autocast, dense, refuse_tangents

from .exchange import PeerError, agree, find_group
from .gather import Gather, gather_rows
from .layout import LAYOUTS, chunks_of, shard_lengths
from .partial import Job
from .ring import Ring
from .ulysses import heads_refusal, ulysses

__all__ = ["PeerError", "attention", "positions", "shard", "shard_lengths", "unshard"]

METHODS = ("ring", "all_gather", "ulysses")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_CALL = "call (attention, unshard)"
_GRADS = "gradients (0: none; with ulysses 8 for q, 4 for k, 2 for v, 1 for sinks)"


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any = None,
    *,
    method: str = "ring",
    layout: str = "zigzag",
    seq_lens: Sequence[int] | None = None,
    cu_seqlens: Sequence[int] | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    alibi: str = "distance",
    sinks: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    timeout: float | None = None,
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any = None,
    *,
    method: str = "ring",
    layout: str = "zigzag",
    seq_lens: Sequence[int] | None = None,
    cu_seqlens: Sequence[int] | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    alibi: str = "distance",
    sinks: torch.Tensor | None = None,
    return_lse: Literal[True],
    timeout: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@torch.compiler.disable
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any = None,
    *,
    method: str = "ring",
    layout: str = "zigzag",
    seq_lens: Sequence[int] | None = None,
    cu_seqlens: Sequence[int] | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    alibi: str = "distance",
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    timeout: float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries over the keys of all ranks, with gradients of q, k, v and sinks, also through
    the LSE.

    q: [batch, heads_q, tokens, head_dim], this rank's tokens of the sequence.
    k, v: [batch, heads_kv, tokens, head_dim] and [..., head_dim_v], of the same tokens and q's dtype.
    group: a ProcessGroup or a one-dimensional DeviceMesh; None: the default group.
    method: "ring": keys go round, the next ones while these are worked on; memory for two ranks' keys.
        "all_gather": all keys on every rank. "ulysses": all tokens of some heads; heads_q must be a multiple of the
        number of ranks, heads_kv a multiple or a divisor of it.
    layout: "zigzag": a rank's tokens are one piece from the front and one from the back of the sequence, so that causal
        attention is the same work on every rank. "contiguous": one piece.
    seq_lens: the tokens of each rank, 0 among them; None: all ranks hold as many.
    cu_seqlens: the bounds of packed sequences, 0 to the number of all tokens, which don't see each other; the same for
        all of the batch.
    causal, window, softcap, scale, alibi_slopes, alibi, sinks: as for `flashkernel.torch.attention`, in positions of
        the whole sequence. ALiBi with method "ulysses" only. The gradient of sinks is that of this rank's queries (of
        "ulysses": of its heads); the sum over the ranks is the whole one.
    timeout: seconds to wait for a rank on the CPU; None, and on a GPU always: the group's own limit.

    Returns out [batch, heads_q, tokens, head_dim_v], or (out, lse). The same bits every time. "all_gather" and
    "ulysses" give one device's bits where the op does so for chunks and heads (docs/numerics.md); the ring adds parts
    in another order, and rounds each part to q's dtype once. Under torch.compile it is a break in the graph.

    Raises ValueError on every rank where arguments are refused or differ between ranks (on a GPU: at the first call of
    a kind); PeerError when a rank ends or does not answer in time.

    Source: Liu, Zaharia, Abbeel, Ring Attention (2023); Jacobs et al., DeepSpeed-Ulysses (2023).

    >>> import torch, torch.distributed as dist, flashkernel.torch.context_parallel as cp
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q = torch.ones(1, 2, 4, 8, requires_grad=True)
    >>> cp.attention(q, q, q, causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 2, 4, 8])
    >>> dist.destroy_process_group()
    """
    found = find_group(group)
    rank, size = dist.get_rank(found), dist.get_world_size(found)
    device = _device(found, q, k, v)
    options = AttentionOptions(causal, window, softcap, scale, alibi_slopes, sinks, alibi=alibi)
    lens = documents = None
    fields: dict[str, int] = {}
    refusal: Exception | None
    try:
        q, k, v = autocast(q, k, v)
        lens = None if seq_lens is None else tuple(int(n) for n in seq_lens)
        documents = None if cu_seqlens is None else tuple(int(n) for n in cu_seqlens)
        sentence = _refusal(q, k, v, method, layout, lens, documents, options, rank, size) or _no_limit(timeout)
        refusal = None if sentence is None else ValueError(f"context_parallel: {sentence}")
        if refusal is None:
            fields = _fields(q, k, v, method, layout, lens, documents, options)
    except (
        AttributeError,
        IndexError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        refusal = error
    agree(found, device, fields, lens, refusal, None if _no_limit(timeout) else timeout)
    lens = lens or (q.shape[2],) * size
    job = Job(
        found, rank, size, lens, chunks_of(lens, layout), options.sides(), documents, softcap, scale, timeout
    )  # fmt: skip
    if method == "ulysses":
        kept = {"softcap": softcap, "scale": scale, "alibi_slopes": alibi_slopes, "alibi": alibi, "sinks": sinks}
        out, lse = ulysses(q, k, v, job, kept)
    else:
        out, lse = (Ring if method == "ring" else Gather).apply(q, dense(k), dense(v), sinks, job)
    return (out, lse) if return_lse else out


def _device(group: Any, *tensors: Any) -> torch.device:
    """Where ranks compare what they were given, which may be no tensors at all."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            return tensor.device
    return torch.device("cpu" if "cpu:" in dist.get_backend_config(group) else "cuda")


def _no_limit(timeout: Any) -> str | None:
    if timeout is None or (isinstance(timeout, (int, float)) and timeout > 0):
        return None
    return f"timeout={timeout!r}; seconds > 0, or None, are needed"


def _refusal(
    q: Any,
    k: Any,
    v: Any,
    method: str,
    layout: str,
    seq_lens: tuple[int, ...] | None,
    documents: tuple[int, ...] | None,
    options: AttentionOptions,
    rank: int,
    size: int,
) -> str | None:
    """What is wrong with this rank's arguments, as the end of a sentence."""
    if method not in METHODS:
        return f"method={method!r}; one of {', '.join(METHODS)} is needed"
    if layout not in LAYOUTS:
        return f"layout={layout!r}; one of {', '.join(LAYOUTS)} is needed"
    shapes = f"q, k and v have shapes {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
    if any(x.dim() != 4 for x in (q, k, v)):
        return f"{shapes}; [batch, heads, tokens, head_dim] is needed"
    if not (k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[2:] == k.shape[2:]):
        return f"{shapes}; equal batch, tokens and head_dim, and v with k's heads, are needed"
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        return f"{shapes}; q's heads must be a multiple of k's"
    if q.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
        return f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; all float32, float16 or bfloat16 are needed"
    if (wrong := options.refusal()) is not None:
        return wrong
    if seq_lens is not None:
        if len(seq_lens) != size or min(seq_lens) < 0:
            return f"seq_lens={list(seq_lens)} for {size} ranks; a number of tokens for each is needed"
        if seq_lens[rank] != q.shape[2]:
            return f"{shapes}, and seq_lens={list(seq_lens)} on rank {rank}; {seq_lens[rank]} tokens are needed"
    if documents is not None:
        total = sum(seq_lens) if seq_lens is not None else q.shape[2] * size
        if documents[:1] != (0,) or documents[-1] != total or list(documents) != sorted(documents):
            return f"cu_seqlens={list(documents)} for {total} tokens; ascending bounds from 0 to {total} are needed"
    if options.alibi_slopes is not None:
        if method != "ulysses":
            return f"alibi_slopes with method={method!r}, which has no distances between ranks; 'ulysses' has"
        if options.alibi_slopes.shape[-1] != q.shape[1]:
            return f"alibi_slopes has shape {list(options.alibi_slopes.shape)}; {q.shape[1]} heads are needed"
    if options.sinks is not None and tuple(options.sinks.shape) != (q.shape[1],):
        return f"sinks has shape {list(options.sinks.shape)}; [{q.shape[1]}] is needed"
    for name, others in (("alibi_slopes", options.alibi_slopes), ("sinks", options.sinks)):
        dtypes = (torch.float32,) if method == "ulysses" else _DTYPES
        if others is not None and (others.dtype not in dtypes or others.device != q.device):
            return f"{name} is {others.dtype} on {others.device}; {dtypes[0]} on {q.device} is needed"
    return heads_refusal(q.shape[1], k.shape[1], size) if method == "ulysses" else None


def _fields(
    q: Any,
    k: Any,
    v: Any,
    method: str,
    layout: str,
    seq_lens: tuple[int, ...] | None,
    documents: tuple[int, ...] | None,
    options: AttentionOptions,
) -> dict[str, int]:
    """What all ranks must say alike, by the names that an error gives it, and "seq"; no tensor's values are read."""

    left, right = options.sides()
    others = options.softcap, options.scale, options.alibi, options.alibi_slopes is None, options.sinks is None
    recorded = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (q, k, v, options.sinks)]
    # A backward pass has messages of its own; those of "ulysses" are of each tensor that requires a gradient.
    grads = sum(8 >> i for i, x in enumerate(recorded) if x) if method == "ulysses" else int(any(recorded))
    return {
        _CALL: 0,
        "device (cpu, cuda)": int(q.is_cuda),
        "seq": q.shape[2],
        "batch": q.shape[0],
        "heads_q": q.shape[1],
        "heads_kv": k.shape[1],
        "head_dim": q.shape[3],
        "head_dim_v": v.shape[3],
        "dtype (float32, float16, bfloat16)": _DTYPES.index(q.dtype),
        f"method {METHODS}": METHODS.index(method),
        _GRADS: grads,
        f"layout {LAYOUTS}": LAYOUTS.index(layout),
        "tokens seen on the left (-1: all)": -1 if left is None else left,
        "tokens seen on the right (-1: all)": -1 if right is None else right,
        "the checksum of seq_lens": zlib.crc32(repr(seq_lens).encode()),
        "the checksum of cu_seqlens": zlib.crc32(repr(documents).encode()),
        "the checksum of softcap, scale, alibi and sinks": zlib.crc32(repr(others).encode()),
    }


def _lens(seq_len: int, seq_lens: Sequence[int] | None, size: int, what: str) -> tuple[int, ...]:
    lens = shard_lengths(seq_len, size) if seq_lens is None else tuple(int(n) for n in seq_lens)
    if len(lens) != size or min(lens) < 0 or sum(lens) != seq_len:
        raise ValueError(
            f"{what}: seq_lens={list(lens)} for {seq_len} tokens on {size} ranks; they must add up to them"
        )
    return lens


def _layout(layout: str, what: str) -> str:
    if layout not in LAYOUTS:
        raise ValueError(f"{what}: layout={layout!r}; one of {', '.join(LAYOUTS)} is needed")
    return layout


def positions(
    seq_len: int, group: Any = None, *, layout: str = "zigzag", seq_lens: Sequence[int] | None = None
) -> torch.Tensor:
    """The positions in the whole sequence of this rank's tokens, int64 [tokens]: for RoPE, and to pick from a tensor.

    seq_len: tokens of the whole sequence. seq_lens: of each rank; None: `shard_lengths`.
    """
    found = find_group(group)
    lens = _lens(seq_len, seq_lens, dist.get_world_size(found), "positions")
    mine = chunks_of(lens, _layout(layout, "positions"))[dist.get_rank(found)]
    return torch.cat([torch.arange(span.begin, span.end) for span in mine] or [torch.arange(0)])


def shard(
    x: torch.Tensor,
    group: Any = None,
    *,
    dim: int,
    layout: str = "zigzag",
    seq_lens: Sequence[int] | None = None,
) -> torch.Tensor:
    """This rank's tokens of a whole tensor, whose tokens are dim `dim`; gradients flow back into the whole tensor."""
    return x.index_select(dim, positions(x.shape[dim], group, layout=layout, seq_lens=seq_lens).to(x.device))


def unshard(
    x: torch.Tensor,
    group: Any = None,
    *,
    dim: int,
    layout: str = "zigzag",
    seq_lens: Sequence[int] | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """The whole tensor on every rank, from each rank's tokens.

    seq_lens: tokens of each rank; None: all hold as many. timeout: as for `attention`.

    There is no gradient: where x requires one, so does what is returned, and backward raises NotImplementedError.
    Raises ValueError on every rank where tensors don't fit together, and PeerError, as `attention` does.
    """
    if forward_ad._current_level >= 0:
        refuse_tangents("unshard", x)
    found = find_group(group)
    rank, size = dist.get_rank(found), dist.get_world_size(found)
    lens: tuple[int, ...] = ()
    fields: dict[str, int] = {}
    refusal: Exception | None = None
    try:
        lens = (x.shape[dim],) * size if seq_lens is None else tuple(int(n) for n in seq_lens)
        sentence = _no_limit(timeout)
        if len(lens) != size or min(lens) < 0 or lens[rank] != x.shape[dim]:
            sentence = f"{x.shape[dim]} tokens on rank {rank} and seq_lens={list(lens)} for {size} ranks"
        elif layout not in LAYOUTS:
            sentence = f"layout={layout!r}; one of {', '.join(LAYOUTS)} is needed"
        if sentence is not None:
            raise ValueError(f"unshard: {sentence}")
        others = [n for i, n in enumerate(x.shape) if i != dim % x.dim()]
        fields = {
            _CALL: 1,
            "device (cpu, cuda)": int(x.is_cuda),
            "seq": x.shape[dim],
            "dim": dim % x.dim(),
            "the checksum of dtype and other sizes": zlib.crc32(repr((x.dtype, others)).encode()),
            f"layout {LAYOUTS}": LAYOUTS.index(layout),
            "the checksum of seq_lens": zlib.crc32(repr(seq_lens and lens).encode()),
        }
    except (AttributeError, IndexError, TypeError, ValueError) as error:  # the other ranks hear of it first
        refusal = error
    patience = None if _no_limit(timeout) else timeout
    agree(found, _device(found, x), fields, None if seq_lens is None else lens, refusal, patience)
    chunks = chunks_of(lens, layout)
    job = Job(found, rank, size, lens, chunks, (None, None), None, 0.0, None, timeout)
    rows = x.detach().movedim(dim, 0).contiguous()
    whole = gather_rows(job, rows, "gathers a tensor").movedim(0, dim)
    return _Whole.apply(x, whole) if torch.is_grad_enabled() and x.requires_grad else whole


class _Whole(torch.autograd.Function):
    """apply(x, whole): `whole` as it is, for an x that requires a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, whole: Any) -> Any:
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("unshard: it has no gradient; compute the loss from each rank's own tokens")
