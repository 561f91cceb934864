"""What a server is started with."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """name: of the model, as clients must ask for it. context: most tokens of a sequence, prompt and answer.

    max_sequences: answers being computed or waiting at once; more are refused with 503.
    max_tokens: most new tokens of an answer; None: as the context allows. max_body: bytes of a request's JSON.
    timeout: seconds from a request's arrival to the end of its answer; None: no limit. body_timeout: to read its JSON.
    api_key: what clients must send as a bearer token; None: nothing. hosts: names under which requests may come (the
        Host header), against web pages that rebind their name to this machine; empty: any.
    """

    name: str
    context: int
    max_sequences: int = 256
    max_tokens: int | None = None
    max_body: int = 4 << 20
    timeout: float | None = 600.0
    body_timeout: float = 30.0
    api_key: str | None = None
    hosts: tuple[str, ...] = ()
