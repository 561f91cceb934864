#!/usr/bin/env bash
# scripts/gpu_checks.sh [OUT]: everything that needs a GPU, in one command: builds with CUDA, runs every CUDA kernel through the
# conformance cases (each row by itself, the sm75 ones from their PTX where the GPU is newer), the Python tests on CUDA tensors
# (graphs, streams, a second device where there is one, 131072 tokens), those again with each path forced in turn
# (pytest --kernel-path: calls that a path refuses fall back; a path that served no call fails), and compute-sanitizer's four tools
# over the cases. Writes OUT/report.md (default: build/gpu_checks) and logs beside it; exits 1 if anything failed.
# FLASHKERNEL_GPU_STEPS: which of them, of "conformance python paths sanitizers" (default: all), where one call may not last that long.
# FLASHKERNEL_SANITIZER_SAMPLE=n (default 1): the sanitizers see one case in n. FLASHKERNEL_SANITIZER_PART=k/n: of those, part k of n
# (from 0), so that n runs see all. FLASHKERNEL_SANITIZER_SECONDS: their time limit.
# FLASHKERNEL_GPU_BUILD: a build folder, built elsewhere with these options, to use as it is.
# Uses the Python found first on PATH; it needs nanobind, nanobind-backend, NumPy, torch with CUDA, pytest and hypothesis.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-build/gpu_checks}
build=$(realpath -m "${FLASHKERNEL_GPU_BUILD:-build/gpu}")  # tests run from other folders, too
jobs=$(($(nproc) < 24 ? $(nproc) : 24))
archs=${FLASHKERNEL_GPU_ARCHS:-generic sm75 sm80 sm90a}
steps=" ${FLASHKERNEL_GPU_STEPS:-conformance python paths sanitizers} "
mkdir -p "$out"
failed=0

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

# conformance NAME LOG FILTER SHARDS COMMAND...: the cases in shards side by side, each under COMMAND.
conformance() {
  local name=$1 log=$2 filter=$3 shards=$4 begin=$SECONDS status=0 pids=()
  shift 4
  rm -f "$out/$log".*
  for ((shard = 0; shard < shards; shard++)); do
    GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard OMP_NUM_THREADS=1 \
      ${@:-timeout 900} $build/tests_cpp/kernel_conformance --gtest_filter="$filter" --gtest_brief=1 >"$out/$log.$shard" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=1; done
  cat "$out/$log".[0-9]* >"$out/$log.log"
  rm -f "$out/$log".[0-9]*
  local passed failures
  passed=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test.*/\1/p' "$out/$log.log" | awk '{n += $1} END {print n + 0}')
  failures=$(grep -cE '^\[  FAILED  \] .*\(' "$out/$log.log")
  row "$name" "${passed:-0} passed, $failures failed$(grep -hE '(ERROR|RACECHECK) SUMMARY' "$out/$log.log" |
    awk '{n += $4; c++} END {if (NR) print ", " n " errors in " c " processes"}')" $((SECONDS - begin)) $status
}

row "library" "$(stat -Lc %s $build/libflashkernel.so | awk '{printf "%.1f MB", $1 / 1e6}')" - 0
if [[ $steps == *" conformance "* ]]; then
  for arch in $archs; do  # a path at a time
    conformance "conformance, $arch" "conformance_$arch" "*cuda/$arch*-*past_2_31*" $jobs
  done
  # Tensors that span gigabytes, up to 50 in a case: in few processes, or they leave each other no memory.
  conformance "conformance, strides past 2^31" conformance_far '*cuda*past_2_31*' 2
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

# Sanitizers, side by side: leave out the strides past 2^31, whose tensors span gigabytes. synccheck also leaves out decode by
# clusters: it ends every launch of 16 blocks a cluster with an illegal access (docs/kernels/attention_decode.md).
if [[ $steps == *" sanitizers "* ]]; then
  export FK_CONFORMANCE_SAMPLE=${FLASHKERNEL_SANITIZER_SAMPLE:-1} FK_CONFORMANCE_PART=${FLASHKERNEL_SANITIZER_PART:-0/1}
  tools=() statuses="$out/sanitizers"
  rm -rf "$statuses" && mkdir "$statuses"
  for tool in memcheck racecheck initcheck synccheck; do
    (
      without='*past_2_31*'
      [ $tool = synccheck ] && without+=':attention_fwd/cuda/sm90a/decode/*'
      conformance "compute-sanitizer $tool, one case in $FK_CONFORMANCE_SAMPLE${FLASHKERNEL_SANITIZER_PART:+, part $FLASHKERNEL_SANITIZER_PART}" "$tool" "*cuda*-$without" $((jobs / 4 + 1)) \
        timeout "${FLASHKERNEL_SANITIZER_SECONDS:-1500}" compute-sanitizer --tool $tool --error-exitcode 1
      echo $failed >"$statuses/$tool"
    ) &
    tools+=($!)
  done
  wait "${tools[@]}"
  [ "$(sort -u "$statuses"/*)" = 0 ] || failed=1
  rm -rf "$statuses"
fi

exit $failed
