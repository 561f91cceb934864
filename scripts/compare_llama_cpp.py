"""Tokens/s on the CPU beside llama-cpp-python, on one GGUF file with one number of threads.

    python scripts/compare_llama_cpp.py model.gguf --threads 1 --llama-python /path/to/venv/bin/python

Each engine lives in a process of its own, and the two take turns, so that a busy machine disturbs both.
llama-cpp-python may stand in another environment: --llama-python. Its library is called directly, greedy, with the
same random prompts. Prints medians of the wall-clock rates, the processor time of a token, and the median of the
rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

JOBS = (("prompt", 128), ("prompt", 512), ("decode", 64))
CONTEXT = 1024
Step = Callable[[list[int]], int]


def llama(path: str, threads: int) -> tuple[Callable[[], None], Step]:
    """Forgets everything; and the token behind some more tokens."""
    import llama_cpp as lib
    import numpy as np

    lib.llama_backend_init()
    model = lib.llama_load_model_from_file(path.encode(), lib.llama_model_default_params())
    options = lib.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = CONTEXT, CONTEXT, 512
    options.n_threads = options.n_threads_batch = threads
    context = lib.llama_new_context_with_model(model, options)
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

    def step(tokens: list[int]) -> int:
        given = (lib.llama_token * len(tokens))(*tokens)
        lib.llama_decode(context, lib.llama_batch_get_one(given, len(tokens)))
        return int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), shape=(vocab,)).argmax())

    return lambda: lib.llama_memory_clear(lib.llama_get_memory(context), True), step


def run_llama(path: str, threads: int) -> Callable[[list[int], int], tuple[list[int], float, float]]:
    forget, step = llama(path, threads)

    def run(prompt: list[int], count: int) -> tuple[list[int], float, float]:
        forget()
        if not count:
            begin = time.perf_counter(), time.process_time()
        tokens = [step(prompt)]
        if count:
            begin = time.perf_counter(), time.process_time()
        for _ in range(count):
            tokens.append(step(tokens[-1:]))
        return tokens, time.perf_counter() - begin[0], time.process_time() - begin[1]

    return run


def run_flashkernel(path: str, threads: int, dtype: str) -> Callable[[list[int], int], tuple[list[int], float, float]]:
    import flashkernel as fk
    from flashkernel.generate import Engine, load_model

    fk.set_num_threads(threads)
    engine = Engine(load_model(path, device="cpu", dtype=dtype), prefix_sharing=False)
    engine.reserve(CONTEXT)

    def run(prompt: list[int], count: int) -> tuple[list[int], float, float]:
        begin, tokens = (time.perf_counter(), time.process_time()), []
        for event in engine.generate([prompt], max_new_tokens=count + 1, stop_tokens=frozenset()):
            tokens.append(event.token)
            if count and len(tokens) == 1:
                begin = time.perf_counter(), time.process_time()
        return tokens, time.perf_counter() - begin[0], time.process_time() - begin[1]

    return run


def work(kind: str, path: str, threads: int) -> None:
    run = run_llama(path, threads) if kind == "llama" else run_flashkernel(path, threads, kind)
    draw = random.Random(0)
    prompt = [draw.randrange(1000, 20000) for _ in range(CONTEXT)]
    print("ready", flush=True)
    for line in sys.stdin:
        what, count = line.split()
        length, new = (int(count), 0) if what == "prompt" else (128, int(count))
        tokens, wall, own = run(prompt[:length], new)
        print(json.dumps({"wall": wall, "own": own, "tokens": tokens}), flush=True)


class Worker:
    def __init__(self, kind: str, python: str, path: str, threads: int):
        command = [python, __file__, path, "--threads", str(threads), "--worker", kind]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, text=True, **pipes)
        line = " "
        while line and line.strip() != "ready":
            line = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise SystemExit(f"compare_llama_cpp: the process of {kind!r} ended before it was ready")

    def ask(self, what: str, count: int) -> dict[str, Any]:
        self.process.stdin.write(f"{what} {count}\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise SystemExit("compare_llama_cpp: a process ended in the midst of a job")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--jobs", nargs="+", default=[f"{what}:{count}" for what, count in JOBS])
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.model, options.threads)
        return
    kinds = ["llama", *options.dtype]
    pythons = {"llama": options.llama_python}
    workers = {kind: Worker(kind, pythons.get(kind, sys.executable), options.model, options.threads) for kind in kinds}
    try:
        for what, count in ((job.split(":")[0], int(job.split(":")[1])) for job in options.jobs):
            for worker in workers.values():
                worker.ask(what, count)
            rounds = [{kind: workers[kind].ask(what, count) for kind in kinds} for _ in range(options.rounds)]
            for kind in kinds:
                wall = statistics.median(found[kind]["wall"] for found in rounds)
                own = min(found[kind]["own"] for found in rounds) / count * 1e6
                ratio = statistics.median(found["llama"]["wall"] / found[kind]["wall"] for found in rounds)
                line = f"{what} {count:4d} {kind:9s} {count / wall:8.1f} tokens/s {own:8.1f} us of processors a token"
                print(f"{line}  {ratio:.2f} of llama.cpp's rate", flush=True)
    finally:
        for worker in workers.values():
            worker.process.kill()


if __name__ == "__main__":
    main()
