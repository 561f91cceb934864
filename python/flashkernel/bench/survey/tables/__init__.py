"""The shapes of the survey: one file a family, each with ROWS."""

from __future__ import annotations

from typing import Any, Protocol

from ...case import Settings, Work
from . import backward, decode, encoder, linear, matrices, options, prefill, sampling, varlen, verify

__all__ = ["FAMILIES", "Spec"]


class Spec(Protocol):
    """A shape of the tables."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> dict[str, Any]:
        """The shape of a row by the names that plots and CSV use."""

    def shrunk(self) -> Spec:
        """Scaled down for a CPU."""

    def work(self, s: Settings) -> Work: ...


FAMILIES: dict[str, tuple[Spec, ...]] = {
    "decode": decode.ROWS,
    "verify": verify.ROWS,
    "prefill": prefill.ROWS,
    "varlen": varlen.ROWS,
    "encoder": encoder.ROWS,
    "options": options.ROWS,
    "backward": backward.ROWS,
    "linear": linear.ROWS,
    "matrices": matrices.ROWS,
    "sampling": sampling.ROWS,
}
