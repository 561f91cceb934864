"""The forward pass of a verification: the last token of each sequence and its draft, over the pages of the cache.

Called by speculate.py. On the CPU the tokens lie side by side and nothing is computed but them. On a GPU every sequence
has as many places (fixed_step.py), so that a CUDA graph of the step is captured once for each number of rows and of
places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import flashkernel as fk

from .decode import row_bucket
from .fixed_step import FixedStep, TokenRow
from .model import HostBatch, Model, PagedBatch

__all__ = ["Verifier", "places"]


def places(draft: int) -> int:
    """Places of each sequence where the longest draft has that many tokens: few different numbers, one graph each."""
    return 1 + (1 << max(0, draft - 1).bit_length())


class Verifier:
    """Verification steps of at most `rows` sequences of at most `width` pages.

    fixed: the form with as many places for each sequence; it is captured as a CUDA graph where the arrays are on a GPU.
    """

    def __init__(self, model: Model, pool: fk.KvPagePool, *, rows: int, width: int, fixed: bool):
        self.model, self.pool, self.rows, self.width, self.fixed = model, pool, rows, width, fixed
        self._steps: dict[tuple[int, int], FixedStep] = {}
        self._graph_memory: Any = None

    def run(self, rows: Sequence[TokenRow]) -> Any:
        """Logits [sum of len(row.tokens), vocab], row by row; the next call may overwrite them."""
        if not self.fixed:
            return self._ragged(rows)
        count = min(row_bucket(len(rows)), self.rows)
        each = places(max(len(row.tokens) for row in rows) - 1)
        step = self._steps.get((count, each))
        if step is None:
            step = FixedStep(self.model, self.pool, rows=count, each=each, width=self.width)
            self._steps[count, each] = step
            if self.model.arrays.asynchronous:
                self._graph_memory = step.capture(self._graph_memory)
        logits = step.run(rows)
        used = [i * each + each - len(row.tokens) + j for i, row in enumerate(rows) for j in range(len(row.tokens))]
        return self.model.arrays.take(logits, np.array(used, np.int64))

    def _ragged(self, rows: Sequence[TokenRow]) -> Any:
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
