"""`flashkernel serve`: an OpenAI-compatible server over the engine's continuous batching (docs/serve.md).

app.py         routes, bodies, limits
guard.py       Host header and API key
protocol.py    JSON to a `Call`: token ids, sampling options, counts; fields.py reads typed fields
worker.py      the engine's thread: requests and text pass by queues
respond.py     pieces of text to one JSON object or to server-sent events; cancels on disconnect
answers.py     the JSON of answers
metrics.py     what Prometheus is told
chat.py        the model's chat template
page.html      the chat page at /
command.py     the command line

Needs the packages starlette, uvicorn and prometheus-client (`pip install flashkernel[serve]`).
"""

from __future__ import annotations

from .app import create_app
from .chat import chat_renderer
from .settings import Settings

__all__ = ["Settings", "chat_renderer", "create_app"]
