"""How the commands print: text that others wrote, as a terminal may show it, and tables as wide as there is room.

A terminal obeys what it reads. An escape sequence in generated text, in a tensor's name or in a tokenizer's message
could set the clipboard or the window's title, or hide what stands on the screen. Pipes and files get text as it is.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence

__all__ = ["aligned", "facts", "fitted", "fitted_rows", "visible", "width"]

_WIDTH = 100  # where nobody says how much room there is: a pipe, a file

# The control characters of ASCII and Latin-1, and those that turn the direction of writing; not the newline, not the
# tab.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """`text` with control characters written as escapes.

    >>> print(visible("red: \\x1b[31m, a bell: \\x07"))
    red: \\x1b[31m, a bell: \\x07

    Each character is looked at alone, so text may come in any pieces.
    """
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def width() -> int:
    """Columns that a table may take: COLUMNS where it is set, else those of the terminal, 100 in a pipe or a file."""
    return max(20, shutil.get_terminal_size((_WIDTH, 24)).columns)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side, however wide.

    >>> print(aligned([["kernel", "calls"], ["add/cpu/scalar", "2"]]))
    kernel          calls
    add/cpu/scalar  2
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def facts(pairs: Sequence[tuple[str, str]], columns: int) -> str:
    """Names and what they are, one below the other; what is longer than a line goes on below itself.

    >>> print(facts([("build", "GNU 12, Release"), ("CUDA", "none")], 20))
    build  GNU 12,
           Release
    CUDA   none
    """
    indent = max(len(name) for name, _ in pairs) + 2
    lines = []
    for name, text in pairs:
        parts = textwrap.wrap(text, max(8, columns - indent), break_on_hyphens=False) or [""]
        lines += [f"{name:<{indent}}{parts[0]}".rstrip(), *(" " * indent + part for part in parts[1:])]
    return "\n".join(lines)


def fitted(rows: Sequence[Sequence[str]], columns: int) -> str:
    """`aligned` where it fits. Else the last column is folded if 16 columns are left for it; else each row is a block
    of its own: the first cell, and the others below it under the names of the first row.

    >>> print(fitted([["kernel", "needs"], ["add/cpu/avx2", "avx2"]], 16))
    add/cpu/avx2
      needs  avx2
    """
    return "\n".join(line for lines in fitted_rows(rows, columns) for line in lines)


def fitted_rows(rows: Sequence[Sequence[str]], columns: int) -> list[list[str]]:
    """The lines of each row of `fitted`; the first row has none where each row is a block."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    room = columns - sum(widths[:-1]) - 2 * (len(widths) - 1)
    if room < min(16, widths[-1]):
        return [[], *(_block(rows[0], row, columns) for row in rows[1:])]
    found = []
    for row in rows:
        parts = textwrap.wrap(row[-1], room, break_on_hyphens=False) or [""]
        start = "".join(f"{cell:<{width}}  " for cell, width in zip(row[:-1], widths, strict=False))
        found.append([f"{start if i == 0 else ' ' * len(start)}{part}".rstrip() for i, part in enumerate(parts)])
    return found


def _block(head: Sequence[str], row: Sequence[str], columns: int) -> list[str]:
    lines = textwrap.wrap(row[0], columns, drop_whitespace=False)
    below = [(f"  {name}", cell) for name, cell in zip(head[1:], row[1:], strict=True) if cell]
    return [*lines, *(facts(below, columns).splitlines() if below else [])]
