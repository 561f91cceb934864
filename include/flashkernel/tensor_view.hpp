// A borrowed, strided tensor: pointer, dtype, device, shape and strides. Copying a view copies no data.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "flashkernel/device.hpp"
#include "flashkernel/export.hpp"
#include "flashkernel/types.hpp"

namespace flashkernel {

/// Strides count elements and may be 0 (broadcast) or negative. A default-constructed view is "absent": `defined()` is
/// false.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Device device{};
  int ndim = -1;
  std::int64_t shape[kMaxDims] = {};
  std::int64_t strides[kMaxDims] = {};

  TensorView() = default;

  /// Contiguous (row-major) view. InvalidArgument: over kMaxDims dims, a negative one, over 2^63 - 1 elements.
  FK_API TensorView(void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device = {});
  /// Strided view; `strides` counts elements and has as many entries as `shape`.
  FK_API TensorView(void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                    std::initializer_list<std::int64_t> strides, Device device = {});

  bool defined() const noexcept { return ndim >= 0; }

  std::int64_t numel() const noexcept {
    std::int64_t count = 1;
    for (int d = 0; d < ndim; ++d) count *= shape[d];
    return ndim < 0 ? 0 : count;
  }

  /// Row-major with no gaps (dims of size 1 and empty tensors count as contiguous).
  FK_API bool is_contiguous() const noexcept;

  /// The same data with dims `a` and `b` swapped.
  FK_API TensorView transpose(int a, int b) const;
};

/// "float16[2, 8, 128, 64] on cpu", for messages.
FK_API std::string to_string(const TensorView& view);

}  // namespace flashkernel
