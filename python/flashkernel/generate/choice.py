"""How the rows of a step choose their tokens: fixed arrays of options, counts and biases, and the choice itself.

Used by decode.py for decode steps, and by scheduler.py for the tokens behind prompts. Nothing here reads a value on the
host between `load` and the functions that `fetch_scores` gives, so that a CUDA graph can hold `choose`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import flashkernel as fk

from .arrays import HostArrays
from .request import Request
from .sampling_options import MAX_LOGPROBS, Wanted

__all__ = ["RowChoice", "Scores"]

# Numbers of a row, which change nothing: temperature, top_p, min_p, repetition, frequency and presence penalty.
NEUTRAL = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
# What typical sampling needs beside them, in float64: temperature, top_k, top_p, min_p, typical_p.
TYPICAL = 5
NOT_TYPICAL = (0.0, 0.0, 1.0, 0.0, 1.0)


class Scores(NamedTuple):
    """Log-probabilities of some steps, on the host."""

    chosen: np.ndarray  # float32 [steps, rows]
    ids: np.ndarray  # int64 [steps, rows, k]: the likeliest tokens, best first
    values: np.ndarray  # float32 [steps, rows, k]


class RowChoice:
    """The arrays for at most `rows` sequences, `steps` steps at a time; the large ones are made when they are needed
    first, at addresses that graphs may keep.
    """

    def __init__(self, arrays: HostArrays, rows: int, steps: int, vocab_size: int):
        self.arrays, self.rows, self.steps, self.vocab_size = arrays, rows, steps, vocab_size
        self.numbers = arrays.zeros((len(NEUTRAL), rows), "float32")
        self.integers = arrays.zeros((2 + steps, rows), "int64")  # top_k, key of the draws, their counter in each step
        self.options: Any = None  # float64 [TYPICAL + steps, rows]; the last ones: a number in [0, 1) for each step
        self.history: Any = None  # int32 [rows, vocab]: 2 * (times generated) + (in the prompt)
        self.generated: Any = None  # int32 [rows, 1]: 2, what a new token adds to that
        self.bias: Any = None  # float32 [rows, vocab]
        self.scores: tuple[Any, Any, Any] | None = None  # of `Scores`
        self._tables_of: list[tuple[Request | None, int]] = []  # whose tables, and how many tokens they cover
        self._tables = Wanted()  # which tables that is true of

    def reserve(self, wanted: Wanted) -> None:
        """Makes the arrays that a choice of this kind needs."""
        shape, zeros = (self.rows, self.vocab_size), self.arrays.zeros
        if wanted.typical and self.options is None:
            self.options = zeros((TYPICAL + self.steps, self.rows), "float64")
        if (wanted.penalised or wanted.counted) and self.history is None:
            self.history = zeros(shape, "int32")
            self.generated = self.arrays.index(np.full((self.rows, 1), 2), "int32")
        if wanted.biased and self.bias is None:
            self.bias = zeros(shape, "float32")
        if wanted.scored and self.scores is None:
            top = (self.steps, self.rows, min(MAX_LOGPROBS, self.vocab_size))
            self.scores = zeros(top[:2], "float32"), zeros(top, "int64"), zeros(top, "float32")

    def saved(self) -> list[tuple[Any, Any]]:
        """The tables and copies of them: a step changes them."""
        return [] if self.history is None else [(self.history, self.history.clone())]

    def load(self, requests: Sequence[Request | None], steps: int, wanted: Wanted, fresh: bool) -> None:
        """Sends what the next `steps` steps need. fresh: rows may have other requests than in the last steps."""
        numbers = np.tile(np.array(NEUTRAL, np.float32)[:, None], self.rows)
        integers = np.zeros((2 + self.steps, self.rows), np.int64)
        options = np.zeros((TYPICAL + self.steps, self.rows))
        options[:TYPICAL] = np.array(NOT_TYPICAL)[:, None]
        for i, request in enumerate(requests):
            if request is not None:
                sampling = request.sampling
                numbers[3:, i] = (
                    sampling.repetition_penalty,
                    sampling.frequency_penalty,
                    sampling.presence_penalty,
                )
                if not sampling.greedy:
                    place, top_k = request.random.take(steps), min(sampling.top_k, self.vocab_size)
                    numbers[:3, i] = sampling.temperature, sampling.top_p, sampling.min_p
                    integers[:2, i] = top_k, request.random.key
                    integers[2 : 2 + steps, i] = np.arange(place, place + steps)
                    if sampling.typical_p < 1:
                        limits = sampling.temperature, top_k, sampling.top_p, sampling.min_p, sampling.typical_p
                        options[:TYPICAL, i] = limits
                        options[TYPICAL : TYPICAL + steps, i] = request.random.uniforms(place, steps)
        if wanted.sampled or wanted.adjusted:
            self.arrays.write(self.numbers, numbers)
        if wanted.sampled:
            self.arrays.write(self.integers, integers)
        if wanted.typical:
            self.arrays.write(self.options, options)
        if wanted.adjusted:
            if fresh:
                self._load_tables(requests, wanted)
            self._tables_of = [(request, count + steps) for request, count in self._tables_of]

    def forget(self) -> None:
        """What the tables hold is unknown."""
        self._tables_of = []

    def _load_tables(self, requests: Sequence[Request | None], wanted: Wanted) -> None:
        """Steps keep the tables up to date, so nothing is sent while the rows stay with their requests."""
        tables = Wanted(penalised=wanted.penalised, counted=wanted.counted, biased=wanted.biased)
        covered = [(r, 0 if r is None else len(r.tokens)) for r in requests]
        if tables == self._tables and covered == [(r, 0 if r is None else count) for r, count in self._tables_of]:
            return
        rows = len(requests)
        if wanted.penalised or wanted.counted:
            texts = [[] if r is None else [*sorted(set(r.prompt)), *r.generated] for r in requests]
            new = [0 if r is None else len(r.generated) for r in requests]
            adds = [[1] * (len(text) - n) + [2] * n for text, n in zip(texts, new, strict=True)]
            self._fill(self.history[:rows], texts, adds, "int32")
        if wanted.biased:
            pairs = [() if request is None else request.sampling.biases for request in requests]
            self._fill(
                self.bias[:rows],
                [[t for t, _ in row] for row in pairs],
                [[b for _, b in row] for row in pairs],
                "float32",
            )
        self._tables_of, self._tables = covered, tables

    def _fill(self, table: Any, columns: list[list[int]], values: Sequence[Sequence[float]], dtype: str) -> None:
        """0, and values[i][j] added at table[i, columns[i][j]]; rows may differ in length."""
        table[...] = 0
        if any(columns):
            self.arrays.add_at(
                table,
                self.arrays.index(_padded(columns, np.int64), "int64"),
                self.arrays.index(_padded(values, dtype), dtype),
            )

    def choose(self, logits: Any, rows: int, step: Any, wanted: Wanted, out: Any) -> None:
        """Writes a token for each of the first `rows` rows to out, int64 [rows]; step: int64 [1] on the device, which
        of the steps this is.
        """
        arrays = self.arrays
        if wanted.sampled or wanted.adjusted:
            temperature, top_p, min_p, repetition, frequency, presence = (row[:rows] for row in self.numbers)
            asked: dict[str, Any] = {}
            if wanted.sampled:
                top_k, seed = self.integers[0][:rows], self.integers[1][:rows]
                asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
                asked |= {"seed": seed, "offset": arrays.row(self.integers[2:], step)[:rows]}
            if wanted.biased:
                asked["bias"] = self.bias[:rows]
            if wanted.penalised or wanted.counted:
                asked |= {"history": self.history[:rows], "repetition_penalty": repetition}
                asked |= {"frequency_penalty": frequency, "presence_penalty": presence}
            arrays.sample(logits, out, **asked)
            if wanted.typical:
                heat, most, mass, least, typical = (row[:rows] for row in self.options[:TYPICAL])
                uniform = arrays.row(self.options[TYPICAL:], step)[:rows]
                scores = self._adjusted(logits, rows, wanted)
                arrays.draw_typical(scores, heat, most, mass, uniform, least, typical, out)
        else:
            fk.argmax(logits, axis=-1, out=out, **arrays.op_options)
        if wanted.penalised or wanted.counted:
            arrays.add_at(self.history[:rows], out[:, None], self.generated[:rows])
        if wanted.scored:
            assert self.scores is not None
            chosen, ids, values = self.scores
            likely = arrays.log_probabilities(logits)
            top = arrays.best(likely, ids.shape[2])
            arrays.store_row(chosen[:, :rows], step, arrays.at(likely, out))
            arrays.store_row(ids[:, :rows], step, top[0])
            arrays.store_row(values[:, :rows], step, top[1])

    def _adjusted(self, logits: Any, rows: int, wanted: Wanted) -> Any:
        """float32 [rows, vocab]: `sampling.adjust` of each row."""
        arrays, scores = self.arrays, self.arrays.floats(logits)
        if wanted.biased:
            scores = scores + self.bias[:rows]
        if wanted.penalised:
            scores = arrays.penalise(scores, self.history[:rows] != 0, self.numbers[3][:rows])
        if wanted.counted:
            counts = arrays.floats(self.history[:rows] >> 1)
            frequency, presence = self.numbers[4][:rows, None], self.numbers[5][:rows, None]
            scores = scores - counts * frequency
            scores = scores - arrays.floats(counts > 0) * presence
        return scores

    def fetch_scores(self, steps: int, wanted: Wanted) -> Callable[[], Scores | None]:
        """Starts to copy the log-probabilities of the last `steps` steps; the function waits for them."""
        if not wanted.scored:
            return lambda: None
        assert self.scores is not None
        found = [self.arrays.fetch(part[:steps]) for part in self.scores]
        return lambda: Scores(*(wait() for wait in found))


def _padded(rows: Sequence[Sequence[float]], dtype: Any) -> np.ndarray:
    """Rows of any lengths as one array, zeros behind the shorter ones."""
    out = np.zeros((len(rows), max(map(len, rows))), dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out
