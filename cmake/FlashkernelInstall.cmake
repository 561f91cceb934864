# Install rules: the GNU directories by default; inside a wheel everything lies below flashkernel/.
# The component keeps what the project builds for itself (tests, examples, GoogleTest) out of both.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

if(FLASHKERNEL_WHEEL)
  set(_lib flashkernel/lib)
  set(_bin flashkernel/lib)  # where __init__.py looks for the DLL on Windows
  set(_include flashkernel/include)
  set(_cmake flashkernel/lib/cmake/flashkernel)
else()
  set(_lib ${CMAKE_INSTALL_LIBDIR})
  set(_bin ${CMAKE_INSTALL_BINDIR})
  set(_include ${CMAKE_INSTALL_INCLUDEDIR})
  set(_cmake ${CMAKE_INSTALL_LIBDIR}/cmake/flashkernel)
  # A wheel can't hold the symbolic links of a versioned library; a system folder should.
  set_target_properties(flashkernel PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
endif()

install(TARGETS flashkernel EXPORT flashkernel-targets
  LIBRARY DESTINATION ${_lib} COMPONENT flashkernel
  ARCHIVE DESTINATION ${_lib} COMPONENT flashkernel
  RUNTIME DESTINATION ${_bin} COMPONENT flashkernel
  INCLUDES DESTINATION ${_include})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/flashkernel ${PROJECT_BINARY_DIR}/include/flashkernel DESTINATION ${_include}
  COMPONENT flashkernel FILES_MATCHING PATTERN "*.hpp" PATTERN "*.h")
install(EXPORT flashkernel-targets NAMESPACE flashkernel:: DESTINATION ${_cmake} COMPONENT flashkernel)

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/flashkernel-config.cmake.in
  ${PROJECT_BINARY_DIR}/cmake/flashkernel-config.cmake INSTALL_DESTINATION ${_cmake} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/cmake/flashkernel-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cmake/flashkernel-config.cmake ${PROJECT_BINARY_DIR}/cmake/flashkernel-config-version.cmake
  DESTINATION ${_cmake} COMPONENT flashkernel)

# pkg-config, for builds without CMake. The file finds the tree from its own place, so that the tree may be moved.
set(_pc_private "")
if(NOT BUILD_SHARED_LIBS OR NOT FLASHKERNEL_WHEEL)  # what a program links beside the static library
  foreach(_library IN LISTS CMAKE_CXX_IMPLICIT_LINK_LIBRARIES CMAKE_THREAD_LIBS_INIT ITEMS ${CMAKE_DL_LIBS})
    if(_library MATCHES "^(stdc\\+\\+|c\\+\\+|m|-?l?pthread|dl)$")
      string(REGEX REPLACE "^-?l?(pthread)$" "\\1" _library ${_library})
      list(APPEND _pc_private -l${_library})
    endif()
  endforeach()
  if(FLASHKERNEL_WITH_CUDA)
    list(APPEND _pc_private -lcudart_static -lrt -ldl -lpthread)
  endif()
  list(REMOVE_DUPLICATES _pc_private)
  list(JOIN _pc_private " " _pc_private)
endif()
set(_pc_define "")
if(NOT BUILD_SHARED_LIBS)
  set(_pc_define " -DFLASHKERNEL_STATIC")
endif()
if(IS_ABSOLUTE "${_lib}" OR IS_ABSOLUTE "${_include}")
  set(_pc_prefix ${CMAKE_INSTALL_PREFIX})
  set(_pc_libdir ${CMAKE_INSTALL_FULL_LIBDIR})
  set(_pc_includedir ${CMAKE_INSTALL_FULL_INCLUDEDIR})
else()
  set(_pc_root "")  # the prefix, from a root that only serves to count folders
  if(FLASHKERNEL_WHEEL)
    set(_pc_root flashkernel)
  endif()
  file(RELATIVE_PATH _pc_up /x/${_lib}/pkgconfig /x/${_pc_root})
  string(REGEX REPLACE "/$" "" _pc_up "${_pc_up}")
  file(RELATIVE_PATH _pc_lib /x/${_pc_root} /x/${_lib})
  file(RELATIVE_PATH _pc_include /x/${_pc_root} /x/${_include})
  set(_pc_prefix "\${pcfiledir}/${_pc_up}")
  set(_pc_libdir "\${prefix}/${_pc_lib}")
  set(_pc_includedir "\${prefix}/${_pc_include}")
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/flashkernel.pc.in ${PROJECT_BINARY_DIR}/cmake/flashkernel.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/cmake/flashkernel.pc DESTINATION ${_lib}/pkgconfig COMPONENT flashkernel)
