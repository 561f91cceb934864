#!/usr/bin/env python3
"""compute-sanitizer's four tools over the conformance cases of every CUDA row of the registry: a process for each tool
and row, one a core, over all GPUs.

    python scripts/gpu_sanitizers.py build/gpu/tests_cpp/kernel_conformance OUT
    python scripts/gpu_sanitizers.py ... --seconds 500 --earlier OUT_BEFORE/processes.tsv     # what is left of it

OUT/processes.tsv gets a line for each process that came to its end: tool, row, part of its cases, cases passed and
failed, errors that the tool reported, seconds, commit. A process that the time limit ended leaves none, and another
run can go on from there. OUT/*.log has what was said by those, and by those with a failure or an error. Prints the
rows of a table; exits 1 unless every process of every tool has come to its end without either.

Left out are the cases that launch nothing (accepts_a_case) and the strides past 2^31, whose tensors span gigabytes; of
synccheck decode by clusters, where it ends every launch of 16 blocks a cluster with an illegal access
(docs/kernels/attention_decode.md); of racecheck, for the attention kernels in plain FFMA, the cases that are long for
the sake of other kernels' tiles and parts: it follows each of their reads of shared memory, up to minutes a case.
Results are not compared with the oracle's, whose time on the CPU would be a third to a half of it.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")  # the slowest last: the others are done when time is up
LEFT_OUT = "*past_2_31*:*accepts_a_case"
LONG_FOR_OTHERS = "*.long_*:*.tiles_*:*.blocks_*:*.paged_prefill_*:*/tiled.split_*:*/naive.split_*"
SETTINGS = {"FK_CONFORMANCE_ORACLE": "0", "FK_CONFORMANCE_REPEATS": "1", "OMP_NUM_THREADS": "1"}


class Process(NamedTuple):
    tool: str
    row: str
    part: str


class Ended(NamedTuple):
    process: Process
    passed: int
    failed: int
    errors: int
    seconds: int
    commit: str

    def line(self) -> str:
        return "\t".join(map(str, (*self.process, *self[1:])))

    @staticmethod
    def from_line(line: str) -> Ended:
        tool, row, part, passed, failed, errors, seconds, commit = line.split("\t")
        return Ended(Process(tool, row, part), int(passed), int(failed), int(errors), int(seconds), commit)


def follows_each_read(tool: str, row: str) -> bool:
    return tool == "racecheck" and re.match("attention_.*/cuda/generic", row) is not None


def processes(executable: Path, rows: str, earlier: list[Ended]) -> list[Process]:
    """All that belong to a run; a row that an earlier one began stays in as many parts."""
    listed = subprocess.run(
        [executable, "--gtest_list_tests", f"--gtest_filter={rows}"], capture_output=True, text=True, check=True
    )
    found = [line[:-1] for line in listed.stdout.splitlines() if re.fullmatch(r"[a-z]\S*/\S+\.", line)]

    begun = {(tool, row): int(part.split("/")[1]) for tool, row, part in (one.process for one in earlier)}

    def parts(tool: str, row: str) -> int:
        if tool == "synccheck" and row.startswith("attention_fwd/cuda/sm90a/decode/"):
            return 0
        if tool == "racecheck" and row.startswith("attention_"):  # minutes in one
            return begun.get((tool, row), 8 if follows_each_read(tool, row) else 4)
        return 1

    return [
        Process(tool, row, f"{part}/{parts(tool, row)}")
        for tool in TOOLS
        for row in sorted(found, key=lambda row: not follows_each_read(tool, row))  # the longest first
        for part in range(parts(tool, row))
    ]


def run(process: Process, device: int, deadline: float, executable: Path, out: Path, commit: str) -> Ended | None:
    left = deadline - time.monotonic()
    if left < 5:
        return None
    tool, row, part = process
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", str(executable)]
    command.append(f"--gtest_filter={row}.*-{LEFT_OUT}{f':{LONG_FOR_OTHERS}' if follows_each_read(tool, row) else ''}")
    environment = os.environ | SETTINGS | {"FK_CONFORMANCE_PART": part}
    environment.setdefault("CUDA_VISIBLE_DEVICES", str(device))
    begin = time.monotonic()
    log = out / f"{tool}_{row.replace('/', '_')}_{part.replace('/', '_of_')}.log"
    with log.open("w") as file:
        running = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            status = running.wait(left)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)  # the tool's child, too
            running.wait()
            return None
    text = log.read_text(errors="replace")
    summary = re.findall(r"SUMMARY: (\d+)", text)
    ended = Ended(
        process,
        passed=len(re.findall(r"^\[       OK \]", text, re.MULTILINE)),
        failed=len(re.findall(r"^\[  FAILED  \] .*\(\d+ ms\)", text, re.MULTILINE)),
        errors=int(summary[-1]) if summary else 1,  # the tool itself did not come to its end
        seconds=round(time.monotonic() - begin),
        commit=commit,
    )
    if status == 0 and not ended.failed and not ended.errors:
        log.unlink()
    elif not ended.failed and not ended.errors:
        ended = ended._replace(errors=1)  # it ended badly and does not say why
    return ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("executable", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", default="*cuda*", help="as GoogleTest's filters name them (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3000, help="time limit (default: %(default)s)")
    parser.add_argument("--earlier", type=Path, help="processes.tsv of an earlier run: what was clean is not run again")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--commit", default="unknown", help="what is tested, for the record")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    args.out.mkdir(parents=True, exist_ok=True)
    earlier = [Ended.from_line(line) for line in args.earlier.read_text().splitlines()] if args.earlier else []
    wanted = processes(args.executable, args.rows, earlier)
    ended = [one for one in earlier if one.process in wanted and one.failed == one.errors == 0]
    left = [process for process in wanted if process not in {one.process for one in ended}]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = [
            pool.submit(run, process, i % args.gpus, deadline, args.executable, args.out, args.commit)
            for i, process in enumerate(left)
        ]
        ended += [one for future in runs if (one := future.result())]
    (args.out / "processes.tsv").write_text("".join(one.line() + "\n" for one in ended))
    good = True
    for tool in TOOLS:
        of_tool = [one for one in ended if one.process.tool == tool]
        all_of_it = sum(process.tool == tool for process in wanted)
        failed, errors = sum(one.failed for one in of_tool), sum(one.errors for one in of_tool)
        good = good and len(of_tool) == all_of_it and failed == errors == 0
        print(
            f"| compute-sanitizer {tool}{'' if args.rows == '*cuda*' else f', {args.rows}'} "
            f"| {sum(one.passed for one in of_tool)} passed, {failed} failed, {errors} errors "
            f"in {len(of_tool)} of {all_of_it} processes | {sum(one.seconds for one in of_tool)} in all |"
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
