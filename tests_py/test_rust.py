"""The Rust crates: their tests and example, offline, against the library of this process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flashkernel as fk

CRATES = Path(__file__).resolve().parents[1] / "bindings" / "rust"
REQUIRED = bool(os.environ.get("FLASHKERNEL_TEST_RUST"))  # then no Rust is a failure; documentation is tested too

if not (CRATES / "Cargo.toml").is_file():
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)
if sys.platform != "linux":
    pytest.skip("the crates are tested on Linux", allow_module_level=True)
if not REQUIRED and shutil.which("cargo") is None:
    pytest.skip("there is no cargo", allow_module_level=True)


def test_crates(tmp_path: Path) -> None:
    fk.kernels()
    found = re.search(r"/\S*libflashkernel\.so\S*", Path("/proc/self/maps").read_text(encoding="utf-8"))
    assert found
    folder = str(Path(found[0]).parent)
    environment = {**os.environ, "FLASHKERNEL_DIR": folder, "LD_LIBRARY_PATH": folder}
    crates = shutil.copytree(CRATES, tmp_path / "rust", ignore=shutil.ignore_patterns("target"))

    def cargo(*arguments: str) -> str:
        command = ["cargo", *arguments, "--offline", "--target-dir", str(tmp_path / "target")]
        done = subprocess.run(command, cwd=crates, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    tested = cargo("test", *(() if REQUIRED else ("--lib", "--tests")))
    assert sum(map(int, re.findall(r"(\d+) passed", tested))) >= (9 if REQUIRED else 4), tested
    assert "sequence 1: 11.52381" in cargo("run", "--example", "paged_attention")
