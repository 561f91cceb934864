"""Every op, every argument as a view: any strides give what contiguous arrays give, and memory shared in part is
refused.

An op walks its rows in an order that suits the strides of one argument; whatever belongs to a row must follow. And it
may read an input after it has written an output, so what they share must be nothing, or everything where the op says
so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashkernel as fk
import op_calls as calls_of
from conftest import HAS_TRITON_WHEELS, NO_TRITON_WHEELS
from flashkernel.ops import OPS
from op_calls import OpCall, op_calls
from test_op_tables import NO_TWIN

CALLS = op_calls()
each_call = pytest.mark.parametrize("call", CALLS, ids=[call.name for call in CALLS])


def test_every_op_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called = set()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            called.add(name)
            return getattr(fk, name)

    monkeypatch.setattr(calls_of, "fk", Watched())
    for call in CALLS:
        call.results(call.arguments())
    assert called >= set(OPS), f"no call in op_calls.py of {sorted(set(OPS) - called)}"


def in_order(value: np.ndarray, order: tuple[int, ...], gap: int = 0) -> np.ndarray:
    """The same numbers, whose dims lie in memory in an order, the first one outermost, with room after the last one."""
    sizes = [value.shape[d] for d in order]
    room = np.full([*sizes[:-1], sizes[-1] + gap], np.array(-99).astype(value.dtype))[..., : sizes[-1]]
    view = room.transpose(np.argsort(order))
    view[...] = value
    return view


def backwards(value: np.ndarray, dim: int) -> np.ndarray:
    return np.flip(np.flip(value, dim).copy(), dim)


def layouts(value: np.ndarray, keep_last: bool) -> list[np.ndarray]:
    """Views of the value in every order of its dims, half of them with gaps, and with each dim from its end."""
    free = value.ndim - keep_last
    last = (value.ndim - 1,) if keep_last else ()
    orders = itertools.permutations(range(free))
    views = [in_order(value, (*order, *last), 5 * (i % 2)) for i, order in enumerate(orders)]
    return views + [backwards(value, d) for d in range(free)]


def same(got: list[np.ndarray], want: list[np.ndarray]) -> bool:
    return len(got) == len(want) and all(a.tobytes() == b.tobytes() for a, b in zip(got, want, strict=True))


def close(got: list[np.ndarray], want: list[np.ndarray]) -> bool:
    return all(np.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True) for a, b in zip(got, want, strict=True))


@each_call
def test_strides_change_no_bit(call: OpCall) -> None:
    arguments = call.arguments()
    want = call.results(call.arguments())
    # Exponentials of elements that do not lie side by side are not computed by vectors, and rows that come in runs of
    # few are multiplied by another kernel of linear: the last bits may differ.
    names = "softmax", "log_softmax", "swiglu", "linear", "quantized_linear", "fused_linear", "qkv_append"
    agree = close if call.name.startswith(names) else same
    tried = 0
    for name, value in arguments.items():
        if name in call.flat or value.ndim == 0:
            continue
        for view in layouts(value, name in call.rows):
            got = call.results({**call.arguments(), name: view})
            assert agree(got, want), f"{name} with strides {view.strides}"
            tried += 1
    rng = np.random.default_rng(0)
    for _ in range(40):  # several at once
        chosen = call.arguments()
        for name, value in chosen.items():
            if name not in call.flat and value.ndim:
                views = layouts(value, name in call.rows)
                chosen[name] = views[rng.integers(len(views))]
        strides = {name: value.strides for name, value in chosen.items()}
        assert agree(call.results(chosen), want), strides
        tried += 1
    assert tried > 40


def shifted_pairs(first: np.ndarray, second: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two arrays of these shapes in one buffer, in more and less overlap, and interleaved without any."""
    pairs = []
    size = max(first.itemsize, second.itemsize)
    total = first.nbytes + second.nbytes + 64 * size

    def place(value: np.ndarray, buffer: np.ndarray, byte: int) -> np.ndarray:
        view = buffer[byte : byte + value.nbytes].view(value.dtype).reshape(value.shape)
        view[...] = value
        return view

    for shift in (0, size, 4 * size, 16 * size, second.nbytes - size, second.nbytes):
        shift = max(shift, 0) // size * size
        buffer = np.zeros(total + shift, np.uint8)
        b = place(second, buffer, 0)
        pairs.append((place(first, buffer, shift), b))
    if first.ndim and second.ndim and first.dtype == second.dtype:
        # Rows of one next to rows of the other, with the columns of both in common but for `common` of them.
        for common in (0, 1):
            width = first.shape[-1] + second.shape[-1] - common
            rows = max(first.size // max(first.shape[-1], 1), second.size // max(second.shape[-1], 1))
            buffer = np.zeros((rows, width), first.dtype)
            views = []
            for value, at in ((second, 0), (first, second.shape[-1] - common)):
                count = value.size // value.shape[-1]
                view = buffer[:count, at : at + value.shape[-1]]
                view = np.lib.stride_tricks.as_strided(
                    view,
                    value.shape,
                    [*(np.array(value.strides[:-1]) // (value.shape[-1] * value.itemsize) * width * value.itemsize),
                     value.itemsize],
                )  # fmt: skip
                view[...] = value
                views.append(view)
            pairs.append((views[1], views[0]))
    return pairs


@each_call
def test_partial_overlap_is_refused_or_harmless(call: OpCall) -> None:
    """Whatever two arguments share: the op refuses and has written nothing, or the result is that of copies."""
    refused = served = 0
    for name in call.written:
        for other in call.arguments():
            if other == name:
                continue
            arguments = call.arguments()
            for ours, theirs in shifted_pairs(arguments[name], arguments[other]):
                together = {**arguments, name: ours, other: theirs}
                apart = {key: np.array(value) for key, value in together.items()}
                before = {key: np.array(value) for key, value in together.items()}
                try:
                    got = call.results(together)
                except ValueError as error:
                    refused += 1
                    text = str(error)
                    assert any(part in text for part in ("share", "contiguous", "fold", "needs", "lens")), text
                    for key, value in together.items():
                        assert value.tobytes() == before[key].tobytes(), f"{key} changed by a refused call: {text}"
                    continue
                served += 1
                # Served with memory in common only where the op says so: the very same tensor.
                assert same(got, call.results(apart)), f"{name} and {other}, strides {ours.strides} {theirs.strides}"
    assert refused and served or not call.written


@each_call
def test_a_written_tensor_names_no_element_twice(call: OpCall) -> None:
    expect_refused_overlap_within(call)


def expect_refused_overlap_within(call: OpCall) -> None:
    """Dims that share memory, rows that run into the next one, strides (1, 1)."""
    for name, value in call.written.items():
        contiguous = np.array(value.strides)
        for dim in range(value.ndim - 1):
            for stride in (0, contiguous[dim] - value.itemsize, value.itemsize):
                arguments = call.arguments()
                strides = contiguous.copy()
                strides[dim] = stride
                room = np.full(value.size, 3, value.dtype)
                arguments[name] = np.lib.stride_tricks.as_strided(room, value.shape, strides)
                before = {key: np.array(given) for key, given in arguments.items()}
                with pytest.raises(ValueError, match="overlap itself"):
                    call.results(arguments)
                for key, given in arguments.items():
                    assert given.tobytes() == before[key].tobytes(), f"{key} changed by a refused call"


class Triton:
    """Stands in for the module flashkernel: the Triton ops on the memory of NumPy arrays, in the interpreter."""

    def __getattr__(self, name: str) -> Any:
        import torch

        import flashkernel.triton as fk_triton

        def each(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
            if isinstance(value, dict):
                return {key: each(part, kind, change) for key, part in value.items()}
            if isinstance(value, tuple):
                return tuple(each(part, kind, change) for part in value)
            return change(value) if isinstance(value, kind) else value

        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = each((args, kwargs), np.ndarray, torch.from_numpy)
            return each(getattr(fk_triton, name)(*args, **kwargs), torch.Tensor, torch.Tensor.numpy)

        return run


TRITON_CALLS = [call for call in CALLS if call.written and call.name not in NO_TWIN]
each_triton_call = pytest.mark.parametrize("call", TRITON_CALLS, ids=[call.name for call in TRITON_CALLS])


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_TRITON_WHEELS:
        pytest.skip(NO_TRITON_WHEELS)
    import flashkernel.triton as fk_triton

    if not fk_triton.IS_INTERPRETED:
        pytest.skip("the arrays are on the CPU; the checks, on the host, are the interpreter's")
    monkeypatch.setattr(calls_of, "fk", Triton())


@each_triton_call
def test_triton_refuses_the_overlap_that_the_library_refuses(call: OpCall, triton: None) -> None:
    """A refused call writes nothing, and a call that both serve gives the result of copies."""
    refused = 0
    for name in call.written:
        tried = False
        for other in call.arguments():
            if other == name:
                continue
            given = call.arguments()
            for ours, theirs in shifted_pairs(given[name], given[other]):
                together = {**given, name: ours, other: theirs}
                before = {key: np.array(value) for key, value in together.items()}
                refusal = refusal_by_the_library(call, before, together)
                if refusal is not None:
                    if "share" not in refusal:  # strides that this argument may not have
                        continue
                    with pytest.raises(ValueError, match="share"):
                        call.results(together)
                    refused += 1
                    for key, value in together.items():
                        assert value.tobytes() == before[key].tobytes(), f"{key} changed by a refused call"
                elif not tried or np.shares_memory(ours, theirs):  # the interpreter takes its time
                    tried = True
                    apart = {key: np.array(value) for key, value in together.items()}
                    assert same(call.results(together), call.results(apart)), f"{name} and {other}"
    assert refused


def refusal_by_the_library(call: OpCall, before: dict[str, np.ndarray], together: dict[str, np.ndarray]) -> str | None:
    """What the library says to these arguments, which then hold again what they held before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls_of, "fk", fk)
        try:
            call.results(together)
        except ValueError as error:
            return str(error)
    for key, value in together.items():
        value[...] = before[key]
    return None


@each_triton_call
def test_what_triton_writes_names_no_element_twice(call: OpCall, triton: None) -> None:
    expect_refused_overlap_within(call)


def test_triton_tells_shared_memory_exactly() -> None:
    """Random small views: the answer is compared with the addresses of all of their elements."""
    if not HAS_TRITON_WHEELS:
        pytest.skip(NO_TRITON_WHEELS)
    import torch

    from flashkernel.triton._overlap import overlaps_itself, shared_memory

    rng = np.random.default_rng(0)
    room = torch.zeros(4096, dtype=torch.uint8)
    counts = {(both, verdict): 0 for both in (False, True) for verdict in (False, True)}

    def view() -> tuple[Any, list[int]]:
        dtype = (torch.uint8, torch.int16, torch.float32)[rng.integers(3)]
        dims = int(rng.integers(0, 4))
        shape, strides = rng.integers(0 if rng.random() < 0.1 else 1, 5, dims), rng.integers(0, 14, dims)
        x = room.view(dtype).as_strided(shape.tolist(), strides.tolist(), int(rng.integers(0, 40)))
        indices = np.indices(tuple(shape)).reshape(dims, -1) if dims else np.zeros((1, 1), int)
        steps = strides if dims else np.zeros(1, int)
        return x, ((x.storage_offset() + steps @ indices) * x.element_size()).tolist()

    for _ in range(8000):
        (a, starts), (b, other_starts) = view(), view()
        ours = {start + byte for start in starts for byte in range(a.element_size())}
        theirs = {start + byte for start in other_starts for byte in range(b.element_size())}
        assert shared_memory(a, b) == bool(ours & theirs), (a.shape, a.stride(), b.shape, b.stride())
        assert overlaps_itself(a) == (len(set(starts)) < len(starts)), (a.shape, a.stride())
        counts[True, bool(ours & theirs)] += 1
        counts[False, len(set(starts)) < len(starts)] += 1
    assert min(counts.values()) > 300
