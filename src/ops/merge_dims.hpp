// Dims of several tensors of one shape, merged where all of them are laid out alike: what a kernel walks becomes short.
// Called by the front doors. Invariant: the merged dims visit the same tuples of elements as the original ones.
#pragma once

#include <cstdint>

#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

enum class DimOrder {
  kKeep,     ///< row-major order of the logical shape is kept
  kByStride  ///< free to reorder: the largest strides of the first tensor outermost
};

template <int N>
struct MergedDims {
  int ndim = 0;  // dims of size 1 are gone, so a single element has no dims; an empty shape is one dim of 0
  std::int64_t shape[kMaxDims] = {};
  std::int64_t strides[N][kMaxDims] = {};

  std::int64_t count() const {
    std::int64_t count = 1;
    for (int d = 0; d < ndim; ++d) count *= shape[d];
    return count;
  }
};

/// Merges dims `dims[0..num_dims)` of views of one shape. Absent views take part with strides of 0.
template <int N>
MergedDims<N> merge_dims(const TensorView* const (&views)[N], const int* dims, int num_dims, DimOrder order) {
  MergedDims<N> merged;
  const auto stride = [&](int n, int d) { return views[n]->defined() ? views[n]->strides[d] : std::int64_t{0}; };
  const auto magnitude = [](std::int64_t value) { return value < 0 ? -value : value; };
  for (int i = 0; i < num_dims; ++i) {
    const int d = dims[i];
    const std::int64_t extent = views[0]->shape[d];
    if (extent == 1) continue;
    if (extent == 0) {
      merged = MergedDims<N>{};
      merged.ndim = 1;
      return merged;
    }
    int at = merged.ndim++;
    // Insertion sort; equal strides (broadcast dims) are told apart by the next tensor.
    for (; order == DimOrder::kByStride && at > 0; --at) {
      int n = 0;
      while (n < N - 1 && magnitude(merged.strides[n][at - 1]) == magnitude(stride(n, d))) ++n;
      if (magnitude(merged.strides[n][at - 1]) >= magnitude(stride(n, d))) break;
      merged.shape[at] = merged.shape[at - 1];
      for (n = 0; n < N; ++n) merged.strides[n][at] = merged.strides[n][at - 1];
    }
    merged.shape[at] = extent;
    for (int n = 0; n < N; ++n) merged.strides[n][at] = stride(n, d);
  }
  int kept = 0;
  for (int d = 1; d < merged.ndim; ++d) {
    bool together = true;
    for (int n = 0; n < N; ++n)
      together = together && merged.strides[n][kept] == merged.shape[d] * merged.strides[n][d];
    if (together) {
      merged.shape[kept] *= merged.shape[d];
    } else {
      merged.shape[++kept] = merged.shape[d];
    }
    for (int n = 0; n < N; ++n) merged.strides[n][kept] = merged.strides[n][d];
  }
  if (merged.ndim > 0) merged.ndim = kept + 1;
  return merged;
}

/// Merges all dims but the last `trailing` ones.
template <int N>
MergedDims<N> merge_leading_dims(const TensorView* const (&views)[N], int trailing, DimOrder order) {
  static constexpr int kDims[kMaxDims] = {0, 1, 2, 3, 4, 5, 6, 7};
  return merge_dims(views, kDims, views[0]->ndim - trailing, order);
}

/// Calls f(rows, strides, offsets) for each run of rows that lie one stride apart: the innermost merged dim is the
/// rows, the others are looped over. strides[n] and offsets[n] count elements of view n. With `only_first` the first
/// run only.
template <int N, class F>
void for_each_run_of_rows(const MergedDims<N>& dims, bool only_first, F&& f) {
  const int outer = dims.ndim > 0 ? dims.ndim - 1 : 0;
  const std::int64_t rows = dims.ndim > 0 ? dims.shape[outer] : 1;
  std::int64_t strides[N] = {}, offsets[N] = {}, index[kMaxDims] = {};
  for (int n = 0; n < N && dims.ndim > 0; ++n) strides[n] = dims.strides[n][outer];
  for (;;) {
    f(rows, strides, offsets);
    if (only_first) return;
    int d = outer - 1;
    for (; d >= 0; --d) {
      for (int n = 0; n < N; ++n) offsets[n] += dims.strides[n][d];
      if (++index[d] < dims.shape[d]) break;
      for (int n = 0; n < N; ++n) offsets[n] -= dims.strides[n][d] * dims.shape[d];
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

/// Where element `offset` of a view lies; null for an absent view.
inline void* element_at(const TensorView& view, std::int64_t offset) {
  if (!view.defined()) return nullptr;
  return static_cast<unsigned char*>(view.data) + offset * static_cast<std::int64_t>(dtype_bytes(view.dtype));
}

}  // namespace flashkernel
