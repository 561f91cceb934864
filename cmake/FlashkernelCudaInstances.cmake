# The tensor-core kernels' instances: op x arch x dtype x head_dim bucket. From this one list come, in the build tree,
# .cu files and cuda/<arch>/<op>_instances.inc, from which src/cuda/kernels.cpp makes its declarations and rows. A file
# holds all dtypes of a line and the buckets that a + joins: headers alone are 1 to 2 s of a core, and what does
# not depend on the dtype is compiled once. No file should take over 30 s: it holds up the end of a parallel build.
set(_instances
    # op             arch  dtypes      head_dim buckets
    "attention_fwd | sm75 | f16      | 32+64+96+128+192+256"
    "attention_bwd | sm75 | f16      | 32+64+96+128"
    "attention_fwd | sm80 | f16 bf16 | 32+64+96+128 192+256"
    "attention_fwd | sm80 | f32      | 32+64+96+128 192+256"
    "attention_fwd | sm90a | f16 bf16 | 64+96 128+192+256"
    "attention_bwd | sm90a | f16 bf16 | 64+96+128"
    "attention_bwd | sm80 | f16 bf16 | 32 64 96+128 192+256"
    "attention_bwd | sm80 | f32      | 32+64 96+128"
    "attention_decode | sm80 | f16 bf16 | 64 128 192 256"
    "attention_decode_quantized | sm80 | f16 bf16 | 64 128 256"
    "attention_decode | sm90a | f16 bf16 | 64+128")

set(_tables)
set(_type_f16 __half)
set(_type_bf16 __nv_bfloat16)
set(_type_f32 float)
set(_dtype_f16 kFloat16)
set(_dtype_bf16 kBFloat16)
set(_dtype_f32 kFloat32)
set(_generated ${PROJECT_BINARY_DIR}/generated)

# sm90a code runs on 9.0 alone, sm75 code is what 7.5 needs: their instances are made where that is asked for (or where
# the list is not of numbers).
set(_with_sm75 OFF)
set(_with_sm80 ON)
set(_with_sm90a OFF)
if(NOT FLASHKERNEL_CUDA_ARCHITECTURES)
  set(_with_sm75 ON)  # no CUDA compiler, but the emulator, say
endif()
foreach(_arch IN LISTS FLASHKERNEL_CUDA_ARCHITECTURES)
  foreach(_wanted 75 90a)
    string(REGEX MATCH "^[0-9]+" _number ${_wanted})
    if(NOT _arch MATCHES "^[0-9]" OR _arch MATCHES "^${_number}")
      set(_with_sm${_wanted} ON)
    endif()
  endforeach()
endforeach()

foreach(_line IN LISTS _instances)
  string(REGEX MATCH "^([a-z_]+) +\\| +([a-z0-9]+) +\\| +([a-z0-9 ]+) +\\| +([0-9 +]+)$" _ "${_line}")
  set(OP ${CMAKE_MATCH_1})
  set(ARCH ${CMAKE_MATCH_2})
  separate_arguments(_dtypes UNIX_COMMAND "${CMAKE_MATCH_3}")
  separate_arguments(_groups UNIX_COMMAND "${CMAKE_MATCH_4}")
  string(REGEX REPLACE "[+ ]" ";" _buckets "${CMAKE_MATCH_4}")
  set(SOURCE ${OP})
  if(_dtypes STREQUAL "f32")
    set(SOURCE ${OP}_f32)  # fp32 on fp16 tensor cores is a kernel of its own
  endif()
  list(APPEND _tables ${ARCH}/${SOURCE})
  if(NOT _with_${ARCH})
    continue()
  endif()
  foreach(_group IN LISTS _groups)
    string(REPLACE "+" ";" _dims ${_group})
    set(INSTANCES)
    foreach(_dim IN LISTS _dims)
      foreach(_dtype IN LISTS _dtypes)
        string(APPEND INSTANCES
               "\nvoid ${OP}_${_dtype}_d${_dim}(const ${OP}_params& p, void* workspace, Stream stream) {\n"
               "  ${SOURCE}_instance<${_type_${_dtype}}, ${_dim}>(p, workspace, stream);\n}\n")
      endforeach()
    endforeach()
    string(REPLACE "+" "_d" _name d${_group})
    set(_file ${_generated}/cuda/${ARCH}/${SOURCE}_${_name}.cu)
    configure_file(${PROJECT_SOURCE_DIR}/src/cuda/instance.cu.in ${_file} @ONLY)
    list(APPEND _sources_${ARCH} ${_file})
  endforeach()
  foreach(_dtype IN LISTS _dtypes)
    foreach(_dim IN LISTS _buckets)
      string(APPEND _rows_${SOURCE}_${ARCH} "FK_INSTANCE(${OP}, ${_dtype}, ${_dtype_${_dtype}}, ${_dim})\n")
    endforeach()
  endforeach()
endforeach()

foreach(_table IN LISTS _tables)
  get_filename_component(ARCH ${_table} DIRECTORY)
  get_filename_component(OP ${_table} NAME)
  file(CONFIGURE OUTPUT ${_generated}/cuda/${_table}_instances.inc CONTENT "${_rows_${OP}_${ARCH}}")
endforeach()

# The rows of linear, norms and softmax for 9.0, whose kernels are src/cuda/sm90a/*.cu.
set(_linear_rows)
set(_long_rows)
if(_with_sm90a)
  set(_linear_rows "FK_ROW(f16, kFloat16)\nFK_ROW(bf16, kBFloat16)\n")
  set(_long_rows "FK_ROW()\n")
endif()
file(CONFIGURE OUTPUT ${_generated}/cuda/sm90a/linear_rows.inc CONTENT "${_linear_rows}")
file(CONFIGURE OUTPUT ${_generated}/cuda/sm90a/long_rows.inc CONTENT "${_long_rows}")
