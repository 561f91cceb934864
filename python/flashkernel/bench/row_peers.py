"""Other libraries' kernels as peers of the rows bound by memory and of linear, where they are installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from . import baselines, liger, quack
from .baselines import Arguments
from .case import Provider, Settings, each

__all__ = ["providers"]

LIBRARIES = {"liger": liger, "quack": quack}


def providers(s: Settings, name: str, sets: Sequence[Arguments]) -> Iterator[Provider]:
    """Providers from every library that has the op of the baseline `name`, with the same arguments."""
    if not s.cuda:
        return
    for library, known in LIBRARIES.items():
        if name in known.OPS and library not in s.without and baselines.optional(known.MODULE) is not None:
            function, own = known.OPS[name]
            yield Provider(library, each(function, [own(arguments) for arguments in sets] if own else sets))
