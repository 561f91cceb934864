"""What `accelerate` asks of the engine's models, beyond what the engine itself does: `SharesParameters`.

The engine's `Model` computes; it need not know that its weights are a stock model's parameters. These attributes tell
`accelerate` where the parameters lie, and which numbers of the stock modules the model's own must agree with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ...generate.arrays import HostArrays
from ...generate.rope_scaling import Rope

if TYPE_CHECKING:
    from ...generate.decoder_model import DecoderModel
    from ...generate.gpt2 import Gpt2

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
    def derived(self) -> list[tuple[Any, Any, float]]:
        """(array, parameter, offset): the array is the parameter plus the offset, and is written anew when the
        parameter changes; one that lies where the parameter does is the parameter itself.
        """

    @property
    def numbers(self) -> Mapping[str, float]:
        """Numbers that modules of the stock model keep beside its config, by the names of their attributes; "x.eps" is
        that of modules named x."""

    @property
    def ropes(self) -> Mapping[str, Rope]:
        """RoPE by what the names of the stock model's frequencies begin with: nothing, or a layer type. Frequencies are
        set where the stock model's differ.
        """


if TYPE_CHECKING:  # mypy holds both architectures to it

    def _hold(gpt2: Gpt2, decoder: DecoderModel) -> tuple[SharesParameters, SharesParameters]:
        return gpt2, decoder
