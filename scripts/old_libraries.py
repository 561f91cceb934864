"""A folder of libraries to link against, by which what is built on this machine runs on older ones.

    python scripts/old_libraries.py FOLDER
    cmake ... -DCMAKE_SHARED_LINKER_FLAGS=-LFOLDER -DCMAKE_MODULE_LINKER_FLAGS=-LFOLDER

A linker binds each function to the newest version of it that the C and C++ libraries of the machine have, and the
binary then starts on no older system. The folder holds stand-ins for these libraries: the same names without code, and
of each name the newest version that the older system has (manylinux_2_28, PEP 600: glibc 2.28 and the libstdc++ of GCC
8). What libstdc++ has gained since comes from this machine's libstdc++.a, into the binary, as Red Hat's gcc-toolset
does it; so all libraries of a process still share one C++ runtime, and an exception of one is caught in another. A
function that the older glibc lacks is an undefined reference: the link fails (with -z defs) instead of the start on a
user's machine. Needs GCC and binutils; reads the compiler from CXX."""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import re
import shlex
import subprocess
import sys

# The newest versions that manylinux_2_28 allows.
LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
# glibc 2.34 took these libraries into libc; before, their functions were theirs.
ONCE_APART = {
    "libdl.so.2": r"dl",
    "librt.so.1": r"(__)?(aio|lio|mq|shm|timer)_",
    "libpthread.so.0": r"_*pthread_|(sem|thrd|mtx|cnd|tss)_|call_once$",
}
# Libraries that nothing here needs are not offered.
ELSEWHERE = r"(__)?(dn|ns|res)_|gai_|getaddrinfo_a|log(in|out|wtmp)|(open|fork)pty"
# Names newer than glibc 2.28 that headers and libstdc++.a use. "There may be other threads" is always right. From glibc
# 2.38 on, headers rename the readers of numbers to those of C23, which take 0b101 too; the old ones do not.
SHIM = """#define HIDDEN __attribute__((visibility("hidden")))
HIDDEN char __libc_single_threaded = 0;
#define READER(type, name) \\
  type name(const char*, char**, int); \\
  HIDDEN type __isoc23_##name(const char* text, char** end, int base) { return name(text, end, base); }
READER(long, strtol)
READER(long long, strtoll)
READER(unsigned long, strtoul)
READER(unsigned long long, strtoull)
"""

Symbol = collections.namedtuple("Symbol", "name kind size version default")


def run(*command: str | pathlib.Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(map(str, command))} failed:\n{done.stderr}")
    return done.stdout


def number(version: str) -> tuple[int, ...]:
    """(2, 28) of GLIBC_2.28; () of a version without a number, which is as old as the library."""
    found = re.search(r"_(\d+(\.\d+)*)$", version)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def allowed(version: str) -> bool:
    limit = LIMITS.get(version.split("_")[0])
    return limit is not None and "PRIVATE" not in version and number(version) <= limit


def exported(library: pathlib.Path) -> list[Symbol]:
    """Every name of a library with every version of it."""
    pattern = r"^ *\d+: [0-9a-f]+ +(\S+) (\w+) +(?:GLOBAL|WEAK|UNIQUE) +DEFAULT.* +(?!UND)\w+ ([^@\s]+)@(@?)(\S+)"
    text = run("readelf", "-W", "--dyn-syms", library)
    return [
        Symbol(name, kind, int(size, 0), version, default == "@")
        for size, kind, name, default, version in re.findall(pattern, text, re.MULTILINE)
    ]


def old_interface(symbols: list[Symbol]) -> list[Symbol]:
    """The newest allowed version of each name."""
    newest: dict[str, Symbol] = {}
    for symbol in symbols:
        if allowed(symbol.version) and (
            symbol.name not in newest or number(newest[symbol.name].version) < number(symbol.version)
        ):
            newest[symbol.name] = symbol
    return list(newest.values())


def once_in(name: str, symbols: list[Symbol]) -> set[str]:
    """The names in libc that were the library `name`'s at the limit: they have a new version since they moved, or are
    there only for what was linked before."""
    versions = collections.defaultdict(set)
    for symbol in symbols:
        versions[symbol.name].add(symbol.version)
    new = {symbol for symbol, known in versions.items() if any(number(version) > LIMITS["GLIBC"] for version in known)}
    old_only = {symbol.name for symbol in symbols if not symbol.default} - {s.name for s in symbols if s.default}
    return {symbol for symbol in new | old_only if re.match(ONCE_APART[name], symbol)}


def write_library(folder: pathlib.Path, soname: str, symbols: list[Symbol], compiler: list[str]) -> None:
    """A shared library of that name which exports these symbols and holds nothing."""
    lines = []
    for i, symbol in enumerate(symbols):
        local = symbol.kind == "TLS"
        kind = {"OBJECT": "object", "TLS": "tls_object"}.get(symbol.kind, "function")
        lines += [
            '.section .tdata,"awT",%progbits' if local else ".data",
            f".globl stand_in_{i}",
            f".type stand_in_{i}, %{kind}",
            f"stand_in_{i}: .zero {max(symbol.size, 1)}",
            f".size stand_in_{i}, {symbol.size}",
            f".symver stand_in_{i}, {symbol.name}@@{symbol.version}",
        ]
    source, script = folder / f"{soname}.s", folder / f"{soname}.map"
    source.write_text("\n".join(lines) + "\n")
    nodes = sorted({symbol.version for symbol in symbols})
    script.write_text("".join(f"{node} {{ }};\n" for node in nodes) + "stand_ins { local: stand_in_*; };\n")
    shared = ["-shared", "-nostdlib", f"-Wl,-soname,{soname}", f"-Wl,--version-script,{script}"]
    run(*compiler, *shared, "-o", folder / soname, source)
    source.unlink()
    script.unlink()


def make(folder: pathlib.Path, compiler: list[str]) -> None:
    def find(name: str) -> pathlib.Path:
        path = run(*compiler, f"-print-file-name={name}").strip()
        if not os.path.isabs(path):
            raise SystemExit(f"{shlex.join(compiler)} knows no {name}")
        return pathlib.Path(path)

    folder.mkdir(parents=True, exist_ok=True)
    libc = exported(find("libc.so.6"))
    moved = {name: once_in(name, libc) for name in ONCE_APART}
    stays = [
        symbol
        for symbol in old_interface(libc)
        if not re.match(ELSEWHERE, symbol.name) and not any(symbol.name in names for names in moved.values())
    ]
    write_library(folder, "libc.so.6", stays, compiler)
    for name, names in moved.items():
        write_library(folder, name, [symbol for symbol in old_interface(libc) if symbol.name in names], compiler)
        (folder / name.rsplit(".", 1)[0]).write_text(f"INPUT({name})\n")
    (loader,) = re.findall(r"NEEDED.*\[(ld-linux.*)\]", run("readelf", "-d", find("libc.so.6")))
    for name in (loader, "libm.so.6", "libstdc++.so.6"):
        write_library(folder, name, old_interface(exported(find(name))), compiler)

    shim = folder / "shim.c"
    shim.write_text(SHIM)
    run(*compiler, "-x", "c", "-O2", "-fPIC", "-c", shim, "-o", folder / "shim.o")
    (folder / "libshim.a").unlink(missing_ok=True)
    run("ar", "rc", folder / "libshim.a", folder / "shim.o")
    # Linker scripts, as the systems' own: what -lc, -lm and -lstdc++ stand for.
    (folder / "libm.so").write_text("INPUT(libm.so.6)\n")
    (folder / "libc.so").write_text(
        f"GROUP(libc.so.6 {find('libc_nonshared.a')} AS_NEEDED({' '.join([*moved, loader])}))\n"
    )
    (folder / "libstdc++.so").write_text(f"GROUP(libstdc++.so.6 {find('libstdc++.a')} libshim.a)\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    arguments = parser.parse_args()
    if not sys.platform.startswith("linux"):
        raise SystemExit("old_libraries: glibc is of Linux alone")
    make(arguments.folder.resolve(), shlex.split(os.environ.get("CXX", "c++")))


if __name__ == "__main__":
    main()
