"""Files of a checkpoint directory, read as what they are: data of somebody else.

Called by the modules that read checkpoints. Every failure is a CheckpointError of one sentence:
files that are missing, no files at all (a directory, a pipe), not readable, too long, not JSON.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..terminal import visible
from .errors import CheckpointError

__all__ = [
    "MAX_INDEX_BYTES",
    "describe",
    "is_file",
    "parse_json",
    "read_bytes",
    "read_json",
    "reason",
    "require_directory",
    "shown",
    "without_panics",
]

MAX_CONFIG_BYTES = 4 << 20
MAX_INDEX_BYTES = 64 << 20  # the index of a checkpoint with 100 000 tensors has about 10 MB
T = TypeVar("T")


def shown(text: object, length: int = 120) -> str:
    """A name or another package's message on one line, control characters escaped, cut to what fits a sentence."""
    text = visible(" ".join(str(text)[: 4 * length].splitlines()))
    return text if len(text) <= length else f"{text[: length // 2]}...{text[-length // 3 :]}"


def describe(value: Any) -> str:
    """A value of a JSON file for an error's text: its repr, or what it is where that is long."""
    if isinstance(value, int) and not -(2**64) < value < 2**64:
        return f"<an integer of {value.bit_length()} bits>"
    if isinstance(value, (list, dict)):  # repr could be huge, or nested too deep
        return f"<a JSON {'array' if isinstance(value, list) else 'object'} of {len(value)}>"
    return shown(repr(value[:200] if isinstance(value, str) else value))


def reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _mode(path: Path) -> int | None:
    """st_mode behind links; None where nothing is there. Raises CheckpointError where that cannot be found out."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # no permission, a loop of links, a name too long or with a NUL
        raise CheckpointError(f"load_model: {shown(repr(str(path)))} cannot be read: {reason(error)}") from error


def is_file(path: Path) -> bool:
    """Whether a file of data is there: a directory, a pipe or a device is none, a link to a file is one."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def require_directory(directory: str | Path) -> None:
    mode = _mode(Path(directory))
    if mode is None or not stat.S_ISDIR(mode):
        raise CheckpointError(
            f"load_model: {shown(repr(str(directory)))} is not a directory; a local Hugging Face checkpoint directory "
            "(config.json, *.safetensors, tokenizer.json) or a .gguf file is needed"
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; two values of one name would leave open which one is meant."""
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {shown(repr(name))} occurs twice in an object")
            seen.add(name)
    return result


def parse_json(text: str | bytes, name: str) -> dict[str, Any]:
    """The JSON object `text`. Raises CheckpointError for anything else, `name` being the file."""
    try:
        value = json.loads(text if isinstance(text, str) else text.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise CheckpointError(f"load_model: {name} is not valid JSON: it is nested too deep") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, integers of thousands of digits
        raise CheckpointError(f"load_model: {name} is not valid JSON: {shown(error, 200)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"load_model: {name} holds a {type(value).__name__}; a JSON object is needed")
    return value


def read_bytes(path: Path, most: int) -> bytes:
    """The bytes of a file that is there, of at most `most`."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(size) if size <= most else b""
    except OSError as error:
        raise CheckpointError(f"load_model: {path.name} cannot be read: {reason(error)}") from error
    if size > most:
        raise CheckpointError(f"load_model: {path.name} has {size} bytes; at most {most} are needed")
    return data


def read_json(path: Path, most: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file that is there, of at most `most` bytes: parsed, they take some thirty times that."""
    return parse_json(read_bytes(path, most), path.name)


def without_panics(call: Callable[[], T]) -> T:
    """call(), where an error of any kind is an Exception: a panic of a package written in Rust is none."""
    try:
        return call()
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
