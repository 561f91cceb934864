"""The frequencies of RoPE (Su et al., 2021) and of its scalings, from a config's fields.

Called by decoder_model.py. Reads the old layout (rope_theta, rope_scaling) and that of Transformers 5
(rope_parameters). What each rope_type does to the frequencies of a pair of elements:

default     nothing
linear      divides all of them by a factor (Chen et al., 2023)
dynamic     nothing up to max_position_embeddings, which is as far as this engine goes
llama3      divides the slow ones, with a smooth change in between (Llama 3.1)
yarn        divides the slow ones, with a ramp in between, and enlarges q and k (Peng et al., 2023)
longrope    divides each by a number of its own and enlarges q and k (Ding et al., 2024). Beyond the context that the
            model was first trained for, Transformers takes other numbers and computes the whole text anew; here a text
            ends there
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashkernel as fk

from .config import NEEDED, array, flag, integer, mapping, number, read_field, read_fields, text
from .errors import CheckpointError, UnsupportedModelError
from .files import describe

__all__ = ["ROPE_TYPES", "Rope", "read_rope", "rope_parameters"]

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_FACTOR = number(NEEDED, 1e-6)


@dataclass
class Rope:
    """How one kind of layer turns q and k."""

    theta: float
    rotary_dim: int  # elements of a head that are turned, from the first on
    inv_freq: Any = None  # float32 [rotary_dim / 2]; None: those of theta
    factor: float = 1.0  # of what is turned, q and k each
    max_positions: int | None = None  # as far as inv_freq is right; None: no limit
    changes: bool = False  # whether the stock model takes other frequencies for longer texts
    rounded: bool = False  # whether inv_freq are nothing but those of theta, in float32

    @property
    def given(self) -> Any:
        """inv_freq as ops are given it. In the invariant mode None where theta says all, so that the bits are those of
        a trainer whose ops are given theta.
        """
        return None if self.rounded and fk.is_invariant() else self.inv_freq

    def frequencies(self) -> np.ndarray:
        """float64 [rotary_dim / 2] of theta, without any scaling."""
        return self.theta ** (-np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim)


def rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """RoPE's fields, whichever layout they are in. The older name wins, as in Transformers."""
    named = read_fields(config, {"rope_scaling": mapping(), "rope_parameters": mapping()})
    return named["rope_scaling"] or named["rope_parameters"] or {}


def read_rope(
    config: Mapping[str, Any],
    head_dim: int,
    parameters: Mapping[str, Any] | None = None,
    *,
    theta: float = 10000.0,
    kinds: tuple[str, ...] = ROPE_TYPES,
    aliases: Mapping[str, str] | None = None,
    partial: bool = False,
) -> Rope:
    """RoPE of a config; `max_position_embeddings` must be in it.

    parameters: RoPE's fields; None: those of the config.
    theta: the base where no field says another.
    kinds: the rope_types that the model_type has.
    aliases: other names of some of them.
    partial: whether partial_rotary_factor leaves the end of each head as it is.

    Raises UnsupportedModelError for another rope_type, CheckpointError for fields that fit none.
    """
    if parameters is None:
        parameters = rope_parameters(config)
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedModelError("load_model: config.json has rope_parameters by layer type; one set is needed")
    where = "RoPE of config.json"
    kind = read_field(parameters, "rope_type", text(parameters.get("type", "default")), where)
    kind = (aliases or {}).get(kind, kind)
    if not isinstance(kind, str) or kind not in kinds:
        raise UnsupportedModelError(
            f"load_model: config.json has rope_type={describe(kind)}; {', '.join(kinds[:-1])} or {kinds[-1]} is needed"
        )
    rotary_dim = _rotary_dim(config, parameters, head_dim, partial)
    outer = config.get("rope_theta")
    theta_field = number(theta, 1e-6)
    if outer is not None:
        theta_field = number(read_field(config, "rope_theta", theta_field), 1e-6)
    rope = Rope(read_field(parameters, "rope_theta", theta_field, where), rotary_dim)
    if kind == "dynamic":
        read_field(parameters, "factor", _FACTOR, where)
        rope.changes = True
    elif kind == "linear":
        factor = read_field(parameters, "factor", _FACTOR, where)
        rope.inv_freq = (rope.frequencies() / factor).astype(np.float32)
    elif kind != "default":
        # The context that the model was trained for: the config's own field wins, as in Transformers.
        original = "original_max_position_embeddings"
        holder = config if config.get(original) is not None else parameters
        context = read_field(holder, original, integer(config["max_position_embeddings"]), where)
        _SCALINGS[kind](rope, parameters, context, config["max_position_embeddings"], where)
    return rope


def _rotary_dim(config: Mapping[str, Any], parameters: Mapping[str, Any], head_dim: int, partial: bool) -> int:
    rotary_dim = head_dim
    for source in (parameters, config):
        part = source.get("partial_rotary_factor")
        if part is None:
            continue
        if partial:
            rotary_dim = int(head_dim * read_field(source, "partial_rotary_factor", number(1.0, 0, 1)))
            break
        if part != 1 or isinstance(part, bool):
            raise UnsupportedModelError(
                f"load_model: config.json has partial_rotary_factor={describe(part)}; 1 is needed: Transformers "
                "rotates whole heads of this model_type"
            )
    if rotary_dim < 2 or rotary_dim % 2:
        raise CheckpointError(
            f"load_model: config.json gives {rotary_dim} rotated dims of a head; an even number >= 2 is needed"
        )
    return rotary_dim


def _llama3(rope: Rope, parameters: Mapping[str, Any], context: int, _most: int, where: str) -> None:
    frequencies = rope.frequencies()
    factor, low, high = (
        read_field(parameters, name, _FACTOR, where) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    if high <= low:
        raise CheckpointError(
            f"load_model: config.json has high_freq_factor={high} and low_freq_factor={low}; high must be above low"
        )
    turns = context * frequencies / (2 * math.pi)  # full turns of a pair within the original context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 0: slow, divided by factor; 1: fast, kept
    rope.inv_freq = ((1 - smooth) * frequencies / factor + smooth * frequencies).astype(np.float32)


def _yarn(rope: Rope, parameters: Mapping[str, Any], context: int, most: int, where: str) -> None:
    optional = number(None, 1e-6, 1e6, null=True)
    names = ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    given = {name: read_field(parameters, name, optional, where) for name in names}
    factor = read_field(parameters, "factor", number(NEEDED, 1e-6, null=True), where) or most / context
    if rope.theta <= 1:
        raise CheckpointError(f"load_model: {where} has rope_theta={rope.theta}; a number above 1 is needed by yarn")

    def enlarged(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given["attention_factor"] is not None:
        rope.factor = given["attention_factor"]
    elif given["mscale"] and given["mscale_all_dim"]:
        rope.factor = enlarged(given["mscale"]) / enlarged(given["mscale_all_dim"])
    else:
        rope.factor = enlarged(1.0)

    def pair_of(turns: float) -> float:
        """The pair, counted from the fastest, that turns so often within the original context."""
        return rope.rotary_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_of(given["beta_fast"] or 32.0), pair_of(given["beta_slow"] or 1.0)
    if read_field(parameters, "truncate", flag(True), where):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    if first == last:
        last += 0.001
    slow = np.clip((np.arange(rope.rotary_dim // 2) - first) / (last - first), 0.0, 1.0)
    frequencies = rope.frequencies()
    rope.inv_freq = (frequencies / factor * slow + frequencies * (1 - slow)).astype(np.float32)


def _longrope(rope: Rope, parameters: Mapping[str, Any], context: int, most: int, where: str) -> None:
    read_field(parameters, "long_factor", array(), where)
    divisors = read_field(parameters, "short_factor", array(), where)
    pairs = rope.rotary_dim // 2
    fits = isinstance(divisors, (list, tuple)) and len(divisors) == pairs
    if not fits or any(
        isinstance(x, bool) or not isinstance(x, (int, float)) or not 1e-6 <= x <= 1e30 for x in divisors
    ):
        raise CheckpointError(
            f"load_model: {where} has short_factor={describe(divisors)}; {pairs} positive numbers are needed"
        )
    factor = read_field(parameters, "factor", number(None, 1e-6, null=True), where) or most / context
    given = read_field(parameters, "attention_factor", number(None, 1e-6, 1e6, null=True), where)
    if given is not None:
        rope.factor = given
    elif factor > 1:
        if context < 2:
            raise CheckpointError(f"load_model: {where} has an original context of {context}; 2 or more are needed")
        rope.factor = math.sqrt(1 + math.log(factor) / math.log(context))
    rope.inv_freq = (rope.frequencies() / np.array(divisors, np.float64)).astype(np.float32)
    rope.max_positions = min(context, most)
    rope.changes = True


_SCALINGS = {"llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
