"""The sampling options of the command line and what they mean together, and those of speculative decoding.

Beside the package `generate`, not in it, since the parser of every command is made without importing the engine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .generate import SamplingOptions

__all__ = ["add_sampling_arguments", "add_speculation_arguments", "sampling_of"]


def _bias(text: str) -> tuple[int, float]:
    token, equals, bias = text.partition("=")
    try:
        if equals:
            return int(token), float(bias)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}: a token id and a number, as in 13=-2.5, are needed")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--temperature",
        type=float,
        metavar="T",
        help="sample at this temperature (0: greedy); 0.8 if left out with another sampling option",
    )
    add("--top-k", type=int, default=0, metavar="K", help="sample among the K likeliest tokens (0: all)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample among the likeliest tokens that reach probability P",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="do not sample tokens less likely than P times the likeliest (0: no limit)",
    )
    add(
        "--typical-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample among the tokens of the most typical information that reach probability P",
    )
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="make tokens that stand in the text already less likely by this factor (1: none)",
    )
    add(
        "--frequency-penalty",
        type=float,
        default=0.0,
        metavar="F",
        help="take F off the logit of a token for each time that it was written (0: none)",
    )
    add(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="F",
        help="take F off the logit of each token that was written (0: none)",
    )
    add(
        "--logit-bias",
        type=_bias,
        action="append",
        default=[],
        metavar="ID=BIAS",
        help="add BIAS to the logit of token ID (-inf bans it); give it several times for several tokens",
    )
    add("--seed", type=int, default=0, help="seed of the sampler")
    add("--greedy", action="store_true", help="always take the likeliest token (as if no sampling option were given)")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the text before TEXT; give it several times for several texts",
    )


def sampling_of(args: argparse.Namespace, logprobs: int | None = None) -> SamplingOptions:
    """Raises ValueError."""
    from .generate import SamplingOptions

    drawn = args.top_k != 0 or args.top_p != 1.0 or args.min_p != 0.0 or args.typical_p != 1.0
    temperature = args.temperature
    if args.greedy:
        if (drawn or temperature is not None) and temperature != 0:
            raise ValueError(
                "generate: --greedy together with --temperature, --top-k, --top-p, --min-p or --typical-p; leave one "
                "of them out"
            )
        temperature, drawn = 0.0, False
    limits = {"top_k": args.top_k, "top_p": args.top_p, "min_p": args.min_p, "typical_p": args.typical_p}
    return SamplingOptions(
        temperature=(0.8 if drawn else 0.0) if temperature is None else temperature,
        seed=args.seed,
        repetition_penalty=args.repetition_penalty,
        frequency_penalty=args.frequency_penalty,
        presence_penalty=args.presence_penalty,
        logit_bias=dict(args.logit_bias),
        logprobs=logprobs,
        **({} if args.greedy else limits),
    )


def add_speculation_arguments(add: Callable[..., Any]) -> None:
    """What generate, chat and serve share of speculative decoding (docs/speculation.md)."""
    add(
        "--speculate",
        metavar="HOW",
        help="verify several guessed tokens a step, which changes no token: lookup (what stood behind the same words "
        "before) or MODEL, a smaller model of the same vocabulary that writes them (default: none)",
    )
    add(
        "--speculate-tokens",
        type=int,
        metavar="N",
        help="most guessed tokens a step and sequence, 1 to 64 (default: 8 of lookup, 4 of a model); fewer are tried "
        "where they do not pay",
    )


def add_tensor_parallel_argument(add: Callable[..., Any], command: str) -> None:
    """What generate, chat and serve share of one model on several GPUs (docs/tensor_parallel.md)."""
    add(
        "--tensor-parallel",
        action="store_true",
        help="share the model among the processes of torchrun, one a GPU: "
        f"torchrun --nproc-per-node 2 -m flashkernel {command} --tensor-parallel ...; callers have to do with the "
        "first one alone",
    )
