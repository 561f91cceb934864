"""What is promised about batch, chunk, page and thread invariance, op by op, and that it holds on this machine.

PROMISED is the table of docs/numerics.md. A property that is not promised may hold all the same: each test prints a
line of what it measured (`pytest -rP tests_py/test_invariance.py | grep "^invariance"`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import flashkernel as fk
from conftest import HAS_GPU, TORCH

# batch: an item (a row, or a sequence of attention) has the same bits in batches of any size, at any place of them.
# threads: the same bits with 1, 2 and 3 threads. chunks: a prefill in chunks of 32 queries and more has the whole one's
# bits. pages: the bits do not depend on the page size. decode: one query at a time has the whole prefill's bits.
PROPERTIES = ("batch", "threads", "chunks", "pages", "decode")
ALL, HALF = ("float32", "float16", "bfloat16"), ("float16", "bfloat16")
PROMISED: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    # op, dtypes, on the CPU, on CUDA
    ("attention", ALL, "batch threads chunks", "batch"),
    ("attention, one query", ALL, "batch threads", "-"),
    ("attention_paged", ALL, "batch threads pages", "batch"),
    ("attention_paged, one query", ALL, "batch threads", "-"),
    ("attention_backward", ALL, "batch threads", "batch"),
    ("linear, up to 8 rows", ALL, "threads", "-"),
    ("linear, 9 rows and more", ALL, "threads", "-"),
    ("rms_norm", ALL, "batch threads", "-"),
    ("layer_norm", ALL, "batch threads", "-"),
    ("softmax", ALL, "batch threads", "-"),
    ("log_softmax", ALL, "batch threads", "-"),
    ("cross_entropy", ALL, "batch threads", "-"),
    ("linear_cross_entropy", ALL, "batch threads", "-"),
    ("linear_selected_log_prob", ALL, "batch threads", "-"),
    ("sample", ALL, "batch threads", "batch"),
    ("reduce_sum", ALL, "batch threads", "-"),
    ("swiglu", ALL, "batch threads", "batch"),
    ("add", ALL, "batch threads", "batch"),
    ("rope", ALL, "batch threads", "batch"),
)
DEVICE = "cuda" if HAS_GPU and fk.num_cuda_devices() else "cpu"


@dataclass
class Problem:
    """One shape of an op. `run(ids)`: the results of these items, [len(ids), ...]; others: pairs to compare."""

    items: int
    run: Callable[[Sequence[int]], torch.Tensor]
    others: dict[str, Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]] = field(default_factory=dict)
    sizes: tuple[int, ...] = (1, 2)  # of parts of the batch that must have the whole one's bits


def normal(dtype: str, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(TORCH[dtype]).to(DEVICE)


def attention_problems(dtype: str) -> Iterator[Problem]:
    for heads, heads_kv, seq, dim in ((2, 2, 75, 64), (4, 2, 200, 128), (2, 1, 333, 64), (1, 1, 130, 96)):
        q = normal(dtype, 5, heads, seq, dim)
        k, v = (normal(dtype, 5, heads_kv, seq, dim, seed=s) for s in (1, 2))

        def part(begin, end, q=q, k=k, v=v):
            return fk.attention(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], causal=True)

        def chunks(seq=seq, part=part):
            whole = part(0, seq)
            for size in (32, 64, 100):
                for begin in range(0, seq - 32, size):
                    end = seq if begin + size > seq - 32 else begin + size
                    yield whole[:, :, begin:end], part(begin, end)
                    if end == seq:
                        break

        def decode(seq=seq, part=part):
            whole = part(0, seq)
            for at in (0, seq // 2, seq - 1):
                yield whole[:, :, at : at + 1], part(at, at + 1)

        run = lambda ids, q=q, k=k, v=v: fk.attention(q[ids], k[ids], v[ids], causal=True)
        yield Problem(5, run, {"chunks": chunks, "decode": decode}, (1, 3))


def one_query_problems(dtype: str) -> Iterator[Problem]:
    for heads, heads_kv, keys, dim in ((4, 2, 1000, 64), (8, 1, 2500, 128), (2, 2, 77, 96), (32, 8, 4200, 128)):
        q = normal(dtype, 4, heads, 1, dim)
        k, v = (normal(dtype, 4, heads_kv, keys, dim, seed=s) for s in (1, 2))
        yield Problem(4, lambda ids, q=q, k=k, v=v: fk.attention(q[ids], k[ids], v[ids]))


def paged_problems(dtype: str, queries: int) -> Iterator[Problem]:
    shapes = ((4, 2, 64, (300, 17, 512)), (8, 1, 128, (1500, 260, 700)), (2, 2, 96, (256, 90, 40)))
    for heads, heads_kv, dim, lengths in shapes:
        query_count = min(queries, min(lengths))
        q = normal(dtype, 3, heads, query_count, dim)
        k, v = (normal(dtype, 3, 1536, heads_kv, dim, seed=s) for s in (1, 2))

        def run(ids, size=16, q=q, k=k, v=v, lengths=lengths):
            tables = torch.arange(3 * 1536 // size, dtype=torch.int32, device=DEVICE).flip(0).reshape(3, -1)
            pages = []
            for x in (k, v):  # page tables[b, n] holds tokens n * size and on of sequence b
                page = torch.empty(tables.numel(), size, *x.shape[2:], dtype=x.dtype, device=DEVICE)
                page[tables.long().flatten()] = x.reshape(-1, size, *x.shape[2:])
                pages.append(page)
            own = torch.tensor([lengths[i] for i in ids], dtype=torch.int32, device=DEVICE)
            return fk.attention_paged(q[ids], *pages, tables[ids], own, causal=True)

        def page_sizes(run=run):
            whole = run([0, 1, 2])
            for size in (32, 128, 256):
                yield whole, run([0, 1, 2], size)

        yield Problem(3, run, {"pages": page_sizes})


def backward_problems(dtype: str) -> Iterator[Problem]:
    for heads, heads_kv, seq, dim in ((2, 2, 75, 64), (4, 2, 200, 128), (2, 1, 150, 96)):
        q, grad = (normal(dtype, 3, heads, seq, dim, seed=s) for s in (0, 3))
        k, v = (normal(dtype, 3, heads_kv, seq, dim, seed=s) for s in (1, 2))
        out, lse = fk.attention(q, k, v, causal=True, return_lse=True)

        def run(ids, q=q, k=k, v=v, grad=grad, out=out, lse=lse):
            grads = fk.attention_backward(*(x[ids] for x in (grad, q, k, v, out, lse)), causal=True)
            return torch.cat([x.reshape(len(ids), -1) for x in grads], 1)

        yield Problem(3, run)


def linear_problems(dtype: str, rows: int, sizes: tuple[int, ...]) -> Iterator[Problem]:
    for features, outputs in ((256, 512), (1000, 77), (768, 2304), (4096, 33)):
        weight, bias = normal(dtype, outputs, features, seed=1), normal(dtype, outputs, seed=2)
        x = normal(dtype, rows, features)
        yield Problem(
            rows, lambda ids, x=x, w=weight, b=bias: fk.linear(x[ids], w, b, activation="gelu_tanh"), {}, sizes
        )


def row_problems(dtype: str, op: Callable[..., torch.Tensor], arguments: int = 1) -> Iterator[Problem]:
    for rows, columns in ((7, 64), (300, 1000), (33, 4096), (5, 50257)):
        xs = [normal(dtype, rows, columns, seed=s) for s in range(arguments)]
        yield Problem(rows, lambda ids, xs=xs: op(*(x[ids] for x in xs)), {}, (1, 2, rows - 1))


def weighted(op: Callable[..., torch.Tensor], *more: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        vectors = [normal("float32", x.shape[1], seed=9 + n).to(x.dtype) for n in (0, *more)]
        return op(x, *vectors)

    return run


def losses(x: torch.Tensor) -> torch.Tensor:
    # Targets by a row's own bits, so that a row has one wherever it stands.
    targets = x[:, :1].float().mul(1000).abs().to(torch.int64).remainder(x.shape[1]).flatten()
    return fk.cross_entropy(x, targets, reduction="none")


def fused_loss_problems(dtype: str, selected: bool = False) -> Iterator[Problem]:
    for rows, features, classes in ((9, 64, 1000), (150, 256, 2500), (560, 100, 1100)):
        weight, targets = normal(dtype, classes, features, seed=1), torch.arange(rows, device=DEVICE) * 7 % classes
        x = normal(dtype, rows, features)

        def run(ids, x=x, w=weight, t=targets):
            if selected:
                return torch.stack(fk.linear_selected_log_prob(x[ids], w, t[ids], return_lse=True), 1)
            return torch.stack(fk.linear_cross_entropy(x[ids], w, t[ids], reduction="none", return_lse=True), 1)

        yield Problem(rows, run, {}, (1, 8, rows - 1))


def sample_problems(dtype: str) -> Iterator[Problem]:
    for rows, vocab in ((5, 100), (9, 4096), (4, 50257)):
        logits = normal(dtype, rows, vocab)
        seed, offset = torch.arange(rows, device=DEVICE) + 5, torch.arange(rows, device=DEVICE) * 3
        top_k = torch.arange(rows, device=DEVICE) * 7  # 0: all
        temperature, top_p = torch.full((2, rows), 0.9, device=DEVICE)

        def run(ids, x=logits, t=temperature, k=top_k, p=top_p, s=seed, o=offset):
            return fk.sample(x[ids], t[ids], top_k=k[ids], top_p=p[ids], seed=s[ids], offset=o[ids])

        yield Problem(rows, run, {}, (1, 2, rows - 1))


def rope_problems(dtype: str) -> Iterator[Problem]:
    for heads, dim in ((3, 64), (32, 128)):
        q, positions = normal(dtype, 6, heads, 9, dim), torch.arange(54, device=DEVICE).reshape(6, 9) * 977
        yield Problem(6, lambda ids, q=q, at=positions: fk.rope(q[ids], None, at[ids]))


PROBLEMS: dict[str, Callable[[str], Iterator[Problem]]] = {
    "attention": attention_problems,
    "attention, one query": one_query_problems,
    "attention_paged": lambda dtype: paged_problems(dtype, 64),
    "attention_paged, one query": lambda dtype: paged_problems(dtype, 1),
    "attention_backward": backward_problems,
    "linear, up to 8 rows": lambda dtype: linear_problems(dtype, 8, (1, 2, 3, 5)),
    "linear, 9 rows and more": lambda dtype: linear_problems(dtype, 150, (9, 16, 33, 100)),
    "rms_norm": lambda dtype: row_problems(dtype, weighted(fk.rms_norm)),
    "layer_norm": lambda dtype: row_problems(dtype, weighted(fk.layer_norm, 1)),
    "softmax": lambda dtype: row_problems(dtype, fk.softmax),
    "log_softmax": lambda dtype: row_problems(dtype, fk.log_softmax),
    "cross_entropy": lambda dtype: row_problems(dtype, losses),
    "linear_cross_entropy": fused_loss_problems,
    "linear_selected_log_prob": lambda dtype: fused_loss_problems(dtype, selected=True),
    "sample": sample_problems,
    "reduce_sum": lambda dtype: row_problems(dtype, lambda x: fk.reduce_sum(x, -1)),
    "swiglu": lambda dtype: row_problems(dtype, fk.swiglu, 2),
    "add": lambda dtype: row_problems(dtype, fk.add, 2),
    "rope": rope_problems,
}


def batches(problem: Problem) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    everything = list(range(problem.items))
    whole = problem.run(everything)
    yield whole.flip(0), problem.run(everything[::-1])
    for size in problem.sizes:
        for first in {0, problem.items // 2, problem.items - size}:
            ids = [(first + i) % problem.items for i in range(size)]
            yield whole[ids], problem.run(ids)


def threads(problem: Problem) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    everything, before = list(range(problem.items)), fk.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            fk.set_num_threads(count)
            results.append(problem.run(everything))
    finally:
        fk.set_num_threads(before)
    yield from itertools.product(results[:1], results[1:])


def measured(op: str, dtype: str) -> dict[str, bool]:
    """Whether a property holds in every shape; those that the op does not have are left out."""
    holds: dict[str, bool] = {}
    for problem in PROBLEMS[op](dtype):
        pairs = {"batch": lambda p=problem: batches(p), **problem.others}
        if DEVICE == "cpu":
            pairs["threads"] = lambda p=problem: threads(p)
        for name, of_pairs in pairs.items():
            equal = all(torch.equal(a, b) for a, b in of_pairs())
            holds[name] = holds.get(name, True) and equal
    return holds


CASES = [(op, dtype, on_cpu, on_cuda) for op, dtypes, on_cpu, on_cuda in PROMISED for dtype in dtypes]


@pytest.mark.parametrize("op, dtype, on_cpu, on_cuda", CASES, ids=[f"{op}-{dtype}" for op, dtype, *_ in CASES])
def test_what_is_promised_holds(op, dtype, on_cpu, on_cuda):
    promised = {word for word in (on_cpu if DEVICE == "cpu" else on_cuda).split() if word != "-"}
    holds = measured(op, dtype)
    words = " ".join(name for name in PROPERTIES if holds.get(name)) or "-"
    print(f"\ninvariance {DEVICE}: {op}, {dtype}: {words} (promised: {' '.join(sorted(promised)) or '-'})")
    assert promised <= set(holds), f"{op} has no {promised - set(holds)} to measure"
    assert not [name for name in promised if not holds[name]]


def test_the_table_of_the_docs_is_this_one():
    text = (Path(__file__).parents[1] / "docs" / "numerics.md").read_text(encoding="utf-8")
    section = text.split("## Invariance", 1)[1].split("\n## ", 1)[0]
    lines = [line.strip("|") for line in section.splitlines() if line.startswith("|")]
    rows = [tuple(cell.strip() for cell in line.split("|")) for line in lines]
    assert rows[0] == ("op", "dtypes", "CPU", "CUDA")
    names = {ALL: "all", HALF: "float16, bfloat16"}
    assert rows[2:] == [(op, names.get(dtypes, ", ".join(dtypes)), *words) for op, dtypes, *words in PROMISED]
