"""One thread at a time inside an engine, and a child of fork() that need not wait for a thread that it does not have.

Called by `Engine`, whose methods are `alone`, and by whoever waits for its turn (`with engine.turn`).
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

__all__ = ["LEFT_BEHIND", "Turn", "alone"]

P = ParamSpec("P")
R = TypeVar("R")
LEFT_BEHIND: list[Any] = []
"""What a child of fork() found in the midst of another thread's step: not to be used, nor given back."""


class _TakesTurns(Protocol):
    turn: Turn

    def abandon(self) -> None: ...

    def active(self) -> AbstractContextManager[Any]: ...


class Turn:
    """The right to be inside an engine. A thread that has it may take it again."""

    def __init__(self, engine: _TakesTurns):
        self._lock = threading.RLock()
        _turns[self] = weakref.ref(engine)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def take(self) -> None:
        """Raises RuntimeError where another thread has it."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "generate: another thread is inside this engine; one at a time may be: wait with `engine.turn`, or "
                "give each thread an engine"
            )

    def after_fork(self, engine: _TakesTurns) -> None:
        if self._lock.acquire(blocking=False):  # nobody was inside, or the thread that forked
            self._lock.release()
            return
        self._lock = threading.RLock()
        engine.abandon()


_turns: weakref.WeakKeyDictionary[Turn, weakref.ref[_TakesTurns]] = weakref.WeakKeyDictionary()


def _after_fork_in_child() -> None:
    for turn, reference in list(_turns.items()):
        if (engine := reference()) is not None:
            turn.after_fork(engine)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

E = TypeVar("E", bound=_TakesTurns)


def alone(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """A method that refuses to run while another thread is inside the engine, and runs on the engine's device."""

    @functools.wraps(method)
    def call(self: E, *args: P.args, **kwargs: P.kwargs) -> R:
        turn = self.turn
        turn.take()
        try:
            with self.active():
                return method(self, *args, **kwargs)
        finally:
            turn.__exit__()

    return call
