"""Errors of both kinds: ValueError, as everywhere in the library, and RuntimeError, which flash-attn raises for the
same calls, so that code written for either catches them.
"""

from __future__ import annotations

import flashkernel as fk

__all__ = ["ArgumentError", "TableError", "as_both"]


class ArgumentError(ValueError, RuntimeError):
    """Arguments that don't fit.

    >>> from flashkernel.flash_attn import ArgumentError
    >>> issubclass(ArgumentError, ValueError), issubclass(ArgumentError, RuntimeError)
    (True, True)
    """


class TableError(ArgumentError, fk.BlockTableError):
    """A block_table, or lengths over it, that lead out of the cache; with the numbers of `BlockTableError`."""


def as_both(error: Exception, text: str) -> ArgumentError:
    """The library's error with another text."""
    if not isinstance(error, fk.BlockTableError):
        return ArgumentError(text)
    result = TableError(text)
    vars(result).update(vars(error))
    return result
