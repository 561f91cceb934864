"""Writes out the overloads that the result of a signature stands for: the last step of making _C.pyi.

A signature in a bind_*.cpp file says once what its result depends on. Type checkers have no word for that but
overloads, and the result's type follows from the kind of the first array, too; so one signature becomes up to 30 of
them. Usage:

    overloads.py RAW _C.pyi _triton.pyi    # RAW: what nanobind's generator wrote; _triton: for flashkernel.triton

What stands behind "->" (each item may be any type):

    A, B if flag                   A, or tuple[A, B] with the flag
    tuple[A, B if flag]            tuple[A], or tuple[A, B] with the flag
    tuple[A, B if x and y else C]  tuple[A, B], or tuple[A, C] unless both hold

A condition is a parameter. It holds where a bool is True; of another type (`SupportsDLPack | None`) where the
argument is of the first member of the union. ``ArrayT`` is the kind of the first array: numpy.ndarray, torch.Tensor, or
its own type.
"""

from __future__ import annotations

import itertools
import pathlib
import re
import sys
from dataclasses import dataclass, replace

ARRAY = "SupportsDLPack"
KIND = "ArrayT"
NUMPY = "NDArray[Any]"  # whatever the dtype and number of dims: those of results differ
TORCH = "TorchTensor[ArrayT]"


def split(text: str, separator: str = ",") -> list[str]:
    """The stripped parts of text between separators that are outside brackets and quotes."""
    parts, depth, quoted, start = [], 0, False, 0
    for i, c in enumerate(text):
        quoted ^= c == "'"
        depth += (c in "[(") - (c in "])") if not quoted else 0
        if depth == 0 and not quoted and text.startswith(separator, i):
            parts.append(text[start:i].strip())
            start = i + len(separator)
    return [*parts, text[start:].strip()]


@dataclass(frozen=True)
class Parameter:
    name: str
    annotation: str = ""
    default: str = ""

    @classmethod
    def parse(cls, text: str) -> Parameter:
        declaration, _, default = text.partition(" = ")
        name, _, annotation = declaration.partition(": ")
        return cls(name, annotation, default)

    def __str__(self) -> str:
        text = f"{self.name}: {self.annotation}" if self.annotation else self.name
        return f"{text} = {self.default}" if self.default else text

    @property
    def is_bool(self) -> bool:
        return self.annotation == "bool"

    def when(self, holds: bool) -> Parameter:
        """The parameter of calls in which the condition holds, or does not."""
        if self.is_bool:
            annotation, is_default = f"Literal[{holds}]", self.default == str(holds)
        else:
            first, *rest = split(self.annotation, " | ")
            annotation, is_default = (first, False) if holds else (" | ".join(rest), bool(self.default))
        return Parameter(self.name, annotation, self.default if is_default else "")


@dataclass(frozen=True)
class Item:
    """One part of a result."""

    type: str
    conditions: tuple[str, ...] = ()
    otherwise: str = ""

    @classmethod
    def parse(cls, text: str) -> Item:
        kind, _, condition = text.partition(" if ")
        condition, _, otherwise = condition.partition(" else ")
        return cls(kind, tuple(condition.split(" and ")) if condition else (), otherwise)


@dataclass(frozen=True)
class Signature:
    name: str
    parameters: tuple[Parameter, ...]
    items: tuple[Item, ...]
    is_tuple: bool  # even of one item

    @classmethod
    def parse(cls, line: str) -> Signature:
        """line: "def add(a: ArrayT, ...) -> ArrayT"."""
        matched = re.fullmatch(r"def (\w+)\((.*)\) -> (.*)", line)
        assert matched, line
        name, parameters, result = matched.groups()
        inner = inside_tuple(result)
        items = split(result) if inner is None else inner
        parsed = tuple(map(Parameter.parse, split(parameters)))
        return cls(name, parsed, tuple(map(Item.parse, items)), inner is not None)

    def conditions(self) -> list[Parameter]:
        names = {name for item in self.items for name in item.conditions}
        return [parameter for parameter in self.parameters if parameter.name in names]

    def result(self, holding: set[str]) -> str:
        """The result's type where these conditions hold."""
        parts = [item.type if holding.issuperset(item.conditions) else item.otherwise for item in self.items]
        parts = [part for part in parts if part]
        return parts[0] if len(parts) == 1 and not self.is_tuple else f"tuple[{', '.join(parts)}]"

    def overloads(self) -> list[str]:
        """The signatures, one a combination of conditions; then those for bools that nobody knows before the call."""
        conditions = self.conditions()
        states = [(c.default == "True", c.default != "True") if c.is_bool else (False, True) for c in conditions]
        known, unknown = [], {}  # unknown: what a call without its bools may return
        for state in itertools.product(*states):
            holds = {c.name: is_so for c, is_so in zip(conditions, state, strict=True)}
            result = self.result({name for name, is_so in holds.items() if is_so})
            known.append(self.line({c.name: c.when(holds[c.name]) for c in conditions}, result))
            others = tuple((c.name, c.when(holds[c.name])) for c in conditions if not c.is_bool)
            unknown.setdefault(others, []).append(result)
        if not any(condition.is_bool for condition in conditions):
            return known
        return known + [self.line(dict(others), union(results)) for others, results in unknown.items()]

    def line(self, chosen: dict[str, Parameter], result: str) -> str:
        """The signature with these parameters in place of their namesakes."""
        parameters = [str(chosen.get(parameter.name, parameter)) for parameter in self.parameters]
        return f"def {self.name}({', '.join(parameters)}) -> {result}: ..."


def inside_tuple(text: str) -> list[str] | None:
    """The parts of "tuple[A, B]"; None where the text as a whole is no tuple."""
    start, *rest = split(text, "]")  # after the bracket that closes the first
    return split(start[len("tuple[") :]) if text.startswith("tuple[") and rest == [""] else None


def union(types: list[str]) -> str:
    """Any of these types, in short: tuples become one."""
    members = list(dict.fromkeys(member for text in types for member in split(text, " | ")))
    tuples = [parts for parts in map(inside_tuple, members) if parts is not None]
    lengths = {len(parts) for parts in tuples}
    joined = [member for member in members if inside_tuple(member) is None]
    if len(lengths) == 1:
        parts = [" | ".join(dict.fromkeys(position)) for position in zip(*tuples, strict=True)]
        joined.append(f"tuple[{', '.join(parts)}]")
    elif lengths:
        parts = list(dict.fromkeys(part for each in tuples for part in each))
        joined.append(f"tuple[{' | '.join(parts)}, ...]")
    joined.sort(key=lambda member: member == "None")  # last
    return " | ".join(joined)


def kinds(line: str) -> list[str]:
    """The line for each kind of array; NumPy first, whose arrays are found at once."""
    if line.count(KIND) < 2:  # nothing has the kind of the first array
        return [line.replace(KIND, ARRAY)]
    return [line.replace(KIND, NUMPY), line.replace(f": {KIND},", f": {TORCH},", 1), line]


def expand(stub: str) -> str:
    """The stub with overloads in place of signatures that stand for several. The docstring goes to the first."""

    def written_out(matched: re.Match[str]) -> str:
        indent, line, doc = matched.groups()
        lines = [each for overload in Signature.parse(line).overloads() for each in kinds(overload)]
        first = lines[0].removesuffix(" ...") + f"\n{doc}" if doc else lines[0] + "\n"
        return "\n".join(f"{indent}@overload\n{indent}{each}\n" for each in [first.rstrip("\n"), *lines[1:]])

    is_several = rf"[^\n]*(?:\b{KIND}\b|-> [^\n]* if )[^\n]*"
    doc = r' +"""(?:[^"]|"(?!""))*"""\n'
    return re.sub(rf"^( *)(?=def {is_several}\n)(def [^\n]*):\n({doc})", written_out, stub, flags=re.MULTILINE)


def triton(stub: str) -> str:
    """The stub of flashkernel.triton: the ops that take `backend`, for torch tensors."""
    lines = [
        '"""The signatures of flashkernel\'s ops, for torch tensors; made by bindings/overloads.py."""',
        "",
        "from typing import Any, Literal, overload",
        "",
        "from torch import Tensor",
        "",
        "from flashkernel.masks import BlockMask",
        "from flashkernel.typing import Axis, KvAppendRope, KvAppendRopeWithQ, KvScales, Window",
    ]
    for line in re.findall(r"^(def [^\n]*, backend: [^\n]*):$", stub, flags=re.MULTILINE):
        signature = Signature.parse(line)
        without = tuple(parameter for parameter in signature.parameters if parameter.name != "backend")
        overloads = replace(signature, parameters=without).overloads()
        for overload in overloads:
            decorated = "@overload\n" if len(overloads) > 1 else ""
            lines.append("\n" + decorated + re.sub(rf"\b(?:{KIND}|{ARRAY})\b", "Tensor", overload))
    return "\n".join(lines) + "\n"


def main(raw: str, stub: str, triton_stub: str) -> None:
    text = pathlib.Path(raw).read_text(encoding="utf-8")
    pathlib.Path(stub).write_text(expand(text), encoding="utf-8")
    pathlib.Path(triton_stub).write_text(triton(text), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
