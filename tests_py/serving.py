"""A server of the demo checkpoint in a thread of the test process, with a chat template of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import uvicorn

from flashkernel.generate import Engine, TextTokenizer, find_model, load_model
from flashkernel.serve import Settings, create_app

NAME = "demo"
MODEL = load_model(find_model("demo"), device="cpu")
TOKENIZER = TextTokenizer(find_model("demo"))
# One connection a request, and the patience that a loaded machine needs.
http = httpx.Client(timeout=120, limits=httpx.Limits(max_keepalive_connections=0))


def render(messages: list[dict[str, str]]) -> str:
    return "".join(f"# {message['role']}: {message['content']}\n" for message in messages) + "# assistant: "


class Server:
    def __init__(self, *, pages: int = 64, max_batch: int = 16, chat: bool = True, **settings: Any):
        context = MODEL.max_positions
        self.engine = Engine(MODEL, page_size=64, num_pages=pages, max_batch=max_batch)
        self.settings = Settings(**{"name": NAME, "context": context, **settings})
        self.app = create_app(self.engine, TOKENIZER, self.settings, render if chat else None)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.uvicorn = uvicorn.Server(uvicorn.Config(self.app, log_level="warning"))
        self.thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [self.listener]}, daemon=True)

    def stop(self) -> None:
        """Stops the server as a signal does, and returns when all answers are complete."""
        self.uvicorn.should_exit = True
        self.thread.join(120)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[Server]:
    server = Server(**options)
    server.thread.start()
    deadline = time.monotonic() + 90
    while not server.uvicorn.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield server
    finally:
        server.stop()
        assert server.engine.idle and server.engine.pages_in_use == 0


def until(condition: Any, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)
