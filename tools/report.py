"""`python -m tools report`: BENCHMARKS.md, lab/tables, lab/plots and README's table, all from lab/results.

Rows that are older than their kernel are marked; changes.py says how that is known.

Nothing in them is typed by hand; `--check` (and a test) fails where they and the JSON disagree. Result files whose
names end in a number after a dot (run.1.json, run.2.json, ...) are runs of the same thing: their medians are shown.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashkernel.bench.results import is_result
from flashkernel.bench.tables import BRIEF, table

from . import changes, readme, roofline, standing, training, whole_models
from .bar import bar, points, recorded
from .places import PLOTS, RESULTS, TABLES
from .plots import Figure, digest, digest_in, draw, figures, hero

__all__ = ["Section", "add_arguments", "merged", "pages", "run", "sections"]

INTRO = """# {name}

Written by `python -m tools report`; do not edit. [docs/benchmarks.md](../../docs/benchmarks.md) says how to measure and
how a row is read. "of limit": of what the same machine reached in the same run with a plain sum or copy (memory) or a
large matrix product (matmul), whichever takes longer for the row's work; on a CPU only work larger than its last-level
cache is held against memory. "x baseline" is the baseline's time divided by ours: above 1, ours is faster. Peak memory
is the framework's, result included (CPU attention: of the process, beyond the result), + the op's workspace.
"""


class Section:
    """The runs of one thing."""

    def __init__(self, name: str, files: list[Path], runs: list[dict[str, Any]]) -> None:
        self.name = name
        self.files = files
        self.runs = runs

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "_", self.name.lower())

    @property
    def commits(self) -> list[Any]:
        return [run["machine"].get("commit") for run in self.runs]


def sections(root: Path) -> list[Section]:
    """GPUs first."""
    found: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    folder = root / RESULTS
    for path in sorted(folder.rglob("*.json")):
        value = json.loads(path.read_text(encoding="utf-8"))
        if is_result(value):
            name = path.relative_to(folder).with_suffix("").as_posix()
            found.setdefault(re.sub(r"\.\d+$", "", name), []).append((path, value))
    made = [Section(name, [p for p, _ in files], [run for _, run in files]) for name, files in found.items()]
    return sorted(made, key=lambda section: ("gpu" not in section.runs[0]["machine"], section.name))


def _median(values: list[Any]) -> Any:
    numbers = [x for x in values if isinstance(x, (int, float)) and not isinstance(x, bool)]
    return statistics.median(numbers) if numbers and len(numbers) == len(values) else values[-1]


def merged(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of all runs, each once; where several runs have it, every number of a provider is their median."""
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for run in runs:
        for row in run["rows"]:
            rows.setdefault((row["group"], row["case"], row["dtype"]), []).append(row)
    result = []
    for found in rows.values():
        last = found[-1]
        providers = {}
        for name, provider in last["providers"].items():
            same = [row["providers"][name] for row in found if name in row["providers"]]
            providers[name] = {key: _median([p.get(key) for p in same]) for key in provider}
        limits = [row["limit"] for row in found]
        limit = last["limit"] and {**last["limit"], "seconds": _median([x["seconds"] for x in limits if x])}
        result.append({**last, "limit": limit, "providers": providers})
    return result


def _marked(rows: list[dict[str, Any]], section: Section, newer: changes.Changes) -> list[dict[str, Any]]:
    """The rows, with a mark behind the case of those that are older than a kernel in them."""
    return [
        {**row, "case": f"{row['case']} {changes.MARK}"}
        if newer.is_older(changes.kernels_of(row), section.commits)
        else row
        for row in rows
    ]


def _machine(run: dict[str, Any]) -> str:
    m = run["machine"]
    gpu = ""
    if "gpu" in m:
        clocks = f"SM {m['clocks.sm']}, memory {m['clocks.mem']}" if "clocks.sm" in m else "?"
        gpu = f"{m['gpu']} (driver {m.get('driver_version')}, {clocks}, limit {m.get('power.limit')}), "
    cuda = f" (CUDA {m['torch_cuda']}, cuDNN {m.get('cudnn')}, Triton {m.get('triton')})" if m.get("torch_cuda") else ""
    return (
        f"{gpu}{m['cpu']}, {m['cpus']} cores, {m['threads']} threads; {m['system']}; Python {m['python']}, torch "
        f"{m['torch']}{cuda}, FlashKernel {m['flashkernel']} at commit {m['commit']}; {m['date'][:16]} UTC"
    )


def _method(run: dict[str, Any]) -> str:
    m = run["method"]
    note = f" {run['note']}." if run.get("note") else ""
    if "text" in m:  # a run by another rule says which
        return f"{m['text']}."
    quick = "A quick look, with few calls: order of magnitude, no more. " if m.get("quick") else ""
    steady = f" A measurement is calls one after the other for {1e3 * m['steady']:g} ms." if m.get("steady") else ""
    return (
        f"{quick}Up to {m['calls']} timed measurements of each provider after {m['warmup']} (what fits into "
        f"{m['seconds']:g} s of it, at least {m['least_calls']} where they take less than five times as long).{steady}"
        f"{note}"
    )


def _section(
    section: Section, drawn: list[Figure], known: dict[str, dict[str, float]], newer: changes.Changes
) -> Iterator[str]:
    first = section.runs[0]
    yield INTRO.format(name=section.name)
    links = ", ".join(
        f"[{path.stem}](../results/{section.name.rpartition('/')[0]}/{path.name})" for path in section.files
    )
    many = f"Medians of {len(section.runs)} runs. " if len(section.runs) > 1 else ""
    yield f"`{first['command']}`. {_machine(first)}. {_method(first)} {many}Results: {links}.\n"
    if first["ceilings"]:
        reached = ", ".join(
            f"{name} {rate * 1e-12:.3g} {'TFLOP/s' if name.startswith('matmul') else 'TB/s'}"
            for name, rate in first["ceilings"].items()
        )
        yield f"This machine reached in that run: {reached}.\n"
    rows = merged(section.runs)
    compared = points(rows, known if "H200" in first["machine"].get("gpu", "") else {})
    if compared:
        yield "## Against other attention libraries\n"
        if any(point.estimated for point in compared):
            yield (
                "~: not in this run; its ratio to cuDNN at that point in [peers.json](../results/h200/peers.json) "
                "(one run, one H200) times cuDNN's rate here.\n"
            )
        yield bar(compared) + "\n"
    rows = _marked(rows, section, newer)
    if any(row["case"].endswith(changes.MARK) for row in rows):
        yield changes.NOTE + "\n"
    for group in dict.fromkeys(row["group"] for row in rows):
        yield f"## {group}\n"
        yield table([row for row in rows if row["group"] == group], BRIEF) + "\n"
        for figure in drawn:
            if figure.name.rsplit("_", 1)[0] == f"{section.slug}_{group}":
                yield f"![{figure.title}](../plots/{figure.name}.svg)\n"
    left = sorted({name for run in section.runs for name in run["left_out"]})
    if left:
        yield f"Left out for lack of time: {'; '.join(left)}.\n"


def pages(root: Path, found: list[Section]) -> tuple[dict[Path, str], list[Figure]]:
    """(text of every generated page by its path, the plots)."""
    known, newer = recorded(root), changes.read(root)
    texts: dict[Path, str] = {}
    drawn: list[Figure] = []
    by_suite: dict[str, list[Figure]] = {}
    for section in found:
        mine = figures(section.slug, merged(section.runs), section.runs[-1]["machine"])
        by_suite[section.name] = mine
        drawn += mine
        texts[root / TABLES / f"{section.slug}.md"] = "\n".join(_section(section, mine, known, newer))
    if picture := hero(by_suite.get("h200/attention", []), by_suite.get("h200/attention_backward", [])):
        drawn.append(picture)
    rows = [standing.Suite(section.name, section.slug, section.runs, merged(section.runs)) for section in found]
    texts[root / TABLES / "where_others_are_faster.md"] = standing.where_others_are_faster(rows, newer)
    cpu = [section for section in found if section.name == "cpu/run"]
    parts = [standing.overview(rows, newer), readme.render(cpu[0].runs) if cpu else "", whole_models.summary(root)]
    parts.append(training.sentence(root))
    texts[root / "BENCHMARKS.md"] = "\n\n".join(filter(None, parts)) + "\n"
    if models := whole_models.report(root) + training.report(root):
        texts[root / TABLES / "whole_models.md"] = f"# Whole models\n{models}"
        drawn += training.figures(root)
    front = root / "README.md"
    text = readme.put(front.read_text(encoding="utf-8"), standing.headline(rows))
    if beside := whole_models.headline(root):
        text = readme.put(text, beside, whole_models.MARKS)
    texts[front] = text
    return texts, drawn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page differs from the results")
    parser.add_argument("--root", type=Path, metavar="DIR", help="the checkout (default: the one around this folder)")


def run(root: Path, *, check: bool) -> int:
    if not (root / RESULTS).is_dir() or not (root / "README.md").is_file():
        raise ValueError(f"report: {root}: a checkout of FlashKernel is needed ({RESULTS.as_posix()} and README.md)")
    found = sections(root)
    if not check:
        measured = [
            (kernel, commit)
            for section in found
            for row in merged(section.runs)
            for kernel in changes.kernels_of(row)
            for commit in section.commits
        ]
        changes.record(root, [*measured, *roofline.measured_kernels(root)])
    texts, drawn = pages(root, found)
    wanted = {root / PLOTS / f"{figure.name}.svg": figure for figure in drawn}
    stale = [path for path in (root / PLOTS).glob("*.svg") if path not in wanted]
    stale += [path for path in (root / TABLES).glob("*.md") if path not in texts]
    old = [path for path, new in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != new]
    for path, figure in wanted.items():
        if not path.is_file() or digest_in(path.read_text(encoding="utf-8")) != digest(figure):
            old.append(path)
    if check:
        for path in [*old, *stale]:
            print(f"{path.relative_to(root)} is not what the results say", file=sys.stderr)
        if old or stale:
            print("run `python -m tools report`", file=sys.stderr)
        return 1 if old or stale else 0
    (root / TABLES).mkdir(parents=True, exist_ok=True)
    for path, new in texts.items():
        path.write_text(new, encoding="utf-8")
    (root / PLOTS).mkdir(parents=True, exist_ok=True)
    for path, figure in wanted.items():
        draw(figure, path)
    for path in stale:
        path.unlink()
    print(f"{len(found)} sections, {len(drawn)} plots; {len(old)} files were out of date, {len(stale)} removed")
    return 0
