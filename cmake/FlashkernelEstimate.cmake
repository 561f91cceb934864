# Says before a build of the library how long it takes: what lab/build_time.md measured, in seconds of a core, by the cores
# that there are. A build with tests is for those who know.
if(FLASHKERNEL_TESTS OR FLASHKERNEL_SANITIZE OR CCACHE)  # a cache may make it any time at all
  return()
endif()
include(ProcessorCount)
ProcessorCount(_cores)
if(_cores EQUAL 0)
  set(_cores 1)
endif()

set(_seconds 65)
foreach(_part_seconds python:30 avx2:55 avx512:65 amx:25)
  string(REGEX MATCH "^([a-z0-9]+):([0-9]+)$" _ ${_part_seconds})
  if(TARGET flashkernel_${CMAKE_MATCH_1} OR TARGET flashkernel_cpu_${CMAKE_MATCH_1})
    math(EXPR _seconds "${_seconds} + ${CMAKE_MATCH_2}")
  endif()
endforeach()
if(FLASHKERNEL_WITH_CUDA)  # headers and the host's code once, the rest for each GPU; 9.0 has kernels of its own besides
  list(LENGTH FLASHKERNEL_CUDA_ARCHITECTURES _gpus)
  math(EXPR _seconds "${_seconds} + 250 + 360 * ${_gpus}")
  if(";${FLASHKERNEL_CUDA_ARCHITECTURES}" MATCHES ";90")
    math(EXPR _seconds "${_seconds} + 500")
  endif()
endif()
math(EXPR _seconds "(${_seconds} / ${_cores} + 19) / 10 * 10")  # in tens
set(_longest 20)  # one file, on any number of cores; with CUDA the backward of sm_80 for head dims 192 and 256
if(FLASHKERNEL_WITH_CUDA)
  math(EXPR _longest "20 + 25 * ${_gpus}")
endif()
if(_seconds LESS _longest)
  set(_seconds ${_longest})
endif()
message(STATUS "flashkernel: the build takes about ${_seconds} s on ${_cores} quick cores that are idle, twice as long on slow ones")
