#!/usr/bin/env bash
# Builds the custom operators of ONNX Runtime for this machine and runs tests_py/test_onnxruntime.py on them with the runtime
# of PyPI, in an environment of its own (build/onnxruntime-env). HEADERS: the folder of onnxruntime_c_api.h, where CMake does
# not find it by itself. The runtime may be older or newer than the headers, from 1.17 on.
#   bash scripts/test_onnxruntime.sh [HEADERS]
set -euo pipefail
headers=${1:+$(realpath "$1")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
environment=build/onnxruntime-env
[ -x $environment/bin/python ] || "${PYTHON:-python3}" -m venv $environment
# shellcheck disable=SC1091
. $environment/bin/activate
. scripts/setup.sh

say "installing ONNX Runtime"
python -m pip install -q --upgrade pip
python -m pip install -q 'cmake>=3.22' ninja numpy onnx 'onnxruntime>=1.17' pytest pytest-timeout

say "building"
cmake -G Ninja -S . -B build/onnxruntime -DCMAKE_BUILD_TYPE=Release -DFLASHKERNEL_ONNXRUNTIME=ON -DFLASHKERNEL_TESTS=OFF \
  -DFLASHKERNEL_EXAMPLES=OFF ${headers:+-DFLASHKERNEL_ONNXRUNTIME_INCLUDE="$headers"}
cmake --build build/onnxruntime --target flashkernel_onnxruntime

say "testing"
FLASHKERNEL_ONNXRUNTIME=$(ls "$PWD"/build/onnxruntime/bindings/onnxruntime/libflashkernel_onnxruntime.*) \
  python -m pytest -q --noconftest tests_py/test_onnxruntime.py
