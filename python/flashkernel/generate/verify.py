"""The forward pass of a verification: the last token of each sequence and its draft, over the pages of the cache.

Called by speculate.py. On the CPU the tokens lie side by side and nothing is computed but them. On a GPU every sequence
has as many places, the first of which are empty where its draft is shorter (slot -1 writes nothing, and what such a
query gives is not looked at), so that a CUDA graph of the step is captured once for each number of rows and of places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashkernel as fk

from .decode import row_bucket
from .model import HostBatch, Model, PagedBatch

__all__ = ["DraftRow", "Verifier", "places"]


def places(draft: int) -> int:
    """Places of each sequence where the longest draft has that many tokens: few different numbers, one graph each."""
    return 1 + (1 << max(0, draft - 1).bit_length())


@dataclass
class DraftRow:
    """What one sequence computes: its last token and a draft, which may be empty."""

    tokens: list[int]
    length: int  # tokens in the cache before them
    slots: np.ndarray  # int64 [len(tokens)]
    pages: np.ndarray  # int32 [pages]


class Verifier:
    """Verification steps of at most `rows` sequences of at most `width` pages.

    fixed: the form with as many places for each sequence; it is captured as a CUDA graph where the arrays are on a GPU.
    """

    def __init__(self, model: Model, pool: fk.KvPagePool, *, rows: int, width: int, fixed: bool):
        self.model, self.pool, self.rows, self.width, self.fixed = model, pool, rows, width, fixed
        self._steps: dict[tuple[int, int], _FixedStep] = {}
        self._graph_memory: Any = None

    def run(self, rows: Sequence[DraftRow]) -> Any:
        """Logits [sum of len(row.tokens), vocab], row by row; the next call may overwrite them."""
        if not self.fixed:
            return self._ragged(rows)
        count = min(row_bucket(len(rows)), self.rows)
        each = places(max(len(row.tokens) for row in rows) - 1)
        step = self._steps.get((count, each))
        if step is None:
            step = self._steps[count, each] = _FixedStep(self, count, each)
            if self.model.arrays.asynchronous:
                step.capture(self)
        logits = step.run(rows)
        used = [i * each + each - len(row.tokens) + j for i, row in enumerate(rows) for j in range(len(row.tokens))]
        return self.model.arrays.take(logits, np.array(used, np.int64))

    def _ragged(self, rows: Sequence[DraftRow]) -> Any:
        arrays = self.model.arrays
        counts = np.array([len(row.tokens) for row in rows])
        table = np.full((len(rows), max(len(row.pages) for row in rows)), -1, np.int32)
        for i, row in enumerate(rows):
            table[i, : len(row.pages)] = row.pages
        cu_seqlens = np.concatenate([[0], np.cumsum(counts)])
        lengths = np.array([row.length + len(row.tokens) for row in rows])
        batch = PagedBatch(
            tokens=arrays.index(np.concatenate([row.tokens for row in rows]), "int64"),
            positions=arrays.index(np.concatenate([row.length + np.arange(len(row.tokens)) for row in rows])),
            slots=arrays.index(np.concatenate([row.slots for row in rows]), "int64"),
            cu_seqlens=arrays.index(cu_seqlens),
            max_seqlen=int(counts.max()),
            block_table=arrays.index(table),
            seq_lens=arrays.index(lengths),
            last_rows=None,
            host=HostBatch(cu_seqlens, table, lengths),
        )
        return self.model.forward(batch, self.pool)


class _FixedStep:
    """One shape of the step, and its arrays, which stay where they are."""

    def __init__(self, verifier: Verifier, rows: int, each: int):
        self.model, self.pool = verifier.model, verifier.pool
        self.arrays, self.rows, self.each = verifier.model.arrays, rows, each
        total = rows * each
        self.control = self.arrays.zeros((3 * total + rows,), "int64")
        self.tokens, self.positions = self.control[:total], self.control[total : 2 * total]
        self.slots, self.lengths = self.control[2 * total : 3 * total], self.control[3 * total :]
        self.table = self.arrays.zeros((rows, verifier.width), "int32")
        self.cu_seqlens = self.arrays.index(np.arange(rows + 1) * each)
        self.logits: Any = None
        self._replay: Callable[[], None] = self._forward

    def _forward(self) -> None:
        batch = PagedBatch(
            tokens=self.tokens,
            positions=self.positions,
            slots=self.slots,
            cu_seqlens=self.cu_seqlens,
            max_seqlen=self.each,
            block_table=self.table,
            seq_lens=self.lengths,
            last_rows=None,
        )
        self.logits = self.model.forward(batch, self.pool)

    def run(self, rows: Sequence[DraftRow]) -> Any:
        self._load(rows)
        self._replay()
        return self.logits

    def _load(self, rows: Sequence[DraftRow]) -> None:
        """A row without a sequence has length 0 and slots -1, as in a decode step."""
        total = self.rows * self.each
        control = np.zeros(3 * total + self.rows, np.int64)
        tokens, positions, slots = control[: 3 * total].reshape(3, self.rows, self.each)
        slots[:] = -1
        table = np.full((self.rows, self.table.shape[1]), -1, np.int32)
        for i, row in enumerate(rows):
            first = self.each - len(row.tokens)
            tokens[i, first:] = row.tokens
            positions[i, first:] = row.length + np.arange(len(row.tokens))
            slots[i, first:] = row.slots
            control[3 * total + i] = row.length + len(row.tokens)
            table[i, : len(row.pages)] = row.pages
        self.arrays.write(self.control, control)
        self.arrays.write(self.table, table)

    def capture(self, verifier: Verifier) -> None:
        """Makes a CUDA graph of the step, with no sequence in any row."""
        import torch

        self._load([])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # kernels are loaded, and memory is found
                self._forward()
        torch.cuda.current_stream().wait_stream(side)
        if verifier._graph_memory is None:
            verifier._graph_memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=verifier._graph_memory, capture_error_mode="thread_local"):
            self._forward()
        self._replay = graph.replay
