// Runs of neighbouring elements moved by one instruction (up to 16 bytes a lane) and held as fp32.
#pragma once

#include "cuda/tile/convert.cuh"

namespace flashkernel::cuda {

/// N elements of T in one aligned load or store; N * sizeof(T) is 2, 4, 8 or 16.
template <class T, int N>
struct alignas(sizeof(T) * N) Packed {
  T values[N];
};

/// Elements of T in 16 bytes.
template <class T>
inline constexpr int kVectorElements = 16 / static_cast<int>(sizeof(T));

template <int N, class T>
__device__ inline void load_floats(float (&out)[N], const T* from) {
  const auto packed = *reinterpret_cast<const Packed<T, N>*>(from);
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = to_float(packed.values[i]);
}

template <int N, class T>
__device__ inline void store_floats(T* to, const float (&values)[N]) {
  Packed<T, N> packed;
#pragma unroll
  for (int i = 0; i < N; ++i) packed.values[i] = from_float<T>(values[i]);
  *reinterpret_cast<Packed<T, N>*>(to) = packed;
}

/// N elements of a typed vector from element `first`; the caller has checked the alignment for N elements of its dtype.
template <int N>
__device__ inline void load_typed_floats(float (&out)[N], const void* data, DType dtype, std::int64_t first) {
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = load_typed(data, dtype, first + i);
}

}  // namespace flashkernel::cuda
