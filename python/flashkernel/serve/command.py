"""`flashkernel serve`: loads a model, sizes its cache, and runs the app on uvicorn until a signal ends it."""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import sys
from pathlib import Path
from typing import Any

import flashkernel as fk

from ..generate import Engine, MissingDependencyError, Model, TextTokenizer, find_model, load_model
from ..generate.engine import KV_DTYPES
from ..generate.speculation import speculation_of
from ..generate.torchrun import led, make_engine, shared
from ..terminal import visible

__all__ = ["pages_of", "run"]

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def pages_of(model: Model, context: int, page_size: int, max_batch: int, kv_dtype: str | None, memory: float) -> int:
    """Pages for `max_batch` sequences of `context` tokens, or as many as `memory` bytes hold.

    Raises ValueError if not even one such sequence fits.
    """
    pool = model.pool_options(kv_dtype)
    dims = (pool["head_dim"], pool["head_dim_v"] or pool["head_dim"])
    if pool["dtype"] == "int4":
        row = sum(dim // 2 + -(-dim // 32) * 4 for dim in dims)  # bytes of a token's head
    elif pool["dtype"] in ("int8", "float8_e4m3fn"):
        row = sum(dims) + 2 * 4
    else:
        row = sum(dims) * (4 if pool["dtype"] == "float32" else 2)
    page = model.num_layers * model.heads_kv * page_size * row
    one = -(-context // page_size)
    pages = min(one * max_batch, int(memory // page))
    if pages < one:
        raise ValueError(
            f"serve: a sequence of {context} tokens needs {one * page / 2**30:.2f} GiB of KV-cache, and --kv-memory is "
            f"{memory / 2**30:.2f}; give more, or a smaller --max-context"
        )
    return pages


def _check(args: argparse.Namespace) -> None:
    for name in ("max_batch", "max_sequences", "max_body", "max_tokens", "max_context", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"serve: --{name.replace('_', '-')} {value}; an integer >= 1 is needed")
    if not 0 <= args.port < 65536:
        raise ValueError(f"serve: --port {args.port}; a number in [0, 65535] is needed")
    for name in ("timeout", "grace", "kv_memory"):
        if not getattr(args, name) >= 0:
            raise ValueError(f"serve: --{name.replace('_', '-')} {getattr(args, name)}; a number >= 0 is needed")


def run(args: argparse.Namespace) -> int:
    try:
        import uvicorn  # noqa: F401

        from . import create_app  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"serve: the package {error.name} is not installed; run `pip install flashkernel[serve]`"
        ) from error
    _check(args)
    if args.threads:
        fk.set_num_threads(args.threads)
    with shared("serve", args) as group:
        return _run(args, group)


def _run(args: argparse.Namespace, group: Any) -> int:
    path = find_model(args.model)
    tokenizer = TextTokenizer(path)
    model = load_model(path, device=args.device, dtype=args.dtype, weights=args.weights, tensor_parallel=group)
    context = min(model.max_positions, args.max_context or model.max_positions)
    kv_dtype = KV_DTYPES[args.kv_dtype] if args.kv_dtype else None
    pages = pages_of(model, context, args.page_size, args.max_batch, kv_dtype, args.kv_memory * 2**30)
    engine = make_engine(
        model,
        group,
        page_size=args.page_size,
        num_pages=pages,
        max_batch=args.max_batch,
        kv_dtype=args.kv_dtype,
        speculation=speculation_of(args.speculate, args.speculate_tokens, args.device, args.dtype),
    )
    with led(engine, tokenizer) as here:
        if here:
            _listen(args, engine, tokenizer, path, context)
    return 0


def _listen(args: argparse.Namespace, engine: Engine, tokenizer: TextTokenizer, path: Path, context: int) -> None:
    import uvicorn

    from . import Settings, chat_renderer, create_app

    key = args.api_key or os.environ.get("FLASHKERNEL_API_KEY") or None
    local = args.host in ("localhost", "127.0.0.1", "::1")
    settings = Settings(
        name=args.name or path.resolve().name.removesuffix(".gguf"),
        context=context,
        max_sequences=args.max_sequences,
        max_tokens=args.max_tokens,
        max_body=args.max_body,
        timeout=args.timeout or None,
        api_key=key,
        hosts=_LOOPBACK if local else (),
    )
    app = create_app(engine, tokenizer, settings, chat_renderer(path))
    config = uvicorn.Config(
        app,
        host=args.host,
        port=args.port,
        log_level="warning",
        timeout_graceful_shutdown=math.ceil(args.grace) or None,
        server_header=False,
    )
    with _bind(args.host, args.port) as listener:
        port = listener.getsockname()[1]
        host = f"[{args.host}]" if ":" in args.host else args.host
        address = f"http://{host}:{port}"
        if args.json:
            facts = {
                "model": settings.name,
                "url": f"{address}/v1",
                "page": f"{address}/",
                "host": args.host,
                "port": port,
                "api_key": key is not None,
                "device": engine.model.arrays.device,
                "dtype": args.dtype,
                "kv_dtype": args.kv_dtype,
                "context": context,
                "pages": engine.num_pages,
                "page_size": args.page_size,
                "speculate": args.speculate,
            }
            print(json.dumps(facts), flush=True)
        else:
            print(f"serving {visible(settings.name)} at {address}/v1, chat page at /", file=sys.stderr)
            print(
                f"{engine.model.arrays.device}, {args.dtype}, context {context}, {engine.num_pages} pages of "
                f"{args.page_size} tokens",
                file=sys.stderr,
            )
        if not local and key is None:
            print("warning: this address can be reached from outside and there is no --api-key", file=sys.stderr)
        sys.stderr.flush()
        uvicorn.Server(config).run(sockets=[listener])


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)
