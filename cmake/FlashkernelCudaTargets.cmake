# The CUDA backend's object libraries: which folder is compiled for which architectures, and the warnings that fail a build.
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90)  # what targets that name none get
endif()
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)

# FLASHKERNEL_CUDA_FAST_COMPILE: to see that the kernels compile, not to run them. PTX by the compiler's quickest form is enough,
# where an architecture of the list is virtual: ptxas and half of cicc are left out. That form breaks what is written for 9.0a
# (setmaxnreg is ignored, wgmma waits after each), so one instance of each of those kernels is compiled as for users, and checked
# (ptxas_checked.sh, kernel_resources.py): in tests_cpp/checked_instances for attention and linear's tiles, in the library for the others.
set(_fast_compile "")
if(FLASHKERNEL_CUDA_FAST_COMPILE AND CMAKE_CUDA_COMPILER_ID STREQUAL "NVIDIA" AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  set(_fast_compile --Ofast-compile=max)
endif()

# The fatbins hold several archs: compressed, the library is half as large, and a fifth smaller again in the mode for size,
# which the drivers read that CUDA 13 needs anyway.
set(_compress -Xfatbin=-compress-all)
if(_fast_compile)
  set(_compress --compress-mode=speed)
elseif(CMAKE_CUDA_COMPILER_ID STREQUAL "NVIDIA" AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  set(_compress --compress-mode=size)
endif()
set(_cuda_flags --expt-relaxed-constexpr ${_compress} -diag-suppress=20012 -Xcompiler=-Wall,-Wextra)

# flashkernel_add_cuda_objects(name "archs" source...)
function(flashkernel_add_cuda_objects name archs)
  if(NOT ARGN)
    return()
  endif()
  add_library(${name} OBJECT ${ARGN})
  set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${archs}" CUDA_VISIBILITY_PRESET hidden
                                           CUDA_RUNTIME_LIBRARY Static)
  target_link_libraries(${name} PRIVATE flashkernel_options)
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${_cuda_flags}>)
  if(NOT name MATCHES "sm90a")
    target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${_fast_compile}>)
  endif()
  set(_object_libraries ${_object_libraries} ${name} PARENT_SCOPE)
endfunction()

# ptxas' warnings about a target's tensor-core kernels become errors.
function(flashkernel_check_ptxas name)
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=--warn-on-spills>)
  if(UNIX)
    set(_launcher ${PROJECT_SOURCE_DIR}/cmake/ptxas_checked.sh ${CMAKE_CUDA_COMPILER_LAUNCHER})  # no empty element
    set_target_properties(${name} PROPERTIES CUDA_COMPILER_LAUNCHER "${_launcher}")
  endif()
endfunction()

# As flashkernel_add_cuda_objects, for sources that ask nothing newer than `base` (75 or 80): PTX is made once and assembled for
# each arch of the list, where otherwise half of the compiler's time, from C++ to PTX, is spent again on the same text for each. What
# has no machine code in the list compiles that PTX. From 80: no __CUDA_ARCH__ over 800, no need to start early
# (LaunchShape::early: without PTX for 9.0 such a launch starts in order). From 75: the same, and no bf16 result for every
# element read, whose rounding is one instruction from 8.0 on.
function(flashkernel_add_cuda_objects_once name base archs)
  set(_own ${archs})
  set(_once)
  if("${base}-real" IN_LIST archs AND "90" IN_LIST archs)  # a list for several GPUs
    set(_code compute_${base})
    foreach(_arch IN LISTS archs)
      if(_arch MATCHES "^([0-9]+)(-real)?$" AND CMAKE_MATCH_1 GREATER_EQUAL base)
        list(APPEND _code sm_${CMAKE_MATCH_1})
        list(REMOVE_ITEM _own ${_arch})
      endif()
    endforeach()
    list(JOIN _code "," _code)
    set(_once "--generate-code=arch=compute_${base},code=[${_code}]")
    if(NOT _own)
      set(_own OFF)
    endif()
  endif()
  flashkernel_add_cuda_objects(${name} "${_own}" ${ARGN})
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${_once}>)
  set(_object_libraries ${_object_libraries} PARENT_SCOPE)
endfunction()

file(GLOB _cuda_host CONFIGURE_DEPENDS ${_src}/cuda/*.cpp ${_src}/cuda/host/*.cpp ${_src}/cuda/pipeline/*.cpp ${_src}/memory/cuda_*.cpp)
list(APPEND _private_libraries CUDA::cudart_static)
flashkernel_add_objects(flashkernel_cuda_host ${_cuda_host})
target_include_directories(flashkernel_cuda_host SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})

# A folder of src/cuda named after an architecture holds what is compiled for that alone; the others hold what every GPU runs.
file(GLOB_RECURSE _cuda_generic CONFIGURE_DEPENDS ${_src}/cuda/*.cu)
foreach(_arch sm75 sm80 sm90a)
  set(_cuda_${_arch} ${_cuda_generic})
  list(FILTER _cuda_${_arch} INCLUDE REGEX "/${_arch}/")
  list(FILTER _cuda_generic EXCLUDE REGEX "/${_arch}/")
endforeach()
set(_cuda_generic_75 ${_cuda_generic})
list(FILTER _cuda_generic_75 INCLUDE REGEX "/cuda/(attention/.*|kv/find_bad_page|linear/generic/[a-z_]+)\\.cu$")
set(_cuda_generic_80 ${_cuda_generic})
list(FILTER _cuda_generic_80 INCLUDE REGEX "/cuda/(linear/gradient|norm/norm_bwd)\\.cu$")
list(REMOVE_ITEM _cuda_generic ${_cuda_generic_75} ${_cuda_generic_80})
flashkernel_add_cuda_objects(flashkernel_cuda_generic "${FLASHKERNEL_CUDA_ARCHITECTURES}" ${_cuda_generic})
flashkernel_add_cuda_objects_once(flashkernel_cuda_generic_75 75 "${FLASHKERNEL_CUDA_ARCHITECTURES}" ${_cuda_generic_75})
flashkernel_add_cuda_objects_once(flashkernel_cuda_generic_80 80 "${FLASHKERNEL_CUDA_ARCHITECTURES}" ${_cuda_generic_80})

# sm90a code runs on 9.0 alone, sm75 code is what 7.5 needs: their attention is built where that is asked for (or where the
# list is not of numbers).
set(FK_WITH_SM75 0)
set(FK_WITH_SM90A 0)
set(_sm80_architectures)
foreach(_arch IN LISTS FLASHKERNEL_CUDA_ARCHITECTURES)
  string(REGEX MATCH "^[0-9]+" _number "${_arch}")
  if(NOT _number OR _number EQUAL 75)
    set(FK_WITH_SM75 1)
  endif()
  if(NOT _number OR _number EQUAL 90)
    set(FK_WITH_SM90A 1)
  endif()
  if(NOT _number OR _number GREATER_EQUAL 80)  # also "native", "all", ...
    list(APPEND _sm80_architectures ${_arch})
  endif()
endforeach()

# Tensor-core kernels for 8.0 and later: those of the architectures above that are.
if(NOT _sm80_architectures)
  set(_sm80_architectures 80-virtual)  # nothing but Turing was asked for: PTX keeps the table whole
endif()
# Files that take long: those whose kernels ask nothing of 9.0 are made into PTX once.
set(_cuda_sm80_once ${_cuda_sm80})
list(FILTER _cuda_sm80_once INCLUDE REGEX "/(forward/sm80/.*|backward/sm80/instances/f32_.*|decode/sm80/instances/d[0-9_d]+|linear/(few_rows|tiles)/.*)\\.cu$")
list(REMOVE_ITEM _cuda_sm80 ${_cuda_sm80_once})
flashkernel_add_cuda_objects(flashkernel_cuda_sm80 "${_sm80_architectures}" ${_cuda_sm80})
flashkernel_add_cuda_objects_once(flashkernel_cuda_sm80_once 80 "${_sm80_architectures}" ${_cuda_sm80_once})

# Tensor-core kernels for 7.5, and their PTX: newer GPUs can be forced onto this path. Where 7.5 was not asked for, the
# attention kernels are left out and linear's PTX keeps its table whole.
set(_sm75_architectures 75)
if(NOT FK_WITH_SM75)
  set(_sm75_architectures 75-virtual)
  list(FILTER _cuda_sm75 EXCLUDE REGEX "/attention/")
endif()
flashkernel_add_cuda_objects(flashkernel_cuda_sm75 "${_sm75_architectures}" ${_cuda_sm75})

# Kernels for Hopper alone (wgmma, TMA, setmaxnreg) exist for 9.0a alone. Without 9.0 in the list the table has no row of them.
if(FK_WITH_SM90A)
  if(_fast_compile)  # attention, linear's tiles, and fp16's twins of bf16's kernels
    set(_twins ${_cuda_sm90a})
    list(FILTER _twins INCLUDE REGEX "/(linear/.*/(f16|gemm_b?f16)|attention/.*)\\.cu$")
    list(REMOVE_ITEM _cuda_sm90a ${_twins})
    flashkernel_add_cuda_objects(flashkernel_cuda_twins "90a-virtual" ${_twins})
  endif()
  flashkernel_add_cuda_objects(flashkernel_cuda_sm90a "90a-real" ${_cuda_sm90a})
  flashkernel_check_ptxas(flashkernel_cuda_sm90a)
endif()
target_compile_definitions(flashkernel_cuda_host PRIVATE FK_WITH_SM75=${FK_WITH_SM75} FK_WITH_SM90A=${FK_WITH_SM90A})
