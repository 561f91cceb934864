#!/usr/bin/env bash
# scripts/sanitize.sh asan|tsan: builds the C++ tests with sanitizers and runs them (tsan: those with threads).
# FLASHKERNEL_CI=quick: asan takes one in 20 of the conformance cases and builds no CPU kernels above AVX2, whose templates the
# others share, and tsan none above scalar ones. asan leaves out what reads, installs or compiles files and two tests of
# attention that are long there and run without a sanitizer too; headers are precompiled.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
preset=${1:?asan or tsan}

export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1
configure=() leave_out=() targets=()
if [ "${FLASHKERNEL_CI:-}" = quick ]; then
  export FK_CONFORMANCE_SAMPLE=20 FK_CONFORMANCE_EACH_ROW=1
  highest=avx2
  [ "$preset" = asan ] || highest=scalar  # its tests are of threads, not of what they compute
  configure=(-DFLASHKERNEL_PRECOMPILED_HEADERS=ON -DFLASHKERNEL_CPU=$highest)
  leave_out=(-E '^(gpt2_cpp|install|consumer.*|c_pkg_config|c_abi|hardening_.*|no_weak_symbols_.*|public_headers_test|attention_long_test|attention_gradient_test)$')
  targets=(--target kernel_conformance)
  for source in tests_cpp/*_test.cpp; do
    name=$(basename "$source" .cpp)
    case $name in public_headers_test | attention_long_test | attention_gradient_test) ;; *) targets+=("$name") ;; esac
  done
fi
quietly() { grep -vE '^\[[0-9]+/' || true; }  # what the build says beside its steps; where it fails, so does the script
junit=(--output-junit "$PWD/build/$preset/ctest.xml")
cmake --preset "$preset" "${configure[@]}" >/dev/null
case $preset in
  asan)
    cmake --build --preset asan "${targets[@]}" | quietly
    # What is compared and repeated elsewhere is only run here. Not by the scalar kernels what is long for the sake of
    # others' tiles: it was half of the time.
    others=$(printf ':%s' attention_bwd/cpu/scalar.{long,tiles}_* linear/cpu/scalar.{waves,cluster,few,edges,groups}_*)
    GTEST_FILTER="-${others#:}" FK_CONFORMANCE_ORACLE=0 FK_CONFORMANCE_REPEATS=1 ctest --preset asan "${junit[@]}" "${leave_out[@]}" -j "$(nproc)"
    ;;
  tsan)
    tests=(thread_pool_test memory_resource_test kv_page_pool_test kv_cache_random_test pairs_of_threads_test side_by_side)
    cmake --build --preset tsan --target "${tests[@]/side_by_side/kernel_conformance}" | quietly
    ctest --preset tsan "${junit[@]}" -j "$(nproc)" -R "^($(IFS='|'; echo "${tests[*]}"))\$"
    ;;
esac
