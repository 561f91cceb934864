"""One GGUF file: its metadata, which tensors it holds, and their values in float32.

Called by gguf_checkpoint.py, tokenizer.py and chat_template.py. The format is ggml's, versions 2 and 3, little-endian:
counts, typed key-value pairs, a table of tensors, the data. A reader of our own, since the format is small, and since
the package gguf trusts its input: every count here is held against what is left of the file, and against a bound,
before anything is made for it. Quantised tensors become float32 when they are read (gguf_blocks.py).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from .errors import CheckpointError, UnsupportedModelError
from .files import is_file, reason, shown
from .gguf_blocks import TYPES, BlockType, to_float32

__all__ = ["GgufFile", "is_gguf"]

MAX_HEADER_BYTES = 1 << 28  # metadata and table; vocabularies of 256 000 tokens with their merges take some 10 MB
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ELEMENTS = 1 << 22  # of all arrays of the metadata together
MAX_KEY_BYTES = 1 << 16
MAX_NAME_BYTES = 256  # ggml's own bound is 64
MAX_DIMS = 4

_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


def is_gguf(path: str | Path) -> bool:
    """Whether a path is that of a GGUF file, by its name; a directory never is."""
    return Path(path).suffix.lower() == ".gguf" and is_file(Path(path))


@dataclass(frozen=True)
class _Tensor:
    kind: BlockType
    shape: tuple[int, ...]  # slowest dimension first, as in NumPy
    begin: int  # byte of the file
    blocks: int


class _Header:
    """A cursor over the bytes before the data."""

    def __init__(self, data: mmap.mmap, name: str):
        self._data, self._name, self.at = data, name, 0
        self._end = min(len(data), MAX_HEADER_BYTES)
        self._elements = MAX_ELEMENTS

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"load_model: {self._name} is not a valid GGUF file: {what}")

    def take(self, count: int, what: str) -> bytes:
        if count > self._end - self.at:
            if self._end < len(self._data):
                raise self.fail(f"its header has more than {MAX_HEADER_BYTES} bytes")
            raise self.fail(f"it ends within {what}")
        self.at += count
        return self._data[self.at - count : self.at]

    def number(self, kind: str, what: str) -> Any:
        return np.frombuffer(self.take(int(kind[2]), what), kind)[0].item()

    def count(self, most: int, size: int, what: str) -> int:
        """A number of things of at least `size` bytes each, all of which lie in the header."""
        value: int = self.number("<u8", f"the number of {what}")
        if value > most or value * size > self._end - self.at:
            raise self.fail(
                f"it counts {value} {what}, with {self._end - self.at} bytes of the header left; at most {most} are "
                "read"
            )
        return value

    def text(self, most: int, what: str) -> str:
        data = self.take(self.count(most, 1, f"bytes of {what}"), what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8: {shown(data[:40])}") from None

    def value(self, what: str) -> Any:
        kind = self.number("<u4", f"the type of {what}")
        if kind != _ARRAY:
            return self._scalar(kind, what)
        kind = self.number("<u4", f"the type of {what}")
        size = int(_NUMBERS[kind][2]) if kind in _NUMBERS else 8 if kind == _STRING else 1
        count = self.count(self._elements, size, f"elements of {what}")
        self._elements -= count
        if kind in _NUMBERS:
            return np.frombuffer(self.take(count * size, what), _NUMBERS[kind]).tolist()
        if kind == _ARRAY:
            raise self.fail(f"{what} is an array of arrays")
        if kind == _STRING:
            return self._strings(count, what)
        return [self._scalar(kind, what) for _ in range(count)]

    def _scalar(self, kind: int, what: str) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind], what)
        if kind == _STRING:
            return self.text(MAX_HEADER_BYTES, what)
        if kind == _BOOL:
            value = self.number("<u1", what)
            if value > 1:
                raise self.fail(f"{what} is a bool of value {value}; 0 or 1 is needed")
            return value == 1
        raise self.fail(f"{what} has the type {kind}; 0 to 12 are known")

    def _strings(self, count: int, what: str) -> list[str]:
        """`text`, a hundred thousand times: a vocabulary."""
        data, at, end, found = self._data, self.at, self._end, []
        length_of = struct.Struct("<Q").unpack_from
        for _ in range(count):
            begin = at + 8
            if begin > end or (at := begin + length_of(data, begin - 8)[0]) > end:
                raise self.fail(f"it ends within {what}")
            found.append(data[begin:at])
        self.at = at
        try:
            return [text.decode("utf-8") for text in found]
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None


class GgufFile:
    """The header of a file. Raises CheckpointError for what is no sound GGUF file, UnsupportedModelError for one of
    another version, byte order or kind of tensors."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: no bytes
            raise CheckpointError(f"load_model: {shown(self.path.name)} cannot be read: {reason(error)}") from error
        self._name = shown(self.path.name)
        header = _Header(self._data, self._name)
        if header.take(4, "its first 4 bytes") != b"GGUF":
            raise header.fail("it does not begin with 'GGUF'")
        version = header.number("<u4", "its version")
        if version not in (2, 3):
            found = "big-endian" if 0 < int.from_bytes(version.to_bytes(4, "little"), "big") < 16 else f"GGUF {version}"
            raise UnsupportedModelError(f"load_model: {self._name} is {found}; GGUF 2 or 3, little-endian, is needed")
        tensors = header.count(MAX_TENSORS, 24, "tensors")  # the least that one takes in the table
        pairs = header.count(MAX_PAIRS, 13, "key-value pairs")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = header.text(MAX_KEY_BYTES, "a key")
            if key in self.metadata:
                raise header.fail(f"the key {shown(repr(key))} occurs twice")
            self.metadata[key] = header.value(f"the value of {shown(repr(key))}")
        self._tensors: dict[str, _Tensor] = {}
        self._read_table(header, tensors)

    def _read_table(self, header: _Header, count: int) -> None:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment % 8:
            raise header.fail("general.alignment is not a multiple of 8 up to 1048576")
        expected = 0
        for _ in range(count):
            name = header.text(MAX_NAME_BYTES, "a tensor's name")
            what = f"the tensor {shown(repr(name))}"
            if name in self._tensors:
                raise header.fail(f"{what} occurs twice")
            dims = header.number("<u4", what)
            if dims > MAX_DIMS:
                raise header.fail(f"{what} has {dims} dimensions; at most {MAX_DIMS} are needed")
            shape = tuple(header.number("<u8", what) for _ in range(dims))[::-1]
            number, offset = header.number("<u4", what), header.number("<u8", what)
            if number not in TYPES:
                names = ", ".join(kind.name for kind in TYPES.values())
                raise UnsupportedModelError(
                    f"load_model: {self._name} holds {shown(repr(name))} in ggml's tensor type {number}; one of "
                    f"{names} is needed"
                )
            kind = TYPES[number]
            if 0 in shape or prod(shape) > 1 << 48 or (shape[-1:] or (1,))[0] % kind.elements:
                raise header.fail(f"{what} has the shape {list(shape)}, which {kind.name} does not hold")
            # ggml writes tensors one behind the other and reads no others: so none overlap either.
            if offset != expected:
                raise header.fail(f"{what} begins at byte {offset} of the data; {expected} is needed")
            blocks = prod(shape) // kind.elements
            expected += -(-blocks * kind.layout.itemsize // alignment) * alignment
            self._tensors[name] = _Tensor(kind, shape, offset, blocks)
        begin = -(-header.at // alignment) * alignment
        for name, tensor in self._tensors.items():
            at = begin + tensor.begin
            if at + tensor.blocks * tensor.kind.layout.itemsize > len(self._data):
                raise header.fail(f"it ends within the data of {shown(repr(name))}; download it again")
            self._tensors[name] = _Tensor(tensor.kind, tensor.shape, at, tensor.blocks)

    def names(self) -> list[str]:
        return list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def kind(self, name: str) -> str:
        """The tensor's type as ggml calls it, such as "Q4_1"."""
        return self._tensors[name].kind.name

    def blocks(self, name: str) -> np.ndarray:
        """The blocks of the matrix `name` as they lie in the file, uint8 [rows, bytes], in memory of its own."""
        tensor = self._tensors[name]
        size = tensor.blocks * tensor.kind.layout.itemsize
        return np.frombuffer(self._data, np.uint8, size, tensor.begin).reshape(tensor.shape[0], -1).copy()

    def read(self, name: str) -> np.ndarray:
        """The tensor `name` as float32, in memory of its own."""
        tensor = self._tensors[name]
        blocks = np.frombuffer(self._data, tensor.kind.layout, tensor.blocks, tensor.begin)
        return to_float32(blocks, tensor.kind).reshape(tensor.shape)
