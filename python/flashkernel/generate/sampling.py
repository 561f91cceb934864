"""From a row of logits to the next token, on the host, in the order that sampling_options.py tells.

The stock path chooses by `Sampler`. It and the engine draw by `flashkernel.sample`, so that equal scores give equal
tokens; a greedy choice on the host needs no kernel. Where typical_p is asked for, which that op has not, both draw by
`draw` (`device_sampling.draw_rows` is the same on torch tensors, without waiting for the device). Every sequence counts
its own numbers under a key of (seed, its place in the batch), one a token, so what one sequence draws depends on
neither its batch mates nor the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

import flashkernel as fk

from .errors import NonFiniteLogitsError
from .sampling_options import SamplingOptions

__all__ = [
    "Draws",
    "Sampler",
    "SamplingOptions",
    "adjust",
    "distribution",
    "draw",
    "drawn_from",
    "log_probabilities",
    "penalise",
]


FIRST = 256  # tokens that are sorted first, where a draw may need no more


class Draws:
    """The random numbers of one sequence: number n is Philox4x32-10 at counter n under the sequence's key."""

    def __init__(self, options: SamplingOptions, sequence: int, purpose: int = 0):
        """purpose: 0: tokens; others give other numbers for the same sequence."""
        entropy = [options.seed, sequence] + [purpose] * (purpose > 0)
        key = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
        self.key = int(key.view(np.int64)[0])
        self.place = 0  # of the next number

    def take(self, count: int) -> int:
        """The counter of the first of the next `count` numbers."""
        self.place += count
        return self.place - count

    def uniforms(self, place: int, count: int) -> list[float]:
        """Numbers in [0, 1), as `flashkernel.sample` draws them at counters from `place` on."""
        return [(_philox(self.key, place + i) >> 11) / 2**53 for i in range(count)]


def _philox(key: int, counter: int) -> int:
    """64 bits: the first two words of Philox4x32-10 (Salmon et al., 2011, https://doi.org/10.1145/2063384.2063405)."""
    mask = 0xFFFFFFFF
    a, b, c, d, k, m = counter & mask, counter >> 32 & mask, 0, 0, key & mask, key >> 32 & mask
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = second >> 32 ^ b ^ k, second & mask, first >> 32 ^ d ^ m, first & mask
        k, m = k + 0x9E3779B9 & mask, m + 0xBB67AE85 & mask
    return b << 32 | a


def penalise(logits: np.ndarray, seen: np.ndarray, penalty: float) -> np.ndarray:
    """float32 logits [vocab] with those of the token ids in `seen` made less likely by `penalty`, in float32."""
    out, at = logits.astype(np.float32), np.unique(seen)
    found, penalty = out[at], np.float32(penalty)
    out[at] = np.where(found < 0, found * penalty, found / penalty)
    return out


def adjust(logits: np.ndarray, options: SamplingOptions, prompt: Sequence[int], generated: Sequence[int]) -> np.ndarray:
    """float32 logits [vocab] with bias and penalties applied, in float32."""
    out = logits.astype(np.float32)
    for token, bias in options.biases:
        out[token] += np.float32(bias)
    if options.penalised:
        out = penalise(out, np.array([*prompt, *generated], np.int64), options.repetition_penalty)
    if options.counted:
        counts = np.bincount(np.array(generated, np.int64), minlength=out.size).astype(np.float32)
        out = out - counts * np.float32(options.frequency_penalty)
        out = out - (counts > 0).astype(np.float32) * np.float32(options.presence_penalty)
    return out


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """float32 log-softmax of float32 logits [..., vocab]."""
    scores = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # inf - inf: the engine says so by its own error
        scores -= scores.max(axis=-1, keepdims=True)
        return (scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))).astype(np.float32)


def _typical(probabilities: np.ndarray, mass: float) -> np.ndarray:
    """Which of these are typical: bool, from probabilities > 0 of any sum."""
    likely = probabilities / probabilities.sum()
    information = -np.log(likely)
    distance = np.abs(information - (likely * information).sum())
    order = np.argsort(distance, kind="stable")
    last = min(int(np.count_nonzero(np.cumsum(likely[order]) < mass)), order.size - 1)
    return distance <= distance[order[last]]


def draw(
    logits: np.ndarray,
    temperature: float,
    top_k: int,
    top_p: float,
    uniform: float,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> int:
    """The token at which the cumulative probability, best first, passes `uniform` in [0, 1); float32 logits [vocab].

    Logits with a NaN or +inf, or all -inf, give the place of that value: the caller looks at what it got.
    """
    best = int(np.argmax(logits))
    if temperature == 0 or top_k == 1 or not math.isfinite(logits[best]):
        return best
    scores = logits.astype(np.float64) / temperature
    candidates = np.arange(scores.size)
    if 0 < top_k < scores.size:
        # All that reach the k-th best score, also where several equal it: as Transformers has it.
        candidates = np.flatnonzero(scores >= np.partition(scores, -top_k)[-top_k])
        scores = scores[candidates]
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    total = float(probabilities.sum())
    # Only as many as matter are sorted: a vocabulary has 100,000 tokens, and a few of them nearly all probability.
    reach = min(top_p, uniform if typical_p == 1 and top_p == 1 and min_p == 0 else 1.0) + 1e-9
    if min_p > 0:
        reach = min(reach, float(probabilities[probabilities >= min_p * probabilities.max()].sum()))
    order = _best_first(scores, probabilities, reach)
    candidates, probabilities = candidates[order], probabilities[order]
    if top_p < 1:
        # The smallest set whose probability reaches top_p: a token stays while less than top_p stands before it.
        before = np.cumsum(probabilities) - probabilities
        keep = max(1, int(np.count_nonzero(before < top_p)))
        candidates, probabilities = candidates[:keep], probabilities[:keep]
    if min_p > 0:
        keep = max(1, int(np.count_nonzero(probabilities >= min_p * probabilities[0])))
        candidates, probabilities = candidates[:keep], probabilities[:keep]
    if typical_p < 1:
        kept = np.flatnonzero(probabilities > 0)
        kept = kept[_typical(probabilities[kept], typical_p)]
        candidates, probabilities = candidates[kept], probabilities[kept]
    cumulative = np.cumsum(probabilities)
    whole = total if top_p == 1 and min_p == 0 and typical_p == 1 else cumulative[-1]
    drawn = np.searchsorted(cumulative, uniform * whole, side="right")
    return int(candidates[min(int(drawn), candidates.size - 1)])


def distribution(logits: np.ndarray, options: SamplingOptions) -> np.ndarray:
    """float64 [vocab]: the probability of each token to be drawn by `draw`; float32 logits [vocab] as `adjust` gives
    them. All of it goes to the best one where the options are greedy or a logit is not finite.
    """
    best = int(np.argmax(logits))
    if options.greedy or not math.isfinite(logits[best]):
        return (np.arange(logits.size) == best).astype(np.float64)
    scores = logits.astype(np.float64) / options.temperature
    if 0 < options.top_k < scores.size:
        scores[scores < np.partition(scores, -options.top_k)[-options.top_k]] = -np.inf
    likely = np.exp(scores - scores.max())
    likely /= likely.sum()
    if options.top_p < 1:
        order = np.argsort(-likely, kind="stable")
        before = np.cumsum(likely[order]) - likely[order]
        likely[order[before >= options.top_p]] = 0
    if options.min_p > 0:
        likely[likely < options.min_p * likely.max()] = 0
    if options.typical_p < 1:
        kept = np.flatnonzero(likely)
        likely[kept[~_typical(likely[kept], options.typical_p)]] = 0
    return likely / likely.sum()


def drawn_from(likely: np.ndarray, uniform: float) -> int:
    """The token at which the cumulative of float64 probabilities [vocab], of any sum, passes `uniform` in [0, 1)."""
    cumulative = np.cumsum(likely)
    place = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(place, int(np.flatnonzero(likely)[-1]))


def _best_first(scores: np.ndarray, probabilities: np.ndarray, reach: float) -> np.ndarray:
    """Places of scores, best first and equal ones by place: all, or the first ones whose probability is `reach`."""
    places, count = np.arange(scores.size), FIRST
    while count < scores.size:
        found = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
        if probabilities[found].sum() >= reach:
            places = found
            break
        count *= 8
    return places[np.argsort(-scores[places], kind="stable")]


class Sampler:
    """Draws the tokens of one sequence."""

    def __init__(self, options: SamplingOptions, sequence: int, prompt: Sequence[int] = ()):
        self.options, self.sequence, self.prompt = options, sequence, list(prompt)
        self.generated: list[int] = []
        self._random = Draws(options, sequence)

    def __call__(self, logits: np.ndarray) -> int:
        """The next token from float32 logits [vocab]. Raises NonFiniteLogitsError."""
        options = self.options
        place = 0 if options.greedy else self._random.take(1)
        scores = adjust(logits, options, self.prompt, self.generated)
        if options.greedy:
            token = int(scores.argmax())  # the first of the best; a NaN comes before all
        elif options.typical_p < 1:
            (uniform,) = self._random.uniforms(place, 1)
            limits = options.temperature, options.top_k, options.top_p
            token = draw(scores, *limits, uniform, options.min_p, options.typical_p)
        else:
            numbers = np.array([options.temperature, options.top_p, options.min_p], np.float32)[:, None]
            integers = np.array([min(options.top_k, scores.size), self._random.key, place], np.int64)[:, None]
            temperature, top_p, min_p = numbers
            top_k, seed, offset = integers
            token = int(fk.sample(scores[None], temperature, top_k, top_p, min_p, seed=seed, offset=offset)[0])
            token = max(token, ~token)  # a negative one tells which logit is why
        if not math.isfinite(logits[token]):
            raise NonFiniteLogitsError(self.sequence, len(self.generated), float(logits[token]))
        self.generated.append(token)
        return token
