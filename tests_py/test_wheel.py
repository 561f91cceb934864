"""The wheel for other people's machines: what it is linked against, what is in it, what an index is told about it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

import flashkernel as fk

ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"
pytestmark = pytest.mark.skipif(not SCRIPTS.is_dir(), reason="needs the source tree")
CXX = shlex.split(os.environ.get("CXX", "g++"))
MANYLINUX = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}  # of manylinux_2_28


def script(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPTS / name, *arguments]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True)


def too_new(library: pathlib.Path) -> set[str]:
    """The versions of symbols which a library asks for and the oldest system lacks."""
    text = subprocess.run(["readelf", "-VW", library], capture_output=True, text=True, check=True).stdout
    asked = re.findall(r"Name: ((GLIBC|GLIBCXX|CXXABI)_([0-9.]+)) ", text)
    return {name for name, kind, number in asked if tuple(map(int, number.split("."))) > MANYLINUX[kind]}


# Needs functions whose newest version is newer than glibc 2.28 or GCC 8 (log, pthread_join, condition_variable::wait,
# bad_array_new_length) and, in newer libraries of C++, __libc_single_threaded and counts of exception_ptr.
SOURCE = r"""
#include <cmath>
#include <condition_variable>
#include <exception>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>
extern "C" __attribute__((visibility("default"))) int answer(double x, int n) {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::exception_ptr error;
  auto shared = std::make_shared<std::vector<double>>(n, std::log(x));
  std::thread other([&, shared] {
    try {
      if (shared->at(0) != 0.0) throw std::runtime_error("not 1");
      delete[] new double[n];
    } catch (...) { error = std::current_exception(); }
    while (!mutex.try_lock()) {}
    const std::lock_guard<std::mutex> lock(mutex, std::adopt_lock);
    done = true;
    changed.notify_all();
  });
  {
    std::unique_lock<std::mutex> lock(mutex);
    while (!done) changed.wait(lock);
  }
  other.join();
  try {
    if (error) std::rethrow_exception(error);
  } catch (const std::exception&) { return -1; }
  return n;
}
"""


@pytest.fixture(scope="module")
def old_libraries(tmp_path_factory) -> pathlib.Path:
    if sys.platform != "linux" or not all(map(shutil.which, [CXX[0], "readelf", "ar"])):
        pytest.skip("needs Linux, GCC and binutils")
    folder = tmp_path_factory.mktemp("old")
    done = script("old_libraries.py", folder)
    assert done.returncode == 0, done.stderr
    return folder


def link(folder: pathlib.Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "a.cpp").write_text(source)
    command = [*CXX, "-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "a.cpp", "-o", "a.so", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_what_is_linked_against_old_libraries_asks_for_nothing_newer(old_libraries, tmp_path):
    options = [f"-L{old_libraries}", "-Wl,-z,defs", "-pthread", "-lm"]
    done = link(tmp_path, SOURCE, *options)
    assert done.returncode == 0, done.stderr
    assert too_new(tmp_path / "a.so") == set()
    needed = subprocess.run(["readelf", "-d", tmp_path / "a.so"], capture_output=True, text=True, check=True).stdout
    assert "[libstdc++.so.6]" in needed and "[libc.so.6]" in needed  # shared with the rest of the process
    assert "[libpthread.so.0]" in needed  # where threads were until glibc 2.34
    # It runs here, on the newer libraries.
    library = ctypes.CDLL(str(tmp_path / "a.so"))
    library.answer.argtypes = (ctypes.c_double, ctypes.c_int)
    assert library.answer(1.0, 7) == 7 and library.answer(2.0, 7) == -1


def test_readers_of_numbers_of_newer_headers_are_the_old_ones(old_libraries, tmp_path):
    """What `std::strtol` and `std::stoi` become where the headers are of glibc 2.38 or later."""
    names = {"strtol": "long", "strtoll": "long long", "strtoul": "unsigned long", "strtoull": "unsigned long long"}
    source = "".join(
        f'extern "C" {kind} __isoc23_{name}(const char*, char**, int);\n'
        f'extern "C" __attribute__((visibility("default"))) {kind} read_{name}(const char* text) '
        f"{{ return __isoc23_{name}(text, nullptr, 10); }}\n"
        for name, kind in names.items()
    )
    library = tmp_path / "a.so"
    done = link(tmp_path, source, f"-L{old_libraries}", "-Wl,-z,defs")
    assert done.returncode == 0, done.stderr
    assert not too_new(library)
    loaded = ctypes.CDLL(str(library))
    for name, kind in names.items():
        function = getattr(loaded, f"read_{name}")
        function.restype = ctypes.c_ulonglong if "unsigned" in kind else ctypes.c_longlong
        assert function(b"1234567890123") == 1234567890123


def test_a_function_that_the_old_library_lacks_fails_the_link(old_libraries, tmp_path):
    lacking = 'extern "C" int pidfd_getpid(int); int f() { return pidfd_getpid(3); }'  # glibc 2.39
    newer = 'extern "C" unsigned gettid(); unsigned f() { return gettid(); }'  # glibc 2.30
    for source in (lacking, newer):
        done = link(tmp_path, source, f"-L{old_libraries}", "-Wl,-z,defs")
        assert done.returncode != 0 and "undefined reference" in done.stderr


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("readelf"), reason="reads ELF files")
def test_a_manylinux_wheel_keeps_its_word():
    """What is installed here, where that is a manylinux wheel; a build for this machine promises nothing."""
    try:
        tags = importlib.metadata.distribution("flashkernel").read_text("WHEEL") or ""
    except importlib.metadata.PackageNotFoundError:
        tags = ""
    if "manylinux_2_28" not in tags:
        pytest.skip("not from a manylinux wheel")
    for folder in map(pathlib.Path, fk.__path__):
        for library in folder.rglob("*.so"):
            assert too_new(library) == set(), library


def check_lean(sizes: dict[str, int]) -> None:
    """The files of a wheel, name to size: the package and nothing else, and no part of it has grown unseen."""
    package = {name: size for name, size in sizes.items() if name.startswith("flashkernel/") and ".pyc" not in name}
    others = {name for name in sizes if not name.startswith("flashkernel/")}
    assert all(
        re.match(r"(\.\./)*(flashkernel-[^/]+\.dist-info/|bin/flashkernel$|Scripts/)", name) for name in others
    ), others
    kinds = {
        "libraries": (r".*\.(so|dll|dylib|pyd)(\.[0-9.]+)?$|.*\.lib$", 80_000),
        "python": (r".*\.pyi?$", 2_100),
        "headers": (r"flashkernel/include/.*\.h(pp)?$", 500),
        "pkg-config": (r"flashkernel/lib/pkgconfig/flashkernel\.pc$", 10),
        "cmake": (r"flashkernel/lib/cmake/.*\.cmake$", 50),
        "page": (r"flashkernel/serve/.*\.(html|css|js|svg)$|flashkernel/py\.typed$", 300),
    }
    held = dict.fromkeys(kinds, 0)
    for name, size in package.items():
        kind = next((kind for kind, (pattern, _) in kinds.items() if re.match(pattern, name)), None)
        assert kind, f"{name} is of no kind that a user needs"
        assert not re.search(r"/(tests?|lab|tools|emulator|bench_results|__pycache__)/", name), name
        held[kind] += size
    for kind, (_, most) in kinds.items():
        assert held[kind] <= most * 1000, f"{kind}: {held[kind]} bytes, {most} KB are the most"
    assert held["libraries"] and held["python"] and held["headers"] and held["cmake"]


def test_the_package_is_lean():
    try:
        files = importlib.metadata.files("flashkernel")
    except importlib.metadata.PackageNotFoundError:
        files = None
    if not files:
        pytest.skip("runs from a build tree; scripts/test.sh installs the package")
    check_lean({file.as_posix(): pathlib.Path(file.locate()).stat().st_size for file in files})
    good = {f"flashkernel/{name}": 1 for name in ("a.py", "lib/x.so", "include/x.hpp", "lib/cmake/x.cmake")}
    check_lean(good)
    for bad in (
        "flashkernel/models/gpt2/model.safetensors",
        "flashkernel/tests/a.py",
        "flashkernel/notes.md",
        "tests_py/a.py",
        "lab/x.json",
    ):
        with pytest.raises(AssertionError):
            check_lean({**good, bad: 1})


@pytest.mark.timeout(3600)
@pytest.mark.skipif(os.environ.get("FLASHKERNEL_CI") != "full", reason="builds the library anew: FLASHKERNEL_CI=full")
def test_the_script_makes_a_wheel_that_works(tmp_path):
    environment = {**os.environ, "WHEEL_DIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", SCRIPTS / "build_wheel.sh", "--cpu"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    (wheel,) = tmp_path.glob("flashkernel-*.whl")
    assert "cp310-abi3" in wheel.name and f"{wheel.name} works" in done.stdout
    if sys.platform == "linux":
        assert "manylinux_2_28" in wheel.name
        (oldest,) = re.findall(r'platform tag:\s+"manylinux_2_(\d+)_', done.stdout)  # auditwheel show
        assert int(oldest) <= 28
    shutil.unpack_archive(wheel, tmp_path / "in", "zip")
    inside = [path for path in (tmp_path / "in").rglob("*") if path.is_file()]
    if sys.platform == "linux":
        assert set().union(*(too_new(path) for path in inside if path.suffix == ".so")) == set()
    check_lean({path.relative_to(tmp_path / "in").as_posix(): path.stat().st_size for path in inside})


URL = "https://github.com/someone/flashkernel"


@pytest.fixture
def checkout(tmp_path) -> pathlib.Path:
    """The files that a release changes; README's links lead to what is beside them."""
    for name in ("README.md", "pyproject.toml", "CMakeLists.txt", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        place = tmp_path / target
        if (ROOT / target).is_dir():
            place.mkdir(parents=True, exist_ok=True)
        elif not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
    return tmp_path


def test_an_index_gets_addresses_and_links_that_lead_somewhere(checkout):
    before = (checkout / "README.md").read_text(encoding="utf-8")
    tag = f"v{fk.__version__}"
    done = script("release_metadata.py", URL, tag, "--root", checkout)
    assert done.returncode == 0, done.stderr
    readme = (checkout / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", readme)
    assert len(targets) == len(re.findall(r"\]\(([^)\s]+)\)", before)) > 20
    for target in targets:
        assert re.match(r"https?://", target), target
        if target.startswith(URL):
            kind, path = re.fullmatch(rf"{URL}/(\w+)/{re.escape(tag)}/([^#]+)(?:#.*)?", target).groups()
            assert kind == ("raw" if path.endswith(".svg") else "tree" if (ROOT / path).is_dir() else "blob"), target
            assert (ROOT / path).exists(), path
    code = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    assert code.findall(readme) == code.findall(before)

    pyproject = (checkout / "pyproject.toml").read_text(encoding="utf-8")
    if sys.version_info >= (3, 11):
        import tomllib

        urls = tomllib.loads(pyproject)["project"]["urls"]
        assert urls["Homepage"] == URL and urls["Changelog"] == f"{URL}/blob/{tag}/CHANGELOG.md"
    assert script("release_metadata.py", URL, tag, "--root", checkout).returncode != 0  # not twice


def test_a_release_is_of_its_tag_and_has_notes(checkout):
    done = script("release_metadata.py", URL, "v99.0", "--root", checkout)
    assert done.returncode != 0 and f"the tag is v99.0; CMakeLists.txt's version wants v{fk.__version__}" in done.stderr
    notes = checkout / "notes.md"
    arguments = (URL, f"v{fk.__version__}", "--root", checkout, "--notes", notes)
    changelog = checkout / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\n## [Unreleased]\n\n- new\n")
    assert "has no section" in script("release_metadata.py", *arguments).stderr
    changelog.write_text(
        f"# Changelog\n\n## [Unreleased]\n\n- new\n\n## [{fk.__version__}] - 2026\n\n- this\n\n## [0.0.1]\n\n- old\n"
    )
    assert script("release_metadata.py", *arguments).returncode == 0
    assert notes.read_text() == "- this\n"
