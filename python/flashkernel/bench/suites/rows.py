"""Rows bound by memory or by the call: norms, RoPE, reductions, softmax, elementwise, the loss; and call overhead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import flashkernel as fk

from .. import baselines, row_peers
from ..case import ITEM_BYTES, OURS, TOLERANCE, Case, Inputs, Provider, Settings, Work, each, nbytes

__all__ = [
    "NORMS", "call_overhead", "cross_entropy", "elementwise", "norm", "norm_backward", "norm_quantized_work", "rope",
    "row_work",
]  # fmt: skip

# Ours with its options (a lambda: of a library and the arguments), torch's, how many arguments [rows, columns] and
# [columns] there are, how many matrices are written.
MatrixOp = tuple[Callable[..., Any], Callable[..., Any], int, int, int]
NORMS: dict[str, MatrixOp] = {
    "layer_norm": (fk.layer_norm, baselines.layer_norm, 1, 2, 1),
    "rms_norm": (partial(fk.rms_norm, eps=1e-6), baselines.rms_norm, 1, 1, 1),
    "layer_norm + residual": (
        lambda lib, x, r, w, b: lib.layer_norm(x, w, b, residual=r), baselines.layer_norm_residual, 2, 2, 2,
    ),
    "rms_norm + residual": (
        lambda lib, x, r, w: lib.rms_norm(x, w, residual=r, eps=1e-6), baselines.rms_norm_residual, 2, 1, 2,
    ),
}  # fmt: skip
ELEMENTWISE: dict[str, MatrixOp] = {
    "softmax": (fk.softmax, baselines.softmax, 1, 0, 1),
    "softmax_backward": (fk.softmax_backward, baselines.softmax_backward, 2, 0, 1),
    "sum": (partial(fk.reduce_sum, axis=-1), baselines.sum_of_rows, 1, 0, 0),
    "add": (fk.add, baselines.add, 2, 0, 1),
    "swiglu": (fk.swiglu, baselines.swiglu, 2, 0, 1),
    "swiglu_backward": (fk.swiglu_backward, baselines.swiglu_backward, 3, 0, 2),
}


def row_work(s: Settings, dtype: str, op: MatrixOp, rows: int, columns: int) -> Work:
    """A row whose inputs are matrices [rows, columns] and vectors [columns]."""
    function, stock, matrices, vectors, written = op
    inputs = Inputs(s.device, dtype)
    size = float(rows * columns * ITEM_BYTES[dtype])
    shared = [inputs.randn(columns) for _ in range(vectors)]
    sets = [
        (*(inputs.randn(rows, columns) for _ in range(matrices)), *shared)
        for _ in range(inputs.sets((matrices + written) * size, from_memory=s.cuda))
    ]
    providers = [*_ours(s, function, sets), *baselines.stock(s, stock, sets)]
    providers += row_peers.providers(s, stock.__name__, sets)
    # The sum of all cancels to little of what was added.
    tolerance = TOLERANCE[dtype] * (10 if stock is baselines.total else 1)
    return Work(providers, tolerance, read=matrices * size + nbytes(*shared), written=written * size)


def _ours(s: Settings, function: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> Iterable[Provider]:
    if isinstance(function, partial):
        return baselines.ours(s, function.func, sets, **function.keywords)
    if function.__name__ == "<lambda>":  # whose first argument is the library
        return baselines.ours_by(s, function, sets)
    return baselines.ours(s, function, sets)


def _matrices(s: Settings) -> list[tuple[int, int]]:
    """(rows, columns)"""
    picked: list[tuple[int, int]] = s.pick(
        quick=[(16, 128)],
        cpu=[(2048, 768), (2048, 4096)],
        cuda=[(32768, 768), (131072, 1024), (32768, 4096), (8192, 16384), (1024, 131072)],
    )
    return picked


def _of_matrices(s: Settings, group: str, ops: dict[str, MatrixOp]) -> Iterator[Case]:
    for rows, columns in _matrices(s):
        for dtype in s.dtypes_of(("bfloat16", "float32") if s.cuda else ("float32", "bfloat16")):
            for name, op in ops.items():
                named = {"op": name, "rows": rows, "columns": columns}
                build = partial(row_work, s, dtype, op, rows, columns)
                yield Case(group, f"{name} {rows} x {columns}", dtype, s.device, build, named)


def norm(s: Settings) -> Iterator[Case]:
    yield from _of_matrices(s, "norm", NORMS)
    yield from norm_quantized(s)


def norm_quantized_work(s: Settings, dtype: str, rows: int, columns: int) -> Work:
    """RMSNorm to float8_e4m3fn with a scale a row, beside the same in PyTorch's ops, eager and compiled."""
    inputs = Inputs(s.device, dtype)
    weight, size = inputs.randn(columns), float(rows * columns * ITEM_BYTES[dtype])
    written = float(rows * columns + 4 * rows)
    sets = [(inputs.randn(rows, columns), weight) for _ in range(inputs.sets(size + written, from_memory=s.cuda))]
    providers = [
        *baselines.ours(s, fk.rms_norm_quantized, sets),
        *baselines.stock(s, baselines.rms_norm_quantized, sets),
    ]
    # A number next to half way between two elements of float8 may become either: an eighth of it apart.
    return Work(providers, 0.2, read=size + nbytes(weight), written=written)


def norm_quantized(s: Settings) -> Iterator[Case]:
    for rows, columns in _matrices(s):
        for dtype in s.dtypes_of(("bfloat16",) if s.cuda else ("float32",)):
            named = {"op": "rms_norm_quantized", "rows": rows, "columns": columns}
            build = partial(norm_quantized_work, s, dtype, rows, columns)
            yield Case("norm", f"rms_norm_quantized {rows} x {columns}", dtype, s.device, build, named)


def elementwise(s: Settings) -> Iterator[Case]:
    """Softmax, sums of rows, residual add, SwiGLU; on CUDA the sum of 1 GiB too."""
    yield from _of_matrices(s, "elementwise", ELEMENTWISE)
    for dtype in s.dtypes_of(("float32",)):
        count = s.pick(quick=2**16, cpu=2**26, cuda=2**28)
        op = (fk.reduce_sum, baselines.total, 1, 0, 0)
        build = partial(row_work, s, dtype, op, 1, count)
        yield Case("elementwise", f"sum of {count} numbers", dtype, s.device, build, {"op": "sum", "columns": count})


def norm_backward_work(s: Settings, dtype: str, name: str, rows: int, columns: int) -> Work:
    torch = baselines.require_torch()
    inputs = Inputs(s.device, dtype)
    weight, bias = inputs.randn(columns), inputs.randn(columns)
    sets: list[tuple[Any, ...]] = []
    stock = []
    for _ in range(inputs.sets(3.0 * rows * columns * ITEM_BYTES[dtype], from_memory=s.cuda)):
        x, grad = inputs.randn(rows, columns), inputs.randn(rows, columns)
        wide = x.float()
        if name == "rms_norm":
            sets.append((grad, x, weight, torch.rsqrt(wide.square().mean(-1) + 1e-6)))
            stock.append(baselines.autograd(baselines.rms_norm, (x, weight), grad))
        else:
            mean = wide.mean(-1)
            rstd = torch.rsqrt((wide - mean[:, None]).square().mean(-1) + 1e-5)
            sets.append((grad, x, weight, mean, rstd))
            stock.append(baselines.autograd(baselines.layer_norm, (x, weight, bias), grad))
    function = fk.rms_norm_backward if name == "rms_norm" else fk.layer_norm_backward
    providers = [*baselines.ours(s, function, sets), Provider("eager", stock)]
    # Some ask for LayerNorm's bias, of whose type the gradient is.
    theirs = sets if name == "rms_norm" else [(*arguments[:3], bias, *arguments[3:]) for arguments in sets]
    providers += row_peers.providers(s, f"{name}_backward", theirs)
    # Sums over thousands of rows: the weights' gradients differ by more roundings.
    return Work(providers, 4 * TOLERANCE[dtype], read=nbytes(x, grad), written=nbytes(x), graph=False)


def norm_backward(s: Settings) -> Iterator[Case]:
    """Reads grad_out and h, writes grad_x; the gradients of the weights come on top."""
    for rows, columns in _matrices(s):
        for dtype in s.dtypes_of(("bfloat16", "float32") if s.cuda else ("float32",)):
            for name in ("rms_norm", "layer_norm"):
                named = {"op": f"{name}_backward", "rows": rows, "columns": columns}
                build = partial(norm_backward_work, s, dtype, name, rows, columns)
                yield Case("norm_backward", f"{name}_backward {rows} x {columns}", dtype, s.device, build, named)


def rope_work(s: Settings, dtype: str, shape: tuple[int, int, int, int, int], table: bool) -> Work:
    batch, heads_q, heads_kv, seq, dim = shape
    inputs = Inputs(s.device, dtype)
    cos, sin = baselines.rope_tables(s, dtype, seq, dim)
    size = 2.0 * batch * (heads_q + heads_kv) * seq * dim * ITEM_BYTES[dtype]
    sets = [
        (inputs.randn(batch, heads_q, seq, dim), inputs.randn(batch, heads_kv, seq, dim))
        for _ in range(inputs.sets(size, from_memory=s.cuda))
    ]
    if table:
        half = dim // 2
        tables = (cos[:, :half].float().contiguous(), sin[:, :half].float().contiguous())
        providers = [*baselines.ours(s, fk.rope_table, [(*qk, *tables) for qk in sets])]
    else:
        providers = [*baselines.ours(s, fk.rope, sets)]
    stock = [(*qk, cos, sin) for qk in sets]
    providers += [*baselines.stock(s, baselines.rope, stock), *row_peers.providers(s, "rope", stock)]
    return Work(providers, TOLERANCE[dtype], read=size / 2, written=size / 2)


def rope(s: Settings) -> Iterator[Case]:
    """sin and cos in the kernel, and from a table."""
    shape = s.pick(quick=(1, 4, 2, 32, 32), cpu=(1, 32, 8, 2048, 128), cuda=(4, 32, 32, 4096, 128))
    batch, heads_q, heads_kv, seq, dim = shape
    for dtype in s.dtypes_of(("bfloat16", "float32") if s.cuda else ("float32", "bfloat16")):
        for table in (False, True):
            name = f"{'rope_table ' if table else ''}batch {batch}, seq {seq}, heads {heads_q} and {heads_kv}, d {dim}"
            named = {"batch": batch, "seq": seq, "heads": heads_q, "heads_kv": heads_kv, "head_dim": dim}
            yield Case("rope", name, dtype, s.device, partial(rope_work, s, dtype, shape, table), named)


def cross_entropy_work(s: Settings, dtype: str, rows: int, classes: int, backward: bool) -> Work:
    torch = baselines.require_torch()
    inputs, size = Inputs(s.device, dtype), float(rows * classes * ITEM_BYTES[dtype])
    sets = [
        (inputs.randn(rows, classes), torch.randint(classes, (rows,), device=s.device))
        for _ in range(inputs.sets(size, from_memory=s.cuda))
    ]
    if not backward:
        providers = [*baselines.ours(s, fk.cross_entropy, sets), *baselines.stock(s, baselines.cross_entropy, sets)]
        providers += row_peers.providers(s, "cross_entropy", sets)
        return Work(providers, TOLERANCE[dtype], read=size)
    one = torch.ones((), device=s.device)
    ours = [(one, logits, targets, fk.cross_entropy(logits, targets, return_lse=True)[1]) for logits, targets in sets]
    providers = [*baselines.ours(s, fk.cross_entropy_backward, ours)]
    one = one.to(sets[0][0].dtype)
    stock = [(one, torch.log_softmax(logits, -1), targets, torch.full_like(one, rows)) for logits, targets in sets]
    providers += baselines.stock(s, baselines.cross_entropy_backward, stock)
    providers += row_peers.providers(s, "cross_entropy_backward", ours)
    return Work(providers, 4 * TOLERANCE[dtype], read=size, written=size)


def cross_entropy(s: Settings) -> Iterator[Case]:
    """Forward reads the logits once; backward reads and writes them."""
    for rows, classes in s.pick(quick=[(8, 100)], cpu=[(512, 32000)], cuda=[(4096, 32000), (4096, 128256)]):
        for dtype in s.dtypes_of(("bfloat16", "float32") if s.cuda else ("float32",)):
            for backward in (False, True):
                name = f"cross_entropy{'_backward' if backward else ''} {rows} x {classes}"
                build = partial(cross_entropy_work, s, dtype, rows, classes, backward)
                yield Case("cross_entropy", name, dtype, s.device, build, {"rows": rows, "classes": classes})


def _overhead_work(s: Settings, op: str) -> Work:
    functional = baselines.require_torch().nn.functional
    inputs = Inputs(s.device, "float32" if not s.cuda else "float16")
    if op == "attention":
        qkv = tuple(inputs.randn(1, 1, 1, 16) for _ in range(3))
        ours, peer = each(fk.attention, [qkv]), Provider("sdpa", each(functional.scaled_dot_product_attention, [qkv]))
    elif op == "attention_paged":
        heads, heads_kv, dim = _ONE_PAGE[s.cuda]
        q, k, v = inputs.randn(1, heads, 1, dim), *(inputs.randn(1, heads_kv, 16, dim) for _ in range(2))
        pages = (*inputs.paged(k, v, 16), inputs.index([16]))
        ours = each(fk.attention_paged, [(q, *pages)], out=baselines.require_torch().empty_like(q))
        peer = Provider("sdpa", each(baselines.sdpa, [(q, k, v)]))  # without pages
    else:
        x, weight = inputs.randn(1, 16), inputs.randn(16)
        ours = each(fk.rms_norm, [(x, weight)], eps=1e-6)
        peer = Provider("eager", each(functional.rms_norm, [(x, (16,), weight, 1e-6)]))
    providers = [Provider("flashkernel", ours, OURS), peer]
    return Work(providers, TOLERANCE[inputs.dtype], graph=False, inner=20)


_ONE_PAGE = {True: (32, 8, 128), False: (1, 1, 16)}  # on CUDA or not: heads, heads_kv, head_dim


def call_overhead(s: Settings) -> Iterator[Case]:
    """Ops on tensors so small that the call is what takes the time; on CUDA without a graph: what launching takes."""
    dtype = "float16" if s.cuda else "float32"
    if s.dtypes_of((dtype,)):
        heads, heads_kv, dim = _ONE_PAGE[s.cuda]
        paged = f"of one page of 16 into out, heads {heads}/{heads_kv}, d {dim}"
        for op, shape in (("attention", (1, 1, 1, 16)), ("rms_norm", (1, 16)), ("attention_paged", paged)):
            yield Case("call_overhead", f"{op} {shape}", dtype, s.device, partial(_overhead_work, s, op), {"op": op})
