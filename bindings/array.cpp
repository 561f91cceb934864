// flashkernel.Array (see array.hpp): allocation, DLPack export, NumPy's array interface.
#include "array.hpp"

#include "array_type.hpp"

#include <atomic>
#include <cstring>

#include "flashkernel/error.hpp"
#include "flashkernel/memory_resource.hpp"
#include "flashkernel/stream_order.hpp"

namespace flashkernel::python {
namespace {

// Arrays whose capsules have gone while another stream than their own may still read them: DLPack does not say when it
// is done. They wait for the next point at which the library waits for the device. A list without a lock, since
// deleters run in any thread, with the GIL or without it.
struct Retired {
  Array array;
  Retired* next = nullptr;
};
std::atomic<Retired*> retired{nullptr};

void retire(Array array) {
  auto* node = new Retired{std::move(array), retired.load(std::memory_order_relaxed)};
  while (!retired.compare_exchange_weak(node->next, node)) {
  }
}

void free_retired(Retired* node) {
  while (node) {
    Retired* next = node->next;
    delete node;
    node = next;
  }
}

// What a DLPack capsule keeps alive: one block with the struct, the shape and the memory's owner.
template <class Managed>
struct Export {
  Managed managed{};
  Array array;
  bool is_read_elsewhere = false;  // on another stream than the array's
};

template <class Managed>
Managed* make_export(const Array& array, bool is_read_elsewhere) {
  auto* exported = new Export<Managed>{{}, array, is_read_elsewhere && array.is_cached};
  dlpack::Tensor& tensor = exported->managed.tensor;
  TensorView& view = exported->array.view;
  tensor.data = view.data;
  tensor.device =
      view.device.is_cpu() ? dlpack::Device{dlpack::kCpu, 0} : dlpack::Device{dlpack::kCuda, view.device.index};
  tensor.ndim = view.ndim;
  tensor.dtype = dlpack_type(view.dtype);
  tensor.shape = view.shape;
  tensor.strides = view.strides;
  exported->managed.context = exported;
  exported->managed.deleter = [](Managed* managed) {
    auto* exported = static_cast<Export<Managed>*>(managed->context);
    if (exported->is_read_elsewhere) retire(std::move(exported->array));
    delete exported;
  };
  return &exported->managed;
}

template <class Managed>
nb::object make_capsule(Managed* managed, const char* name, PyCapsule_Destructor destructor) {
  PyObject* capsule = PyCapsule_New(managed, name, destructor);
  if (!capsule) {
    managed->deleter(managed);
    throw nb::python_error();
  }
  return nb::steal(capsule);
}

// A capsule that nobody consumed frees its tensor; a consumer renames it and frees the tensor itself.
template <class Managed>
void delete_unused(PyObject* capsule, const char* name) {
  if (!PyCapsule_IsValid(capsule, name)) return;
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  managed->deleter(managed);
}

nb::object export_dlpack(const Array& array, nb::handle stream, nb::handle max_version, nb::handle dl_device,
                         nb::handle copy) {
  if (!copy.is_none() && PyObject_IsTrue(copy.ptr()) != 0)
    throw nb::buffer_error("Array.__dlpack__: copy=True; only views are exported");
  const int type = array.view.device.is_cpu() ? dlpack::kCpu : dlpack::kCuda;
  const auto pair_of = [](const char* name, nb::handle pair) {
    std::int64_t first = 0, second = 0;
    if (!int_at(pair, 0, first) || !int_at(pair, 1, second))
      throw nb::type_error(
          ("Array.__dlpack__: " + std::string(name) + "=" + short_repr(pair) + "; None or a pair of ints is needed")
              .c_str());
    return first;
  };
  if (!dl_device.is_none() && pair_of("dl_device", dl_device) != type)
    throw nb::buffer_error(
        "Array.__dlpack__: dl_device is another kind of device; copies between devices are not made");
  bool is_read_elsewhere = false;
  if (array.view.device.is_cuda() && !stream.is_none()) {
    // -1: the consumer synchronises by itself. 1 and 0: the legacy default stream.
    std::intptr_t consumer = 0;
    if (!nb::try_cast(stream, consumer))
      throw nb::type_error(("Array.__dlpack__: stream=" + short_repr(stream) + "; None or an int is needed").c_str());
    const auto producer = reinterpret_cast<std::intptr_t>(array.stream.handle);
    is_read_elsewhere = consumer != -1 && consumer != producer && !(consumer == 1 && producer == 0);
    if (is_read_elsewhere) {
      if (retired.load(std::memory_order_relaxed)) wait_for(array.view.device, array.stream);
      order_streams(array.view.device, array.stream, Stream{reinterpret_cast<void*>(consumer)});
    }
  }
  if (!max_version.is_none() && pair_of("max_version", max_version) >= 1) {
    auto* managed = make_export<dlpack::ManagedTensorVersioned>(array, is_read_elsewhere);
    managed->version = dlpack::kVersion;
    return make_capsule(managed, "dltensor_versioned", [](PyObject* capsule) {
      delete_unused<dlpack::ManagedTensorVersioned>(capsule, "dltensor_versioned");
    });
  }
  return make_capsule(make_export<dlpack::ManagedTensor>(array, is_read_elsewhere), "dltensor",
                      [](PyObject* capsule) { delete_unused<dlpack::ManagedTensor>(capsule, "dltensor"); });
}

nb::tuple tuple_of(const std::int64_t* values, int count, std::int64_t factor = 1) {
  nb::list list;
  for (int i = 0; i < count; ++i) list.append(values[i] * factor);
  return nb::tuple(list);
}

const char* numpy_typestr(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "<f4";
    case DType::kFloat16: return "<f2";
    case DType::kBFloat16: return "<u2";
    case DType::kInt32: return "<i4";
    case DType::kInt64: return "<i8";
    case DType::kUInt8:
    case DType::kInt4x2:
    case DType::kFloat4E2M1x2:
    case DType::kFloat8E4M3: return "|u1";  // NumPy has no type of its own for it
    case DType::kInt8: return "|i1";
  }
  return "|V1";
}

nb::dict array_interface(const Array& array) {
  if (array.view.device.is_cuda())
    throw nb::attribute_error("Array.__array_interface__: the memory is on a GPU; use DLPack");
  nb::dict interface;
  interface["version"] = 3;
  interface["typestr"] = numpy_typestr(array.view.dtype);
  interface["shape"] = tuple_of(array.view.shape, array.view.ndim);
  interface["strides"] =
      tuple_of(array.view.strides, array.view.ndim, static_cast<std::int64_t>(dtype_bytes(array.view.dtype)));
  interface["data"] = nb::make_tuple(reinterpret_cast<std::uintptr_t>(array.view.data), false);
  return interface;
}

}  // namespace

Array Array::allocate(DType dtype, const Shape& shape, Device device, Stream stream) {
  std::size_t bytes = dtype_bytes(dtype);
  for (int d = 0; d < shape.ndim; ++d) bytes *= static_cast<std::size_t>(shape.dims[d]);
  MemoryResource& resource = default_resource(device);
  void* data = resource.allocate(bytes, stream);
  Array array;
  // The library's default resources live as long as the process, so the owner may outlive the interpreter.
  array.owner = std::shared_ptr<void>(
      data, [&resource, bytes, stream](void* pointer) { resource.deallocate(pointer, bytes, stream); });
  array.stream = stream;
  array.is_cached = true;
  array.view.data = data;
  array.view.dtype = dtype;
  array.view.device = device;
  array.view.ndim = shape.ndim;
  std::int64_t stride = 1;
  for (int d = shape.ndim - 1; d >= 0; --d) {
    array.view.shape[d] = shape.dims[d];
    array.view.strides[d] = stride;
    stride *= shape.dims[d] > 0 ? shape.dims[d] : 1;
  }
  return array;
}

void wait_for(Device device, Stream stream) {
  Retired* const gone = retired.exchange(nullptr);
  try {
    const nb::gil_scoped_release release;
    for (const Retired* node = gone; node; node = node->next) synchronize(node->array.view.device);
    synchronize(device, stream);
  } catch (...) {  // the device is lost, and nobody reads any more
    free_retired(gone);
    throw;
  }
  free_retired(gone);
}

nb::object to_numpy(Array array) {
  const bool is_cuda = array.view.device.is_cuda();
  nb::object object = nb::cast(std::move(array));
  return is_cuda ? object : numpy_attribute("asarray")(object);
}

void bind_array(nb::module_& module) {
  nb::class_<Array>(module, "Array", R"doc(A tensor in FlashKernel's own memory.

Exports itself through DLPack (``torch.from_dlpack(array)``, ``jax.numpy.from_dlpack(array)``) and, on the CPU, through
NumPy's array interface (``numpy.asarray(array)``; bfloat16 arrives as uint16). The memory lives as long as anything that
was made from it. Every op takes it as it is. On a GPU, a stream that imports it waits for the stream that writes it.)doc")
      .def_prop_ro(
          "shape", [](const Array& array) { return tuple_of(array.view.shape, array.view.ndim); },
          nb::sig("def shape(self) -> tuple[int, ...]"), "Extents.")
      .def_prop_ro(
          "dtype", [](const Array& array) { return dtype_name(array.view.dtype); }, "Name of the element type.")
      .def_prop_ro(
          "device", [](const Array& array) { return to_string(array.view.device); }, "``cpu`` or ``cuda:<index>``.")
      .def("__dlpack__", &export_dlpack, nb::kw_only(), nb::arg("stream") = nb::none(),
           nb::arg("max_version") = nb::none(), nb::arg("dl_device") = nb::none(), nb::arg("copy") = nb::none(),
           nb::sig("def __dlpack__(self, *, stream: typing.Any = None, max_version: tuple[int, int] | None = None, "
                   "dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> typing.Any"),
           "DLPack capsule that shares the memory.")
      .def(
          "__dlpack_device__",
          [](const Array& array) {
            return nb::make_tuple(array.view.device.is_cpu() ? int{dlpack::kCpu} : int{dlpack::kCuda},
                                  array.view.device.index);
          },
          nb::sig("def __dlpack_device__(self) -> tuple[int, int]"), "DLPack device type and index.")
      .def_prop_ro("__array_interface__", &array_interface,
                   nb::sig("def __array_interface__(self) -> dict[str, typing.Any]"),
                   "NumPy's array interface, protocol 3.")
      .def("__repr__", [](const Array& array) { return "flashkernel.Array(" + to_string(array.view) + ")"; });
}

}  // namespace flashkernel::python
