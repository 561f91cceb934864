# A module that another program loads, with the whole library inside: bindings/onnxruntime, tensorrt and tvm_ffi.

# flashkernel_add_plugin(name [library...]): made of the folder's module.cpp, exports what its module.map names, and links what is given.
function(flashkernel_add_plugin name)
  add_library(${name} MODULE module.cpp)
  target_link_libraries(${name} PRIVATE flashkernel_internal flashkernel_hardening flashkernel_stack_protector ${ARGN})
  set_target_properties(${name} PROPERTIES CXX_VISIBILITY_PRESET hidden SKIP_BUILD_RPATH ON)
  if(NOT MSVC)
    target_compile_options(${name} PRIVATE -Wall -Wextra $<$<BOOL:${FLASHKERNEL_WERROR}>:-Werror>)
  endif()
  if(UNIX AND NOT APPLE)  # nothing of the library shows: another copy of it may be in the process
    target_link_options(${name} PRIVATE -Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/module.map)
    set_target_properties(${name} PROPERTIES LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/module.map)
  endif()
endfunction()
