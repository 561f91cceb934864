"""A conversation with a model: its history, what of it fits the context, and answers as they are written.

Called by chat_command.py. Each turn renders the whole conversation by the model's chat template; the engine computes
only what is new, since the pages of the turns before are in its cache still (prefix sharing). No terminal here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .chat_template import ChatTemplate
from .engine import Engine
from .errors import PromptError
from .request import GenerationStats, Request
from .sampling_options import SamplingOptions
from .text_output import TextOutput, check_stop_strings
from .tokenizer import TextTokenizer

__all__ = ["PAGE_SIZE", "Chat", "pages_for"]

PAGE_SIZE = 32  # whole pages are found again: of a turn at most so many tokens are computed once more


def pages_for(context: int) -> int:
    """The pages of an engine whose cache keeps one conversation, and need not be made anew as it grows."""
    return -(-context // PAGE_SIZE) + 1


class Chat:
    """One conversation.

    engine: made for it, with `pages_for(context)` pages of PAGE_SIZE tokens. context: most tokens of the conversation,
    an answer to come included. max_tokens: most tokens of an answer. stop: strings that end an answer and are not part
    of it.

    After an answer: `finish` is "stop" (the model's own end, or a stop string), "length" or "interrupted", `dropped`
    the number of oldest turns that were left out to make room, `request` what the engine was asked.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextTokenizer,
        template: ChatTemplate,
        *,
        context: int,
        system: str | None = None,
        stop: Sequence[str] = (),
        max_tokens: int = 512,
        sampling: SamplingOptions | None = None,
    ):
        if context < 2:
            raise ValueError(f"chat: context={context}; two tokens or more are needed")
        self._engine, self._tokenizer, self._template = engine, tokenizer, template
        self._context = min(context, engine.model.max_positions)
        self._stop, self._max_tokens = check_stop_strings(stop), max_tokens
        self._sampling = sampling or SamplingOptions()
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[dict[str, str]] = []  # user and assistant in turn
        self._answers = 0
        self.dropped = 0
        self.finish = ""
        self.request: Request | None = None

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def stats(self) -> GenerationStats:
        """Counts and times of the last answer."""
        return self._engine.stats

    def reset(self) -> None:
        """Forgets the turns; the system prompt stays."""
        self.turns = []

    def answer(self, message: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """The answer to a message in pieces of whole characters, as the engine writes them.

        stopped: asked after each step of the engine; true ends the answer. Message and answer join the history when
        the iteration ends, also an answer that was interrupted, but not one that has no text yet.

        Raises PromptError for a message that alone fills the context, or that the template refuses: the history is as
        it was then. Whatever Engine.step raises comes through.
        """
        turns, ids = self._fitting([*self.turns, {"role": "user", "content": message}])
        room = self._context - len(ids)
        self._answers += 1
        self.dropped = (len(self.turns) + 1 - len(turns)) // 2
        written: list[str] = []
        for piece in self._write(ids, min(self._max_tokens, room), stopped):
            written.append(piece)
            yield piece
        text = "".join(written)
        if text or self.finish != "interrupted":
            self.turns = [*turns, {"role": "assistant", "content": text}]

    def _fitting(self, turns: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[int]]:
        """The latest turns with which the prompt leaves room for an answer, and its tokens."""
        wanted = min(self._max_tokens, self._context // 4)
        while True:
            text = self._template.render([*self._system, *turns])
            ids = self._tokenizer.encode(text, add_special=False)
            if len(ids) + wanted <= self._context:
                return turns, ids
            if len(turns) > 1:
                turns = turns[2:]
            elif len(ids) < self._context:
                return turns, ids
            else:
                raise PromptError(
                    f"chat: the message makes a prompt of {len(ids)} tokens; the context holds {self._context}, an "
                    "answer included: a shorter message is needed"
                )

    def _write(self, ids: list[int], most: int, stopped: Callable[[], bool]) -> Iterator[str]:
        engine, output = self._engine, TextOutput(self._tokenizer, ids, self._stop)
        request = engine.submit(ids, max_new_tokens=most, sampling=self._sampling, sequence=self._answers)
        self.request, self.finish, taken = request, "", 0
        try:
            while not self.finish:
                if stopped():
                    self.finish = "interrupted"
                elif request.finish is None:
                    engine.step()
                new, taken = request.generated[taken:], len(request.generated)
                if new and new[-1] in engine.model.stop_tokens:
                    new.pop()  # the end itself is no text
                piece = "".join(map(output.put, new))
                if output.stopped:
                    self.finish = "stop"
                elif self.finish or request.finish is not None:
                    self.finish = self.finish or str(request.finish)
                    piece += output.end()
                if piece:
                    yield piece
        finally:
            if request.finish is None:
                engine.cancel(request)
