# Flags by which a memory error in host code ends the process instead of being used, for both shared libraries and every
# object in them:
#   flashkernel_hardening        bounds checks in the C library's copies (FORTIFY), where their sizes are known; tables of
#                                addresses that are read-only once the library is loaded (RELRO with BIND_NOW); no
#                                executable stack and no relocation in code; marked targets for indirect jumps, where the
#                                processor checks them
#   flashkernel_stack_protector  a canary above the arrays on the stack
#   flashkernel_no_stack_protector  none, whatever the compiler's default: for kernels, whose time it is
# tests_cpp/hardening.cmake reads the binaries.
include(CheckCXXCompilerFlag)
include(CheckCXXSourceCompiles)

add_library(flashkernel_hardening INTERFACE)
add_library(flashkernel_stack_protector INTERFACE)
add_library(flashkernel_no_stack_protector INTERFACE)

set(FLASHKERNEL_STACK_PROTECTOR OFF)  # these two: what the test looks for
set(FLASHKERNEL_FORTIFY OFF)
if(FLASHKERNEL_SANITIZE)
  # The sanitizers do more than these flags; they don't know the checked functions that FORTIFY calls.
elseif(MSVC)  # its canary (/GS), ASLR and a stack without code are the defaults
  target_compile_options(flashkernel_hardening INTERFACE $<$<COMPILE_LANGUAGE:CXX>:/guard:cf>)
  target_link_options(flashkernel_hardening INTERFACE /GUARD:CF)
elseif(NOT MINGW)  # whose canary is a library of its own
  check_cxx_compiler_flag(-fstack-protector-strong FLASHKERNEL_HAS_STACK_PROTECTOR)
  if(FLASHKERNEL_HAS_STACK_PROTECTOR)
    set(FLASHKERNEL_STACK_PROTECTOR ON)
    target_compile_options(flashkernel_stack_protector INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fstack-protector-strong>)
    target_compile_options(flashkernel_no_stack_protector INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fno-stack-protector>)
  endif()
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    check_cxx_compiler_flag(-fcf-protection=full FLASHKERNEL_HAS_CF_PROTECTION)
    if(FLASHKERNEL_HAS_CF_PROTECTION)
      target_compile_options(flashkernel_hardening INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fcf-protection=full>)
    endif()
  elseif(CMAKE_SYSTEM_NAME STREQUAL "Linux" AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
    check_cxx_compiler_flag(-mbranch-protection=standard FLASHKERNEL_HAS_BRANCH_PROTECTION)
    if(FLASHKERNEL_HAS_BRANCH_PROTECTION)
      target_compile_options(flashkernel_hardening INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-mbranch-protection=standard>)
    endif()
  endif()
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    # Level 3 knows sizes that are computed at run time. A C library or compiler without it warns and means 2.
    set(CMAKE_REQUIRED_FLAGS "-O2 -Werror -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3")
    check_cxx_source_compiles("#include <cstring>\nint main() { return 0; }" FLASHKERNEL_HAS_FORTIFY_3)
    unset(CMAKE_REQUIRED_FLAGS)
    # FORTIFY needs an optimising compiler, which a debug build has not. -U: compilers and packagers define a level of
    # their own, and to define it anew is a warning.
    set(_fortify -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=$<IF:$<BOOL:${FLASHKERNEL_HAS_FORTIFY_3}>,3,2>)
    target_compile_options(flashkernel_hardening INTERFACE
      "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release,RelWithDebInfo,MinSizeRel>>:${_fortify}>")
    if(CMAKE_BUILD_TYPE MATCHES "^(Release|RelWithDebInfo|MinSizeRel)$")
      set(FLASHKERNEL_FORTIFY ON)
    endif()
  endif()
endif()

if(UNIX AND NOT APPLE)
  target_link_options(flashkernel_hardening INTERFACE -Wl,-z,relro -Wl,-z,now -Wl,-z,noexecstack -Wl,-z,text)
endif()
