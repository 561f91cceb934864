"""Results that are older than the kernel that they speak of: how that is known, and that tables say so."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("tools.places", reason="the source tree is not beside the tests")

from tools import changes, report, roofline
from tools.places import KERNEL_CHANGES, RESULTS, ROOT
from tools.standing import Row, Suite, overview, where_others_are_faster

import flashkernel as fk

KERNEL = "rope/cuda/generic"
SOURCE = "src/cuda/rope/rope.cu"
CODE = '// Turns.\n#include "a.hpp"\nvoid turn(int n) {\n  if (n < 0) fail("negative");\n  step(n);\n}\n'


class Repository:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q")

    def git(self, *arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        run = subprocess.run(["git", *identity, *arguments], cwd=self.root, capture_output=True, text=True, check=True)
        return run.stdout.strip()

    def commit(self, files: dict[str, str | None]) -> str:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink() if text is None else path.write_text(text)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "step")
        return self.git("rev-parse", "HEAD")

    def is_older(self, commit: Any, kernel: str = KERNEL) -> bool:
        assert changes.record(self.root, [(kernel, commit)])
        return changes.read(self.root).is_older([kernel], [commit])


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    (tmp_path / "lab").mkdir()
    return Repository(tmp_path)


@pytest.mark.parametrize(
    ("change", "older"),
    [
        ({SOURCE: CODE.replace("step(n)", "step(2 * n)")}, True),
        ({SOURCE: CODE.replace("  step(n);\n", "")}, True),
        ({SOURCE: CODE + "void more() {}\n"}, True),
        ({SOURCE: "// Other words.\n" + CODE.replace("  ", "    ").replace('"a.hpp"', '"b.hpp"')}, False),
        ({SOURCE: CODE.replace("negative", "n is negative")}, False),
        ({"src/cuda/reduce/reduce.cu": "void reduce() {}\n"}, False),
        ({"src/cuda/rope/rope.hpp": "void turn(int);\n"}, False),
        ({"docs/rope.md": "Rope.\n"}, False),
    ],
)
def test_code_that_changed_makes_a_result_older(repository, change, older):
    before = repository.commit({SOURCE: CODE})
    assert not repository.is_older(before)
    after = repository.commit(change)
    assert repository.is_older(before) == older
    assert not repository.is_older(after)


def test_moved_code_is_the_same(repository):
    before = repository.commit({"src/cuda/generic/rope.cu": CODE})
    repository.commit({"src/cuda/generic/rope.cu": None, SOURCE: CODE.replace("a.hpp", "cuda/a.hpp")})
    assert not repository.is_older(before)
    repository.commit({SOURCE: CODE.replace("step(n)", "step(2 * n)")})
    assert repository.is_older(before)


def test_digits_and_plus_signs_of_commits(repository):
    before = repository.commit({SOURCE: CODE})
    for name in (before[:7], before[:12], before[:12] + "+"):
        assert not repository.is_older(name)


@pytest.mark.parametrize("commit", [None, "", "abcdef1"])
def test_a_commit_that_nobody_knows_counts_as_older(repository, commit):
    repository.commit({SOURCE: CODE})
    assert repository.is_older(commit)


def test_no_history_changes_nothing(tmp_path):
    (tmp_path / "lab").mkdir()
    (tmp_path / KERNEL_CHANGES).write_text(json.dumps({"src/cuda/rope/": {"1234567": False}}))
    assert not changes.record(tmp_path, [(KERNEL, "1234567")])
    assert not changes.read(tmp_path).is_older([KERNEL], ["1234567"])
    assert changes.read(tmp_path).is_older([KERNEL], ["7654321"])


def test_every_kernel_has_sources():
    timed = {
        kernel
        for section in report.sections(ROOT)
        for run in section.runs
        for row in run["rows"]
        for kernel in changes.kernels_of(row)
    }
    timed |= {kernel for kernel, _ in roofline.measured_kernels(ROOT)}
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.*")]
    for kernel in sorted(timed | {info.id for info in fk.kernels()}):
        found = changes.sources(kernel)
        assert found, f"tools/changes.py: SOURCES has no line for {kernel}"
        for start in found:
            assert any(f.startswith(start) and changes.is_code(f) for f in files), f"{kernel}: no file begins {start}"


def test_the_record_has_all_results():
    known = changes.read(ROOT).after
    for section in report.sections(ROOT):
        for row in report.merged(section.runs):
            for kernel in changes.kernels_of(row):
                for start in changes.sources(kernel):
                    missing = {str(c).rstrip("+")[:7] for c in section.commits} - known.get(start, {}).keys()
                    assert not missing, f"{start} {missing}: run `python -m tools report`"


def suite(commit: str) -> Suite:
    providers = {
        "flashkernel": {"kind": "ours", "p50": 2.0, "kernels": [KERNEL]},
        "eager": {"kind": "peer", "p50": 1.0, "kernels": []},
    }
    row = {"group": "rope", "case": "small", "dtype": "float16", "providers": providers}
    machine = {"gpu": "NVIDIA T", "cpu": "c", "commit": commit, "date": "2026-11-28T00:00"}
    return Suite("t/rope", "t_rope", [{"command": "flashkernel bench rope", "machine": machine, "method": {}}], [row])


def test_tables_mark_what_is_older():
    newer = changes.Changes({"src/cuda/rope/": {"1111111": True, "2222222": False}})
    date = "2026-11-28"
    assert f"{date} {changes.MARK} |" in where_others_are_faster([suite("1111111")], newer)
    fresh = where_others_are_faster([suite("2222222")], newer)
    assert f"{date} |" in fresh and f"{date} {changes.MARK}" not in fresh
    for commit, count in (("1111111", "1"), ("2222222", "0")):
        line = next(line for line in overview([suite(commit)], newer).splitlines() if line.startswith("| [t/rope]"))
        assert line.split("|")[-2].strip() == count
    row = Row(suite("1111111"), "rope", "small", "float16", 2.0, "eager", 1.0, (KERNEL,))
    assert row.is_older(newer)


def test_pages_mark_what_is_older():
    """A page of the checkout itself, with a record that says the opposite."""
    found = [section for section in report.sections(ROOT) if section.name == "h200/cross_entropy"]
    (section,) = found
    start = changes.sources("cross_entropy/cuda/generic")[0]
    commits = {str(commit)[:7] for commit in section.commits}
    for older in (True, False):
        rows = report._marked(
            report.merged(section.runs), section, changes.Changes({start: dict.fromkeys(commits, older)})
        )
        assert all(row["case"].endswith(changes.MARK) == older for row in rows)


def test_roofline_marks_what_is_older(tmp_path):
    for folder in (RESULTS, "lab/profiles"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    kernel = "attention_fwd/cuda/sm90a/f16/d128"
    commits = {commit[:7] for k, commit in roofline.measured_kernels(ROOT) if k == kernel}
    for older in (True, False):
        record = {start: dict.fromkeys(commits, older) for start in changes.sources(kernel)}
        (tmp_path / KERNEL_CHANGES).write_text(json.dumps(record))
        marked = f"| `{kernel}` {changes.MARK} |" in roofline.render(tmp_path)
        assert marked == older
