// Import, validation and allocation behind `Call` (see dlpack.hpp).
// Sources: the DLPack specification, its Python and C exchange protocols, and NumPy's array interface (protocol 3).
#include "dlpack.hpp"

#include <cstring>
#include <limits>

#include "array.hpp"
#include "array_type.hpp"
#include "flashkernel/error.hpp"
#include "torch_tensor.hpp"

namespace flashkernel::python {
namespace {

thread_local Explanation* explain_into = nullptr;

// NumPy's __array_struct__ (protocol 3).
struct ArrayStruct {
  int two;
  int ndim;
  char kind;
  int itemsize;
  int flags;
  Py_intptr_t* shape;
  Py_intptr_t* strides;  // in bytes
  void* data;
  PyObject* descr;
};
constexpr int kNumpyAligned = 0x100, kNumpyNotSwapped = 0x200, kNumpyWriteable = 0x400;

// False when the type is one that no op takes.
bool dtype_from(const dlpack::DataType& type, DType& dtype) {
  if (type.code == dlpack::kFloat4E2M1 && type.bits == 4 && type.lanes == 2) return dtype = DType::kFloat4E2M1x2, true;
  if (type.lanes != 1) return false;
  switch (type.code) {
    case dlpack::kFloat:
      if (type.bits == 32) return dtype = DType::kFloat32, true;
      if (type.bits == 16) return dtype = DType::kFloat16, true;
      return false;
    case dlpack::kBFloat:
      if (type.bits == 16) return dtype = DType::kBFloat16, true;
      return false;
    case dlpack::kInt:
      if (type.bits == 32) return dtype = DType::kInt32, true;
      if (type.bits == 64) return dtype = DType::kInt64, true;
      if (type.bits == 8) return dtype = DType::kInt8, true;
      return false;
    case dlpack::kFloat8E4M3:
      if (type.bits == 8) return dtype = DType::kFloat8E4M3, true;
      return false;
    case dlpack::kUInt:
      if (type.bits == 8) return dtype = DType::kUInt8, true;
      return false;
    default: return false;
  }
}

std::string dtype_text(const dlpack::DataType& type) {
  std::string text;
  switch (type.code) {
    case dlpack::kInt: text = "int"; break;
    case dlpack::kUInt: text = "uint"; break;
    case dlpack::kFloat: text = "float"; break;
    case dlpack::kBFloat: text = "bfloat"; break;
    case dlpack::kComplex: text = "complex"; break;
    case dlpack::kBool: return "bool";
    default: text = "DLPack type code " + std::to_string(type.code) + " with bits "; break;
  }
  text += std::to_string(type.bits);
  return type.lanes == 1 ? text : text + " with " + std::to_string(type.lanes) + " lanes";
}

constexpr const char* kTypesTaken = "float32, float16 and bfloat16 (and int32, int64 for indices) are taken";

// A framework refused to hand an array over (no storage, sparse, quantised, ...): its reason, as our error with its as
// cause.
[[noreturn]] void raise_refusal(const char* op, const char* name, nb::handle array) {
  nb::python_error error;
  std::string reason = text_of(error.value());
  reason = reason.substr(0, reason.find('\n'));
  if (const std::string what = traced_as(array); !what.empty())
    nb::raise_from(error, PyExc_ValueError, "%s: %s is %s; %s", op, name, what.c_str(), where_traced(op).c_str());
  nb::raise_from(error, PyExc_ValueError,
                 "%s: %s (%s) has no memory that DLPack can describe: %s; a dense array is needed", op, name,
                 type_text(array).c_str(), reason.c_str());
}

// For a, b >= 0: a * b into `a`; false when it does not fit. Divides only where a factor is large: a call multiplies
// some fifty times.
bool multiply(std::int64_t& a, std::int64_t b) {
  if ((a | b) >> 31 != 0 && a != 0 && b > std::numeric_limits<std::int64_t>::max() / a) return false;
  a *= b;
  return true;
}

bool on_gpu(std::int32_t type) { return type == dlpack::kCuda || type == dlpack::kCudaManaged; }

void set_python_error(void*, const char* kind, const char* message) {
  PyObject* type = std::strcmp(kind, "MemoryError") == 0 ? PyExc_MemoryError : PyExc_RuntimeError;
  PyErr_SetString(type, message);
}

}  // namespace

nb::object numpy_attribute(const char* name) { return nb::module_::import_("numpy").attr(name); }

void* numpy_data(nb::handle array) {
  const nb::object capsule = nb::steal(PyObject_GetAttrString(array.ptr(), "__array_struct__"));
  if (!capsule.is_valid()) throw nb::python_error();
  const auto* info = static_cast<const ArrayStruct*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (!info) throw nb::python_error();
  return info->data;
}

dlpack::DataType dlpack_type(DType dtype) {
  const auto bits = static_cast<std::uint8_t>(8 * dtype_bytes(dtype));
  switch (dtype) {
    case DType::kFloat32:
    case DType::kFloat16: return {dlpack::kFloat, bits, 1};
    case DType::kBFloat16: return {dlpack::kBFloat, bits, 1};
    case DType::kInt32:
    case DType::kInt64: return {dlpack::kInt, bits, 1};
    case DType::kUInt8:
    case DType::kInt4x2:  // bytes, for frameworks: none has both types of elements
    case DType::kFloat4E2M1x2: return {dlpack::kUInt, bits, 1};
    case DType::kFloat8E4M3: return {dlpack::kFloat8E4M3, bits, 1};
    case DType::kInt8: return {dlpack::kInt, bits, 1};
  }
  return {dlpack::kOpaque, bits, 1};
}

ExplainScope::ExplainScope(Explanation* explanation) : previous_(explain_into) { explain_into = explanation; }
ExplainScope::~ExplainScope() { explain_into = previous_; }

Call::Call(const char* op, nb::handle stream, nb::handle dtype) : op_(op), stream_argument_(stream) {
  if (dtype.is_none()) return;
  if (parse_dtype(op, dtype) != DType::kBFloat16)
    fail("dtype=" + short_repr(dtype) +
         "; it says how uint16 arrays are read and can only be 'bfloat16' (other arrays carry their own dtype)");
  uint16_is_bfloat16_ = true;
}

Call::~Call() {
  // Deleters may run Python code; an error that is on its way must survive them.
  if (owned_.empty() && owned_old_.empty()) return;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  for (auto* tensor : owned_)
    if (tensor->deleter) tensor->deleter(tensor);
  for (auto* tensor : owned_old_)
    if (tensor->deleter) tensor->deleter(tensor);
  PyErr_Restore(type, value, traceback);
}

void Call::fail(const std::string& message) const { throw InvalidArgument(std::string(op_) + ": " + message); }

ExecutionContext Call::context() const {
  ExecutionContext context;
  context.stream = stream_;
  context.explain = explain_into;
  return context;
}

// Data not null, sizes and offsets that fit, aligned elements; adds the byte offset. Shape and strides are in the view.
void Call::check_view(const char* name, TensorView& view, std::uint64_t byte_offset) {
  const auto item = static_cast<std::int64_t>(dtype_bytes(view.dtype));          // a power of two
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() / 16;  // elements, as the front doors allow
  std::int64_t count = 1;
  bool overflow = false;
  for (int d = 0; d < view.ndim; ++d) {
    if (view.shape[d] < 0)
      fail(std::string(name) + ".shape[" + std::to_string(d) + "]=" + std::to_string(view.shape[d]) +
           "; must not be negative");
    overflow = !multiply(count, view.shape[d]) || overflow;
  }
  overflow = overflow || count > kMost;
  if (count != 0) {
    std::int64_t reach = 0;
    for (int d = 0; d < view.ndim && !overflow; ++d) {
      const std::int64_t stride = view.strides[d];
      std::int64_t span = view.shape[d] - 1;
      overflow = stride < -kMost || !multiply(span, stride < 0 ? -stride : stride) || span > kMost - reach;
      if (!overflow) reach += span;
    }
  }
  if (overflow) fail(std::string(name) + " has a shape or strides that overflow 64-bit byte offsets");
  if (count == 0) return;
  bytes_ += static_cast<std::uint64_t>(count * item);
  if (!view.data)
    fail(std::string(name) + " has " + std::to_string(count) +
         " elements but no memory (a fake, meta or wrapper tensor? flashkernel.torch takes those)");
  view.data = static_cast<char*>(view.data) + byte_offset;
  if ((reinterpret_cast<std::uintptr_t>(view.data) & static_cast<std::uintptr_t>(item - 1)) != 0)
    fail(std::string(name) + " starts at an address that is not a multiple of its element size of " +
         std::to_string(item) + " bytes");
}

DType Call::uint16_as(const char* name, bool is_bfloat16_array) {
  if (!is_bfloat16_array && !uint16_is_bfloat16_)
    fail(std::string(name) + " has dtype uint16; pass dtype=\"bfloat16\" if its bits are bfloat16 (" + kTypesTaken +
         ")");
  return DType::kBFloat16;
}

void Call::import_tensor(const char* name, const dlpack::Tensor& tensor, TensorView& view) {
  if (tensor.ndim < 0 || tensor.ndim > kMaxDims)
    fail(std::string(name) + " has " + std::to_string(tensor.ndim) + " dims; at most " + std::to_string(kMaxDims) +
         " are taken");
  if (tensor.ndim > 0 && !tensor.shape)
    fail(std::string(name) + " has " + std::to_string(tensor.ndim) + " dims but no shape");
  if (!dtype_from(tensor.dtype, view.dtype)) {
    const bool is_uint16 = tensor.dtype.code == dlpack::kUInt && tensor.dtype.bits == 16 && tensor.dtype.lanes == 1;
    if (!is_uint16) fail(std::string(name) + " has dtype " + dtype_text(tensor.dtype) + "; " + kTypesTaken);
    view.dtype = uint16_as(name, false);
  }
  switch (tensor.device.type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost: view.device = flashkernel::Device::cpu(); break;
    case dlpack::kCuda:
    case dlpack::kCudaManaged: view.device = flashkernel::Device::cuda(tensor.device.index); break;
    default:
      fail(std::string(name) + " is on a device of DLPack type " + std::to_string(tensor.device.type) +
           "; CPU (1), CUDA (2), CUDA host (3) and CUDA managed (13) memory are taken");
  }
  view.data = tensor.data;
  view.ndim = tensor.ndim;
  std::int64_t stride = 1;
  for (int d = tensor.ndim - 1; d >= 0; --d) {
    view.shape[d] = tensor.shape[d];
    view.strides[d] = tensor.strides ? tensor.strides[d] : stride;
    // Only a missing stride array needs the product; check_view refuses shapes where it overflows.
    if (!tensor.strides && !multiply(stride, tensor.shape[d] > 0 ? tensor.shape[d] : 1)) stride = 0;
  }
  check_view(name, view, tensor.byte_offset);
}

void Call::import_numpy(const char* name, nb::handle array, bool write, TensorView& view) {
  const nb::object capsule = nb::steal(PyObject_GetAttrString(array.ptr(), "__array_struct__"));
  if (!capsule.is_valid()) throw nb::python_error();
  const auto* info = static_cast<const ArrayStruct*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (!info) throw nb::python_error();
  if (info->two != 2) fail(std::string(name) + ".__array_struct__ is not one of NumPy's protocol 3");
  const dlpack::DataType type{static_cast<std::uint8_t>(info->kind == 'f'   ? dlpack::kFloat
                                                        : info->kind == 'i' ? dlpack::kInt
                                                        : info->kind == 'u' ? dlpack::kUInt
                                                                            : dlpack::kOpaque),
                              static_cast<std::uint8_t>(8 * info->itemsize), 1};
  if (!dtype_from(type, view.dtype)) {
    const nb::object dtype = array.attr("dtype");
    const bool is_uint16 = info->kind == 'u' && info->itemsize == 2;
    // ml_dtypes' types are NumPy extension types: kind V, named "bfloat16", "float8_e4m3fn".
    const bool is_bfloat16 = info->kind == 'V' && info->itemsize == 2 && text_of(dtype) == "bfloat16";
    const bool is_float8 = info->kind == 'V' && info->itemsize == 1 && text_of(dtype) == "float8_e4m3fn";
    if (!is_uint16 && !is_bfloat16 && !is_float8)
      fail(std::string(name) + " has dtype " + text_of(dtype) + "; " + kTypesTaken);
    view.dtype = is_float8 ? DType::kFloat8E4M3 : uint16_as(name, is_bfloat16);
    if (is_bfloat16) ml_dtype_ = dtype;
  }
  if ((info->flags & kNumpyNotSwapped) == 0) fail(std::string(name) + " is not in native byte order");
  if ((info->flags & kNumpyAligned) == 0) fail(std::string(name) + " is not aligned to its element size");
  if (write && (info->flags & kNumpyWriteable) == 0) fail(std::string(name) + " is read-only; the op writes to it");
  if (info->ndim > kMaxDims)
    fail(std::string(name) + " has " + std::to_string(info->ndim) + " dims; at most " + std::to_string(kMaxDims) +
         " are taken");
  view.data = info->data;
  view.ndim = info->ndim;
  for (int d = 0; d < info->ndim; ++d) {
    view.shape[d] = info->shape[d];
    if (info->strides[d] % info->itemsize != 0)
      fail(std::string(name) + ".strides[" + std::to_string(d) + "]=" + std::to_string(info->strides[d]) +
           " bytes; must be a multiple of the element size");
    view.strides[d] = info->strides[d] / info->itemsize;
  }
  check_view(name, view, 0);
}

void Call::import_protocol(const char* name, nb::handle array, bool is_cupy, bool write, TensorView& view) {
  const nb::object place = array.attr("__dlpack_device__")();
  std::int64_t device_type = 0, device_index = 0;
  if (!int_at(place, 0, device_type) || !int_at(place, 1, device_index) || device_index < 0)
    fail(std::string(name) + ": " + type_text(array) + ".__dlpack_device__() gave " + short_repr(place) +
         "; a pair of ints (device type, device index) is needed");
  nb::dict arguments;
  if (on_gpu(static_cast<std::int32_t>(device_type))) {
    find_stream(nullptr, flashkernel::Device::cuda(static_cast<int>(device_index)));
    // Who names a stream sees to it that inputs outlive their use there.
    waits_ = waits_ || (!is_cupy && stream_argument_.is_none());
    // 1 is the legacy default stream; 0 is ambiguous in the protocol and refused by its users.
    const auto handle = reinterpret_cast<std::uintptr_t>(stream_.handle);
    arguments["stream"] = nb::int_(handle == 0 ? std::uintptr_t{1} : handle);
  }
  nb::object capsule;
  const nb::object method = array.attr("__dlpack__");
  arguments["max_version"] = nb::make_tuple(dlpack::kVersion.major, dlpack::kVersion.minor);
  try {
    capsule = method(**arguments);
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
    // A producer from before DLPack 1.0 does not know max_version.
    nb::dict old_arguments;
    if (arguments.contains("stream")) old_arguments["stream"] = arguments["stream"];
    capsule = method(**old_arguments);
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    auto* managed =
        static_cast<dlpack::ManagedTensorVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned") != 0) throw nb::python_error();
    owned_.push_back(managed);
    if (managed->version.major != dlpack::kVersion.major)
      fail(std::string(name) + " speaks DLPack " + std::to_string(managed->version.major) + "; 1 is needed");
    if (write && (managed->flags & dlpack::kFlagReadOnly) != 0)
      fail(std::string(name) + " is read-only; the op writes to it");
    if (write && (managed->flags & dlpack::kFlagCopied) != 0)
      fail(std::string(name) + " was copied by its owner; the op would write to the copy");
    return import_tensor(name, managed->tensor, view);
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    if (PyCapsule_SetName(capsule.ptr(), "used_dltensor") != 0) throw nb::python_error();
    owned_old_.push_back(managed);
    if (write)
      fail(std::string(name) + " (" + type_text(array) +
           ") can't say whether it may be written (DLPack before 1.0); the op writes to it");
    return import_tensor(name, managed->tensor, view);
  }
  fail(std::string(name) + ": " + type_text(array) + ".__dlpack__() gave " + short_repr(capsule) +
       "; a capsule \"dltensor\" or \"dltensor_versioned\" that nobody has taken is needed");
}

void Call::import(const char* name, nb::handle array, bool write, TensorView& view) {
  const ArrayType& type = array_type(Py_TYPE(array.ptr()));
  switch (type.framework) {
    case Framework::kExchange: {
      if (type.api->borrow_from_object && (!write || type.is_torch)) {
        dlpack::Tensor tensor;
        if (type.api->borrow_from_object(array.ptr(), &tensor) != 0) raise_refusal(op_, name, array);
        import_tensor(name, tensor, view);
      } else {
        dlpack::ManagedTensorVersioned* managed = nullptr;  // tells whether it is read-only
        if (type.api->managed_from_object(array.ptr(), &managed) != 0) raise_refusal(op_, name, array);
        owned_.push_back(managed);
        if (write && (managed->flags & dlpack::kFlagReadOnly) != 0)
          fail(std::string(name) + " is read-only; the op writes to it");
        import_tensor(name, managed->tensor, view);
      }
      if (type.is_torch) check_torch(name, array, write, view);
      break;
    }
    case Framework::kNumpy: import_numpy(name, array, write, view); break;
    case Framework::kOwn:
      view = nb::cast<const Array&>(array).view;
      bytes_ += kFewBytes + 1;
      break;
    case Framework::kProtocol: import_protocol(name, array, type.is_cupy, write, view); break;
    case Framework::kNotArray: throw nb::type_error(not_an_array(op_, name, array).c_str());
  }
  if (!has_first_) adopt_first(type, array, view);
  if (view.device.is_cuda() && !stream_known_) find_stream(&type, view.device);
}

// What torch knows of a tensor and DLPack can't tell: gradients and tangents, which no op here records, and lazy
// negation. Results that are written into tensors count as changes of them once the op has run.
void Call::check_torch(const char* name, nb::handle tensor, bool write, const TensorView& view) {
  if (!torch_modes_) torch_modes_ = torch_modes();
  const bool is_integer = is_index(view.dtype) || view.dtype == DType::kInt8 || view.dtype == DType::kUInt8;
  if (*torch_modes_ != TorchModes{} && !is_integer) {  // whole numbers have no derivative
    const bool has_gradient = torch_modes_->gradients && requires_gradient(tensor);
    if (has_gradient || (torch_modes_->tangents && has_tangent(tensor)))
      raise_unrecorded(op_, name, has_gradient, write);
  }
  // Imaginary parts of conjugated complex numbers, of which there are none in the other types.
  if ((view.dtype == DType::kFloat32 || view.dtype == DType::kFloat16) && is_negated(tensor))
    fail(std::string(name) + " is a lazily negated view (torch.is_neg); call resolve_neg() first");
  if (write && num_written_ < kMaxWritten) written_[num_written_++] = tensor;
}

void Call::count_changes() const { increment_versions(written_, num_written_); }

void Call::wait() const { wait_for(device_, stream_); }

void Call::adopt_first(const ArrayType& type, nb::handle array, const TensorView& view) {
  has_first_ = true;
  first_type_ = &type;
  first_array_ = array;
  device_ = view.device;
}

// The caller's stream: the `stream` argument, else the framework's current one, else the legacy default stream.
void Call::find_stream(const ArrayType* type, flashkernel::Device device) {
  if (stream_known_) return;
  stream_known_ = true;
  if (!stream_argument_.is_none()) {
    stream_ = parse_stream(op_, stream_argument_);
    return;
  }
  if (type && type->api) {
    if (type->api->current_work_stream(dlpack::kCuda, device.index, &stream_.handle) != 0) throw nb::python_error();
    return;
  }
  const auto modules = nb::cast<nb::dict>(nb::module_::import_("sys").attr("modules"));
  if (modules.contains("cupy")) {
    const nb::object stream = modules["cupy"].attr("cuda").attr("get_current_stream")();
    stream_.handle = PyLong_AsVoidPtr(nb::object(stream.attr("ptr")).ptr());
    if (PyErr_Occurred()) throw nb::python_error();
  }
}

Output Call::output(const char* name, nb::handle given, DType dtype, const Shape& shape) {
  if (given.is_none()) return allocate(dtype, shape);
  Output output;
  import(name, given, true, output.view);
  output.object = nb::borrow(given);
  return output;
}

Output Call::allocate(DType dtype, const Shape& shape) {
  std::int64_t bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  for (int d = 0; d < shape.ndim; ++d) {
    if (shape.dims[d] < 0 || !multiply(bytes, shape.dims[d]))
      fail("the output would have shape[" + std::to_string(d) + "]=" + std::to_string(shape.dims[d]) +
           ", more than memory can hold");
  }
  Output output;
  const Framework framework = first_type_ ? first_type_->framework : Framework::kNumpy;
  if (framework == Framework::kExchange && first_type_->is_torch && first_type_->api->borrow_from_object) {
    output.object = torch_empty(dtype, shape, device_);
    dlpack::Tensor tensor;
    if (first_type_->api->borrow_from_object(output.object.ptr(), &tensor) != 0) throw nb::python_error();
    import_tensor("out", tensor, output.view);
    return output;
  }
  if (framework == Framework::kExchange) {
    Shape extents = shape;
    dlpack::Tensor prototype{};
    prototype.device =
        device_.is_cpu() ? dlpack::Device{dlpack::kCpu, 0} : dlpack::Device{dlpack::kCuda, device_.index};
    prototype.ndim = shape.ndim;
    prototype.dtype = dlpack_type(dtype);
    prototype.shape = extents.dims;
    dlpack::ManagedTensorVersioned* managed = nullptr;
    if (first_type_->api->allocate(&prototype, &managed, nullptr, set_python_error) != 0) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "the array framework could not allocate the output");
      throw nb::python_error();
    }
    import_tensor("out", managed->tensor, output.view);
    void* object = nullptr;
    if (first_type_->api->managed_to_object(managed, &object) != 0) throw nb::python_error();  // takes `managed` over
    output.object = nb::steal(static_cast<PyObject*>(object));
    return output;
  }
  if (framework == Framework::kNumpy && device_.is_cpu()) {
    // No initialiser that runs Python: a thread that waits for its lock keeps the GIL (see torch_tensor.cpp).
    static PyObject* empty = nullptr;
    if (!empty) empty = numpy_attribute("empty").release().ptr();
    nb::object type;
    if (dtype == DType::kBFloat16) {
      type = ml_dtype_.is_valid() ? ml_dtype_ : nb::object(nb::str("uint16"));
    } else {  // NumPy has no float8 of its own: its bytes
      type = nb::str(dtype_name(dtype == DType::kFloat8E4M3 ? DType::kUInt8 : dtype));
    }
    nb::object extents = nb::steal(PyTuple_New(shape.ndim));
    for (int d = 0; d < shape.ndim; ++d) PyTuple_SetItem(extents.ptr(), d, PyLong_FromLongLong(shape.dims[d]));
    output.object = nb::steal(PyObject_CallFunctionObjArgs(empty, extents.ptr(), type.ptr(), nullptr));
    if (!output.object.is_valid()) throw nb::python_error();
    const bool flag = std::exchange(uint16_is_bfloat16_, true);
    import_numpy("out", output.object, true, output.view);
    uint16_is_bfloat16_ = flag;
    return output;
  }
  Array array = Array::allocate(dtype, shape, device_, stream_);
  output.view = array.view;
  output.object = nb::cast(std::move(array));
  output.is_own = framework == Framework::kProtocol;
  return output;
}

nb::object Call::result(Output& output) {
  if (!output.is_own) return std::move(output.object);
  // The array-API way from our memory to the caller's arrays; without it the caller gets a flashkernel.Array.
  const nb::object space = attribute_or_null(first_array_, "__array_namespace__");
  if (!space.is_valid()) return std::move(output.object);
  return space().attr("from_dlpack")(output.object);
}

Stream parse_stream(const char* op, nb::handle stream) {
  nb::object value = nb::borrow(stream);
  if (const nb::object method = attribute_or_null(stream, "__cuda_stream__"); method.is_valid()) {
    const nb::object pair = method();
    if (!nb::isinstance<nb::sequence>(pair) || nb::len(pair) != 2)
      throw nb::type_error((std::string(op) + ": stream: " + type_text(stream) + ".__cuda_stream__() gave " +
                            short_repr(pair) + "; a pair (0, handle) is needed")
                               .c_str());
    value = pair[1];
  } else if (const nb::object handle = attribute_or_null(stream, "cuda_stream"); handle.is_valid()) {
    value = handle;  // torch.cuda.Stream before it had __cuda_stream__
  }
  if (!PyLong_Check(value.ptr())) {
    const std::string message = std::string(op) + ": stream is a " + type_text(stream) +
                                "; None, a cudaStream_t as int, or an object with __cuda_stream__() is needed";
    throw nb::type_error(message.c_str());
  }
  Stream parsed;
  parsed.handle = PyLong_AsVoidPtr(value.ptr());
  if (PyErr_Occurred()) throw nb::python_error();
  return parsed;
}

flashkernel::Device parse_device(nb::handle device) {
  const std::string text = text_of(device);
  if (text == "cpu" || text == "cpu:0") return flashkernel::Device::cpu();
  if (text == "cuda") return flashkernel::Device::cuda(0);
  if (text.size() > 5 && text.size() < 12 && text.compare(0, 5, "cuda:") == 0 &&
      text.find_first_not_of("0123456789", 5) == std::string::npos)
    return flashkernel::Device::cuda(std::stoi(text.substr(5)));
  throw InvalidArgument("device: got '" + text + "'; 'cpu', 'cuda' or 'cuda:<index>' is needed");
}

DType parse_dtype(const char* op, nb::handle dtype) {
  std::string text;
  if (nb::isinstance<nb::str>(dtype)) {
    text = text_of(dtype);
  } else if (const nb::object name = attribute_or_null(dtype, "__name__"); name.is_valid()) {
    text = text_of(name);  // numpy.float16 and ml_dtypes.bfloat16 are classes
  } else {
    text = text_of(dtype);  // "torch.float16", or numpy.dtype("float16")
  }
  const auto dot = text.rfind('.');
  if (dot != std::string::npos) text.erase(0, dot + 1);
  for (const DType known : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kInt32, DType::kInt64,
                            DType::kUInt8, DType::kFloat8E4M3, DType::kInt8, DType::kInt4x2, DType::kFloat4E2M1x2})
    if (text == dtype_name(known)) return known;
  throw InvalidArgument(std::string(op) + ": dtype=" + short_repr(dtype) +
                        "; 'float32', 'float16' or 'bfloat16' is needed");
}

}  // namespace flashkernel::python
