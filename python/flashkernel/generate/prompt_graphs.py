"""Short prompts as CUDA graphs: the time to a first token is then the kernels', not that of a hundred calls.

Called by sequences.py. A chunk of prompts whose shape came before runs as a FixedStep, whose places are a few different
numbers: a prompt of 100 tokens takes 128. Longer chunks keep the device busy for longer than the host needs to start
them, and a shape that comes once is not worth a graph, which takes three passes to make.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import flashkernel as fk

from .decode import row_bucket
from .fixed_step import FixedStep, TokenRow
from .model import Model

__all__ = ["PromptGraphs", "prompt_places"]

MOST_PLACES = 512  # of all rows together
MOST_SHAPES = 24


class _Shape(NamedTuple):
    rows: int
    each: int
    width: int


def prompt_places(tokens: int) -> int:
    """Places of a row for so many tokens: multiples of an eighth of the next power of two, 16 or more.

    >>> [prompt_places(n) for n in (1, 16, 17, 100, 129, 300)]
    [16, 16, 32, 112, 160, 320]
    """
    step = max(16, (1 << (tokens - 1).bit_length()) // 8)
    return -(-tokens // step) * step


class PromptGraphs:
    """The graphs of prompts of at most `rows` sequences of at most `width` pages."""

    def __init__(self, model: Model, pool: fk.KvPagePool, *, rows: int, width: int):
        self.model, self.pool, self.rows, self.width = model, pool, rows, width
        self._seen: Counter[_Shape] = Counter()
        self._steps: dict[_Shape, FixedStep] = {}
        self._graph_memory: Any = None

    def run(self, rows: Sequence[TokenRow]) -> Any:
        """Logits [len(rows), vocab] behind each row's last token, which the next call may overwrite; None where there
        is no graph for them.
        """
        shape = self._shape(rows)
        if shape is None:
            return None
        step = self._steps.get(shape)
        if step is None:
            self._seen[shape] += 1
            if self._seen[shape] < 2 or len(self._steps) >= MOST_SHAPES:
                return None
            step = self._steps[shape] = self._make(shape)
        return step.run(rows)[: len(rows)]

    def _shape(self, rows: Sequence[TokenRow]) -> _Shape | None:
        each = prompt_places(max(len(row.tokens) for row in rows))
        count = min(row_bucket(len(rows)), self.rows)
        tokens = sum(len(row.tokens) for row in rows)
        if count * each > MOST_PLACES or count * each > 2 * max(tokens, 16):
            return None
        # As few pages as do, since kernels are chosen for the longest sequence that the table holds.
        pages = max(len(row.pages) for row in rows)
        return _Shape(count, each, min(self.width, 1 << (pages - 1).bit_length()))

    def _make(self, shape: _Shape) -> FixedStep:
        step = FixedStep(self.model, self.pool, rows=shape.rows, each=shape.each, width=shape.width, last=True)
        if self.model.arrays.asynchronous:
            self._graph_memory = step.capture(self._graph_memory)
        return step
