# The library: object files once, a library for users (shared, or static) and a static one for the tests that look inside.
find_package(Threads REQUIRED)

configure_file(${PROJECT_SOURCE_DIR}/include/flashkernel/version.hpp.in ${PROJECT_BINARY_DIR}/include/flashkernel/version.hpp @ONLY)
# flashkernel/flashkernel.hpp includes every public header.
file(GLOB _public RELATIVE ${PROJECT_SOURCE_DIR}/include CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/include/flashkernel/*.hpp)
list(APPEND _public flashkernel/version.hpp)
list(TRANSFORM _public REPLACE ".+" "#include \"\\0\"")
list(JOIN _public "\n" _public)
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/include/flashkernel/flashkernel.hpp CONTENT "// Everything.\n#pragma once\n\n@_public@\n" @ONLY)

set(_src ${PROJECT_SOURCE_DIR}/src)
add_library(flashkernel_options INTERFACE)
target_include_directories(flashkernel_options INTERFACE ${PROJECT_SOURCE_DIR}/include ${PROJECT_BINARY_DIR}/include ${_src})
target_compile_definitions(flashkernel_options INTERFACE FLASHKERNEL_BUILD $<$<NOT:$<BOOL:${BUILD_SHARED_LIBS}>>:FLASHKERNEL_STATIC>)
target_link_libraries(flashkernel_options INTERFACE Threads::Threads)
if(MSVC)
  set(_cxx_flags /W4 /bigobj)
  set(_werror /WX)
else()
  # No -ffast-math: NaN and infinity are part of the contract. No errno or trapping maths: sqrt becomes an instruction.
  set(_cxx_flags -Wall -Wextra -Wpedantic -fno-math-errno -fno-trapping-math)
  set(_werror -Werror)
endif()
target_compile_options(flashkernel_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${_cxx_flags}>)
if(FLASHKERNEL_WERROR)
  target_compile_options(flashkernel_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${_werror}>)
endif()
if(FLASHKERNEL_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${FLASHKERNEL_SANITIZE}> $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer> -g1)
  add_link_options(-fsanitize=${FLASHKERNEL_SANITIZE})
  if(FLASHKERNEL_SANITIZE MATCHES "undefined")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=undefined>)
  endif()
endif()

# What most files include and takes long to read.
set(_precompiled_headers <algorithm> <atomic> <cmath> <cstdint> <cstring> <functional> <limits> <map> <memory> <mutex> <optional> <string>
    <utility> <vector>)
set(_object_libraries)
set(_private_libraries Threads::Threads)

# flashkernel_add_objects(name source... [KERNELS] [FLAGS flag...] [PRECOMPILED header...]): one folder's objects with the folder's own compile flags.
# KERNELS: without a stack protector. With it attention took about 2 % longer (AVX2); what kernels are given, src/ops has
# checked before. For that reason what launches CUDA's has none either, nor other flags for nvcc's host compiler.
function(flashkernel_add_objects name)
  cmake_parse_arguments(ARG "KERNELS" "" "FLAGS;PRECOMPILED" ${ARGN})
  add_library(${name} OBJECT ${ARG_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE flashkernel_options flashkernel_hardening
    flashkernel_$<$<BOOL:${ARG_KERNELS}>:no_>stack_protector)
  target_compile_options(${name} PRIVATE ${ARG_FLAGS})
  list(LENGTH ARG_UNPARSED_ARGUMENTS _count)
  if(FLASHKERNEL_PRECOMPILED_HEADERS AND _count GREATER 7)
    target_precompile_headers(${name} PRIVATE ${_precompiled_headers} ${ARG_PRECOMPILED})
  endif()
  set(_object_libraries ${_object_libraries} ${name} PARENT_SCOPE)
endfunction()

# Ninja starts objects in this order: those that take long first, so that no core waits for one of them at the end.
if(FLASHKERNEL_WITH_CUDA)
  include(FlashkernelCudaTargets)
else()
  file(GLOB _no_cuda CONFIGURE_DEPENDS ${_src}/no_cuda/*.cpp)
  flashkernel_add_objects(flashkernel_no_cuda ${_no_cuda})
endif()

# CPU kernels for newer instruction sets: each folder has its flags, and kernels.cpp learns that the folders exist.
# They use builtins and pragmas that GCC and Clang share; another compiler builds the scalar kernels alone.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
  # Each level tunes for the processors that have it; contraction to FMA is meant.
  set(_avx2_flags -mavx2 -mfma -mf16c -mtune=haswell)
  set(_avx512_flags ${_avx2_flags} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512cd -mprefer-vector-width=512)
  set(_avx512_vnni_flags ${_avx512_flags} -mavx512vnni)
  set(_amx_flags ${_avx512_flags} -mavx512bf16 -mamx-tile -mamx-bf16)
  set(_isas avx2 avx512 avx512_vnni)
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux")  # the only system that is asked for tile state, see core/cpu_features.cpp
    list(APPEND _isas amx)
  endif()
  # native: a machine that only runs what it has built needs no kernels of instruction sets that its processor lacks: a
  # third of the compiler's time where that is AVX-512. AVX2 stays: what runs such a build elsewhere has that at least.
  if(FLASHKERNEL_CPU STREQUAL "native" AND NOT CMAKE_CROSSCOMPILING)
    include(CheckCXXSourceRuns)
    set(_avx512_feature avx512bw)
    set(_avx512_vnni_feature avx512vnni)
    set(_amx_feature amx-tile)
    foreach(_isa avx512 avx512_vnni amx)
      check_cxx_source_runs("int main() { return !__builtin_cpu_supports(\"${_${_isa}_feature}\"); }" FLASHKERNEL_HAS_${_isa})
      if(NOT FLASHKERNEL_HAS_${_isa})
        list(REMOVE_ITEM _isas ${_isa})
      endif()
    endforeach()
  elseif(FLASHKERNEL_CPU MATCHES "^(scalar|avx2|avx512)$")  # nothing above it: less to compile where only some of it is run
    set(_levels scalar avx2 avx512 avx512_vnni amx)
    list(FIND _levels ${FLASHKERNEL_CPU} _highest)
    foreach(_isa IN LISTS _isas)
      list(FIND _levels ${_isa} _level)
      if(_level GREATER _highest)
        list(REMOVE_ITEM _isas ${_isa})
      endif()
    endforeach()
  elseif(NOT FLASHKERNEL_CPU MATCHES "^(all|native)$")
    message(FATAL_ERROR "flashkernel: FLASHKERNEL_CPU is '${FLASHKERNEL_CPU}'; it has to be all, native, scalar, avx2 or avx512")
  endif()
  foreach(_isa IN LISTS _isas)
    string(TOUPPER ${_isa} _define)
    set_property(SOURCE ${_src}/cpu/kernels.cpp APPEND PROPERTY COMPILE_DEFINITIONS FK_CPU_${_define})
  endforeach()
  list(JOIN _isas " " _isas_in_words)
  if(NOT _isas)
    set(_isas_in_words "no instruction set beyond the compiler's")
  endif()
  message(STATUS "flashkernel: CPU kernels for ${_isas_in_words} (FLASHKERNEL_CPU=${FLASHKERNEL_CPU})")
  if(MINGW AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC aligns the stack to 16 bytes there, yet spills wider registers with aligned moves (its bug 54412).
    list(APPEND _avx2_flags -Wa,-muse-unaligned-vector-move)
    list(APPEND _avx512_flags -Wa,-muse-unaligned-vector-move)
    list(APPEND _avx512_vnni_flags -Wa,-muse-unaligned-vector-move)
  endif()
  foreach(_isa IN LISTS _isas)
    file(GLOB _sources CONFIGURE_DEPENDS ${_src}/cpu/${_isa}/*.cpp)
    if(_sources)
      flashkernel_add_objects(flashkernel_cpu_${_isa} ${_sources} KERNELS FLAGS ${_${_isa}_flags}
                              PRECOMPILED <immintrin.h> ${_src}/ops/op_list.hpp)
    endif()
  endforeach()
endif()

file(GLOB _portable CONFIGURE_DEPENDS ${_src}/core/*.cpp ${_src}/ops/*.cpp ${_src}/cpu/*.cpp ${_src}/cpu/scalar/*.cpp
     ${_src}/memory/*.cpp ${_src}/c/*.cpp)
list(FILTER _portable EXCLUDE REGEX "memory/cuda_")
flashkernel_add_objects(flashkernel_portable ${_portable})

set(_objects)
foreach(_library IN LISTS _object_libraries)
  list(APPEND _objects $<TARGET_OBJECTS:${_library}>)
endforeach()

add_library(flashkernel ${_objects})  # shared, or static with BUILD_SHARED_LIBS=OFF: kernels are rows of tables, so a linker drops none
add_library(flashkernel::flashkernel ALIAS flashkernel)
target_include_directories(flashkernel PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                              $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include>)
target_compile_features(flashkernel PUBLIC cxx_std_17)
target_link_libraries(flashkernel PRIVATE ${_private_libraries} $<BUILD_INTERFACE:flashkernel_hardening>)
if(NOT BUILD_SHARED_LIBS)
  target_compile_definitions(flashkernel PUBLIC FLASHKERNEL_STATIC)
endif()
if(UNIX AND NOT APPLE)  # visibility can't hide std templates: their namespace asks for the default
  target_link_options(flashkernel PRIVATE $<BUILD_INTERFACE:-Wl,--version-script=${PROJECT_SOURCE_DIR}/cmake/flashkernel.map>)
  set_target_properties(flashkernel PROPERTIES LINK_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/flashkernel.map)
endif()

# What the tests link: the same objects with the internals visible to the linker.
add_library(flashkernel_internal STATIC EXCLUDE_FROM_ALL ${_objects})
target_link_libraries(flashkernel_internal PUBLIC flashkernel_options ${_private_libraries})
target_compile_definitions(flashkernel_internal INTERFACE FLASHKERNEL_STATIC)
