"""Continuous batching against one sequence at a time: the same tokens, whatever comes, waits, is preempted or
cancelled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import flashkernel as fk
from flashkernel.generate import Engine, NonFiniteLogitsError, PromptError, SamplingOptions
from flashkernel.generate.arrays import CudaArrays, HostArrays, TorchArrays
from flashkernel.generate.checkpoint import MemoryCheckpoint
from flashkernel.generate.devices import available_devices
from flashkernel.generate.model import Model, build_model
from flashkernel.generate.request import Request

HIDDEN, INNER, VOCAB = 32, 48, 61
STOP = frozenset({5, 17})
SAMPLED = SamplingOptions(temperature=1.3, top_k=20, top_p=0.9, seed=11)
PENALISED = SamplingOptions(temperature=1.3, min_p=0.02, repetition_penalty=1.3, seed=11)
EVERYTHING = SamplingOptions(
    temperature=1.2,
    top_p=0.95,
    typical_p=0.9,
    repetition_penalty=1.1,
    frequency_penalty=0.4,
    presence_penalty=-0.3,
    logit_bias={3: 2.0, 9: -np.inf},
    logprobs=4,
    seed=11,
)
KINDS = {"greedy": SamplingOptions(), "sampled": SAMPLED, "penalised": PENALISED, "everything": EVERYTHING}


def llama(arrays: HostArrays, **changes: Any) -> Model:
    """A two-layer Llama of random weights, one set for all arrays."""
    random = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * 0.3).astype(np.float32)

    tensors = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN), "lm_head.weight": normal(VOCAB, HIDDEN)}
    for i in range(2):
        at = f"model.layers.{i}."
        for name, rows in (("q", HIDDEN), ("k", HIDDEN // 2), ("v", HIDDEN // 2), ("o", HIDDEN)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = normal(rows, HIDDEN)
        tensors[f"{at}mlp.gate_proj.weight"], tensors[f"{at}mlp.up_proj.weight"] = (normal(INNER, HIDDEN) for _ in "ab")
        tensors[f"{at}mlp.down_proj.weight"] = normal(HIDDEN, INNER)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = np.ones(HIDDEN, np.float32)
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    config = dict(
        model_type="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=200,
    )
    return build_model(MemoryCheckpoint({**config, **changes}, tensors), arrays)


MODELS = {"numpy": llama(HostArrays()), "torch": llama(TorchArrays())}
ON_CPU = list(MODELS)
if "cuda" in available_devices():
    MODELS["cuda"] = llama(CudaArrays())
PROMPTS = [[1, 2, 3], list(range(10, 47)), [7], [50, 3] * 9, [*range(10, 43), 1, 2]]
# How an engine may be set up; all must give the same tokens. run_ahead is what a GPU has.
SETUPS: list[dict[str, Any]] = [
    dict(steps=1, run_ahead=False),
    dict(steps=4, run_ahead=False, prefill_chunk=7),
    dict(steps=8, run_ahead=True),
    dict(steps=3, run_ahead=True, prefix_sharing=False, max_batch=2),
]


def alone(
    kind: str, prompt: list[int], count: int, sampling: SamplingOptions, sequence: int = 0, stop: frozenset[int] = STOP
) -> list[int]:
    """The oracle: one sequence in an engine of its own, a token at a time."""
    engine = Engine(MODELS[kind], page_size=64, steps=1, run_ahead=False, prefix_sharing=False)
    request = engine.submit(prompt, max_new_tokens=count, sampling=sampling, stop_tokens=stop, sequence=sequence)
    while not request.finish:
        engine.step()
    return request.generated


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "numpy"])
def test_all_arrays_give_the_same_tokens(kind: str) -> None:
    """The oracle of the tests below is of the same arrays: this one would see tokens that are wrong in both."""
    for prompt in PROMPTS:
        assert alone(kind, prompt, 40, SamplingOptions()) == alone("numpy", prompt, 40, SamplingOptions())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("setup", SETUPS, ids=str)
@pytest.mark.parametrize("sampling", KINDS.values(), ids=KINDS)
def test_same_tokens_in_a_batch(kind: str, setup: dict[str, Any], sampling: SamplingOptions) -> None:
    engine = Engine(MODELS[kind], page_size=16, **setup)
    expected = [alone(kind, prompt, 40, sampling, i) for i, prompt in enumerate(PROMPTS)]
    for _ in range(2):  # the second time with the pages of the first in the prefix index
        got: list[list[int]] = [[] for _ in PROMPTS]
        finish: list[str | None] = [None] * len(PROMPTS)
        for event in engine.generate(PROMPTS, max_new_tokens=40, sampling=sampling, stop_tokens=STOP):
            assert finish[event.sequence] is None
            got[event.sequence].append(event.token)
            finish[event.sequence] = event.finish
        assert got == expected
        assert finish == ["stop" if tokens[-1] in STOP else "length" for tokens in expected]
        assert engine.pages_in_use == 0 and engine.idle
    assert (engine.stats.prefix_tokens > 0) == setup.get("prefix_sharing", True)


def test_numpy_and_torch_give_the_same_tokens() -> None:
    for sampling in KINDS.values():
        assert alone("numpy", PROMPTS[1], 50, sampling) == alone("torch", PROMPTS[1], 50, sampling)


@pytest.mark.parametrize("kind", MODELS)
def test_page_pressure_preempts_and_loses_nothing(kind: str) -> None:
    """Eight pages for sequences that want up to six each: the youngest give way and come back."""
    for setup in SETUPS:
        engine = Engine(MODELS[kind], page_size=16, num_pages=8, **setup)
        prompts = [[i + 1, 2 * i + 1, 3] for i in range(6)]
        got: list[list[int]] = [[] for _ in prompts]
        events = engine.generate(prompts, max_new_tokens=90, stop_tokens=frozenset(), sampling=SAMPLED)
        for event in events:
            got[event.sequence].append(event.token)
            assert engine.pages_in_use <= 8
        plain = Engine(MODELS[kind], page_size=16)
        for event in plain.generate(prompts, max_new_tokens=90, stop_tokens=frozenset(), sampling=SAMPLED):
            assert got[event.sequence].pop(0) == event.token
        assert not any(got) and engine.pages_in_use == 0
        assert plain.stats.preemptions == 0
        if engine.max_batch >= 6:
            assert engine.stats.preemptions > 0


@pytest.mark.parametrize("page, pages, chunk, lengths, new", [(64, 2, 7, (55, 54), 20), (16, 6, 1, (7, 38), 60)])
@pytest.mark.parametrize("kind", MODELS)
def test_a_growing_sequence_takes_the_pages_of_a_prompt_under_way(
    kind: str, page: int, pages: int, chunk: int, lengths: tuple[int, int], new: int
) -> None:
    """A younger prompt, computed a few tokens at a time, holds all pages that are left; it is computed again."""
    options: dict[str, Any] = dict(page_size=page, num_pages=pages, prefill_chunk=chunk)
    engine = Engine(MODELS[kind], steps=1 if page == 64 else 8, run_ahead=False, **options)
    prompts = [[i % 60 for i in range(lengths[0])], [i * 7 % 60 for i in range(lengths[1])]]
    older = engine.submit(prompts[0], max_new_tokens=new, stop_tokens=frozenset())
    while len(older.generated) < (10 if page == 64 else 1):
        engine.step()
    younger = engine.submit(prompts[1], max_new_tokens=2, stop_tokens=frozenset())
    while not engine.idle:
        engine.step()
    for request, prompt in ((older, prompts[0]), (younger, prompts[1])):
        expected = alone(kind, prompt, request.max_new_tokens, SamplingOptions(), stop=frozenset())
        assert request.generated == expected
    assert engine.pages_in_use == 0


def test_prefix_is_computed_once() -> None:
    engine = Engine(MODELS["numpy"], page_size=16)
    system = list(range(1, 41))
    prompts = [[*system, 50 + i] for i in range(6)]
    list(engine.generate(prompts, max_new_tokens=4, stop_tokens=frozenset()))
    # the first computes 41 tokens; two full pages of it serve the others
    assert engine.stats.prefix_tokens == 5 * 32 and engine.stats.prefill_tokens == 41 + 5 * 9
    text = engine.submit(prompts[0], max_new_tokens=30, stop_tokens=frozenset())
    while not text.finish:
        engine.step()
    # a next turn begins with what was generated, too: of 41 + 29 tokens in the cache, 64 fill pages
    turn = engine.submit([*text.prompt, *text.generated, 9], max_new_tokens=2)
    while not turn.finish:
        engine.step()
    assert engine.stats.prefix_tokens == 64


def test_requests_come_and_go_while_others_run() -> None:
    engine = Engine(MODELS["torch"], page_size=16, num_pages=40, steps=2, run_ahead=True)
    first = engine.submit(PROMPTS[1], max_new_tokens=60, stop_tokens=frozenset())
    for _ in range(5):
        engine.step()
    assert 0 < len(first.generated) < 60
    late = engine.submit(PROMPTS[0], max_new_tokens=20, stop_tokens=frozenset(), sequence=7)
    events = [event for _ in range(4) for _, event in engine.step()]
    assert any(event.sequence == 7 for event in events) and not first.finish
    gone = engine.submit(PROMPTS[3], max_new_tokens=60)
    engine.step()
    engine.cancel(gone)
    engine.cancel(gone)
    assert gone.finish == "cancelled"
    while not engine.idle:
        engine.step()
    greedy = SamplingOptions()
    assert first.generated[:20] == alone("torch", PROMPTS[1], 20, greedy) or STOP & set(first.generated[:20])
    assert late.finish == "length" and engine.pages_in_use == 0
    assert engine.step() == []


def test_generators_in_turns_share_a_batch() -> None:
    engine = Engine(MODELS["numpy"], page_size=16, num_pages=40)
    one = engine.generate(PROMPTS[:2], max_new_tokens=20, stop_tokens=frozenset())
    two = engine.generate(PROMPTS[2:], max_new_tokens=30, stop_tokens=frozenset())
    got: list[list[int]] = [[] for _ in PROMPTS]
    live = {0: one, 2: two}
    while live:
        for offset, events in list(live.items()):
            event = next(events, None)
            if event is None:
                del live[offset]
            else:
                got[offset + event.sequence].append(event.token)
    for prompt, tokens in zip(PROMPTS, got, strict=True):
        count = len(tokens)
        plain = Engine(MODELS["numpy"], page_size=16)
        assert [e.token for e in plain.generate([prompt], max_new_tokens=count, stop_tokens=frozenset())] == tokens


def test_a_larger_request_waits_for_a_larger_cache() -> None:
    """Without num_pages the cache is made for the requests at hand; one that needs more runs when it is idle."""
    engine = Engine(MODELS["numpy"], page_size=16)
    small = engine.submit([1, 2, 3], max_new_tokens=10, stop_tokens=frozenset())
    engine.step()
    large = engine.submit(PROMPTS[1], max_new_tokens=100, stop_tokens=frozenset())
    dropped = engine.submit(PROMPTS[1], max_new_tokens=120, stop_tokens=frozenset())
    engine.cancel(dropped)
    while not engine.idle:
        engine.step()
        if not small.finish:
            assert not large.generated
    assert len(small.generated) == 10 and len(large.generated) == 100 and not dropped.generated


def test_errors_leave_the_others_alone() -> None:
    engine = Engine(MODELS["numpy"], page_size=16, num_pages=4)
    running = engine.submit([1, 2, 3], max_new_tokens=50, stop_tokens=frozenset())
    engine.step()
    with pytest.raises(fk.OutOfPagesError, match="num_pages=4") as caught:
        engine.submit(PROMPTS[1], max_new_tokens=100)
    assert (caught.value.requested_pages, caught.value.num_pages) == (9, 4)
    with pytest.raises(PromptError, match="holds 200"):
        engine.submit(PROMPTS[1], max_new_tokens=180)
    with pytest.raises(PromptError, match="no tokens"):
        engine.submit([])
    while not running.finish:
        engine.step()
    assert len(running.generated) == 50 and engine.pages_in_use == 0
    for bad in ({"max_batch": 0}, {"steps": 0}, {"num_pages": 0}):
        with pytest.raises(ValueError, match="integer >= 1"):
            Engine(MODELS["numpy"], **bad)


def test_a_failing_step_leaks_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(MODELS["numpy"], page_size=16)
    events = engine.generate(PROMPTS, max_new_tokens=20)
    for _ in range(9):
        next(events)

    def fail(*_: Any) -> None:
        raise MemoryError("no workspace")

    with monkeypatch.context() as patch:
        patch.setattr(MODELS["numpy"], "forward", fail)
        with pytest.raises(MemoryError, match="no workspace"):
            list(events)
    assert engine.pages_in_use == 0 and engine.idle
    assert len(list(engine.generate([[1]], max_new_tokens=3, stop_tokens=frozenset()))) == 3


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_step_that_failed_can_be_tried_again(setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(MODELS["torch"], page_size=16, **setup)
    forward, calls = MODELS["torch"].forward, 0

    def fail_at_times(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 5 == 3:
            raise MemoryError("no workspace")
        return forward(*arguments)

    options = [SAMPLED if i % 2 else SamplingOptions() for i in range(len(PROMPTS))]
    requests = [
        engine.submit(prompt, max_new_tokens=40, stop_tokens=STOP, sampling=sampling)
        for prompt, sampling in zip(PROMPTS, options, strict=True)
    ]
    failures = 0
    monkeypatch.setattr(MODELS["torch"], "forward", fail_at_times)
    while not engine.idle:
        if failures > 200:  # more steps at once than go well in a row would never come to an end
            monkeypatch.undo()
        try:
            engine.step()
        except MemoryError:
            failures += 1
    monkeypatch.undo()
    assert failures > 3 and engine.pages_in_use == 0
    for request in requests:
        assert request.generated == alone("torch", request.prompt, 40, request.sampling)


class Batching(RuleBasedStateMachine):
    """Submit, step and cancel in any order, with few pages; every request ends with the tokens it has alone."""

    expected: ClassVar[dict[tuple[Any, ...], list[int]]] = {}

    @initialize(
        setup=st.sampled_from(SETUPS),
        pages=st.integers(7, 14),
        kind=st.sampled_from(ON_CPU),
    )
    def start(self, setup: dict[str, Any], pages: int, kind: str) -> None:
        self.kind, self.pages = kind, pages
        self.engine = Engine(MODELS[kind], page_size=16, num_pages=pages, **setup)
        self.requests: list[Request] = []
        self.seen: dict[int, list[int]] = {}

    @rule(
        shared=st.sampled_from([0, 20, 40]),
        own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
        count=st.integers(1, 60),
        sampled=st.booleans(),
    )
    def submit(self, shared: int, own: list[int], count: int, sampled: bool) -> None:
        prompt = list(range(1, 1 + shared)) + own
        sampling = SAMPLED if sampled else SamplingOptions()
        self.requests.append(
            self.engine.submit(prompt, max_new_tokens=count, sampling=sampling, stop_tokens=STOP, sequence=len(own))
        )

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            for request, event in self.engine.step():
                self.seen.setdefault(request.order, []).append(event.token)

    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        if self.requests:
            self.engine.cancel(self.requests[which % len(self.requests)])

    @invariant()
    def pages_are_bounded(self) -> None:
        if hasattr(self, "engine"):
            assert self.engine.pages_in_use <= self.pages

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(4000):
            if self.engine.idle:
                break
            self.step(1)
        assert self.engine.idle and self.engine.pages_in_use == 0
        for request in self.requests:
            key = (self.kind, tuple(request.prompt), request.max_new_tokens, request.sampling, request.sequence)
            if key not in self.expected:
                self.expected[key] = alone(
                    self.kind, request.prompt, request.max_new_tokens, request.sampling, request.sequence
                )
            expected = self.expected[key]
            assert self.seen.get(request.order, []) == request.generated
            if request.finish == "cancelled":
                assert request.generated == expected[: len(request.generated)]
            else:
                assert request.generated == expected
                assert request.finish == ("stop" if expected[-1] in STOP else "length")


Batching.TestCase.settings = settings(stateful_step_count=20)
TestBatching = Batching.TestCase


# --- logits that are not finite


def broken_after(monkeypatch: pytest.MonkeyPatch, model: Model, calls: int, value: float, row: int) -> None:
    """From the forward step `calls` on, one logit of one row is `value` (nan, inf), or all are (-inf)."""
    forward, count = model.forward, [0]

    def broken(*args: Any) -> Any:
        logits = forward(*args)
        count[0] += 1
        if count[0] > calls and row < len(logits):
            logits[row, slice(None) if value == -np.inf else 23] = value
        return logits

    monkeypatch.setattr(model, "forward", broken, raising=False)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sampling", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("setup", [SETUPS[0], SETUPS[2]], ids=str)
@pytest.mark.parametrize("kind", ON_CPU)
def test_logits_that_are_not_finite_are_an_error(
    kind: str, setup: dict[str, Any], sampling: SamplingOptions, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typed, with the sequence and the step; the tokens before it come, other sequences go on, no page is lost."""
    model = MODELS[kind]
    expected = [alone(kind, prompt, 12, sampling, i, frozenset()) for i, prompt in enumerate(PROMPTS[:2])]
    engine = Engine(model, page_size=16, num_pages=12, **setup)
    options: dict[str, Any] = dict(max_new_tokens=12, sampling=sampling, stop_tokens=frozenset())
    prompts = [engine.submit(prompt, sequence=i, **options) for i, prompt in enumerate(PROMPTS[:2])]
    with monkeypatch.context() as patch:
        broken_after(patch, model, 1 + 3, value, row=1)  # one prefill, then three good steps
        with pytest.raises(NonFiniteLogitsError, match=r"sequence 1 at step \d+ hold"):
            while not engine.idle:
                engine.step()
        assert prompts[1].finish == "error" and prompts[1].generated == expected[1][: len(prompts[1].generated)]
        assert prompts[1].error is not None and prompts[1].error.step == len(prompts[1].generated) >= 3
    while not engine.idle:
        engine.step()
    assert prompts[0].generated == expected[0] and engine.pages_in_use == 0
    # The same through generate; what the pages hold now disturbs nobody.
    with monkeypatch.context() as patch:
        broken_after(patch, model, 0, value, row=0)
        with pytest.raises(NonFiniteLogitsError, match="sequence 0 at step 0"):
            list(engine.generate(PROMPTS[:2], **options))
    assert engine.pages_in_use == 0 and engine.idle
    got: list[list[int]] = [[], []]
    for event in engine.generate(PROMPTS[:2], **options):
        got[event.sequence].append(event.token)
    assert got == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("arrays", [HostArrays, TorchArrays])
def test_overflow_of_16_bits_is_an_error(arrays: Any, dtype: str) -> None:
    model = llama(arrays(dtype))
    ok = Engine(model, page_size=16).generate([[1, 2, 3]], max_new_tokens=3)
    assert len(list(ok)) == 3
    model.norm[...] = model.norm * 0 + (np.nan if arrays is TorchArrays else model.arrays.weight(np.float32(np.nan)))
    with pytest.raises(NonFiniteLogitsError, match="nan"):
        list(Engine(model, page_size=16).generate([[1, 2, 3]], max_new_tokens=3))


def test_masked_logits_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["numpy"]
    forward = model.forward

    def masked(*args: Any) -> Any:
        logits = forward(*args)
        logits[:, 10:] = -np.inf
        return logits

    monkeypatch.setattr(model, "forward", masked, raising=False)
    for sampling in (SamplingOptions(), SAMPLED):
        tokens = [event.token for event in Engine(model).generate([[1, 2]], max_new_tokens=20, sampling=sampling)]
        assert max(tokens) < 10


# --- the caller chooses the tokens


@pytest.mark.parametrize("kind", MODELS)
def test_lockstep_gives_the_logits_of_the_engine(kind: str) -> None:
    """A caller that chooses greedily gets the engine's tokens; sequences may be left out; the index serves both."""
    engine = Engine(MODELS[kind], page_size=16, prefill_chunk=20)
    arrays = MODELS[kind].arrays
    expected = [alone(kind, prompt, 25, SamplingOptions()) for prompt in PROMPTS]
    for _ in range(2):
        got: list[list[int]] = [[] for _ in PROMPTS]
        with engine.lockstep(PROMPTS, 25) as batch:
            logits = arrays.to_float32(batch.prefill())
            for _ in range(25):
                running = [not tokens or tokens[-1] not in STOP for tokens in got]
                best = logits.argmax(axis=-1)
                for tokens, token, runs in zip(got, best, running, strict=True):
                    if runs:
                        tokens.append(int(token))
                running = [tokens[-1] not in STOP for tokens in got]
                if len(max(got, key=len)) == 25:
                    break
                logits = arrays.to_float32(batch.step(best, running))
        assert got == expected and engine.pages_in_use == 0
    engine.forget_prefixes()
    assert engine._scheduler is not None and engine._scheduler.cache.stats().num_pages_cached == 0


def test_lockstep_refuses_what_it_cannot_hold() -> None:
    engine = Engine(MODELS["numpy"], page_size=16, num_pages=4, max_batch=2)
    with pytest.raises(fk.OutOfPagesError, match="need 6 pages of 16 at once; the cache has num_pages=4"):
        engine.lockstep([[1], [2], [3]], 32)
    with pytest.raises(PromptError):
        engine.lockstep([[]], 3)
    request = engine.submit([1, 2, 3], max_new_tokens=9, stop_tokens=STOP)
    engine.step()
    with engine.lockstep([[1], [2], [3]], 16) as batch:  # beside a running request, and more than max_batch
        assert batch.prefill().shape == (3, VOCAB)
    while not request.finish:
        engine.step()
    assert request.generated == alone("numpy", [1, 2, 3], 9, SamplingOptions())


class Watched(TorchArrays):
    """Says whether its device is the current one."""

    is_active = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        self.is_active += 1
        try:
            yield
        finally:
            self.is_active -= 1


def test_steps_run_on_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the engine is called, the model's device is the current one: graphs and streams are those of it."""
    arrays = Watched()
    model = llama(arrays)
    forward, seen = model.forward, []

    def watched(*args: Any) -> Any:
        seen.append(arrays.is_active > 0)
        return forward(*args)

    monkeypatch.setattr(model, "forward", watched)
    engine = Engine(model, page_size=16, num_pages=32)
    list(engine.generate(PROMPTS[:2], max_new_tokens=3, stop_tokens=STOP))
    request = engine.submit(PROMPTS[0], max_new_tokens=3, stop_tokens=frozenset())
    while request.finish is None:
        engine.step()
    engine.score(PROMPTS[1])
    with engine.lockstep(PROMPTS[:2], 3) as batch:
        batch.step(batch.prefill().argmax(-1))
    assert len(seen) >= 8 and all(seen) and arrays.is_active == 0


def test_cuda_arrays_name_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, entered = TorchArrays(), list[str]()
    arrays.device, arrays.asynchronous = "cuda:1", True

    @contextlib.contextmanager
    def device(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    with arrays.active():
        pass
    assert entered == ["cuda:1"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_may_be_current() -> None:
    """A model of the first GPU while the second one is current, or was when the process captured its first graph:
    graphs were captured there, and did nothing.
    """
    torch.cuda.graph.default_capture_stream = None
    with torch.cuda.device(1), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda:1")
    expected = [alone("numpy", prompt, 12, SamplingOptions(), i) for i, prompt in enumerate(PROMPTS)]
    assert [alone("cuda", prompt, 12, SamplingOptions(), i) for i, prompt in enumerate(PROMPTS)] == expected
    with torch.cuda.device(1):
        assert [alone("cuda", prompt, 12, SamplingOptions(), i) for i, prompt in enumerate(PROMPTS)] == expected
        engine, got = Engine(MODELS["cuda"], page_size=16), [[] for _ in PROMPTS]
        for event in engine.generate(PROMPTS, max_new_tokens=12, stop_tokens=STOP):
            got[event.sequence].append(event.token)
        assert got == expected
