# The CUDA backend on the emulated GPU (emulator/README.md): the library's own kernels, and the conformance cases on top.
# Included by CMakeLists.txt. Nothing here is part of the library.
include(${PROJECT_SOURCE_DIR}/emulator/SimtEmulator.cmake)

file(GLOB_RECURSE _device_files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/*.cu ${PROJECT_SOURCE_DIR}/src/cuda/*.cuh)
set(_kernels)
foreach(_file IN LISTS _device_files)
  simt_prepare_device_file(${_file} ${PROJECT_SOURCE_DIR}/src _compiled)
  if(_file MATCHES "\\.cu$")
    list(APPEND _kernels ${_compiled})
  endif()
endforeach()

simt_add_device_objects(flashkernel_emulated_kernels ${_kernels})
if(FLASHKERNEL_PRECOMPILED_HEADERS)  # a third of the time of most of these files
  target_precompile_headers(flashkernel_emulated_kernels PRIVATE <cuda_runtime.h> <algorithm> <functional> <string> <vector>
                            ${_src}/ops/op_list.hpp ${_src}/cuda/host/launch.hpp)
endif()

file(GLOB _host CONFIGURE_DEPENDS ${_src}/cuda/host/*.cpp ${_src}/cuda/pipeline/*.cpp ${_src}/memory/cuda_*.cpp)
add_library(flashkernel_emulated_host OBJECT ${_host} ${CMAKE_CURRENT_SOURCE_DIR}/conformance/device_memory_cuda.cpp)
target_link_libraries(flashkernel_emulated_host PRIVATE simt_emulator)
target_include_directories(flashkernel_emulated_host PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
add_library(flashkernel_emulated_table OBJECT ${_src}/cuda/kernels.cpp ${_src}/cuda/float8_kernels.cpp
            ${_src}/cuda/fused_kernels.cpp)
target_link_libraries(flashkernel_emulated_table PRIVATE simt_emulator)
target_compile_definitions(flashkernel_emulated_table PRIVATE FK_WITH_SM75=1 FK_WITH_SM90A=1)  # the emulator takes any

set(_objects $<TARGET_OBJECTS:flashkernel_emulated_host> $<TARGET_OBJECTS:simt_runtime>)
foreach(_library IN LISTS _object_libraries)
  if(NOT _library MATCHES "cuda")
    list(APPEND _objects $<TARGET_OBJECTS:${_library}>)
  endif()
endforeach()

function(add_emulated_conformance name kernels)
  add_executable(${name} $<TARGET_OBJECTS:${kernels}> $<TARGET_OBJECTS:flashkernel_emulated_table> ${_objects}
                         $<TARGET_OBJECTS:conformance_cases>)
  target_link_libraries(${name} PRIVATE flashkernel_options GTest::gtest)
endfunction()
add_emulated_conformance(kernel_conformance_emulated flashkernel_emulated_kernels)

# Which row serves which call: the table's own functions on simulated GPUs, against a record (choices/choices.cpp).
add_executable(cuda_choices $<TARGET_OBJECTS:flashkernel_emulated_kernels> $<TARGET_OBJECTS:flashkernel_emulated_table>
                            ${_objects} choices/choices.cpp)
target_link_libraries(cuda_choices PRIVATE simt_emulator GTest::gtest_main)
target_include_directories(cuda_choices PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
add_test(NAME cuda_choices COMMAND cuda_choices)
set_tests_properties(cuda_choices PROPERTIES TIMEOUT 120 ENVIRONMENT "FK_EMULATOR_SMS=132")

# Attention with another head dim of values than of queries and keys: instances that no row of the table has, which the test
# calls by themselves. The table is the empty one of a build without CUDA.
file(GLOB _pairs CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/head_dim_pairs/*.cu)
simt_add_device_objects(head_dim_pairs_kernels ${_pairs})
add_executable(head_dim_pairs $<TARGET_OBJECTS:head_dim_pairs_kernels> ${_objects} ${_src}/no_cuda/kernels.cpp
                              conformance/test_tensor.cpp head_dim_pairs/pairs.cpp)
target_link_libraries(head_dim_pairs PRIVATE simt_emulator GTest::gtest_main)
target_include_directories(head_dim_pairs PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
add_test(NAME head_dim_pairs COMMAND head_dim_pairs)
set_tests_properties(head_dim_pairs PROPERTIES TIMEOUT 300)

# What ctest takes of the cases. Left out: the splits of decode by kernels that know none, a third of the time. Nothing is
# repeated: here each repetition is the same.
set(_sample "*cuda/*-attention_fwd/cuda/generic/naive.split_*:attention_fwd/cuda/generic/tiled.split_*")
string(APPEND _sample ":attention_fwd/cuda/sm??/???/d*.split_*:attention_fwd/cuda/sm??/????/d*.split_*")
string(APPEND _sample ":attention_fwd/cuda/sm90a/f16/d*.split_*:attention_fwd/cuda/sm90a/bf16/d*.split_*")

set(_timeout 900)
set(_larger 25)  # one in how many cases of a smaller head dim than the kernel is built for: the full form runs all
if(FLASHKERNEL_CUDA_EMULATION_SAMPLE LESS 5)
  set(_timeout 14400)
  set(_larger 1)
endif()

# The invariant mode: a row's bits among others, in chunks, in pages and decoded.
add_executable(invariance_emulated $<TARGET_OBJECTS:flashkernel_emulated_kernels> $<TARGET_OBJECTS:flashkernel_emulated_table>
                                   ${_objects} conformance/test_tensor.cpp invariance_emulated.cpp)
target_link_libraries(invariance_emulated PRIVATE simt_emulator GTest::gtest_main)
target_include_directories(invariance_emulated PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
set(_capabilities 90)
if(FLASHKERNEL_CUDA_EMULATION_SAMPLE LESS 5)
  set(_capabilities 75 80 90)
endif()
foreach(_capability IN LISTS _capabilities)
  add_test(NAME invariance_emulated_sm${_capability} COMMAND invariance_emulated --gtest_brief=1)
  set_tests_properties(invariance_emulated_sm${_capability} PROPERTIES TIMEOUT 900 ENVIRONMENT "FK_EMULATOR_CC=${_capability}")
endforeach()

# Four parts of a sample of the cases, each in another order of threads: minutes in all. A run by hand takes every case.
# Two of them start with numbers in memory, not NaN: a kernel that has NaN computed again hides its mistakes behind that.
set(_part 0)
set(_poison_forward 255)
set(_poison_reverse 63)
set(_poison_1 63)
set(_poison_2 255)
set(_launches ${CMAKE_CURRENT_BINARY_DIR}/launches)
file(MAKE_DIRECTORY ${_launches})
foreach(_order forward reverse 1 2)
  add_test(NAME kernel_conformance_emulated_${_order} COMMAND kernel_conformance_emulated --gtest_brief=1 --gtest_filter=${_sample})
  set_tests_properties(kernel_conformance_emulated_${_order} PROPERTIES TIMEOUT ${_timeout} COST 100 FIXTURES_SETUP launches ENVIRONMENT
    "FK_CONFORMANCE_LARGER_HEAD_DIMS=${_larger};FK_EMULATOR_ORDER=${_order};FK_EMULATOR_POISON=${_poison_${_order}};FK_CONFORMANCE_SAMPLE=${FLASHKERNEL_CUDA_EMULATION_SAMPLE};FK_CONFORMANCE_EACH_ROW=1;FK_CONFORMANCE_REPEATS=1;FK_CONFORMANCE_PART=${_part}/4;FK_EMULATOR_LAUNCHES=${_launches}/${_order}")
  math(EXPR _part "${_part} + 1")
endforeach()
# Fewer cases on the older GPUs: what a launch chooses by the device's limits.
math(EXPR _sample_older "20 * ${FLASHKERNEL_CUDA_EMULATION_SAMPLE}")
foreach(_capability 75 80)
  add_test(NAME kernel_conformance_emulated_sm${_capability} COMMAND kernel_conformance_emulated --gtest_brief=1 --gtest_filter=${_sample})
  set_tests_properties(kernel_conformance_emulated_sm${_capability} PROPERTIES TIMEOUT ${_timeout} COST 80 FIXTURES_SETUP launches ENVIRONMENT
    "FK_CONFORMANCE_LARGER_HEAD_DIMS=${_larger};FK_EMULATOR_CC=${_capability};FK_CONFORMANCE_SAMPLE=${_sample_older};FK_CONFORMANCE_REPEATS=1;FK_EMULATOR_LAUNCHES=${_launches}/sm${_capability}")
endforeach()

# A range of NVTX around each launch, for timelines, when it is asked for; none otherwise.
add_test(NAME nvtx_ranges COMMAND kernel_conformance_emulated --gtest_brief=1 --gtest_filter=add/cuda/generic.*)
set_tests_properties(nvtx_ranges PROPERTIES TIMEOUT 120 ENVIRONMENT "FLASHKERNEL_NVTX=1;FK_CONFORMANCE_SAMPLE=50"
  PASS_REGULAR_EXPRESSION "nvtx push add/cuda/generic\nnvtx pop\n")
add_test(NAME no_nvtx_ranges COMMAND kernel_conformance_emulated --gtest_brief=1 --gtest_filter=add/cuda/generic.*)
set_tests_properties(no_nvtx_ranges PROPERTIES TIMEOUT 120 ENVIRONMENT "FLASHKERNEL_NVTX=0;FK_CONFORMANCE_SAMPLE=50"
  FAIL_REGULAR_EXPRESSION "nvtx")

# On as many multiprocessors as an H200 has: decode by clusters of 16 blocks; few queries over keys in several parts.
add_test(NAME kernel_conformance_emulated_clusters
         COMMAND kernel_conformance_emulated --gtest_brief=1 --gtest_filter=*cuda/sm90a/decode/*.split_*:*cuda/sm90a/few_queries/*.*few_queries*)
set_tests_properties(kernel_conformance_emulated_clusters PROPERTIES TIMEOUT 600
  ENVIRONMENT "FK_EMULATOR_ORDER=reverse;FK_EMULATOR_SMS=132")
# Decode by a cluster a sequence and kv head, of up to 6 blocks, of which one or two find their place on 16.
add_test(NAME kernel_conformance_emulated_groups
         COMMAND kernel_conformance_emulated --gtest_brief=1 --gtest_filter=*cuda/sm90a/decode/*.*heads_of_*)
set_tests_properties(kernel_conformance_emulated_groups PROPERTIES TIMEOUT 600
  ENVIRONMENT "FK_EMULATOR_ORDER=reverse;FK_EMULATOR_SMS=16;FK_EMULATOR_RESIDENT=3")

# Linear's k shared by fewer blocks than a plan would take if larger clusters found room.
foreach(_blocks 2 3 5 6)
  add_test(NAME kernel_conformance_emulated_clusters_of_${_blocks}
           COMMAND kernel_conformance_emulated --gtest_brief=1 --gtest_filter=linear/cuda/sm90a/*/large/cluster.cluster_*:linear/cuda/sm90a/*/few_rows/*.few_parts_*:linear_bwd/cuda/sm90a/*sum_of*)
  set_tests_properties(kernel_conformance_emulated_clusters_of_${_blocks} PROPERTIES TIMEOUT 300
    ENVIRONMENT "FK_EMULATOR_ORDER=${_blocks};FK_EMULATOR_LARGEST_CLUSTER=${_blocks}")
endforeach()

# Blocks side by side: what they leave each other in global memory where no order is kept.
add_test(NAME kernel_conformance_emulated_resident
         COMMAND kernel_conformance_emulated --gtest_brief=1 --gtest_filter=attention_bwd/cuda/sm90a/*any_order*:attention_bwd/cuda/sm90a/*tiles_cut*)
set_tests_properties(kernel_conformance_emulated_resident PROPERTIES TIMEOUT 600 COST 50
  ENVIRONMENT "FK_CONFORMANCE_LARGER_HEAD_DIMS=${_larger};FK_EMULATOR_ORDER=2;FK_EMULATOR_RESIDENT=4;FK_EMULATOR_FREEZE=100000")

# The real library's kernels, launched in the shapes seen above, against every GPU's limits: needs cuobjdump and nvcc's code.
if(FLASHKERNEL_WITH_CUDA)
  find_package(Python3 COMPONENTS Interpreter)
  if(Python3_Interpreter_FOUND)
    set(_checked $<TARGET_FILE:flashkernel>)
    if(FLASHKERNEL_CUDA_FAST_COMPILE)  # what is compiled as for users
      set(_checked "")
      if(TARGET flashkernel_cuda_sm90a)
        set(_checked $<TARGET_OBJECTS:flashkernel_cuda_sm90a> $<TARGET_OBJECTS:flashkernel_cuda_checked_sm90a>)
      endif()
    endif()
    add_test(NAME kernel_resources COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/scripts/kernel_resources.py --check ${_checked}
             --launches ${_launches} $<TARGET_FILE:kernel_conformance_emulated> COMMAND_EXPAND_LISTS)
    set_tests_properties(kernel_resources PROPERTIES FIXTURES_REQUIRED launches TIMEOUT 300)
  endif()
endif()

# The search for races is a sanitizer itself: not beside another one.
if(FLASHKERNEL_SANITIZE)
  return()
endif()
simt_add_race_checked_objects(flashkernel_race_checked_kernels ${_kernels})
add_emulated_conformance(kernel_conformance_racecheck flashkernel_race_checked_kernels)
if(FLASHKERNEL_CUDA_EMULATION_RACECHECK)
  foreach(_shard 0 1)
    add_test(NAME kernel_conformance_racecheck_${_shard} COMMAND kernel_conformance_racecheck --gtest_brief=1 --gtest_filter=*cuda/*)
    set_tests_properties(kernel_conformance_racecheck_${_shard} PROPERTIES TIMEOUT 900 ENVIRONMENT
      "FK_CONFORMANCE_SAMPLE=100;GTEST_TOTAL_SHARDS=2;GTEST_SHARD_INDEX=${_shard}")
  endforeach()
else()
  set_target_properties(flashkernel_race_checked_kernels kernel_conformance_racecheck PROPERTIES EXCLUDE_FROM_ALL ON)
endif()
