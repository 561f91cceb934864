"""Every op, every argument as a view: any strides give what contiguous arrays give, and memory shared in part is
refused.

An op walks its rows in an order that suits the strides of one argument; whatever belongs to a row must follow. And it
may read an input after it has written an output, so what they share must be nothing, or everything where the op says
so.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from op_calls import OpCall, op_calls

CALLS = op_calls()
each_call = pytest.mark.parametrize("call", CALLS, ids=[call.name for call in CALLS])


def in_order(value: np.ndarray, order: tuple[int, ...], gap: int = 0) -> np.ndarray:
    """The same numbers, whose dims lie in memory in an order, the first one outermost, with room after the last one."""
    sizes = [value.shape[d] for d in order]
    room = np.full([*sizes[:-1], sizes[-1] + gap], -99, value.dtype)[..., : sizes[-1]]
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
    agree = close if call.name.startswith(("softmax", "log_softmax", "swiglu", "linear")) else same
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
