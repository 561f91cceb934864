#!/usr/bin/env python3
"""Registers, shared memory and occupancy of every CUDA kernel in built libraries or objects, without a GPU.

    python scripts/kernel_resources.py build/libflashkernel.so... [--launches FOLDER PROGRAM] [--check] [--match sm80]

Registers, static shared memory, stack and the largest block come from the machine code (cuobjdump: of the CUDA toolkit,
or `pip install nvidia-cuda-cuobjdump`; pyelftools); block sizes and dynamic shared memory from the files in FOLDER,
which PROGRAM, the conformance tests on the emulated GPU, has written (FK_EMULATOR_LAUNCHES=FOLDER/file). --check exits
1 if a kernel cannot be launched on a GPU that its code is for, spills, or misses an occupancy that is promised.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from elftools.elf.elffile import ELFFile

KIB = 1024


@dataclass(frozen=True)
class Arch:
    """Limits of one multiprocessor (CUDA C++ Programming Guide, table of technical specifications per capability)."""

    block_shared: int  # bytes, with the opt-in
    sm_shared: int
    threads: int
    blocks: int
    reserved: int  # of each block's shared memory, by the system
    registers: int = 65536


ARCHS = {
    75: Arch(64 * KIB, 64 * KIB, 1024, 16, 0),
    80: Arch(163 * KIB, 164 * KIB, 2048, 32, KIB),
    86: Arch(99 * KIB, 100 * KIB, 1536, 16, KIB),
    89: Arch(99 * KIB, 100 * KIB, 1536, 24, KIB),
    90: Arch(227 * KIB, 228 * KIB, 2048, 32, KIB),
}
# Code for one capability also runs on later minor versions of it.
RUNS_ON = {75: [75], 80: [80, 86, 89], 86: [86, 89], 89: [89], 90: [90]}
# Spills that are known, in bytes of stack; a kernel not named here must have none. Only ever lower these.
KNOWN_STACK = {
    "sm80::attention_fwd_kernel": 40,  # d128 on 8.0
    "sm80::attention_fwd_f32_kernel": 80,
    "sm80::attention_bwd_kernel": 8,  # d128 on 8.0
    "sm80::attention_bwd_f32_kernel": 88,  # d96 on 9.0
    "sm80::attention_decode_kernel": 48,  # 8-bit keys at d128 with 17 to 32 rows, on 8.0
    "sm80::attention_decode_combine_kernel": 8,  # d256
    "sm80::gemm_kernel": 136,  # fp32
    "sm80::linear_few_rows_kernel": 32,
    "sm80::quantized_few_rows_kernel": 104,  # three blocks of four warps; 32 rows on 9.0
}
SHARED_GRANULE = 128
REGISTERS_GRANULE = 256  # per warp


@dataclass(frozen=True)
class Kernel:
    name: str
    code: int  # the capability it was compiled for
    registers: int
    stack: int
    static_shared: int  # without what the system reserves
    threads: int  # of the largest block
    dynamic_shared: int | None = None  # None: nobody has launched it

    def blocks_per_sm(self, arch: Arch) -> int:
        warps = -(-self.threads // 32)
        per_warp = -(-self.registers * 32 // REGISTERS_GRANULE) * REGISTERS_GRANULE
        shared = self.static_shared + (self.dynamic_shared or 0) + arch.reserved
        shared = -(-shared // SHARED_GRANULE) * SHARED_GRANULE
        by_shared = arch.sm_shared // shared if shared else arch.blocks
        return min(arch.registers // (per_warp * warps), arch.threads // (warps * 32), by_shared, arch.blocks)


def cuobjdump() -> str:
    found = shutil.which("cuobjdump")
    for folder in Path(sysconfig.get_paths()["purelib"]).glob("nvidia/cu*/bin/cuobjdump"):
        found = found or str(folder)
    if not found:
        sys.exit("kernel_resources: no cuobjdump; install the CUDA toolkit's or `pip install nvidia-cuda-cuobjdump`")
    return found


def readable(symbols: list[str]) -> list[str]:
    """Demangled names and parameters without file hashes: one spelling for every compiler."""
    text = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True).stdout
    return [short_name(line) for line in text.splitlines()]


def short_name(name: str) -> str:
    name = re.sub(r"_GLOBAL__N__\w+|\(anonymous namespace\)", "-", name)
    name = (
        name.replace("flashkernel::", "")
        .replace("cuda::", "")
        .replace("-::", "")
        .replace("CUtensorMap_st", "CUtensorMap")
    )
    name = re.sub(r"^void ", "", name)
    return re.sub(r"\((?:int|bool|unsigned int)\)|(?<=\d)u(?=[,>])", "", name).replace("> >", ">>").replace(" ", "")


def without_parameters(name: str) -> str:
    depth = 0
    for at, letter in enumerate(name):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            return name[:at]
    return name


def max_threads(cubin: bytes) -> Iterator[tuple[str, int]]:
    """Kernels of a cubin and their largest block: the attribute EIATTR_MAX_THREADS in a kernel's .nv.info."""
    for section in ELFFile(io.BytesIO(cubin)).iter_sections():
        if not section.name.startswith(".nv.info."):
            continue
        info, at = section.data(), 0
        while at < len(info):
            form, attribute, value = struct.unpack_from("<BBH", info, at)
            at += 4
            if form == 4:  # followed by `value` bytes; other forms hold theirs here
                if attribute == 5:
                    x, y, z = struct.unpack_from("<III", info, at)
                    yield section.name.removeprefix(".nv.info."), x * y * z
                at += value


def read_library(library: str) -> list[Kernel]:
    run = [cuobjdump(), "-res-usage", library]
    text = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    kernels: dict[tuple[str, int], Kernel] = {}
    code = 0
    lines = iter(text.splitlines())
    for line in lines:
        if match := re.match(r"arch = sm_(\d+)", line):
            code = int(match[1])
        elif match := re.match(r" Function (\S+):", line):
            use = dict(re.findall(r"(\w+):(\d+)", next(lines)))
            shared = int(use["SHARED"]) - ARCHS[code].reserved
            kernels[match[1], code] = Kernel("", code, int(use["REG"]), int(use["STACK"]), shared, 1024)
    # Not as text (-elf): that is 5 million lines, half a minute.
    threads: dict[tuple[str, int], int] = {}
    with tempfile.TemporaryDirectory() as folder:
        run = [cuobjdump(), "-xelf", "all", str(Path(library).resolve())]
        subprocess.run(run, capture_output=True, check=True, cwd=folder)
        for file in Path(folder).iterdir():
            code = int(re.search(r"\.sm_(\d+)a?\.cubin$", file.name)[1])
            threads |= {(symbol, code): count for symbol, count in max_threads(file.read_bytes())}
    names = readable([symbol for symbol, _ in kernels])
    return [
        replace(kernel, name=name, threads=threads.get(key, 1024))
        for (key, kernel), name in zip(kernels.items(), names, strict=True)
    ]


def with_launches(kernels: list[Kernel], folder: str, program: str) -> list[Kernel]:
    """One kernel for each shape that it was launched with in `program`."""
    text = subprocess.run(["nm", "-C", program], capture_output=True, text=True, check=True).stdout
    start, names = 0, {}
    for line in text.splitlines():
        if match := re.match(r"([0-9a-f]+) (\w) (.*)", line):
            if match[3] == "__executable_start":
                start = int(match[1], 16)
            elif match[2] in "tTwW":
                names[int(match[1], 16)] = match[3]
    shapes: dict[tuple[str, int], set[tuple[int, int]]] = {}  # by kernel and capability
    for line in "".join(file.read_text() for file in Path(folder).iterdir()).splitlines():
        address, threads, shared, capability = line.split("\t")
        name = short_name(names[int(address, 16) + start])
        shapes.setdefault((name, int(capability)), set()).add((int(threads), int(shared)))
    result = []
    for kernel in kernels:
        # A launch may choose its shape by the device's limits: what was seen on the GPU that this code is for. Where
        # that sample has not come by, the newest GPU's, if it fits.
        seen = shapes.get((kernel.name, kernel.code), set())
        if not seen:
            most = ARCHS[kernel.code].block_shared - kernel.static_shared
            seen = {shape for shape in shapes.get((kernel.name, 90), ()) if shape[1] <= most}
        result += [replace(kernel, threads=t, dynamic_shared=s) for t, s in sorted(seen)] or [kernel]
    return result


def problems(kernel: Kernel, device: int) -> list[str]:
    arch, found = ARCHS[device], []
    shared = kernel.static_shared + (kernel.dynamic_shared or 0)
    if shared > arch.block_shared:
        found.append(f"{shared} bytes of shared memory; sm_{device} has {arch.block_shared} for a block")
    elif kernel.dynamic_shared is not None and kernel.blocks_per_sm(arch) < 1:
        found.append(f"{kernel.registers} registers x {kernel.threads} threads do not fit sm_{device}")
    tensor_core = re.match(r"sm(75|80|90a)::", kernel.name)
    known = KNOWN_STACK.get(kernel.name.split("<")[0], 0)
    if tensor_core and kernel.stack > known:
        found.append(f"{kernel.stack} bytes of stack, {known} known: registers are spilled")
    # The T4's promise: two blocks a multiprocessor hide each other's loads, which Turing cannot make asynchronous.
    if re.match(r"sm75::attention_fwd_kernel<__half,(64|128),", kernel.name) and device == 75:
        if kernel.dynamic_shared is not None and kernel.blocks_per_sm(arch) < 2:
            found.append(f"{kernel.blocks_per_sm(arch)} block a multiprocessor on sm_75; needs 2")
    # Rows that a block holds: with fewer threads than half of a multiprocessor's too few loads are under way. (Norms of
    # 16384 columns lost a third of their speed at 75 registers, which left room for one block of 512.)
    if re.match(r"(norm|plain|held|softmax|softmax_bwd)_kernel<", kernel.name) and device in (80, 90):
        resident = kernel.blocks_per_sm(arch) * kernel.threads
        if resident < 1024:
            found.append(
                f"{resident} threads a multiprocessor on sm_{device} ({kernel.registers} registers); needs 1024"
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="*", help="or object file; without any there is nothing to read")
    parser.add_argument("--launches", nargs=2, metavar=("FOLDER", "PROGRAM"), help="launches on the emulated GPU")
    parser.add_argument("--match", default="", help="only kernels whose name contains this")
    parser.add_argument("--check", action="store_true", help="print problems only; exit 1 if there are any")
    args = parser.parse_args()
    kernels = [kernel for file in args.library for kernel in read_library(file) if args.match in kernel.name]
    if not kernels:
        print(f"kernel_resources: no CUDA kernel in {', '.join(args.library) or 'no file'}")
        return 0
    if args.launches:
        kernels = with_launches(kernels, *args.launches)
    count = 0
    if not args.check:
        print("| kernel | device | registers | threads | static + dynamic shared | stack | blocks / SM |")
        print("|---|---|---|---|---|---|---|")
    for kernel in kernels:
        for device in RUNS_ON[kernel.code]:
            # On other devices that can run this code the launch may choose another kernel by their limits.
            found = problems(kernel, device) if device == kernel.code else []
            count += len(found)
            if args.check:
                for text in found:
                    print(f"{without_parameters(kernel.name)} (sm_{kernel.code}): {text}")
            else:
                name = without_parameters(kernel.name)
                dynamic = "?" if kernel.dynamic_shared is None else kernel.dynamic_shared
                print(
                    f"| {name} | sm_{device} | {kernel.registers} | {kernel.threads} | {kernel.static_shared} + "
                    f"{dynamic} | {kernel.stack} | {kernel.blocks_per_sm(ARCHS[device])} |"
                )
    unseen = sum(kernel.dynamic_shared is None for kernel in kernels)
    print(f"{len(kernels)} kernels, {unseen} of them never launched by the tests, {count} problems", file=sys.stderr)
    return 1 if args.check and count else 0


if __name__ == "__main__":
    sys.exit(main())
