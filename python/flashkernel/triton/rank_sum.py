"""A few rows added up over the ranks of a group, with the residual and the norm behind the sum, in one kernel.

Every rank has an inbox that the others write to: memory of another GPU, mapped by torch's symmetric memory. A kernel
sends its rows to all inboxes, and waits for those of the others in its own. Four bytes of numbers and four of the
call's number are stored as one word, so that a word that has the number has the numbers, and nothing else must be
waited for (the LL protocol of NCCL, Hu et al., Demystifying NCCL, 2025). Parts are added in the order of the ranks, in
float32: every rank has the same bits.

A row's words of a call go to one of two places, by turns. A rank that sends for call n + 2 has the words of call n + 1
of every other rank, which these sent when their kernels of call n had ended: the place has been read.

Called by generate/tensor_parallel.py. No op of the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ._device import narrow, widen
from ._host import IS_INTERPRETED, device_function, power_of_two

try:  # Triton from 3.4 on
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    gdc_launch_dependents = gdc_wait = None

__all__ = ["MOST_RANKS", "MOST_ROWS", "MOST_WORDS", "RankSum", "inbox_words"]

MOST_RANKS = 8
MOST_ROWS = 32
MOST_WORDS = 8192  # of four bytes, of a row
TRIES_A_SECOND = 12_000_000  # more than a GPU makes, each a way to L2 and back: an H200 made 5.5 million

HAS_WAIT = gdc_wait is not None and not IS_INTERPRETED


@device_function
def _halves(word, dtype: tl.constexpr):
    """The two 16-bit numbers of words, in float32."""
    low = widen((word & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True))
    high = widen(((word >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True))
    return low, high


@device_function
def _word(low, high, dtype: tl.constexpr):
    low_bits = narrow(low, dtype).to(tl.uint16, bitcast=True).to(tl.int32)
    high_bits = narrow(high, dtype).to(tl.uint16, bitcast=True).to(tl.int32)
    return low_bits | (high_bits << 16)


@triton.jit
def _sum_ranks(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, inboxes, state_ptr, failed, words, features, limit, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, ROW: tl.constexpr, DTYPE: tl.constexpr, IS_WIDE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr, IS_WEIGHT_WIDE: tl.constexpr, EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program has a row. x, residual, out, sum: int32 words [rows, words], each one float32 (IS_WIDE) or two numbers
    of DTYPE. state: int32, whether a rank was lost, and for each row the number of its last call."""
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    live = col < words
    if EARLY:
        gdc_launch_dependents()  # the next kernel waits for this one, but may fetch its weights
    # Weights of norms are constant.
    if HAS_NORM:
        if IS_WIDE:
            weight_low = tl.load(weight_ptr + col, mask=live, other=0.0)
            weight_high = weight_low
        elif IS_WEIGHT_WIDE:
            weight_low = tl.load(weight_ptr + 2 * col, mask=live, other=0.0)
            weight_high = tl.load(weight_ptr + 2 * col + 1, mask=live, other=0.0)
        else:
            weight_low, weight_high = _halves(tl.load(weight_ptr + col, mask=live, other=0), DTYPE)
    if EARLY:
        gdc_wait()
    at = row.to(tl.int64) * words + col
    lost = tl.load(state_ptr)
    call = tl.load(state_ptr + 1 + row) + 1
    x = tl.load(x_ptr + at, mask=live, other=0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=live, other=0)
    marked = (call.to(tl.int64) << 32) | (x.to(tl.int64) & 0xFFFFFFFF)
    place = ((row * 2 + (call & 1)) * SIZE).to(tl.int64) * ROW
    for peer in tl.static_range(SIZE):  # an address below 2^31 came as int32
        if peer != RANK:
            inbox = tl.multiple_of(inboxes[peer].to(tl.int64).to(tl.pointer_type(tl.int64)), 16)
            tl.store(inbox + (place + RANK * ROW + col), marked, mask=live)
    own = tl.multiple_of(inboxes[RANK].to(tl.int64).to(tl.pointer_type(tl.int64)), 16)
    tries = tl.where(lost != 0, 0, limit).to(tl.int64)
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(SIZE):
        part = x
        if peer != RANK:
            from_peer = own + (place + peer * ROW + col)
            word = tl.load(from_peer, mask=live, other=0, volatile=True)
            missing = tl.max((live & ((word >> 32).to(tl.int32) != call)).to(tl.int32), 0)
            while (missing != 0) & (tries > 0):
                word = tl.load(from_peer, mask=live, other=0, volatile=True)
                missing = tl.max((live & ((word >> 32).to(tl.int32) != call)).to(tl.int32), 0)
                tries -= 1
            if missing != 0:
                tries = tries * 0
                tl.store(state_ptr, 1)
                tl.store(failed.to(tl.int64).to(tl.pointer_type(tl.int32)), 1)
            part = word.to(tl.int32)
        if IS_WIDE:
            low += part.to(tl.float32, bitcast=True)
        else:
            part_low, part_high = _halves(part, DTYPE)
            low += part_low
            high += part_high
    if HAS_RESIDUAL:
        if IS_WIDE:
            low += residual.to(tl.float32, bitcast=True)
        else:
            residual_low, residual_high = _halves(residual, DTYPE)
            low += residual_low
            high += residual_high
    total = low.to(tl.int32, bitcast=True) if IS_WIDE else _word(low, high, DTYPE)
    tl.store(sum_ptr + at, total, mask=live)
    if HAS_NORM:
        if not IS_WIDE:  # what is normed is what was stored
            low, high = _halves(total, DTYPE)
        squares = low * low if IS_WIDE else low * low + high * high
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / features + eps)
        low = low * scale * weight_low
        if IS_WIDE:
            result = low.to(tl.int32, bitcast=True)
        else:
            result = _word(low, high * scale * weight_high, DTYPE)
        tl.store(out_ptr + at, result, mask=live)
    tl.store(state_ptr + 1 + row, call)


_TRITON = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def inbox_words(size: int) -> int:
    """Words of 8 bytes of a rank's inbox in a group of `size` ranks, all of them 0 in the beginning."""
    return MOST_ROWS * 2 * size * MOST_WORDS


class RankSum:
    """One rank's side of the sums of a group.

    inboxes: the addresses of all ranks' inboxes as this rank sees them, each of `inbox_words(ranks)` words of 0.
    device: of the sums. Host memory in the interpreter.
    seconds: that a kernel waits for the others, at least. One that has waited in vain gives results of no use and sets
        `failed`, and later calls don't wait.

    Every rank makes the same calls, on one stream, with tensors of one shape and dtype.
    """

    def __init__(self, rank: int, inboxes: Sequence[int], device: Any, seconds: float):
        self.rank, self.size = rank, len(inboxes)
        self.inboxes = tuple(address - (1 << 64) if address >= 1 << 63 else address for address in inboxes)
        self.limit = int(min(seconds * TRIES_A_SECOND, 2**62))
        device = torch.device(device)
        self.state = torch.zeros(1 + MOST_ROWS, dtype=torch.int32, device=device)
        # In the host's memory, where it is read without a wait.
        self._failed = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._early = HAS_WAIT and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9

    @property
    def failed(self) -> bool:
        """Whether a kernel has waited in vain."""
        return bool(self._failed.item())

    def takes(self, x: torch.Tensor) -> bool:
        """Whether rows [rows, features] are few and short enough, contiguous and whole words."""
        if x.dim() != 2 or x.dtype not in _TRITON or not x.is_contiguous() or x.data_ptr() % 16:
            return False
        row_bytes = x.shape[1] * x.element_size()
        return 0 < x.shape[0] <= MOST_ROWS and row_bytes % 4 == 0 and 0 < row_bytes <= 4 * MOST_WORDS

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, features] added up over the ranks in float32, rounded once."""
        return self._launch(x, None, None, 0.0)[1]

    def sum_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(h) * weight, h), h = residual + x of all ranks, rounded once. residual: as x. weight [features] of
        x's dtype or float32, whose values don't change.
        """
        return self._launch(x, residual, weight, eps)

    def _launch(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, features = x.shape
        total = torch.empty_like(x)
        out = torch.empty_like(x) if weight is not None else total
        is_wide = x.dtype == torch.float32
        weight_wide = weight is not None and weight.dtype == torch.float32
        words = features * x.element_size() // 4
        block = power_of_two(words, 32)
        options: dict[str, Any] = {"launch_pdl": True} if self._early else {}
        _sum_ranks[(rows,)](
            _words(x), _words(x if residual is None else residual),
            x if weight is None else weight if weight_wide else _words(weight), _words(out), _words(total),
            self.inboxes, self.state, self._failed.data_ptr(), words, features, self.limit, float(eps),
            RANK=self.rank, SIZE=self.size, ROW=MOST_WORDS, DTYPE=_TRITON[x.dtype], IS_WIDE=is_wide,
            HAS_RESIDUAL=residual is not None, HAS_NORM=weight is not None, IS_WEIGHT_WIDE=weight_wide,
            EARLY=self._early, BLOCK=block, num_warps=min(32, max(1, block // 64)), **options,
        )  # fmt: skip
        return out, total


def _words(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)
