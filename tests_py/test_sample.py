"""sample: tokens against the oracle that sorts, draws against exact probabilities, and every refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashkernel as fk
from conftest import FRAMEWORKS, TRITON, f64
from flashkernel import reference
from flashkernel.generate.sampling import Draws, SamplingOptions

ROWS, VOCAB = 40, 700


def options(random: np.random.Generator, rows: int = ROWS) -> dict[str, np.ndarray]:
    """Options that differ from row to row; some rows are greedy."""
    return {
        "temperature": random.choice([0.0, 0.25, 0.75, 1.0, 3.0], rows).astype(np.float32),
        "top_k": random.choice([0, 1, 3, 40, VOCAB + 5], rows).astype(np.int32),
        "top_p": random.choice([0.0625, 0.5, 0.875, 1.0], rows).astype(np.float32),
        "min_p": random.choice([0.0, 0.03125, 0.5, 1.0, 1.5, np.inf], rows).astype(np.float32),
        "seed": random.integers(-(2**63), 2**63, rows),
        "offset": random.integers(0, 2**40, rows),
    }


def tables(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Bias and penalties by halves and quarters, so that float32 has no rounding but where logits are divided."""
    return {
        "bias": np.where(random.random((ROWS, VOCAB)) < 0.1, -np.inf, 0.5).astype(np.float32),
        "history": (random.integers(0, 8, (ROWS, VOCAB)) * (random.random((ROWS, VOCAB)) < 0.2)).astype(np.int32),
        "repetition_penalty": random.choice([1.0, 1.25, 0.5], ROWS).astype(np.float32),
        "frequency_penalty": random.choice([0.0, 0.5, -0.25], ROWS).astype(np.float32),
        "presence_penalty": random.choice([0.0, 1.0], ROWS).astype(np.float32),
    }


@pytest.mark.parametrize("make", [name for name in FRAMEWORKS if name is not TRITON], indirect=True)  # it has no twin
@pytest.mark.parametrize("adjusted", [False, True])
@pytest.mark.parametrize("step", [0.0, 0.5], ids=["distinct", "ties"])
def test_tokens_are_those_of_a_sort(make: Any, step: float, adjusted: bool) -> None:
    random = np.random.default_rng([int(adjusted), int(step * 2)])
    values = random.standard_normal((ROWS, VOCAB)) * 3
    logits = make.array(np.round(values / step) * step if step else values)
    given = options(random) | (tables(random) if adjusted else {})
    arrays = {
        name: make.array(value, str(value.dtype)) if value.dtype == np.float32 else make.index(value, str(value.dtype))
        for name, value in given.items()
    }
    got = np.asarray(f64(fk.sample(logits, **arrays, **make.kwargs)), np.int64)
    np.testing.assert_array_equal(got, reference.sample(f64(logits), **given))


@pytest.mark.parametrize(
    "limits", [{}, {"top_k": 4}, {"top_p": 0.75}, {"min_p": 0.125}, {"top_k": 6, "top_p": 0.875, "min_p": 0.0625}]
)
def test_draws_have_the_exact_distribution(limits: dict[str, float]) -> None:
    """Chi-square of 40,000 draws; probabilities by hand."""
    likely = np.array([0.05, 0.3, 0.08, 0.2, 0.02, 0.1, 0.15, 0.1])
    count, temperature = 40000, 0.75
    exact = likely ** (1 / temperature)
    exact /= exact.sum()
    order = np.argsort(-exact, kind="stable")
    if "top_k" in limits:
        exact[exact < exact[order[int(limits["top_k"]) - 1]]] = 0
    if "top_p" in limits:
        before = np.cumsum(exact[order]) - exact[order]
        exact[order[before >= limits["top_p"] * exact.sum()]] = 0
    exact[exact < limits.get("min_p", 0) * exact.max()] = 0
    exact /= exact.sum()
    dtypes = {"top_k": np.int64}
    arrays = {name: np.full(count, value, dtypes.get(name, np.float32)) for name, value in limits.items()}
    logits = np.broadcast_to(np.log(likely).astype(np.float32), (count, 8)).copy()
    drawn = fk.sample(logits, np.full(count, temperature, np.float32), **arrays, offset=np.arange(count))
    found, expected = np.bincount(drawn, minlength=8), count * exact
    assert (found[expected == 0] == 0).all()
    there = expected > 0
    square = ((found - expected)[there] ** 2 / expected[there]).sum()
    assert square < 30  # of at most 7 degrees of freedom: one in 10,000 is above


def test_numbers_are_those_of_philox() -> None:
    """The first known answer of the generator's authors: counter and key 0. The engine counts in the same way."""
    assert reference.ops._philox(0, 0) == 0xE169C58D6627E8D5
    draws = Draws(SamplingOptions(seed=9), 3)
    exact = [reference.ops._philox(draws.key, place) / 2**64 for place in (4, 5)]
    np.testing.assert_allclose(draws.uniforms(4, 2), exact, rtol=0, atol=2**-52)


def test_a_seed_and_a_counter_give_a_token_whatever_stands_beside() -> None:
    random = np.random.default_rng(5)
    logits = random.standard_normal((ROWS, VOCAB)).astype(np.float32)
    given = options(random)
    together = fk.sample(logits, **given)
    for row in (0, 7, ROWS - 1):
        alone = fk.sample(logits[row : row + 1], **{name: value[row : row + 1] for name, value in given.items()})
        assert alone[0] == together[row]


def test_rows_that_are_refused_say_where() -> None:
    logits = np.zeros((4, 9), np.float32)
    logits[0, 5], logits[1, 3], logits[2] = np.nan, np.inf, -np.inf
    logprob = np.zeros(4, np.float32)
    for temperature in (0.0, 1.0):
        tokens = fk.sample(logits, np.full(4, temperature, np.float32), logprob=logprob)
        assert tokens[:3].tolist() == [-6, -4, -1] and tokens[3] >= 0
        assert np.isnan(logprob[:3]).all() and np.isclose(logprob[3], -np.log(9))


def test_the_best_token_reaches_any_min_p() -> None:
    """No token is 1.5 times as likely as itself, and something has to be drawn: the walk once left the row."""
    logits = np.random.default_rng(7).standard_normal((4, 100)).astype(np.float32)
    for value in (1.0, 1.5, 1e30, np.inf):
        tokens = fk.sample(logits, np.ones(4, np.float32), min_p=np.full(4, value, np.float32), seed=np.arange(4))
        assert tokens.tolist() == logits.argmax(1).tolist()


def test_logprob_is_that_of_the_logits_as_they_came() -> None:
    random = np.random.default_rng(6)
    logits = random.standard_normal((ROWS, VOCAB)).astype(np.float32) * 4
    logprob = np.zeros(ROWS, np.float32)
    tokens = fk.sample(logits, **options(random), **tables(random), logprob=logprob)
    np.testing.assert_allclose(logprob, reference.log_softmax(logits)[np.arange(ROWS), tokens], atol=2e-6)


def test_refusals() -> None:
    x, one = np.zeros((2, 3), np.float32), np.ones(2, np.float32)
    for call, text in [
        (lambda: fk.sample(np.zeros((2, 0), np.float32)), r"sample: logits\.shape\[1\]=0; needs 1 to 8388608"),
        (lambda: fk.sample(np.zeros(3, np.float32)), r"sample: logits is float32.*needs 2 dims"),
        (lambda: fk.sample(x.astype(np.int32)), r"sample: logits is int32; "),
        (lambda: fk.sample(x, one[:1]), r"sample: temperature\.shape\[0\]=1.*logits\.shape\[0\]"),
        (lambda: fk.sample(x, one, one), r"sample: top_k is float32; "),
        (lambda: fk.sample(x, repetition_penalty=one), r"sample: a penalty was given without history; needs history"),
        (lambda: fk.sample(x, bias=np.zeros((3, 2), np.float32)), r"sample: bias is float32.*shapes must match"),
        (lambda: fk.sample(x, out=one), r"sample: out is float32; "),
        (lambda: fk.sample(x, one, logprob=one), r"sample: logprob .*temperature"),
    ]:
        with pytest.raises(ValueError, match=text):
            call()
