"""What `accelerate` asks of the engine's models, beyond what the engine itself does: `SharesParameters`.

The engine's `Model` computes; it need not know that its weights are a stock model's parameters. These attributes tell
`accelerate` where the parameters lie, and which numbers of the stock modules the model's own must agree with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ...generate.arrays import HostArrays

if TYPE_CHECKING:
    from ...generate.gpt2 import Gpt2
    from ...generate.llama import Llama

__all__ = ["SharesParameters"]


@runtime_checkable
class SharesParameters(Protocol):
    """A model on the parameters of a stock one. Names are those of the stock model's parameters."""

    arrays: HostArrays

    @property
    def stacked(self) -> list[tuple[list[str], Any]]:
        """(names, matrix): these parameters are rows of the matrix (or vector), one below the other from its first
        row on. Rows may follow that are nobody's.
        """

    @property
    def turned(self) -> list[tuple[str, Any]]:
        """(name, weight): the parameter is this weight the other way round, weight.T."""

    @property
    def eps(self) -> float:
        """Epsilon of every norm."""

    @property
    def scale(self) -> float | None:
        """The factor of the scores of every layer; None: a layer has its own, by the config alone."""

    @property
    def theta(self) -> float | None:
        """RoPE's base; None: no RoPE."""

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that RoPE turns."""

    inv_freq: (
        Any  # RoPE's frequencies, float32 [rotary_dim / 2]; None: those of theta. Set where the stock model's differ
    )


if TYPE_CHECKING:  # mypy holds both architectures to it

    def _hold(gpt2: Gpt2, llama: Llama) -> tuple[SharesParameters, SharesParameters]:
        return gpt2, llama
