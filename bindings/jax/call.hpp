// What an XLA FFI handler is given, as named tensor views: operands and results in the order that two attributes name,
// each name followed by its rank, as "q4 k4 v4". Further leading dims are those of vmap; a dim of size 1 stands for
// all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "flashkernel/error.hpp"
#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"
#include "xla/ffi/api/ffi.h"

namespace flashkernel::jax {

namespace ffi = xla::ffi;

inline DType dtype_of(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F32: return DType::kFloat32;
    case ffi::DataType::F16: return DType::kFloat16;
    case ffi::DataType::BF16: return DType::kBFloat16;
    case ffi::DataType::S32: return DType::kInt32;
    case ffi::DataType::S64: return DType::kInt64;
    default:
      throw InvalidArgument("jax: an array of XLA's element type " + std::to_string(static_cast<int>(dtype)) +
                            "; float32, float16, bfloat16, int32 or int64 is needed");
  }
}

/// Raises InvalidArgument where the attribute is missing: the Python side always gives it.
template <typename T>
T attribute(const ffi::Dictionary& attributes, std::string_view name) {
  const auto value = attributes.get<T>(name);
  if (!value.has_value()) throw InvalidArgument("jax: the call lacks the attribute " + std::string(name));
  return *value;
}

class Call {
 public:
  /// device: where all arrays lie; stream: XLA's, on which the kernels are queued.
  Call(const ffi::Dictionary& attributes, ffi::RemainingArgs operands, ffi::RemainingRets results, Device device,
       Stream stream)
      : attributes_(attributes), device_(device), stream_(stream) {
    const auto names = split(attribute<std::string_view>(attributes, "operands"), operands.size());
    for (std::size_t i = 0; i < names.size(); ++i) add(names[i], *operands.get<ffi::AnyBuffer>(i));
    const auto outputs = split(attribute<std::string_view>(attributes, "results"), results.size());
    for (std::size_t i = 0; i < outputs.size(); ++i) add(outputs[i], **results.get<ffi::AnyBuffer>(i));
  }

  template <typename T>
  T get(std::string_view name) const {
    return attribute<T>(attributes_, name);
  }

  ExecutionContext context() const {
    ExecutionContext context;
    context.stream = stream_;
    return context;
  }

  /// The view of `name` in the present slice, absent where the call has no such array.
  TensorView operator()(std::string_view name) const {
    for (const Array& array : arrays_)
      if (array.name == name) return array.view;
    return {};
  }

  /// Calls `run` for each slice of the dims that vmap put in front; once where there are none.
  template <typename Run>
  void each_slice(Run&& run) {
    std::vector<std::int64_t> sizes, index;
    for (const Array& array : arrays_) {
      sizes.resize(std::max(sizes.size(), array.leading.size()), 1);
      for (std::size_t d = 0; d < array.leading.size(); ++d)
        if (array.leading[d] != 1) sizes[d] = array.leading[d];
    }
    std::int64_t count = 1;
    for (const std::int64_t size : sizes) count *= size;
    for (std::int64_t slice = 0; slice < count; ++slice) {
      for (Array& array : arrays_) array.move_to(slice, sizes);
      run();
    }
  }

 private:
  struct Array {
    std::string name;
    char* data;
    std::vector<std::int64_t> leading;
    TensorView view;

    void move_to(std::int64_t slice, const std::vector<std::int64_t>& sizes) {
      std::int64_t offset = 0, stride = view.numel();
      for (std::size_t d = leading.size(); d-- > 0;) {
        if (leading[d] != 1) offset += slice % sizes[d] * stride;
        slice /= sizes[d];
        stride *= leading[d];
      }
      view.data = data + offset * static_cast<std::int64_t>(dtype_bytes(view.dtype));
    }
  };

  static std::vector<std::pair<std::string, int>> split(std::string_view text, std::size_t count) {
    std::vector<std::pair<std::string, int>> found;
    while (!text.empty()) {
      const std::size_t end = std::min(text.find(' '), text.size());
      found.emplace_back(text.substr(0, end - 1), text[end - 1] - '0');
      text.remove_prefix(std::min(end + 1, text.size()));
    }
    if (found.size() != count)
      throw InvalidArgument("jax: " + std::to_string(count) + " arrays for " + std::to_string(found.size()) + " names");
    return found;
  }

  void add(const std::pair<std::string, int>& named, const ffi::AnyBuffer& buffer) {
    const auto shape = buffer.dimensions();
    const int rank = named.second, leading = static_cast<int>(shape.size()) - rank;
    if (leading < 0 || rank > kMaxDims)
      throw InvalidArgument("jax: " + named.first + " has " + std::to_string(shape.size()) + " dims; " +
                            std::to_string(rank) + " are needed");
    Array array{named.first, static_cast<char*>(buffer.untyped_data()), {shape.begin(), shape.begin() + leading}, {}};
    array.view.data = array.data;
    array.view.dtype = dtype_of(buffer.element_type());
    array.view.device = device_;
    array.view.ndim = rank;
    std::int64_t stride = 1;
    for (int d = rank; d-- > 0;) {
      array.view.shape[d] = shape[static_cast<std::size_t>(leading + d)];
      array.view.strides[d] = stride;
      stride *= array.view.shape[d];
    }
    arrays_.push_back(std::move(array));
  }

  const ffi::Dictionary& attributes_;
  Device device_;
  Stream stream_;
  std::vector<Array> arrays_;
};

/// Runs an op on each slice; its errors become XLA's, with their text.
template <void (*op)(const Call&)>
ffi::Error run(Device device, Stream stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
               const ffi::Dictionary& attributes) {
  try {
    Call call(attributes, operands, results, device, stream);
    call.each_slice([&] { op(call); });
    return ffi::Error::Success();
  } catch (const InvalidArgument& error) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, error.what());
  } catch (const Unsupported& error) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented, error.what());
  } catch (const OutOfMemory& error) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, error.what());
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, error.what());
  }
}

/// A handler of the CPU, where a call returns when its work is done.
template <void (*op)(const Call&)>
ffi::Error handle(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) {
  return run<op>(Device{}, Stream{}, operands, results, attributes);
}

/// A handler of CUDA, which queues the work on XLA's stream.
template <void (*op)(const Call&)>
ffi::Error handle_cuda(void* stream, std::int32_t ordinal, ffi::RemainingArgs operands, ffi::RemainingRets results,
                       ffi::Dictionary attributes) {
  return run<op>(Device::cuda(ordinal), Stream{stream}, operands, results, attributes);
}

/// What every handler binds: all arguments, results and attributes.
inline auto binding() { return ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs(); }

inline auto cuda_binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<void*>>()
      .Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

}  // namespace flashkernel::jax
