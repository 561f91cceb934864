# Builds and runs tests_cpp/consumer against the installed Python package, found as its users find it: by
# `python -m flashkernel --cmake-dir`. Called by ctest with PYTHON, CTEST, GENERATOR, CXX, CONFIG, SOURCE and BINARY.
execute_process(COMMAND ${PYTHON} -m flashkernel --cmake-dir OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE
                COMMAND_ERROR_IS_FATAL ANY)
message(STATUS "the package's CMake files are in ${folder}")
execute_process(
  COMMAND ${CTEST} --build-and-test ${SOURCE} ${BINARY} --build-generator ${GENERATOR} --build-config ${CONFIG} --build-noclean
          --build-options -Dflashkernel_DIR=${folder} -DCMAKE_BUILD_TYPE=${CONFIG} -DCMAKE_CXX_COMPILER=${CXX}
          --test-command ${CTEST} -C ${CONFIG} --output-on-failure
  COMMAND_ERROR_IS_FATAL ANY)
