// Reading and writing one element in double, and walking strided dims: what every scalar kernel is made of.
#pragma once

#include <cstdint>

#include "core/float_types.hpp"
#include "flashkernel/tensor_view.hpp"
#include "ops/params_common.hpp"

namespace flashkernel::cpu_scalar {

template <class T>
inline double load(const void* data, std::int64_t offset) {
  return static_cast<double>(to_float(static_cast<const T*>(data)[offset]));
}

template <class T>
inline void store(void* data, std::int64_t offset, double value) {
  static_cast<T*>(data)[offset] = from_float<T>(static_cast<float>(value));
}

inline double load_as(DType dtype, const void* data, std::int64_t offset) {
  switch (dtype) {
    case DType::kFloat16: return load<Half>(data, offset);
    case DType::kBFloat16: return load<BFloat16>(data, offset);
    default: return load<float>(data, offset);
  }
}

inline void store_as(DType dtype, void* data, std::int64_t offset, double value) {
  switch (dtype) {
    case DType::kFloat16: store<Half>(data, offset, value); return;
    case DType::kBFloat16: store<BFloat16>(data, offset, value); return;
    default: store<float>(data, offset, value); return;
  }
}

inline double load(TypedPointer pointer, std::int64_t i) { return load_as(pointer.dtype, pointer.data, i); }

/// Calls f(offsets) for the row-major indices [begin, end) of `shape`; offsets[n] is the element offset by strides[n].
template <int N, class F>
void for_each_offset(int ndim, const std::int64_t* shape, const std::int64_t* const (&strides)[N], std::int64_t begin,
                     std::int64_t end, F&& f) {
  if (begin >= end) return;  // an empty shape has no index to start from
  std::int64_t index[kMaxDims] = {};
  std::int64_t offsets[N] = {};
  std::int64_t rest = begin;
  for (int d = ndim - 1; d >= 0; --d) {
    index[d] = rest % shape[d];
    rest /= shape[d];
    for (int n = 0; n < N; ++n) offsets[n] += index[d] * strides[n][d];
  }
  for (std::int64_t i = begin; i < end; ++i) {
    f(static_cast<const std::int64_t(&)[N]>(offsets));
    for (int d = ndim - 1; d >= 0; --d) {
      for (int n = 0; n < N; ++n) offsets[n] += strides[n][d];
      if (++index[d] < shape[d]) break;
      for (int n = 0; n < N; ++n) offsets[n] -= strides[n][d] * shape[d];
      index[d] = 0;
    }
  }
}

/// Tasks of about this many elements: long enough (some 10 us) to pay for handing them to a thread.
inline std::int64_t grain_for(std::int64_t elements_per_task) {
  constexpr std::int64_t kElements = 4096;
  return elements_per_task >= kElements ? 1 : kElements / (elements_per_task > 0 ? elements_per_task : 1);
}

}  // namespace flashkernel::cpu_scalar
