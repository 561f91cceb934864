"""`flashkernel generate`: streams text to stdout; progress, and then how fast it ran and on what, to stderr."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any, TextIO

import flashkernel as fk

from ..sampling_arguments import sampling_of
from ..terminal import visible
from . import Engine, TextOutput, TextTokenizer, load_model
from .arrays import ALIASES
from .errors import MissingDependencyError
from .model_names import find_model
from .request import GenerationStats, TokenEvent
from .sampling_options import SamplingOptions
from .speculation import speculation_of
from .text_output import check_stop_strings
from .torchrun import shared

__all__ = ["run"]


def _progress_bar(total: int) -> Any:
    """A bar on stderr where that is a terminal, and nothing elsewhere; wiped when it is closed."""
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise MissingDependencyError(
            "generate: the package tqdm is not installed; run `pip install flashkernel[generate]`"
        ) from error
    return tqdm(total=total, unit="token", leave=False, disable=None, file=sys.stderr, dynamic_ncols=True)


class _Printer:
    """Prints the texts of a batch in the order of the prompts: the first unfinished one live, later ones when it is
    done. Control characters reach a terminal as escapes, a pipe or a file as they are.
    """

    def __init__(self, prompts: list[str], stream: TextIO):
        self._stream = stream
        self._terminal = stream.isatty()
        self._many = len(prompts) > 1
        self._buffers = [[prompt] for prompt in prompts]
        self._done = [False] * len(prompts)
        self._current = -1
        self._next()

    def put(self, sequence: int, text: str, done: bool) -> None:
        self._buffers[sequence].append(text)
        self._done[sequence] = done
        if sequence == self._current:
            self._flush()
            while self._current < len(self._done) and self._done[self._current]:
                self._next()

    def _next(self) -> None:
        if self._current >= 0:
            print(file=self._stream)
        self._current += 1
        if self._current < len(self._buffers):
            if self._many:
                print(f"--- prompt {self._current + 1} of {len(self._buffers)} ---", file=self._stream)
            self._flush()

    def _flush(self) -> None:
        text = "".join(self._buffers[self._current])
        print(visible(text) if self._terminal else text, end="", file=self._stream, flush=True)
        self._buffers[self._current].clear()


def _calls() -> dict[str, int]:
    return {kernel.id: kernel.calls for kernel in fk.kernels()}


def _open_engine(args: argparse.Namespace, model: Path, group: Any, progress: Any) -> tuple[Any, str, int]:
    """The engine, its device, and its number of threads. Warnings of loading go to stderr, a line each."""
    dtype = ALIASES.get(args.dtype, args.dtype)
    if args.no_flashkernel:
        if args.weights:
            raise ValueError("generate: --weights together with --no-flashkernel; leave one of them out")
        if args.kv_dtype:
            raise ValueError("generate: --kv-dtype together with --no-flashkernel; leave one of them out")
        if args.speculate:
            raise ValueError("generate: --speculate together with --no-flashkernel; leave one of them out")
        from .stock import StockEngine

        stock = StockEngine(model, device=args.device, dtype=dtype)
        import torch

        if args.threads:
            torch.set_num_threads(args.threads)
        return stock, stock.device, torch.get_num_threads()
    if args.threads:
        fk.set_num_threads(args.threads)
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        loaded = load_model(model, device=args.device, dtype=dtype, weights=args.weights, tensor_parallel=group)
    for note in notes:
        progress.write(f"flashkernel generate: warning: {visible(str(note.message))}", file=sys.stderr)
    speculation = speculation_of(args.speculate, args.speculate_tokens, args.device, dtype)
    return (
        Engine(
            loaded,
            page_size=args.page_size,
            num_pages=args.num_pages,
            kv_dtype=args.kv_dtype,
            speculation=speculation,
        ),
        loaded.arrays.device,
        fk.get_num_threads(),
    )


def run(args: argparse.Namespace) -> int:
    if not args.prompt:
        raise ValueError(
            "generate: no --prompt; give one, for example --prompt 'def fibonacci(n):' (several make a batch)"
        )
    if args.logprobs is not None and not args.json:
        raise ValueError("generate: --logprobs without --json; the text has no place for them, so --json is needed")
    sampling = sampling_of(args, args.logprobs)
    stop_strings = check_stop_strings(args.stop)
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in args.prompt for _ in range(args.n)]
    model = find_model(args.model)
    if args.tensor_parallel and (args.no_flashkernel or "-" in args.prompt):
        other = "--no-flashkernel" if args.no_flashkernel else "--prompt -"
        raise ValueError(f"generate: --tensor-parallel together with {other}; leave one of them out")
    with shared("generate", args) as group:
        return _generate(args, sampling, stop_strings, prompts, model, group)


def _generate(
    args: argparse.Namespace,
    sampling: SamplingOptions,
    stop_strings: tuple[str, ...],
    prompts: list[str],
    model: Path,
    group: Any,
) -> int:
    texts = [""] * len(prompts)
    told: list[list[TokenEvent]] = [[] for _ in prompts]
    finish: list[str | None] = [None] * len(prompts)
    with _progress_bar(args.max_new_tokens * len(prompts)) as progress:
        progress.set_description(f"loading {visible(model.name)}")
        tokenizer = TextTokenizer(model)
        ids = [tokenizer.encode(prompt) for prompt in prompts]
        engine, device, threads = _open_engine(args, model, group, progress)
        calls = _calls()
        stop: frozenset[int] | None = frozenset() if args.ignore_eos else None
        events = engine.generate(
            ids,
            max_new_tokens=args.max_new_tokens,
            sampling=sampling,
            stop_tokens=stop,
            stop_strings=stop_strings,
            tokenizer=tokenizer,
        )
        progress.set_description(f"reading {sum(map(len, ids))} tokens")
        outputs = [TextOutput(tokenizer, prompt, stop_strings) for prompt in ids]
        printer = None
        for event in events:
            if printer is None and not args.json:
                if sys.stdout.isatty():  # from here on the text itself shows the progress
                    progress.close()
                printer = _Printer(prompts, sys.stdout)
            progress.set_description("writing", refresh=False)
            progress.update()
            text = outputs[event.sequence].put(event.token)
            if event.finish:
                text += outputs[event.sequence].end()
                finish[event.sequence] = event.finish
            told[event.sequence].append(event)
            texts[event.sequence] += text
            if printer is not None:
                printer.put(event.sequence, text, event.finish is not None)
    ran = {name: count - calls.get(name, 0) for name, count in _calls().items() if count > calls.get(name, 0)}
    if args.json:
        print(json.dumps(_json(args, prompts, texts, ids, told, finish, engine.stats, device, threads, ran), indent=2))
    else:
        sys.stdout.flush()  # the text first, where both streams go to one place
        if sys.stdout.isatty() and sys.stderr.isatty():
            print(file=sys.stderr)
        print(summary(engine.stats, device, threads, args, ran), file=sys.stderr)
    return 0


def summary(stats: GenerationStats, device: str, threads: int, args: argparse.Namespace, ran: dict[str, int]) -> str:
    dtype = ALIASES.get(args.dtype, args.dtype)
    lines = [
        f"prefill  {stats.prefill_tokens} tokens, {stats.prefill_rate:.1f} tokens/s",
        f"decode   {stats.decode_tokens} tokens, {stats.decode_rate:.1f} tokens/s",
        f"device   {device}, {threads} threads, {dtype}" + (f", {args.kv_dtype} cache" if args.kv_dtype else ""),
    ]
    if stats.drafts:
        lines.insert(2, f"drafts   {drafts_of(stats)}")
    if args.no_flashkernel:
        lines.append("kernels  none of FlashKernel's in the stock model (--no-flashkernel)")
    elif args.verbose:
        lines += [f"{'' if i else 'kernels':<9}{name} x {count}" for i, (name, count) in enumerate(sorted(ran.items()))]
    return "\n".join(lines)


def drafts_of(stats: GenerationStats) -> str:
    return f"{stats.drafts}, {stats.accepted_tokens} of {stats.drafted_tokens} tokens right"


def _logprobs(events: list[TokenEvent]) -> dict[str, Any]:
    return {
        "logprobs": [event.logprob for event in events],
        "top_logprobs": [[{"token": token, "logprob": value} for token, value in event.top] for event in events],
    }


def _json(
    args: argparse.Namespace,
    prompts: list[str],
    texts: list[str],
    ids: list[list[int]],
    told: list[list[TokenEvent]],
    finish: list[str | None],
    stats: GenerationStats,
    device: str,
    threads: int,
    ran: dict[str, int],
) -> dict[str, Any]:
    return {
        "sequences": [
            {
                "prompt": prompt,
                "text": text,
                "prompt_tokens": prompt_ids,
                "tokens": [event.token for event in events],
                "finish": reason,
                **({} if args.logprobs is None else _logprobs(events)),
            }
            for prompt, text, prompt_ids, events, reason in zip(prompts, texts, ids, told, finish, strict=True)
        ],
        "prefill_tokens": stats.prefill_tokens,
        "prefill_tokens_per_second": stats.prefill_rate,
        "decode_tokens": stats.decode_tokens,
        "decode_tokens_per_second": stats.decode_rate,
        "drafts": stats.drafts,
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "device": device,
        "threads": threads,
        "dtype": ALIASES.get(args.dtype, args.dtype),
        "kv_dtype": args.kv_dtype,
        "flashkernel": not args.no_flashkernel,
        "kernels": ran,
    }
