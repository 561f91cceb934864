"""Text that others wrote, as a terminal may show it: used by the commands for what they print and for errors' texts.

A terminal obeys what it reads. An escape sequence in generated text, in a tensor's name or in a tokenizer's message
could set the clipboard or the window's title, or hide what stands on the screen. Pipes and files get text as it is.
"""

from __future__ import annotations

import re

__all__ = ["visible"]

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
