"""What type checkers are told of the ops: mypy reads typing_cases.py, and results are compared with the stub."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import itertools
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest

pytest.importorskip("torch")
import torch

import flashkernel as fk
from flashkernel import _C
from flashkernel.typing import KvAppendRope, KvAppendRopeWithQ
from keyword_calls import arrays, calls

HERE = pathlib.Path(__file__).parent
CASES = HERE / "typing_cases.py"
PACKAGE = pathlib.Path(_C.__file__).parent
OPS = sorted({op for op, _ in calls().values()})


def test_mypy_finds_the_types_of_results(tmp_path, request):
    """Torch's Tensor class is read, the rest of torch is not: that would take a minute."""
    config = tmp_path / "mypy.ini"
    config.write_text(
        "[mypy]\npython_version = 3.10\nwarn_unused_ignores = True\n"
        "[mypy-torch.*,triton.*]\nignore_missing_imports = True\nfollow_imports = skip\n"
        "[mypy-torch,torch._tensor,torch._C,torch.nn,torch.nn.parameter,torch.nn.modules.*]\nfollow_imports = silent\n"
    )
    environment = dict(os.environ)
    if "site-packages" not in PACKAGE.parts:
        environment["MYPYPATH"] = str(PACKAGE.parent)
    cache = request.config.cache.mkdir("mypy")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(cache), str(CASES)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr


def test_there_is_a_case_for_every_function():
    text = CASES.read_text()
    import flashkernel.torch as fkt

    triton_ops = [op for op in OPS if "backend" in inspect.signature(getattr(fk, op)).parameters]
    for alias, names in (("fk", OPS), ("fkt", fkt.__all__), ("fk_triton", triton_ops)):
        missing = [name for name in names if not re.search(rf"\b{alias}\.{name}\(", text)]
        assert not missing, f"typing_cases.py has no case for {alias}.{', '.join(missing)}"


@functools.cache
def stub() -> dict[str, list[ast.FunctionDef]]:
    """The overloads of each function in _C.pyi."""
    functions: dict[str, list[ast.FunctionDef]] = {}
    for node in ast.parse((PACKAGE / "_C.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, []).append(node)
    return functions


def annotations(overload: ast.FunctionDef) -> dict[str, str]:
    parameters = [*overload.args.args, *overload.args.kwonlyargs]
    return {parameter.arg: ast.unparse(parameter.annotation) for parameter in parameters if parameter.annotation}


def fits(annotation: str, value: Any) -> bool:
    if annotation == "None" or annotation.startswith("Literal[True") or annotation.startswith("Literal[False"):
        return annotation in ("None", f"Literal[{value}]") and (annotation != "None" or value is None)
    if annotation.startswith("KvAppendRope"):
        return ("WithQ" in annotation) == (value is not None and "q" in value)
    return value is not None or "None" in annotation or annotation in ("Any", "Axis", "KvScales", "Window")


def shape(result: Any) -> str:
    """A result as the stub writes it, for torch tensors."""
    if isinstance(result, tuple):
        return f"tuple[{', '.join(map(shape, result))}]"
    return "None" if result is None else "ArrayT" if type(result) is torch.Tensor else type(result).__name__


def variants(op: str, keywords: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The call with each choice of the flags and optional arguments that its result depends on."""
    kinds: dict[str, set[str]] = {}
    for overload in stub()[op]:
        for name, annotation in list(annotations(overload).items())[1:]:
            kinds.setdefault(name, set()).add(annotation)
    choices = {name: (True, False) for name, seen in kinds.items() if "Literal[True]" in seen}
    optional = {name for name, seen in kinds.items() if "SupportsDLPack" in seen and "None" in seen}
    choices |= {name: (keywords[name], None) for name in optional if keywords.get(name) is not None}
    outputs = ("grads",) if op.endswith("_backward") else ("out", "residual_out")
    inputs = {name: value for name, value in keywords.items() if name not in outputs}
    for chosen in itertools.product(*choices.values()):
        call = inputs | dict(zip(choices, chosen, strict=True))
        if not (call.get("need_sinks") and call.get("sinks") is None):  # which is refused
            yield call


def test_every_array_that_an_op_takes_is_in_a_call():
    """The tests of gradients, tangents, version counters and JAX's arrays go over the arrays of keyword_calls.py."""
    names = {
        ("rope", name)
        for kind in (KvAppendRope, KvAppendRopeWithQ)
        for name, type_ in get_type_hints(kind).items()
        if "DLPack" in str(type_)
    }
    assert {name for _, name in names} == {"positions", "inv_freq", "cos", "sin", "q", "q_out", "q_norm", "k_norm"}
    # qkv_append makes q and its norms itself.
    of_rope = {"kv_append": names, "qkv_append": {("rope", "positions"), ("rope", "inv_freq")}}
    for op in OPS:
        taken = {
            (name,)
            for overload in stub()[op]
            for name, annotation in annotations(overload).items()
            if "DLPack" in annotation or "ArrayT" in annotation or annotation == "KvScales"
        } | of_rope.get(op, set())
        given = {
            path[: 2 if path[0] == "rope" else 1]
            for name, call in calls().values()
            if name == op
            for path in arrays(call)
        }
        assert given == taken, f"{op}: no call in keyword_calls.py has {taken - given}"


@pytest.mark.parametrize("case", calls())
def test_results_are_what_the_stub_says(case):
    op, keywords = calls()[case]
    for call in variants(op, keywords):
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(getattr(fk, op)).parameters.items()
            if parameter.default is not parameter.empty
        }
        given = defaults | call
        matching = [o for o in stub()[op] if all(fits(a, given[name]) for name, a in annotations(o).items())]
        torch_kind = [o for o in matching if "NDArray" not in ast.unparse(o)]
        assert torch_kind, f"{op} has no overload for {call.keys()}"
        assert shape(getattr(fk, op)(**call)) == ast.unparse(torch_kind[0].returns), call.keys()


@pytest.mark.parametrize("op", OPS)
def test_the_stub_has_the_parameters(op):
    names = list(inspect.signature(getattr(fk, op)).parameters)
    for overload in stub()[op]:
        assert list(annotations(overload)) == names


# --- bindings/overloads.py


@functools.cache
def overloads() -> Any:
    path = HERE.parent / "bindings" / "overloads.py"
    spec = importlib.util.spec_from_file_location("overloads", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["overloads"] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def written_out(signature: str) -> list[str]:
    return [line.removesuffix(": ...") for line in overloads().Signature.parse(signature).overloads()]


def test_a_flag_becomes_three_overloads():
    assert written_out("def f(x: A, *, flag: bool = False) -> A, B if flag") == [
        "def f(x: A, *, flag: Literal[False] = False) -> A",
        "def f(x: A, *, flag: Literal[True]) -> tuple[A, B]",
        "def f(x: A, *, flag: bool = False) -> A | tuple[A, B]",
    ]


def test_an_optional_argument_becomes_two():
    assert written_out("def f(x: A, y: B | None, z: bool) -> tuple[A, B if y else None]") == [
        "def f(x: A, y: None, z: bool) -> tuple[A, None]",
        "def f(x: A, y: B, z: bool) -> tuple[A, B]",
    ]


def test_both_conditions_are_needed():
    lines = written_out("def f(y: B | None = None, *, flag: bool = True) -> tuple[A, B if y and flag]")
    assert lines == [
        "def f(y: None = None, *, flag: Literal[True] = True) -> tuple[A]",
        "def f(y: None = None, *, flag: Literal[False]) -> tuple[A]",
        "def f(y: B, *, flag: Literal[True] = True) -> tuple[A, B]",
        "def f(y: B, *, flag: Literal[False]) -> tuple[A]",
        "def f(y: None = None, *, flag: bool = True) -> tuple[A]",
        "def f(y: B, *, flag: bool = True) -> tuple[A | B, ...]",
    ]


def test_kinds_are_told_apart_where_the_result_has_one():
    assert overloads().kinds("def f(x: ArrayT, y: B) -> ArrayT") == [
        "def f(x: NDArray[Any], y: B) -> NDArray[Any]",
        "def f(x: TorchTensor[ArrayT], y: B) -> ArrayT",
        "def f(x: ArrayT, y: B) -> ArrayT",
    ]
    assert overloads().kinds("def f(x: ArrayT, y: B) -> None") == ["def f(x: SupportsDLPack, y: B) -> None"]


def test_a_docstring_goes_to_the_first_overload():
    doc = '    """\n    Says "what".\n    """\n'
    text = f"X = 1\n\ndef f(x: A, *, flag: bool = False) -> A, B if flag:\n{doc}\ndef g(): ...\n"
    assert (
        overloads()
        .expand(text)
        .startswith(
            "X = 1\n\n@overload\ndef f(x: A, *, flag: Literal[False] = False) -> A:\n"
            '    """\n    Says "what".\n    """\n\n@overload\ndef f(x: A, *, flag: Literal[True])'
        )
    )
    assert overloads().expand(text).endswith("\ndef g(): ...\n")
