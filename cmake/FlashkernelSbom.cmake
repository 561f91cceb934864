# What the build put into the binaries, as a CycloneDX 1.6 bill of materials: flashkernel.cdx.json in the build folder, in the
# wheel's .dist-info/sboms (PEP 770), or beside the library where that is installed. Whoever searches machines for a
# vulnerable component finds what no package manager knows: headers that were compiled in, a library that was linked
# statically. The same build gives the same file: no date, and an id that follows from the rest.
set(_components)
set(_references)

# _add_component(type name version licence purl-or-empty description)
macro(_add_component type name version licence purl description)
  set(_purl "")
  if(NOT "${purl}" STREQUAL "")
    set(_purl "\n      \"purl\": \"${purl}\",")
  endif()
  list(APPEND _references "\"${name}@${version}\"")
  list(APPEND _components "    {
      \"type\": \"${type}\",
      \"bom-ref\": \"${name}@${version}\",
      \"name\": \"${name}\",
      \"version\": \"${version}\",${_purl}
      \"description\": \"${description}\",
      \"licenses\": [{\"license\": {${licence}}}]
    }")
endmacro()

if(FLASHKERNEL_PYTHON)
  get_directory_property(_nanobind DIRECTORY ${PROJECT_SOURCE_DIR}/bindings DEFINITION nanobind_VERSION)
  _add_component(library nanobind ${_nanobind} "\"id\": \"BSD-3-Clause\"" "pkg:pypi/nanobind@${_nanobind}"
                 "Headers, compiled into the Python module")
endif()
if(FLASHKERNEL_WITH_CUDA)
  _add_component(library cuda-runtime ${CUDAToolkit_VERSION} "\"name\": \"NVIDIA CUDA Toolkit EULA\"" ""
                 "CUDA's runtime (cudart_static) and the device headers, linked and compiled into the library")
endif()

set(_license "Apache-2.0")
set(_package_url "")
if(FLASHKERNEL_PYTHON)
  set(_package_url "\n      \"purl\": \"pkg:pypi/flashkernel@${PROJECT_VERSION}\",")
endif()

set(_tools)
macro(_add_tool name version)
  list(APPEND _tools "        {\"type\": \"application\", \"name\": \"${name}\", \"version\": \"${version}\"}")
endmacro()
_add_tool("CMake" "${CMAKE_VERSION}")
_add_tool("${CMAKE_CXX_COMPILER_ID} C++ compiler" "${CMAKE_CXX_COMPILER_VERSION}")
if(FLASHKERNEL_WITH_CUDA)
  _add_tool("${CMAKE_CUDA_COMPILER_ID} CUDA compiler" "${CMAKE_CUDA_COMPILER_VERSION}")
endif()

list(JOIN _components ",\n" _components)
list(JOIN _references ", " _references)
list(JOIN _tools ",\n" _tools)
set(_root "flashkernel@${PROJECT_VERSION}")
string(CONCAT _body
"  \"version\": 1,
  \"metadata\": {
    \"lifecycles\": [{\"phase\": \"build\"}],
    \"tools\": {
      \"components\": [
${_tools}
      ]
    },
    \"component\": {
      \"type\": \"library\",
      \"bom-ref\": \"${_root}\",
      \"name\": \"flashkernel\",
      \"version\": \"${PROJECT_VERSION}\",${_package_url}
      \"description\": \"${PROJECT_DESCRIPTION}\",
      \"licenses\": [{\"expression\": \"${_license}\"}],
      \"properties\": [
        {\"name\": \"flashkernel:platform\", \"value\": \"${CMAKE_SYSTEM_NAME} ${CMAKE_SYSTEM_PROCESSOR}\"},
        {\"name\": \"flashkernel:cuda\", \"value\": \"${FLASHKERNEL_WITH_CUDA}\"}
      ]
    }
  },
  \"components\": [
${_components}
  ],
  \"dependencies\": [
    {\"ref\": \"${_root}\", \"dependsOn\": [${_references}]}
  ]
")
string(UUID _id NAMESPACE 6ba7b811-9dad-11d1-80b4-00c04fd430c8 NAME "${_body}" TYPE SHA1)  # the namespace is RFC 4122's, of URLs
set(_sbom ${PROJECT_BINARY_DIR}/flashkernel.cdx.json)
file(WRITE ${_sbom}.new "{
  \"$schema\": \"http://cyclonedx.org/schema/bom-1.6.schema.json\",
  \"bomFormat\": \"CycloneDX\",
  \"specVersion\": \"1.6\",
  \"serialNumber\": \"urn:uuid:${_id}\",
${_body}}
")
file(RENAME ${_sbom}.new ${_sbom})

if(SKBUILD_METADATA_DIR)  # scikit-build-core: the wheel's .dist-info folder
  install(FILES ${_sbom} DESTINATION ${SKBUILD_METADATA_DIR}/sboms COMPONENT flashkernel)
else()
  install(FILES ${_sbom} DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT flashkernel)
endif()
