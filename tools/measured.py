"""What the committed runs say, as points: kernel id, work by formula, time. Called by roofline.py and the docs' tables.

Runs of `flashkernel bench --json` are read as they are; the older files under lab/results/h200 were
written by hand, each in a form of its own, and have a reader each below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashkernel.bench.results import is_result

__all__ = ["Point", "attention_work", "ceilings", "linear_work", "points"]


@dataclass(frozen=True)
class Point:
    kernel: str  # id
    case: str
    flop: float
    bytes: float  # that must be read and written
    seconds: float
    exponentials: float = 0.0  # for the special function unit
    read_only: bool = False  # the result is small against what is read
    source: str = ""
    commit: str = ""  # of the library; empty for files that do not say

    @property
    def tflops(self) -> float:
        return self.flop / self.seconds * 1e-12

    @property
    def intensity(self) -> float:
        return self.flop / self.bytes


def attention_work(
    batch: int, heads: int, seq: int, dim: int, causal: bool, size: int, backward: bool = False
) -> tuple[float, float, float]:
    """FLOP, bytes and exponentials. Backward is 2.5 times forward: five products for two; it reads q, k, v, out and its
    gradient, and writes three gradients."""
    pairs = batch * heads * seq * seq * (0.5 if causal else 1.0)
    tensor = float(batch * heads * seq * dim * size)
    rows = 4.0 * batch * heads * seq  # LSE, fp32
    if backward:
        return 10.0 * pairs * dim, 8 * tensor + rows, pairs
    return 4.0 * pairs * dim, 4 * tensor + rows, pairs


def linear_work(rows: int, inputs: int, outputs: int, size: int) -> tuple[float, float]:
    return 2.0 * rows * inputs * outputs, float(size) * (rows * inputs + inputs * outputs + rows * outputs)


# FLOP an element of the ops that are about bytes: what the formula asks for, an exponential counting as one.
PER_ELEMENT = {
    "norm": 4,  # square, add, scale, weight
    "norm_bwd": 10,
    "softmax": 5,  # maximum, difference, exponential, sum, quotient
    "softmax_bwd": 4,
    "reduce": 1,
    "add": 1,
    "rope": 3,  # two products and a sum
    "cross_entropy": 4,
    "cross_entropy_bwd": 4,
    "swiglu": 5,
    "swiglu_bwd": 12,
}
READ_ONLY = ("reduce", "cross_entropy", "attention_decode")


def _attention_fwd(data: dict[str, Any]) -> Iterator[Point]:
    for r in data["rows"]:
        flop, size, exps = attention_work(r["batch"], r["heads"], r["seq"], r["head_dim"], r["causal"], 2)
        kernel = f"attention_fwd/cuda/sm90a/f16/d{r['head_dim']}"
        yield Point(kernel, _case(r["seq"], r["causal"]), flop, size, flop / r["flashkernel"] * 1e-12, exps)


def _attention_tensor_cores(data: dict[str, Any]) -> Iterator[Point]:
    for r in data["rows"]:
        backward = r["pass"] == "backward"
        flop, size, exps = _of_16384(r["D"], r["S"], r["causal"], 2, backward)
        kernel = f"attention_{'bwd' if backward else 'fwd'}/cuda/sm80/f16/d{r['D']}"
        yield Point(kernel, _case(r["S"], r["causal"]), flop, size, flop / r["tflops"]["flashkernel"] * 1e-12, exps)


def _attention_sm75(data: dict[str, Any]) -> Iterator[Point]:
    for r in data["rows"]:
        if "m" in r:
            flop, size = linear_work(r["m"], r["k"], r["n"], 2)
            factor = 2 if r["kernel"].startswith("linear_bwd") else 1
            case = f"{r['m']} x {r['k']} -> {r['n']}"
            yield Point(r["kernel"], case, factor * flop, factor * size, factor * flop / r["tflops"] * 1e-12)
        else:
            flop, size, exps = _of_16384(r["head_dim"], r["seq"], r["causal"], 2, r["pass"] == "backward")
            yield Point(r["kernel"], _case(r["seq"], r["causal"]), flop, size, flop / r["tflops"] * 1e-12, exps)


def _attention_f32(data: dict[str, Any]) -> Iterator[Point]:
    for r in data["rows"]:
        dim, seq = (int(x) for x in re.findall(r"[ds](\d+)", r["case"]))
        causal = r["case"].endswith("causal")
        for name in ("forward", "backward"):
            if r.get(name):
                flop, size, exps = _of_16384(dim, seq, causal, 4, name == "backward")
                kernel = f"attention_{'bwd' if name == 'backward' else 'fwd'}/cuda/sm80/f32/d{dim}"
                yield Point(kernel, _case(seq, causal), flop, size, flop / r[name] * 1e-12, exps)


def _attention_decode(data: dict[str, Any]) -> Iterator[Point]:
    dim = data["head_dim"]
    for r in data["rows"]:
        pairs = float(r["batch"] * r["heads_q"] * r["context"])
        size = 2.0 * r["batch"] * r["context"] * r["heads_kv"] * dim * 2
        case = f"batch {r['batch']} cache {r['context']} heads {r['heads_q']}/{r['heads_kv']} pages of {r['page_size']}"
        kernel = f"attention_fwd/cuda/sm80/decode/bf16/d{dim}"
        yield Point(kernel, case, 4 * pairs * dim, size, r["microseconds"] * 1e-6, pairs, read_only=True)


def _kv_ops(data: dict[str, Any]) -> Iterator[Point]:
    token = data["heads_kv"] * data["head_dim"] * 2 * 2.0  # bytes of K and V
    for r in data["rows"]:
        micro = r.get("us") or r["plain_us"]
        case = f"{r['tokens']} tokens, pages of {r['page_size']}"
        yield Point(f"{r['op']}/cuda/generic", case, 0.0, 2 * token * r["tokens"], micro * 1e-6)


def _linear(data: dict[str, Any]) -> Iterator[Point]:
    for r in data["cases"]:
        kind, shape = ("", r["case"]) if r["case"][0] == "M" else r["case"].split(" ", 1)
        m, k, n = (int(x) for x in re.findall(r"[MKN](\d+)", shape))
        size = 4 if kind == "f32" else 2
        flop, moved = linear_work(m, k, n, size)
        case = f"{m} x {k} -> {n}"
        if kind == "bwd":
            yield Point("linear_bwd/cuda/sm90a/f16", case, 2 * flop, 2 * moved, r["us"]["ours"] * 1e-6)
            yield Point("linear_bwd/cuda/sm80/f16", case, 2 * flop, 2 * moved, r["us"]["sm80"] * 1e-6)
        elif kind == "f32":
            yield Point("linear/cuda/sm80/f32", case, flop, moved, r["us"]["ours"] * 1e-6)
        elif kind == "few":
            yield Point("linear/cuda/sm90a/f16/few_rows", case, flop, moved, r["us"]["ours"] * 1e-6, read_only=True)
            if "sm80few" in r["us"]:
                yield Point(
                    "linear/cuda/sm80/f16/few_rows", case, flop, moved, r["us"]["sm80few"] * 1e-6, read_only=True
                )
        else:
            yield Point("linear/cuda/sm90a/f16/large", case, flop, moved, r["us"]["ours"] * 1e-6)


BY_HAND: dict[str, Callable[[dict[str, Any]], Iterator[Point]]] = {
    "attention_fwd": _attention_fwd,
    "attention_sm80": _attention_tensor_cores,
    "attention_sm75": _attention_sm75,
    "attention_f32": _attention_f32,
    "attention_decode": _attention_decode,
    "kv_ops": _kv_ops,
    "linear": _linear,
}


def _case(seq: int, causal: bool) -> str:
    return f"seq {seq} {'causal' if causal else 'full'}"


def _of_16384(dim: int, seq: int, causal: bool, size: int, backward: bool) -> tuple[float, float, float]:
    """The benches' setting: 16384 tokens, heads * head_dim = 2048."""
    return attention_work(16384 // seq, 2048 // dim, seq, dim, causal, size, backward)


def _suite(data: dict[str, Any]) -> Iterator[Point]:
    """A run of `flashkernel bench --json`: every kernel of ours that was timed in it."""
    for row in data["rows"]:
        for provider in row["providers"].values():
            if row["device"] == "cuda" and provider.get("kernels"):
                point = _of_row(row, provider["kernels"][0], provider["p50"])
                if point.bytes:
                    yield point


def _of_row(row: dict[str, Any], kernel: str, seconds: float) -> Point:
    op = kernel.split("/")[0]
    shape = row.get("shape") or {}
    flop, size, exps = float(row["flop"] or 0), float(row["bytes"] or 0), 0.0
    item = 4 if row["dtype"] == "float32" else 2
    if op.startswith("attention") and {"batch", "heads", "head_dim"} <= shape.keys():
        seq_q = shape.get("seq", 1)
        pairs = shape["batch"] * shape["heads"] * seq_q * shape.get("seq", shape.get("cache", 0))
        exps = pairs * (0.5 if shape.get("causal") else 1.0)
        flop = flop or 4.0 * exps * shape["head_dim"]
        if not size and "seq" in shape:
            size = attention_work(shape["batch"], shape["heads"], seq_q, shape["head_dim"], False, item, "bwd" in op)[1]
    elif not flop and op in PER_ELEMENT:
        passes = 1 if op in READ_ONLY else 3 if op == "norm_bwd" else 2
        flop = PER_ELEMENT[op] * size / item / passes
    read_only = op in READ_ONLY or "decode" in kernel
    return Point(kernel, f"{row['case']} {row['dtype']}", flop, size, seconds, exps, read_only)


def _runs(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for file in sorted(folder.glob("*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        if not data.get("method") or not (isinstance(data["method"], dict) and data["method"].get("quick")):
            yield file, data


def points(folder: Path) -> list[Point]:
    """Every point of the runs in `folder`, in the order of the files' names."""
    found: list[Point] = []
    for file, data in _runs(folder):
        reader = _suite if is_result(data) else BY_HAND.get(file.stem)
        if reader:
            commit = (
                str((data.get("machine") or {}).get("commit") or "") if isinstance(data.get("machine"), dict) else ""
            )
            found += [replace(point, source=file.name, commit=commit) for point in reader(data)]
    return found


def ceilings(folder: Path) -> dict[str, float]:
    """FLOP/s and bytes/s of matmul (fp16), copy and read on the same machine, of the newest run that has all three."""
    wanted = {"matmul": "matmul float16", "copy": "copy", "read": "read"}
    runs = []
    for _, data in _runs(folder):
        known = data.get("ceilings") or {}
        if all(known.get(name) for name in wanted.values()):
            runs.append((data["machine"]["date"], {ours: float(known[name]) for ours, name in wanted.items()}))
    if not runs:
        raise ValueError(f"roofline: no run in {folder} has the ceilings {', '.join(wanted.values())}")
    return max(runs, key=lambda run: run[0])[1]
