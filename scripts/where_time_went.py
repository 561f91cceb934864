#!/usr/bin/env python3
"""Where the time of a build and of its tests went, from the records that they leave.

    python scripts/where_time_went.py [--stages FILE] [--top 12] build/test build/asan

Of each folder it reads .ninja_log (compile and link steps, by CMake target), ctest.xml (ctest --output-junit) and
pytest.xml (pytest --junitxml), whichever are there. FILE has a line "SECONDS NAME" for each stage of a longer run.
Seconds are those of a clock while a step ran: seconds of a core where each core had one step, and nothing else to do.
"""

from __future__ import annotations

import argparse
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class Step(NamedTuple):
    group: str
    name: str
    seconds: float


def build_steps(log: Path) -> list[Step]:
    """The last run of each command in a .ninja_log: lines of start, end (ms), mtime, output, hash of the command.
    A command with several outputs, which has a line for each, counts once."""
    last: dict[tuple[str, str, str], Step] = {}
    outputs: dict[str, tuple[str, str, str]] = {}
    for line in log.read_text().splitlines():
        if line.startswith("#"):
            continue
        start, end, _, output, command = line.split("\t")
        last.pop(outputs.get(output, ("", "", "")), None)
        key = (start, end, command)
        outputs[output] = key
        target = re.search(r"CMakeFiles/([^/]+)\.dir/", output)
        group = target[1] if target else "links, the stub and others"
        last.setdefault(key, Step(group, output.rsplit("/", 1)[-1], (int(end) - int(start)) / 1000))
    return list(last.values())


def test_steps(junit: Path) -> list[Step]:
    """The cases of a JUnit file: pytest's by their file, ctest's as one group."""
    steps = []
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        name, place = case.get("name", "?"), case.get("classname", "")
        of_pytest = place != name and place != ""
        file = next((part for part in place.split(".") if part.startswith("test_")), place)
        steps.append(Step(file if of_pytest else "ctest", name, float(case.get("time") or 0)))
    return steps


def table(title: str, steps: Sequence[Step], top: int) -> str:
    """The groups that took longest, and the longest step of each; the rest in a line."""
    groups: dict[str, list[Step]] = {}
    for step in steps:
        groups.setdefault(step.group, []).append(step)
    total = sum(step.seconds for step in steps)
    order = sorted(groups.items(), key=lambda item: -sum(s.seconds for s in item[1]))
    lines = [
        f"{title}: {total:.0f} s in {len(steps)} steps",
        f"{'s':>8} {'%':>4} {'steps':>6}  what, and its longest step",
    ]

    def line(what: str, members: Iterable[Step], tail: str = "") -> str:
        members = list(members)
        seconds = sum(s.seconds for s in members)
        return f"{seconds:8.1f} {100 * seconds / total if total else 0:4.0f} {len(members):6}  {what}{tail}"

    for group, members in order[:top]:
        longest = max(members, key=lambda s: s.seconds)
        lines.append(line(group, members, f" ({longest.name[:60]} {longest.seconds:.1f})"))
    if rest := [step for _, members in order[top:] for step in members]:
        lines.append(line(f"{len(order) - top} more", rest))
    return "\n".join(lines)


def report(folders: Sequence[Path], stages: Path | None, top: int) -> str:
    parts = []
    if stages and stages.exists():
        rows = (line.split(" ", 1) for line in stages.read_text().splitlines())
        parts.append(table("stages", [Step(name, name, float(seconds)) for seconds, name in rows], 100))
    for folder in folders:
        if (log := folder / ".ninja_log").exists():
            parts.append(table(f"{folder}: build", build_steps(log), top))
        if (junit := folder / "ctest.xml").exists():
            cases = [Step(step.name, step.name, step.seconds) for step in test_steps(junit)]
            parts.append(table(f"{folder}: ctest", cases, top))
        if (junit := folder / "pytest.xml").exists():
            parts.append(table(f"{folder}: pytest", test_steps(junit), top))
    return "\n\n".join(parts) or "where_time_went: no .ninja_log, ctest.xml or pytest.xml there"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="BUILD")
    parser.add_argument("--stages", type=Path)
    parser.add_argument("--top", type=int, default=12, help="groups to name")
    options = parser.parse_args(arguments)
    print(report(options.folders, options.stages, options.top))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
