// torch's own tensors (see torch_tensor.hpp).
#include "torch_tensor.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>

#include "flashkernel/device.hpp"

namespace flashkernel::python {
namespace {

// `known`, made by the first call. Not by the initialiser of a static: C++ holds a lock while that runs, and a thread
// that waits for the lock keeps the GIL, which the initialiser may have given up in Python and then need. Here two
// threads may both make one; the GIL lets one of them be kept.
template <class T>
const T& made_once(const T*& known) {
  if (!known) {
    auto made = std::make_unique<T>();
    if (!known) known = made.release();
  }
  return *known;
}

// What of torch is called, looked up once. Never destroyed: the interpreter may be gone by then.
struct Torch {
  nb::object empty;                        // torch.empty(size, dtype=, device=)
  nb::object empty_on_cpu, empty_on_cuda;  // what compiled graphs allocate by: (size, stride, dtype), current device
  nb::object current_device;
  bool only_device = false;
  std::array<nb::object, 8> dtypes;

  Torch() {
    const nb::module_ torch = nb::module_::import_("torch");
    empty = torch.attr("empty");
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kInt32, DType::kInt64,
                              DType::kUInt8, DType::kFloat8E4M3, DType::kInt8})
      dtypes[static_cast<std::size_t>(dtype)] =
          torch.attr(dtype == DType::kFloat8E4M3 ? "float8_e4m3fn" : dtype_name(dtype));
    // Not public, and half of the time: where they are missing, the public function serves.
    const auto quick = [&](const char* name) {
      nb::object at = torch;
      for (const char* const step : {"_C", "_dynamo", "guards", name}) {
        if (!nb::hasattr(at, step)) return nb::object();
        at = at.attr(step);
      }
      return at;
    };
    empty_on_cpu = quick("_empty_strided_cpu");
    if (nb::hasattr(torch.attr("_C"), "_cuda_getDevice")) {
      current_device = torch.attr("_C").attr("_cuda_getDevice");
      only_device = num_cuda_devices() == 1;
      empty_on_cuda = quick("_empty_strided_cuda");
    }
  }
};

nb::object tuple_of(const std::int64_t* values, int count) {
  nb::object tuple = nb::steal(PyTuple_New(count));
  for (int d = 0; d < count; ++d) PyTuple_SetItem(tuple.ptr(), d, PyLong_FromLongLong(values[d]));
  return tuple;
}

// A shape as torch wants it. Calls tend to repeat theirs.
struct Extents {
  Shape shape;
  nb::object size, strides;

  Extents() = default;
  explicit Extents(const Shape& of) : shape(of), size(tuple_of(of.dims, of.ndim)) {
    std::int64_t values[kMaxDims], stride = 1;
    for (int d = of.ndim - 1; d >= 0; stride *= of.dims[d] > 0 ? of.dims[d] : 1, --d) values[d] = stride;
    strides = tuple_of(values, of.ndim);
  }
  bool is(const Shape& other) const {
    return shape.ndim == other.ndim && std::equal(shape.dims, shape.dims + shape.ndim, other.dims);
  }
};

// A function of torch's that takes the object itself and nothing, or one argument. Where it is a builtin, as in every
// torch so far, its C function is called at once: that halves the time of what it does.
class Quick {
 public:
  Quick() = default;
  /// `bound` may be a method of any tensor; `callable` is called with the tensor where that is no builtin.
  Quick(const nb::object& bound, nb::object callable, int flags) : callable_(std::move(callable)) {
    if (PyCFunction_CheckExact(bound.ptr()) && PyCFunction_GetFlags(bound.ptr()) == flags)
      function_ = PyCFunction_GetFunction(bound.ptr());
    PyErr_Clear();
  }
  nb::object method(nb::handle self) const {
    if (function_) return nb::steal(function_(self.ptr(), nullptr));
    return nb::steal(PyObject_CallFunctionObjArgs(callable_.ptr(), self.ptr(), nullptr));
  }
  nb::object function() const {
    return nb::steal(function_ ? function_(nullptr, nullptr) : PyObject_CallNoArgs(callable_.ptr()));
  }
  nb::object function(nb::handle argument) const {
    if (function_) return nb::steal(function_(nullptr, argument.ptr()));
    return nb::steal(PyObject_CallFunctionObjArgs(callable_.ptr(), argument.ptr(), nullptr));
  }

 private:
  nb::object callable_;
  PyCFunction function_ = nullptr;
};

// A property of torch.Tensor. Its descriptor is asked at once, which leaves out the search through the tensor's type.
class QuickProperty {
 public:
  QuickProperty() = default;
  explicit QuickProperty(nb::object descriptor)
      : descriptor_(std::move(descriptor)),
        get_(reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(descriptor_.ptr()), Py_tp_descr_get))) {}
  nb::object of(nb::handle tensor) const {
    return nb::steal(get_(descriptor_.ptr(), tensor.ptr(), reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()))));
  }

 private:
  nb::object descriptor_;
  descrgetfunc get_ = nullptr;
};

// What the checks of arguments call, looked up once.
struct Recording {
  Quick is_grad_enabled, is_neg, increment_version;
  QuickProperty requires_grad;
  nb::object is_inference, unpack_dual;
  nb::object forward_mode;  // torch.autograd.forward_ad's dict, where the level of dual tensors is
  PyObject* current_level = PyUnicode_InternFromString("_current_level");
  PyObject* no_level = PyLong_FromLong(-1);
  bool takes_tuple = true;

  Recording() {
    const nb::module_ torch = nb::module_::import_("torch");
    const nb::object tensor = torch.attr("empty")(0);
    is_grad_enabled = Quick(torch.attr("is_grad_enabled"), torch.attr("is_grad_enabled"), METH_NOARGS);
    is_neg = Quick(tensor.attr("is_neg"), torch.attr("Tensor").attr("is_neg"), METH_NOARGS);
    requires_grad = QuickProperty(torch.attr("Tensor").attr("requires_grad"));  // of the class: the descriptor
    is_inference = torch.attr("Tensor").attr("is_inference");
    const nb::module_ forward_ad = nb::module_::import_("torch.autograd.forward_ad");
    unpack_dual = forward_ad.attr("unpack_dual");
    forward_mode = forward_ad.attr("__dict__");
    const nb::object increment = torch.attr("_C").attr("_increment_version");
    increment_version = Quick(increment, increment, METH_O);
    try {
      increment(nb::make_tuple(tensor));
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      takes_tuple = false;  // torch before 2.6 takes one tensor
    }
  }
};

const Recording& recording() {
  static const Recording* known = nullptr;
  return made_once(known);
}

bool is_true(const nb::object& answer) {
  if (!answer.is_valid()) throw nb::python_error();
  return answer.ptr() == Py_True;
}

// The ops that flashkernel.torch has.
constexpr const char* kTorchOps[] = {"attention",       "attention_cascade",
                                     "attention_fp8",   "attention_mla_decode",
                                     "attention_paged", "attention_varlen",
                                     "cross_entropy",   "fused_linear",
                                     "kv_append",       "kv_read",
                                     "latent_append",   "layer_norm",
                                     "linear",          "linear_cross_entropy",
                                     "linear_fp8",      "linear_selected_log_prob",
                                     "log_softmax",     "quantized_linear",
                                     "rms_norm",        "rope",
                                     "rope_table",      "softmax",
                                     "swiglu"};
// Whether one of these ops has a gradient.
bool has_gradient(const std::string& op) {
  return op.rfind("kv_", 0) != 0 && op != "latent_append" && op != "attention_cascade" && op != "attention_paged" &&
         op != "attention_mla_decode" && op != "attention_fp8";
}

std::string torch_op(const std::string& op) {
  for (const char* known : kTorchOps)
    if (op == known) return "flashkernel.torch." + op;
  return "";
}

}  // namespace

TorchModes torch_modes() {
  const Recording& known = recording();
  const bool enabled = is_true(known.is_grad_enabled.function());
  PyObject* const level = PyDict_GetItem(known.forward_mode.ptr(), known.current_level);
  return {enabled, level && level != known.no_level && PyLong_AsLong(level) >= 0};
}

bool requires_gradient(nb::handle tensor) { return is_true(recording().requires_grad.of(tensor)); }

bool has_tangent(nb::handle tensor) { return !recording().unpack_dual(tensor).attr("tangent").is_none(); }

bool is_negated(nb::handle tensor) { return is_true(recording().is_neg.method(tensor)); }

void increment_versions(const nb::handle* tensors, int count) {
  const Recording& known = recording();
  const auto increment = [&](nb::handle what) { return known.increment_version.function(what).is_valid(); };
  if (known.takes_tuple) {
    const nb::object all = nb::steal(PyTuple_New(count));
    for (int i = 0; i < count; ++i) PyTuple_SetItem(all.ptr(), i, nb::borrow(tensors[i]).release().ptr());
    if (increment(all)) return;
    PyErr_Clear();
  }
  for (int i = 0; i < count; ++i) {
    if (is_true(known.is_inference(tensors[i]))) continue;  // has no counter, and autograd never saves it
    if (!increment(known.takes_tuple ? nb::handle(nb::make_tuple(tensors[i])) : tensors[i])) throw nb::python_error();
  }
}

void raise_unrecorded(const char* op, const char* name, bool is_gradient, bool written) {
  std::string message = std::string(op) + ": " + name;
  if (!is_gradient) {
    message += " carries a forward-mode derivative, which no op of FlashKernel can follow; use reverse mode (" +
               (torch_op(op).empty() || !has_gradient(op) ? "flashkernel.torch" : torch_op(op)) +
               " with backward(), vjp or jacrev)";
  } else if (written) {
    message += " requires a gradient, and autograd would not see that it is written to; pass " + std::string(name) +
               ".detach(), or call under torch.no_grad()";
  } else {
    message += " requires a gradient, which this op does not record; ";
    message += torch_op(op).empty() || !has_gradient(op) ? "" : "call " + torch_op(op) + ", or ";
    message += "pass " + std::string(name) + ".detach(), or call under torch.no_grad()";
  }
  PyErr_SetString(PyExc_RuntimeError, message.c_str());
  throw nb::python_error();
}

std::string traced_as(nb::handle tensor) {
  const nb::module_ torch = nb::module_::import_("torch");
  const auto is = [&](const nb::object& scope, const char* name) {
    return nb::hasattr(scope, name) && nb::cast<bool>(scope.attr(name)(tensor));
  };
  if (!is_torch(reinterpret_cast<PyTypeObject*>(tensor.type().ptr()))) return "";
  if (is(torch, "_is_functional_tensor")) return "a tensor that torch traces (functionalize)";
  const nb::object functorch = torch.attr("_C").attr("_functorch");
  if (is(functorch, "is_batchedtensor")) return "a batched tensor of torch.vmap";
  if (is(functorch, "is_functorch_wrapped_tensor")) return "a tensor that torch.func transforms (grad, jvp, vmap)";
  if (nb::cast<bool>(tensor.attr("is_meta"))) return "a tensor on the meta device, without memory";
  return "";
}

std::string where_traced(const std::string& op) {
  const std::string served = torch_op(op);
  return served.empty() ? "this op runs on real tensors only, outside torch.compile and torch.func"
                        : "call " + served + ", which torch.compile and torch.func can trace";
}

bool is_torch(PyTypeObject* type) {
  const auto modules = nb::cast<nb::dict>(nb::module_::import_("sys").attr("modules"));
  if (!modules.contains("torch")) return false;
  const nb::object torch = modules["torch"];
  if (!nb::hasattr(torch, "Tensor")) return false;
  const nb::object tensor = torch.attr("Tensor");
  return PyType_Check(tensor.ptr()) && PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(tensor.ptr()));
}

nb::object torch_empty(DType dtype, const Shape& shape, flashkernel::Device device) {
  static const Torch* known = nullptr;
  const Torch& torch = made_once(known);
  const nb::object& type = torch.dtypes[static_cast<std::size_t>(dtype)];
  static Extents* last = nullptr;  // guarded by the GIL, as all of this
  if (!last || !last->is(shape)) {
    Extents made(shape);  // may let other threads run
    if (!last) last = new Extents;
    *last = std::move(made);
  }
  const nb::object size = last->size, strides = last->strides;  // another thread may need other ones meanwhile
  const auto is_current = [&] { return torch.only_device || nb::cast<int>(torch.current_device()) == device.index; };
  const nb::object& quick = device.is_cpu() ? torch.empty_on_cpu : torch.empty_on_cuda;
  if (quick.is_valid() && (device.is_cpu() || is_current())) {
    nb::object tensor =
        nb::steal(PyObject_CallFunctionObjArgs(quick.ptr(), size.ptr(), strides.ptr(), type.ptr(), nullptr));
    if (!tensor.is_valid()) throw nb::python_error();
    return tensor;
  }
  return torch.empty(size, nb::arg("dtype") = type, nb::arg("device") = to_string(device));
}

}  // namespace flashkernel::python
