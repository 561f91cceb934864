"""Attention rows: forward and backward at the points where libraries are compared, grouped heads, pages, sizes, memory.

On CUDA: batch x seq = 16384 tokens and heads x head_dim = 2048, the setting of the FlashAttention papers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import flashkernel as fk

from .. import baselines
from ..case import (
    DTYPES,
    OURS,
    PEER,
    TOLERANCE,
    VARIANT,
    Case,
    Inputs,
    Provider,
    Settings,
    Work,
    attention_flop,
    each,
    nbytes,
)

__all__ = ["backward", "f32", "forward", "gqa", "ladder", "memory", "points", "sizes"]

TOKENS, WIDTH = 16384, 2048  # heads x head_dim


def _work(s: Settings, dtype: str, shape: dict[str, Any], *, eager: bool, variants: bool) -> Work:
    batch, heads, heads_kv, seq, dim, causal = (
        shape[key] for key in ("batch", "heads", "heads_kv", "seq", "head_dim", "causal")
    )
    inputs = Inputs(s.device, dtype)
    q = inputs.heads(batch, heads, seq, dim)
    k, v = (inputs.heads(batch, heads_kv, seq, dim) for _ in range(2))
    providers = [*baselines.ours(s, fk.attention, [(q, k, v)], causal=causal)]
    if variants and s.cuda:
        for name in ("tiled", "naive"):
            if name not in s.without:
                call = each(fk.attention, [(q, k, v)], causal=causal)
                providers.append(Provider(name, call, VARIANT, f"attention_fwd/cuda/generic/{name}"))
    providers += baselines.sdpa_providers(s, dtype, [(q, k, v)], causal)
    scores = 4.0 * batch * heads * seq * seq  # bytes in fp32; eager holds a few times as many
    if eager and scores <= s.pick(quick=2**24, cpu=2**28, cuda=2**32):
        providers += baselines.stock(s, baselines.attention_eager, [(q, k, v, causal)])
    return Work(
        providers,
        TOLERANCE[dtype],
        flop=attention_flop(batch, heads, seq, seq, dim, causal),
        read=nbytes(q, k, v),
        written=nbytes(q),
        memory_apart=(batch, heads, seq, dim) if shape.get("memory") else None,
    )


def _case(
    s: Settings,
    group: str,
    dtype: str,
    shape: tuple[int, int, int, int],
    causal: bool,
    *,
    name: str | None = None,
    eager: bool = False,
    variants: bool = False,
    memory: bool = False,
) -> Case:
    batch, heads, seq, dim = shape
    named: dict[str, Any] = {
        "batch": batch, "heads": heads, "heads_kv": heads, "seq": seq, "head_dim": dim, "causal": causal,
    }  # fmt: skip
    build = partial(_work, s, dtype, {**named, "memory": memory}, eager=eager, variants=variants)
    return Case(group, name or f"{shape} {'causal' if causal else 'full'}", dtype, s.device, build, named)


def points(s: Settings, dims: tuple[int, ...] = (64, 128, 256)) -> Iterator[tuple[tuple[int, int, int, int], bool]]:
    """((batch, heads, seq, head_dim), causal) of the comparison."""
    if not s.cuda or s.quick:
        small = [((1, 2, 256, 64), False), ((1, 2, 256, 64), True)]
        yield from s.pick(
            quick=small, cpu=[((1, 8, 2048, 64), False), ((1, 8, 2048, 64), True), ((1, 8, 4096, 128), True)], cuda=[]
        )
        return
    for dim in dims:
        for seq in (512, 1024, 2048, 4096, 8192, 16384):
            for causal in (False, True):
                yield (TOKENS // seq, WIDTH // dim, seq, dim), causal


def forward(s: Settings) -> Iterator[Case]:
    for dtype in s.dtypes_of(("float16",) if s.cuda else DTYPES):
        for shape, causal in points(s):
            yield _case(s, "attention_forward", dtype, shape, causal)


def f32(s: Settings) -> Iterator[Case]:
    """fp32 on tensor cores, against what torch offers in fp32."""
    if s.cuda:
        for shape, causal in points(s):
            yield _case(s, "attention_f32", "float32", shape, causal)


def sizes(s: Settings) -> Iterator[Case]:
    """How time grows with the sequence and the batch: 16 heads on a GPU, 8 on the CPU; naive and tiled kernels too."""
    grid: list[tuple[int, int, int]] = s.pick(
        quick=[(1, 128, 64), (1, 256, 64), (2, 128, 64)],
        cpu=[(1, seq, dim) for dim in (64, 128) for seq in (512, 1024, 2048, 4096)]
        + [(batch, 512, 64) for batch in (4, 8, 16)],
        cuda=[(batch, seq, dim) for dim in (64, 128) for batch in (1, 4, 8, 16) for seq in (512, 1024, 2048, 4096)]
        + [(1, seq, dim) for dim in (64, 128) for seq in (8192, 16384, 131072)],
    )
    heads = s.pick(quick=2, cpu=8, cuda=16)
    for dtype in s.dtypes_of(("float16", "bfloat16", "float32") if s.cuda else DTYPES):
        for batch, seq, dim in grid:
            if dtype == "bfloat16" and s.cuda and (batch > 1 or dim != 128):
                continue  # as fast as float16: one line of the plot shows it
            shape = (batch, heads, seq, dim)
            yield _case(s, "attention_sizes", dtype, shape, True, eager=True, variants=batch == 1 and seq <= 4096)


def memory(s: Settings) -> Iterator[Case]:
    """A few calls of long sequences, for their memory: what exceeds the result must not grow with the sequence. On the
    CPU it is measured in a process of its own.
    """
    heads = s.pick(quick=2, cpu=8, cuda=8)
    for seq in s.pick(quick=(512,), cpu=(4096, 16384), cuda=(4096, 16384, 65536, 131072)):
        for dtype in s.dtypes_of(("float16",) if s.cuda else ("float32",)):
            yield _case(s, "attention_memory", dtype, (1, heads, seq, 64), True, memory=not s.cuda)


def _backward_work(s: Settings, dtype: str, shape: tuple[int, int, int, int], causal: bool) -> Work:
    batch, heads, seq, dim = shape
    q, k, v, grad = (Inputs(s.device, dtype).heads(*shape) for _ in range(4))
    out, lse = fk.attention(q, k, v, causal=causal, return_lse=True)
    arguments = (grad, q, k, v, out, lse)
    providers = [*baselines.ours(s, fk.attention_backward, [arguments], causal=causal)]
    if s.cuda and "any_order" not in s.without:
        call = each(fk.attention_backward, [arguments], causal=causal, deterministic=False)
        providers.append(Provider("any_order", call, VARIANT))
    for name in baselines.sdpa_names(s, dtype):
        if name in ("sdpa_efficient", "sdpa_math") and dtype != "float32":
            continue  # a third of the others' speed
        function = baselines.sdpa if name == "sdpa" else partial(baselines.forced_sdpa, name)
        try:
            call = [baselines.autograd(function, (q, k, v), grad, (causal,))]
        except RuntimeError as error:  # the backend refuses the forward pass; the runner notes why
            call = each(baselines.refuse, [(str(error),)])
        providers.append(Provider(name, call))
    for name, function in baselines.flash_libraries(s, dtype):
        providers.append(Provider(name, [baselines.autograd(function, (q, k, v), grad, (causal,))]))
    return Work(
        providers,
        4 * TOLERANCE[dtype],
        # Five products against the forward pass's two.
        flop=2.5 * attention_flop(batch, heads, seq, seq, dim, causal),
        read=nbytes(*arguments),
        written=nbytes(q, k, v),
        graph=False,
    )


def backward(s: Settings) -> Iterator[Case]:
    if s.quick:
        chosen = [((1, 2, 128, 64), True)]
    elif s.cuda:
        chosen = [*points(s, (64, 128))]
    else:
        chosen = [((1, 8, 1024, 64), True)]
    for dtype in s.dtypes_of(("float16",) if s.cuda else ("float32",) if s.quick else DTYPES):
        for shape, causal in chosen:
            batch, heads, seq, dim = shape
            named = {"batch": batch, "heads": heads, "seq": seq, "head_dim": dim, "causal": causal}
            name = f"{shape} {'causal' if causal else 'full'}"
            build = partial(_backward_work, s, dtype, shape, causal)
            yield Case("attention_backward", name, dtype, s.device, build, named)


# Kernels of one op from the simplest to the fastest: lab/optimisation.md. {} is dtype and head_dim.
LADDER = {
    "attention_fwd": (
        "cuda/generic/naive", "cuda/generic/tiled", "cuda/sm75/{}", "cuda/sm80/{}", "cuda/sm90a/{}",
        "cpu/scalar", "cpu/avx2", "cpu/avx512", "cpu/amx",
    ),
    "attention_bwd": (
        "cuda/generic", "cuda/sm75/{}", "cuda/sm80/{}", "cuda/sm90a/{}",
        "cpu/scalar", "cpu/avx2", "cpu/avx512", "cpu/amx",
    ),
}  # fmt: skip
NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}  # of dtypes in ids


def _ladder_work(s: Settings, dtype: str, shape: dict[str, Any], op: str) -> Work:
    """The library's own choice, then every rung that this machine has, forced, on the same tensors."""
    batch, heads, seq, dim, causal = (shape[key] for key in ("batch", "heads", "seq", "head_dim", "causal"))
    if op == "attention_bwd":
        work = _backward_work(s, dtype, (batch, heads, seq, dim), causal)
    else:
        work = _work(s, dtype, {**shape, "heads_kv": heads}, eager=False, variants=False)
    chosen = next(p for p in work.providers if p.kind == OURS)
    known = {kernel.id for kernel in fk.kernels() if kernel.available and kernel.device == s.device}
    ids = [f"{op}/{rung.format(f'{NAMES[dtype]}/d{dim}')}" for rung in LADDER[op]]
    rungs = [Provider(name, chosen.calls, VARIANT, name) for name in ids if name in known and name not in s.without]
    slow = ("sdpa_efficient", "sdpa_math")
    peers = [p for p in work.providers if p.kind == PEER and p.name not in slow]
    return replace(work, providers=[chosen, *rungs, *peers])


def ladder(s: Settings) -> Iterator[Case]:
    """What each rung gave: all kernels of a case in one run, in turn."""
    shapes: list[tuple[int, int, int, int]] = s.pick(
        quick=[(1, 2, 128, 64)],
        cpu=[(1, 8, 512, 64)],
        cuda=[(TOKENS // seq, WIDTH // dim, seq, dim) for dim in (64, 128) for seq in (512, 4096)],
    )
    for dtype in s.dtypes_of(("float16",) if s.cuda else ("float32",)):
        for op in LADDER:
            for batch, heads, seq, dim in shapes:
                for causal in (False, True):
                    named = {"batch": batch, "heads": heads, "seq": seq, "head_dim": dim, "causal": causal}
                    name = f"{op} {(batch, heads, seq, dim)} {'causal' if causal else 'full'}"
                    build = partial(_ladder_work, s, dtype, named, op)
                    yield Case("attention_ladder", name, dtype, s.device, build, named)


def _gqa_work(s: Settings, dtype: str, shape: tuple[int, int, int, int, int], page: int) -> Work:
    """Over pages (page 0: contiguous); beside pages, our own kernel over contiguous K and V."""
    batch, heads, heads_kv, seq, dim = shape
    inputs = Inputs(s.device, dtype)
    q = inputs.heads(batch, heads, seq, dim)
    k, v = (inputs.heads(batch, heads_kv, seq, dim) for _ in range(2))
    if page:
        lengths = inputs.index([seq] * batch)
        arguments = (q, *inputs.paged(k, v, page), lengths)
        providers = [*baselines.ours(s, fk.attention_paged, [arguments], causal=True)]
        if "contiguous" not in s.without:
            providers.append(Provider("contiguous", each(fk.attention, [(q, k, v)], causal=True), VARIANT))
    else:
        providers = [*baselines.ours(s, fk.attention, [(q, k, v)], causal=True)]
    providers += baselines.sdpa_providers(s, dtype, [(q, k, v)], True)
    flop = attention_flop(batch, heads, seq, seq, dim, True)
    return Work(providers, TOLERANCE[dtype], flop=flop, read=nbytes(q, k, v), written=nbytes(q))


def gqa(s: Settings) -> Iterator[Case]:
    """32 query and 8 kv heads, contiguous and in pages at random places."""
    batch, heads, heads_kv, seq, dim = shape = s.pick(
        quick=(1, 4, 2, 128, 64), cpu=(1, 32, 8, 1024, 128), cuda=(4, 32, 8, 4096, 128)
    )
    for dtype in s.dtypes_of(("bfloat16",)):
        for page in (0, 16, 256) if not s.quick else (0, 16):
            named = {"batch": batch, "heads": heads, "heads_kv": heads_kv, "seq": seq, "head_dim": dim, "causal": True}
            name = f"{heads}/{heads_kv} heads d{dim} seq {seq} causal" + (f", pages of {page}" if page else "")
            build = partial(_gqa_work, s, dtype, shape, page)
            yield Case("attention_gqa", name, dtype, s.device, build, {**named, "page": page})
