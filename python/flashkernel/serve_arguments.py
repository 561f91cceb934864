"""The options of `flashkernel serve`. Beside the package `serve`, which needs packages that other commands do not."""

from __future__ import annotations

import argparse

from .sampling_arguments import add_speculation_arguments, add_tensor_parallel_argument

__all__ = ["add_serve_arguments"]


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2", metavar="MODEL", help="a checkpoint folder, a .gguf file, smollm2 or demo")
    add("--name", help="what clients call the model (default: the name of its folder or file)")
    add("--host", default="127.0.0.1", help="address to listen on; others than loopback can be reached from outside")
    add("--port", type=int, default=8000, help="port to listen on; 0: any free one")
    add("--api-key", metavar="KEY", help="what clients must send; or set FLASHKERNEL_API_KEY")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where the model runs")
    add("--dtype", choices=["float32", "float16", "bfloat16"], default="float32", help="weights, activations, cache")
    add(
        "--weights",
        choices=["quantized", "dequantized"],
        help="of a GGUF file: Q4_0, Q4_1 and Q8_0 as they are, or as --dtype (default: the first on the CPU)",
    )
    add("--kv-dtype", choices=["fp8", "int8", "int4"], help="elements of the KV-cache (default: those of --dtype)")
    add_speculation_arguments(add)
    add_tensor_parallel_argument(add, "serve")
    add("--page-size", type=int, choices=[16, 32, 64, 128, 256], default=64, help="tokens per KV-cache page")
    add("--kv-memory", type=float, default=2.0, metavar="GIB", help="most memory of the KV-cache")
    add("--max-batch", type=int, default=64, metavar="N", help="sequences computed at once; others wait")
    add("--max-sequences", type=int, default=256, metavar="N", help="sequences under way at once; others are refused")
    add("--max-tokens", type=int, metavar="N", help="most new tokens of an answer (default: as the context allows)")
    add("--max-context", type=int, metavar="N", help="most tokens of prompt and answer (default: the model's)")
    add("--max-body", type=int, default=4 << 20, metavar="BYTES", help="most bytes of a request")
    add("--timeout", type=float, default=600.0, metavar="S", help="most seconds of a request (0: no limit)")
    add("--grace", type=float, default=0.0, metavar="S", help="seconds to finish answers at shutdown (0: no limit)")
    add(
        "--json",
        action="store_true",
        help="print one line of JSON on stdout, with the address, once it listens",
    )
    add("--threads", type=int, metavar="N", help="CPU threads (default: OMP_NUM_THREADS, else all cores)")
