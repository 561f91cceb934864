"""Names of the public API: a gradient of `op` is `op_backward` in C++, Python, torch, Triton and the reference alike.

Ids of kernels are another vocabulary (`attention_bwd/cuda/sm80`): they name what a kernel computes, which several ops
may share (`norm_bwd`), and recorded results are filed under them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

import flashkernel as fk
import flashkernel.reference as reference
import flashkernel.torch as fkt

ROOT = Path(__file__).resolve().parents[1]
OTHER_SPELLING = re.compile(r"(?:^|_)(?:bwd|grad|grads|gradient|gradients|backwards|dgrad|wgrad|vjp)(?:_|$)")


def headers() -> dict[str, str]:
    """Text of the public C++ headers without comments, by name."""
    folder = ROOT / "include" / "flashkernel"
    if not folder.is_dir():
        pytest.skip("the source tree is not beside the tests")
    return {file.name: re.sub(r"//[^\n]*", "", file.read_text()) for file in folder.glob("*.hpp")}


def cpp_functions() -> set[str]:
    return {name for text in headers().values() for name in re.findall(r"\bFK_API [^;{(]*?\b(\w+)\(", text)}


def torch_ops() -> set[str]:
    assert fkt.__all__  # which registers them
    prefix = "flashkernel::"
    schemas = torch._C._jit_get_all_schemas()
    names = {schema.name.removeprefix(prefix) for schema in schemas if schema.name.startswith(prefix)}
    return {name.removeprefix("dynamic_") for name in names}  # the same op, with tensors in the place of floats


def triton_ops() -> set[str]:
    fk_triton = pytest.importorskip("flashkernel.triton")
    return set(fk_triton.__all__)


NAMESPACES = {
    "C++": cpp_functions,
    "flashkernel": lambda: set(fk.__all__),
    "flashkernel.torch": lambda: set(fkt.__all__),
    "torch.ops.flashkernel": torch_ops,
    "flashkernel.triton": triton_ops,
    "flashkernel.reference": lambda: set(reference.__all__),
}


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_gradients_are_spelled_backward(namespace):
    names = NAMESPACES[namespace]()
    wrong = sorted(name for name in names if OTHER_SPELLING.search(name))
    assert not wrong, f"{namespace}: {wrong}; the gradient of an op is called op_backward"
    backward = {name for name in names if "backward" in name}
    assert backward or namespace == "flashkernel.torch"  # where autograd calls them
    for name in backward:
        assert name.endswith("_backward") and name.removesuffix("_backward") in names, f"{namespace}: {name}"


def test_every_way_to_an_op_has_the_same_gradients():
    wanted = {name for name in fk.__all__ if name.endswith("_backward")}
    assert len(wanted) > 5
    for namespace in ("C++", "flashkernel.triton", "flashkernel.reference"):
        names = NAMESPACES[namespace]()
        if namespace == "flashkernel.triton":  # which has not every op; test_op_tables says which
            wanted_here = {name for name in wanted if name.removesuffix("_backward") in names}
        else:
            wanted_here = wanted
        assert {name for name in names if name.endswith("_backward")} == wanted_here, namespace
    assert {name for name in torch_ops() if name.endswith("_backward")} <= wanted


def test_pages_name_gradients_as_the_api_does():
    """What is spelled _bwd in a page is an id of a kernel, or a file in lab/."""
    kernels = {info.op for info in fk.kernels()}
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]:
        if not page.is_file():
            pytest.skip("the source tree is not beside the tests")
        for name, rest in re.findall(r"\b(\w+_bwd)\b(\S*)", page.read_text()):
            assert (name in kernels and not rest.startswith("(")) or rest.startswith(".md"), f"{page.name}: {name}"
