#!/usr/bin/env bash
# scripts/gpu_checks.sh [OUT]: everything that needs a GPU, in one command: builds with CUDA, runs every CUDA kernel through the
# conformance cases (each row by itself, the sm75 ones from their PTX where the GPU is newer), the Python tests on CUDA tensors
# (graphs, streams, a second device where there is one, 131072 tokens), those again with each path forced in turn
# (pytest --kernel-path: calls that a path refuses fall back; a path that served no call fails), and compute-sanitizer's four tools
# over the cases. Writes OUT/report.md (default: build/gpu_checks) and logs beside it; exits 1 if anything failed.
# FLASHKERNEL_GPU_STEPS: which of them, of "conformance python paths sanitizers" (default: all), where one call may not last that long.
# FLASHKERNEL_SANITIZER_ROWS, _SECONDS, _EARLIER: --rows, --seconds and --earlier of scripts/gpu_sanitizers.py, which can go on where an
# earlier run has stopped.
# FLASHKERNEL_GPU_BUILD: a build folder, built elsewhere with these options, to use as it is.
# Uses the Python found first on PATH; it needs nanobind, nanobind-backend, NumPy, torch with CUDA, pytest and hypothesis.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-build/gpu_checks}
build=$(realpath -m "${FLASHKERNEL_GPU_BUILD:-build/gpu}")  # tests run from other folders, too
cores=$(nproc)
jobs=$((cores < 24 ? cores : 24))
gpus=$(nvidia-smi -L | wc -l)
archs=${FLASHKERNEL_GPU_ARCHS:-generic sm75 sm80 sm90a}
steps=" ${FLASHKERNEL_GPU_STEPS:-conformance python paths sanitizers} "
mkdir -p "$out"
failed=0
commit=${FLASHKERNEL_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}

[ -n "${FLASHKERNEL_GPU_BUILD:-}" ] ||
  { cmake -S . -B $build -G Ninja -DFLASHKERNEL_CUDA=ON -DFLASHKERNEL_CUDA_ARCHITECTURES="75-real;80-real;90" -DFLASHKERNEL_PYTHON=ON -DFLASHKERNEL_TESTS=ON \
    -DPython_EXECUTABLE="$(command -v python3)" && cmake --build $build; } >"$out/build.log" 2>&1 ||
  { tail -20 "$out/build.log"; exit 1; }
export PYTHONPATH=$build/python:$PWD/demo${PYTHONPATH:+:$PYTHONPATH}

{
  echo "# GPU checks"
  echo
  echo "| | |"
  echo "|---|---|"
  echo "| GPU | $(nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c | xargs) |"
  echo "| driver | $(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1) |"
  echo "| nvcc | $(nvcc --version | sed -n 's/.*release \([^,]*\).*/\1/p') |"
  echo "| commit | $commit |"
  echo "| date | $(date -u +%F) |"
  echo
  echo "| check | result | seconds |"
  echo "|---|---|---|"
} >"$out/report.md"

# row NAME RESULT SECONDS STATUS
row() {
  echo "| $1 | $2 | $3 |" | tee -a "$out/report.md"
  [ "$4" = 0 ] || failed=1
}

# cases LOG FILTER PARTS: the cases in parts side by side, over all GPUs; all rows of a case are in one part, so that the oracle answers
# once. Leaves the names of those that passed in LOG.passed, what else was said in LOG.log.
cases() {
  local log=$1 filter=$2 parts=$3 status=0 pids=()
  for ((part = 0; part < parts; part++)); do
    CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$((part % gpus))} FK_CONFORMANCE_PART=$part/$parts OMP_NUM_THREADS=1 \
      timeout 900 $build/tests_cpp/kernel_conformance --gtest_filter="$filter" >"$out/$log.$part" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=1; done
  cat "$out/$log".[0-9]* | sed -n 's/^\[       OK \] \(.*\) (.*/\1/p' | sort -u >"$out/$log.passed"
  cat "$out/$log".[0-9]* | awk '/^\[ RUN/ {name = $0; next} /^\[ +OK/ {name = ""; next} /^\[-/ {next}
    {if (name != "") print name; name = ""; print}' >"$out/$log.log"
  rm -f "$out/$log".[0-9]*
  return $status
}
failures() { grep -cE '^\[  FAILED  \] .*\(' "$out/$1.log"; }

row "library" "$(stat -Lc %s $build/libflashkernel.so | awk '{printf "%.1f MB", $1 / 1e6}')" - 0
if [[ $steps == *" conformance "* ]]; then
  begin=$SECONDS
  cases conformance "$(printf '*cuda/%s*:' $archs)-*past_2_31*" $cores
  status=$?
  for arch in $archs; do
    row "conformance, $arch" "$(grep -c "cuda/$arch" "$out/conformance.passed") passed, $(grep -cE "^\[  FAILED  \] .*cuda/$arch.*\(" "$out/conformance.log") failed" \
      $((SECONDS - begin)) $status
  done
  # Tensors that span gigabytes, up to 50 in a case: in few processes, or they leave each other no memory.
  begin=$SECONDS
  cases conformance_far '*cuda*past_2_31*' 2
  status=$?
  row "conformance, strides past 2^31" "$(wc -l <"$out/conformance_far.passed") passed, $(failures conformance_far) failed" $((SECONDS - begin)) $status
fi

# python_tests LOG WORKERS ARGUMENTS...: the tests that a GPU changes.
python_tests() {
  local log=$1 workers=$2
  shift 2
  OMP_NUM_THREADS=2 python3 -m pytest -q -n "$workers" --dist worksteal -p no:cacheprovider -p no:benchmark tests_py --ignore tests_py/test_minilm.py \
    --ignore tests_py/test_train_gpt2.py --ignore tests_py/test_packaging.py "$@" >"$out/$log.log" 2>&1
}

if [[ $steps == *" python "* ]]; then
  begin=$SECONDS
  python_tests pytest $jobs
  status=$?
  row "Python tests, CUDA tensors included" "$(tail -1 "$out/pytest.log" | sed 's/ in .*//')" $((SECONDS - begin)) $status
fi

# The paths side by side, since most of a run is Python's own time. Left out: pages, tools and the other implementations, which
# launch no kernel of the library's choice.
if [[ $steps == *" paths "* ]]; then
  begin=$SECONDS runs=()
  for arch in $archs; do
    python_tests "pytest_$arch" $((jobs / 4 + 1)) --kernel-path "cuda/$arch" \
      $(printf -- '--ignore tests_py/test_%s.py ' architecture bench_report bench_timing docs doctests kernel_path profile \
        gpu_sanitizers reference roofline triton) &
    runs+=($!)
  done
  for arch in $archs; do
    wait "${runs[0]}"
    status=$? runs=("${runs[@]:1}")
    row "Python tests, $arch forced" "$(tail -1 "$out/pytest_$arch.log" | sed 's/ in .*//'), $(
      grep -oE 'served [0-9]+ calls by [0-9]+ kernels, [0-9]+ fell back' "$out/pytest_$arch.log" || echo 'no call counted')" \
      $((SECONDS - begin)) $status
  done
fi

if [[ $steps == *" sanitizers "* ]]; then
  python3 scripts/gpu_sanitizers.py $build/tests_cpp/kernel_conformance "$out/sanitizers" --gpus "$gpus" --commit "$commit" \
    ${FLASHKERNEL_SANITIZER_ROWS:+--rows "$FLASHKERNEL_SANITIZER_ROWS"} ${FLASHKERNEL_SANITIZER_SECONDS:+--seconds "$FLASHKERNEL_SANITIZER_SECONDS"} \
    ${FLASHKERNEL_SANITIZER_EARLIER:+--earlier "$FLASHKERNEL_SANITIZER_EARLIER"} >"$out/sanitizers.md" || failed=1
  tee -a "$out/report.md" <"$out/sanitizers.md"
  rm "$out/sanitizers.md"
fi

exit $failed
