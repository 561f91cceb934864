#!/usr/bin/env bash
# Makes the wheel that any machine of this system can take, in dist/: one abi3 file for Python 3.10 and later, with CPU kernels for
# every instruction set and CUDA kernels for every GPU from 7.5 on; on Linux for glibc 2.28 and later (manylinux_2_28). Then
# it tries the wheel in an empty environment without a compiler.
#   bash scripts/build_wheel.sh          with CUDA; needs nvcc, no GPU
#   bash scripts/build_wheel.sh --cpu    the CPU alone
# FLASHKERNEL_CUDA_ARCHITECTURES names other GPUs than all; CMAKE_ARGS goes to CMake. WHEEL_DIR is where the wheel goes (dist).
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

FLASHKERNEL_CUDA=ON
case "${1:-}" in
  --cpu) FLASHKERNEL_CUDA=OFF ;;
  "") ;;
  *) echo "build_wheel.sh: '$1' is no option; --cpu is the one" >&2; exit 1 ;;
esac
: "${FLASHKERNEL_CUDA_ARCHITECTURES:=all}"
dist=${WHEEL_DIR:-dist}
build=build/wheel-$([ "$FLASHKERNEL_CUDA" = ON ] && echo cuda || echo cpu)
most_bytes=$((60 * 1000 * 1000))

say "installing build dependencies"
python -m pip install -q 'pip>=25.1'  # knows --group
python -m pip install -q --group build --group wheel

options=()
if [ "$(uname -s)" = Linux ]; then
  python scripts/old_libraries.py "$build/old_libraries"
  # libpthread by name: threads were apart until glibc 2.34, and nothing else may load it.
  old="-L$PWD/$build/old_libraries -Wl,--push-state,--no-as-needed -lpthread -Wl,--pop-state"
  options+=(-C "cmake.define.CMAKE_SHARED_LINKER_FLAGS=$old -Wl,-z,defs" -C "cmake.define.CMAKE_MODULE_LINKER_FLAGS=$old")
fi

say "building"
rm -rf "$build/raw" && mkdir -p "$build/raw" "$dist"
pip_command=wheel pip_build --no-build-isolation --no-deps --wheel-dir "$build/raw" . \
  -C build-dir="$build" -C cmake.define.FLASHKERNEL_CPU=all "${options[@]}"

if [ "$(uname -s)" = Linux ]; then
  say "manylinux"
  # Finds nothing to add; it checks the versions of all symbols, and names the file after the oldest system.
  auditwheel repair --plat "manylinux_2_28_$(uname -m)" --only-plat --wheel-dir "$build/repaired" "$build"/raw/*.whl
  wheel=$(ls -t "$build"/repaired/*.whl | head -1)
  auditwheel show "$wheel"
else
  wheel=$(ls -t "$build"/raw/*.whl | head -1)
fi
cp "$wheel" "$dist/"
wheel=$dist/$(basename "$wheel")
bytes=$(wc -c <"$wheel")
say "$wheel: $((bytes / 1000)) KB"
[ "$bytes" -le "$most_bytes" ] || { echo "build_wheel.sh: $wheel has $bytes bytes; $most_bytes are the most" >&2; exit 1; }

say "trying it"
python -m pip wheel -q --no-build-isolation --no-deps --wheel-dir "$dist" ./demo  # the small model, a package of its own
python scripts/try_wheel.py "$wheel" "$dist"/flashkernel_demo-*.whl
