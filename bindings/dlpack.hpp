// Where Python arrays and TensorView meet: imports arrays without copying, allocates outputs in the caller's framework
// and finds the stream to work on. Every bound op makes one `Call`. Nothing else in the package knows both worlds.
// Invariant: a view that `Call` hands out is valid until the Call is destroyed, and was validated before.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dlpack_abi.hpp"
#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel::python {

namespace nb = nanobind;

/// How arrays of one Python type are read and made.
enum class Framework : std::uint8_t {
  kNotArray,
  kExchange,  ///< C exchange API (torch): borrowed for the call, allocated by the framework
  kNumpy,     ///< numpy.ndarray through __array_struct__
  kOwn,       ///< flashkernel.Array
  kProtocol,  ///< __dlpack__ and __dlpack_device__ (JAX, CuPy, ...)
};

struct ArrayType {
  PyTypeObject* type = nullptr;
  Framework framework = Framework::kNotArray;
  const dlpack::ExchangeApi* api = nullptr;
  /// There are no read-only torch tensors, so that those written to need not be managed, which is what tells.
  bool is_torch = false;
  bool is_cupy = false;  ///< the current stream can be asked for
};

/// What torch is recording on this thread.
struct TorchModes {
  bool gradients = false;
  bool tangents = false;  ///< forward-mode derivatives
  bool operator!=(const TorchModes& other) const { return gradients != other.gradients || tangents != other.tangents; }
};

/// What is known of a type, looked up once per type.
const ArrayType& array_type(PyTypeObject* type);

struct Shape {
  int ndim = 0;
  std::int64_t dims[kMaxDims] = {};

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> extents) {
    for (const std::int64_t extent : extents) dims[ndim++] = extent;
  }
  explicit Shape(const TensorView& view) : ndim(view.ndim < 0 ? 0 : view.ndim) {
    for (int d = 0; d < ndim; ++d) dims[d] = view.shape[d];
  }
  /// The last dim replaced; of a 0-dim shape, itself.
  Shape with_last(std::int64_t extent) const {
    Shape shape = *this;
    if (ndim > 0) shape.dims[ndim - 1] = extent;
    return shape;
  }
  Shape without_last() const {
    Shape shape = *this;
    if (ndim > 0) --shape.ndim;
    return shape;
  }
};

/// The extent of dim `d`, counted from the end when negative; 0 when there is no such dim (the op's own checks then say
/// so).
inline std::int64_t extent(const TensorView& view, int d) {
  if (d < 0) d += view.ndim;
  return d >= 0 && d < view.ndim ? view.shape[d] : 0;
}

/// An output: what the kernel writes and what Python gets.
struct Output {
  TensorView view;
  nb::object object;
  bool is_own = false;  ///< a flashkernel.Array to be handed over to the caller's framework when the op has run
};

class Call {
 public:
  /// `dtype` is None, or "bfloat16": how uint16 arrays are to be read.
  Call(const char* op, nb::handle stream, nb::handle dtype);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  /// An array that is read. The first one decides device, framework and stream.
  TensorView input(const char* name, nb::handle array) {
    TensorView view;
    import(name, array, false, view);
    return view;
  }
  /// None gives an absent view.
  TensorView optional_input(const char* name, nb::handle array) {
    return array.is_none() ? TensorView{} : input(name, array);
  }
  /// An array that is written.
  TensorView inout(const char* name, nb::handle array) {
    TensorView view;
    import(name, array, true, view);
    return view;
  }

  /// `given`, or a new row-major array of the caller's framework if that is None.
  Output output(const char* name, nb::handle given, DType dtype, const Shape& shape);
  Output output(DType dtype, const Shape& shape) { return output("out", nb::none(), dtype, shape); }

  /// Runs the op: `function(const ExecutionContext&)`, without the GIL when the work happens on the CPU and is more
  /// than letting go of it.
  template <class Function>
  void run(Function&& function) {
    const ExecutionContext context = this->context();
    if (device_.is_cpu() && bytes_ > kFewBytes) {
      const nb::gil_scoped_release release;
      function(context);
    } else {
      function(context);
    }
    if (context.explain) return;
    if (waits_) wait();
    if (num_written_ != 0) count_changes();
  }

  /// What Python gets for an output, once the op has run.
  nb::object result(Output& output);

  /// Throws InvalidArgument "op: message".
  [[noreturn]] void fail(const std::string& message) const;
  const char* op() const noexcept { return op_; }
  Device device() const noexcept { return device_; }

 private:
  ExecutionContext context() const;
  // Into an absent view.
  void import(const char* name, nb::handle array, bool write, TensorView& view);
  void import_tensor(const char* name, const dlpack::Tensor& tensor, TensorView& view);
  void import_numpy(const char* name, nb::handle array, bool write, TensorView& view);
  void import_protocol(const char* name, nb::handle array, bool is_cupy, bool write, TensorView& view);
  void check_torch(const char* name, nb::handle tensor, bool write, const TensorView& view);
  void count_changes() const;
  void wait() const;
  void check_view(const char* name, TensorView& view, std::uint64_t byte_offset);
  void adopt_first(const ArrayType& type, nb::handle array, const TensorView& view);
  DType uint16_as(const char* name, bool is_bfloat16_array);
  void find_stream(const ArrayType* type, Device device);
  Output allocate(DType dtype, const Shape& shape);

  const char* op_;
  nb::handle stream_argument_;
  bool uint16_is_bfloat16_ = false;
  bool has_first_ = false;
  bool stream_known_ = false;
  /// An array's owner has a stream of its own that nobody tells (JAX), and may reuse its memory when the call is over.
  bool waits_ = false;
  nb::object ml_dtype_;  // bfloat16 of ml_dtypes, once an argument had it: outputs are the same kind
  Device device_{};
  Stream stream_{};
  const ArrayType* first_type_ = nullptr;
  nb::handle first_array_;
  std::vector<dlpack::ManagedTensorVersioned*> owned_;
  std::vector<dlpack::ManagedTensor*> owned_old_;
  static constexpr std::uint64_t kFewBytes = 2048;
  std::uint64_t bytes_ = 0;  // of all arrays so far
  std::optional<TorchModes> torch_modes_;
  static constexpr int kMaxWritten = 8;  // kv_append writes most: pages, scales and q
  nb::handle written_[kMaxWritten];      // torch's, given by the caller
  int num_written_ = 0;
};

/// While it exists, ops called from this thread explain instead of run.
class ExplainScope {
 public:
  explicit ExplainScope(Explanation* explanation);
  ~ExplainScope();
  ExplainScope(const ExplainScope&) = delete;
  ExplainScope& operator=(const ExplainScope&) = delete;

 private:
  Explanation* previous_;
};

/// A cudaStream_t as int, or an object with __cuda_stream__().
Stream parse_stream(const char* op, nb::handle stream);
/// "cpu", "cuda", "cuda:1" or an object whose str() is one of these.
Device parse_device(nb::handle device);
/// "float16", numpy.float16, torch.float16, ...
DType parse_dtype(const char* op, nb::handle dtype);

/// A DLPack type for a dtype.
dlpack::DataType dlpack_type(DType dtype);
/// Where the elements of a numpy.ndarray are.
void* numpy_data(nb::handle array);
/// numpy.<name>, imported on first use.
nb::object numpy_attribute(const char* name);

}  // namespace flashkernel::python
