"""Every Python example runs; each one checks its own result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
if not EXAMPLES.is_dir():
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)
NEEDS = {"torch_gradient": ["torch"], "transformers_attention": ["torch", "transformers"], "generate": ["tokenizers"]}
NAMES = ["attention_numpy", "generate", "paged_cache", "torch_gradient", "transformers_attention"]


@pytest.mark.parametrize("name", NAMES)
def test_example(name: str) -> None:
    for package in NEEDS.get(name, []):
        pytest.importorskip(package)
    done = subprocess.run([sys.executable, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
