#!/usr/bin/env python3
"""compute-sanitizer's four tools over the conformance cases of every CUDA row of the registry: a process for each tool
and row, one a core, over all GPUs.

    python scripts/gpu_sanitizers.py build/gpu/tests_cpp/kernel_conformance OUT
    python scripts/gpu_sanitizers.py ... --seconds 500 --earlier OUT_BEFORE/processes.tsv     # what is left of it

OUT/processes.tsv gets a line for each process that came to its end: tool, row, part of its cases, cases passed and
failed, errors that the tool reported, seconds, commit. Another run can go on from there: of a process that the time
limit ended, and that had nothing to report until then, the line has the names of the cases passed, too, and they are
not run again. OUT/*.log has what was said by those, and by those with a failure or an error. Prints the rows of a
table; exits 1 unless every process of every tool has come to its end without either.

Left out are the cases that launch nothing (accepts_a_case) and the strides past 2^31, whose tensors span gigabytes; of
synccheck what launches 16 large blocks a cluster, which it ends with an illegal access (decode,
lab/notebooks/attention_decode.md) or with a wait missed at the only arrival that there is (norms with a residual,
profiles/gpu_checks_h100.md); of racecheck, what linear/few_rows/sm90a/stream.cuh serves, where it
does not follow a warp's barrier
and one lane's arrival (lab/notebooks/linear_few_rows.md), and, for attention and linear in plain FFMA, the cases that
are long for the sake of other kernels' tiles and parts: it follows each of their reads of shared memory, up to minutes
a case.
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
LONG_FOR_OTHERS = {
    "attention": "*.long_*:*.tiles_*:*.blocks_*:*.paged_prefill_*:*/tiled.split_*:*/naive.split_*:*_one_long_*",
    "linear": "*.large_*:*.wide_*:*.split_*:*.long_sum_*",
}
SETTINGS = {
    "FK_CONFORMANCE_ORACLE": "0",
    "FK_CONFORMANCE_REPEATS": "1",
    "FK_CONFORMANCE_LARGER_HEAD_DIMS": "25",
    "OMP_NUM_THREADS": "1",
}


class Process(NamedTuple):
    tool: str
    row: str
    part: str


class Result(NamedTuple):
    process: Process
    passed: int
    failed: int
    errors: int
    seconds: int
    commit: str
    unfinished: tuple[str, ...] = ()  # the cases passed by a process that the time limit ended

    def is_clean(self) -> bool:
        return self.failed == self.errors == 0

    def line(self) -> str:
        fields = (*self.process, *self[1:-1], *([" ".join(self.unfinished)] if self.unfinished else []))
        return "\t".join(map(str, fields))

    @staticmethod
    def from_line(line: str) -> Result:
        tool, row, part, passed, failed, errors, seconds, commit, *unfinished = line.split("\t")
        counts = int(passed), int(failed), int(errors), int(seconds)
        return Result(Process(tool, row, part), *counts, commit, tuple(" ".join(unfinished).split()))


def long_for_others(tool: str, row: str) -> str | None:
    """The cases of a row that are left out because the tool follows each of its reads of shared memory."""
    match = re.match("(attention|linear).*/cuda/generic", row)
    return LONG_FOR_OTHERS[match[1]] if tool == "racecheck" and match else None


def left_out(tool: str, row: str) -> list[str]:
    """Patterns of the cases of a row that a tool does not run."""
    found = [LEFT_OUT, *filter(None, [long_for_others(tool, row)])]
    if (tool, row) == ("synccheck", "norm/cuda/sm90a/long_rows"):
        found.append("*_longest_residual_*")
    if tool == "racecheck" and re.fullmatch("linear/cuda/sm90a/.*/few_rows/stream", row):
        found.append("*.*few_stream_*")
    return found


def processes(executable: Path, rows: str, earlier: list[Result]) -> list[Process]:
    """All that belong to a run; a row that an earlier one began stays in as many parts."""
    listed = subprocess.run(
        [executable, "--gtest_list_tests", f"--gtest_filter={rows}"], capture_output=True, text=True, check=True
    )
    found = [line[:-1] for line in listed.stdout.splitlines() if re.fullmatch(r"[a-z]\S*/\S+\.", line)]
    begun = {(tool, row): int(part.split("/")[1]) for tool, row, part in (one.process for one in earlier)}

    def parts(tool: str, row: str) -> int:
        if tool == "synccheck" and row.startswith("attention_fwd/cuda/sm90a/decode/"):
            return 0
        if tool == "racecheck" and row.startswith(("attention", "linear", "norm_bwd")):  # minutes in one
            return begun.get((tool, row), 8 if long_for_others(tool, row) else 4)
        return 1

    return [
        Process(tool, row, f"{part}/{parts(tool, row)}")
        for tool in TOOLS
        for row in sorted(found, key=lambda row: not long_for_others(tool, row))  # the longest first
        for part in range(parts(tool, row))
    ]


def run(
    process: Process, done: Result | None, device: int, deadline: float, executable: Path, out: Path, commit: str
) -> Result | None:
    """`done`: what an earlier run got through, of cases that are left out of this one."""
    left = deadline - time.monotonic()
    if left < 5:
        return done
    tool, row, part = process
    not_run = left_out(tool, row) + [f"{row}.{case}" for case in (done.unfinished if done else ())]
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", str(executable)]
    command.append(f"--gtest_filter={row}.*-{':'.join(not_run)}")
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
            status = None
    text = log.read_text(errors="replace")
    passed = re.findall(r"^\[       OK \] \S+\.(\S+)", text, re.MULTILINE)
    failed = len(re.findall(r"^\[  FAILED  \] .*\(\d+ ms\)", text, re.MULTILINE))
    seconds = round(time.monotonic() - begin) + (done.seconds if done else 0)
    total = len(passed) + (done.passed if done else 0)
    if status is None:
        if failed or "========= Error" in text or not passed:
            return done
        return Result(process, total, 0, 0, seconds, commit, (*(done.unfinished if done else ()), *passed))
    summary = re.findall(r"SUMMARY: (\d+)", text)
    errors = int(summary[-1]) if summary else 1  # the tool itself did not come to its end
    if not failed and not errors:
        if status == 0:
            log.unlink()
        else:
            errors = 1  # it ended badly and does not say why
    return Result(process, total, failed, errors, seconds, commit)


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
    earlier = [Result.from_line(line) for line in args.earlier.read_text().splitlines()] if args.earlier else []
    wanted = processes(args.executable, args.rows, earlier)
    before = {one.process: one for one in earlier if one.process in wanted and one.is_clean()}
    left = [process for process in wanted if process not in before or before[process].unfinished]
    results = [one for one in before.values() if not one.unfinished]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = [
            pool.submit(
                run, process, before.get(process), i % args.gpus, deadline, args.executable, args.out, args.commit
            )
            for i, process in enumerate(left)
        ]
        results += [one for future in runs if (one := future.result())]
    (args.out / "processes.tsv").write_text("".join(one.line() + "\n" for one in results))
    good = True
    for tool in TOOLS:
        of_tool = [one for one in results if one.process.tool == tool]
        ended = [one for one in of_tool if not one.unfinished]
        all_of_it = sum(process.tool == tool for process in wanted)
        failed, errors = sum(one.failed for one in of_tool), sum(one.errors for one in of_tool)
        good = good and len(ended) == all_of_it and failed == errors == 0
        print(
            f"| compute-sanitizer {tool}{'' if args.rows == '*cuda*' else f', {args.rows}'} "
            f"| {sum(one.passed for one in of_tool)} passed, {failed} failed, {errors} errors "
            f"in {len(ended)} of {all_of_it} processes | {sum(one.seconds for one in of_tool)} in all |"
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
