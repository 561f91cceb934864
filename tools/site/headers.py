"""A page for each public header, of C++ or C: its opening comment, then every declaration below what is said about it.

Reads the headers' own layout, which clang-format and the house's style keep: blocks apart by blank lines, comments
above what they describe, everything in one namespace. So nothing has to be installed, and the words stand in one place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..comments import paragraphs
from .plain import escape

__all__ = ["Declaration", "declarations", "opening", "page"]

_TYPE = re.compile(r"(?:enum class|struct|class)(?: FK_API)? (\w+)")
_NAME = re.compile(
    r"^using (\w+) ="
    r"|^(?:inline )?constexpr [\w:]+ (\w+) ="
    r"|^#define (\w+)"
    r"|^(?:typedef [^;{(]*?|\} )(\w+);"
    r"|^(?=\w)[^(=]*?\b(operator[^\s\w(]+|\w+)\(",  # a function
    re.MULTILINE,
)


@dataclass(frozen=True)
class Declaration:
    names: tuple[str, ...]  # several where functions share a comment, none of a comment alone
    said: tuple[str, ...]  # the comment: paragraphs, and items of lists
    code: str


def opening(text: str) -> str:
    """The comment that a header begins with."""
    lines = text.split("#pragma once")[0].splitlines()
    return "\n".join(line.removeprefix("//").removeprefix(" ") for line in lines).strip()


def _blocks(body: str) -> list[str]:
    """Declarations and their comments: apart by blank lines outside of braces."""
    found: list[str] = []
    here: list[str] = []
    depth = 0
    for line in body.splitlines():
        if not line.strip() and depth == 0:
            found.append("\n".join(here))
            here = []
            continue
        here.append(line)
        code = re.sub(r'//.*|"(?:[^"\\]|\\.)*"', "", line)
        depth += code.count("{") + code.count("(") - code.count("}") - code.count(")")
    return [block for block in (*found, "\n".join(here)) if block.strip()]


def _split(block: str) -> list[str]:
    """A block at each comment that follows a whole declaration."""
    parts: list[list[str]] = [[]]
    depth = 0
    for line in block.splitlines():
        begun = any(not x.lstrip().startswith("//") for x in parts[-1])
        if line.startswith("//") and begun and depth == 0:
            parts.append([])
        parts[-1].append(line)
        code = re.sub(r'//.*|"(?:[^"\\]|\\.)*"', "", line)
        depth += code.count("{") + code.count("(") - code.count("}") - code.count(")")
    return ["\n".join(part) for part in parts]


def _names(code: str) -> tuple[str, ...]:
    if found := _TYPE.match(code):
        return (found[1],)
    return tuple(dict.fromkeys(next(filter(None, found.groups())) for found in _NAME.finditer(code)))


def _public(code: str) -> str:
    """A class without its private parts."""
    return re.sub(r"\n+ private:.*?(?=^\};)", "\n", code, flags=re.DOTALL | re.MULTILINE)


def _unconditional(body: str) -> str:
    """The text of a header without the parts for one compiler or language."""
    kept, depth = [], 0
    for line in body.splitlines():
        depth += line.startswith("#if")
        if depth == 0:
            kept.append(line)
        depth -= line.startswith("#endif")
    return "\n".join(kept)


def declarations(text: str) -> list[Declaration]:
    body = text.split("#pragma once", 1)[-1]
    body = _unconditional(body)
    body = re.sub(r"^#include.*\n", "", body, flags=re.MULTILINE)
    body = re.sub(r"^(namespace flashkernel \{|\}  // namespace flashkernel)\n?", "", body, flags=re.MULTILINE)
    found = []
    for block in _blocks(body):
        for part in _split(block):
            lines = part.splitlines()
            first = next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))
            code = "\n".join(lines[first:]).rstrip()
            if re.fullmatch(r"(class|struct) \w+;", code):
                continue
            said = paragraphs(re.sub(r"^//+ ?(-{2,} )?", "", line) for line in lines[:first])
            found.append(Declaration(_names(code), tuple(said), _public(code)))
    return found


def page(name: str, text: str) -> str:
    """Markdown of the page of include/flashkernel/NAME."""
    out = [f"# {name}", "", "```cpp", f'#include "flashkernel/{name}"', "```", "", escape(opening(text)), ""]
    last: tuple[str, ...] = ()
    for declared in declarations(text):
        if declared.names and declared.names != last:  # overloads share a heading
            out += [f"## {escape(', '.join(declared.names))}", ""]
        last = declared.names
        for i, part in enumerate(declared.said):
            if part.startswith("- ") and i and declared.said[i - 1].startswith("- "):
                out.pop()  # items stand line by line
            out += [escape(part), ""]
        if declared.code:  # else a comment of its own
            out += ["```cpp", declared.code, "```", ""]
    return "\n".join(out)
