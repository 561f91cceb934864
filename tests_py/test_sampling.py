"""Sampling options against Transformers' processors, the formulas of OpenAI's API and log_softmax; stop strings."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as stock

from flashkernel.generate import (
    Engine,
    NonFiniteLogitsError,
    SamplingOptions,
    TextOutput,
    TextTokenizer,
    find_model,
    load_model,
)
from flashkernel.generate.arrays import HostArrays, TorchArrays
from flashkernel.generate.choice import RowChoice
from flashkernel.generate.device_sampling import draw_rows
from flashkernel.generate.request import Request
from flashkernel.generate.sampling import Sampler, adjust, draw
from flashkernel.generate.sampling_options import wanted

VOCAB = 53
ENGINE = Engine(load_model(find_model("demo"), device="cpu"), page_size=16)
TOKENIZER = TextTokenizer(find_model("demo"))
PROMPT = TOKENIZER.encode("def main(argv")


def by_transformers(logits: np.ndarray, text: list[int], options: SamplingOptions) -> np.ndarray:
    """Scores of Transformers' processors, in the order of its `generate`: float32 [vocab], -inf where not drawn."""
    processors: list[Any] = []
    if options.logit_bias:
        processors.append(stock.SequenceBiasLogitsProcessor({(t,): b for t, b in options.logit_bias}))
    if options.repetition_penalty != 1:
        processors.append(stock.RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    processors.append(stock.TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        processors.append(stock.TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        processors.append(stock.TopPLogitsWarper(options.top_p))
    if options.min_p:
        processors.append(stock.MinPLogitsWarper(options.min_p))
    if options.typical_p < 1:
        processors.append(stock.TypicalLogitsWarper(options.typical_p))
    scores = torch.from_numpy(logits)[None]
    for processor in processors:
        scores = processor(torch.tensor([text]), scores)
    return scores[0].numpy()


def drawn(scores: np.ndarray, options: SamplingOptions, count: int) -> set[int]:
    """The tokens that evenly spread numbers draw."""
    numbers = ((i + 0.5) / count for i in range(count))
    rest = (options.min_p, options.typical_p)
    return {draw(scores, options.temperature, options.top_k, options.top_p, number, *rest) for number in numbers}


@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 2, 9, VOCAB, 100]),
    top_p=st.sampled_from([0.2, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.2]),
    typical_p=st.sampled_from([0.2, 0.7, 0.95, 1.0]),
    penalty=st.sampled_from([1.0, 0.7, 1.4]),
    bias=st.sampled_from([{}, {3: -np.inf, 5: 2.5, 40: -1.0}]),
)
@settings(max_examples=150, deadline=None)
def test_draws_come_from_the_distribution_of_transformers(
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float,
    penalty: float,
    bias: dict[int, float],
) -> None:
    """The same tokens are left, and the cumulative probabilities of Transformers stand between the draws."""
    random = np.random.default_rng(seed)
    logits = (random.standard_normal(VOCAB) * 2).astype(np.float32)
    prompt, new = random.integers(0, VOCAB, 6).tolist(), random.integers(0, VOCAB, 3).tolist()
    options = SamplingOptions(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=penalty,
        logit_bias=bias,
    )
    expected = by_transformers(logits, prompt + new, options)
    scores = adjust(logits, options, prompt, new)
    kept = np.flatnonzero(np.isfinite(expected))
    likely = np.exp(expected[kept].astype(np.float64) - expected[kept].max())
    likely /= likely.sum()
    order = np.lexsort((kept, -likely))
    ends = np.cumsum(likely[order])
    rest = (options.min_p, options.typical_p)
    for token, begin, end in zip(kept[order], [0.0, *ends], ends, strict=False):
        if end - begin > 1e-4:
            for uniform in (begin + 1e-5, end - 1e-5):
                assert draw(scores, temperature, top_k, top_p, uniform, *rest) == token
    assert drawn(scores, options, 50) <= set(kept.tolist())


def test_penalties_are_the_formula_of_openai() -> None:
    """mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, with c[j] of the generated tokens alone."""
    logits = np.random.default_rng(0).standard_normal(VOCAB).astype(np.float32)
    prompt, new = [1, 1, 2], [2, 7, 7, 7, 9]
    options = SamplingOptions(frequency_penalty=0.5, presence_penalty=0.25)
    counts = Counter(new)
    expected = [x - counts[j] * 0.5 - float(counts[j] > 0) * 0.25 for j, x in enumerate(logits.tolist())]
    np.testing.assert_allclose(adjust(logits, options, prompt, new), expected, rtol=0, atol=1e-6)
    plain = adjust(logits, SamplingOptions(), prompt, new)
    assert (plain == logits).all()


@pytest.mark.parametrize("kind", [HostArrays, TorchArrays])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_adjusted_as_alone(kind: Any, dtype: str) -> None:
    """A batch of different options, one choice after the other: each row as `Sampler` has it; logprobs are those of
    log_softmax over the model's own logits.
    """
    arrays, random = kind(dtype), np.random.default_rng(1)
    rows = [
        SamplingOptions(),
        SamplingOptions(temperature=1.0, seed=3, logprobs=0),
        SamplingOptions(frequency_penalty=0.8, logprobs=5),
        SamplingOptions(temperature=0.9, presence_penalty=1.1, typical_p=0.8, seed=4),
        SamplingOptions(repetition_penalty=1.6, logit_bias={0: 1.5, 4: -np.inf}),
    ]
    prompts = [[1, 2, 3], [5], [6, 6], [7], [8, 2]]
    samplers = [Sampler(options, i, prompt) for i, (options, prompt) in enumerate(zip(rows, prompts, strict=True))]
    requests = [Request(i, i, prompt, 99, rows[i], frozenset()) for i, prompt in enumerate(prompts)]
    kind_of = wanted(rows)
    assert all(kind_of)
    choice = RowChoice(arrays, len(rows), 3, VOCAB)
    choice.reserve(kind_of)
    tokens = arrays.zeros((len(rows),), "int64")
    for _ in range(4):
        choice.load(requests, 3, kind_of, fresh=True)
        steps = []
        for step in range(3):
            logits = arrays.weight(random.standard_normal((len(rows), VOCAB)).astype(np.float32) * 3)
            exact = arrays.to_float32(logits)
            steps.append(exact)
            choice.choose(logits, len(rows), arrays.index([step], "int64"), kind_of, tokens)
            expected = [sampler(row) for sampler, row in zip(samplers, exact, strict=True)]
            assert arrays.to_host(tokens).tolist() == expected
            for request, token in zip(requests, expected, strict=True):
                request.generated.append(token)
        scores = choice.fetch_scores(3, kind_of)()
        assert scores is not None
        for step, exact in enumerate(steps):
            likely = torch.log_softmax(torch.from_numpy(exact).double(), -1)
            new = torch.tensor([request.generated[step - 3] for request in requests])
            np.testing.assert_allclose(scores.chosen[step], likely.gather(1, new[:, None])[:, 0], atol=2e-6)
            best = likely.sort(dim=-1, descending=True, stable=True)
            assert scores.ids[step].tolist() == best.indices[:, :20].tolist()
            np.testing.assert_allclose(scores.values[step], best.values[:, :20], atol=2e-6)


def collect(**options: Any) -> list[list[Any]]:
    found: list[list[Any]] = [[] for _ in range(options.get("n", 1))]
    for event in ENGINE.generate([PROMPT], **options):
        found[event.sequence].append(event)
    return found


def test_logprobs_are_those_of_score() -> None:
    sampling = SamplingOptions(temperature=1.5, seed=5, logprobs=3, frequency_penalty=1.0)
    (events,) = collect(max_new_tokens=12, sampling=sampling, stop_tokens=frozenset())
    text = PROMPT + [event.token for event in events]
    expected = ENGINE.score(text)[len(PROMPT) - 1 :]
    np.testing.assert_allclose([event.logprob for event in events], expected, atol=2e-4)
    for event in events:
        assert len(event.top) == 3 and event.top[0][1] >= event.top[1][1] >= event.top[2][1] and event.top[0][1] < 0
    (plain,) = collect(max_new_tokens=3, sampling=SamplingOptions())
    assert all(event.logprob is None and event.top == () for event in plain)


def test_n_continues_a_prompt_n_times() -> None:
    sampling = SamplingOptions(temperature=1.5, seed=5)
    together = [[e.token for e in row] for row in collect(max_new_tokens=12, sampling=sampling, n=3)]
    assert len({tuple(row) for row in together}) == 3
    for i, row in enumerate(together):
        request = ENGINE.submit(PROMPT, max_new_tokens=12, sampling=sampling, sequence=i)
        while not request.finish:
            ENGINE.step()
        assert request.generated == row
    with pytest.raises(ValueError, match=r"n=0; an integer >= 1"):
        ENGINE.generate([PROMPT], n=0)


def test_bias_and_penalties_steer_a_model() -> None:
    (events,) = collect(max_new_tokens=8, sampling=SamplingOptions(logit_bias={77: 1e4}), stop_tokens=frozenset())
    assert [event.token for event in events] == [77] * 8
    sampling = SamplingOptions(logit_bias={77: 1e4, 78: 9990.0}, frequency_penalty=4.0)  # 77 leads by 10
    (events,) = collect(max_new_tokens=8, sampling=sampling, stop_tokens=frozenset())
    tokens = [event.token for event in events]
    assert set(tokens) == {77, 78} and tokens[:2] == [77, 77]
    (events,) = collect(max_new_tokens=1, sampling=SamplingOptions())
    banned = SamplingOptions(logit_bias={events[0].token: -np.inf})
    (other,) = collect(max_new_tokens=1, sampling=banned)
    assert other[0].token != events[0].token
    vocab = ENGINE.model.vocab_size
    with pytest.raises(ValueError, match=rf"token id {vocab}; ids in \[0, {vocab}\)"):
        ENGINE.generate([PROMPT], sampling=SamplingOptions(logit_bias={vocab: 1.0}))
    with pytest.raises(ValueError, match=f"bans all {vocab} tokens"):
        ENGINE.generate([PROMPT], sampling=SamplingOptions(logit_bias=dict.fromkeys(range(vocab), -np.inf)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"typical_p": 0.0}, r"typical_p=0.0; a number in \(0, 1\]"),
        ({"frequency_penalty": math.inf}, "frequency_penalty=inf; a finite number"),
        ({"presence_penalty": math.nan}, "presence_penalty=nan; a finite number"),
        ({"logit_bias": {1: math.nan}}, r"logit_bias\[1\]=nan; a finite number, or -inf, is needed"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias=-1; a token id >= 0"),
        ({"logprobs": 21}, r"logprobs=21; an integer in \[0, 20\]"),
    ],
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SamplingOptions(**options)


def test_options_can_be_compared_and_hashed() -> None:
    one, other = (SamplingOptions(logit_bias=bias) for bias in ({3: 1, 2: 4.0}, {2: 4, 3: 1.0}))
    assert one == other and hash(one) == hash(other) and one.logit_bias == ((2, 4.0), (3, 1.0))


def test_nan_with_everything_is_an_error() -> None:
    sampler = Sampler(SamplingOptions(temperature=1.0, typical_p=0.5, frequency_penalty=1.0), 0, [1])
    with pytest.raises(NonFiniteLogitsError):
        sampler(np.full(VOCAB, np.nan, np.float32))


@given(
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.3, 2.0, 6.0]),
    top_k=st.sampled_from([0, 40, 400]),
    top_p=st.sampled_from([0.6, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.002]),
    typical_p=st.sampled_from([0.9, 1.0]),
    ties=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_draws_that_sort_little_are_those_that_sort_all(
    seed: int, scale: float, top_k: int, top_p: float, min_p: float, typical_p: float, ties: bool
) -> None:
    """With a larger vocabulary only the best tokens are sorted; torch's path sorts all of them."""
    random = np.random.default_rng(seed)
    logits = (random.standard_normal((8, 3000)) * scale).astype(np.float32)
    logits = np.round(logits) if ties else logits
    logits[3, :2990] = -np.inf
    numbers = random.random(8)
    rest = (min_p, typical_p)
    columns = [torch.full((8,), value, dtype=torch.float64) for value in (0.9, top_k, top_p, *rest)]
    got = draw_rows(torch.from_numpy(logits), *columns[:3], torch.from_numpy(numbers), *columns[3:]).tolist()
    assert got == [draw(row, 0.9, top_k, top_p, number, *rest) for row, number in zip(logits, numbers, strict=True)]


# --- stop strings


@given(
    text=st.text("abc", max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    seed=st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_text_output_ends_before_the_first_stop_string(text: str, stops: list[str], seed: int) -> None:
    """However the text is cut into tokens; nothing is shown that is taken back later."""
    output, shown, rest = TextOutput(TOKENIZER, stop=stops), "", text
    random = np.random.default_rng(seed)
    while rest and not output.stopped:
        part = rest[: int(random.integers(1, 4))]
        for token in TOKENIZER.encode(part):
            shown += output.put(token)
            assert text.startswith(shown)
        rest = rest[len(part) :]
    read = text[: len(text) - len(rest)]
    shown += output.end()
    places = [read.find(stop) for stop in stops if stop in read]
    assert output.stopped == bool(places)
    if not places:
        assert shown == read
    else:  # of several stop strings in one token's text the first counts; one that ends later, in a later token, not
        assert text.startswith(shown) and any(text[len(shown) :].startswith(stop) for stop in stops)
        assert not any(stop in shown for stop in stops)


def test_stop_strings_end_a_sequence() -> None:
    (events,) = collect(max_new_tokens=60, stop_tokens=frozenset())
    text = TOKENIZER.decode([event.token for event in events])
    stop = text[10:13]
    options: dict[str, Any] = dict(max_new_tokens=60, stop_tokens=frozenset(), stop_strings=[stop, "\0"])
    (stopped,) = collect(tokenizer=TOKENIZER, **options)
    assert stopped == [*events[: len(stopped) - 1], stopped[-1]] and len(stopped) < len(events)
    assert stopped[-1].finish == "stop" and stop in TOKENIZER.decode([event.token for event in stopped])
    assert stop not in TOKENIZER.decode([event.token for event in stopped[:-1]])
    assert ENGINE.pages_in_use == 0
    with pytest.raises(ValueError, match="stop_strings without a tokenizer"):
        ENGINE.generate([PROMPT], stop_strings=["a"])
    with pytest.raises(ValueError, match="one or more characters"):
        ENGINE.generate([PROMPT], stop_strings=[""], tokenizer=TOKENIZER)


def test_stock_engine_gives_the_same_events() -> None:
    """Stock Transformers' logits, the same options: tokens, finish, logprobs."""
    from flashkernel.generate.stock import StockEngine

    sampling = SamplingOptions(
        temperature=0.9, typical_p=0.9, frequency_penalty=0.3, seed=2, logprobs=2, logit_bias={5: -3.0}
    )
    options: dict[str, Any] = dict(max_new_tokens=24, sampling=sampling, n=2, stop_strings=["("], tokenizer=TOKENIZER)
    expected = list(StockEngine(find_model("demo"), device="cpu").generate([PROMPT], **options))
    got = list(ENGINE.generate([PROMPT], **options))
    assert sorted((e.sequence, e.token, e.finish) for e in got) == sorted(
        (e.sequence, e.token, e.finish) for e in expected
    )
    key = lambda event: (event.sequence, event.logprob)
    for one, other in zip(sorted(got, key=key), sorted(expected, key=key), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
