"""Comments and docstrings of this project as Markdown. They are plain text with code in backticks."""

from __future__ import annotations

import re
import textwrap

__all__ = ["docstring", "escape"]

_CODE = re.compile(r"(``.*?``|`[^`\n]*`)", re.DOTALL)
# "q: [batch, seq]; float32" at the begin of a line: what a parameter is. "Returns out: ..." is a sentence, not one.
_PARAMETER = re.compile(r"(?!Raises|Arrays|Source|Note|Papers?\b)([a-z_*][\w*]*(?:, [a-z_*][\w*]*)*): (.+)", re.DOTALL)


def escape(text: str) -> str:
    """Plain text that Markdown shows as it is; code in backticks stays code."""
    parts = _CODE.split(text)
    parts[::2] = [re.sub(r"([\\*_\[\]#|])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "".join(parts)


def _parameters(block: list[str]) -> list[str]:
    """A block of lines as items, each a line and the lines behind it that are indented; what is none stays a text."""
    items: list[list[str]] = []
    for line in block:
        if items and (line.startswith(" ") or not _PARAMETER.match(line) and not _PARAMETER.match(items[-1][0])):
            items[-1].append(line.strip())
        else:
            items.append([line.strip()])
    out: list[str] = []
    for item in items:
        found = _PARAMETER.fullmatch(" ".join(item))
        if found:
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            out.append(f"- {names}: {escape(found[2])}")
        else:
            out += ["", escape(" ".join(item)), ""]
    return out


def docstring(text: str) -> str:
    """A docstring as Markdown: parameters as a list, examples as code."""
    lines = textwrap.dedent(text).strip().splitlines()
    if len(lines) > 1:  # the first line of a docstring is not indented as the others are
        lines = [lines[0], *textwrap.dedent("\n".join(lines[1:])).splitlines()]
    out: list[str] = []
    block: list[str] = []
    code = False
    for line in [*lines, ""]:
        if not code and line.lstrip().startswith(">>> "):
            out += [*_parameters(block), "", "```pycon", line.strip()]
            block, code = [], True
        elif code and line.strip():
            out.append(line.strip() if line.lstrip().startswith((">>> ", "... ")) else line)
        elif code:
            out += ["```", ""]
            code = False
        elif line.strip():
            block.append(line)
        else:
            out += [*_parameters(block), ""]
            block = []
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip() + "\n"
