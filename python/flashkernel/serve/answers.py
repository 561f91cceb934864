"""The JSON of answers, whole ones and the chunks of a stream, as OpenAI's API has it."""

from __future__ import annotations

import time
import uuid
from typing import Any

from ..generate import TextTokenizer
from .protocol import Call
from .worker import Piece

__all__ = ["Answer"]

_LEAST = -9999.0  # JSON has no -inf


class Answer:
    """One answer in the making: `add` its pieces; `whole` is the answer, `chunk` what a stream says of a piece."""

    def __init__(self, call: Call, model: str, tokenizer: TextTokenizer):
        self.call, self.model, self._tokenizer = call, model, tokenizer
        self.id = ("chatcmpl-" if call.chat else "cmpl-") + uuid.uuid4().hex
        self.created = int(time.time())
        count = call.sequences
        self._texts = [""] * count
        self._finish: list[str | None] = [None] * count
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        self._offsets: list[list[int]] = [[] for _ in range(count)]
        self._tokens = 0

    def add(self, piece: Piece) -> None:
        index = piece.index
        if piece.event.logprob is not None and not piece.stop_token:
            self._logprobs[index].append(self._scores(piece))
            self._offsets[index].append(piece.place)
        self._texts[index] += piece.text
        self._finish[index] = piece.event.finish
        self._tokens += 1

    def _token(self, token: int, value: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token]) or self._tokenizer.name_of(token)
        data = None if "\ufffd" in text else list(text.encode("utf-8", "replace"))
        return {"token": text, "logprob": max(value, _LEAST), "bytes": data}

    def _scores(self, piece: Piece) -> dict[str, Any]:
        event = piece.event
        top = [self._token(token, value) for token, value in event.top]
        return {**self._token(event.token, event.logprob or 0.0), "top_logprobs": top}

    def _logprobs_of(self, scores: list[dict[str, Any]], offsets: list[int]) -> dict[str, Any] | None:
        if self.call.sampling.logprobs is None:
            return None
        if self.call.chat:
            return {"content": scores, "refusal": None}
        return {
            "tokens": [score["token"] for score in scores],
            "token_logprobs": [score["logprob"] for score in scores],
            "top_logprobs": [{top["token"]: top["logprob"] for top in score["top_logprobs"]} for score in scores],
            "text_offset": offsets,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def usage(self) -> dict[str, int]:
        prompt = sum(map(len, self.call.prompts))
        return {"prompt_tokens": prompt, "completion_tokens": self._tokens, "total_tokens": prompt + self._tokens}

    def whole(self) -> dict[str, Any]:
        choices = []
        for i, text in enumerate(self._texts):
            said: dict[str, Any] = {"text": text}
            if self.call.chat:
                said = {"message": {"role": "assistant", "content": text, "refusal": None}}
            logprobs = self._logprobs_of(self._logprobs[i], self._offsets[i])
            choices.append({"index": i, **said, "logprobs": logprobs, "finish_reason": self._finish[i]})
        kind = "chat.completion" if self.call.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": self.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.call.chat else "text_completion"
        return {**self._head(kind), "choices": choices, **({"usage": None} if self.call.include_usage else {})}

    def first_chunks(self) -> list[dict[str, Any]]:
        """What a stream begins with: who speaks."""
        if not self.call.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
            for i in range(self.call.sequences)
        ]

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """Adds a piece; None: there is nothing to say of it."""
        before = len(self._logprobs[piece.index])
        self.add(piece)
        new, offsets = self._logprobs[piece.index][before:], self._offsets[piece.index][before:]
        if not (piece.text or piece.event.finish or new):
            return None
        said: dict[str, Any] = {"text": piece.text}
        if self.call.chat:
            said = {"delta": {"content": piece.text} if piece.text else {}}
        scores = self._logprobs_of(new, offsets)
        return self._chunk([{"index": piece.index, **said, "logprobs": scores, "finish_reason": piece.event.finish}])

    def last_chunks(self) -> list[dict[str, Any]]:
        return [{**self._chunk([]), "usage": self.usage()}] if self.call.include_usage else []
