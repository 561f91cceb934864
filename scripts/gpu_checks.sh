#!/usr/bin/env bash
# scripts/gpu_checks.sh [OUT]: everything that needs a GPU, in one command: builds with CUDA, runs every CUDA kernel through the
# conformance cases (each row by itself, the sm75 ones from their PTX where the GPU is newer), the Python tests on CUDA tensors
# (graphs, streams, a second device where there is one, 131072 tokens), those again with each path forced in turn
# (pytest --kernel-path: calls that a path refuses fall back; a path that served no call fails), and compute-sanitizer's four tools
# over the cases. Writes OUT/report.md (default: build/gpu_checks) and logs beside it; exits 1 if anything failed.
# FLASHKERNEL_GPU_STEPS: which of them, of "conformance python paths sanitizers" (default: all), where one call may not last that long.
# FLASHKERNEL_SANITIZER_SAMPLE=n (default 1): the sanitizers see one case in n. FLASHKERNEL_SANITIZER_PART=k/n: of those, part k of n
# (from 0), so that n runs see all. FLASHKERNEL_SANITIZER_SECONDS: their time limit. FLASHKERNEL_SANITIZER_ROWS: only these rows of the
# registry, as GoogleTest's filters name them (default: *cuda*).
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
share=0/1

[ -n "${FLASHKERNEL_GPU_BUILD:-}" ] ||
  { cmake -S . -B $build -G Ninja -DFLASHKERNEL_CUDA=ON -DFLASHKERNEL_PYTHON=ON -DFLASHKERNEL_TESTS=ON \
    -DPython_EXECUTABLE="$(command -v python3)" && cmake --build $build; } >"$out/build.log" 2>&1 ||
  { tail -20 "$out/build.log"; exit 1; }
export PYTHONPATH=$build/python${PYTHONPATH:+:$PYTHONPATH}

{
  echo "# GPU checks"
  echo
  echo "| | |"
  echo "|---|---|"
  echo "| GPU | $(nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c | xargs) |"
  echo "| driver | $(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1) |"
  echo "| nvcc | $(nvcc --version | sed -n 's/.*release \([^,]*\).*/\1/p') |"
  echo "| commit | ${FLASHKERNEL_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)} |"
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

# cases LOG FILTER PARTS COMMAND...: the cases (of part $share, "k/n") in parts side by side, over all GPUs, each under COMMAND; all
# rows of a case are in one part, so that the oracle answers once. Leaves the names of those that passed in LOG.passed, what else was said in LOG.log.
cases() {
  local log=$1 filter=$2 parts=$3 status=0 pids=()
  shift 3
  for ((part = 0; part < parts; part++)); do
    CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$((part % gpus))} FK_CONFORMANCE_PART=$((${share%/*} * parts + part))/$((${share#*/} * parts)) OMP_NUM_THREADS=1 \
      ${@:-timeout 900} $build/tests_cpp/kernel_conformance --gtest_filter="$filter" >"$out/$log.$part" 2>&1 &
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
        reference roofline triton) &
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

# Sanitizers, side by side, each case run once. On two H200s every case takes some 25 minutes, most of them racecheck's over
# attention_fwd/cuda/generic/tiled. Left out are what launches nothing (accepts_a_case) and the strides past 2^31, whose tensors span
# gigabytes; of synccheck also decode by clusters: it ends every launch of 16 blocks a cluster with an illegal access
# (docs/kernels/attention_decode.md). The numbers of processes are fixed, so that the parts of several runs are the same everywhere.
if [[ $steps == *" sanitizers "* ]]; then
  export FK_CONFORMANCE_SAMPLE=${FLASHKERNEL_SANITIZER_SAMPLE:-1} FK_CONFORMANCE_REPEATS=1
  share=${FLASHKERNEL_SANITIZER_PART:-0/1}
  of_cases=$([ "$FK_CONFORMANCE_SAMPLE" = 1 ] && echo "every case" || echo "one case in $FK_CONFORMANCE_SAMPLE")
  of_cases+="${FLASHKERNEL_SANITIZER_ROWS:+ of $FLASHKERNEL_SANITIZER_ROWS}${FLASHKERNEL_SANITIZER_PART:+, part $share}"
  begin=$SECONDS runs=()
  for tool in racecheck memcheck initcheck synccheck; do
    without='*past_2_31*:*accepts_a_case'
    [ $tool = synccheck ] && without+=':attention_fwd/cuda/sm90a/decode/*'
    (
      cases "$tool" "${FLASHKERNEL_SANITIZER_ROWS:-*cuda*}-$without" $([ $tool = racecheck ] && echo 20 || echo 4) \
        timeout "${FLASHKERNEL_SANITIZER_SECONDS:-3000}" compute-sanitizer --tool $tool --error-exitcode 1
      status=$?
      echo $((SECONDS - begin)) >"$out/$tool.seconds"
      exit $status
    ) &
    runs+=($!)
  done
  for tool in racecheck memcheck initcheck synccheck; do
    wait "${runs[0]}"
    status=$? runs=("${runs[@]:1}")
    row "compute-sanitizer $tool, $of_cases" "$(wc -l <"$out/$tool.passed") passed, $(failures $tool) failed$(
      grep -hE '(ERROR|RACECHECK) SUMMARY' "$out/$tool.log" | awk '{n += $4; c++} END {print ", " n + 0 " errors in " c + 0 " processes"}')" \
      "$(cat "$out/$tool.seconds")" $status
    rm -f "$out/$tool.seconds"
  done
fi

exit $failed
