// Serves the keyword `backend` of the ops: python/flashkernel/triton has functions of the same names. Called by op.hpp.
#include "array_type.hpp"
#include "op.hpp"

namespace flashkernel::python {

PyObject* call_backend(const Signature& signature, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords,
                       PyObject* backend) {
  if (!nb::isinstance<nb::str>(backend) || text_of(backend) != "triton")
    throw InvalidArgument(signature.name() + ": backend=" + short_repr(backend) + "; None or 'triton' is needed");
  nb::list positional;
  for (Py_ssize_t i = 0; i < num_args; ++i) positional.append(nb::handle(args[i]));
  nb::dict named;
  for (Py_ssize_t k = 0; k < PyTuple_Size(keywords); ++k) {
    const nb::handle name = PyTuple_GetItem(keywords, k);
    if (text_of(name) != "backend") named[name] = nb::handle(args[num_args + k]);
  }
  const nb::object function = nb::module_::import_("flashkernel.triton").attr(signature.name().c_str());
  return function(*nb::tuple(positional), **named).release().ptr();
}

}  // namespace flashkernel::python
