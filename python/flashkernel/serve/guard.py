"""Who may ask: the Host header and the API key, before any body is read."""

from __future__ import annotations

import hmac
from typing import Any

from starlette.datastructures import Headers

from .errors import ApiError
from .settings import Settings

__all__ = ["Guard"]

_OPEN = ("/", "/health")  # without a key


class Guard:
    """ASGI middleware."""

    def __init__(self, app: Any, settings: Settings):
        self.app, self.settings = app, settings

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            error = self._refusal(scope["path"], Headers(scope=scope))
            if error is not None:
                await error.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        hosts, key = self.settings.hosts, self.settings.api_key
        name = headers.get("host", "").lower()
        name = name[: name.find("]") + 1] if name.startswith("[") else name.partition(":")[0]
        if hosts and name not in hosts:
            return ApiError(403, f"the host {name!r} is not one of this server's", code="unknown_host")
        if key is None or path in _OPEN:
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode()):
            return None
        message = "the API key is wrong" if given else "no API key was given; send it as `Authorization: Bearer KEY`"
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
