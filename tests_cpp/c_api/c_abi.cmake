# The C ABI as it is compiled, against what was promised: the layout of every struct (layout.txt, what layout.c prints) and
# the exported names (those of functions.txt, whose types tests_py/test_c_api.py compares with the header).
# cmake -DLAYOUT=program [-DNM=nm -DLIBRARY=libflashkernel.so] -DFOLDER=tests_cpp/c_api -P c_abi.cmake
# Within one SONAME lines may only be added to either file, and only behind the existing fields of a struct.
cmake_minimum_required(VERSION 3.22)

execute_process(COMMAND ${LAYOUT} OUTPUT_VARIABLE _found COMMAND_ERROR_IS_FATAL ANY)
file(READ ${FOLDER}/layout.txt _promised)
string(REPLACE "\r" "" _found "${_found}")
string(REPLACE "\r" "" _promised "${_promised}")
if(NOT _found STREQUAL _promised)
  message(FATAL_ERROR "the structs of the C API are laid out otherwise than ${FOLDER}/layout.txt says:\n${_found}")
endif()

if(NM)
  execute_process(COMMAND ${NM} --dynamic --defined-only ${LIBRARY} OUTPUT_VARIABLE _symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL " T fk_[a-z0-9_]+" _exported "${_symbols}")
  list(TRANSFORM _exported REPLACE " T " "")
  file(STRINGS ${FOLDER}/functions.txt _declared)
  list(TRANSFORM _declared REPLACE ".* \\*?(fk_[a-z0-9_]+)\\(.*" "\\1")
  list(SORT _exported)
  list(SORT _declared)
  if(NOT _exported STREQUAL _declared OR _exported STREQUAL "")
    message(FATAL_ERROR "${LIBRARY} exports\n${_exported}\nand ${FOLDER}/functions.txt has\n${_declared}")
  endif()
endif()
