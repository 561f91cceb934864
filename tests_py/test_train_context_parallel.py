"""The training example on several processes, with FSDP2 and context parallel: losses and gradients of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "train_context_parallel.py"
if not SCRIPT.is_file():
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)

pytestmark = pytest.mark.long
STEPS = 8


def curve(*options: str, processes: int = 0) -> list[list[float]]:
    """[loss, norm of the gradient] of each step. torchrun finds a free port by itself."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    command = [sys.executable, *launcher, str(SCRIPT), "--device", "cpu", "--steps", str(STEPS), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def one_process() -> list[list[float]]:
    """Stock attention, no sharding."""
    alone = curve("--plain")
    assert len(alone) == STEPS and alone[-1][0] < alone[0][0] - 0.5
    return alone


@pytest.mark.parametrize(
    ("processes", "options"),
    [(2, ()), (2, ("--method", "all_gather")), (4, ("--method", "ulysses", "--ranks", "2"))],
    ids=["ring", "all-gather", "data x ulysses"],
)
def test_losses_are_those_of_one_process(one_process, processes, options) -> None:
    """Up to rounding. The norm says what AdamW hides: gradients that are all too large by a factor."""
    for step, (found, alone) in enumerate(zip(curve(*options, processes=processes), one_process, strict=True)):
        assert found == pytest.approx(alone, rel=2e-5), step
