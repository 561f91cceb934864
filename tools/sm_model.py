"""A model of one multiprocessor: how many cycles a turn of a kernel's main loop takes, from its machine code.

Two answers. `pipe_cycles`: what each unit is busy for; the largest is the time if everything else hid behind it.
`simulate`: one of the four equal parts of a multiprocessor, whose warps issue in order, one instruction a cycle, each
when its registers have arrived and its unit has room. Units that all parts share (shared memory, L2) are taken at a
quarter of their rate, since the parts do the same. Not modelled: bank conflicts (the kernels' tiles are swizzled),
instruction caches, register banks, misses of the L2 cache.

Facts and their sources stand beside each machine; what is an assumption says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .sass import MATRIX, Instruction

__all__ = ["MACHINES", "Machine", "blocks_per_sm", "pipe_cycles", "simulate"]

PARTS = 4  # of a multiprocessor, each with a scheduler, since Volta


@dataclass(frozen=True)
class Machine:
    name: str
    sms: int
    clock_ghz: float
    # Cycles for which one warp instruction keeps its unit in one part of the multiprocessor busy.
    tensor: float  # HMMA.1688: 16 x 8 x 8
    tensor_k16: float  # HMMA.16816: 16 x 8 x 16, from Ampere on
    fp32: float  # FFMA, FMUL, FADD
    integer_multiply: float  # IMAD
    alu: float  # integers, comparisons, moves
    special: float  # MUFU and conversions
    # Bytes a cycle for the whole multiprocessor.
    shared_bytes: float
    l2_bytes: float
    dram_gb: float  # a second, achieved
    # Cycles until a result can be used.
    latency: dict[str, int]
    # Per multiprocessor.
    shared_memory: int
    reserved_shared: int  # of each block
    threads: int
    blocks: int


MACHINES = {
    # Turing whitepaper (NVIDIA, 2018): 40 SMs on a T4, each 64 fp32 and 64 int32 lanes, 8 tensor cores of 64 FMA, 16
    # load/store units (x 4 bytes), 4 x 4 special function units. HMMA.1688 is 1024 FMA: 1024 / (8 x 64 / 4) = 8 cycles.
    # Latencies as measured on a TU10x (github.com/sjfeng1999/gpu-arch-microbenchmark): shared 23, L2 236 cycles.
    # Assumed: HMMA 18, special 20 cycles; L2 20 bytes a cycle and SM; DRAM 240 of 320 GB/s; the clock (t4_model.py).
    "t4": Machine(
        name="T4",
        sms=40,
        clock_ghz=1.59,
        tensor=8,
        tensor_k16=16,
        fp32=2,
        integer_multiply=2,
        alu=2,
        special=8,
        shared_bytes=64,
        l2_bytes=20,
        dram_gb=240,
        latency={"fixed": 4, "tensor": 18, "special": 20, "shared": 23, "global": 236, "barrier": 20},
        shared_memory=64 * 1024,
        reserved_shared=0,
        threads=1024,
        blocks=16,
    ),
    # H100 whitepaper (NVIDIA, 2022): 132 SMs, 128 fp32 and 64 int32 lanes, 16 special function results and 128 bytes of
    # shared memory a cycle. Latencies about as in Luo et al. (2024), arXiv 2402.13499: shared 29, L2 260 cycles.
    # Fitted: HMMA.1688 in 8 cycles. With 4, which is A100's rate, the model is 36 to 93 % too fast for every kernel;
    # the fastest was measured at 92 % of what 8 allow. HMMA.16816 must be faster than two of them: linear for sm80
    # reached 383 TFLOP/s: 8 cycles too. Assumed: HMMA 16, special 20 cycles; L2 48 bytes a cycle and SM. The clock is
    # what nvidia-smi named beside the runs.
    "h200": Machine(
        name="H200",
        sms=132,
        clock_ghz=1.98,
        tensor=8,
        tensor_k16=8,
        fp32=1,
        integer_multiply=2,
        alu=2,
        special=8,
        shared_bytes=128,
        l2_bytes=48,
        dram_gb=4240,
        latency={"fixed": 4, "tensor": 16, "special": 20, "shared": 29, "global": 260, "barrier": 20},
        shared_memory=228 * 1024,
        reserved_shared=1024,
        threads=2048,
        blocks=32,
    ),
}

FP32 = ("FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2")
SPECIAL = ("MUFU", "F2F", "F2I", "I2F", "FRND", "POPC")
SHARED = ("LDSM", "LDS", "STS", "SHFL", "LDL", "STL", "ATOMS")
GLOBAL = ("LDG", "STG", "LD", "ST")
CONTROL = ("BRA", "BAR", "BSSY", "BSYNC", "BMOV", "NOP", "EXIT", "WARPSYNC", "DEPBAR", "YIELD")


def unit(x: Instruction) -> str:
    if x.name in MATRIX:
        return "tensor"
    if x.name in FP32:
        return "fp32"
    if x.name == "IMAD":
        return "integer_multiply"
    for name, opcodes in (("special", SPECIAL), ("shared", SHARED), ("global", GLOBAL), ("control", CONTROL)):
        if x.name in opcodes:
            return name
    return "alu"


def shared_bytes(x: Instruction) -> float:
    """Bytes that a warp's instruction takes from shared memory or L1."""
    if x.name == "LDSM":
        return 128.0 * x.matrices  # 8 x 8 elements of 2 bytes
    return 128.0 if x.name == "SHFL" else 32 * x.width / 8


def busy(x: Instruction, machine: Machine) -> float:
    """Cycles for which `x` keeps its unit of one part busy."""
    kind = unit(x)
    if kind in ("shared", "global"):  # both pass the load/store units
        return PARTS * shared_bytes(x) / machine.shared_bytes
    if kind == "control":
        return 0.0
    return float(machine.tensor_k16 if ".16816" in x.opcode else getattr(machine, kind))


def pipe_cycles(path: Sequence[Instruction], machine: Machine) -> dict[str, float]:
    """Cycles that one warp in each part of a multiprocessor keeps each unit busy for a turn of the loop."""
    total = {
        "tensor": 0.0,
        "shared": 0.0,
        "special": 0.0,
        "fp32": 0.0,
        "alu": 0.0,
        "issue": float(len(path)),
        "l2": 0.0,
    }
    for x in path:
        kind = unit(x)
        if kind == "control":
            continue
        # IMAD shares the fp32 pipe on Turing and Hopper alike.
        total[{"global": "shared", "integer_multiply": "fp32"}.get(kind, kind)] += busy(x, machine)
        if kind == "global":
            total["l2"] += PARTS * shared_bytes(x) / machine.l2_bytes
    return total


def blocks_per_sm(machine: Machine, registers: int, threads: int, shared: int) -> int:
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // 256) * 256  # handed out in units of 256 registers
    used = -(-(shared + machine.reserved_shared) // 128) * 128
    return min(65536 // (per_warp * warps), machine.threads // threads, machine.shared_memory // used, machine.blocks)


QUEUE = 8  # instructions that may wait for the load/store units, the L2 or a special function (assumed)


STARTS = (0.2, 0.6, 1.0, 1.4, 1.8)  # cycles an instruction of the loop by which one block starts after the other


def simulate(path: Sequence[Instruction], machine: Machine, blocks: int, warps: int) -> float:
    """Cycles from turn to turn once under way: `blocks` on the multiprocessor, each with `warps` in this part. The mean
    over several distances at which the blocks start: which waits fall together depends on it.
    """
    starts = STARTS if blocks > 1 else STARTS[:1]
    return sum(_simulate(path, machine, blocks, warps, start) for start in starts) / len(starts)


def _simulate(
    path: Sequence[Instruction], machine: Machine, blocks: int, warps: int, start: float, turns: int = 8
) -> float:
    count = blocks * warps
    reads = [tuple(x.reads()) for x in path]
    writes = [tuple(x.writes()) for x in path]
    kinds = [unit(x) for x in path]
    times = [busy(x, machine) for x in path]
    l2_times = [
        PARTS * shared_bytes(x) / machine.l2_bytes if k == "global" else 0.0 for x, k in zip(path, kinds, strict=True)
    ]
    queued = ("shared", "global", "special")
    pipe = {"global": "shared", "integer_multiply": "fp32"}
    free: dict[str, float] = dict.fromkeys(("tensor", "shared", "special", "fp32", "alu", "l2", "control"), 0.0)
    waiting: dict[str, deque[float]] = {name: deque() for name in ("shared", "special")}

    ready: list[dict[str, float]] = [{} for _ in range(count)]  # when each register has arrived
    at = [0] * count
    next_time = [start * len(path) * (w // warps) for w in range(count)]
    arrived: dict[int, list[int]] = {b: [] for b in range(blocks)}
    finished: list[list[float]] = [[] for _ in range(count)]
    issued = [0.0] * count
    clock = 0.0

    def earliest(w: int) -> float:
        i = at[w]
        time = next_time[w]
        for name in reads[i]:
            time = max(time, ready[w].get(name, 0.0))
        for name in writes[i]:  # an older result must not arrive after this one
            time = max(time, ready[w].get(name, 0.0) - machine.latency["fixed"])
        name = pipe.get(kinds[i], kinds[i])
        if kinds[i] in queued:
            line = waiting[name]
            if len(line) >= QUEUE:
                time = max(time, line[-QUEUE])
        else:
            time = max(time, free[name])
        return time

    blocked = [False] * count
    while min(len(x) for x in finished) < turns:
        # The warp that can go first; of several, the one that has waited longest, so that none starves.
        time, _, w = min((max(clock, earliest(w)), issued[w], w) for w in range(count) if not blocked[w])
        i = at[w]
        x, kind = path[i], kinds[i]
        name = pipe.get(kind, kind)
        clock = next_time[w] = issued[w] = time + 1
        if x.name == "BAR":
            arrived[w // warps].append(w)
            blocked[w] = True
            if len(arrived[w // warps]) == warps:
                for other in arrived[w // warps]:
                    blocked[other] = False
                    next_time[other] = time + machine.latency["barrier"]
                arrived[w // warps] = []
        elif kind in queued:
            start = max(time, free[name])
            free[name] = start + times[i]
            waiting[name].append(free[name])
            if len(waiting[name]) > QUEUE:
                waiting[name].popleft()
            done = free[name] + machine.latency[kind]
            if kind == "global":
                free["l2"] = max(free["l2"], start) + l2_times[i]
                done = max(done, free["l2"] + machine.latency["global"])
            for register in writes[i]:
                ready[w][register] = done
        else:
            free[name] = time + times[i]
            done = time + (machine.latency["tensor"] if kind == "tensor" else machine.latency["fixed"])
            for register in writes[i]:
                ready[w][register] = done
        at[w] += 1
        if at[w] == len(path):
            at[w] = 0
            finished[w].append(time)
    # From the third turn on, over all warps.
    spans = [(x[turns - 1] - x[2]) / (turns - 3) for x in finished]
    return sum(spans) / count
