"""Index arrays that another thread writes while an op runs: checked and used once, from a copy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_indices_that_change_never_lead_astray() -> None:
    program = Path(__file__).with_name("changing_indices.py")
    run = subprocess.run([sys.executable, str(program), "0.3"], capture_output=True, text=True, timeout=300)
    lines = run.stdout.splitlines()
    assert run.returncode == 0, f"ended by {run.returncode} after {lines[-1:]}: {run.stderr[-2000:]}"
    counts = {tuple(line.split()[:2]): tuple(map(int, line.split()[2:])) for line in lines}
    names = {"targets", "cu_q", "cu_k", "table", "lens", "slots", "src", "dst", "positions", "logits"}
    names |= {"prefix", "prefix_lens", "groups"}
    names |= {"tokens"}
    assert {name for _, name in counts} == names
    for call, (served, refused) in counts.items():
        assert served + refused > 0, call
    assert sum(served for served, _ in counts.values()) > 0 and sum(refused for _, refused in counts.values()) > 0
