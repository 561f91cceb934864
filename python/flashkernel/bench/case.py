"""What one row of the bench is: the providers of one result, how much work it is, and how its inputs are made.

A `Case` is a promise: it names a row and makes tensors only when `build` is called, so that listing costs nothing and
memory holds one row at a time. Made by suites/, measured by runner.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from ..testing import CAP
from .machine import last_level_cache_bytes

__all__ = [
    "BESIDE",
    "CHECK",
    "DTYPES",
    "LIMIT",
    "OURS",
    "PEER",
    "TOLERANCE",
    "VARIANT",
    "Case",
    "Inputs",
    "Provider",
    "Settings",
    "Work",
    "attention_flop",
    "each",
    "nbytes",
    "wanted",
]

# Kinds of provider. OURS: what a user of the library gets. VARIANT: another kernel or language of ours. PEER: somebody
# else's. LIMIT: less work than the row's (a plain sum over the bytes), timed in turn with it as its limit. BESIDE:
# something else, worth knowing beside it (the product without its activation). CHECK: what the others are checked
# against, and not timed.
OURS, VARIANT, PEER, LIMIT, BESIDE, CHECK = "ours", "variant", "peer", "limit", "beside", "check"

DTYPES = ("float32", "bfloat16", "float16")


def wanted(texts: Sequence[str] | None, name: str) -> bool:
    """Whether --case, given with these texts or not at all, asks for the row of this name."""
    return not texts or any(text in name for text in texts)


# How far two libraries' results may be apart, relative to the largest value: four times the cap that
# `flashkernel.testing` allows one of them against float64, which is out of reach at these shapes.
TOLERANCE = {dtype: 4.0 * cap for dtype, cap in CAP.items()}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Provider:
    name: str
    calls: Sequence[Callable[[], Any]]  # one for each set of inputs; a measurement walks through them in turn
    kind: str = PEER
    forced: str = ""  # kernel ids in force while it runs


@dataclass(frozen=True)
class Work:
    providers: Sequence[Provider]
    tolerance: float = 1e-4  # on the difference from the first checked peer
    flop: float = 0.0  # of one call; 0: the row is about bytes
    read: float = 0.0  # bytes that one call must read
    written: float = 0.0  # bytes that one call must write
    graph: bool = True  # whether CUDA can capture it (autograd's backward cannot be captured from outside)
    inner: int = 0  # calls per measurement; 0: one on the CPU, what lasts long enough on a GPU
    memory_apart: tuple[int, ...] | None = None  # q's shape, for peak memory in a process of its own (CPU attention)
    restore: Callable[[], None] | None = None  # puts back what calls write in place, before each is checked
    sizes: str = ""  # of its inputs, where the case's name does not tell them
    valid: Callable[[Any], bool] | None = None  # whether a result is right, where right ones differ (sampling)


@dataclass(frozen=True)
class Case:
    group: str
    name: str
    dtype: str
    device: str
    build: Callable[[], Work]
    shape: dict[str, Any] = field(default_factory=dict)  # for plots and CSV: batch, heads, seq, head_dim, causal ...


@dataclass(frozen=True)
class Settings:
    """What the command line asks of the suites."""

    device: str = "cpu"
    quick: bool = False
    dtypes: tuple[str, ...] = ()  # empty: what the suite chooses
    without: frozenset[str] = frozenset()  # providers to leave out
    only: frozenset[str] = frozenset()  # kernel ids (or prefixes) of --kernels; empty or "all": every one

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def pick(self, *, quick: Any, cpu: Any, cuda: Any) -> Any:
        """Sizes by device; the quick ones are the same everywhere: a look at whether all of it runs."""
        return quick if self.quick else cuda if self.cuda else cpu

    def dtypes_of(self, suite: Iterable[str]) -> list[str]:
        return [dtype for dtype in suite if not self.dtypes or dtype in self.dtypes]


def nbytes(*tensors: Any) -> float:
    return float(sum(t.numel() * t.element_size() for t in tensors))


def attention_flop(batch: int, heads: int, seq_q: int, seq_k: int, dim: int, causal: bool) -> float:
    """Two products of 2 * seq_q * seq_k * dim; causal counts half, as every paper does."""
    return 4.0 * batch * heads * seq_q * seq_k * dim * (0.5 if causal else 1.0)


def each(function: Callable[..., Any], sets: Iterable[tuple[Any, ...]], **options: Any) -> list[Callable[[], Any]]:
    """One call for each set of arguments."""
    return [partial(function, *arguments, **options) for arguments in sets]


@lru_cache(maxsize=1)
def _gpu_cache_bytes() -> int:
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(getattr(properties, "L2_cache_size", 60e6))  # older torch does not tell: the largest of today's GPUs


@dataclass(frozen=True)
class Inputs:
    """Random normal tensors of one dtype on one device."""

    device: str
    dtype: str

    def randn(self, *shape: int, scale: float = 1.0) -> Any:
        import torch

        if self.device == "cpu":  # not every CPU build draws low-precision numbers quickly
            return (torch.randn(shape) * scale).to(getattr(torch, self.dtype))
        return torch.randn(shape, device=self.device, dtype=getattr(torch, self.dtype)) * scale

    def heads(self, batch: int, heads: int, seq: int, dim: int) -> Any:
        """[batch, heads, seq, dim], on a GPU laid out as models have it: [batch, seq, heads, dim]."""
        if self.device == "cpu":
            return self.randn(batch, heads, seq, dim)
        return self.randn(batch, seq, heads, dim).transpose(1, 2)

    def index(self, values: Any) -> Any:
        import torch

        return torch.as_tensor(values, dtype=torch.int32, device=self.device)

    def permutation(self, count: int) -> Any:
        import torch

        return torch.randperm(count, device=self.device)

    def sets(self, bytes_per_call: float, *, from_memory: bool = True) -> int:
        """How many equal sets of inputs a measurement walks through, so that no call finds its own in the cache: three
        times a GPU's L2, twice a CPU's last level (whose cores share it with nobody while we run). On a GPU three at
        least: of a set much larger than the L2 cache, too, a tenth is still there when the call comes again, and
        kernels that ask the cache to keep what they read seem faster than memory.
        """
        if not from_memory:
            return 1
        cpu = self.device == "cpu"
        cache = 2 * last_level_cache_bytes() if cpu else 3 * _gpu_cache_bytes()
        return max(1 if cpu else 3, min(64, math.ceil(cache / max(1.0, bytes_per_call))))

    def paged(self, k: Any, v: Any, page: int) -> tuple[Any, Any, Any]:
        """The pages of k and v [batch, heads, seq, dim], at random places, and their table."""
        import torch

        batch, heads, seq, dim = k.shape
        blocks = seq // page
        order = self.permutation(batch * blocks)
        pages = []
        for dense in (k, v):
            to = torch.empty((batch * blocks, page, heads, dim), dtype=k.dtype, device=k.device)
            to[order] = dense.transpose(1, 2).reshape(batch * blocks, page, heads, dim)
            pages.append(to)
        return pages[0], pages[1], order.reshape(batch, blocks).to(torch.int32)
