"""A job's pieces as a response: one JSON object, or server-sent events. A client that goes away cancels its job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ..generate import NonFiniteLogitsError, PromptError, TextTokenizer
from .answers import Answer
from .errors import ApiError, bad_request
from .settings import Settings
from .worker import Job, Piece, Worker

__all__ = ["answer_stream", "answer_whole"]


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptError):
        return bad_request(str(error), "prompt")
    if isinstance(error, (NonFiniteLogitsError, MemoryError)):
        return ApiError(500, str(error), kind="server_error")
    return ApiError(500, f"the engine failed: {type(error).__name__}", kind="server_error")


async def _pieces(worker: Worker, job: Job, settings: Settings) -> AsyncIterator[Piece]:
    """Until all sequences have ended. Raises ApiError."""
    loop = asyncio.get_running_loop()
    end = None if settings.timeout is None else loop.time() + settings.timeout
    left = job.call.sequences
    while left:
        try:
            with anyio.fail_after(None if end is None else end - loop.time()):
                piece = await job.pieces.get()
        except TimeoutError:
            worker.cancel(job)
            message = f"the answer was not complete within {settings.timeout:g} seconds"
            raise ApiError(504, message, kind="server_error", code="timeout") from None
        if isinstance(piece, Exception):
            raise _as_api_error(piece) from piece
        left -= piece.event.finish is not None
        yield piece


async def _gone(request: Request) -> None:
    """Returns when the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def answer_whole(
    request: Request, worker: Worker, job: Job, settings: Settings, tokenizer: TextTokenizer
) -> Response:
    answer = Answer(job.call, settings.name, tokenizer)

    async def collect() -> None:
        async for piece in _pieces(worker, job, settings):
            answer.add(piece)

    done, gone = asyncio.create_task(collect()), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientDisconnect()
        done.result()
        return JSONResponse(answer.whole())
    finally:
        worker.cancel(job)
        for task in (done, gone):
            task.cancel()
        await asyncio.gather(done, gone, return_exceptions=True)


class _EventStream(StreamingResponse):
    """Server-sent events whose job ends with the response, however that ends."""

    def __init__(self, events: AsyncIterator[str], worker: Worker, job: Job):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._worker, self._job = worker, job

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def listening() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        sending = asyncio.create_task(self.stream_response(send))
        gone = asyncio.create_task(listening())
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._worker.cancel(self._job)
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)


async def answer_stream(
    request: Request, worker: Worker, job: Job, settings: Settings, tokenizer: TextTokenizer
) -> Response:
    answer = Answer(job.call, settings.name, tokenizer)

    async def events() -> AsyncIterator[str]:
        try:
            for chunk in answer.first_chunks():
                yield _event(chunk)
            async for piece in _pieces(worker, job, settings):
                found = answer.chunk(piece)
                if found is not None:
                    yield _event(found)
            for chunk in answer.last_chunks():
                yield _event(chunk)
        except ApiError as error:  # the status has been sent: the stream itself tells
            yield _event(error.body)
        yield "data: [DONE]\n\n"

    return _EventStream(events(), worker, job)


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"
