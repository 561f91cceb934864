"""Whether two strided tensors share memory, and whether one names an element twice: exact, by bounded work.

As the library's own checks, for the Triton ops. Tensors share a byte where start + sum(step_i * x_i) is an address of
both, 0 <= x_i <= most_i for every dim and every byte of an element: one linear equation in bounded whole numbers.
Ordinary tensors never get that far: their ranges of addresses are apart. Otherwise a search, largest step first: what
the smaller steps add up to, and their greatest common divisor, leave few values to try.
"""

from __future__ import annotations

import math

import torch

MOST_WORK = 20000  # values that a search tries before it gives up


class _TooLongError(Exception):
    """A search gave up."""


class _Equation:
    """Whether sum(step * x) can be a given number, x from 0 to `most` in each (step, most)."""

    def __init__(self, terms: list[tuple[int, int]], work: int = MOST_WORK) -> None:
        self.work = work
        self.terms: list[tuple[int, int]] = []
        for step, most in sorted((step, most) for step, most in terms if step and most):
            # A multiple of a smaller step, no further than that one reaches, only makes its run of values longer.
            for i, (smaller, reach) in enumerate(self.terms):
                if step % smaller == 0 and step // smaller <= reach + 1:
                    self.terms[i] = smaller, reach + step // smaller * most
                    break
            else:
                self.terms.append((step, most))
        self.sums, self.divisors = [0], [0]
        for step, most in self.terms:
            self.sums.append(self.sums[-1] + step * most)
            self.divisors.append(math.gcd(self.divisors[-1], step))

    def has(self, target: int) -> bool:
        if not self.terms:
            return target == 0
        if not 0 <= target <= self.sums[-1] or target % self.divisors[-1]:
            return False
        return self._search(len(self.terms) - 1, target)

    def _search(self, i: int, target: int) -> bool:
        """Terms 0 to i; target is from 0 to their sum and a multiple of their divisor."""
        if i == 0:
            return True
        (step, most), below, divisor = self.terms[i], self.sums[i], self.divisors[i]
        x, last, stride = max(0, -(-(target - below) // step)), min(most, target // step), 1
        while x <= last:
            self.work -= 1
            if self.work < 0:
                raise _TooLongError
            rest = target - step * x
            if rest % divisor == 0:
                # Of the values that follow, only those with the same remainder leave a multiple of the divisor.
                stride = divisor // math.gcd(step, divisor)
                if self._search(i - 1, rest):
                    return True
            x += stride
        return False


def _range(x: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor, and the one past its last. torch has no negative strides."""
    begin = x.data_ptr()
    if x.is_contiguous():  # most are, and this is much faster
        return begin, begin + x.nbytes
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (last + 1) * x.element_size()


def shared_memory(a: torch.Tensor, b: torch.Tensor) -> bool | None:
    """Whether some byte belongs to an element of both; None where to tell would take too long."""
    (begin, a_end), (b_begin, end) = _range(a), _range(b)
    if a_end <= b_begin or end <= begin or not a.numel() or not b.numel():
        return False
    if begin == b_begin:
        return True
    # begin of a + what a's dims and bytes add = end of b - 1 - what b's dims and bytes take away.
    terms = [(1, a.element_size() + b.element_size() - 2)]
    for x in (a, b):
        terms += [(s * x.element_size(), n - 1) for n, s in zip(x.shape, x.stride(), strict=True)]
    try:
        return _Equation(terms).has(end - 1 - begin)
    except _TooLongError:
        return None


def overlaps_itself(x: torch.Tensor) -> bool | None:
    """Whether two different indices name one element; None where to tell would take too long."""
    if x.is_contiguous() or not x.numel():
        return False
    dims = sorted((stride, size - 1) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)
    ordinary, reached = True, 0
    for stride, steps in dims:
        if stride == 0:
            return True
        ordinary = ordinary and stride > reached
        reached += steps * stride
    if ordinary:  # each stride leads past everything that the smaller ones reach
        return False
    # Two indices of one element differ by y, sum(stride * y) = 0, |y| <= steps. Of y and -y one has its first number
    # that is not 0 above 0: at dim d, y[d] = 1 + x, and y[e] = x - steps[e] for those after it.
    work = MOST_WORK
    try:
        for d, (stride, steps) in enumerate(dims):
            rest = dims[d + 1 :]
            equation = _Equation([(stride, steps - 1), *((s, 2 * n) for s, n in rest)], work)
            if equation.has(sum(s * n for s, n in rest) - stride):
                return True
            work = equation.work
    except _TooLongError:
        return None
    return False


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same elements in the same order: one dtype, shape and place, and the same strides where they matter."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and a.shape == b.shape
        and all(n < 2 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True))
    )
