"""The text of one sequence as its tokens come, up to a stop string that is no part of it.

Used by the command, the server, and by `Engine.generate(stop_strings=...)`. Text that may be the beginning of a stop
string is held back until that is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from .tokenizer import TextStream, TextTokenizer

__all__ = ["TextOutput", "check_stop_strings"]


def check_stop_strings(strings: Sequence[str]) -> tuple[str, ...]:
    """The strings, if each is one of one or more characters. Raises ValueError."""
    if isinstance(strings, str):
        raise ValueError(f"generate: stop strings {strings!r}; a sequence of strings is needed")
    for text in strings:
        if not isinstance(text, str) or not text:
            raise ValueError(f"generate: the stop string {text!r}; a string of one or more characters is needed")
    return tuple(strings)


class TextOutput:
    """`put` each token, then `end`; both give the text that may be shown now. `stopped`: a stop string was found.

    >>> from flashkernel.generate import TextTokenizer, find_model
    >>> tokenizer = TextTokenizer(find_model("demo"))
    >>> output = TextOutput(tokenizer, stop=["lo w"])
    >>> "".join(output.put(token) for token in tokenizer.encode("hello world")), output.stopped
    ('hel', True)
    """

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int] = (), stop: Sequence[str] = ()):
        self._stream = TextStream(tokenizer, prompt)
        self._stop = check_stop_strings(stop)
        self._held = ""
        self._shown = 0
        self.stopped = False

    @property
    def place(self) -> int:
        """Characters of the text so far, those that are held back included: where the next token's text begins."""
        return self._shown + len(self._held)

    def put(self, token: int) -> str:
        return self._show(self._stream.put(token))

    def end(self) -> str:
        """What is still held back; nothing behind a stop string."""
        shown = self._show(self._stream.end())
        self._shown += len(self._held)
        shown, self._held = shown + self._held, ""
        return shown

    def until(self, token: int) -> bool:
        """`put` for `Engine.submit(until=...)`, whose text nobody wants: whether a stop string is there."""
        self.put(token)
        return self.stopped

    def _show(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            self._shown += min(found)
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        self._shown += len(text) - keep
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that may be the beginning of `stop`."""
    for count in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:count]):
            return count
    return 0
