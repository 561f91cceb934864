"""Tries a wheel as a user has it: in an environment of its own, without a compiler on PATH, with nothing but what the
wheel asks for.

    python scripts/try_wheel.py dist/flashkernel-*.whl dist/flashkernel_demo-*.whl

The second wheel is the small model that writes a text. Both files are installed; what they depend on comes from pip's
usual place, or from where pip's variables say (PIP_NO_INDEX=1 PIP_FIND_LINKS=folder: offline), as wheels alone."""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import venv

ATTENTION = """
import sys
import numpy as np
import flashkernel as fk
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, heads, 33, 64), dtype=np.float32) for heads in (4, 2, 2))
out = fk.attention(q, k, v, causal=True)
scores = np.einsum("bhid,bhjd->bhij", q, k.repeat(2, 1)) / 8.0
scores[..., np.triu(np.ones((33, 33), bool), 1)] = -np.inf
weights = np.exp(scores - scores.max(-1, keepdims=True))
truth = np.einsum("bhij,bhjd->bhid", weights / weights.sum(-1, keepdims=True), v.repeat(2, 1))
worst = float(np.abs(out - truth).max())
assert worst < 1e-5, worst
try:
    fk.attention(q, k[..., :32], v)
except ValueError as error:  # thrown in one library, caught in the other
    assert "attention" in str(error)
else:
    raise AssertionError("keys of another width were taken")
assert not {"torch", "jax"} & set(sys.modules)
print(f"attention agrees with NumPy to {worst:.1e} ({fk.explain('attention', q, k, v, causal=True).kernel})")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "wheels", type=pathlib.Path, nargs=2, metavar="WHEEL", help="flashkernel's and the demo model's"
    )
    demo, wheel = sorted(
        (path.resolve() for path in parser.parse_args().wheels), key=lambda path: "_demo-" not in path.name
    )
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        venv.create(folder / "venv", with_pip=True)
        programs = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        python = programs / ("python.exe" if os.name == "nt" else "python")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        # No compiler, no cmake, no nvcc: what is on PATH is the environment alone.
        environment = {**kept, "PATH": str(programs), "FLASHKERNEL_FORCE": ""}

        def run(*command: str | pathlib.Path, stdin: str | None = None) -> str:
            print("$", *(pathlib.Path(part).name if i == 0 else part for i, part in enumerate(command[:4])), flush=True)
            done = subprocess.run(
                [str(part) for part in command],
                env=environment,
                cwd=folder,
                input=stdin,
                stdout=subprocess.PIPE,
                text=True,
            )
            print(done.stdout, end="", flush=True)
            if done.returncode:
                sys.exit(f"try_wheel: {command[0]} ended with {done.returncode}")
            return done.stdout

        run(python, "-m", "pip", "install", "-q", "--only-binary=:all:", wheel)
        listed = run(python, "-m", "pip", "list", "--format=freeze").split()
        names = {line.split("==")[0].split("@")[0].strip() for line in listed}
        if extra := names - {"flashkernel", "numpy", "nanobind-backend", "pip", "setuptools"}:
            sys.exit(f"try_wheel: {wheel.name} brought {', '.join(sorted(extra))} along")
        run(programs / "flashkernel", "doctor")
        run(python, "-", stdin=ATTENTION)
        run(
            python,
            "-m",
            "pip",
            "install",
            "-q",
            "--only-binary=:all:",
            f"flashkernel[generate] @ {wheel.as_uri()}",
            demo,
        )
        text = run(
            programs / "flashkernel",
            "generate",
            "--model",
            "demo",
            "--prompt",
            "def add(a, b):",
            "--max-new-tokens",
            "12",
        )
        if len(text.split()) < 4:
            sys.exit(f"try_wheel: generate wrote {text!r}")
    print(f"{wheel.name} works")


if __name__ == "__main__":
    main()
