// Maps the library's typed errors to Python: ValueError, NotImplementedError, OutOfMemoryError, OutOfPagesError,
// CudaError, BlockTableError. The classes are made here so that the numbers of an out-of-memory error arrive as
// attributes.
#include "array_type.hpp"
#include "flashkernel/error.hpp"
#include "op.hpp"

namespace flashkernel::python {
namespace {

// Borrowed for the life of the process: the module holds them.
PyObject* out_of_memory_error = nullptr;
PyObject* out_of_pages_error = nullptr;
PyObject* cuda_error = nullptr;
PyObject* block_table_error = nullptr;

PyObject* new_class(nb::module_& module, const char* name, const char* doc, PyObject* base) {
  const std::string full_name = std::string("flashkernel.") + name;
  PyObject* type = PyErr_NewExceptionWithDoc(full_name.c_str(), doc, base, nullptr);
  if (!type) throw nb::python_error();
  module.attr(name) = nb::handle(type);
  return type;
}

nb::object instance(PyObject* type, const Error& error) { return nb::handle(type)(error.what()); }

void raise(PyObject* type, const nb::object& error) { PyErr_SetObject(type, error.ptr()); }

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const OutOfPages& error) {
    const nb::object object = instance(out_of_pages_error, error);
    object.attr("requested_bytes") = error.requested_bytes;
    object.attr("free_bytes") = error.free_bytes;
    object.attr("peak_bytes") = error.peak_bytes;
    object.attr("requested_pages") = error.requested_pages;
    object.attr("free_pages") = error.free_pages;
    object.attr("num_pages") = error.num_pages;
    raise(out_of_pages_error, object);
  } catch (const OutOfMemory& error) {
    const nb::object object = instance(out_of_memory_error, error);
    object.attr("requested_bytes") = error.requested_bytes;
    object.attr("free_bytes") = error.free_bytes;
    object.attr("peak_bytes") = error.peak_bytes;
    raise(out_of_memory_error, object);
  } catch (const CudaError& error) {
    const nb::object object = instance(cuda_error, error);
    object.attr("code") = error.code;
    raise(cuda_error, object);
  } catch (const BadBlockTable& error) {
    const nb::object object = instance(block_table_error, error);
    object.attr("sequence") = error.sequence;
    object.attr("slot") = error.slot;
    object.attr("page") = error.page;
    raise(block_table_error, object);
  } catch (const Unsupported& error) {
    PyErr_SetString(PyExc_NotImplementedError, error.what());
  } catch (const InvalidArgument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  }
}

PyObject* builtin_error(nb::exception_type type) {
  switch (type) {
    case nb::exception_type::value_error: return PyExc_ValueError;
    case nb::exception_type::type_error: return PyExc_TypeError;
    case nb::exception_type::buffer_error: return PyExc_BufferError;
    case nb::exception_type::index_error: return PyExc_IndexError;
    case nb::exception_type::key_error: return PyExc_KeyError;
    case nb::exception_type::attribute_error: return PyExc_AttributeError;
    default: return PyExc_RuntimeError;
  }
}

}  // namespace

void set_python_error() noexcept {
  try {
    try {
      throw;
    } catch (nb::python_error& error) {
      error.restore();
    } catch (const nb::builtin_exception& error) {
      PyErr_SetString(builtin_error(error.type()), error.what());
    } catch (...) {
      translate(std::current_exception(), nullptr);
    }
  } catch (const std::bad_cast&) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "flashkernel: an argument holds a value of a wrong type");
  } catch (const std::bad_alloc& error) {
    PyErr_SetString(PyExc_MemoryError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_SystemError, "flashkernel: an exception of an unknown kind");
  }
}

void bind_errors(nb::module_& module) {
  out_of_memory_error = new_class(module, "OutOfMemoryError",
                                  "A memory resource could not serve an allocation; nothing changed.\n\n"
                                  "Attributes: ``requested_bytes``, ``free_bytes``, ``peak_bytes``.",
                                  PyExc_MemoryError);
  out_of_pages_error =
      new_class(module, "OutOfPagesError",
                "A page pool ran dry; nothing changed.\n\n"
                "Attributes: ``requested_pages``, ``free_pages``, ``num_pages`` and those of OutOfMemoryError.",
                out_of_memory_error);
  cuda_error =
      new_class(module, "CudaError", "A CUDA runtime call failed; ``code`` is its cudaError_t.", PyExc_RuntimeError);
  block_table_error =
      new_class(module, "BlockTableError",
                "A page table that leads out of the pool: entry ``slot`` of ``sequence`` is the page id ``page``.\n\n"
                "With ``slot`` -1 the length ``page`` of the sequence is what is bad.",
                PyExc_ValueError);
  nb::register_exception_translator(translate, nullptr);
}

namespace {

nb::sequence parse_some(const Call& call, const char* name, nb::handle some, const char* what, std::size_t count) {
  if (!nb::isinstance<nb::tuple>(some) && !nb::isinstance<nb::list>(some))
    call.fail(std::string(name) + "=" + short_repr(some) + "; " + what + " is needed");
  const auto sequence = nb::borrow<nb::sequence>(some);
  if (nb::len(sequence) != count)
    call.fail(std::string(name) + " has " + std::to_string(nb::len(sequence)) + " entries; " + what + " is needed");
  return sequence;
}

}  // namespace

std::pair<nb::object, nb::object> parse_pair(const Call& call, const char* name, nb::handle pair, const char* what) {
  const nb::sequence sequence = parse_some(call, name, pair, what, 2);
  return {nb::object(sequence[0]), nb::object(sequence[1])};
}

void parse_three(const Call& call, const char* name, nb::handle three, const char* what, nb::object (&to)[3]) {
  const nb::sequence sequence = parse_some(call, name, three, what, 3);
  for (int i = 0; i < 3; ++i) to[i] = nb::object(sequence[i]);
}

}  // namespace flashkernel::python
