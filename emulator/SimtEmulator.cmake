# A GPU that is a program: CUDA sources compiled as C++ over headers of this folder (README.md). Included by tests_cpp, which
# compiles the library's kernels with it; nothing here is part of the library, or knows it beyond its compile options.
#
#   simt_prepare_device_file(file root result)     a .cu or .cuh file as a C++ compiler takes it; `result` is what to compile
#   simt_add_device_objects(name source...)        an object library of prepared kernels
#   simt_add_race_checked_objects(name source...) the same with a call at each memory access, for the search for races
#   simt_runtime                                   the objects that each program links beside its kernels
set(_simt ${CMAKE_CURRENT_LIST_DIR})
include(CheckCXXCompilerFlag)
check_cxx_compiler_flag(-march=native FLASHKERNEL_HAS_MARCH_NATIVE)

# Device code leans on what its own compiler allows: type punning, and an FMA for a product and a sum.
set(_flags -g1 -fno-strict-aliasing -ffp-contract=fast -Wno-unknown-pragmas -Wno-unused-parameter -Wno-psabi -Wno-maybe-uninitialized
    -Wno-missing-field-initializers)
if(FLASHKERNEL_HAS_MARCH_NATIVE)
  list(APPEND _flags -march=native)  # built and run on one machine; fp16 conversions and fmaf become instructions
endif()

# `extern __shared__ T name[];` has no counterpart in C++: files that have it are copied with a call in its place (and __noinline__,
# which C++ headers use as a word of their own, is spelled out). The rest is compiled where it lies.
set(_prepared ${CMAKE_CURRENT_BINARY_DIR}/prepared)
function(simt_prepare_device_file file root result)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  file(RELATIVE_PATH _relative ${root} ${file})
  set(_compiled ${file})
  file(READ ${file} _text)
  if(_text MATCHES "extern __shared__|__noinline__")
    string(REPLACE "__noinline__" "__attribute__((noinline))" _text "${_text}")
    string(REGEX REPLACE "extern __shared__ __align__\\(([0-9]+)\\) ([A-Za-z_0-9: ]+) ([A-Za-z_0-9]+)\\[\\];"
           "\\2* const \\3 = static_cast<\\2*>(::simt::dynamic_shared(\\1));" _text "${_text}")
    string(REGEX REPLACE "extern __shared__ ([A-Za-z_0-9: ]+) ([A-Za-z_0-9]+)\\[\\];"
           "\\1* const \\2 = static_cast<\\1*>(::simt::dynamic_shared(alignof(\\1)));" _text "${_text}")
    set(_compiled ${_prepared}/${_relative})
    file(CONFIGURE OUTPUT ${_compiled} CONTENT "#line 1 \"${file}\"\n${_text}" @ONLY)
  else()
    file(REMOVE ${_prepared}/${_relative})
  endif()
  set(${result} ${_compiled} PARENT_SCOPE)
endfunction()

add_library(simt_emulator INTERFACE)
target_include_directories(simt_emulator INTERFACE ${_simt}/toolkit ${_simt} ${_prepared})
target_link_libraries(simt_emulator INTERFACE flashkernel_options)
target_compile_options(simt_emulator INTERFACE ${_flags})

# Kernels as objects. Their __shared__ variables lie together in memory: so they can be poisoned. The order of the sources is
# what matters.
# nvcc includes cuda_runtime.h before anything else. Where a target has a precompiled header, that begins with it.
set(_plain "$<NOT:$<BOOL:$<TARGET_PROPERTY:PRECOMPILE_HEADERS>>>")
set(_as_device_code -x c++ "$<${_plain}:-include>" "$<${_plain}:cuda_runtime.h>")
function(simt_add_device_objects name)
  add_library(${name} OBJECT ${_simt}/simt/shared_begin.cpp ${ARGN} ${_simt}/simt/shared_end.cpp)
  target_link_libraries(${name} PRIVATE simt_emulator)
  target_compile_options(${name} PRIVATE -O1)  # what they run for is in the runtime: the same time as at -O2
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)  # thread_local without calls
  set_source_files_properties(${ARGN} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "${_as_device_code}")
endfunction()
# The same with a call at each memory access, which simt/race_hooks.cpp takes: no access that the source does not have.
function(simt_add_race_checked_objects name)
  simt_add_device_objects(${name} ${ARGN} ${_simt}/simt/race_on.cpp)
  target_compile_options(${name} PRIVATE -fsanitize=thread -fno-tree-vectorize -fno-tree-slp-vectorize
                         $<$<CXX_COMPILER_ID:GNU>:--param=tsan-instrument-func-entry-exit=0>)
endfunction()
file(GLOB _runtime CONFIGURE_DEPENDS ${_simt}/simt/*.cpp)
list(FILTER _runtime EXCLUDE REGEX "(shared_(begin|end)|race_on)\\.cpp$")
add_library(simt_runtime OBJECT ${_runtime})
target_link_libraries(simt_runtime PRIVATE simt_emulator)
target_compile_options(simt_runtime PRIVATE -O2)  # most of a run is here

# The emulator itself: planted mistakes that it must catch, and its matrix instructions against plain loops.
function(simt_prepare_device_files result)
  set(_all)
  foreach(_file IN LISTS ARGN)
    simt_prepare_device_file(${_file} ${_simt} _compiled)
    list(APPEND _all ${_compiled})
  endforeach()
  set(${result} ${_all} PARENT_SCOPE)
endfunction()
file(GLOB _selftest CONFIGURE_DEPENDS ${_simt}/selftest/*.cu)
simt_prepare_device_files(_selftest_kernels ${_selftest})
simt_add_device_objects(emulator_test_kernels ${_selftest_kernels})
target_link_libraries(emulator_test_kernels PRIVATE GTest::gtest)
add_executable(emulator_test $<TARGET_OBJECTS:emulator_test_kernels> $<TARGET_OBJECTS:simt_runtime>)
target_link_libraries(emulator_test PRIVATE GTest::gtest_main)
add_test(NAME emulator_test COMMAND emulator_test)
set_tests_properties(emulator_test PROPERTIES TIMEOUT 120)

# The search for races, which is a sanitizer itself: planted ones and their corrected twins, and all kernels on request.
if(NOT FLASHKERNEL_SANITIZE)
  simt_prepare_device_files(_racetest_kernels ${_simt}/racetest/races.cu)
  simt_add_race_checked_objects(emulator_race_test_kernels ${_racetest_kernels})
  target_link_libraries(emulator_race_test_kernels PRIVATE GTest::gtest)
  add_executable(emulator_race_test $<TARGET_OBJECTS:emulator_race_test_kernels> $<TARGET_OBJECTS:simt_runtime>)
  target_link_libraries(emulator_race_test PRIVATE GTest::gtest_main)
  add_test(NAME emulator_race_test COMMAND emulator_race_test)
  set_tests_properties(emulator_race_test PROPERTIES TIMEOUT 120)
endif()
