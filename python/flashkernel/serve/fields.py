"""Reads typed fields of a JSON object; what does not fit is an error that names the field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .errors import bad_request

__all__ = ["Fields"]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


class Fields:
    """null counts as left out."""

    def __init__(self, values: Any, known: Iterable[str]):
        if not isinstance(values, dict):
            raise bad_request(f"the body is {_kind(values)}; a JSON object is needed")
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise bad_request(f"the field {unknown[0]!r} is unknown; leave it out", unknown[0], "unknown_parameter")
        self._values: dict[str, Any] = {key: value for key, value in values.items() if value is not None}

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def _typed(self, name: str, types: tuple[type, ...], needed: str, default: Any) -> Any:
        value = self._values.get(name, default)
        if value is not None and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
            raise bad_request(f"{name} is {_kind(value)}; {needed} is needed", name, "invalid_type")
        return value

    def number(self, name: str, default: float | None = None) -> Any:
        value = self._typed(name, (int, float), "a number", default)
        if isinstance(value, int) and abs(value) > 2**63:
            raise bad_request(f"{name} is out of range", name, "invalid_value")
        return None if value is None else float(value)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> Any:
        value = self._typed(name, (int,), "an integer", default)
        if value is not None and not low <= value <= high:
            raise bad_request(f"{name}={value}; an integer in [{low}, {high}] is needed", name, "invalid_value")
        return value

    def flag(self, name: str) -> bool:
        return bool(self._typed(name, (bool,), "a boolean", False))

    def text(self, name: str) -> str | None:
        value: str | None = self._typed(name, (str,), "a string", None)
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] = self._typed(name, (dict,), "an object", {})
        return value

    def refuse(self, *names: str) -> None:
        """Fields of OpenAI's API that this server does not obey, unless they ask for nothing."""
        for name in names:
            value = self._values.get(name)
            if value not in (None, False, "", [], {}):
                raise bad_request(
                    f"{name} is not supported by this server; leave it out", name, "unsupported_parameter"
                )
