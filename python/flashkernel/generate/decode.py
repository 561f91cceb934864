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
from .model import CommonPages, Model, PagedBatch
from .one_launch import OneLaunch, pays
from .request import Request
from .sampling_options import Wanted, wanted

__all__ = ["DecodeState", "Decoder", "Row", "decode_step", "row_bucket", "wanted_by"]

# Bytes of a layer's keys and values, on the CPU and on a GPU, that a cascade must save (docs/ops/cascade.md).
WORTH_SHARING_BYTES = {False: 16 << 20, True: 96 << 20}


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


def common_pages(rows: Sequence[Row | None], page_size: int) -> int:
    """How many pages, full of tokens, all these sequences begin with; 0 for a sequence alone."""
    present = [row for row in rows if row is not None]
    if len(present) < 2:
        return 0
    first = present[0].pages
    most = min(row.length for row in present) // page_size
    for row in present[1:]:
        differ = np.flatnonzero(row.pages[:most] != first[:most])
        most = int(differ[0]) if len(differ) else most
    return most


def wanted_by(rows: Sequence[Row | None]) -> Wanted:
    """What choosing the tokens of these rows takes."""
    return wanted(row.request.sampling for row in rows if row is not None)


class DecodeState:
    """Fixed arrays for at most `rows` sequences of at most `width` pages, `steps` steps at a time."""

    def __init__(self, arrays: HostArrays, rows: int, width: int, steps: int, vocab_size: int):
        self.arrays, self.rows, self.width, self.steps = arrays, rows, width, steps
        # One vector, so that the host sends it in one copy:
        #   counters:   positions [rows], lengths [rows], lengths behind the common pages [rows], the step's number [1]
        #   increments: what a step adds to them: 1, or 0 for a row without a sequence
        #   slots_ahead [steps, rows]: where the tokens of each step go
        #   common_tokens [1]: tokens in the pages that all rows begin with
        self._counters = 3 * rows + 1
        self.control = arrays.zeros((2 * self._counters + steps * rows + 1,), "int64")
        self.counters = self.control[: self._counters]
        self.increments = self.control[self._counters : 2 * self._counters]
        self.positions, self.lengths = self.counters[:rows], self.counters[rows : 2 * rows]
        self.own_lengths = self.counters[2 * rows : 3 * rows]
        self.step = self.counters[3 * rows :]
        self.slots_ahead = self.control[2 * self._counters : -1].reshape(steps, rows)
        self.common_tokens = self.control[-1:]
        self.table = arrays.zeros((rows, width), "int32")
        self.common_table = arrays.zeros((1, width), "int32")
        self.own_table = arrays.zeros((rows, width), "int32")
        self.tokens = arrays.zeros((rows,), "int64")
        self.history = arrays.zeros((steps, rows), "int64")
        self.chosen = arrays.activations((steps, rows))  # the logits of those tokens: the host looks for NaN and inf
        self.choice = RowChoice(arrays, rows, steps, vocab_size)
        self.park()

    def _control(self, rows: Sequence[Row | None], steps: int, common: int = 0) -> np.ndarray:
        control = np.zeros(2 * self._counters + self.steps * self.rows + 1, np.int64)
        counters, increments = control[: self._counters], control[self._counters : 2 * self._counters]
        slots = control[2 * self._counters : -1].reshape(self.steps, self.rows)
        control[-1] = common
        slots[:] = -1
        counters[-1], increments[-1] = -1, 1  # a step begins by adding
        for i, row in enumerate(rows):
            if row is not None:
                counters[i], counters[self.rows + i] = row.length - 1, row.length
                counters[2 * self.rows + i] = row.length - common
                increments[i] = increments[self.rows + i] = increments[2 * self.rows + i] = 1
                slots[:steps, i] = row.slots
        return control

    def load(
        self, rows: Sequence[Row | None], steps: int, tokens: np.ndarray | None, common: int = 0, page_size: int = 0
    ) -> None:
        """Sends what the next `steps` steps need. tokens: the last token of each row; None: they are on the device.
        common: how many pages all rows begin with, which the steps read once; 0: they read whole tables.
        """
        write = self.arrays.write
        write(self.control, self._control(rows, steps, common * page_size))
        table = np.full((len(rows), self.width), -1, np.int32)
        for i, row in enumerate(rows):
            if row is not None:
                table[i, : len(row.pages)] = row.pages
        write(self.table[: len(rows)], table)
        if common:
            present = next(i for i, row in enumerate(rows) if row is not None)
            write(self.common_table, table[present : present + 1])
            own = np.full_like(table, -1)
            own[:, : self.width - common] = table[:, common:]
            write(self.own_table[: len(rows)], own)
        if tokens is not None:
            write(self.tokens[: len(tokens)], tokens)
        requests = [None if row is None else row.request for row in rows]
        self.choice.load(requests, steps, wanted_by(rows), fresh=tokens is not None)

    def park(self) -> None:
        """No row has a sequence: a step then changes nothing that matters."""
        control = self._control([], 0)
        control[: 2 * self._counters] = 0
        self.arrays.write(self.control, control)


def decode_logits(
    model: Model,
    pool: fk.KvPagePool,
    state: DecodeState,
    rows: int,
    cascade: bool = False,
    one_launch: OneLaunch | None = None,
) -> Any:
    """Logits [rows, vocab] for the first `rows` rows: counters move on, keys and values are written.

    cascade: the pages that all rows begin with, as they were loaded, are read once for all of them.
    one_launch: computes the step, where there is no cascade.
    """
    arrays = state.arrays
    arrays.increase(state.counters, state.increments)
    own = state.own_table[:rows], state.own_lengths[:rows]
    batch = PagedBatch(
        tokens=state.tokens[:rows],
        positions=state.positions[:rows],
        slots=arrays.row(state.slots_ahead, state.step)[:rows],
        cu_seqlens=None,
        max_seqlen=1,
        block_table=state.table[:rows],
        seq_lens=state.lengths[:rows],
        last_rows=None,
        common=CommonPages(state.common_table, state.common_tokens, *own) if cascade else None,
    )
    if one_launch is not None and not cascade:
        return one_launch.forward(batch)
    return model.forward(batch, pool)


def decode_step(
    model: Model,
    pool: fk.KvPagePool,
    state: DecodeState,
    rows: int,
    wanted: Wanted,
    cascade: bool = False,
    one_launch: OneLaunch | None = None,
) -> None:
    """One token for each of the first `rows` rows: `tokens`, and a row of `history` and of `chosen`, are written."""
    arrays, tokens = state.arrays, state.tokens[:rows]
    logits = decode_logits(model, pool, state, rows, cascade, one_launch)
    state.choice.choose(logits, rows, state.step, wanted, tokens)
    arrays.store_row(state.history, state.step, state.tokens)
    # NaN and +inf win the choice, so that the logit of the token tells of them.
    arrays.store_row(state.chosen[:, :rows], state.step, arrays.at(logits, tokens))


class Decoder:
    """Runs decode steps, by CUDA graphs where the arrays are on a GPU.

    graphs: None: where the device is asynchronous; False: never.
    one_launch: compute steps by one op; None: where that pays.
    """

    def __init__(
        self,
        model: Model,
        pool: fk.KvPagePool,
        *,
        rows: int,
        width: int,
        steps: int,
        graphs: bool | None = None,
        one_launch: bool | None = None,
    ):
        self.model, self.pool = model, pool
        wanted_so = pays(model, pool.dtype) if one_launch is None else one_launch
        self.one_launch = OneLaunch(model, pool) if wanted_so else None
        self.state = DecodeState(model.arrays, rows, width, steps, model.vocab_size)
        self._by_graph = model.arrays.asynchronous if graphs is None else graphs
        self._steps: dict[tuple[int, Wanted, bool, bool], Callable[[], None]] = {}
        self._logits_steps: dict[tuple[int, bool, bool], tuple[Callable[[], None], list[Any]]] = {}
        self._graph_memory: Any = None
        # Of one layer's keys and values: what is not read again, and from where on that pays for two calls more.
        width = {"float32": 4, "float16": 2, "bfloat16": 2}.get(pool.dtype, 1)
        self._page_bytes = width * pool.page_size * pool.heads_kv * (pool.head_dim + pool.head_dim_v)
        self._least_bytes = WORTH_SHARING_BYTES[model.arrays.asynchronous]

    def run(
        self, rows: Sequence[Row | None], steps: int, tokens: np.ndarray | None
    ) -> Callable[[], tuple[np.ndarray, np.ndarray, Scores | None]]:
        """Starts `steps` steps; the function returned waits for them and gives their tokens, int64 [steps, rows], the
        logits of these, float32, and log-probabilities where some row asks for them.
        """
        count, kind, common = min(row_bucket(len(rows)), self.state.rows), wanted_by(rows), self._worth_sharing(rows)
        step = self.prepare(count, kind, common > 0, self._by_one(rows, count, steps))
        try:
            self.state.load([*rows, *[None] * (count - len(rows))], steps, tokens, common, self.pool.page_size)
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
        count, common = min(row_bucket(len(rows)), self.state.rows), self._worth_sharing(rows)
        by_one = self._by_one(rows, count, 1)
        key = count, common > 0, by_one
        if key not in self._logits_steps:
            found: list[Any] = [None]

            def step() -> None:
                one_launch = self.one_launch if by_one else None
                found[0] = decode_logits(self.model, self.pool, self.state, count, common > 0, one_launch)

            self._logits_steps[key] = (self._capture(step) if self._by_graph else step), found
        step, found = self._logits_steps[key]
        self.state.load([*rows, *[None] * (count - len(rows))], 1, tokens, common, self.pool.page_size)
        step()
        return found[0][: len(rows)]

    def _by_one(self, rows: Sequence[Row | None], count: int, steps: int) -> bool:
        """Whether the one op computes a step of these, which has `count` rows. In the invariant mode it does not."""
        tokens = sum(row.length + steps for row in rows if row is not None)
        return self.one_launch is not None and not fk.is_invariant() and self.one_launch.takes(count, tokens)

    def _worth_sharing(self, rows: Sequence[Row | None]) -> int:
        """The pages that all rows begin with, if it is faster to read them once; else 0. In the invariant mode it is
        0, where a token's bits must not depend on who else is there; over latent rows too, for which there is no
        cascade.
        """
        if fk.is_invariant() or self.model.window is not None or self.model.latent_cache:
            return 0
        common = common_pages(rows, self.pool.page_size)
        others = sum(row is not None for row in rows) - 1
        return common if others * common * self._page_bytes >= self._least_bytes else 0

    def prepare(self, rows: int, wanted: Wanted, cascade: bool = False, by_one: bool = False) -> Callable[[], None]:
        """The step for `rows` rows; captures its graph if there is none yet. No step may be under way in this state.
        by_one: the one op computes it.
        """
        key = (rows, wanted, cascade, by_one)
        if key not in self._steps:
            self.state.choice.reserve(wanted)
            one_launch = self.one_launch if by_one else None

            def step() -> None:
                decode_step(self.model, self.pool, self.state, rows, wanted, cascade, one_launch)

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
        # The stream is named: torch's default for captures is one for the process, of the GPU that was current first.
        with torch.cuda.graph(graph, pool=self._graph_memory, stream=side, capture_error_mode="thread_local"):
            step()
        state.control.copy_(kept[0])
        state.tokens.copy_(kept[1])
        for table, kept_table in tables:
            table.copy_(kept_table)
        return graph.replay
