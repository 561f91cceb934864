// What the bind_*.cpp files share: bind functions, and pieces of argument parsing and documentation. Called by
// module.cpp only. Files that bind ops have no function here: they register themselves, see OpFile in op.hpp.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>

#include "dlpack.hpp"
#include "flashkernel/error.hpp"

namespace flashkernel::python {

using namespace nb::literals;

void bind_errors(nb::module_& module);
void bind_device(nb::module_& module);
void bind_kernels(nb::module_& module);
void bind_memory_resource(nb::module_& module);
void bind_ops(nb::module_& module);  // what the OpFiles of op.hpp bind
void bind_kv_page_pool(nb::module_& module);
void bind_kv_cache(nb::module_& module);

/// A sequence of exactly two, or three, Python objects, or InvalidArgument.
std::pair<nb::object, nb::object> parse_pair(const Call& call, const char* name, nb::handle pair, const char* what);
void parse_three(const Call& call, const char* name, nb::handle three, const char* what, nb::object (&to)[3]);

// The end of every op's docstring (raw strings are no use here: GCC does not take them in a macro).
#define FK_DOC_COMMON                                                                                                \
  "\n"                                                                                                               \
  "Arrays: anything that speaks DLPack (torch, JAX, CuPy, ...) or NumPy, on the CPU or a CUDA device, all on one "   \
  "device; read\n"                                                                                                   \
  "where they lie, never copied. New arrays are row-major and of the first argument's kind. Gradients are not "      \
  "recorded\n"                                                                                                       \
  "(``flashkernel.torch`` does that).\n"                                                                             \
  "stream: CUDA stream to work on (an int or an object with ``__cuda_stream__()``); default: the caller's current "  \
  "stream. Work\n"                                                                                                   \
  "is queued, not waited for. Ignored on the CPU, where the call returns when the work is done.\n"                   \
  "dtype: ``\"bfloat16\"`` reads uint16 arrays as bfloat16 bits (NumPy has no such type; ``ml_dtypes`` arrays need " \
  "no hint).\n"                                                                                                      \
  "\n"                                                                                                               \
  "Raises: ValueError for arguments that can't be served by any device, NotImplementedError when this build has no " \
  "kernel for a\n"                                                                                                   \
  "valid call, OutOfMemoryError when workspace can't be had, RuntimeError for a CUDA failure. Nothing is written "   \
  "then.\n"

}  // namespace flashkernel::python
