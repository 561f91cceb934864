"""Nsight Compute's numbers: the metrics that are asked for, the reader of `ncu --csv --page raw`, and the CSV files
under lab/profiles/<kernel id>/. Called by profile.py and roofline.py; needs neither ncu nor a GPU.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["METRICS", "STALLS", "Launch", "counters", "page", "parse", "read_csv", "summary", "write_csv"]

# Our name -> ncu's. Throughputs are % of peak.
METRICS = {
    "duration_ns": "gpu__time_duration.sum",
    "sm_cycles": "sm__cycles_elapsed.max",
    "sm_clock_hz": "sm__cycles_elapsed.avg.per_second",
    "occupancy_achieved_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "occupancy_theoretical_pct": "sm__maximum_warps_per_active_cycle_pct",
    "dram_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_bytes": "dram__bytes.sum",
    "l2_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1_pct": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "issue_pct": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "tensor_instructions_pct": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "fma_pct": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "alu_pct": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "lsu_pct": "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active",
    "xu_pct": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "shared_bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "instructions": "smsp__inst_executed.sum",
    "fadd": "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum",
    "fmul": "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum",
    "ffma": "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
    # The name differs between GPUs: those that one does not know are left out.
    "tensor_ops_f16": "sm__ops_path_tensor_src_fp16_dst_fp32.sum",
    "tensor_ops_f16_source": "sm__ops_path_tensor_src_fp16.sum",
    "tensor_ops_f16_to_f16": "sm__ops_path_tensor_src_fp16_dst_fp16.sum",
    "tensor_ops_bf16": "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
    "tensor_ops_tf32": "sm__ops_path_tensor_src_tf32_dst_fp32.sum",
    "tensor_ops_f16_dense": "sm__ops_path_tensor_src_fp16_dst_fp32_sparsity_off.sum",
    "tensor_ops_bf16_dense": "sm__ops_path_tensor_src_bf16_dst_fp32_sparsity_off.sum",
    "tensor_ops_tf32_dense": "sm__ops_path_tensor_src_tf32_dst_fp32_sparsity_off.sum",
    "registers": "launch__registers_per_thread",
    "static_shared_bytes": "launch__shared_mem_per_block_static",
    "dynamic_shared_bytes": "launch__shared_mem_per_block_dynamic",
    "blocks": "launch__grid_size",
    "threads": "launch__block_size",
    "waves": "launch__waves_per_multiprocessor",
}
# Warps that wait, for each that issues, by reason.
STALLS = {
    reason: f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"
    for reason in (
        "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
        "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected",
        "short_scoreboard", "sleeping", "tex_throttle", "wait",
    )
}  # fmt: skip
BYTES = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
UNITS = {
    **BYTES,
    **{f"{unit}/block": factor for unit, factor in BYTES.items()},
    "nsecond": 1.0, "ns": 1.0, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6, "second": 1e9, "s": 1e9,
    "cycle/nsecond": 1e9, "cycle/ns": 1e9, "cycle/usecond": 1e6, "cycle/us": 1e6, "cycle/second": 1.0, "cycle/s": 1.0,
    "hz": 1.0, "Khz": 1e3, "Mhz": 1e6, "Ghz": 1e9,
}  # fmt: skip


class Launch(dict[str, float]):
    """Our metrics of one launch; those that this GPU or ncu does not know are missing."""

    def __init__(self, kernel: str, range_name: str, values: dict[str, float]):
        super().__init__(values)
        self.kernel = kernel  # the CUDA kernel's name
        self.range_name = range_name  # of the NVTX range around the call: the kernel id
        self.about: dict[str, str] = {}

    @property
    def flop(self) -> float | None:
        """Operations by ncu's counters: fp32 lanes, and tensor cores where ncu counts them."""
        if "ffma" not in self:
            return None
        types = ("f16", "bf16", "tf32")
        ways = ("", "_source", "_to_f16", "_dense")
        tensor = sum(max(self.get(f"tensor_ops_{dtype}{way}", 0.0) for way in ways) for dtype in types)
        return self.get("fadd", 0.0) + self.get("fmul", 0.0) + 2 * self["ffma"] + tensor

    def stalls(self, count: int = 3) -> list[tuple[str, float]]:
        """The reasons for which warps waited most."""
        waits = [(name, self[f"stall_{name}"]) for name in STALLS if name != "selected" and f"stall_{name}" in self]
        return sorted(waits, key=lambda wait: -wait[1])[:count]


def _number(text: str, unit: str) -> float | None:
    try:
        return float(text.replace(",", "")) * UNITS.get(unit, 1.0)
    except ValueError:
        return None  # "", "n/a", "(!) nan" and names


def parse(text: str) -> list[Launch]:
    """The launches in the output of `ncu --csv --page raw`: a header, a row of units, then one row a launch. Lines
    before the header (ncu's own ==PROF== lines, the program's output) are left out.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID","')), None)
    if start is None:
        raise ValueError('profile: no line that begins with "ID" in the output of ncu; is it --csv --page raw?')
    rows = list(csv.reader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"')))))
    if len(rows) < 2:
        raise ValueError("profile: the output of ncu ends after its header")
    header, units = rows[0], rows[1]
    names = {ncu: ours for ours, ncu in METRICS.items()} | {ncu: f"stall_{name}" for name, ncu in STALLS.items()}
    ranges = [i for i, name in enumerate(header) if "Push/Pop_Range" in name]
    launches = []
    for row in rows[2:]:
        if len(row) != len(header):
            raise ValueError(
                f"profile: a row of {len(row)} fields under a header of {len(header)} in the output of ncu"
            )
        values = {}
        for name, unit, cell in zip(header, units, row, strict=True):
            if name in names and (value := _number(cell, unit)) is not None:
                values[names[name]] = value
        # THREAD "<default domain>:NAME:none:..." "<default domain>:INNER:none:..."
        marks = [mark for i in ranges for mark in re.findall(r"<[^<>]*>:([^:\"]+):", row[i])]
        launches.append(Launch(row[header.index("Kernel Name")], marks[0] if marks else "", values))
    return launches


def summary(launches: Iterable[Launch]) -> str:
    """Markdown: one row a launch."""
    lines = [
        "| kernel | us | occupancy | DRAM | L2 | tensor | issue | FMA, ALU, LSU, XU | registers | shared KB "
        "| conflicts | waits |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]

    def percent(x: Launch, *names: str) -> str:
        return ", ".join(f"{x[name]:.0f}" if name in x else "-" for name in names)

    for x in launches:
        shared = (x.get("static_shared_bytes", 0.0) + x.get("dynamic_shared_bytes", 0.0)) / 1024
        waits = ", ".join(f"{name} {value:.1f}" for name, value in x.stalls())
        lines.append(
            f"| {x.range_name or x.kernel} | {x.get('duration_ns', 0.0) / 1e3:.1f} | "
            f"{percent(x, 'occupancy_achieved_pct')} of {percent(x, 'occupancy_theoretical_pct')} | "
            f"{percent(x, 'dram_pct')} | {percent(x, 'l2_pct')} | {percent(x, 'tensor_pct')} | "
            f"{percent(x, 'issue_pct')} | "
            f"{percent(x, 'fma_pct', 'alu_pct', 'lsu_pct', 'xu_pct')} | {x.get('registers', 0):.0f} | {shared:.0f} | "
            f"{x.get('shared_bank_conflicts', 0):.0f} | {waits} |"
        )
    return "\n".join(lines)


ABOUT = ("gpu", "driver_version", "commit", "date")  # of the run, in every CSV: kernels may be profiled on other days


def page(profiles: Path) -> str:
    """lab/profiles/README.md: the longest launch of every kernel that has a profile there, from the CSV files alone."""
    longest = []
    runs: dict[str, int] = {}
    for file in sorted(profiles.glob("**/metrics.csv")):
        launch = max(read_csv(file), key=lambda x: x.get("duration_ns", 0.0))
        launch.range_name = f"`{file.parent.relative_to(profiles).as_posix()}`"
        longest.append(launch)
        run = ", ".join(f"{name} {value[:10] if name == 'date' else value}" for name, value in launch.about.items())
        runs[run] = runs.get(run, 0) + 1
    lines = [
        "# Nsight Compute, every kernel",
        "",
        "By `python -m tools profile` ([how to read it](../../docs/profiling.md)). Of a call that is several kernels "
        "the longest one; all of them are in the CSV files. Throughputs and pipes in % of peak, waits in warps for "
        "each that issues.",
        "",
        *(f"- {count} kernels: {run}" for run, count in runs.items()),
        "",
        summary(longest),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def write_csv(file: Path, launches: list[Launch], about: Mapping[str, Any] | None = None) -> None:
    """One column a launch, one row a metric, so that a change of one number is one line of a diff."""
    names = [*METRICS, *(f"stall_{name}" for name in STALLS)]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["kernel", *(x.kernel for x in launches)])
        for name in ABOUT:
            if about and about.get(name):
                writer.writerow([name, *[about[name]] * len(launches)])
        for name in names:
            if any(name in x for x in launches):
                writer.writerow([name, *(f"{x[name]:.6g}" if name in x else "" for x in launches)])


def read_csv(file: Path) -> list[Launch]:
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.reader(lines))
    launches = []
    for at, kernel in enumerate(rows[0][1:], start=1):
        cells = {row[0]: row[at] for row in rows[1:] if row[at]}
        launch = Launch(kernel, "", {name: float(cell) for name, cell in cells.items() if name not in ABOUT})
        launch.about = {name: cells[name] for name in ABOUT if name in cells}
        launches.append(launch)
    return launches


def counters(profiles: Path) -> dict[str, str]:
    """FLOP a byte of DRAM traffic by counters, for every kernel id that has a profile; all its launches together."""
    found = {}
    for file in sorted(profiles.glob("**/metrics.csv")):
        launches = read_csv(file)
        flops = [x.flop for x in launches]
        moved = sum(x.get("dram_bytes", 0.0) for x in launches)
        if moved and all(flop is not None for flop in flops):
            found[file.parent.relative_to(profiles).as_posix()] = f"{sum(flop or 0.0 for flop in flops) / moved:.3g}"
    return found
