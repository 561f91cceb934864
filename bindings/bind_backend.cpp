// Binds the keyword `backend` of every op that python/flashkernel/triton also has: a second overload, tried only when
// the op itself does not take the arguments, so that a call without it costs nothing more. Called by module.cpp, last.
#include "bindings.hpp"

namespace flashkernel::python {
namespace {

constexpr const char* kOps[] = {"add",
                                "argmax",
                                "attention",
                                "attention_backward",
                                "attention_paged",
                                "attention_varlen",
                                "attention_varlen_backward",
                                "cross_entropy",
                                "cross_entropy_backward",
                                "kv_append",
                                "kv_copy_pages",
                                "kv_read",
                                "layer_norm",
                                "layer_norm_backward",
                                "linear",
                                "linear_backward",
                                "log_softmax",
                                "log_softmax_backward",
                                "merge_states",
                                "reduce_max",
                                "reduce_mean",
                                "reduce_sum",
                                "rms_norm",
                                "rms_norm_backward",
                                "rope",
                                "rope_table",
                                "softmax",
                                "softmax_backward",
                                "swiglu",
                                "swiglu_backward"};

// None is the library itself; the name of another backend is a module of the package with functions of the same names.
nb::object call_backend(const char* op, const nb::args& args, nb::handle backend, const nb::kwargs& kwargs) {
  const char* package = nullptr;
  if (backend.is_none())
    package = "flashkernel._C";
  else if (nb::isinstance<nb::str>(backend) && nb::cast<std::string>(backend) == "triton")
    package = "flashkernel.triton";
  else
    throw InvalidArgument(std::string(op) + ": backend=" + nb::cast<std::string>(nb::repr(backend)) +
                          "; None or 'triton' is needed");
  return nb::getattr(nb::module_::import_(package), op)(*args, **kwargs);
}

}  // namespace

void bind_backend(nb::module_& module) {
  nb::list names;
  for (const char* op : kOps) names.append(op);
  module.attr("BACKEND_OPS") = nb::tuple(names);  // the one list of them: flashkernel.triton.OPS
  for (const char* op : kOps) {
    const std::string signature =
        std::string("def ") + op + "(*args: typing.Any, backend: str | None, **kwargs: typing.Any) -> typing.Any";
    // The keyword has no default: where it is not given, nanobind passes on without calling this.
    module.def(
        op,
        [op](const nb::args& args, nb::handle backend, const nb::kwargs& kwargs) {
          return call_backend(op, args, backend, kwargs);
        },
        "args"_a, "backend"_a.none(), "kwargs"_a, nb::sig(signature.c_str()),
        "backend: \"triton\" runs the op of the same name in ``flashkernel.triton``, for torch tensors; None: this "
        "library.");
  }
}

}  // namespace flashkernel::python
