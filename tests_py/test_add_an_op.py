"""docs/add-an-op.md, followed to the letter: its edits are made to a copy of the sources, which then compile and run.

Only what an edit changes is compiled; it is linked with the other objects of a build folder of these sources: the one
that this package lies in, or the newest under build/, where the package was installed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

import flashkernel as fk

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "add-an-op.md"
MOST_FILES = 8

if not PAGE.is_file():
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)


class Edit(NamedTuple):
    path: str
    where: str  # "after", "before", or "" for a new file
    anchor: str  # a whole line
    text: str


def edits(part: str) -> list[Edit]:
    """The edits that a part of the page asks for: `file`[, after|before `line`]: a sentence, then a block of code."""
    pattern = re.compile(
        r"^(?:\d+\. )?`(?P<path>[^`\n]+)`(?:, (?P<where>after|before) `(?P<anchor>[^`\n]+)`)?:(?P<said>(?:(?!```).)*?)"
        r"\n\n```\w+\n(?P<text>.*?)^```$",
        re.MULTILINE | re.DOTALL,
    )
    found = [Edit(m["path"], m["where"] or "", m["anchor"] or "", m["text"]) for m in pattern.finditer(part)]
    assert len(found) == part.count("```") // 2, "a block of code without a file's name before it"
    return found


def parts() -> tuple[list[Edit], list[Edit]]:
    """The edits of the op's own files, and those of its kernels."""
    page = PAGE.read_text(encoding="utf-8")
    own = page[page.index("### Its eight files") : page.index("### Its kernels")]
    return edits(own), edits(page[page.index("### Its kernels") : page.index("### Then")])


def apply(edit: Edit, root: Path) -> None:
    path = root / edit.path
    if not edit.where:
        assert not path.exists(), f"{edit.path} is there already"
        path.write_text(edit.text, encoding="utf-8")
        return
    lines = path.read_text(encoding="utf-8").split("\n")
    at = [i for i, line in enumerate(lines) if line.strip() == edit.anchor.strip()]
    assert at, f"{edit.path} has no line {edit.anchor!r}"
    i = at[0] + 1 if edit.where == "after" else at[-1]
    if edit.anchor[:1].strip():  # the page shows the line as at the margin; the block may stand deeper
        depth = len(lines[at[0]]) - len(lines[at[0]].lstrip())
        text = textwrap.indent(edit.text, " " * depth)
    else:
        text = edit.text
    path.write_text("\n".join([*lines[:i], *text.removesuffix("\n").split("\n"), *lines[i:]]), encoding="utf-8")


def test_an_op_touches_few_files() -> None:
    own, kernels = parts()
    assert len({edit.path for edit in own}) <= MOST_FILES
    page = PAGE.read_text(encoding="utf-8")
    numbered = re.findall(r"^\d+\. `([^`]+)`", page[page.index("### Its eight files") :], re.MULTILINE)
    assert numbered == list(dict.fromkeys(edit.path for edit in own))
    assert not {edit.path for edit in own} & {edit.path for edit in kernels}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with the page's edits."""
    root = tmp_path_factory.mktemp("op")
    for folder in ("include", "src", "bindings", "python", "tests_py", "tests_cpp", "tools", "docs"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "models", "target"))
    for edit in (edit for part in parts() for edit in part):
        apply(edit, root)
    subprocess.run([sys.executable, "-m", "tools.c_api"], cwd=root, check=True)  # the C API follows from the headers
    return root


def build_folder() -> tuple[Path, str] | None:
    """A folder where Ninja has built the module from these sources, and that Ninja."""
    found = []
    for folder in {
        Path(fk.__file__).absolute().parents[2],
        *(ROOT / "build").glob("*/"),
    }:  # build/dev/python/flashkernel
        module, cache = folder / "python" / "flashkernel" / "_C.abi3.so", folder / "CMakeCache.txt"
        if module.is_file() and cache.is_file() and (folder / "build.ninja").is_file():
            values = dict(re.findall(r"^(\w+):\w+=(.*)$", cache.read_text(encoding="utf-8"), re.MULTILINE))
            if values["CMAKE_HOME_DIRECTORY"] == str(ROOT) and Path(values["CMAKE_MAKE_PROGRAM"]).is_file():
                found.append((module.stat().st_mtime, folder, values["CMAKE_MAKE_PROGRAM"]))
    return max(found)[1:] if found else None


class Compiler:
    """Compiles files of the copy as the build compiles those of the original, into objects beside the build's own."""

    def __init__(self, root: Path, build: Path, ninja: str) -> None:
        self.root, self.build = root, build
        listed = subprocess.run([ninja, "-C", build, "-t", "compdb"], capture_output=True, text=True, check=True)
        database = json.loads(listed.stdout)
        self.links = {entry["output"]: entry["command"] for entry in database}
        linked = {word for output, command in self.links.items() if ".so" in output for word in command.split()}
        self.linked = linked
        sources = [entry for entry in database if entry["file"].endswith(".cpp")]
        # A file that a test program compiles, too, in its own way: what the library is made of comes last.
        self.commands = {entry["file"]: entry for entry in sorted(sources, key=lambda e: e["output"] in linked)}
        self.objects: dict[str, Path] = {}  # the build's objects that are made anew

    def is_linked(self, path: str) -> bool:
        """Whether a file is part of a library; a test program may have it besides."""
        entry = self.commands.get(str(ROOT / path))
        return entry is not None and entry["output"] in self.linked

    def compile(self, path: str, like: str | None = None) -> Path:
        entry = self.commands[str(ROOT / (like or path))]
        new = self.root / "objects" / (path.replace("/", "_") + ".o")
        new.parent.mkdir(exist_ok=True)
        words = shlex.split(entry["command"])
        sources = {str(ROOT / (like or path)): str(self.root / path), entry["output"]: str(new)}
        for folder in ("include", "src", "bindings"):
            sources |= {f"-I{ROOT / folder}": f"-I{self.root / folder}"}
        while any(word.endswith("cmake_pch.hxx") for word in words):  # made of the original's headers
            at = next(i for i, word in enumerate(words) if word.endswith("cmake_pch.hxx"))
            del words[at - 1 : at + 1]  # -include and its file
        words = [sources.get(word, word) for word in words]
        words[words.index("-MF") + 1] = f"{new}.d"
        subprocess.run([word for word in words if word != "-O3"] + ["-O1"], cwd=self.build, check=True)
        if like is None:
            self.objects[entry["output"]] = new
        return new

    def link(self, output: str, to: Path, more: list[Path]) -> None:
        command = self.links[output].split(" && ")[1]  # CMake writes ": && the command && :"
        words = [str(self.objects.get(word, word)) for word in shlex.split(command)]
        words[words.index("-o") + 1] = str(to)
        subprocess.run([*words, *map(str, more)], cwd=self.build, check=True)


def test_the_op_of_the_page_compiles_and_runs(tree: Path) -> None:
    found = build_folder()
    if found is None or sys.platform != "linux":
        pytest.skip("Ninja has not built these sources on Linux")
    make = Compiler(tree, *found)
    new = [
        make.compile("src/ops/scale.cpp", like="src/ops/elementwise.cpp"),
        make.compile("src/cpu/scalar/scale.cpp", like="src/cpu/scalar/elementwise.cpp"),
    ]
    table = next(f"src/{folder}/kernels.cpp" for folder in ("no_cuda", "cuda")
                 if make.is_linked(f"src/{folder}/kernels.cpp"))  # fmt: skip
    for path in ("src/c/ops.cpp", "src/ops/op_list.cpp", "src/ops/registry.cpp", "src/cpu/kernels.cpp", table):
        make.compile(path)
    cases = "tests_cpp/conformance/elementwise_cases.cpp"
    if str(ROOT / cases) in make.commands:  # a build without tests has no GoogleTest
        make.compile("tests_cpp/conformance/scale_cases.cpp", like=cases)
    bound = make.compile("bindings/bind_scale.cpp", like="bindings/bind_elementwise.cpp")

    package = tree / "python" / "flashkernel"
    library = next(name for name in make.links if re.fullmatch(r"libflashkernel\.so[\d.]*", name))
    soname = re.search(r"-soname,([^\s]+)", make.links[library])
    assert soname
    make.link(library, tree / soname[1], new)
    make.objects[library] = tree / soname[1]
    module = next(name for name in make.links if name.endswith("/_C.abi3.so"))
    make.link(module, package / "_C.abi3.so", [bound])

    environment = {**os.environ, "PYTHONPATH": str(package.parent), "LD_LIBRARY_PATH": str(tree)}
    program = (
        "import flashkernel as fk, numpy as np; from flashkernel.selfcheck import check_kernel; "
        "row = next(k for k in fk.kernels() if k.op == 'scale'); result = check_kernel(row); "
        "assert result.passed, result; assert 'scale' in fk.__all__; "
        "print(fk.__file__, fk.explain('scale', np.ones(3, np.float32), 2.0).kernel)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(package / "__init__.py"), "scale/cpu/scalar"]
    held = "test_scale.py", "test_op_tables.py", "test_calls.py", "test_doctests.py", "test_c_api.py"
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "scale or every_op or no_other"]
    done = subprocess.run(
        [*tests, *held], cwd=tree / "tests_py", env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
