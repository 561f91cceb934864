"""config.json's values, checked: each architecture names the fields that it reads, with type, bounds and default.

Called by the model classes. Types are exact, as they are in Transformers: 2.5, 2.0, "2" and true are no integers.
Invariant: no value leaves this module that a model could not compute with, and nothing is allocated for one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from .errors import CheckpointError
from .files import describe

__all__ = [
    "NEEDED",
    "Field",
    "array",
    "flag",
    "integer",
    "mapping",
    "number",
    "read_field",
    "read_fields",
    "text",
    "token_ids",
]

NEEDED = object()  # the default of a field that a config must have
MAX_SIZE = 2**31 - 1
MAX_NUMBER = 1e30  # well inside of float32


@dataclass(frozen=True)
class Field:
    kind: str  # "integer", "number", "flag", "text", "array" or "mapping"
    default: Any  # where the key is missing
    null: bool = False  # whether null is a value, given as None
    low: float = -math.inf
    high: float = math.inf
    alias: str | None = None  # another name of the field, as Transformers' attribute_map has it


_ID = Field("integer", None, False, -MAX_SIZE, MAX_SIZE)


def integer(default: Any, low: int = 1, high: int = MAX_SIZE, *, null: bool = False, alias: str | None = None) -> Field:
    return Field("integer", default, null, low, high, alias)


def number(default: Any, low: float, high: float = MAX_NUMBER, *, null: bool = False) -> Field:
    return Field("number", default, null, low, high)


def flag(default: bool | None, *, null: bool = False) -> Field:
    return Field("flag", default, null)


def text(default: str) -> Field:
    return Field("text", default)


def array() -> Field:
    """A list, or None."""
    return Field("array", None, null=True)


def mapping() -> Field:
    """A JSON object, or None."""
    return Field("mapping", None, null=True)


def _fits(value: Any, field: Field) -> bool:
    if field.kind == "flag":
        return isinstance(value, bool)
    if field.kind == "text":
        return isinstance(value, str)
    if field.kind == "array":
        return isinstance(value, (list, tuple))
    if field.kind == "mapping":
        return isinstance(value, Mapping)
    kind: Any = Integral if field.kind == "integer" else Real
    # The bounds come before any conversion: an integer of a thousand digits does not fit a float. NaN fails them.
    return isinstance(value, kind) and not isinstance(value, bool) and field.low <= value <= field.high


def _needed(field: Field) -> str:
    if field.kind not in ("integer", "number"):
        what = {"flag": "true or false", "text": "a string", "array": "an array", "mapping": "an object"}[field.kind]
    else:
        kind = "an integer" if field.kind == "integer" else "a number"
        whole = field.kind == "integer"
        low, high = (f"{int(x)}" if whole else f"{x:g}" for x in (field.low, field.high))
        what = f"{kind} from {low} to {high}"
    return f"{what} or null" if field.null else what


def read_field(config: Mapping[str, Any], name: str, field: Field, file: str = "config.json") -> Any:
    """The value of one field. Raises CheckpointError for one of another type or outside of its bounds."""
    names = [key for key in (name, field.alias) if key is not None and key in config]
    if len(names) == 2 and config[names[0]] != config[names[1]]:
        raise CheckpointError(
            f"load_model: {file} has {name}={describe(config[name])} and {field.alias}="
            f"{describe(config[names[1]])}, two names of one field; one value is needed"
        )
    if not names:
        if field.default is NEEDED:
            raise CheckpointError(f"load_model: {file} has no {name}; {_needed(field)} is needed")
        return field.default
    value = config[names[0]]
    if value is None and field.null:
        return None
    if not _fits(value, field):
        raise CheckpointError(f"load_model: {file} has {names[0]}={describe(value)}; {_needed(field)} is needed")
    return int(value) if field.kind == "integer" else float(value) if field.kind == "number" else value


def read_fields(config: Mapping[str, Any], fields: Mapping[str, Field], file: str = "config.json") -> dict[str, Any]:
    """The values of all `fields`, by name."""
    return {name: read_field(config, name, field, file) for name, field in fields.items()}


def token_ids(config: Mapping[str, Any], name: str, file: str) -> frozenset[int]:
    """A field that holds one token id, an array of them, or null (none)."""
    value = config.get(name)
    values: Iterable[Any] = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
    found = set()
    for one in values:
        if not _fits(one, _ID):
            raise CheckpointError(
                f"load_model: {file} has {name}={describe(value)}; an integer, an array of integers or null is needed"
            )
        found.add(int(one))
    return frozenset(found)
