"""The T4 on paper: what each sm75 kernel should reach there, by sm_model.py, and how far the same model is from what
the same kernels, forced from their PTX, were measured at on an H200.

`scripts/t4_model.py` compiles the kernels and writes lab/results/model/sm75.json by `describe`; `report` turns that
file and the measurements into the tables of lab/t4.md. Nothing here needs a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from .measured import attention_work, linear_work
from .sass import functions, main_loop, mix, registers_used
from .sm_model import MACHINES, PARTS, blocks_per_sm, pipe_cycles, simulate

__all__ = ["PARTS_OF", "Part", "describe", "expected", "report"]

# Clocks of a T4 (MHz): its boost clock, which short calls see; 1000 and 650 under 70 W. That a T4 cannot hold its boost
# clock in matrix products is published (Jia et al., 2019); where it settles depends on the card's cooling: a user's
# cuBLAS product of 4096^3 in fp16 ran at 24 of 65 TFLOP/s (NVIDIA's developer forum, thread 264462), about 650 MHz.
CLOCKS = (1590, 1000, 650)


@dataclass(frozen=True)
class Part:
    """One CUDA kernel of a kernel id, by the source that holds it and the shape of its blocks."""

    kernel: str  # id
    part: str
    source: str  # compiled file
    symbol: str  # a regular expression on the mangled name
    threads: int
    shared: int  # bytes of a block
    pairs: int  # results of the product, or (query, key) pairs, that a block takes a turn of the loop
    flop: float  # of a pair, for all parts of the id together


def _parts() -> Iterable[Part]:
    # The shapes are ForwardShape, BackwardShape and GemmShape of the sm75 folders in src/cuda.
    for dim in (32, 64, 96, 128, 192, 256):
        rows, columns = (128 if dim <= 64 else 64), (64 if dim <= 128 else 16)
        shared = max(2 * columns, rows) * 2 * dim  # a tile of K and one of V; Q came through the same place
        yield Part(
            f"attention_fwd/cuda/sm75/f16/d{dim}",
            "forward",
            f"attention_fwd_d{dim}",
            rf"attention_fwd_kernelI6__halfLi{dim}ELb0E",
            128,
            shared,
            rows * columns,
            4.0 * dim,
        )
    for dim in (32, 64, 96, 128):
        rows = 128 if dim <= 64 else 64
        parts = {"grad_q": 0, "grad_k, grad_v": 3} if dim <= 96 else {"grad_q": 0, "grad_k": 1, "grad_v": 2}
        for part, gradient in parts.items():
            yield Part(
                f"attention_bwd/cuda/sm75/f16/d{dim}",
                part,
                f"attention_bwd_d{dim}",
                rf"attention_bwd_kernelI6__halfLi{dim}ELNS1_8GradientE{gradient}ELb0E",
                256,
                (2 * rows + 2 * 64) * 2 * dim,
                rows * 64,
                10.0 * dim,
            )
    for kernel, part, flags in (
        ("linear/cuda/sm75/f16", "out", "Lb1ELb1ELb1E"),
        ("linear_bwd/cuda/sm75/f16", "grad_x", "Lb1ELb1ELb0E"),
        ("linear_bwd/cuda/sm75/f16", "grad_weight", "Lb1ELb0ELb0E"),
    ):
        # 128 x 128 results, 32 of k a turn: a "pair" is a multiply-add; each part of the gradient is half of its work.
        flop = 2.0 if kernel.startswith("linear/") else 4.0
        yield Part(kernel, part, "linear", rf"gemm_kernelI6__half{flags}", 128, 32 * 1024, 128 * 128 * 32, flop)


PARTS_OF = tuple(_parts())


def describe(source: str, code: dict[str, str], logs: dict[str, str]) -> list[dict[str, Any]]:
    """Rows of the JSON for every part in `source`: `code`, `logs`: for each machine, nvdisasm's and ptxas' text."""
    rows: dict[str, dict[str, Any]] = {}
    for name, text in code.items():
        machine, found, registers = MACHINES[name], functions(text), registers_used(logs[name])
        for part in (x for x in PARTS_OF if x.source == source):
            symbols = [symbol for symbol in found if re.search(part.symbol, symbol)]
            if len(symbols) != 1:
                raise ValueError(f"t4_model: {part.symbol} matches {len(symbols)} functions of {source}; 1 is needed")
            path = main_loop(found[symbols[0]])
            blocks = blocks_per_sm(machine, registers[symbols[0]], part.threads, part.shared)
            warps = part.threads // 32 // PARTS
            row = rows.setdefault(part.part, {**asdict(part), "on": {}})
            row["on"][name] = {
                "registers": registers[symbols[0]],
                "blocks_per_sm": blocks,
                "instructions": len(path),
                "mix": mix(path),
                # Cycles of a block's turn: the warps that it has in one part of the multiprocessor.
                "pipes": {unit: round(warps * cycles) for unit, cycles in pipe_cycles(path, machine).items()},
                "simulated": round(simulate(path, machine, blocks, warps) / blocks),
            }
    return list(rows.values())


def cycles(part: dict[str, Any], machine: str, simulated: bool) -> float:
    on = part["on"][machine]
    return float(on["simulated"] if simulated else max(on["pipes"].values()))


def expected(parts: list[dict[str, Any]], machine: str, clock_ghz: float, simulated: bool = True) -> float:
    """TFLOP/s of a kernel id: the times of its parts add up."""
    per_pair = sum(cycles(part, machine, simulated) / part["pairs"] for part in parts)
    return float(parts[0]["flop"] / per_pair * MACHINES[machine].sms * clock_ghz * 1e-3)


def by_kernel(model: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for part in model["parts"]:
        found.setdefault(part["kernel"], []).append(part)
    return found


def limit(part: dict[str, Any], machine: str) -> str:
    pipes = part["on"][machine]["pipes"]
    return str(max(pipes, key=pipes.get))


def _mix_text(counts: dict[str, int]) -> str:
    """The instructions that matter, shortest form first."""
    matrix = sum(n for name, n in counts.items() if name.startswith("HMMA"))
    groups = {
        "HMMA": matrix,
        "LDSM.4": counts.get("LDSM.4", 0),
        "STS": sum(n for name, n in counts.items() if name.startswith("STS")),
        "LDG": sum(n for name, n in counts.items() if name.startswith("LDG")),
        "MUFU": counts.get("MUFU", 0),
        "F2F": counts.get("F2F", 0),
        "fp32": sum(counts.get(name, 0) for name in ("FFMA", "FMUL", "FADD")),
        "IMAD": counts.get("IMAD", 0) + counts.get("IMAD.MOV", 0),
        "BAR": counts.get("BAR", 0),
    }
    rest = sum(counts.values()) - sum(groups.values())
    return " | ".join(str(n) for n in [*groups.values(), rest])


def work_of(kernel: str) -> tuple[float, float]:
    """FLOP and bytes of the call that the tables stand for: 16384 tokens, heads x head_dim = 2048, seq 4096, no mask;
    for linear 4096 x 4096 x 4096."""
    if kernel.startswith("linear"):
        products = 2 if kernel.startswith("linear_bwd") else 1
        flop, size = linear_work(4096, 4096, 4096, 2)
        return products * flop, products * size
    dim = int(kernel.rsplit("/d", 1)[1])
    heads = 2048 // dim
    flop, size, _ = attention_work(4, heads, 4096, dim, False, 2, kernel.startswith("attention_bwd"))
    return flop, size


def seconds(kernel: str, tflops: float) -> float:
    """Seconds of the call on a T4 at that rate, or of reading its bytes from DRAM if that takes longer."""
    flop, size = work_of(kernel)
    return max(flop / tflops * 1e-12, size / MACHINES["t4"].dram_gb * 1e-9)


def profiled_cycles(kernel: str, parts: list[dict[str, Any]]) -> float:
    """What the model expects of an H200 for the call that `python -m tools profile` makes (suites/kernels.py)."""
    if kernel.startswith("linear"):
        pairs = 4096.0**3
    else:
        dim, seq = int(kernel.rsplit("/d", 1)[1]), 4096
        rows = 128 if dim <= 64 else 64  # of a block: it walks half of the pairs, and its own on the diagonal
        pairs = 2.0 * (2048 // dim) * seq * (seq + rows) / 2
    return sum(pairs / part["pairs"] * cycles(part, "h200", True) for part in parts) / MACHINES["h200"].sms


def report(
    model: dict[str, Any], measured: dict[str, tuple[float, float]], counted: dict[str, float]
) -> dict[str, str]:
    """The tables of lab/t4.md, by name. By kernel id, on the H200: `measured` TFLOP/s and GHz, `counted` cycles."""
    kernels = by_kernel(model)
    t4 = [
        "| kernel | limit | TFLOP/s at 1590 MHz: simulated, if all else hid | at 1000 MHz | at 650 MHz "
        "| of the tensor cores' peak | ms a call at 1590, 1000, 650 MHz |",
        "|---|---|---|---|---|---|---|",
    ]
    for kernel, parts in kernels.items():
        peak = MACHINES["t4"].sms * 1024 * CLOCKS[0] * 1e-6  # 512 FMA a cycle and SM
        rates = [expected(parts, "t4", clock * 1e-3) for clock in CLOCKS]
        best = expected(parts, "t4", CLOCKS[0] * 1e-3, simulated=False)
        limits = " / ".join(dict.fromkeys(limit(part, "t4") for part in parts))
        t4.append(
            f"| `{kernel}` | {limits} | {rates[0]:.1f}, {best:.1f} | {rates[1]:.1f} | {rates[2]:.1f} "
            f"| {rates[0] / peak:.0%} | {', '.join(f'{1e3 * seconds(kernel, rate):.2f}' for rate in rates)} |"
        )
    error = [
        "| kernel | MHz | measured TFLOP/s | model: simulated | error | if all else hid | error |",
        "|---|---|---|---|---|---|---|",
    ]
    errors: list[float] = []
    for kernel, parts in kernels.items():
        if kernel not in measured:
            continue
        got, clock = measured[kernel]
        rate, best = expected(parts, "h200", clock), expected(parts, "h200", clock, simulated=False)
        errors.append(rate / got - 1)
        error.append(
            f"| `{kernel}` | {clock * 1e3:.0f} | {got:.0f} | {rate:.0f} | {errors[-1]:+.0%} | {best:.0f} | "
            f"{best / got - 1:+.0%} |"
        )
    if errors:
        mean = sum(abs(x) for x in errors) / len(errors)
        error += ["", f"Mean of the errors' sizes {mean:.0%}, from {min(errors):+.0%} to {max(errors):+.0%}."]
    if counted:
        error += ["", "By cycles that Nsight Compute counted, so whatever the clock was:", ""]
        error += ["| kernel | cycles counted | model: simulated | the model is faster by |", "|---|---|---|---|"]
        for kernel, count in counted.items():
            cycles_expected = profiled_cycles(kernel, kernels[kernel])
            error.append(f"| `{kernel}` | {count:.0f} | {cycles_expected:.0f} | {count / cycles_expected - 1:+.0%} |")
    counts = [
        "| kernel | part | HMMA | LDSM.4 | STS | LDG | MUFU | F2F | fp32 | IMAD | BAR | other |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    pipes = [
        "| kernel | part | registers | blocks an SM | tensor | shared | special | fp32 | alu | issue | L2 "
        "| simulated |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kernel, parts in kernels.items():
        for part in parts:
            on = part["on"]["t4"]
            short = f"`{kernel}` | {part['part']}"
            counts.append(f"| {short} | {_mix_text(on['mix'])} |")
            busy = on["pipes"]
            cells = " | ".join(str(busy[u]) for u in ("tensor", "shared", "special", "fp32", "alu", "issue", "l2"))
            pipes.append(f"| {short} | {on['registers']} | {on['blocks_per_sm']} | {cells} | {on['simulated']} |")
    return {
        name: "\n".join(lines) for name, lines in (("t4", t4), ("error", error), ("mix", counts), ("cycles", pipes))
    }
