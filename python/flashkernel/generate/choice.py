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

# Numbers of a row: temperature, top_k, top_p, min_p, typical_p, repetition, frequency and presence penalty.
OPTIONS = 8
NEUTRAL = (0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0)


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
        self.options = arrays.zeros((OPTIONS + steps, rows), "float64")
        self.uniforms = self.options[OPTIONS:]  # a number in [0, 1) for each token to come
        self.seen: Any = None  # bool [rows, vocab]: tokens that each row holds
        self.counts: Any = None  # float32 [rows, vocab]: how often each row has generated a token
        self.bias: Any = None  # float32 [rows, vocab]
        self.scores: tuple[Any, Any, Any] | None = None  # of `Scores`
        self._tables_of: list[tuple[Request | None, int]] = []  # whose tables, and how many tokens they cover
        self._tables = Wanted()  # which tables that is true of

    def reserve(self, wanted: Wanted) -> None:
        """Makes the arrays that a choice of this kind needs."""
        shape, zeros = (self.rows, self.vocab_size), self.arrays.zeros
        if wanted.penalised and self.seen is None:
            self.seen = zeros(shape, "bool")
        if wanted.counted and self.counts is None:
            self.counts = zeros(shape, "float32")
        if wanted.biased and self.bias is None:
            self.bias = zeros(shape, "float32")
        if wanted.scored and self.scores is None:
            top = (self.steps, self.rows, min(MAX_LOGPROBS, self.vocab_size))
            self.scores = zeros(top[:2], "float32"), zeros(top, "int64"), zeros(top, "float32")

    def saved(self) -> list[tuple[Any, Any]]:
        """The tables and copies of them: a step changes them."""
        return [(table, table.clone()) for table in (self.seen, self.counts) if table is not None]

    def load(self, requests: Sequence[Request | None], steps: int, wanted: Wanted, fresh: bool) -> None:
        """Sends what the next `steps` steps need. fresh: rows may have other requests than in the last steps."""
        options = np.zeros((OPTIONS + self.steps, self.rows))
        options[:OPTIONS] = np.array(NEUTRAL)[:, None]
        for i, request in enumerate(requests):
            if request is not None:
                sampling = request.sampling
                options[5:OPTIONS, i] = (
                    sampling.repetition_penalty,
                    sampling.frequency_penalty,
                    sampling.presence_penalty,
                )
                if not sampling.greedy:
                    options[:4, i] = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
                    options[4, i] = sampling.typical_p
                    options[OPTIONS : OPTIONS + steps, i] = request.random.random(steps)
        if wanted.sampled or wanted.adjusted:
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
        rows, arrays = len(requests), self.arrays
        if wanted.penalised:
            self.seen[:rows] = False
            texts = [[0] if request is None else request.tokens for request in requests]
            columns = _padded([text + text[:1] * (max(map(len, texts)) - len(text)) for text in texts], np.int64)
            arrays.mark(self.seen[:rows], arrays.index(columns, "int64"))
        if wanted.counted:
            new: list[list[int]] = [[] if request is None else request.generated for request in requests]
            self._fill(self.counts[:rows], new, [[1.0] * len(tokens) for tokens in new])
        if wanted.biased:
            pairs = [() if request is None else request.sampling.biases for request in requests]
            self._fill(self.bias[:rows], [[t for t, _ in row] for row in pairs], [[b for _, b in row] for row in pairs])
        self._tables_of, self._tables = covered, tables

    def _fill(self, table: Any, columns: list[list[int]], values: list[list[float]]) -> None:
        """0, and values[i][j] added at table[i, columns[i][j]]; rows may differ in length."""
        table[...] = 0
        if any(columns):
            self.arrays.add_at(
                table,
                self.arrays.index(_padded(columns, np.int64), "int64"),
                self.arrays.index(_padded(values, np.float32), "float32"),
            )

    def choose(self, logits: Any, rows: int, step: Any, wanted: Wanted, out: Any) -> None:
        """Writes a token for each of the first `rows` rows to out, int64 [rows]; step: int64 [1] on the device, which
        of the steps this is.
        """
        arrays, options = self.arrays, self.options[:OPTIONS, :rows]
        scores = self._adjusted(logits, rows, wanted) if wanted.adjusted else logits
        if wanted.sampled:
            uniform = arrays.row(self.uniforms, step)[:rows]
            temperature, top_k, top_p, min_p, typical_p = (options[i] for i in range(5))
            typical = typical_p if wanted.typical else None
            arrays.sample(scores, temperature, top_k, top_p, uniform, min_p, out, typical)
        else:
            fk.argmax(scores, axis=-1, out=out, **({} if wanted.adjusted else arrays.op_options))
        if wanted.penalised:
            arrays.mark(self.seen[:rows], out[:, None])
        if wanted.counted:
            arrays.add_at(self.counts[:rows], out[:, None], arrays.floats(out[:, None] >= 0))
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
            scores = arrays.penalise(scores, self.seen[:rows], self.options[5][:rows])
        if wanted.counted:
            counts = self.counts[:rows]
            frequency, presence = (arrays.floats(self.options[i][:rows])[:, None] for i in (6, 7))
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
