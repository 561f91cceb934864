# Reads a shared library of the build as the loader does and fails unless it is hardened and exports what it should.
# cmake -DREADELF=readelf -DFILE=x.so -DEXPORTS=regex [-DSTACK_PROTECTOR=ON] [-DCOMMANDS=compile_commands.json
#       -DFORTIFIED=regex] -P hardening.cmake
#   EXPORTS          what each exported symbol has to match
#   STACK_PROTECTOR  whether the file has to call the protector's handler
#   FORTIFIED        which sources have to be compiled with FORTIFY, as a pattern of the outputs in COMMANDS: a library whose
#                    copies all have a known size calls no checked function by which one could tell
cmake_minimum_required(VERSION 3.22)  # as the project: an empty pattern and quoted variables mean what they do there

function(read_elf output)
  execute_process(COMMAND ${READELF} -W ${ARGN} ${FILE} OUTPUT_VARIABLE _text RESULT_VARIABLE _status)
  if(NOT _status EQUAL 0 OR _text STREQUAL "")
    message(FATAL_ERROR "${READELF} ${ARGN} cannot read ${FILE}")
  endif()
  string(REPLACE ";" "," _text "${_text}")
  string(REPLACE "[" "(" _text "${_text}")  # an open bracket keeps CMake from seeing the ends of list elements
  string(REPLACE "]" ")" _text "${_text}")
  string(REPLACE "\n" ";" _text "${_text}")
  set(${output} "${_text}" PARENT_SCOPE)
endfunction()

set(_faults "")
macro(fault text)
  string(APPEND _faults "\n  ${text}")
endmacro()

read_elf(_segments --program-headers)
set(_stack ${_segments})
list(FILTER _stack INCLUDE REGEX "GNU_STACK")
if(NOT _stack MATCHES " RW +0x")
  fault("its stack is executable, or it does not say: GNU_STACK is '${_stack}'")
endif()
if(NOT _segments MATCHES "GNU_RELRO")
  fault("no GNU_RELRO: its tables of addresses stay writable")
endif()

read_elf(_dynamic --dynamic)
if(NOT _dynamic MATCHES "BIND_NOW|Flags:[^;]* NOW")
  fault("no BIND_NOW: its table of functions stays writable")
endif()
if(_dynamic MATCHES "TEXTREL")
  fault("relocations in its code (TEXTREL)")
endif()
foreach(_entry IN LISTS _dynamic)
  if(_entry MATCHES "\\((RPATH|RUNPATH)\\).*\\((.*)\\)$")
    string(REPLACE ":" ";" _folders "${CMAKE_MATCH_2}")
    foreach(_folder IN LISTS _folders)
      if(NOT _folder MATCHES "^.ORIGIN(/|$)")
        fault("it looks for libraries in '${_folder}', which is not named from its own folder ($ORIGIN)")
      endif()
    endforeach()
  endif()
endforeach()

read_elf(_symbols --dyn-syms)
set(_exported 0)
foreach(_symbol IN LISTS _symbols)
  # Num: Value Size Type Bind Vis Ndx Name: it is defined here where Ndx is a number
  if(_symbol MATCHES "^ *[0-9]+: [0-9a-f]+ +[0-9a-fx]+ [A-Z_]+ +[A-Z_]+ +[A-Z]+ +[0-9]+ +([^ @]+)")
    math(EXPR _exported "${_exported} + 1")
    set(_name ${CMAKE_MATCH_1})
    if(NOT _name MATCHES "^(${EXPORTS})$")
      fault("it exports ${_name}")
    endif()
  endif()
endforeach()
if(_exported EQUAL 0)
  fault("it exports nothing")
endif()
if(STACK_PROTECTOR AND NOT _symbols MATCHES "__stack_chk_fail")
  fault("no function of it has a stack protector")
endif()

if(COMMANDS)
  file(STRINGS ${COMMANDS} _commands REGEX "\"command\":.* -o [^ ]*(${FORTIFIED})[^ ]* ")
  if(NOT _commands)
    fault("no command in ${COMMANDS} compiles it")
  endif()
  foreach(_command IN LISTS _commands)
    string(REGEX MATCH " -c ([^ \"]+)" _ "${_command}")
    set(_source ${CMAKE_MATCH_1})
    # The last mention counts.
    if(NOT _command MATCHES ".*-D_FORTIFY_SOURCE=[23](.*)" OR CMAKE_MATCH_1 MATCHES "_FORTIFY_SOURCE")
      fault("${_source} is compiled without FORTIFY")
    endif()
  endforeach()
endif()

if(_faults)
  message(FATAL_ERROR "${FILE}:${_faults}")
endif()
