// What becomes of a product's sums: bias, pre-activation, activation, one rounding, stores of 16 bytes where rows
// allow. Shared by the tensor-core linear kernels of every generation; the same struct with no bias and no activation
// stores the gradients.
#pragma once

#include <cstdint>

#include "cuda/tile/activation.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/vector.cuh"
#include "ops/linear_params.hpp"

namespace flashkernel::cuda {

struct LinearEpilogue {
  TypedPointer bias;              // [columns] or null
  void* out = nullptr;            // [rows, columns] in T
  void* preactivation = nullptr;  // the same, or null
  std::int64_t stride_out = 0, stride_preactivation = 0;
  Activation activation = Activation::kNone;
  bool vectors_out = false, vectors_preactivation = false;  // rows start at multiples of 16 bytes
};

/// Rows of T from `data` on, `stride` elements apart, start at multiples of 16 bytes.
template <class T>
bool rows_in_vectors(const void* data, std::int64_t stride) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride % kVectorElements<T> == 0;
}

template <class T>
LinearEpilogue plain_epilogue(void* out, std::int64_t stride) {
  LinearEpilogue e;
  e.out = out;
  e.stride_out = stride;
  e.vectors_out = rows_in_vectors<T>(out, stride);
  return e;
}

template <class T>
LinearEpilogue linear_epilogue(const LinearParams& p) {
  LinearEpilogue e = plain_epilogue<T>(p.out, p.stride_out_row);
  e.bias = p.bias;
  e.preactivation = p.preactivation;
  e.stride_preactivation = p.stride_preactivation_row;
  e.vectors_preactivation = rows_in_vectors<T>(p.preactivation, p.stride_preactivation_row);
  e.activation = p.activation;
  return e;
}

__device__ inline float bias_of(const TypedPointer& bias, int column, int columns) {
  return bias && column < columns ? load_typed(bias.data, bias.dtype, column) : 0.0f;
}

/// The activation in T's accuracy: fp32 results take the library functions, 16-bit results the fast ones.
template <Activation kActivation, class T>
__device__ inline float activate_for(float x) {
  if constexpr (sizeof(T) == 4) return activate(kActivation, x);
  return activate_fast<kActivation>(x);
}

/// A result that goes out alone (kernels whose results are few).
template <class T>
__device__ inline void finish_element(const LinearEpilogue& e, std::int64_t row, std::int64_t column, float x) {
  if (e.preactivation) static_cast<T*>(e.preactivation)[row * e.stride_preactivation + column] = from_float<T>(x);
  with_activation(e.activation, [&](auto activation) { x = activate_for<decltype(activation)::value, T>(x); });
  static_cast<T*>(e.out)[row * e.stride_out + column] = from_float<T>(x);
}

/// Four neighbours of a row, from a column that is a multiple of 4.
template <class T>
__device__ inline void finish_4(const LinearEpilogue& e, std::int64_t row, int column, int columns, float (&x)[4]) {
  const auto store = [&](void* data, std::int64_t stride, bool vectors) {
    T* const to = static_cast<T*>(data) + row * stride + column;
    if (vectors && column + 4 <= columns) {
      store_floats(to, x);
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (column + i < columns) to[i] = from_float<T>(x[i]);
  };
  if (e.preactivation) store(e.preactivation, e.stride_preactivation, e.vectors_preactivation);
  with_activation(e.activation, [&](auto activation) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = activate_for<decltype(activation)::value, T>(x[i]);
  });
  store(e.out, e.stride_out, e.vectors_out);
}

/// 16 bytes of a row, of which the first `count` elements are stored.
template <class T>
__device__ inline void store_chunk(T* to, const uint4& chunk, int count, bool vectors) {
  constexpr int N = kVectorElements<T>;
  if (vectors && count >= N) {
    *reinterpret_cast<uint4*>(to) = chunk;
    return;
  }
  const T* values = reinterpret_cast<const T*>(&chunk);
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i < count) to[i] = values[i];
}

}  // namespace flashkernel::cuda
