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
  COMPONENT flashkernel FILES_MATCHING PATTERN "*.hpp")
install(EXPORT flashkernel-targets NAMESPACE flashkernel:: DESTINATION ${_cmake} COMPONENT flashkernel)

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/flashkernel-config.cmake.in
  ${PROJECT_BINARY_DIR}/cmake/flashkernel-config.cmake INSTALL_DESTINATION ${_cmake} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/cmake/flashkernel-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cmake/flashkernel-config.cmake ${PROJECT_BINARY_DIR}/cmake/flashkernel-config-version.cmake
  DESTINATION ${_cmake} COMPONENT flashkernel)
