"""From the JSON of a request to what the engine is asked: prompts as token ids, sampling options, limits."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..generate import PromptError, SamplingOptions, TextTokenizer
from ..generate.errors import CheckpointError
from .errors import ApiError, bad_request
from .fields import Fields
from .settings import Settings

__all__ = ["Call", "Reader"]

_SAMPLING = (
    *("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "logit_bias"),  # OpenAI's
    *("top_k", "min_p", "typical_p", "repetition_penalty"),  # of this server, as in others
)
_COMMON = ("model", "max_tokens", "n", "stop", "stream", "stream_options", "user", "ignore_eos", "logprobs", *_SAMPLING)
_COMPLETION = (*_COMMON, "prompt", "best_of", "echo", "suffix")
_NEGLECTED = ("store", "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "parallel_tool_calls")
_REFUSED = (
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "response_format",
    "audio",
    "modalities",
    "prediction",
)
_CHAT = (*_COMMON, "messages", "max_completion_tokens", "top_logprobs", *_NEGLECTED, *_REFUSED)
MAX_N, MAX_STOPS, MAX_PROMPTS = 128, 4, 256


@dataclass(frozen=True)
class Call:
    """One request. Its sequences: each prompt n times."""

    chat: bool
    prompts: list[list[int]]
    n: int
    max_tokens: int
    sampling: SamplingOptions
    stop: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.n


class Reader:
    """render: messages to text by the model's chat template; None: it has none."""

    def __init__(
        self,
        settings: Settings,
        tokenizer: TextTokenizer,
        vocab_size: int,
        render: Callable[[list[dict[str, str]]], str] | None,
    ):
        self.settings, self.tokenizer, self.vocab_size, self.render = settings, tokenizer, vocab_size, render

    def completion(self, body: Any) -> Call:
        """Raises ApiError, as `chat` does."""
        fields = Fields(body, _COMPLETION)
        self._check_model(fields)
        fields.refuse("echo", "suffix")
        n = fields.integer("n", 1, MAX_N, 1)
        if fields.integer("best_of", 1, MAX_N, n) != n:
            raise bad_request(f"best_of other than n={n} is not supported by this server", "best_of")
        prompts = self._prompts(fields.get("prompt"))
        logprobs = fields.integer("logprobs", 0, 20)
        return self._call(fields, False, prompts, n, fields.integer("max_tokens", 1, 1 << 31, 16), logprobs, "prompt")

    def chat(self, body: Any) -> Call:
        fields = Fields(body, _CHAT)
        self._check_model(fields)
        if fields.get("response_format") == {"type": "text"}:
            fields = Fields({**body, "response_format": None}, _CHAT)
        fields.refuse(*_REFUSED)
        if self.render is None:
            raise bad_request(
                f"the model {self.settings.name!r} has no chat template; use /v1/completions, or serve a model that "
                "was trained to chat",
                "model",
                "no_chat_template",
            )
        messages = _messages(fields.get("messages"))
        try:
            ids = self.tokenizer.encode(self.render(messages), add_special=False)
        except (PromptError, CheckpointError) as error:
            raise bad_request(str(error), "messages") from error
        count = fields.integer("max_completion_tokens", 1, 1 << 31)
        if count is None:
            count = fields.integer("max_tokens", 1, 1 << 31)
        top = fields.integer("top_logprobs", 0, 20)
        if not fields.flag("logprobs"):
            if top is not None:
                raise bad_request("top_logprobs without logprobs=true; set it", "top_logprobs")
        elif top is None:
            top = 0
        return self._call(fields, True, [ids], fields.integer("n", 1, MAX_N, 1), count, top, "messages")

    def _check_model(self, fields: Fields) -> None:
        name = fields.text("model")
        if name is None:
            raise bad_request("model is missing; the name of a model is needed (GET /v1/models)", "model")
        if name != self.settings.name:
            message = f"the model {name!r} does not exist; {self.settings.name!r} is served"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _prompts(self, prompt: Any) -> list[list[int]]:
        if isinstance(prompt, str):
            prompt = [prompt]
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            prompt = [prompt]
        if not isinstance(prompt, list) or not 1 <= len(prompt) <= MAX_PROMPTS:
            needed = f"a string, an array of token ids, or an array of 1 to {MAX_PROMPTS} of either"
            raise bad_request(f"prompt is not {needed}", "prompt")
        found = []
        for one in prompt:
            if isinstance(one, str):
                try:
                    found.append(self.tokenizer.encode(one))
                except (PromptError, CheckpointError) as error:
                    raise bad_request(str(error), "prompt") from error
            elif isinstance(one, list) and all(type(token) is int for token in one):
                for token in one:
                    if not 0 <= token < self.vocab_size:
                        needed = f"ids in [0, {self.vocab_size}) are needed"
                        raise bad_request(f"prompt has the token id {token}; {needed}", "prompt")
                found.append(one)
            else:
                raise bad_request("prompt holds neither strings nor arrays of token ids", "prompt")
        return found

    def _call(
        self,
        fields: Fields,
        chat: bool,
        prompts: list[list[int]],
        n: int,
        count: int | None,
        logprobs: int | None,
        source: str,
    ) -> Call:
        context, limit = self.settings.context, self.settings.max_tokens
        longest = max(map(len, prompts))
        if min(map(len, prompts)) == 0:
            raise bad_request(f"{source} has no tokens; one or more are needed", source)
        if longest + (count or 1) > context:
            asked = "" if count is None else f" and {count} are asked for"
            raise bad_request(
                f"{source} has {longest} tokens{asked}; the context of this model holds {context}: shorten "
                f"{source}" + ("" if count is None else f" or ask for at most {max(0, context - longest)} tokens"),
                source,
                "context_length_exceeded",
            )
        if limit is not None and count is not None and count > limit:
            raise bad_request(f"{count} tokens are asked for; this server gives at most {limit}", "max_tokens")
        if count is None:
            count = min(context - longest, limit or context)
        options = fields.mapping("stream_options")
        stream = fields.flag("stream")
        if options and not stream:
            raise bad_request("stream_options without stream=true; set it", "stream_options")
        return Call(
            chat=chat,
            prompts=prompts,
            n=n,
            max_tokens=count,
            sampling=self._sampling(fields, logprobs),
            stop=_stops(fields.get("stop")),
            ignore_eos=fields.flag("ignore_eos"),
            stream=stream,
            include_usage=Fields(options, ("include_usage", "include_obfuscation")).flag("include_usage"),
        )

    def _sampling(self, fields: Fields, logprobs: int | None) -> SamplingOptions:
        bias = {}
        for token, value in fields.mapping("logit_bias").items():
            digits = token.isascii() and token.isdecimal() and len(token) <= 20  # int() refuses thousands of them
            if not digits or not 0 <= int(token) < self.vocab_size:
                needed = f"token ids in [0, {self.vocab_size}) are needed"
                raise bad_request(f"logit_bias has the key {token[:40]!r}; {needed}", "logit_bias")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not -100 <= value <= 100:
                raise bad_request(f"logit_bias[{token}] is not a number in [-100, 100]", "logit_bias")
            bias[int(token)] = float(value)
        seed = fields.integer("seed", -(2**63), 2**63 - 1)
        numbers = {name: fields.number(name, default) for name, default in _DEFAULTS.items()}
        for name, value in numbers.items():
            if name.endswith("_penalty") and name != "repetition_penalty" and not -2 <= value <= 2:
                raise bad_request(f"{name}={value}; a number in [-2, 2] is needed", name)
        try:
            return SamplingOptions(
                top_k=max(0, fields.integer("top_k", -1, 1 << 31, 0)),  # -1: no limit, as in other servers
                seed=secrets.randbits(62) if seed is None else seed % 2**64,
                logit_bias=bias,
                logprobs=logprobs,
                **numbers,
            )
        except ValueError as error:
            text = str(error).removeprefix("generate: ")
            raise bad_request(text, text.partition("=")[0], "invalid_value") from error


_DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise bad_request(f"stop is not a string or an array of at most {MAX_STOPS} strings, none empty", "stop")
    return tuple(stops)


def _messages(messages: Any) -> list[dict[str, str]]:
    """Messages with plain text; content of text parts is put together."""
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages is not an array of one or more messages", "messages")
    found = []
    for i, message in enumerate(messages):
        role, content = (message.get(key) for key in ("role", "content")) if isinstance(message, dict) else (None, None)
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(role, str) or not isinstance(content, str):
            raise bad_request(f"messages[{i}] has no role and text; both are needed as strings", f"messages[{i}]")
        found.append({"role": "system" if role == "developer" else role, "content": content})
    return found
