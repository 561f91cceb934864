// Runs of neighbouring elements moved by one instruction (up to 16 bytes a lane) and held as fp32.
#pragma once

#include "cuda/ptx/copy.cuh"
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
__device__ inline void unpack(float (&out)[N], const Packed<T, N>& packed) {
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = to_float(packed.values[i]);
}

template <class T, int N>
__device__ inline Packed<T, N> pack_vector(const float (&values)[N]) {
  Packed<T, N> packed;
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {  // one instruction rounds two
#pragma unroll
    for (int i = 0; i < N; i += 2) round_two(packed.values[i], packed.values[i + 1], values[i], values[i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) packed.values[i] = from_float<T>(values[i]);
  }
  return packed;
}

template <int N, class T>
__device__ inline Packed<T, N> load_vector(const T* from) {
  return *reinterpret_cast<const Packed<T, N>*>(from);
}

/// Zeros unless `there`; of rows that nobody reads again.
template <int N, class T>
__device__ inline Packed<T, N> load_kept(const T* from, bool there) {
  Packed<T, N> packed{};
  if constexpr (sizeof(packed) == 16)
    ptx::load_16_kept(reinterpret_cast<std::uint32_t(&)[4]>(packed), from, there);
  else if (there)
    packed = load_vector<N>(from);
  return packed;
}

/// Stores 16 bytes of a result that is larger than the L2 cache.
template <class T, int N>
__device__ inline void store_leaving(T* to, const Packed<T, N>& packed) {
  static_assert(sizeof(packed) == 16);
  ptx::store_16_leaving(to, reinterpret_cast<const std::uint32_t(&)[4]>(packed));
}

template <int N, class T>
__device__ inline void load_floats(float (&out)[N], const T* from) {
  unpack(out, load_vector<N>(from));
}

template <int N, class T>
__device__ inline void store_floats(T* to, const float (&values)[N]) {
  *reinterpret_cast<Packed<T, N>*>(to) = pack_vector<T>(values);
}

/// N elements in loads of 16 bytes or all N, whichever is less; `from` is aligned to that.
template <int N, class T>
__device__ inline void load_wide(float (&out)[N], const T* from) {
  constexpr int kStep = N < kVectorElements<T> ? N : kVectorElements<T>;
#pragma unroll
  for (int i = 0; i < N; i += kStep) {
    const auto packed = *reinterpret_cast<const Packed<T, kStep>*>(from + i);
#pragma unroll
    for (int j = 0; j < kStep; ++j) out[i + j] = to_float(packed.values[j]);
  }
}

/// N floats in stores of 16 bytes.
template <int N>
__device__ inline void store_wide(float* to, const float (&values)[N]) {
  static_assert(N % 4 == 0);
#pragma unroll
  for (int i = 0; i < N; i += 4)
    *reinterpret_cast<float4*>(to + i) = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
}

}  // namespace flashkernel::cuda
