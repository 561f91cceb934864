// TensorView and Device: construction, layout, text.
#include "flashkernel/tensor_view.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "flashkernel/error.hpp"

namespace flashkernel {
namespace {

void set_shape(TensorView& view, std::initializer_list<std::int64_t> shape) {
  if (shape.size() > kMaxDims)
    throw InvalidArgument("TensorView: " + std::to_string(shape.size()) + " dims; at most " + std::to_string(kMaxDims));
  view.ndim = static_cast<int>(shape.size());
  int d = 0;
  std::int64_t count = 1;  // a dim of 0 counts as 1, as it does in strides
  for (const std::int64_t extent : shape) {
    if (extent < 0)
      throw InvalidArgument("TensorView: shape[" + std::to_string(d) + "]=" + std::to_string(extent) +
                            "; must not be negative");
    if (extent > std::numeric_limits<std::int64_t>::max() / count)
      throw InvalidArgument("TensorView: shape[" + std::to_string(d) + "]=" + std::to_string(extent) +
                            " makes more than 2^63 - 1 elements");
    count *= std::max<std::int64_t>(extent, 1);
    view.shape[d++] = extent;
  }
}

}  // namespace

TensorView::TensorView(void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device)
    : data(data), dtype(dtype), device(device) {
  set_shape(*this, shape);
  std::int64_t stride = 1;
  for (int d = ndim - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= this->shape[d] > 0 ? this->shape[d] : 1;
  }
}

TensorView::TensorView(void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                       std::initializer_list<std::int64_t> strides, Device device)
    : data(data), dtype(dtype), device(device) {
  set_shape(*this, shape);
  if (strides.size() != shape.size())
    throw InvalidArgument("TensorView: " + std::to_string(strides.size()) + " strides for " +
                          std::to_string(shape.size()) + " dims");
  int d = 0;
  for (const std::int64_t stride : strides) this->strides[d++] = stride;
}

bool TensorView::is_contiguous() const noexcept {
  if (numel() == 0) return true;
  std::int64_t expected = 1;
  for (int d = ndim - 1; d >= 0; --d) {
    if (shape[d] != 1 && strides[d] != expected) return false;
    expected *= shape[d];
  }
  return true;
}

TensorView TensorView::transpose(int a, int b) const {
  if (a < 0 || b < 0 || a >= ndim || b >= ndim)
    throw InvalidArgument("TensorView::transpose: dims " + std::to_string(a) + ", " + std::to_string(b) +
                          " of a tensor with " + std::to_string(ndim) + " dims");
  TensorView view = *this;
  std::swap(view.shape[a], view.shape[b]);
  std::swap(view.strides[a], view.strides[b]);
  return view;
}

std::string to_string(const TensorView& view) {
  if (!view.defined()) return "absent";
  std::string text = std::string(dtype_name(view.dtype)) + "[";
  for (int d = 0; d < view.ndim; ++d) text += (d ? ", " : "") + std::to_string(view.shape[d]);
  return text + "] on " + to_string(view.device);
}

std::string to_string(Device device) { return device.is_cpu() ? "cpu" : "cuda:" + std::to_string(device.index); }

}  // namespace flashkernel
