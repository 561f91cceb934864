#!/usr/bin/env bash
# scripts/sanitize.sh asan|tsan: builds the C++ tests with sanitizers and runs them (tsan: those with threads).
# FLASHKERNEL_CI=quick: asan takes a tenth of the conformance cases, and not the C++ generation example; headers are precompiled.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
preset=${1:?asan or tsan}

export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1
configure=() leave_out=()
if [ "${FLASHKERNEL_CI:-}" = quick ]; then
  export FK_CONFORMANCE_SAMPLE=10
  configure=(-DFLASHKERNEL_PRECOMPILED_HEADERS=ON) leave_out=(-E '^gpt2_cpp$')
fi
junit=(--output-junit "$PWD/build/$preset/ctest.xml")
cmake --preset "$preset" "${configure[@]}" >/dev/null
case $preset in
  asan)
    cmake --build --preset asan | grep -vE '^\[[0-9]+/' || true
    # What is compared and repeated elsewhere is only run here. Not by the scalar kernels what is long for the sake of
    # others' tiles: it was half of the time.
    others=$(printf ':%s' attention_bwd/cpu/scalar.{long,tiles}_* linear/cpu/scalar.{waves,cluster,few,edges,groups}_*)
    GTEST_FILTER="-${others#:}" FK_CONFORMANCE_ORACLE=0 FK_CONFORMANCE_REPEATS=1 ctest --preset asan "${junit[@]}" "${leave_out[@]}" -j "$(nproc)"
    ;;
  tsan)
    tests=(thread_pool_test memory_resource_test kv_page_pool_test kv_cache_random_test pairs_of_threads_test)
    cmake --build --preset tsan --target "${tests[@]}" | grep -vE '^\[[0-9]+/' || true
    ctest --preset tsan "${junit[@]}" -j "$(nproc)" -R "^($(IFS='|'; echo "${tests[*]}"))\$"
    ;;
esac
