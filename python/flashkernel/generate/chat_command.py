"""`flashkernel chat`: a conversation in the terminal, or one answer to what a pipe holds.

The answer goes to stdout as it is written, everything else to stderr. Ctrl-C ends the answer, not the program; without
a terminal it ends the program, as in any pipeline.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import flashkernel as fk

from ..sampling_arguments import sampling_of
from ..terminal import visible
from .arrays import ALIASES
from .chat import PAGE_SIZE, Chat, pages_for
from .chat_template import ChatTemplate
from .errors import PromptError
from .model import load_model
from .model_names import find_model
from .speculation import speculation_of
from .tokenizer import TextTokenizer
from .torchrun import led, make_engine, shared

__all__ = ["run"]

_HELP = "/reset forgets the conversation, /exit or Ctrl-D ends; Ctrl-C stops an answer"


def _say(text: str) -> None:
    """A line on stderr, after what stdout has so far."""
    sys.stdout.flush()
    print(visible(text), file=sys.stderr, flush=True)


class _Interrupt:
    """Ctrl-C as a flag while an answer is written: the engine is between two steps when it is looked at."""

    def __init__(self) -> None:
        self.asked = False

    @contextlib.contextmanager
    def noted(self) -> Iterator[Callable[[], bool]]:
        self.asked = False
        if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
            yield lambda: False
            return

        def note(*_: Any) -> None:
            self.asked = True

        before = signal.signal(signal.SIGINT, note)
        try:
            yield lambda: self.asked
        finally:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _open(args: argparse.Namespace) -> Iterator[Chat | None]:
    """The conversation; None at a process that has only followed the first one."""
    with shared("chat", args) as group:
        chat, tokenizer = _load(args, group)
        with led(chat.engine, tokenizer) as here:
            yield chat if here else None


def _load(args: argparse.Namespace, group: Any) -> tuple[Chat, TextTokenizer]:
    model = find_model(args.model)
    if sys.stderr.isatty():
        _say(f"loading {model.name}")
    template = ChatTemplate.load(model)  # the cheapest first: a model without one is refused at once
    tokenizer = TextTokenizer(model)
    sampling = sampling_of(args)
    if args.threads:
        fk.set_num_threads(args.threads)
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        dtype = ALIASES.get(args.dtype, args.dtype)
        loaded = load_model(model, device=args.device, dtype=dtype, weights=args.weights, tensor_parallel=group)
    for note in notes:
        _say(f"flashkernel chat: warning: {note.message}")
    context = min(args.context, loaded.max_positions)
    engine = make_engine(
        loaded,
        group,
        page_size=PAGE_SIZE,
        num_pages=pages_for(context),
        kv_dtype=args.kv_dtype,
        max_batch=1,
        speculation=speculation_of(args.speculate, args.speculate_tokens, args.device, dtype),
    )
    chat = Chat(
        engine,
        tokenizer,
        template,
        context=context,
        system=args.system,
        stop=args.stop,
        max_tokens=args.max_tokens,
        sampling=sampling,
    )
    return chat, tokenizer


def _answer(chat: Chat, message: str, interrupt: _Interrupt | None, as_json: bool) -> None:
    """Prints one answer, then a line about it on stderr; as JSON: both in one line on stdout."""
    terminal = sys.stdout.isatty()
    text = ""
    noted = contextlib.nullcontext(lambda: False) if interrupt is None else interrupt.noted()
    with noted as stopped:
        pieces = chat.answer(message, stopped)
        for number, piece in enumerate(pieces):
            if number == 0 and chat.dropped:
                turns = "turn is" if chat.dropped == 1 else f"{chat.dropped} turns are"
                _say(f"[the context is full: the oldest {turns} left out]")
            text += piece
            if not as_json:
                print(visible(piece) if terminal else piece, end="", flush=True)
    if as_json:
        print(json.dumps(_facts(chat, text)), flush=True)
        return
    print(flush=True)
    _say(_about(chat))


def _facts(chat: Chat, text: str) -> dict[str, Any]:
    return {
        "text": text,
        "finish": chat.finish,
        "prompt_tokens": chat.stats.prefill_tokens + chat.stats.prefix_tokens,
        "tokens": len(chat.request.generated) if chat.request else 0,
        "turns_left_out": chat.dropped,
        "prefill_tokens_per_second": chat.stats.prefill_rate,
        "decode_tokens_per_second": chat.stats.decode_rate,
        "drafted_tokens": chat.stats.drafted_tokens,
        "accepted_tokens": chat.stats.accepted_tokens,
    }


def _about(chat: Chat) -> str:
    stats = chat.stats
    read = f"{stats.prefill_tokens} tokens read" + (f", {stats.prefix_tokens} kept" if stats.prefix_tokens else "")
    written = len(chat.request.generated) if chat.request else 0
    text = f"[{read}, {written} written, {stats.decode_rate:.1f} tokens/s"
    if stats.drafts:
        text += f", {stats.accepted_tokens} of them drafted"
    ends = {"length": f"; cut after {written} tokens, see --max-tokens and --context", "interrupted": "; stopped"}
    return text + ends.get(chat.finish, "") + "]"


def _lines() -> Iterator[str]:
    """What is typed, line by line, until the input ends. Ctrl-C drops a line."""
    with contextlib.suppress(ImportError):  # line editing, where Python has it
        import readline  # noqa: F401
    while True:
        try:
            if sys.stdout.isatty():
                yield input("> ")
            else:  # the answers go to a file or a pipe, which the prompt is no part of
                print("> ", end="", file=sys.stderr, flush=True)
                line = sys.stdin.readline()
                if not line:
                    return
                yield line.rstrip("\n")
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            _say(_HELP)


def _converse(chat: Chat, as_json: bool) -> None:
    interrupt = _Interrupt()
    _say(_HELP)
    for line in _lines():
        message = line.strip()
        if message in ("/exit", "/quit", "/bye"):
            return
        if message == "/reset":
            chat.reset()
            _say("[the conversation is forgotten]")
        elif message in ("/help", "/?"):
            _say(_HELP)
        elif message:
            try:
                _answer(chat, message, interrupt, as_json)
            except PromptError as error:  # of this message alone
                _say(str(error))
            except KeyboardInterrupt:  # before the answer has begun, or behind its end
                print(file=sys.stderr)


def run(args: argparse.Namespace) -> int:
    if sys.stdin.isatty():
        with _open(args) as chat:
            if chat is not None:
                _converse(chat, args.json)
        return 0
    first = not args.tensor_parallel or os.environ.get("RANK", "0") == "0"  # of torchrun's processes the one that reads
    message = sys.stdin.read().strip() if first else ""
    if first and not message:
        raise ValueError(
            "chat: stdin is no terminal and holds no message; a message is needed, as in `echo Hello | flashkernel "
            "chat`, or a terminal, in a container that of `docker run -it`"
        )
    with _open(args) as chat:
        if chat is not None:
            _answer(chat, message, None, args.json)
    return 0
