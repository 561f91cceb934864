#!/usr/bin/env python3
"""Compiles the sm75 kernels, reads their machine code and writes lab/results/model/sm75.json, from which
`python -m tools roofline --t4` writes lab/t4.md.

    PYTHONPATH=build/python python scripts/t4_model.py

Needs nvcc, ptxas and nvdisasm of the CUDA toolkit, no GPU; about a minute.
The same PTX is assembled for 7.5, which a T4 runs, and for 9.0, which is what an H200's driver makes of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.t4_model import PARTS_OF, describe  # noqa: E402

TARGETS = {"t4": "sm_75", "h200": "sm_90"}
FLAGS = ["-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-diag-suppress=20012"]


def source_text(name: str) -> str:
    if name == "linear":
        return (ROOT / "src/cuda/linear/tiles/sm75/linear.cu").read_text()
    op, dim = name.rsplit("_d", 1)
    folder = {"attention_fwd": "forward", "attention_bwd": "backward"}[op]
    params = {"attention_fwd": "AttentionParams", "attention_bwd": "AttentionBackwardParams"}[op]
    return (
        f'#include "cuda/attention/{folder}/sm75/kernel.cuh"\n'
        "namespace flashkernel::cuda::sm75 {\n"
        f"template void {op}<DType::kFloat16, {dim}>(const {params}&, void*, Stream);\n"
        "}\n"
    )


def run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"t4_model: {command[0]} failed:\n{done.stderr.strip()}")
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--ptxas", default="ptxas")
    parser.add_argument("--nvdisasm", default="nvdisasm")
    parser.add_argument("--json", type=Path, default=ROOT / "lab/results/model/sm75.json")
    args = parser.parse_args()
    include = [f"-I{ROOT / 'src'}", f"-I{ROOT / 'include'}"]
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        for name in dict.fromkeys(part.source for part in PARTS_OF):
            print(name, file=sys.stderr, flush=True)
            base = Path(folder) / name
            base.with_suffix(".cu").write_text(source_text(name))
            ptx = str(base.with_suffix(".ptx"))
            run(args.nvcc, *FLAGS, *include, "-ptx", "-arch=compute_75", str(base.with_suffix(".cu")), "-o", ptx)
            code, logs = {}, {}
            for machine, target in TARGETS.items():
                cubin = str(base.with_suffix(f".{target}.cubin"))
                logs[machine] = run(args.ptxas, f"-arch={target}", "-v", ptx, "-o", cubin).stderr
                code[machine] = run(args.nvdisasm, "-c", cubin).stdout
            parts += describe(name, code, logs)
    lines = run(args.nvcc, "--version").stdout.splitlines()
    version = next(line for line in lines if "release" in line).split("release ")[1]
    commit = run("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD").stdout.strip()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"nvcc": version, "commit": commit, "parts": parts}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
