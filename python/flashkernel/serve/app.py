"""The HTTP side: routes of OpenAI's API over a worker, health, metrics and the chat page."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..generate import Engine, TextTokenizer
from .errors import ApiError, bad_request
from .guard import Guard
from .metrics import Metrics
from .protocol import Call, Reader
from .respond import answer_stream, answer_whole
from .settings import Settings
from .worker import Worker

__all__ = ["create_app"]

_PAGE = Path(__file__).with_name("page.html")


async def read_json(request: Request, settings: Settings) -> Any:
    """The body. Raises ApiError where it is too large, too slow, of another type, or no JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # pages of other sites may send other types without asking
        raise ApiError(415, f"the content type is {kind!r}; application/json is needed")
    body = bytearray()
    try:
        with anyio.fail_after(settings.body_timeout):
            async for part in request.stream():
                body += part
                if len(body) > settings.max_body:
                    raise ApiError(413, f"the body has more than {settings.max_body} bytes; send less")
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {settings.body_timeout:g} seconds") from None
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _page() -> tuple[bytes, dict[str, str]]:
    """The chat page, which may run its own script and style and talk to this server alone."""
    text = _PAGE.read_text(encoding="utf-8")
    sources = []
    for tag in ("script", "style"):
        inside = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert inside is not None
        digest = base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode()
        sources.append(f"{tag}-src 'sha256-{digest}'")
    policy = "; ".join(["default-src 'none'", *sources, "connect-src 'self'", "base-uri 'none'", "form-action 'none'"])
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return text.encode(), headers


def create_app(
    engine: Engine,
    tokenizer: TextTokenizer,
    settings: Settings,
    render: Callable[[list[dict[str, str]]], str] | None = None,
) -> Starlette:
    """An ASGI app that owns `engine` while it runs.

    engine: with num_pages, so that its cache stays as it is; a sequence of settings.context tokens must fit.
    render: messages to text, by the model's chat template; None: chat is refused.
    """
    metrics = Metrics()
    worker = Worker(engine, tokenizer, metrics)
    reader = Reader(settings, tokenizer, engine.model.vocab_size, render)
    created = int(time.time())
    page, page_headers = _page()
    engine.reserve(settings.context)
    metrics.pages.set(engine.num_pages or 0)

    async def answer(request: Request, endpoint: str, read: Callable[[Any], Call]) -> Response:
        status = 500
        try:
            call = await run_in_threadpool(read, await read_json(request, settings))
            if not worker.alive:
                raise ApiError(503, "the engine has stopped", kind="server_error", code="stopped")
            if worker.sequences + call.sequences > settings.max_sequences:
                message = (
                    f"{worker.sequences} answers are under way and {call.sequences} are asked for; this server takes "
                    f"{settings.max_sequences} at once: try again later"
                )
                raise ApiError(503, message, kind="server_error", code="overloaded", headers={"Retry-After": "1"})
            job = worker.submit(call)
            respond = answer_stream if call.stream else answer_whole
            response: Response = await respond(request, worker, job, settings, tokenizer)
            status = response.status_code
            return response
        except ApiError as error:
            status = error.status
            raise
        except ClientDisconnect:
            status = 499
            return Response(status_code=status)
        finally:
            metrics.requests.labels(endpoint, str(status)).inc()

    async def completions(request: Request) -> Response:
        return await answer(request, "completions", reader.completion)

    async def chat(request: Request) -> Response:
        return await answer(request, "chat", reader.chat)

    model = {
        "id": settings.name,
        "object": "model",
        "created": created,
        "owned_by": "flashkernel",
        "context_length": settings.context,
        "chat": render is not None,
    }

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != settings.name:
            raise ApiError(404, f"the model {name!r} does not exist", param="model", code="model_not_found")
        return JSONResponse(model)

    async def health(_: Request) -> Response:
        if not worker.alive:
            return JSONResponse({"status": "stopped"}, 503)
        return JSONResponse({"status": "ok", "model": settings.name, "sequences": worker.sequences})

    async def metrics_page(_: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    async def home(_: Request) -> Response:
        return Response(page, media_type="text/html", headers=page_headers)

    async def api_error(_: Request, error: Any) -> Response:
        response: Response = error.response()
        return response

    async def http_error(request: Request, error: Any) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def crash(_: Request, error: Any) -> Response:
        return ApiError(500, "the server failed", kind="server_error").response()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.close)

    app = Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/health", health),
            Route("/metrics", metrics_page),
            Route("/", home),
        ],
        exception_handlers={ApiError: api_error, HTTPException: http_error, Exception: crash},
        lifespan=lifespan,
    )
    app.add_middleware(Guard, settings=settings)
    app.state.metrics = metrics
    return app
