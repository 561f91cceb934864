"""Context parallel attention against one device: real processes, gloo, 2 and 4 ranks, uneven and empty shards."""

from __future__ import annotations

import doctest
import itertools
from typing import Any

import numpy as np
import pytest
import torch

import context_parallel_cases as cases
import flashkernel.torch as fkt
import flashkernel.torch.context_parallel as cp
from flashkernel import reference, testing
from flashkernel.torch.context_parallel import layout
from ranks import Ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

BOTH = [(method, kind) for method in ("ring", "all_gather", "ulysses") for kind in ("zigzag", "contiguous")]
LENGTHS = {"even": (16, 16), "uneven": (27, 10), "four": (9, 9, 9, 9), "empty": (0, 17, 1, 20)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (5, None), "softcap": 2.0},
    "both sides": {"window": (9, 4), "scale": 0.3},
    "right": {"window": (None, 2)},
}


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    group = Ranks(4, tmp_path_factory.mktemp("four"))
    yield group
    group.close()


def truth(data: dict[str, Any], options: dict[str, Any], sinks: bool, bounds: tuple[int, ...]) -> list[Any]:
    """Float64: out, lse, and gradients of q, k, v and sinks, document by document."""
    parts = []
    for begin, end in itertools.pairwise(bounds):
        q, k, v, g = (testing.to_float64(data[name][:, :, begin:end]) for name in "qkvg")
        own = {**options, "sinks": data["sinks"].detach().numpy()} if sinks else options
        out, lse = reference.attention(q, k, v, **own)
        grad_lse = testing.to_float64(data["grad_lse"][:, :, begin:end])
        grads = reference.attention_backward(g, q, k, v, grad_lse=grad_lse, **own)
        parts.append([out, lse, grads["q"], grads["k"], grads["v"], grads["sinks"]])
    whole = [torch.cat([torch.from_numpy(part[i]) for part in parts], 2).numpy() for i in range(5)]
    return [*whole, sum(part[5] for part in parts)] if sinks else whole


def one_device(data: dict[str, Any], options: dict[str, Any], sinks: bool, bounds: tuple[int, ...]) -> list[Any]:
    q, k, v = (data[name].clone().requires_grad_() for name in "qkv")
    sink = data["sinks"].detach().clone().requires_grad_() if sinks else None
    parts = [
        fkt.attention(q[:, :, b:e], k[:, :, b:e], v[:, :, b:e], sinks=sink, return_lse=True, **options)
        for b, e in itertools.pairwise(bounds)
    ]
    out, lse = (torch.cat(kind, 2) for kind in zip(*parts, strict=True))
    wanted = [x for x in (q, k, v, sink) if x is not None]
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), wanted, (data["g"], data["grad_lse"]))]


CASES = [
    ("float32", "even", "causal", False, None),
    ("float32", "uneven", "plain", True, None),
    ("float32", "four", "window", True, None),
    ("float32", "empty", "causal", True, None),
    ("float32", "empty", "both sides", False, None),
    ("float32", "four", "right", False, None),
    ("float32", "four", "causal", False, (0, 7, 7, 30, 36)),
    ("bfloat16", "even", "both sides", False, None),
    ("bfloat16", "empty", "causal", True, (0, 20, 38)),
    ("float16", "four", "causal", False, None),
]


@pytest.mark.parametrize(("dtype", "lengths", "options", "sinks", "documents"), CASES)
def test_equals_one_device(four, dtype, lengths, options, sinks, documents) -> None:
    """Within the tolerance rule, where the framework's result in the same dtype is that of the op on one device.

    A sum of parts of four ranks is rounded three times more than that one.
    """
    chosen = {**OPTIONS[options], **({} if documents is None else {"cu_seqlens": documents})}
    answers = four.ask(cases.run, dtype, LENGTHS[lengths], chosen, sinks, BOTH)
    assert not any(isinstance(answer, str) and answer != "done" for answer in answers), answers
    data = cases.inputs(dtype, LENGTHS[lengths])
    bounds = documents or (0, sum(LENGTHS[lengths]))
    exact = truth(data, OPTIONS[options], sinks, bounds)
    single = one_device(data, OPTIONS[options], sinks, bounds)
    names = ["out", "lse", "grad_q", "grad_k", "grad_v", "grad_sinks"]
    for (method, kind), results in zip(BOTH, answers[0], strict=True):
        for name, result, right, alone in zip(names[: len(single)], results, exact, single, strict=True):
            element = "float32" if name == "lse" else dtype  # LSE is float32 whatever q is
            what = f"{method} {kind} {name}"
            testing.assert_close(result, right, element, what=what)
            exact64 = testing.to_float64(right)
            size = float(np.abs(exact64[np.isfinite(exact64)]).max(initial=0.0))
            error, theirs = testing.max_error(result, exact64), testing.max_error(alone, exact64)
            assert error <= 2 * theirs + 2 * testing.EPSILON[element] * (size + 3 * size), what
            if method == "ulysses" and documents is None and name != "grad_sinks":
                assert torch.equal(result, alone), f"{what}: not the bits of one device"


def test_a_mesh_of_devices(four) -> None:
    for want, result, refusal in four.ask(cases.mesh):
        testing.assert_close(result, testing.to_float64(want), "float32")
        assert refusal.startswith("context_parallel: the DeviceMesh has 2 dims; one is needed")


REFUSED = {
    "tokens": "context_parallel: the ranks hold [4, 5, 4, 4] tokens; [4, 4, 4, 4] are needed",
    "heads": "context_parallel: heads_q=4 on rank 0 and 2 on rank 1",
    "dtype": "context_parallel: dtype (float32, float16, bfloat16)=0 on rank 0 and 2 on rank 1",
    "causal": "context_parallel: tokens seen on the right (-1: all)=-1 on rank 0 and 0 on rank 1",
    "own": "context_parallel: rank 1 refused its arguments",
    "alibi": "context_parallel: alibi_slopes with method='ring'",
    "packed": "context_parallel: cu_seqlens=[0, 4, 9] for 16 tokens",
    "window": "context_parallel: rank 1 refused its arguments",
    "lens": "context_parallel: rank 1 refused its arguments",
    "unshard": "context_parallel: the checksum of dtype and other sizes=",
    "sinks": "context_parallel: rank 1 refused its arguments",
    "slopes": "context_parallel: rank 1 refused its arguments",
    "timeout": "context_parallel: rank 1 refused its arguments",
    "nothing": "context_parallel: rank 1 refused its arguments",
    "gradients": "context_parallel: gradients (0: none; with ulysses 8 for q, 4 for k, 2 for v, 1 for sinks)=1",
    "no_grad": "context_parallel: gradients (0: none; with ulysses 8 for q, 4 for k, 2 for v, 1 for sinks)=1",
    "other gradients": "context_parallel: gradients (0: none; with ulysses 8 for q, 4 for k, 2 for v, 1 for sinks)=8",
    "dim": "context_parallel: rank 1 refused its arguments",
    "unshard lens": "context_parallel: rank 1 refused its arguments",
    "unshard nothing": "context_parallel: rank 1 refused its arguments",
    "calls": "context_parallel: call (attention, unshard)=0 on rank 0 and 1 on rank 1",
}
OWN = {
    "own": "ValueError: context_parallel: method='rings'; one of ring, all_gather, ulysses is needed",
    "window": "ValueError: context_parallel: window=3; a pair (left, right) of token counts",
    "lens": "ValueError: invalid literal for int()",
    "sinks": "ValueError: context_parallel: sinks is torch.int32 on cpu; torch.float32 on cpu is needed",
    "slopes": "ValueError: context_parallel: alibi_slopes is torch.int64 on cpu; torch.float32 on cpu is needed",
    "timeout": "ValueError: context_parallel: timeout='soon'; seconds > 0, or None, are needed",
    "nothing": "AttributeError: ",
    "dim": "IndexError: ",
    "unshard lens": "ValueError: invalid literal for int()",
    "unshard nothing": "AttributeError: ",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_every_rank_refuses(four, kind) -> None:
    for rank, answer in enumerate(four.ask(cases.refused, kind)):
        wanted = f"ValueError: {REFUSED[kind]}"
        wanted = OWN.get(kind, wanted) if rank == 1 else wanted
        assert isinstance(answer, str) and answer.startswith(wanted), answer


def test_no_rank_has_a_token(four) -> None:
    for shapes in four.ask(cases.empty):
        assert shapes == [[(1, 4, 0, 8), (1, 4, 0), (1, 4, 0, 8)]] * 3


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_a_dead_rank_is_an_error(tmp_path, method) -> None:
    pair = Ranks(2, tmp_path)
    try:
        answer, ended = pair.ask(cases.die, method)
        assert ended is None
        assert answer.startswith("PeerError: context_parallel: ") and "a rank ended or did not answer" in answer
    finally:
        pair.close()


def test_a_rank_that_never_comes_is_an_error(tmp_path) -> None:
    pair = Ranks(2, tmp_path)
    try:
        answer, _ = pair.ask(cases.late)
        assert answer.startswith("PeerError: context_parallel: comparing the arguments: a rank ended or did not answer")
    finally:
        pair.close()


def test_the_example_runs() -> None:
    text = cp.attention.__doc__
    test = doctest.DocTestParser().get_doctest(text, {}, "attention", None, 0)
    report: list[str] = []
    assert not doctest.DocTestRunner().run(test, out=report.append).failed, report


# --- the plan alone


def seen(q: int, k: int, left: int | None, right: int | None, bounds: tuple[int, ...]) -> bool:
    same = sum(q >= b for b in bounds) == sum(k >= b for b in bounds)
    return same and (left is None or q - k <= left) and (right is None or k - q <= right)


@pytest.mark.parametrize("kind", layout.LAYOUTS)
@pytest.mark.parametrize("bounds", [None, (0, 5, 6, 23)])
def test_every_pair_is_worked_on_once(kind, bounds) -> None:
    """The calls of all ranks cover each query and each key that it sees once, and nothing else."""
    for lens in ((6, 6, 6, 5), (0, 23), (9, 1, 13)):
        chunks = layout.chunks_of(lens, kind)
        held = [[p for span in spans for p in range(*span)] for spans in chunks]
        assert sorted(p for own in held for p in own) == list(range(23))
        for left, right in itertools.product((None, 0, 3, 30), (None, 0, 4, 30)):
            count = dict.fromkeys(itertools.product(range(23), range(23)), 0)
            for reader, owner in itertools.product(range(len(lens)), repeat=2):
                for call in layout.calls(chunks[reader], chunks[owner], left, right, bounds):
                    rows, keys = held[reader][slice(*call.q)], held[owner][slice(*call.k)]
                    low, high = call.window or (None, None)
                    high = 0 if call.causal else high
                    for (i, p), (j, key) in itertools.product(enumerate(rows), enumerate(keys)):
                        ahead = j - (i + len(keys) - len(rows))
                        if (low is None or -ahead <= low) and (high is None or ahead <= high):
                            count[p, key] += 1
            for (p, key), times in count.items():
                assert times == seen(p, key, left, right, bounds or (0,)), (kind, lens, left, right, p, key)


def test_zigzag_is_two_calls_at_most() -> None:
    """In a causal zig-zag a rank makes one call a step: all queries over half of the keys, or half over all."""
    chunks = layout.chunks_of((64,) * 4, "zigzag")
    for reader, owner in itertools.product(range(4), repeat=2):
        (call,) = layout.calls(chunks[reader], chunks[owner], None, 0)
        work = (call.q.end - call.q.begin) * (call.k.end - call.k.begin)
        assert call.causal == (reader == owner) and (reader == owner or work == 64 * 64 // 2)
        rows = layout.rows_needed((call,))
        assert rows == ((0, 32) if owner < reader else (0, 64))


def test_a_window_needs_its_neighbours_alone() -> None:
    chunks = layout.chunks_of((16,) * 8, "contiguous")
    needed = [layout.rows_needed(layout.calls(chunks[5], chunks[owner], 10, 0)) for owner in range(8)]
    assert needed == [None, None, None, None, (6, 16), (0, 16), None, None]


# --- the model of its cost


def test_the_page_is_what_the_model_gives() -> None:
    cost = pytest.importorskip("tools.context_parallel_cost", reason="the source tree is not beside the tests")
    assert cost.main(["--check"]) == 0


def test_the_model_counts_what_the_plan_sends() -> None:
    """Bytes and work of a step are those of the calls that ranks make."""
    cost = pytest.importorskip("tools.context_parallel_cost", reason="the source tree is not beside the tests")
    shape, tokens = cost.Shape(), 64
    chunks = layout.chunks_of((tokens,) * 8, "zigzag")
    plans = [layout.calls(chunks[r], chunks[(r - 3) % 8], None, 0) for r in range(8)]
    rows = max(span.end - span.begin for span in map(layout.rows_needed, plans))
    assert cost.step_bytes(shape, tokens) == 2 * rows * shape.heads_kv * shape.head_dim * 2
    for ((q, k, _, _),) in plans:
        work = 4 * shape.heads_q * shape.head_dim * (q.end - q.begin) * (k.end - k.begin)
        assert cost.step_flops(shape, tokens) == work
    tokens_needed, _ = cost.fewest_tokens(shape, cost.Rates(), cost.Rates().network)
    for n in (int(0.9 * tokens_needed), int(1.1 * tokens_needed)):
        forward, _, alone, _ = cost.ring_seconds(shape, cost.Rates(), 64 * n, 64)
        assert (forward > 1.0001 * alone) == (n < tokens_needed)
