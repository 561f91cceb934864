"""How many tokens to draft: as many as pay, by what was accepted lately and by what steps have cost, down to none.

Used by speculate.py. A draft of k tokens, each accepted at the rate r while those before it were, gives r + r^2 + ...
+ r^k tokens more (Leviathan et al., 2023, section 3). What it costs is measured, not guessed: times of steps by the
number of their tokens. Text does not depend on any of this, since every drafted token is verified.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

__all__ = ["Acceptance", "Ledger", "StepTimes", "draft_lengths"]

# Of a sequence about which nothing is known yet: as if of this many drafted tokens this many had been accepted.
PRIOR_DRAFTED, PRIOR_ACCEPTED = 2.0, 1.2
# What weight is left of the past behind one more verified token: some 10 of them count.
KEPT_PER_TOKEN = 0.9
# What weight is left of it behind a draft that was not tried: after some 35 of them, a bad record counts half, so that
# a text which begins to repeat itself is found out, at the price of a step in some dozens.
KEPT_PER_SKIP = 0.98
# Drafts must promise this many times the tokens a second of a plain step. More than 1, since times are noisy.
LEAST_GAIN = 1.03
# Drafts stop while they have cost more than this part of the time of plain steps; what weight is left of the past
# behind one more step.
MOST_LOSS, KEPT_PER_STEP = 0.01, 0.99
# Before it is measured: what a token more costs, in steps of one token.
FIRST_SLOPE = 0.1
# Times that count: the latest ones of each number of tokens, of the last so many steps. Older ones are forgotten, so
# that a number of tokens which was slow once is tried again.
LATEST, MEMORY = 8, 400


@dataclass
class Acceptance:
    """How often the drafted tokens of one sequence were right lately."""

    drafted: float = 0.0
    accepted: float = 0.0

    @property
    def rate(self) -> float:
        return (self.accepted + PRIOR_ACCEPTED) / (self.drafted + PRIOR_DRAFTED)

    def record(self, drafted: int, accepted: int) -> None:
        """A draft of which the first `accepted` tokens were right. Those behind the first wrong one say nothing."""
        tried = min(accepted + 1, drafted)
        kept = KEPT_PER_TOKEN**tried
        self.drafted, self.accepted = self.drafted * kept + tried, self.accepted * kept + accepted

    def skip(self) -> None:
        """There was a draft, and it was not tried."""
        self.drafted, self.accepted = self.drafted * KEPT_PER_SKIP, self.accepted * KEPT_PER_SKIP


@dataclass
class Ledger:
    """What drafts have brought in lately, in seconds, against plain steps for the same tokens."""

    plain: float = 0.0  # seconds of plain steps for all tokens
    gained: float = 0.0

    @property
    def allows(self) -> bool:
        return self.gained >= -MOST_LOSS * self.plain

    def record(self, plain: float, seconds: float | None) -> None:
        """Tokens that would have taken `plain` seconds; seconds: what a step with drafts took; None: it was plain."""
        self.plain = self.plain * KEPT_PER_STEP + plain
        self.gained = self.gained * KEPT_PER_STEP + (0.0 if seconds is None else plain - seconds)


@dataclass
class _Times:
    """What steps of one count took."""

    first: float  # memory and graphs are made in it, so it counts only while it is alone
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    step: int = 0  # when the last one was


class StepTimes:
    """Seconds of steps by a count: medians of what was measured, straight lines between them.

    Where nothing was measured, a step of n costs (1 + slope * (n - 1)) times as much as one of 1.
    """

    def __init__(self, slope: float = FIRST_SLOPE):
        self.slope = slope
        self._measured: dict[int, _Times] = {}
        self._steps = 0

    @property
    def empty(self) -> bool:
        return not self._measured

    def record(self, count: int, seconds: float) -> None:
        self._steps += 1
        times = self._measured.get(count)
        if times is None:
            times = self._measured[count] = _Times(seconds)
        else:
            times.latest.append(seconds)
        times.step = self._steps
        for old in [n for n, found in self._measured.items() if found.step < self._steps - MEMORY]:
            del self._measured[old]

    def knows(self, count: int) -> bool:
        """Whether steps of about that count were measured, within a half."""
        return any(found.latest and 2 * n <= 3 * count <= 4.5 * n for n, found in self._measured.items())

    def seconds(self, counts: np.ndarray) -> np.ndarray:
        """float64 of the shape of `counts`; in steps of one where nothing was measured at all."""
        guess = 1 + self.slope * (counts - 1)
        if not self._measured:
            return guess
        known = np.array(sorted(self._measured), np.float64)
        times = np.array([self._median(int(n)) for n in known])
        found = np.interp(counts, known, times)
        for edge, outside in ((0, counts < known[0]), (-1, counts > known[-1])):
            found = np.where(outside, guess * (times[edge] / (1 + self.slope * (known[edge] - 1))), found)
        return found

    def _median(self, count: int) -> float:
        times = self._measured[count]
        return float(np.median(times.latest)) if times.latest else times.first


def draft_lengths(
    rates: Sequence[float],
    limits: Sequence[int],
    step_seconds: Callable[[np.ndarray], np.ndarray],
    draft_seconds: Callable[[np.ndarray], np.ndarray] | None = None,
) -> list[int]:
    """How many tokens each sequence of a step drafts, for the most tokens a second of all together.

    rates: of acceptance. limits: most tokens of each draft. step_seconds: of a step, by the number of its tokens,
    drafted ones included. draft_seconds: of the drafts of a step, by the length of the longest; None: they cost
    nothing.

    The next token of a draft is worth the chance that all before it are right and it is, too. So the most worthy ones
    of all sequences are added one by one, and the best number of them is taken.

    >>> cheap, dear = (lambda n: 1 + 0.02 * (n - 1)), (lambda n: n)
    >>> draft_lengths([0.9, 0.2], [4, 4], cheap), draft_lengths([0.9, 0.2], [4, 4], dear)
    ([4, 2], [0, 0])
    """
    rows = len(rates)
    worth = sorted(
        (-(rate**j), j, i) for i, (rate, most) in enumerate(zip(rates, limits, strict=True)) for j in range(1, most + 1)
    )
    values = np.array([value for value, _, _ in worth])
    tokens = rows - np.concatenate([[0.0], np.cumsum(values)])
    seconds = step_seconds(rows + np.arange(len(worth) + 1)).astype(np.float64)
    if draft_seconds is not None and worth:
        longest = np.maximum.accumulate(np.array([j for _, j, _ in worth]))
        seconds[1:] += draft_seconds(longest)
    speed = tokens / seconds
    best = int(np.argmax(speed))
    lengths = [0] * rows
    if speed[best] >= LEAST_GAIN * speed[0]:
        for _, _, i in worth[:best]:
            lengths[i] += 1
    return lengths
