"""Rows over the paged KV-cache: one new token a sequence over long caches, and append, read and copy of pages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import flashkernel as fk

from .. import baselines, paged_peers
from ..case import (
    DTYPES,
    ITEM_BYTES,
    LIMIT,
    TOLERANCE,
    Case,
    Inputs,
    Provider,
    Settings,
    Work,
    attention_flop,
    each,
    nbytes,
)

__all__ = ["decode", "kv", "kv_work"]


def _decode_work(s: Settings, dtype: str, shape: dict[str, int]) -> Work:
    """Each call takes the next of several equal caches: nobody finds there what the call before has read."""
    torch = baselines.require_torch()
    batch, heads, heads_kv, length, dim = (shape[x] for x in ("batch", "heads", "heads_kv", "cache", "head_dim"))
    page = shape.get("page", 0)
    inputs = Inputs(s.device, dtype)
    q = inputs.randn(batch, heads, 1, dim)
    cache_bytes = 2.0 * batch * heads_kv * length * dim * ITEM_BYTES[dtype]
    first = inputs.randn(2, batch, heads_kv, length, dim)
    # The same values under other addresses, so that making many is quick.
    caches = [first] + [first.clone() for _ in range(inputs.sets(cache_bytes, from_memory=not s.quick) - 1)]
    dense = [(q, cache[0], cache[1]) for cache in caches]
    if page:
        k_pages, v_pages, table = inputs.paged(first[0], first[1], page)
        lengths = inputs.index([length] * batch)
        pools = [(k_pages, v_pages)] + [(k_pages.clone(), v_pages.clone()) for _ in caches[1:]]
        providers = [*baselines.ours(s, fk.attention_paged, [(q, *pool, table, lengths) for pool in pools])]
    else:
        providers = [*baselines.ours(s, fk.attention, dense)]
    # Caches lie as SDPA takes them, which is not how FlashAttention's own functions do.
    providers += baselines.sdpa_providers(s, dtype, dense, False, libraries=False)
    if page:
        providers += paged_peers.providers(s, q, pools, table, lengths)
    if not s.cuda:
        # Plain sums over the cache as fp32 words, timed in turn: the limit of a row that reads memory and little else.
        words = [(cache.view(torch.float32).reshape(8 * batch, -1), -1) for cache in caches]
        providers += [Provider(n, each(f, words), LIMIT) for n, f in (("sum", fk.reduce_sum), ("torch sum", torch.sum))]
    return Work(
        providers,
        TOLERANCE[dtype],
        flop=attention_flop(batch, heads, 1, length, dim, False),
        read=cache_bytes + nbytes(q),
        written=nbytes(q),
    )


def decode(s: Settings) -> Iterator[Case]:
    shapes: list[tuple[int, int, int, int, int]]  # batch, heads, heads_kv, cache, head_dim
    if s.quick:
        shapes, pages = [(2, 2, 2, 256, 64)], (0, 16)
    elif s.cuda:
        lengths = [(1, 1024), (1, 4096), (1, 65536), (8, 1024), (8, 4096), (32, 4096), (128, 4096)]
        shapes = [(batch, 32, 8, cache, 128) for batch, cache in lengths]
        shapes += [(b, *heads, 4096, 128) for heads in ((8, 8), (32, 1)) for b in (1, 32)]
        pages = (16, 256)
    else:
        shapes, pages = [(8, 8, 8, 4096, 64), (8, 8, 8, 4096, 128)], (0, 256)
    for batch, heads, heads_kv, cache, dim in shapes:
        for dtype in s.dtypes_of(("bfloat16", "float16") if s.cuda else DTYPES):
            for page in pages:
                shown = heads if heads == heads_kv else f"{heads}/{heads_kv}"
                name = f"batch {batch}, cache {cache}, heads {shown}, d {dim}" + (f", pages of {page}" if page else "")
                named = {"batch": batch, "heads": heads, "heads_kv": heads_kv, "cache": cache, "head_dim": dim}
                named["page"] = page
                yield Case("decode", name, dtype, s.device, partial(_decode_work, s, dtype, named), named)


def _appended(library: Any, k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Any) -> Any:
    """The op writes in place; the pages are its result."""
    library.kv_append(k, v, k_pages, v_pages, slots)
    return k_pages, v_pages


def _copied(library: Any, k_pages: Any, v_pages: Any, src: Any, dst: Any) -> Any:
    library.kv_copy_pages(k_pages, v_pages, src, dst)
    return k_pages, v_pages


def kv_work(s: Settings, dtype: str, op: str, tokens: int, page: int, heads: int = 8, dim: int = 128) -> Work:
    inputs = Inputs(s.device, dtype)
    blocks = max(1, tokens // page)
    moved = 2.0 * tokens * heads * dim * ITEM_BYTES[dtype]
    pools = []
    for _ in range(inputs.sets(moved, from_memory=s.cuda)):
        k_pages, v_pages = (inputs.randn(2 * blocks, page, heads, dim) for _ in range(2))
        pools.append((k_pages, v_pages))
    order = inputs.permutation(2 * blocks)
    kept = [pages.clone() for pages in pools[0]]

    def restore() -> None:  # the peers write to the same pages: each is checked from the same start
        for pages, before in zip(pools[0], kept, strict=True):
            pages.copy_(before)

    if op == "kv_append":
        k, v = (inputs.randn(tokens, heads, dim) for _ in range(2))
        slots = inputs.permutation(2 * blocks * page)[:tokens].int()
        sets: list[tuple[Any, ...]] = [(k, v, *pool, slots) for pool in pools]
        providers = [*baselines.ours_by(s, _appended, sets)]
        providers += baselines.stock(s, baselines.kv_append, sets)
    elif op == "kv_read":
        table = order[:blocks].reshape(1, -1).int()
        lengths = inputs.index([tokens])
        sets = [(*pool, table, lengths) for pool in pools]
        providers = [*baselines.ours(s, fk.kv_read, sets, max_seq=tokens)]
        providers += baselines.stock(s, baselines.kv_read, [(*pool, table) for pool in pools])
    else:
        src, dst = order[:blocks].int(), order[blocks:].int()
        sets = [(*pool, src, dst) for pool in pools]
        providers = [*baselines.ours_by(s, _copied, sets)]
        providers += baselines.stock(s, baselines.kv_copy_pages, sets)
    return Work(providers, 0.0, read=moved, written=moved, restore=restore)


def kv(s: Settings) -> Iterator[Case]:
    counts = s.pick(quick=(16,), cpu=(1, 4096), cuda=(1, 64, 2048, 16384))
    for dtype in s.dtypes_of(("bfloat16",) if s.cuda else ("float32", "bfloat16")):
        for page in (16,) if s.quick else (16, 256):
            for op in ("kv_append", "kv_read", "kv_copy_pages"):
                for tokens in counts:
                    if op != "kv_append" and tokens < page:
                        continue
                    name = f"{op} of {tokens} tokens, pages of {page}"
                    named = {"op": op, "tokens": tokens, "page": page}
                    yield Case("kv", name, dtype, s.device, partial(kv_work, s, dtype, op, tokens, page), named)
