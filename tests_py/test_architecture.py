"""The include law, file sizes and naming rules of docs/architecture.md, checked on the source text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "src" / "ops").is_dir():
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)

CXX = {".cpp", ".hpp", ".cu", ".cuh", ".h"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


def sources(*folders: str, suffixes: set[str] = CXX) -> list[Path]:
    found = []
    for folder in folders:
        found += [p for p in sorted((ROOT / folder).rglob("*")) if p.suffix in suffixes and p.is_file()]
    return found


def includes(path: Path) -> list[str]:
    return INCLUDE.findall(path.read_text(encoding="utf-8"))


# Which of the project's own folders a folder may include from. The longest matching key counts.
# `core` is below everything; params structs, `ops/kernel_entry.hpp` and plans are the contract of ops and backends.
OPS_CONTRACT = re.compile(r"ops/(\w+_params|kernel_entry|(\w+_)?plan|params_common)\.hpp")
# Headers directly in src/cpu declare what the folders below it share; they include no folder.
CPU_SHARED = re.compile(r"cpu/\w+\.hpp")
LAW: dict[str, tuple[str, ...]] = {
    "include": ("flashkernel/",),
    "bindings": ("flashkernel/", "bindings/"),
    "src/c": ("flashkernel/", "c/"),  # the C API sees what every user sees
    "src/core": ("flashkernel/", "core/"),
    "src/memory": ("flashkernel/", "core/", "memory/"),
    "src/ops": ("flashkernel/", "core/", "ops/"),
    "src/no_cuda": ("flashkernel/", "core/", "memory/device_resources.hpp", "OPS"),
    "src/cpu": ("flashkernel/", "core/", "OPS", "cpu/"),
    "src/cpu/scalar": ("flashkernel/", "core/", "OPS", "cpu/scalar/"),
    "src/cpu/simd": ("flashkernel/", "core/", "OPS", "cpu/simd/"),
    "src/cpu/avx2": ("flashkernel/", "core/", "OPS", "CPU", "cpu/simd/", "cpu/avx2/"),
    "src/cpu/avx512": ("flashkernel/", "core/", "OPS", "CPU", "cpu/simd/", "cpu/avx512/"),
    "src/cpu/avx512_vnni": ("flashkernel/", "core/", "OPS", "CPU", "cpu/simd/", "cpu/avx512_vnni/"),
    "src/cpu/amx": ("flashkernel/", "core/", "OPS", "CPU", "cpu/simd/", "cpu/amx/"),
    "src/cuda": ("flashkernel/", "core/", "OPS", "cuda/", "memory/device_resources.hpp"),
    "src/cuda/ptx": ("cuda/ptx/",),
    "src/cuda/tile": ("flashkernel/", "OPS", "cuda/ptx/", "cuda/tile/"),
    "src/cuda/host": ("flashkernel/", "core/", "OPS", "cuda/host/"),
    "src/cuda/pipeline": ("flashkernel/", "core/", "OPS", "cuda/ptx/", "cuda/tile/", "cuda/host/", "cuda/pipeline/"),
}
# A folder of kernels is an op's: beside what all ops share it includes its own files alone.
SHARED_BY_OPS = (
    "flashkernel/",
    "core/",
    "OPS",
    "cuda/costs.hpp",
    "cuda/row_costs.hpp",
    "cuda/ptx/",
    "cuda/tile/",
    "cuda/host/",
    "cuda/pipeline/",
)
SHARED_FOLDERS = ("ptx", "tile", "host", "pipeline")
LAW |= {
    f"src/cuda/{op.name}": (*SHARED_BY_OPS, f"cuda/{op.name}/")
    for op in sorted((ROOT / "src" / "cuda").iterdir())
    if op.is_dir() and op.name not in SHARED_FOLDERS
}
OWN_PREFIXES = ("flashkernel/", "c/", "core/", "ops/", "cpu/", "cuda/", "memory/", "bindings/", "no_cuda/")


def law_of(path: Path) -> tuple[str, ...]:
    if path.name == "cuda_resource.cpp":  # the one file of src/memory that uses CUDA
        return (*LAW["src/memory"], "cuda/host/")
    folder = path.relative_to(ROOT).parent.as_posix()
    while folder not in LAW:
        assert "/" in folder, f"no include law for {path}"
        folder = folder.rsplit("/", 1)[0]
    return LAW[folder]


ARCH = re.compile(r"/(sm\d+a?)/")


# Which name every row, and what kinds of rows there are.
TABLE = ("src/cuda/kernels.cpp", "src/cuda/float8_kernels.cpp", "src/cuda/fused_kernels.cpp", "src/cuda/rows.hpp")


def crosses_archs(path: str, include: str) -> bool:
    """Whether a file for one architecture, or for all of them, includes what is for another one."""
    theirs = ARCH.search(f"/{include}")
    own = ARCH.search(path)
    return theirs is not None and path not in TABLE and (own is None or own[1] != theirs[1])


def allowed(include: str, law: tuple[str, ...]) -> bool:
    contracts = {"OPS": re.compile(OPS_CONTRACT.pattern + r"|ops/op_list\.hpp"), "CPU": CPU_SHARED}
    return any(
        contracts[rule].fullmatch(include) is not None if rule in contracts else include.startswith(rule)
        for rule in law
    )


def test_include_law() -> None:
    broken = [
        f"{path.relative_to(ROOT)} includes {include}"
        for path in sources("include", "src", "bindings")
        for include in includes(path)
        if include.startswith(OWN_PREFIXES) and not allowed(include, law_of(path))
    ]
    assert not broken, "\n".join(broken)


def test_no_arch_includes_another() -> None:
    broken = [
        f"{path.relative_to(ROOT)} includes {include}"
        for path in sources("src/cuda")
        for include in includes(path)
        if crosses_archs(path.relative_to(ROOT).as_posix(), include)
    ]
    assert not broken, "\n".join(broken)
    tables = {path.relative_to(ROOT).as_posix() for path in sources("src/cuda") if "cuda/rows.hpp" in includes(path)}
    assert tables == {path for path in TABLE if path.endswith(".cpp")}
    assert crosses_archs("src/cuda/attention/decode/sm90a/a.cuh", "cuda/attention/decode/sm80/b.cuh")
    assert crosses_archs("src/cuda/attention/plain.cuh", "cuda/attention/decode/sm80/b.cuh")
    assert not crosses_archs("src/cuda/attention/decode/sm90a/a.cuh", "cuda/attention/forward/sm90a/b.cuh")


def test_each_name_of_an_op_and_arch_means_one_thing() -> None:
    """A constant, class or function of a namespace is defined once among the files of that namespace."""
    space = re.compile(r"^namespace (flashkernel::cuda[\w:]*) \{$", re.MULTILINE)
    named = re.compile(
        r"^(?:inline )?constexpr [\w:]+(?: \w+)? (k[A-Z]\w*)(?:\[\])? ?[={]"
        r"|^(?:struct|class|enum class) (?:alignas\([^)]*\) )?(\w+)[^;\n]*\{$",
        re.MULTILINE,
    )
    where: dict[tuple[str, str], set[str]] = {}
    for path in sources("src/cuda", suffixes={".hpp", ".cuh"}):
        text = path.read_text(encoding="utf-8")
        for at in space.finditer(text):
            end = text.index(f"}}  // namespace {at[1]}", at.end())
            for found in named.finditer(text, at.end(), end):
                where.setdefault((at[1], found[1] or found[2]), set()).add(path.relative_to(ROOT).as_posix())
    twice = {name: files for name, files in where.items() if len(files) > 1}
    assert len(where) > 200 and not twice, twice


def test_the_law_can_fail() -> None:
    assert not allowed("cpu/avx2/kernels.hpp", LAW["src/cpu/avx512"])
    assert not allowed("cpu/scalar/element.hpp", LAW["src/cpu/amx"])
    assert not allowed("ops/select.hpp", LAW["src/cpu"])
    assert not allowed("cuda/linear/epilogue.cuh", LAW["src/cuda/attention"])
    assert not allowed("cuda/attention/limits.hpp", LAW["src/cuda/pipeline"])
    assert allowed("ops/attention_params.hpp", LAW["src/cpu/scalar"])


def test_cuda_headers_stay_in_the_cuda_backend() -> None:
    broken = [
        f"{path.relative_to(ROOT)} includes {include}"
        for path in sources("include", "src", "bindings")
        for include in includes(path)
        if include.startswith(("cuda", "cub/", "cooperative_groups"))
        and not include.startswith("cuda/")
        and "src/cuda/" not in path.as_posix()
        and path.name != "cuda_resource.cpp"
    ]
    assert not broken, "\n".join(broken)


def test_no_framework_headers() -> None:
    broken = [
        f"{path.relative_to(ROOT)} includes {include}"
        for path in sources("include", "src", "bindings")
        for include in includes(path)
        if include.startswith(("torch/", "ATen/", "c10/", "cutlass/", "cute/"))
        or (include == "Python.h" or include.startswith(("nanobind/", "dlpack/")))
        and "/bindings/" not in path.as_posix()
    ]
    assert not broken, "\n".join(broken)


def test_public_headers_are_plain() -> None:
    for path in sources("include"):
        text = path.read_text(encoding="utf-8")
        assert "#pragma once" in text, path
        assert "__global__" not in text and "PyObject" not in text, path


def test_asm_only_where_one_function_is_one_instruction() -> None:
    pattern = re.compile(r"\b(asm|__asm__)\b\s*(volatile|__volatile__)?\s*\(")
    # Not yet known to every compiler that we build with; goes when GCC 12 does.
    stand_ins = {"src/cpu/amx/tdpfp16ps.hpp"}
    broken = [
        path.relative_to(ROOT).as_posix()
        for path in sources("include", "src", "bindings")
        if pattern.search(path.read_text(encoding="utf-8")) and "src/cuda/ptx/" not in path.as_posix()
    ]
    assert set(broken) <= stand_ins, broken


MOST_LINES = 600
WRITTEN = {*CXX, ".c", ".py", ".rs", ".cmake", ".txt", ".sh", ".yml"}  # .txt: CMakeLists


# ptxas of CUDA 12.9 and 13.0 gives max(0, min(a, b)) == b the machine code of max(0, min(a, b)) == a on 9.0 and later.
# KeyWindow::last is such an expression; KeyWindow::sees_last_key asks without it.
CLAMP_COMPARED = re.compile(r"\blast\([^;&|?]*\) *[=!]=|[=!]= *[\w.]*\blast\(|max\(0, *m(in|ax)\([^;&|?]*\)\) *[=!]=")


def test_no_clamped_number_is_compared_with_its_bound() -> None:
    for bad in ("range.last(at.query) == range.k_len", "k_len != range.last(i)", "max(0, min(a, b)) == b"):
        assert CLAMP_COMPARED.search(bad)
    found = []
    for path in sources("src/cuda"):
        code = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in CLAMP_COMPARED.finditer(code)]
    assert not found, found


def test_files_are_short() -> None:
    folders = ("include", "src", "bindings", "python", "emulator", "tests_cpp", "tests_py", "tools", "scripts")
    files = sources(*folders, "cmake", "examples", ".github", suffixes=WRITTEN)
    assert len(files) > 900
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    # What a tool writes from other files is as long as they make it.
    lines = {name: text.count("\n") for name, text in texts.items() if "Made by tools/" not in text[:200]}
    too_long = {name: count for name, count in lines.items() if count > MOST_LINES}
    assert not too_long, f"over {MOST_LINES} lines: {too_long}"


def test_files_say_what_they_are() -> None:
    for path in sources("include", "src", "bindings", "emulator", "tests_cpp") + sources(
        "python", "tools", suffixes={".py"}
    ):
        first = path.read_text(encoding="utf-8").lstrip()[:3]
        assert first.startswith(("//", '"""', 'r"""', "#")), f"{path.relative_to(ROOT)} does not open with what it is"


def test_at_most_ten_macros_and_all_begin_with_fk() -> None:
    defined = set()
    for path in sources("include", "src", "bindings"):
        defined |= set(re.findall(r"^\s*#\s*define\s+(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    foreign = {name for name in defined if not name.startswith(("FK_", "FLASHKERNEL_VERSION_"))}
    assert not foreign, foreign
    assert len([name for name in defined if name.startswith("FK_")]) <= 10, sorted(defined)


def test_fork_finds_every_mutex_and_no_initialiser_half_way() -> None:
    """core/fork_safe.hpp says why. The thread pool is the exception: a child makes a new one."""
    mutex = re.compile(r"\bstd::(\w*mutex|call_once|once_flag)\b")
    # A static inside a function, but for what is there before any code runs.
    plain = r"(?!constexpr|thread_local|MadeOnce|std::atomic<[^;]*>\s*\w+\{(?:nullptr|-?\d+)\})"
    value = r"(?: = (?!nullptr|false|true|-?\d)|\{)"
    first_use = re.compile(rf"^\s+static {plain}(?:const |auto |[\w:<>, *&]+ )[\w*& ]*\w+{value}", re.MULTILINE)
    broken = []
    for path in sources("src"):
        name, text = path.relative_to(ROOT).as_posix(), re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        if name not in ("src/core/fork_safe.hpp", "src/core/fork_safe.cpp", "src/core/thread_pool.cpp"):
            broken += [f"{name}: {match[0]}" for match in mutex.finditer(text)]
        broken += [f"{name}: {match[0].strip()}" for match in first_use.finditer(text) if "(" not in match[0]]
    assert not broken, "\n".join(broken)
    for bad in ("  static const auto x = f();", "  static std::map<int, int>& x = *new int;", "  static T x{f()};"):
        assert first_use.search(bad), bad


def test_nothing_in_the_library_prints_or_exits() -> None:
    pattern = re.compile(r"\b(std::cout|std::cerr|printf|fprintf|std::exit|std::abort|abort|exit)\s*(<<|\()")
    broken = [
        str(path.relative_to(ROOT))
        for path in sources("include", "src", "bindings")
        if pattern.search(re.sub(r"//.*", "", path.read_text(encoding="utf-8")))
    ]
    assert not broken, broken


# --- the Python package imports in one direction

PACKAGE = ROOT / "python" / "flashkernel"
IMPORT_KINDS = ("module", "typing", "function")  # at import, under TYPE_CHECKING, inside a function


def module_names(package: Path) -> dict[str, Path]:
    names = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports_of(name: str, path: Path, known: set[str]) -> dict[str, set[str]]:
    """The modules of `known` that a module imports, by the kind of place where it does."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: dict[str, set[str]] = {kind: set() for kind in IMPORT_KINDS}

    def targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            return
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base

    def walk(node: ast.AST, kind: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                found[kind] |= {target for target in targets(child) if target in known and target != name}
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                walk(child, "function")
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                walk(child, "typing")
            else:
                walk(child, kind)

    walk(ast.parse(path.read_text(encoding="utf-8")), "module")
    return found


def import_graph(package: Path, kinds: tuple[str, ...]) -> dict[str, set[str]]:
    names = module_names(package)
    known = {*names, f"{package.name}._C"}  # the compiled module imports none of the package's
    graph = {f"{package.name}._C": set[str]()}
    for name, path in names.items():
        found = imports_of(name, path, known)
        graph[name] = set().union(*(found[kind] for kind in kinds))
    return graph


def a_circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle in order, or nothing."""
    done: set[str] = set()

    def follow(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return []
        for target in sorted(graph[name]):
            circle = follow(target, [*trail, name])
            if circle:
                return circle
        done.add(name)
        return []

    for name in sorted(graph):
        circle = follow(name, [])
        if circle:
            return circle
    return []


def captures_without_a_stream(text: str) -> list[int]:
    """Lines that make a `torch.cuda.graph(...)` without `stream=`."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and re.search(r"\bcuda\.graph$", ast.unparse(node.func))
        and "stream" not in {keyword.arg for keyword in node.keywords}
    ]


def test_each_capture_names_its_stream() -> None:
    """torch's default is one stream for the process, of the GPU that was current at the first capture: a graph of
    another GPU, captured there, holds nothing.
    """
    broken = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sources("python", "examples", "demo", "tools", suffixes={".py"})
        for line in captures_without_a_stream(path.read_text(encoding="utf-8"))
    ]
    assert not broken, broken
    assert captures_without_a_stream("with torch.cuda.graph(g, pool=p):\n    pass") == [1]


def test_no_circle_of_imports() -> None:
    """An import inside a function, or for types alone, closes a circle as well: neither file can be read first."""
    assert not a_circle(import_graph(PACKAGE, IMPORT_KINDS))


def test_the_search_for_circles_can_fail(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    for path, text in {
        "__init__.py": "from . import a",
        "a.py": "from .inner import b",
        "inner/__init__.py": "",
        "inner/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..c import X",
        "c.py": "def f():\n    import package.a",
    }.items():
        (package / path).write_text(text)
    assert not a_circle(import_graph(package, ("module",)))
    assert not a_circle(import_graph(package, ("module", "typing")))
    assert a_circle(import_graph(package, IMPORT_KINDS)) == [f"package.{x}" for x in ("a", "inner.b", "c", "a")]


# A workflow's own text says which action runs: a tag can be moved to other code, a commit cannot.
USES = re.compile(r"^\s*(?:-\s+)?uses:\s*(?P<what>[^\s#]+)(?P<comment>.*)$", re.MULTILINE)


def unpinned(text: str) -> list[str]:
    """The `uses:` lines that name no 40-digit commit, or do not say in a comment which version it is."""
    return [
        found.group().strip()
        for found in USES.finditer(text)
        if not found["what"].startswith("./")
        and not (
            re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", found["what"])
            and re.fullmatch(r" # v\d+(\.\d+)*", found["comment"])
        )
    ]


@pytest.mark.skipif(not (ROOT / ".github").is_dir(), reason="a source distribution leaves .github out")
def test_workflows_pin_actions_by_commit_and_ask_for_little() -> None:
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
    assert workflows
    for path in workflows:
        text = path.read_text(encoding="utf-8")
        assert USES.search(text) and not unpinned(text), (path.name, unpinned(text))
        # The default of every job; a job that needs more says so itself.
        assert re.search(r"^permissions: \{contents: read\}$", text, re.MULTILINE), path.name
        # No job may write to anything but the store of attestations; the last job of a release, which runs no code of
        # the build, makes the release.
        jobs = re.split(r"^  (?=[\w-]+:)", text.partition("\njobs:\n")[2], flags=re.MULTILINE)[1:]
        for job in jobs:
            most = {"id-token", "attestations"}
            if path.name == "wheels.yml" and job.startswith("release:"):
                assert "if: github.ref_type == 'tag'" in job
                most = {"contents"}
            assert set(re.findall(r"([\w-]+): write\b", job)) <= most, (path.name, job)
        assert len(re.findall(r": write\b", text)) == sum(len(re.findall(r": write\b", job)) for job in jobs), path.name


def test_the_search_for_unpinned_actions_can_fail() -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    assert not unpinned(f"      - uses: a/b@{commit} # v1.2.3\n        with: {{}}\n      - uses: ./local\n")
    for loose in ("a/b@v5", "a/b", "a/b@main # v1", f"a/b@{commit}", f"a/b@{commit[:12]} # v1", "docker://alpine:3"):
        assert unpinned(f"    - uses: {loose}\n"), loose
