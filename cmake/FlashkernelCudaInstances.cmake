# The tensor-core kernels' instances: op x arch x dtype x head_dim bucket. From this one list come, in the build tree, one
# .cu file an instance and cuda/<arch>/<op>_instances.inc, from which src/cuda/kernels.cpp makes its declarations and rows.
set(_instances
    # op             arch  dtypes      head_dim buckets
    "attention_fwd | sm80 | f16 bf16 | 32 64 96 128 192 256"
    "attention_bwd | sm80 | f16 bf16 | 32 64 96 128")

set(_tables)
set(_type_f16 __half)
set(_type_bf16 __nv_bfloat16)
set(_dtype_f16 kFloat16)
set(_dtype_bf16 kBFloat16)
set(_generated ${PROJECT_BINARY_DIR}/generated)

# sm90a code runs on 9.0 alone: its instances are made where that is asked for (or where the list is not of numbers).
set(_with_sm90a OFF)
foreach(_arch IN LISTS FLASHKERNEL_CUDA_ARCHITECTURES)
  if(NOT _arch MATCHES "^[0-9]" OR _arch MATCHES "^90")
    set(_with_sm90a ON)
  endif()
endforeach()

foreach(_line IN LISTS _instances)
  string(REGEX MATCH "^([a-z_]+) +\\| +([a-z0-9]+) +\\| +([a-z0-9 ]+) +\\| +([0-9 ]+)$" _ "${_line}")
  set(OP ${CMAKE_MATCH_1})
  set(ARCH ${CMAKE_MATCH_2})
  list(APPEND _tables ${ARCH}/${OP})
  if(ARCH STREQUAL "sm90a" AND NOT _with_sm90a)
    continue()
  endif()
  separate_arguments(_dtypes UNIX_COMMAND "${CMAKE_MATCH_3}")
  separate_arguments(_dims UNIX_COMMAND "${CMAKE_MATCH_4}")
  foreach(SUFFIX IN LISTS _dtypes)
    set(TYPE ${_type_${SUFFIX}})
    set(DTYPE ${_dtype_${SUFFIX}})
    foreach(DIM IN LISTS _dims)
      set(_file ${_generated}/cuda/${ARCH}/${OP}_${SUFFIX}_d${DIM}.cu)
      configure_file(${PROJECT_SOURCE_DIR}/src/cuda/instance.cu.in ${_file} @ONLY)
      list(APPEND _sources_${ARCH} ${_file})
      string(APPEND _rows_${OP}_${ARCH} "FK_INSTANCE(${OP}, ${SUFFIX}, ${DTYPE}, ${DIM})\n")
    endforeach()
  endforeach()
endforeach()

foreach(_table IN LISTS _tables)
  get_filename_component(ARCH ${_table} DIRECTORY)
  get_filename_component(OP ${_table} NAME)
  file(CONFIGURE OUTPUT ${_generated}/cuda/${_table}_instances.inc CONTENT "${_rows_${OP}_${ARCH}}")
endforeach()
