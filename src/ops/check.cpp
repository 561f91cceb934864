// See check.hpp.
#include "ops/check.hpp"

#include <limits>

namespace flashkernel {

std::string shape_text(const char* name, const TensorView& view, int d) {
  return std::string(name) + ".shape[" + std::to_string(d) + "]=" + std::to_string(view.shape[d]);
}

void Checker::fail(const std::string& message) const { throw InvalidArgument(std::string(op_) + ": " + message); }

void Checker::tensor(const char* name, const TensorView& view) const {
  if (!view.defined()) fail(std::string(name) + " is absent; it is required");
  if (view.device != device_)
    fail(std::string(name) + " is on " + to_string(view.device) + "; needs " + to_string(device_) + " like the first input");
  std::int64_t count = 1;
  for (int d = 0; d < view.ndim; ++d) {
    if (view.shape[d] < 0) fail(shape_text(name, view, d) + "; must not be negative");
    if (view.shape[d] > 0 && count > std::numeric_limits<std::int64_t>::max() / 16 / view.shape[d])
      fail(std::string(name) + " has more elements than 64 bits can address");
    count *= view.shape[d] > 0 ? view.shape[d] : 1;
  }
  if (!view.data && view.numel() > 0) fail(std::string(name) + " has " + std::to_string(view.numel()) + " elements but a null pointer");
  const auto address = reinterpret_cast<std::uintptr_t>(view.data);
  if (address % dtype_bytes(view.dtype) != 0)
    fail(std::string(name) + " is not aligned to its element size (" + std::to_string(dtype_bytes(view.dtype)) + " bytes)");
}

void Checker::floating(const char* name, const TensorView& view) const {
  tensor(name, view);
  if (!is_floating(view.dtype)) fail(std::string(name) + " is " + dtype_name(view.dtype) + "; needs float32, float16 or bfloat16");
}

void Checker::index(const char* name, const TensorView& view) const {
  tensor(name, view);
  if (!is_index(view.dtype)) fail(std::string(name) + " is " + dtype_name(view.dtype) + "; needs int32 or int64");
}

void Checker::dtype(const char* name, const TensorView& view, DType needed) const {
  tensor(name, view);
  if (view.dtype != needed) fail(std::string(name) + " is " + dtype_name(view.dtype) + "; needs " + dtype_name(needed));
}

void Checker::ndim(const char* name, const TensorView& view, int least, int most) const {
  if (view.ndim >= least && view.ndim <= most) return;
  const std::string needed =
      least == most ? std::to_string(least) : std::to_string(least) + " to " + std::to_string(most);
  fail(std::string(name) + " has " + std::to_string(view.ndim) + " dims; needs " + needed);
}

void Checker::extent(const char* name, const TensorView& view, int d, std::int64_t needed, const char* why) const {
  if (view.shape[d] != needed) fail(shape_text(name, view, d) + " but " + why + "=" + std::to_string(needed) + "; they must match");
}

void Checker::same_shape(const char* name, const TensorView& view, const char* other_name, const TensorView& other) const {
  bool same = view.ndim == other.ndim;
  for (int d = 0; same && d < view.ndim; ++d) same = view.shape[d] == other.shape[d];
  if (!same) fail(std::string(name) + " is " + to_string(view) + " but " + other_name + " is " + to_string(other) + "; shapes must match");
}

void Checker::last_dim_contiguous(const char* name, const TensorView& view) const {
  if (view.ndim > 0 && view.shape[view.ndim - 1] > 1 && view.numel() > 0 && view.strides[view.ndim - 1] != 1)
    fail(std::string(name) + ".stride[" + std::to_string(view.ndim - 1) + "]=" + std::to_string(view.strides[view.ndim - 1]) +
         "; the last dim must be contiguous (stride 1): make a contiguous copy");
}

void Checker::contiguous(const char* name, const TensorView& view) const {
  if (!view.is_contiguous()) fail(std::string(name) + " is not contiguous; make a contiguous copy");
}

void Checker::writable(const char* name, const TensorView& view) const {
  for (int d = 0; d < view.ndim; ++d)
    if (view.shape[d] > 1 && view.strides[d] == 0 && view.numel() > 0)
      fail(std::string(name) + ".stride[" + std::to_string(d) + "]=0 over " + std::to_string(view.shape[d]) +
           " elements; a written tensor must not overlap itself");
}

void Checker::no_overlap(const char* name, const TensorView& written, const char* other_name, const TensorView& other) const {
  if (!written.defined() || !other.defined() || written.numel() == 0 || other.numel() == 0) return;
  bool meet = written.data == other.data;
  if (!meet) {
    const auto begin_a = reinterpret_cast<std::uintptr_t>(written.data), begin_b = reinterpret_cast<std::uintptr_t>(other.data);
    const auto end_a = begin_a + static_cast<std::uintptr_t>(written.numel()) * dtype_bytes(written.dtype);
    const auto end_b = begin_b + static_cast<std::uintptr_t>(other.numel()) * dtype_bytes(other.dtype);
    meet = begin_a < end_b && begin_b < end_a && written.is_contiguous() && other.is_contiguous();
  }
  if (meet) fail(std::string(name) + " shares memory with " + other_name + "; a written tensor needs memory of its own");
}

IndexArray Checker::index_array(const char* name, const TensorView& view, std::int64_t needed_length) const {
  index(name, view);
  ndim(name, view, 1, 1);
  if (view.shape[0] != needed_length)
    fail(shape_text(name, view, 0) + "; needs " + std::to_string(needed_length));
  contiguous(name, view);
  return {view.data, view.dtype == DType::kInt64};
}

TensorView with_leading_dims(const TensorView& view, int ndim) {
  TensorView out = view;
  const int added = ndim - view.ndim;
  if (added <= 0) return out;
  for (int d = ndim - 1; d >= 0; --d) {
    out.shape[d] = d >= added ? view.shape[d - added] : 1;
    out.strides[d] = d >= added ? view.strides[d - added] : 0;
  }
  out.ndim = ndim;
  return out;
}

bool fold_rows(const TensorView& view, std::int64_t* rows, std::int64_t* stride_row) {
  *rows = 1;
  *stride_row = 0;
  for (int d = view.ndim - 2; d >= 0; --d) {
    if (view.shape[d] == 1) continue;
    if (*rows == 1 && *stride_row == 0) {
      *stride_row = view.strides[d];
    } else if (view.strides[d] != *rows * *stride_row) {
      return false;
    }
    *rows *= view.shape[d];
  }
  return true;
}

}  // namespace flashkernel
