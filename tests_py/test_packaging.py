"""The package as a user gets it: what it exports, what it needs, and a C++ project that builds against it."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import flashkernel as fk
from flashkernel import _C

ROOT = pathlib.Path(__file__).parent.parent
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")


def installed() -> bool:
    """Whether the package under test was installed; a build tree (PYTHONPATH=build/python) has no C++ side."""
    folders = [pathlib.Path(folder) for folder in fk.__path__]
    return any((folder / "lib" / "cmake" / "flashkernel").is_dir() for folder in folders)


def module(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "flashkernel", *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def loaded_library() -> pathlib.Path:
    maps = pathlib.Path("/proc/self/maps").read_text()
    return pathlib.Path(re.search(r"\S*/libflashkernel\.so\S*", maps)[0])


def symbols(path: pathlib.Path, *options: str) -> list[list[str]]:
    done = subprocess.run(["nm", "-D", *options, str(path)], capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines()]


def needed(path: pathlib.Path) -> set[str]:
    done = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True)
    return set(re.findall(r"\(NEEDED\).*\[([^]]+)\]", done.stdout))


def test_version():
    match = re.search(r"project\(flashkernel VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert fk.__version__ == match[1] == module("--version")
    if installed():
        assert importlib.metadata.version("flashkernel") == fk.__version__


@LINUX
@pytest.mark.skipif(not shutil.which("nm"), reason="needs nm of binutils")
def test_the_library_exports_its_api_only():
    for address, kind, name in symbols(loaded_library(), "--defined-only"):
        is_cpp = "11flashkernel" in name and not name.startswith("_ZNSt")
        assert is_cpp or re.fullmatch(r"fk_\w+", name), (address, kind, name)
    # Nothing from inside: params structs, kernels, pools of threads.
    names = " ".join(name for *_, name in symbols(loaded_library(), "--defined-only"))
    for inside in ("Params", "ThreadPool", "RowState", "avx512"):
        assert inside not in names


@LINUX
@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf of binutils")
def test_needs_no_framework_and_no_driver():
    system = r"lib(stdc\+\+|m|gcc_s|c|pthread|dl|rt)\.so.*|ld-linux.*"
    for name in needed(loaded_library()):
        assert re.fullmatch(system, name), name
    for name in needed(pathlib.Path(_C.__file__)):
        assert re.fullmatch(system + r"|libflashkernel\.so.*", name), name


@LINUX
@pytest.mark.skipif(not shutil.which("nm"), reason="needs nm of binutils")
def test_the_module_exports_its_entry_alone():
    names = {name.split("@")[0] for *_, name in symbols(pathlib.Path(_C.__file__), "--defined-only")}
    assert names == {"PyInit__C"}


@LINUX
@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf of binutils")
@pytest.mark.parametrize("which", ["library", "module"])
def test_the_binaries_are_hardened(which):
    """The files that Python loads, as they lie there now: installing rewrites their search paths, packers more."""
    path = loaded_library() if which == "library" else pathlib.Path(_C.__file__)
    done = subprocess.run(["readelf", "-lWd", str(path)], capture_output=True, text=True, check=True)
    assert re.search(r"GNU_STACK .* RW  ", done.stdout) and "GNU_RELRO" in done.stdout
    assert re.search(r"\(FLAGS\).*BIND_NOW|\(FLAGS_1\).*NOW", done.stdout)
    assert "TEXTREL" not in done.stdout
    folders = [
        folder for found in re.findall(r"\(R(?:UN)?PATH\).*\[(.*)\]", done.stdout) for folder in found.split(":")
    ]
    assert all(re.match(r"\$ORIGIN(/|$)", folder) for folder in folders), folders
    if which == "module" and installed():
        assert folders == ["$ORIGIN/lib"]


def bill_of_materials() -> dict:
    """The SBOM of the installed package; of a build tree, the one that it would install."""
    if installed():
        files = importlib.metadata.files("flashkernel")
        (path,) = [file.locate() for file in files if file.parts[-2:] == ("sboms", "flashkernel.cdx.json")]
        assert pathlib.Path(path).parent.parent.name == f"flashkernel-{fk.__version__}.dist-info"
    else:
        path = pathlib.Path(_C.__file__).parents[2] / "flashkernel.cdx.json"
    return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))


def test_the_bill_of_materials_says_what_is_inside():
    bill, build = bill_of_materials(), fk.build_info()
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", bill["serialNumber"])
    assert set(bill) <= {
        "$schema",
        "bomFormat",
        "specVersion",
        "serialNumber",
        "version",
        "metadata",
        "components",
        "dependencies",
    }
    root = bill["metadata"]["component"]
    assert (root["type"], root["name"], root["version"]) == ("library", "flashkernel", fk.__version__)
    assert root["purl"] == f"pkg:pypi/flashkernel@{fk.__version__}"
    license_field = re.search(
        r'^license = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert root["licenses"] == [{"expression": license_field[1]}]

    properties = {entry["name"]: entry["value"] for entry in root["properties"]}
    assert properties["flashkernel:cuda"] == ("ON" if build["cuda"] else "OFF")

    inside = {part["name"]: part for part in bill["components"]}
    assert set(inside) == {"nanobind"} | ({"cuda-runtime"} if build["cuda"] else set())
    for part in inside.values():
        assert part["type"] == "library" and re.fullmatch(r"\d+(\.\d+)+", part["version"]) and part["licenses"], part
    assert inside["nanobind"]["purl"] == f"pkg:pypi/nanobind@{inside['nanobind']['version']}"
    references = [part["bom-ref"] for part in bill["components"]]
    assert len(set(references)) == len(references) and root["bom-ref"] not in references
    assert bill["dependencies"] == [{"ref": root["bom-ref"], "dependsOn": references}]
    # The compiler that the module was built by, in the words of build_info: "GNU 12.2.0".
    tools = {tool["name"]: tool["version"] for tool in bill["metadata"]["tools"]["components"]}
    name, version = build["compiler"].split(" ", 1)
    assert tools[f"{name} C++ compiler"] == version and "CMake" in tools


@LINUX
@pytest.mark.skipif(not shutil.which("nm"), reason="needs nm of binutils")
def test_the_module_keeps_to_the_stable_abi():
    """abi3: no CPython function outside the limited API of 3.10 (spot checks of the usual trespassers)."""
    assert ".abi3." in _C.__file__
    undefined = {parts[-1] for parts in symbols(pathlib.Path(_C.__file__), "--undefined-only")}
    for trespasser in ("PyObject_Vectorcall", "PyObject_GetBuffer", "_PyObject_GetDictPtr", "PyUnicode_AsUTF8"):
        assert trespasser not in undefined


def test_typed():
    folder = pathlib.Path(_C.__file__).parent
    stub = (folder / "_C.pyi").read_text()
    assert "def attention(q: ArrayT, k: SupportsDLPack" in stub and any(
        (pathlib.Path(p) / "py.typed").exists() for p in fk.__path__
    )
    compile(stub, "_C.pyi", "exec")
    assert "import torch" not in stub


@pytest.mark.skipif(not installed(), reason="runs from a build tree; scripts/test.sh installs the package")
def test_cmake_finds_the_installed_package(tmp_path):
    """find_package through `python -m flashkernel --cmake-dir`, as a C++ user of the wheel would."""
    cmake = shutil.which("cmake")
    assert cmake, "the build dependencies (pip install --group build) include cmake"
    build = tmp_path / "build"
    options = [f"-Dflashkernel_DIR={module('--cmake-dir')}", "-DCMAKE_BUILD_TYPE=Release"]
    for command in (
        [cmake, "-S", str(ROOT / "tests_cpp" / "consumer"), "-B", str(build), *options],
        [cmake, "--build", str(build), "--config", "Release"],
        ["ctest", "--test-dir", str(build), "-C", "Release", "--output-on-failure"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (pathlib.Path(module("--include-dir")) / "flashkernel" / "attention.hpp").exists()
    points = importlib.metadata.entry_points(group="cmake.prefix")
    assert "flashkernel" in {point.value for point in points}
