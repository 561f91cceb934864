"""The option --kernel-path: what it forces, what it counts, and when it fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flashkernel as fk

HERE = Path(__file__).resolve().parent
SERVED = re.compile(r"kernel path \S+: served (\d+) calls by \d+ kernels, (\d+) fell back")
AVAILABLE = {"/".join(row.id.split("/")[1:3]) for row in fk.kernels() if row.available}


def run(path: str, *arguments: str, **variables: str) -> tuple[int, str]:
    environment = {name: value for name, value in os.environ.items() if name != "FLASHKERNEL_FORCE"} | variables
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--kernel-path", path, *arguments]
    done = subprocess.run(line, cwd=HERE, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


PATHS = ("cpu/scalar", "cpu/avx2", pytest.param("cpu/avx512", marks=pytest.mark.long))


@pytest.mark.parametrize("path", [p for p in PATHS if getattr(p, "values", (p,))[0] in AVAILABLE])
def test_the_path_serves_the_tests(path):
    """Softmax over a dim that is not contiguous is refused by the fast rows and falls back."""
    code, output = run(path, "test_reduce.py", "-k", "softmax or reduce")
    served, others = (int(x) for x in SERVED.search(output).groups())
    assert code == 0 and served > 100 and (others == 0) == (path == "cpu/scalar"), output
    assert "deselected" in output  # Triton's cases: its kernels are not in the registry


def test_a_run_that_never_took_the_path_fails():
    code, output = run("cpu/scalar", "test_kernels.py", "-k", "list_every_op")
    assert code == 1 and "the path was never taken, FAILED" in output


def test_calls_of_tests_that_force_kernels_do_not_count():
    """They run whatever the path is; what they launch says nothing about it."""
    code, output = run("cpu/scalar", "test_kernels.py", "-k", "test_force and not environment")
    assert code == 1 and "1 passed" in output and "never taken" in output, output


def test_an_unknown_path_is_refused():
    code, output = run("cpu/sm75", "test_elementwise.py")
    assert (
        code == 4 and "--kernel-path cpu/sm75: no such kernel runs on this machine" in output and "cpu/scalar" in output
    )


@pytest.mark.long
def test_workers_send_their_counts():
    code, output = run("cpu/scalar", "test_elementwise.py", "-n", "2")
    served, others = (int(x) for x in SERVED.search(output).groups())
    assert code == 0 and served > 50 and others == 0, output
