#!/usr/bin/env python3
"""Trains examples/train_gpt2.py's model on the stock kernels and on FlashKernel's, from the same weights on the same
batches, and writes the loss of every step, the speed and the memory of each run.

    python scripts/compare_training.py --json lab/results/h200/train_gpt2.json

Ways to run a step: "eager" (op by op; a quarter of the steps), "graph" (op by op, captured as one CUDA graph),
"compile + graph" (torch.compile of model and loss, and that captured). The stock runs of two ways differ by rounding
alone: how far their curves part is what the distance between FlashKernel's curve and stock's is to be held against.
Every run that has ended is written at once. Options after "--" go to train_gpt2.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_gpt2 as example
import transformers

import flashkernel as fk
from flashkernel.bench.machine import machine_info

SCHEMA = "train-1"
WAYS = {"eager": (False, False), "graph": (False, True), "compile + graph": (True, True)}  # compile, graph
WINDOW = 50  # steps that a curve is averaged over before it is compared


def smoothed(losses: list[float]) -> list[float]:
    width = min(WINDOW, len(losses))
    return [statistics.fmean(losses[i : i + width]) for i in range(len(losses) - width + 1)]


def distance(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """How far two curves are apart, averaged over WINDOW steps: at most, and at the end."""
    steps = min(len(a["losses"]), len(b["losses"]))
    gaps = [y - x for x, y in zip(smoothed(a["losses"][:steps]), smoothed(b["losses"][:steps]), strict=True)]
    return {
        "from": f"{a['kernels']}, {a['way']}",
        "to": f"{b['kernels']}, {b['way']}",
        "steps": steps,
        "max_distance": round(max(map(abs, gaps)), 5),
        "last_distance": round(gaps[-1], 5),
    }


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def run(kernels: str, way: str, data: Any, args: argparse.Namespace) -> dict[str, Any]:
    tokenizer, train, val = data
    args = argparse.Namespace(**vars(args))
    args.kernels, (args.compile, args.graph) = kernels, WAYS[way]
    if way == "eager":
        args.steps //= 4  # for its speed
    cuda = torch.device(args.device).type == "cuda"
    args.graph = args.graph and cuda
    gc.collect()
    torch.compiler.reset()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    model = example.make_model(args, tokenizer)
    marks: dict[int, float] = {}
    ready = min(20, args.steps // 2)  # compiled, captured and warm by then

    def after(step: int, steps: int, losses: torch.Tensor) -> None:
        if step in (1, ready, steps):
            synchronize(args.device)
            marks[step] = time.perf_counter()

    with example.running_on(kernels, model):
        losses = example.fit(model, train, args, after).tolist()
        peak = torch.cuda.max_memory_allocated() if cuda else None
        workspace = fk.memory_stats("cuda:0").peak_allocated_bytes if cuda and kernels == "flashkernel" else 0
    val_loss = example.evaluate(example.rounded_to_fp16(model), val.tokens.to(args.device), args.batch_size)
    tokens = (args.steps - ready) * args.batch_size * args.context
    return {
        "kernels": kernels,
        "way": way,
        "tokens_per_second": round(tokens / (marks[args.steps] - marks[ready])),
        "ready_seconds": round(marks[ready] - begin, 2),
        "peak_bytes": None if peak is None else peak + workspace,
        "val_loss": val_loss,
        "losses": [round(loss, 5) for loss in losses],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--max-seconds", type=float, default=float("inf"), help="begin no run after this much time")
    parser.add_argument("--ways", default="graph,compile + graph,eager", help="in this order, stock before FlashKernel")
    parser.add_argument("options", nargs="*", help="of train_gpt2.py")
    asked = parser.parse_args()
    begin = time.perf_counter()
    options = ["--steps", "1000", *asked.options]
    args = example.parse_args(options)
    torch.set_float32_matmul_precision("high")
    data = example.load_data(args)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "command": "python scripts/compare_training.py",
        "machine": {
            **machine_info(torch.device(args.device).type),
            "transformers": transformers.__version__,
        },
        "method": {
            "steps": args.steps,
            "batch": args.batch_size,
            "context": args.context,
            "warmup": args.warmup,
            "lr": args.lr,
            "dropout": args.dropout,
            "seed": args.seed,
            "bf16": args.bf16,
            "layers": args.n_layer,
            "width": args.n_embd,
            "heads": args.n_head,
            "vocabulary": data[0].get_vocab_size(),
            "window": WINDOW,
        },
        "runs": [],
        "distances": [],
        "failed": [],
    }
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    for way in asked.ways.split(","):
        for kernels in ("stock", "flashkernel"):
            name = f"{kernels}, {way}"
            if time.perf_counter() - begin > asked.max_seconds:
                result["failed"].append(f"{name}: no time left")
                continue
            print(f"[{time.perf_counter() - begin:.0f} s] {name}", flush=True)
            try:
                found = run(kernels, way, data, args)
            except Exception as error:  # the other runs are worth having
                traceback.print_exc()
                result["failed"].append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
                continue
            result["runs"].append(found)
            first, second = (
                {r["way"]: r for r in result["runs"] if r["kernels"] == k} for k in ("stock", "flashkernel")
            )
            result["distances"] = [distance(first[w], second[w]) for w in first if w in second]
            ways = list(first)
            result["distances"] += [distance(first[ways[0]], first[w]) for w in ways[1:]]
            asked.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
            print({k: v for k, v in found.items() if k != "losses"}, f"last losses {found['losses'][-3:]}", flush=True)
    asked.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    for entry in result["distances"]:
        print(entry)
    print("failed:", result["failed"])


if __name__ == "__main__":
    main()
