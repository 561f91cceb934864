"""The ops: functions of the compiled module, reached without a Python layer in between, `force` and `invariant`."""

# No `__all__` here: `flashkernel.__all__` is NAMES, and a type checker takes what _C.pyi declares. The imports that are
# nobody else's business begin with an underscore.
import contextlib as _contextlib
from collections.abc import Iterator as _Iterator

from flashkernel import _C
from flashkernel._C import *  # noqa: F403
from flashkernel._C import force_kernels, forced_kernels

NAMES: tuple[str, ...] = (
    "force",
    "invariant",
    *sorted(name for name in dir(_C) if not name.startswith("_") and name != "OPS"),
)
"""The public names of `flashkernel`: all that the compiled module has, its list of ops apart."""


@_contextlib.contextmanager
def force(patterns: str) -> _Iterator[None]:
    """Run only kernels whose id matches, within a ``with`` block; what was in force before is back after it.

    patterns: as for `force_kernels`: an id such as "attention_fwd/cpu/scalar", a prefix of one, or "*/cpu/scalar";
       several, comma-separated. Ops that no pattern names choose freely. One with "?" at its end ("*/cuda/sm75?") only
       puts its kernels before all others where they accept the call. Process-wide, not per thread.

    Raises: ValueError if a pattern matches no kernel. An op whose forced kernel can't serve a call raises
    NotImplementedError.

    Example:

    >>> import flashkernel as fk
    >>> with fk.force("attention_fwd/cpu/scalar"):
    ...     fk.forced_kernels()
    'attention_fwd/cpu/scalar'
    """
    before = forced_kernels()
    force_kernels(patterns)
    try:
        yield
    finally:
        force_kernels(before)


@_contextlib.contextmanager
def invariant() -> _Iterator[None]:
    """The invariant mode within a ``with`` block: the same tokens give the same bits, however they are batched.

    Results of a token depend on that token and on what it sees, to the bit: not on the batch, on how a prompt is cut,
    on pages, on the number of queries or of threads. docs/invariance.md has the contract, op by op. The mode is the
    process's, not the thread's, because autograd runs gradients in threads of its own. Blocks may nest. The
    environment variable FLASHKERNEL_INVARIANT=1 is a block around the whole process.

    Raises, from an op: NotImplementedError where no kernel for the call keeps the contract.

    Example:

    >>> import numpy as np, flashkernel as fk
    >>> x, weight = np.ones((20, 64), np.float32), np.ones((32, 64), np.float32)
    >>> with fk.invariant():
    ...     one, all_rows = fk.linear(x[:1], weight), fk.linear(x, weight)
    >>> bool((one == all_rows[:1]).all())
    True
    """
    scope = _C._InvariantScope()  # type: ignore[attr-defined]  # stubs leave private names out
    try:
        yield
    finally:
        scope.close()
