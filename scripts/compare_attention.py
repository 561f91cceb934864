#!/usr/bin/env python3
"""The Hopper attention kernels of several source trees beside each other, without the Python layer: for a change of a
few per cent.

    git worktree add ../before main
    python scripts/compare_attention.py build OUT bwd 128 before=../before now=.     # needs nvcc, no GPU
    python scripts/compare_attention.py measure OUT 4096c 4096f 16384c 4096cbg       # needs a Hopper GPU and torch

A point is a sequence length and letters: c(ausal) or f(ull), b: bf16 instead of fp16, g: 32 query and 8 kv heads; 16384
tokens in all, heads x head_dim = 2048. The forward pass runs with and without LSE, the backward pass in order and in
any order. All variants of a point run in rounds of a random order as CUDA graphs of three calls; medians, TFLOP/s.
Results are compared with the first tree's. OUT/NAME.log has what ptxas says of registers and spills, OUT/results.json
all medians.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
POINTERS = ("q", "k", "v", "out", "lse", "grad_out", "grad_q", "grad_k", "grad_v", "workspace", "stream")
NUMBERS = ("batch", "heads_q", "heads_kv", "seq", "causal", "deterministic", "bfloat16")
VARIANTS = {"fwd": ("lse", "no lse"), "bwd": ("ordered", "any order")}
TOKENS, WIDTH, CALLS = 16384, 2048, 3


class Call(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in POINTERS] + [(name, ctypes.c_int64) for name in NUMBERS]


def build(out: Path, op: str, dim: int, trees: dict[str, Path], generated: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    flags = ["-O3", "-std=c++17", "-shared", "-Xcompiler=-fPIC", "-gencode=arch=compute_90a,code=sm_90a"]
    flags += ["--expt-relaxed-constexpr", "-diag-suppress=20012", "-Xptxas=-v,--warn-on-spills", "--cudart=static"]
    for name, tree in trees.items():
        files = ("host/clusters", "host/device", "host/nvtx", "pipeline/tensor_map")
        host = [str(tree / "src/cuda" / f"{file}.cpp") for file in files]
        folders = [f"-I{folder}" for folder in (tree / "src", tree / "include", generated)]
        defines = [f"-DFLASHKERNEL_BACKWARD={int(op == 'bwd')}", f"-DFLASHKERNEL_DIM={dim}"]
        source = str(ROOT / "scripts" / "compare_attention.cu")
        command = ["nvcc", *flags, *defines, *folders, "-o", str(out / f"{name}.so"), source, *host, "-lrt", "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True)
        (out / f"{name}.log").write_text(done.stdout + done.stderr)
        spills = [line for line in done.stderr.splitlines() if "are spilled" in line]
        print(f"{name}: {'failed, see its log' if done.returncode else f'{len(spills)} kernels spill'}")
        if done.returncode:
            return 1
    (out / "what.json").write_text(json.dumps({"op": op, "dim": dim, "trees": list(trees)}))
    return 0


def make_tensors(point: str, dim: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Random inputs of a point, with the forward pass's results by torch's FlashAttention-2, and its sizes."""
    import torch

    seq = int("".join(letter for letter in point if letter.isdigit()))
    heads = WIDTH // dim
    heads_q, heads_kv = (32, 8) if "g" in point else (heads, heads)
    batch = max(1, TOKENS // seq)
    dtype = torch.bfloat16 if "b" in point else torch.float16
    torch.manual_seed(0)

    def normal(heads: int) -> Any:
        return torch.randn(batch, seq, heads, dim, device="cuda", dtype=dtype)

    tensors = {"q": normal(heads_q), "k": normal(heads_kv), "v": normal(heads_kv), "grad_out": normal(heads_q)}
    q, k, v = (tensors[name].transpose(1, 2) for name in "qkv")
    k, v = (x.repeat_interleave(heads_q // heads_kv, 1) for x in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, "c" in point)[:2]
    tensors |= {"out": out.transpose(1, 2).contiguous(), "lse": lse.float().contiguous()}
    tensors |= {f"grad_{name}": torch.empty_like(tensors[name]) for name in "qkv"}
    sizes = {"batch": batch, "heads_q": heads_q, "heads_kv": heads_kv, "seq": seq}
    return tensors, sizes | {"causal": int("c" in point), "bfloat16": int("b" in point)}


def measure_point(point: str, op: str, dim: int, libraries: dict[str, Any], rounds: int) -> dict[str, float]:
    import torch

    tensors, sizes = make_tensors(point, dim)
    results = ("out",) if op == "fwd" else ("grad_q", "grad_k", "grad_v")
    graphs: dict[str, Any] = {}
    first: list[Any] = []
    for name, library in libraries.items():
        for variant in VARIANTS[op]:
            call = Call(**{key: tensor.data_ptr() for key, tensor in tensors.items()}, **sizes)
            call.deterministic = variant == "ordered"
            if variant == "no lse":
                call.lse = None
            workspace = torch.zeros(library.workspace_bytes(ctypes.byref(call)) + 256, dtype=torch.uint8, device="cuda")
            call.workspace = (workspace.data_ptr() + 255) // 256 * 256

            def run(library: Any = library, call: Call = call) -> None:
                call.stream = torch.cuda.current_stream().cuda_stream
                if library.run_call(ctypes.byref(call)):
                    raise RuntimeError("a launch failed")

            for result in results:
                tensors[result].fill_(float("nan"))
            run()
            torch.cuda.synchronize()
            made = [tensors[result].float().clone() for result in results]
            first = first or made
            apart = max((a - b).abs().max().item() for a, b in zip(made, first, strict=True))
            if not apart < 0.05:
                print(f"{point} {name} {variant}: {apart} from {next(iter(libraries))}'s result")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(CALLS):
                    run()
            graphs[f"{name} {variant}"] = (graph, workspace)
    samples: dict[str, list[float]] = {key: [] for key in graphs}
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for done in range(rounds + 2):
        for key in random.sample(list(graphs), len(graphs)):
            begin.record()
            graphs[key][0].replay()
            end.record()
            torch.cuda.synchronize()
            if done >= 2:  # to warm clocks and caches
                samples[key].append(begin.elapsed_time(end) / CALLS)
    flop = 4 * sizes["batch"] * sizes["heads_q"] * sizes["seq"] ** 2 * dim * (2.5 if op == "bwd" else 1)
    flop *= 0.5 if sizes["causal"] else 1
    return {key: round(flop / statistics.median(times) / 1e9, 1) for key, times in samples.items()}


def measure(out: Path, points: list[str], rounds: int) -> int:
    what = json.loads((out / "what.json").read_text())
    libraries = {name: ctypes.CDLL(str((out / f"{name}.so").resolve())) for name in what["trees"]}
    for library in libraries.values():
        library.workspace_bytes.restype = ctypes.c_int64
    table = {}
    for point in points:
        table[point] = measure_point(point, what["op"], what["dim"], libraries, rounds)
        print(point, "  ".join(f"{key} {rate}" for key, rate in table[point].items()), flush=True)
    (out / "results.json").write_text(json.dumps(what | {"tflops": table}, indent=1) + "\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build")
    builder.add_argument("out", type=Path)
    builder.add_argument("op", choices=list(VARIANTS))
    builder.add_argument("dim", type=int)
    builder.add_argument("trees", nargs="+", metavar="NAME=FOLDER")
    builder.add_argument(
        "--generated", type=Path, default=ROOT / "build" / "test" / "include", help="a build's headers"
    )
    measurer = commands.add_parser("measure")
    measurer.add_argument("out", type=Path)
    measurer.add_argument("points", nargs="+")
    measurer.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if args.command == "measure":
        return measure(args.out, args.points, args.rounds)
    trees = {name: Path(folder).resolve() for name, folder in (tree.split("=", 1) for tree in args.trees)}
    return build(args.out, args.op, args.dim, trees, args.generated)


if __name__ == "__main__":
    sys.exit(main())
