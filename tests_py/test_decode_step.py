"""The decode step that a CUDA graph holds: fixed arrays, and nothing that the host reads."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import flashkernel as fk
from flashkernel.generate import Engine, SamplingOptions
from flashkernel.generate.decode import (
    Decoder,
    DecodeState,
    Row,
    common_pages,
    decode_step,
    row_bucket,
    wanted_by,
)
from flashkernel.generate.device_sampling import draw_rows, penalise_rows
from flashkernel.generate.request import Request
from flashkernel.generate.sampling import draw, penalise
from flashkernel.generate.sampling_options import Wanted, wanted
from test_scheduler import EVERYTHING, KINDS, MODELS, PROMPTS, SAMPLED, STOP, VOCAB, alone


class NoHostReads(TorchDispatchMode):
    """Fails on torch ops whose result the host has to wait for, or whose shape depends on values; keeps what was
    called.
    """

    FORBIDDEN = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "unique",
        "bincount",
        "repeat_interleave.Tensor",
        "equal",
    )

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(f"aten.{bad}" in name for bad in self.FORBIDDEN), f"{name} waits for the device"
        result = func(*args, **(kwargs or {}))
        shapes = tuple(tuple(a.shape) for a in (*args, result) if isinstance(a, torch.Tensor))
        self.calls.append((name, shapes))
        return result


@pytest.fixture
def no_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise AssertionError("a decode step reads a tensor on the host")

    for name in ("numpy", "tolist", "item", "cpu", "__array__", "__bool__", "__int__", "__index__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("rows, common", [(1, 0), (4, 0), (4, 1)])
def test_a_step_is_fit_for_a_graph(rows: int, common: int, options: SamplingOptions, no_conversions: None) -> None:
    """Two steps with other lengths, pages and rows in use: the same calls on the same shapes, static arrays in place,
    and no value that the host reads. A graph of the first would therefore do what the second does.
    """
    model = MODELS["torch"]
    pool = fk.KvPagePool(12, model.heads_kv, model.head_dim, page_size=16, num_layers=2, dtype="float32")
    state = DecodeState(model.arrays, rows, 5, 3, VOCAB)
    kind = wanted([options])
    state.choice.reserve(kind)

    def request() -> Request:
        return Request(1, 0, [1], 9, options, frozenset())

    decode_step(
        model, pool, state, rows, kind, common > 0
    )  # a process's first call makes what later ones find, as a warm-up does
    traces, addresses = [], []
    for length in (19, 40):
        row = Row(request(), length, np.arange(length, length + 2), np.arange(1 + length // 16, dtype=np.int32))
        loaded = [row, *[None] * (rows - 1)]
        assert wanted_by(loaded) == kind
        state.load(loaded, 2, np.full(rows, 7), common * (length // 16), 16)
        with NoHostReads() as mode:
            decode_step(model, pool, state, rows, kind, common > 0)
        traces.append(mode.calls)
        choice = state.choice
        statics = [state.common_table, state.own_table, state.own_lengths, state.common_tokens]
        statics += [state.control, state.table, state.tokens, state.history, state.positions, state.step, state.chosen]
        statics += [
            choice.numbers,
            choice.integers,
            choice.options,
            choice.history,
            choice.bias,
            *(choice.scores or ()),
        ]
        addresses.append([tensor.data_ptr() for tensor in statics if tensor is not None])
    assert traces[0] == traces[1] and traces[0]
    assert addresses[0] == addresses[1]


def test_steps_move_on_by_themselves() -> None:
    """Three steps from one load: positions, lengths and slots follow, parked rows stay where they are."""
    model = MODELS["torch"]
    pool = fk.KvPagePool(4, model.heads_kv, model.head_dim, page_size=16, num_layers=2, dtype="float32")
    for layer in range(2):  # the keys before the row's first token are in memory that nobody has written
        np.asarray(pool.k_pages(layer))[:] = 0
        np.asarray(pool.v_pages(layer))[:] = 0
    decoder = Decoder(model, pool, rows=4, width=2, steps=3)
    request = Request(1, 0, [1], 9, SamplingOptions(), frozenset())
    row = Row(request, 15, np.array([15, 48, 49]), np.array([0, 3], np.int32))
    tokens, logits, _ = decoder.run([row, None, None], 3, np.array([7, 0, 0]))()
    assert logits.shape == tokens.shape and np.isfinite(logits).all()
    state = decoder.state
    assert tokens.shape == (3, 4) and tokens[2].tolist() == state.tokens.tolist()
    assert state.positions.tolist() == [17, 0, 0, 0] and state.lengths.tolist() == [18, 0, 0, 0]
    assert state.step.tolist() == [2]
    written = np.abs(np.asarray(pool.k_pages(0))).sum(axis=(2, 3)) > 0
    assert written[0, 15] and written[3, :2].all()


def test_a_parked_step_writes_no_key() -> None:
    model = MODELS["numpy"]
    pool = fk.KvPagePool(2, model.heads_kv, model.head_dim, page_size=16, num_layers=2, dtype="float32")
    for layer in range(2):
        pool.k_pages(layer)[...] = pool.v_pages(layer)[...] = 7
    state = DecodeState(model.arrays, 3, 2, 2, VOCAB)
    for _ in range(2):
        decode_step(model, pool, state, 3, Wanted())
    assert all((pages(layer) == 7).all() for layer in range(2) for pages in (pool.k_pages, pool.v_pages))
    assert state.lengths.tolist() == [0, 0, 0] and ((state.tokens >= 0) & (state.tokens < VOCAB)).all()


def test_common_pages() -> None:
    request = Request(1, 0, [1], 9, SamplingOptions(), frozenset())

    def row(length: int, *pages: int) -> Row:
        return Row(request, length, np.empty(0, np.int64), np.array(pages, np.int32))

    rows = [row(40, 3, 1, 5), None, row(50, 3, 1, 6, 7), row(33, 3, 1, 5)]
    assert common_pages(rows, 16) == 2
    assert common_pages([*rows, row(31, 3, 1)], 16) == 1  # its second page is not full
    assert common_pages([*rows, row(40, 3, 2, 5)], 16) == 1
    assert common_pages([*rows, row(40, 4, 1, 5)], 16) == 0
    assert common_pages([row(40, 3, 1, 5), None], 16) == 0 and common_pages([], 16) == 0


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_common_pages_are_read_once(model: Any, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that begin alike: the same tokens as from steps that read whole tables, and every step is a cascade."""
    calls: list[int] = []
    cascade = fk.attention_cascade

    def counted(q: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(q.shape[0])
        return cascade(q, *args, **kwargs)

    monkeypatch.setattr(fk, "attention_cascade", counted)
    begin = [(7 * i) % VOCAB for i in range(50)]
    prompts = [[*begin, *more] for more in ([1], [2, 3], [9] * 20, [4])]

    def tokens() -> list[Any]:
        engine = Engine(model, page_size=16, steps=steps, max_batch=4)
        list(engine.generate([begin], max_new_tokens=1))  # its pages are those of the others
        events = list(engine.generate(prompts, max_new_tokens=6, stop_tokens=frozenset()))
        return sorted(((event.sequence, event.token) for event in events), key=lambda pair: pair[0])

    expected = tokens()
    assert not calls  # so few bytes are not worth it
    monkeypatch.setattr("flashkernel.generate.decode.WORTH_SHARING_BYTES", {False: 1, True: 1})
    assert tokens() == expected
    assert calls.count(4) >= 2
    calls.clear()
    with fk.invariant():
        tokens()
    assert not calls


def test_row_buckets() -> None:
    buckets = [row_bucket(rows) for rows in range(1, 65)]
    assert all(bucket >= rows for rows, bucket in enumerate(buckets, 1)) and buckets == sorted(buckets)
    assert sorted(set(buckets)) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 7, 60, 61, 100]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
    uniform=st.sampled_from([0.0, 0.2, 0.5, 0.999999]),
    min_p=st.sampled_from([0.0, 0.07, 0.4, 1.0]),
    penalty=st.sampled_from([1.0, 0.8, 1.3]),
    typical_p=st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
    ties=st.booleans(),
)
@settings(max_examples=300)
def test_device_sampling_draws_what_the_host_draws(
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    uniform: float,
    min_p: float,
    penalty: float,
    typical_p: float,
    ties: bool,
) -> None:
    random = np.random.default_rng(seed)
    logits = random.standard_normal((3, VOCAB)).astype(np.float32) * 4
    logits = np.round(logits) if ties else logits
    logits[1, :30] = -np.inf
    seen = random.random((3, VOCAB)) < 0.3
    penalised = [penalise(row, np.flatnonzero(held), penalty) for row, held in zip(logits, seen, strict=True)]
    scores = penalise_rows(torch.from_numpy(logits), torch.from_numpy(seen), torch.full((3,), penalty).double())
    assert (scores.numpy() == np.stack(penalised)).all()
    options = (temperature, top_k, top_p, uniform, min_p, typical_p)
    columns = [torch.full((3,), value, dtype=torch.float64) for value in options]
    got = draw_rows(scores, *columns[: 6 if typical_p < 1 else 5]).tolist()
    assert got == [draw(row, *options) for row in penalised]


def launches(name: str) -> dict[str, int]:
    """How often each op is called in a step of one row of a model with two layers."""
    pytest.importorskip("transformers")
    from flashkernel.bench.e2e import build
    from flashkernel.integrations.accelerate import accelerate

    engine = accelerate(build(name, "float32", "cpu", quick=True)).flashkernel
    list(engine.generate([[1, 2]], max_new_tokens=2))
    scheduler = engine._scheduler
    scheduler.decoder.state.park()
    before = {kernel.id: kernel.calls for kernel in fk.kernels()}
    with NoHostReads() as mode:
        decode_step(engine.model, scheduler.pool, scheduler.decoder.state, 1, Wanted())
    found: dict[str, int] = {}
    for kernel in fk.kernels():
        if kernel.calls > before[kernel.id]:
            found[kernel.op] = found.get(kernel.op, 0) + kernel.calls - before[kernel.id]
    views = ("empty", "select.", "slice", "view", "alias", "unsqueeze")  # nothing for a GPU to do
    found["torch"] = sum(not call[0].startswith(tuple(f"aten.{view}" for view in views)) for call in mode.calls)
    return found


@pytest.mark.parametrize(
    ("name", "composed"),
    [
        # Without RoPE the queries and the keys and values are two products.
        ("gpt2", {"norm": 7, "linear": 11, "kv_append": 2, "add": 5, "torch": 7}),
        ("llama-1b", {"norm": 5, "linear": 9, "kv_append": 2, "add": 4, "swiglu": 2, "torch": 6}),
    ],
)
def test_launches_of_a_fused_step(name: str, composed: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other table of lab/notebooks/engine_step.md: what a GPU runs for few rows. On the CPU an op is others."""
    from flashkernel.generate.model import Model

    monkeypatch.setattr(Model, "fused", True)
    assert launches(name) == {"qkv_append": 2, "fused_linear": 6, "attention_fwd": 2, "reduce": 1, **composed}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", {"norm": 5, "linear": 9, "kv_append": 2, "attention_fwd": 2, "add": 1, "reduce": 1, "torch": 7}),
        (
            "llama-1b",
            {"norm": 5, "linear": 9, "kv_append": 2, "attention_fwd": 2, "swiglu": 2, "reduce": 1, "torch": 6},
        ),
    ],
)
def test_launches_of_a_step(name: str, expected: dict[str, int]) -> None:
    """What lab/notebooks/engine_step.md counts, for two layers: an op more is a launch more in every layer."""
    assert launches(name) == expected


def test_a_capture_changes_nothing_that_steps_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture's own logic, with stand-ins for torch.cuda: a graph that runs its step when it is replayed. Warm-up
    and capture leave tokens, counters and pages as they were, also in the middle of a generation; the tokens are those
    of eager steps.
    """
    import contextlib

    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

    class Graph:
        current: Any = None
        steps: ClassVar[list[Any]] = []

        def replay(self) -> None:
            self.steps[self.number]()

    @contextlib.contextmanager
    def capturing(graph: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Any:
        assert pool == "memory" and capture_error_mode == "thread_local"
        graph.number = len(Graph.steps)
        yield

    parked: list[bool] = []
    prepare = Decoder._capture

    def capture(self: Decoder, step: Any) -> Any:
        def watched() -> None:
            parked.append(not self.state.increments.any() and bool((self.state.slots_ahead == -1).all()))
            step()

        before = self.state.control.clone(), self.state.tokens.clone()
        replay = prepare(self, watched)
        Graph.steps.append(step)
        assert torch.equal(before[0], self.state.control) and torch.equal(before[1], self.state.tokens)
        return replay

    monkeypatch.setattr(Decoder, "_capture", capture)
    for name, value in {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda _: contextlib.nullcontext(),
        "graph_pool_handle": lambda: "memory",
        "CUDAGraph": Graph,
        "graph": capturing,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for sampling in (SamplingOptions(), SAMPLED, EVERYTHING):
        expected = [alone("torch", prompt, 30, sampling, i) for i, prompt in enumerate(PROMPTS)]
        engine = Engine(MODELS["torch"], page_size=16, graphs=True, steps=3, run_ahead=True)
        got: list[list[int]] = [[] for _ in PROMPTS]
        for event in engine.generate(PROMPTS, max_new_tokens=30, sampling=sampling, stop_tokens=STOP):
            got[event.sequence].append(event.token)
        assert got == expected
    assert len(Graph.steps) >= 4 and len(parked) == 3 * len(Graph.steps) and all(parked)
