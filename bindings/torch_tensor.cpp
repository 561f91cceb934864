// torch's own tensors (see torch_tensor.hpp).
#include "torch_tensor.hpp"

#include <algorithm>
#include <array>
#include <string>

#include "flashkernel/device.hpp"

namespace flashkernel::python {
namespace {

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

  explicit Extents(const Shape& of) : shape(of), size(tuple_of(of.dims, of.ndim)) {
    std::int64_t values[kMaxDims], stride = 1;
    for (int d = of.ndim - 1; d >= 0; stride *= of.dims[d] > 0 ? of.dims[d] : 1, --d) values[d] = stride;
    strides = tuple_of(values, of.ndim);
  }
  bool is(const Shape& other) const {
    return shape.ndim == other.ndim && std::equal(shape.dims, shape.dims + shape.ndim, other.dims);
  }
};

}  // namespace

bool is_torch(PyTypeObject* type) {
  const auto modules = nb::cast<nb::dict>(nb::module_::import_("sys").attr("modules"));
  if (!modules.contains("torch")) return false;
  const nb::object torch = modules["torch"];
  if (!nb::hasattr(torch, "Tensor")) return false;
  const nb::object tensor = torch.attr("Tensor");
  return PyType_Check(tensor.ptr()) && PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(tensor.ptr()));
}

nb::object torch_empty(DType dtype, const Shape& shape, flashkernel::Device device) {
  static const Torch& torch = *new Torch;
  const nb::object& type = torch.dtypes[static_cast<std::size_t>(dtype)];
  static Extents& extents = *new Extents(shape);  // guarded by the GIL, as all of this
  if (!extents.is(shape)) extents = Extents(shape);
  const auto is_current = [&] { return torch.only_device || nb::cast<int>(torch.current_device()) == device.index; };
  const nb::object& quick = device.is_cpu() ? torch.empty_on_cpu : torch.empty_on_cuda;
  if (quick.is_valid() && (device.is_cpu() || is_current())) {
    nb::object tensor = nb::steal(
        PyObject_CallFunctionObjArgs(quick.ptr(), extents.size.ptr(), extents.strides.ptr(), type.ptr(), nullptr));
    if (!tensor.is_valid()) throw nb::python_error();
    return tensor;
  }
  return torch.empty(extents.size, nb::arg("dtype") = type, nb::arg("device") = to_string(device));
}

}  // namespace flashkernel::python
