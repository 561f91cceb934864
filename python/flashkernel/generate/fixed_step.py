"""A forward pass of a fixed shape: some rows of as many places each, over the pages of the cache, as a CUDA graph.

Used by verify.py, where a row is a sequence's last token and its draft, and by prompt_graphs.py, where it is a prompt.
A row's tokens stand at the end of its places. The empty ones before them have slot -1, which writes nothing, and what
such a query gives is not looked at. A row without tokens has length 0, as in a decode step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashkernel as fk

from .model import Model, PagedBatch

__all__ = ["FixedStep", "TokenRow"]


@dataclass
class TokenRow:
    """Tokens of one sequence that are computed at once."""

    tokens: list[int]
    length: int  # tokens in the cache before them
    slots: np.ndarray  # int64 [len(tokens)]
    pages: np.ndarray  # int32 [pages]


class FixedStep:
    """`rows` rows of `each` places, of sequences of at most `width` pages; its arrays stay where they are.

    last: logits of each row's last place alone; else of all places.
    """

    def __init__(self, model: Model, pool: fk.KvPagePool, *, rows: int, each: int, width: int, last: bool = False):
        self.model, self.pool = model, pool
        self.arrays, self.rows, self.each = model.arrays, rows, each
        total = rows * each
        self.control = self.arrays.zeros((3 * total + rows,), "int64")
        self.tokens, self.positions = self.control[:total], self.control[total : 2 * total]
        self.slots, self.lengths = self.control[2 * total : 3 * total], self.control[3 * total :]
        self.table = self.arrays.zeros((rows, width), "int32")
        self.cu_seqlens = self.arrays.index(np.arange(rows + 1) * each)
        self.last_rows = self.arrays.index((np.arange(rows) + 1) * each - 1, "int64") if last else None
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
            last_rows=self.last_rows,
        )
        self.logits = self.model.forward(batch, self.pool)

    def run(self, rows: Sequence[TokenRow]) -> Any:
        self._load(rows)
        self._replay()
        return self.logits

    def _load(self, rows: Sequence[TokenRow]) -> None:
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

    def capture(self, memory: Any) -> Any:
        """Makes a CUDA graph of the step, with no sequence in any row. memory: the pool that such graphs share; None: a
        new one. It is returned.
        """
        import torch

        self._load([])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # kernels are loaded, and memory is found
                self._forward()
        torch.cuda.current_stream().wait_stream(side)
        memory = torch.cuda.graph_pool_handle() if memory is None else memory
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory, stream=side, capture_error_mode="thread_local"):
            self._forward()
        self._replay = graph.replay
        return memory
