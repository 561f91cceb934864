"""What the oracle's modules share. Used inside `flashkernel.reference` only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float: TypeAlias = NDArray[np.float64]
Lengths: TypeAlias = Sequence[int] | NDArray[Any]


def f64(x: ArrayLike) -> Float:
    """A float64 copy."""
    return np.asarray(x).astype(np.float64)
