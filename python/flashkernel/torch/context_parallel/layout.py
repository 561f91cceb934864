"""Which tokens each rank holds, and which calls of attention a rank's queries and another rank's keys need.

Plain Python over token counts: no tensor, no process. Every rank works out the same plan for every pair of ranks, so
that a sender and its receiver agree on each message without asking.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["LAYOUTS", "Call", "Span", "calls", "chunks_of", "global_order", "length", "rows_needed", "shard_lengths"]

LAYOUTS = ("zigzag", "contiguous")


class Span(NamedTuple):
    """Tokens begin to end - 1: positions in the whole sequence, or rows of a tensor."""

    begin: int
    end: int


class Call(NamedTuple):
    """One call of attention: rows of the queries and of the keys at hand, and the options that hold between them."""

    q: Span
    k: Span
    causal: bool
    window: tuple[int | None, int | None] | None


Chunks = tuple[Span, ...]


def shard_lengths(seq_len: int, ranks: int) -> tuple[int, ...]:
    """Tokens of each rank, as even as they can be: the first `seq_len % ranks` ranks hold one more.

    >>> shard_lengths(10, 4)
    (3, 3, 2, 2)
    """
    return tuple(seq_len // ranks + (rank < seq_len % ranks) for rank in range(ranks))


@functools.lru_cache(256)
def chunks_of(seq_lens: tuple[int, ...], layout: str) -> tuple[Chunks, ...]:
    """The positions that each rank holds, in the order of its rows; a rank without tokens holds no chunk.

    "contiguous": one chunk a rank. "zigzag": two, the r-th from the front and the r-th from the back, so that each rank
    has as many keys before its queries as any other. Of an odd number of tokens the first chunk has one more.

    >>> chunks_of((4, 4), "zigzag")
    ((Span(begin=0, end=2), Span(begin=6, end=8)), (Span(begin=2, end=4), Span(begin=4, end=6)))
    """
    if layout == "contiguous":
        sizes = [(rank, size) for rank, size in enumerate(seq_lens)]
    else:
        front = [(rank, size - size // 2) for rank, size in enumerate(seq_lens)]
        sizes = front + [(rank, size // 2) for rank, size in enumerate(seq_lens)][::-1]
    held: list[list[Span]] = [[] for _ in seq_lens]
    position = 0
    for rank, size in sizes:
        if size:
            held[rank].append(Span(position, position + size))
        position += size
    return tuple(tuple(spans) for spans in held)


def length(chunks: Chunks) -> int:
    return sum(span.end - span.begin for span in chunks)


@functools.lru_cache(256)
def global_order(chunks: tuple[Chunks, ...]) -> tuple[tuple[int, Span], ...]:
    """(rank, rows of it) of every chunk, in the order of the whole sequence."""
    found = []
    for rank, spans in enumerate(chunks):
        for span, rows in zip(spans, _rows(spans), strict=True):
            found.append((span.begin, rank, rows))
    return tuple((rank, rows) for _, rank, rows in sorted(found))


def _rows(chunks: Chunks) -> list[Span]:
    """The rows of each chunk in the tensor that holds them one behind the other."""
    ends = list(itertools.accumulate((span.end - span.begin for span in chunks), initial=0))
    return [Span(*pair) for pair in itertools.pairwise(ends)]


@functools.lru_cache(8192)
def calls(
    q_chunks: Chunks, k_chunks: Chunks, left: int | None, right: int | None, documents: tuple[int, ...] | None = None
) -> tuple[Call, ...]:
    """The calls that queries at `q_chunks` need over keys at `k_chunks`: none where no query sees a key.

    left, right: the most tokens seen on either side of a query, None for all of them; `causal` is right = 0.
    documents: the bounds of packed sequences, which don't see each other: 0, ..., the number of all tokens.
    """
    rows, keys = length(q_chunks), length(k_chunks)
    if not rows or not keys:
        return ()
    if documents is None and left is None and (right is None or (right == 0 and q_chunks == k_chunks)):
        # The same ascending positions on both sides: rows are causal as positions are.
        return (Call(Span(0, rows), Span(0, keys), right == 0, None),)
    found: list[Call] = []
    k_pieces: dict[int, list[tuple[Span, int]]] = {}
    for document, k_span, k_row in _pieces(k_chunks, documents):
        k_pieces.setdefault(document, []).append((k_span, k_row))
    for document, q_span, q_row in _pieces(q_chunks, documents):
        for k_span, k_row in k_pieces.get(document, ()):
            call = _rectangle(q_span, k_span, q_row - q_span.begin, k_row - k_span.begin, left, right)
            if call is not None:
                _join(found, call)
    return tuple(_stack(found))


def rows_needed(plan: tuple[Call, ...]) -> Span | None:
    """The key rows, from the first to the last one, that a plan reads; None: none."""
    if not plan:
        return None
    return Span(min(call.k.begin for call in plan), max(call.k.end for call in plan))


def _pieces(chunks: Chunks, documents: Sequence[int] | None) -> list[tuple[int, Span, int]]:
    """(document, positions, first row) of each part of a chunk that lies in one document."""
    found = []
    for span, rows in zip(chunks, _rows(chunks), strict=True):
        if documents is None:
            found.append((0, span, rows.begin))
            continue
        for i, (begin, end) in enumerate(itertools.pairwise(documents)):
            piece = Span(max(begin, span.begin), min(end, span.end))
            if piece.begin < piece.end:
                found.append((i, piece, rows.begin + piece.begin - span.begin))
    return found


def _rectangle(q: Span, k: Span, q_to_row: int, k_to_row: int, left: int | None, right: int | None) -> Call | None:
    """The call of queries at positions q over keys at positions k, without the outer rows that see nothing.

    The op aligns its last query with its last key, so tokens seen to the left are counted from `shift` further on.
    """
    (q_begin, q_end), (k_begin, k_end) = q, k
    if left is not None:
        q_end = min(q_end, k_end + left)
    if right is not None:
        k_end = min(k_end, q_end + right)
        q_begin = max(q_begin, k_begin - right)
    if left is not None:
        k_begin = max(k_begin, q_begin - left)
    if q_begin >= q_end or k_begin >= k_end:
        return None
    shift = q_end - k_end
    left = None if left is None or left - shift >= k_end - k_begin - 1 else left - shift
    right = None if right is None or right + shift >= q_end - q_begin - 1 else right + shift
    causal = left is None and right == 0
    window = None if causal or (left is None and right is None) else (left, right)
    q_rows = Span(q_begin + q_to_row, q_end + q_to_row)
    return Call(q_rows, Span(k_begin + k_to_row, k_end + k_to_row), causal, window)


def _free(call: Call) -> bool:
    return not call.causal and call.window is None


def _join(found: list[Call], call: Call) -> None:
    """Appends a call, or widens the last one where the same queries see all of adjacent keys."""
    if found and _free(call) and _free(found[-1]) and found[-1].q == call.q and found[-1].k.end == call.k.begin:
        found[-1] = found[-1]._replace(k=Span(found[-1].k.begin, call.k.end))
    else:
        found.append(call)


def _stack(found: list[Call]) -> list[Call]:
    """Calls of adjacent queries that see all of the same keys as one."""
    stacked: list[Call] = []
    for call in found:
        last = stacked[-1] if stacked else None
        if last and _free(call) and _free(last) and last.k == call.k and last.q.end == call.q.begin:
            stacked[-1] = last._replace(q=Span(last.q.begin, call.q.end))
        else:
            stacked.append(call)
    return stacked
