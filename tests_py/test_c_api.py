"""The C API: it has every op, what is made from headers is up to date, and no call without arguments is taken."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flashkernel as fk
from flashkernel.ops import OPS

ROOT = Path(__file__).resolve().parents[1]
HEADERS = ROOT / "include" / "flashkernel"
if not (ROOT / "tools" / "c_api.py").is_file():
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)

from tools import c_api

API = c_api.c_api((HEADERS / "flashkernel_ops.h").read_text(encoding="utf-8"))
FUNCTIONS = {name: (kind, parameters) for kind, name, parameters in API.functions}


def test_what_is_made_from_headers_is_up_to_date() -> None:
    stale = [name for name, text in c_api.files().items()
             if not (ROOT / name).is_file() or (ROOT / name).read_text(encoding="utf-8") != text]  # fmt: skip
    assert not stale, "python -m tools.c_api"


@pytest.mark.parametrize("op", OPS)
def test_the_c_header_has_it(op: str) -> None:
    assert f"fk_{op}" in FUNCTIONS


def test_a_promised_function_neither_goes_nor_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool adds lines to the promise and takes none away. (The test above compares what it makes.)"""
    made = c_api.files()
    monkeypatch.setattr(c_api, "files", lambda: {c_api.PROMISED: made[c_api.PROMISED].replace("int64_t*", "int32_t*")})
    monkeypatch.setattr(sys, "argv", ["c_api"])
    with pytest.raises(SystemExit, match="lost what it promised"):
        c_api.main()


def test_every_declaration_is_found() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in HEADERS.glob("*.h"))
    assert text.count("\nFK_API ") == len(FUNCTIONS) > 90


def test_a_c_header_needs_no_other_language() -> None:
    for path in HEADERS.glob("*.h"):
        included = re.findall(r"#include [<\"]([^>\"]+)", path.read_text(encoding="utf-8"))
        assert {name for name in included if name.endswith(".hpp")} <= {"flashkernel/export.hpp"}
    export = (HEADERS / "export.hpp").read_text(encoding="utf-8")
    assert all(line.startswith(("#", "//")) for line in export.splitlines() if line)  # the preprocessor's alone


def library() -> ctypes.CDLL:
    """libflashkernel, as this process has it."""
    if sys.platform != "linux":
        pytest.skip("/proc is Linux's")
    fk.kernels()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    found = re.search(r"/\S*libflashkernel\.so\S*", maps)
    assert found
    lib = ctypes.CDLL(found[0])
    lib.fk_last_error_message.restype = lib.fk_version.restype = lib.fk_status_name.restype = ctypes.c_char_p
    return lib


ZEROS = {"float": ctypes.c_float(0), "double": ctypes.c_double(0), "int64_t": ctypes.c_int64(0),
         "uint64_t": ctypes.c_uint64(0), "size_t": ctypes.c_size_t(0), "uint32_t": ctypes.c_uint32(0)}  # fmt: skip


class Sequence(ctypes.Structure):
    _fields_ = (("slot", ctypes.c_uint32), ("generation", ctypes.c_uint32), ("cache", ctypes.c_uint64))


class Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


def zero(kind: str) -> object:
    if kind.endswith("*"):
        return ctypes.c_void_p(None)
    if kind in ("fk_sequence", "fk_device"):
        return (Sequence if kind == "fk_sequence" else Device)()
    return ZEROS.get(kind, ctypes.c_int32(0))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_without_arguments_is_refused_in_a_sentence(name: str) -> None:
    lib = library()
    kind, parameters = FUNCTIONS[name]
    function = getattr(lib, name)
    function.restype = None if kind == "void" else ctypes.c_void_p if kind.endswith("*") else ctypes.c_int64
    if kind != "fk_status":
        function(*(zero(parameter) for parameter, _ in parameters))  # nothing to say, and no crash
        return
    function.restype = ctypes.c_int32
    status = function(*(zero(parameter) for parameter, _ in parameters))
    assert lib.fk_status_name(status) == b"FK_INVALID_ARGUMENT"
    if name != "fk_last_error_details":
        message = lib.fk_last_error_message().decode()
        assert len(message) > 15 and not message.endswith("."), message


def test_versions_agree() -> None:
    lib = library()
    assert lib.fk_version().decode() == fk.__version__
    assert lib.fk_abi_version() == 1


EXAMPLE = re.compile(r"^```c\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(sys.platform != "linux", reason="it calls cc as Linux has it")
def test_the_pages_program_compiles_and_runs(tmp_path: Path) -> None:
    programs = EXAMPLE.findall((ROOT / "docs" / "c_api.md").read_text(encoding="utf-8"))
    assert len(programs) == 1
    (tmp_path / "page.c").write_text(programs[0], encoding="utf-8")
    library()
    found = re.search(r"/\S*libflashkernel\.so\S*", Path("/proc/self/maps").read_text(encoding="utf-8"))
    assert found
    flags = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT / 'include'}"]
    command = ["cc", *flags, "page.c", found[0], f"-Wl,-rpath,{Path(found[0]).parent}", "-o", "page"]
    subprocess.run(command, cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "page"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    refusal = "add: b is float32[2] on cpu but a is float32[4] on cpu; shapes must match"
    assert done.stdout == f"1.5 2.5 3.5 4.5\n{refusal}\n"
