// See check.hpp.
#include "ops/check.hpp"

#include <limits>

#include "ops/overlap.hpp"

namespace flashkernel {

std::string shape_text(const char* name, const TensorView& view, int d) {
  return std::string(name) + ".shape[" + std::to_string(d) + "]=" + std::to_string(view.shape[d]);
}

namespace {

// Whether a * b, both 0 or more, is at most a sixteenth of what 64 bits hold. Divides only where a factor is large: a
// call asks some fifty times.
bool is_addressable(std::int64_t a, std::int64_t b) {
  return (a | b) >> 29 == 0 || b == 0 || a <= std::numeric_limits<std::int64_t>::max() / 16 / b;
}

std::string strides_text(const TensorView& view) {
  std::string text = "[";
  for (int d = 0; d < view.ndim; ++d) text += (d ? ", " : "") + std::to_string(view.strides[d]);
  return text + "]";
}

}  // namespace

void Checker::fail(const std::string& message) const { throw InvalidArgument(std::string(op_) + ": " + message); }

void Checker::tensor(const char* name, const TensorView& view) const {
  if (!view.defined()) fail(std::string(name) + " is absent; it is required");
  if (view.device != device_)
    fail(std::string(name) + " is on " + to_string(view.device) + "; needs " + to_string(device_) +
         " like the first input");
  std::int64_t count = 1;
  for (int d = 0; d < view.ndim; ++d) {
    if (view.shape[d] < 0) fail(shape_text(name, view, d) + "; must not be negative");
    if (!is_addressable(count, view.shape[d])) fail(std::string(name) + " has more elements than 64 bits can address");
    count *= view.shape[d] > 0 ? view.shape[d] : 1;
  }
  if (!view.data && view.numel() > 0)
    fail(std::string(name) + " has " + std::to_string(view.numel()) + " elements but a null pointer");
  const auto address = reinterpret_cast<std::uintptr_t>(view.data);
  if ((address & (dtype_bytes(view.dtype) - 1)) != 0)  // sizes are powers of two
    fail(std::string(name) + " is not aligned to its element size (" + std::to_string(dtype_bytes(view.dtype)) +
         " bytes)");
}

void Checker::floating(const char* name, const TensorView& view) const {
  tensor(name, view);
  if (!is_floating(view.dtype))
    fail(std::string(name) + " is " + dtype_name(view.dtype) + "; needs float32, float16 or bfloat16");
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
  fail(std::string(name) + " is " + to_string(view) + "; needs " + needed + (needed == "1" ? " dim" : " dims"));
}

void Checker::extent(const char* name, const TensorView& view, int d, std::int64_t needed, const char* why) const {
  if (view.shape[d] != needed)
    fail(shape_text(name, view, d) + " but " + why + "=" + std::to_string(needed) + "; they must match");
}

void Checker::same_shape(const char* name, const TensorView& view, const char* other_name,
                         const TensorView& other) const {
  bool same = view.ndim == other.ndim;
  for (int d = 0; same && d < view.ndim; ++d) same = view.shape[d] == other.shape[d];
  if (!same)
    fail(std::string(name) + " is " + to_string(view) + " but " + other_name + " is " + to_string(other) +
         "; shapes must match");
}

void Checker::like(const char* name, const TensorView& view, const char* other_name, const TensorView& other) const {
  dtype(name, view, other.dtype);
  same_shape(name, view, other_name, other);
}

void Checker::last_dim_contiguous(const char* name, const TensorView& view) const {
  if (view.ndim > 0 && view.shape[view.ndim - 1] > 1 && view.numel() > 0 && view.strides[view.ndim - 1] != 1)
    fail(std::string(name) + ".stride[" + std::to_string(view.ndim - 1) +
         "]=" + std::to_string(view.strides[view.ndim - 1]) +
         "; the last dim must be contiguous (stride 1): make a contiguous copy");
}

void Checker::contiguous(const char* name, const TensorView& view) const {
  if (!view.is_contiguous()) fail(std::string(name) + " is not contiguous; make a contiguous copy");
}

void Checker::writable(const char* name, const TensorView& view) const {
  const Overlap found = overlaps_itself(view);
  if (found == Overlap::kNo) return;
  for (int d = 0; d < view.ndim; ++d)
    if (view.shape[d] > 1 && view.strides[d] == 0)
      fail(std::string(name) + ".stride[" + std::to_string(d) + "]=0 over " + std::to_string(view.shape[d]) +
           " elements; a written tensor must not overlap itself");
  const std::string text = std::string(name) + " is " + to_string(view) + " with strides " + strides_text(view);
  if (found == Overlap::kYes) fail(text + ", which name an element twice; a written tensor must not overlap itself");
  fail(text + ", of which it takes too long to tell whether they name an element twice; give it simpler strides");
}

IndexArray Checker::index_array(const char* name, const TensorView& view, std::int64_t needed_length,
                                IndexCopies& copies) const {
  index(name, view);
  ndim(name, view, 1, 1);
  if (view.shape[0] != needed_length) fail(shape_text(name, view, 0) + "; needs " + std::to_string(needed_length));
  contiguous(name, view);
  return copies.of({view.data, view.dtype == DType::kInt64}, needed_length);
}

void Checker::float32_or(const char* name, const TensorView& view, DType op_dtype) const {
  tensor(name, view);
  if (view.dtype == DType::kFloat32 || view.dtype == op_dtype) return;
  fail(std::string(name) + " is " + dtype_name(view.dtype) + "; needs float32" +
       (op_dtype == DType::kFloat32 ? "" : std::string(" or ") + dtype_name(op_dtype)));
}

TypedPointer Checker::optional_vector(const char* name, const TensorView& view, std::int64_t length,
                                      DType op_dtype) const {
  if (!view.defined()) return {};
  float32_or(name, view, op_dtype);
  ndim(name, view, 1, 1);
  if (view.shape[0] != length) fail(shape_text(name, view, 0) + "; needs " + std::to_string(length));
  contiguous(name, view);
  return {view.data, view.dtype};
}

TypedPointer Checker::optional_floating_vector(const char* name, const TensorView& view, std::int64_t length) const {
  if (!view.defined()) return {};
  floating(name, view);
  return optional_vector(name, view, length, view.dtype);
}

namespace {

template <class Index>
std::int64_t first_outside(const Index* indices, std::int64_t count, std::int64_t first, std::int64_t end) {
  for (std::int64_t i = 0; i < count; ++i)
    if (indices[i] < first || indices[i] >= end) return i;
  return -1;
}

}  // namespace

void Checker::no_overlap(const char* name, const TensorView& written, const char* other_name,
                         const TensorView& other) const {
  const Overlap found = shared_memory(written, other);
  if (found == Overlap::kYes)
    fail(std::string(name) + " shares memory with " + other_name + "; a written tensor needs memory of its own");
  if (found == Overlap::kUnknown) fail_untold(name, written, other_name, other);
}

void Checker::apart(const char* name, const TensorView& written, std::initializer_list<NamedView> others) const {
  if (!written.defined()) return;
  for (const NamedView& other : others) no_overlap(name, written, other.name, other.view);
}

void Checker::same_or_apart(const char* name, const TensorView& written, const char* other_name,
                            const TensorView& other) const {
  const Overlap found = shared_memory(written, other);
  if (found == Overlap::kNo || is_same_tensor(written, other)) return;
  if (found == Overlap::kUnknown) fail_untold(name, written, other_name, other);
  fail(std::string(name) + " shares part of its memory with " + other_name + "; they must be the same tensor or apart");
}

void Checker::fail_untold(const char* name, const TensorView& written, const char* other_name,
                          const TensorView& other) const {
  fail(std::string(name) + " and " + other_name + " lie between one another, with strides " + strides_text(written) +
       " and " + strides_text(other) +
       ", and it takes too long to tell whether they share memory; make one of them contiguous");
}

void Checker::indices_in_range(const char* name, IndexArray indices, std::int64_t count, std::int64_t first,
                               std::int64_t end, const char* bound) const {
  if (!indices || !device_.is_cpu()) return;
  const std::int64_t bad = indices.is_int64
                               ? first_outside(static_cast<const std::int64_t*>(indices.data), count, first, end)
                               : first_outside(static_cast<const std::int32_t*>(indices.data), count, first, end);
  if (bad < 0) return;
  const bool has_lower = first > std::numeric_limits<std::int64_t>::min();
  fail(std::string(name) + "[" + std::to_string(bad) + "]=" + std::to_string(indices[bad]) + "; needs a value " +
       (has_lower ? "from " + std::to_string(first) + " to " : "up to ") + std::to_string(end - 1) + " (" + bound +
       "=" + std::to_string(end) + ")");
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

}  // namespace flashkernel
