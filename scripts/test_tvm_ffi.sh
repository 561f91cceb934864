#!/usr/bin/env bash
# Builds the module of TVM-FFI for this machine, lays it out as a kernel repository of the Hugging Face Hub
# (build/hub/build/<variant>/) and runs tests_py/test_tvm_ffi.py on it, in an environment of its own (build/tvm-ffi-env).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
environment=build/tvm-ffi-env
[ -x $environment/bin/python ] || "${PYTHON:-python3}" -m venv $environment
# shellcheck disable=SC1091
. $environment/bin/activate
. scripts/setup.sh

say "installing TVM-FFI and kernels"
python -m pip install -q --upgrade pip
python -m pip install -q apache-tvm-ffi cmake kernels ninja numpy pytest pytest-timeout torch==2.13.0

say "building"
cmake -G Ninja -S . -B build/tvm-ffi -DCMAKE_BUILD_TYPE=Release -DFLASHKERNEL_TVM_FFI=ON -DFLASHKERNEL_TESTS=OFF \
  -DFLASHKERNEL_EXAMPLES=OFF -DPython_EXECUTABLE="$(command -v python)"
cmake --build build/tvm-ffi --target flashkernel_tvm_ffi
cmake --install build/tvm-ffi --component hub --prefix build/hub

say "testing"
FLASHKERNEL_HUB=$PWD/build/hub python -m pytest -q --noconftest tests_py/test_tvm_ffi.py "$@"
