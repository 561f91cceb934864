"""Comments of the public headers as paragraphs and lists, for what is made from them: the pages of the site
(site/headers.py) and the C header (c_api.py).

A line that begins with "- " begins an item of a list, which goes on in lines that are indented. An empty line ends a
paragraph or a list.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

__all__ = ["paragraphs", "wrapped"]


def paragraphs(lines: Iterable[str]) -> list[str]:
    """Each paragraph, and each item of a list with its "- ", as one line. lines: without the marks of a comment."""
    found: list[str] = []
    open_ = False  # whether the next line may go on with the last paragraph
    for line in lines:
        text = line.strip()
        if not text:
            open_ = False
        elif text.startswith("- ") or not open_ or (found[-1].startswith("- ") and not line.startswith("  ")):
            found.append(text)
            open_ = True
        else:
            found[-1] += f" {text}"
    return found


def wrapped(parts: Iterable[str], mark: str, width: int) -> str:
    """What `paragraphs` gives as a comment of at most `width` columns; mark: "//", say."""
    out: list[str] = []
    for part in parts:
        item = part.startswith("- ")
        if out and not item:
            out.append(mark)
        first, others = f"{mark} ", f"{mark}   " if item else f"{mark} "
        out.append(textwrap.fill(part, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False))
    return "\n".join(out)
