"""What a build is made for: cmake/FlashkernelCuda.cmake, with nvidia-smi and nvcc pretended, and what pip passes on."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent
CMAKE, NINJA = shutil.which("cmake"), shutil.which("ninja")
pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="the pretended programs are shell scripts"),
    pytest.mark.skipif(CMAKE is None, reason="needs cmake"),
    pytest.mark.skipif(not (SOURCE / "cmake").is_dir(), reason="needs the source tree"),
]

PROJECT = """
cmake_minimum_required(VERSION 3.22)
project(choice LANGUAGES NONE)
include({source}/cmake/FlashkernelCuda.cmake)
add_library(flashkernel_cpu_avx2 INTERFACE)
include({source}/cmake/FlashkernelEstimate.cmake)
message(STATUS "with=${{FLASHKERNEL_WITH_CUDA}}")
message(STATUS "for=${{FLASHKERNEL_CUDA_ARCHITECTURES}}.")
"""


def program(path: Path, text: str) -> None:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def configure(folder: Path, gpus: str | None, nvcc: bool = True, env: dict | None = None, **options: str):
    """Configures; `gpus` is what the driver tells: capabilities a line, "old" for a driver that knows no capability,
    "" for one that finds no GPU, None where there is no driver."""
    (folder / "src" / "cuda").mkdir(parents=True, exist_ok=True)
    (folder / "CMakeLists.txt").write_text(PROJECT.format(source=SOURCE))
    smi = folder / "nvidia-smi"
    listed = "".join(f"echo 'GPU {i}: A card'\n" for i, _ in enumerate((gpus or "").split()))
    capabilities = "exit 2" if gpus == "old" else "\n".join(f"echo {gpu}" for gpu in (gpus or "").split())
    if gpus is not None:
        program(smi, f'if [ "$1" = -L ]; then\n{listed or "exit 9"}\nexit 0\nfi\n{capabilities}\n')
    program(folder / "nvcc", "printf 'sm_75\\nsm_80\\nsm_86\\nsm_90\\nsm_100\\n'\n")
    options = {
        "CMAKE_CUDA_COMPILER": str(folder / "nvcc") if nvcc else "CMAKE_CUDA_COMPILER-NOTFOUND",
        "FLASHKERNEL_NVIDIA_SMI": str(smi) if gpus is not None else "OFF",  # NOTFOUND would be looked for
        **options,
    }
    if NINJA:  # or else CMake's default, make
        options |= {"CMAKE_GENERATOR": "Ninja", "CMAKE_MAKE_PROGRAM": NINJA}
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FLASHKERNEL_")}
    return subprocess.run(
        [CMAKE, "-S", folder, "-B", folder / "build", *(f"-D{k}={v}" for k, v in options.items())],
        env={**clean, "PATH": f"{folder}:/usr/bin:/bin", **(env or {})},
        capture_output=True,
        text=True,
    )


def said(run: subprocess.CompletedProcess) -> str:
    """The one line about CUDA."""
    assert run.returncode == 0, run.stderr
    (line,) = re.findall(r"^-- flashkernel: (CUDA backend .*)", run.stdout, re.M)
    return line


@pytest.mark.parametrize("gpus", [None, ""])
def test_a_machine_without_a_gpu_gets_the_cpu_alone(tmp_path, gpus):
    run = configure(tmp_path, gpus)
    assert "with=OFF" in run.stdout
    assert said(run) == "CUDA backend OFF, CPU only (no GPU was found; FLASHKERNEL_CUDA=ON builds it all the same)"


def test_a_gpu_that_is_too_old_is_none(tmp_path):
    run = configure(tmp_path, "7.0")
    assert "no GPU of compute capability 7.5 or newer" in said(run)
    assert "with=OFF" in run.stdout


def test_a_gpu_without_a_compiler_gets_the_cpu_alone(tmp_path):
    run = configure(tmp_path, "9.0", nvcc=False)
    assert "no CUDA compiler found, set CUDACXX or put nvcc on PATH" in said(run)
    assert "with=OFF" in run.stdout
    run = configure(tmp_path, "9.0", nvcc=False, FLASHKERNEL_CUDA="ON")
    assert run.returncode != 0 and "FLASHKERNEL_CUDA=ON, but no CUDA compiler found" in run.stderr


@pytest.mark.parametrize(
    "gpus, archs",
    [
        ("9.0", "90-real"),
        ("8.6 8.6", "86-real"),
        ("7.5\n9.0", "75-real;90-real"),
        ("7.0 8.0", "80-real"),
        ("12.0", "90-virtual"),
    ],
)  # 7.0 is older than the kernels; this nvcc knows no 12.0, whose driver compiles PTX
def test_a_gpu_gets_code_for_itself(tmp_path, gpus, archs):
    run = configure(tmp_path, gpus)
    assert "with=ON" in run.stdout
    assert f"for={archs}." in run.stdout
    assert said(run).endswith(f"this machine's GPU alone, {archs.replace(';', ',')}; "
                              "FLASHKERNEL_CUDA_ARCHITECTURES=all is for others too)")  # fmt: skip


def test_all_gpus_on_request_and_where_none_is_known(tmp_path):
    everything = "for=75-real;80-real;86-real;89-real;90;120-real."
    assert everything in configure(tmp_path / "a", "9.0", FLASHKERNEL_CUDA_ARCHITECTURES="all").stdout
    assert everything in configure(tmp_path / "b", None, FLASHKERNEL_CUDA="ON").stdout
    assert everything in configure(tmp_path / "c", "old").stdout
    assert (
        "for=80-real."
        in configure(tmp_path / "d", None, FLASHKERNEL_CUDA="ON", FLASHKERNEL_CUDA_ARCHITECTURES="80-real").stdout
    )
    run = configure(tmp_path / "e", None, FLASHKERNEL_CUDA="ON", FLASHKERNEL_CUDA_ARCHITECTURES="native")
    assert run.returncode != 0 and "=native, but no GPU of compute" in " ".join(run.stderr.split())


def test_the_environment_decides_as_options_do(tmp_path):
    environment = {"FLASHKERNEL_CUDA": "ON", "FLASHKERNEL_CUDA_ARCHITECTURES": "all"}
    assert (
        "for=75-real;80-real;86-real;89-real;90;120-real." in configure(tmp_path / "a", "9.0", env=environment).stdout
    )
    assert "with=OFF" in configure(tmp_path / "b", "9.0", env={"FLASHKERNEL_CUDA": "OFF"}).stdout
    run = configure(tmp_path / "c", "9.0", env={"FLASHKERNEL_CUDA": "yes"})
    assert run.returncode != 0 and "FLASHKERNEL_CUDA is 'yes'; it has to be AUTO, ON or OFF" in run.stderr


def test_the_estimate_grows_with_what_is_built(tmp_path):
    def seconds(name, *arguments, **options):
        run = configure(tmp_path / name, *arguments, **options)
        ((value, cores),) = re.findall(r"takes about (\d+) s on (\d+) quick cores", run.stdout)
        return int(value) * int(cores)

    cpu, one, every = seconds("a", ""), seconds("b", "9.0"), seconds("c", "9.0", FLASHKERNEL_CUDA_ARCHITECTURES="all")
    assert cpu < one < every
    assert "takes about" not in configure(tmp_path / "d", "", FLASHKERNEL_TESTS="ON").stdout


def test_pip_builds_for_this_machine_and_wheels_are_for_others():
    read = pytest.importorskip("scikit_build_core.settings.skbuild_read_settings").SettingsReader
    here = read.from_file(SOURCE / "pyproject.toml", env={}, state="wheel").settings.cmake.define
    assert here["FLASHKERNEL_CPU"] == "native" and "FLASHKERNEL_CUDA_ARCHITECTURES" not in here
    wheel = read.from_file(SOURCE / "pyproject.toml", env={"CIBUILDWHEEL": "1"}, state="wheel").settings.cmake.define
    assert wheel["FLASHKERNEL_CPU"] == wheel["FLASHKERNEL_CUDA_ARCHITECTURES"] == "all"
    assert wheel["FLASHKERNEL_PYTHON"] == here["FLASHKERNEL_PYTHON"] == "ON"
