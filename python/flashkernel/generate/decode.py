"""The decode step: one new token for every running sequence, and the arrays that it works on.

Called by scheduler.py. Everything that changes from step to step (tokens, positions, lengths, the slots of the next
tokens, the page table) lies in arrays of fixed shape and address on the device; a step only writes into them, reads
no value on the host and waits for nothing. So a CUDA graph of it is captured once for each number of rows and
replayed while lengths grow, sequences end and others take their rows. A row without a sequence has length 0 and slot
-1: it sees no key, writes none, and its token is not looked at. On the CPU the same function runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashkernel as fk

from .arrays import HostArrays
from .choice import RowChoice, Scores
from .model import Model, PagedBatch
from .request import Request
from .sampling_options import Wanted, wanted

__all__ = ["DecodeState", "Decoder", "Row", "decode_step", "row_bucket", "wanted_by"]


def row_bucket(rows: int) -> int:
    """Rows that a step computes for `rows` sequences: few different numbers, since each needs a graph of its own."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    return -(-rows // 8) * 8


@dataclass
class Row:
    """What one row of the next steps needs to know; an absent sequence is None in its place."""

    request: Request
    length: int  # tokens in the cache before the first of the steps
    slots: np.ndarray  # int64 [steps]
    pages: np.ndarray  # int32 [pages]


def wanted_by(rows: Sequence[Row | None]) -> Wanted:
    """What choosing the tokens of these rows takes."""
    return wanted(row.request.sampling for row in rows if row is not None)


class DecodeState:
    """Fixed arrays for at most `rows` sequences of at most `width` pages, `steps` steps at a time."""

    def __init__(self, arrays: HostArrays, rows: int, width: int, steps: int, vocab_size: int):
        self.arrays, self.rows, self.width, self.steps = arrays, rows, width, steps
        # One vector, so that the host sends it in one copy:
        #   counters:   positions [rows], lengths [rows], the step's number [1]
        #   increments: what a step adds to them: 1, or 0 for a row without a sequence
        #   slots_ahead [steps, rows]: where the tokens of each step go
        self._counters = 2 * rows + 1
        self.control = arrays.zeros((2 * self._counters + steps * rows,), "int64")
        self.counters = self.control[: self._counters]
        self.increments = self.control[self._counters : 2 * self._counters]
        self.positions, self.lengths = self.counters[:rows], self.counters[rows : 2 * rows]
        self.step = self.counters[2 * rows :]
        self.slots_ahead = self.control[2 * self._counters :].reshape(steps, rows)
        self.table = arrays.zeros((rows, width), "int32")
        self.tokens = arrays.zeros((rows,), "int64")
        self.history = arrays.zeros((steps, rows), "int64")
        self.chosen = arrays.activations((steps, rows))  # the logits of those tokens: the host looks for NaN and inf
        self.choice = RowChoice(arrays, rows, steps, vocab_size)
        self.park()

    def _control(self, rows: Sequence[Row | None], steps: int) -> np.ndarray:
        control = np.zeros(2 * self._counters + self.steps * self.rows, np.int64)
        counters, increments = control[: self._counters], control[self._counters : 2 * self._counters]
        slots = control[2 * self._counters :].reshape(self.steps, self.rows)
        slots[:] = -1
        counters[-1], increments[-1] = -1, 1  # a step begins by adding
        for i, row in enumerate(rows):
            if row is not None:
                counters[i], counters[self.rows + i] = row.length - 1, row.length
                increments[i] = increments[self.rows + i] = 1
                slots[:steps, i] = row.slots
        return control

    def load(self, rows: Sequence[Row | None], steps: int, tokens: np.ndarray | None) -> None:
        """Sends what the next `steps` steps need. tokens: the last token of each row; None: they are on the device."""
        write = self.arrays.write
        write(self.control, self._control(rows, steps))
        table = np.full((len(rows), self.width), -1, np.int32)
        for i, row in enumerate(rows):
            if row is not None:
                table[i, : len(row.pages)] = row.pages
        write(self.table[: len(rows)], table)
        if tokens is not None:
            write(self.tokens[: len(tokens)], tokens)
        requests = [None if row is None else row.request for row in rows]
        self.choice.load(requests, steps, wanted_by(rows), fresh=tokens is not None)

    def park(self) -> None:
        """No row has a sequence: a step then changes nothing that matters."""
        control = self._control([], 0)
        control[: 2 * self._counters] = 0
        self.arrays.write(self.control, control)


def decode_logits(model: Model, pool: fk.KvPagePool, state: DecodeState, rows: int) -> Any:
    """Logits [rows, vocab] for the first `rows` rows: counters move on, keys and values are written."""
    arrays = state.arrays
    arrays.increase(state.counters, state.increments)
    batch = PagedBatch(
        tokens=state.tokens[:rows],
        positions=state.positions[:rows],
        slots=arrays.row(state.slots_ahead, state.step)[:rows],
        cu_seqlens=None,
        max_seqlen=1,
        block_table=state.table[:rows],
        seq_lens=state.lengths[:rows],
        last_rows=None,
    )
    return model.forward(batch, pool)


def decode_step(model: Model, pool: fk.KvPagePool, state: DecodeState, rows: int, wanted: Wanted) -> None:
    """One token for each of the first `rows` rows: `tokens`, and a row of `history` and of `chosen`, are written."""
    arrays, tokens = state.arrays, state.tokens[:rows]
    logits = decode_logits(model, pool, state, rows)
    state.choice.choose(logits, rows, state.step, wanted, tokens)
    arrays.store_row(state.history, state.step, state.tokens)
    # NaN and +inf win the choice, so that the logit of the token tells of them.
    arrays.store_row(state.chosen[:, :rows], state.step, arrays.at(logits, tokens))


class Decoder:
    """Runs decode steps, by CUDA graphs where the arrays are on a GPU.

    graphs: None: where the device is asynchronous; False: never.
    """

    def __init__(
        self, model: Model, pool: fk.KvPagePool, *, rows: int, width: int, steps: int, graphs: bool | None = None
    ):
        self.model, self.pool = model, pool
        self.state = DecodeState(model.arrays, rows, width, steps, model.vocab_size)
        self._by_graph = model.arrays.asynchronous if graphs is None else graphs
        self._steps: dict[tuple[int, Wanted], Callable[[], None]] = {}
        self._logits_steps: dict[int, tuple[Callable[[], None], list[Any]]] = {}
        self._graph_memory: Any = None

    def run(
        self, rows: Sequence[Row | None], steps: int, tokens: np.ndarray | None
    ) -> Callable[[], tuple[np.ndarray, np.ndarray, Scores | None]]:
        """Starts `steps` steps; the function returned waits for them and gives their tokens, int64 [steps, rows], the
        logits of these, float32, and log-probabilities where some row asks for them.
        """
        count, kind = min(row_bucket(len(rows)), self.state.rows), wanted_by(rows)
        step = self.prepare(count, kind)
        try:
            self.state.load([*rows, *[None] * (count - len(rows))], steps, tokens)
            for _ in range(steps):
                step()
            found = self.model.arrays.fetch(self.state.history[:steps])
            logits = self.model.arrays.fetch_float(self.state.chosen[:steps])
            scores = self.state.choice.fetch_scores(steps, kind)
        except BaseException:
            self.state.choice.forget()
            raise
        return lambda: (found(), logits(), scores())

    def run_logits(self, rows: Sequence[Row | None], tokens: np.ndarray) -> Any:
        """One step that chooses no tokens: its logits [rows, vocab], which the next one may overwrite."""
        count = min(row_bucket(len(rows)), self.state.rows)
        if count not in self._logits_steps:
            found: list[Any] = [None]

            def step() -> None:
                found[0] = decode_logits(self.model, self.pool, self.state, count)

            self._logits_steps[count] = (self._capture(step) if self._by_graph else step), found
        step, found = self._logits_steps[count]
        self.state.load([*rows, *[None] * (count - len(rows))], 1, tokens)
        step()
        return found[0][: len(rows)]

    def prepare(self, rows: int, wanted: Wanted) -> Callable[[], None]:
        """The step for `rows` rows; captures its graph if there is none yet. No step may be under way in this state."""
        key = (rows, wanted)
        if key not in self._steps:
            self.state.choice.reserve(wanted)

            def step() -> None:
                decode_step(self.model, self.pool, self.state, rows, wanted)

            self._steps[key] = self._capture(step) if self._by_graph else step
        return self._steps[key]

    def _capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """A CUDA graph of `step`. The step runs with all rows parked before (kernels are loaded then, and memory is
        found), and what the arrays held is put back.
        """
        import torch

        state = self.state
        kept = state.control.clone(), state.tokens.clone()
        tables = state.choice.saved()
        state.park()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        if self._graph_memory is None:
            self._graph_memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory, capture_error_mode="thread_local"):
            step()
        state.control.copy_(kept[0])
        state.tokens.copy_(kept[1])
        for table, kept_table in tables:
            table.copy_(kept_table)
        return graph.replay
