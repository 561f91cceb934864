// LayerNorm and RMSNorm of one row, or of the part of it that a block of a cluster holds. Called by the norm kernels,
// which say how a sum over the whole row is made.
#pragma once

#include "cuda/tile/reduce.cuh"
#include "cuda/tile/row.cuh"
#include "cuda/tile/vector.cuh"
#include "ops/norm_params.hpp"

namespace flashkernel::cuda {

__host__ __device__ inline bool weights_are_fp32(const NormParams& p) {
  return p.weight ? p.weight.dtype == DType::kFloat32 : p.bias && p.bias.dtype == DType::kFloat32;
}

/// Whether every row starts on a 16-byte boundary and is whole vectors, and weight and bias are of x's dtype or fp32.
inline bool norm_rows_are_vectors(const NormParams& p) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(p.dtype));
  const auto aligned = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; };
  const auto fits = [&](const void* data, std::int64_t stride) {
    return !data || (aligned(data) && (p.rows == 1 || stride * bytes % 16 == 0));
  };
  const DType weights = weights_are_fp32(p) ? DType::kFloat32 : p.dtype;
  const auto weights_fit = [&](const TypedPointer& w) { return !w || (w.dtype == weights && aligned(w.data)); };
  return p.features * bytes % 16 == 0 && weights_fit(p.weight) && weights_fit(p.bias) && fits(p.x, p.stride_x_row) &&
         fits(p.residual, p.stride_residual_row) && fits(p.out, p.stride_out_row) &&
         fits(p.residual_out, p.stride_residual_out_row);
}

/// Of memory that no one reads again soon: the first to leave the caches. 16 bytes; else as any other.
template <int N, class T>
__device__ inline Packed<T, N> load_passing(const T* from) {
  if constexpr (sizeof(Packed<T, N>) == 16) {
    const uint4 word = __ldcs(reinterpret_cast<const uint4*>(from));
    return reinterpret_cast<const Packed<T, N>&>(word);
  } else {
    return load_vector<N>(from);
  }
}
template <class T, int N>
__device__ inline void store_passing(T* to, const Packed<T, N>& packed) {
  if constexpr (sizeof(Packed<T, N>) == 16) {
    __stcs(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4&>(packed));
  } else {
    *reinterpret_cast<Packed<T, N>*>(to) = packed;
  }
}

/// Columns [column, column + columns) of a row, by kThreads threads. `add(value)`: the sum of all threads' values over
/// the whole row, for all of them. kPassing: what is held in registers passes by the caches.
template <class T, int kThreads, int kVectors, int N, bool kPassing, class Add>
__device__ inline void norm_row(const NormParams& p, std::int64_t row, std::int64_t column, std::int64_t columns,
                                Add add) {
  const T* x = static_cast<const T*>(p.x) + row * p.stride_x_row + column;
  const T* residual = p.residual ? static_cast<const T*>(p.residual) + row * p.stride_residual_row + column : nullptr;
  T* residual_out =
      p.residual_out ? static_cast<T*>(p.residual_out) + row * p.stride_residual_out_row + column : nullptr;
  T* out = static_cast<T*>(p.out) + row * p.stride_out_row + column;

  // h = x + residual, rounded to T as residual_out holds it, so that backward sees what forward normalised. A row that
  // is walked again takes h from residual_out: x or residual may be the same memory.
  const auto add_residual = [&](Packed<T, N>& values, const Packed<T, N>& addend) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      values.values[i] = from_float<T>(to_float(values.values[i]) + to_float(addend.values[i]));
  };
  const auto fetch = [](const T* from) { return kPassing ? load_passing<N>(from) : load_vector<N>(from); };
  const auto store = [](T* to, const Packed<T, N>& values) {
    if constexpr (kPassing) {
      store_passing(to, values);
    } else {
      *reinterpret_cast<Packed<T, N>*>(to) = values;
    }
  };
  const auto load = [&](std::int64_t first) { return fetch(x + first); };
  const auto load_sum = [&](std::int64_t first) {  // of a row that is walked from memory
    auto values = load(first);
    if (!residual) return values;
    add_residual(values, load_vector<N>(residual + first));
    if (residual_out) *reinterpret_cast<Packed<T, N>*>(residual_out + first) = values;
    return values;
  };
  const auto load_again = [&](std::int64_t first) { return load_vector<N>((residual_out ? residual_out : x) + first); };
  using RowOfT = Row<T, kThreads, kVectors, N>;
  RowOfT h(columns, threadIdx.x, load, [&](Packed<T, N>(&values)[RowOfT::kHeld]) {
    if (!residual) return;
    const auto first = [](int j) { return (j * kThreads + static_cast<int>(threadIdx.x)) * N; };
    const int features = static_cast<int>(columns);
    Packed<T, N> addend[RowOfT::kHeld] = {};
#pragma unroll
    for (int j = 0; j < RowOfT::kHeld; ++j)
      if (first(j) < features) addend[j] = fetch(residual + first(j));
#pragma unroll
    for (int j = 0; j < RowOfT::kHeld; ++j) {
      add_residual(values[j], addend[j]);
      if (residual_out && first(j) < features) store(residual_out + first(j), values[j]);
    }
  });

  const float inverse_features = 1.0f / static_cast<float>(p.features);
  const bool centred = p.kind == NormKind::kLayerNorm;
  float mean = 0.0f;
  if (centred) {
    float sum = 0.0f;
    h.each(load_sum, [&](std::int64_t, float(&values)[N]) {
#pragma unroll
      for (int i = 0; i < N; ++i) sum += values[i];
    });
    mean = add(sum) * inverse_features;
  }
  float squares = 0.0f;
  // The first walk of a row in memory also stores the sum with the residual.
  h.each([&](std::int64_t first) { return centred ? load_again(first) : load_sum(first); },
         [&](std::int64_t, float(&values)[N]) {
#pragma unroll
           for (int i = 0; i < N; ++i) squares += (values[i] - mean) * (values[i] - mean);
         });
  const float variance = add(squares) * inverse_features;
  const float rstd = rsqrtf(variance + p.eps);
  if (threadIdx.x == 0 && column == 0) {
    if (p.mean && centred) p.mean[row] = mean;
    if (p.rstd) p.rstd[row] = rstd;
  }

  const auto finish = [&](auto weight_type) {
    using W = decltype(weight_type);
    const W* const weights = p.weight ? static_cast<const W*>(p.weight.data) + column : nullptr;
    const W* const biases = p.bias ? static_cast<const W*>(p.bias.data) + column : nullptr;
    h.each(load_again, [&](std::int64_t first, float(&values)[N]) {
      float weight[N], bias[N], result[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        weight[i] = 1.0f;
        bias[i] = 0.0f;
      }
      if (weights) load_wide(weight, weights + first);
      if (biases) load_wide(bias, biases + first);
#pragma unroll
      for (int i = 0; i < N; ++i) result[i] = fmaf((values[i] - mean) * rstd, weight[i], bias[i]);
      store(out + first, pack_vector<T>(result));
    });
  };
  // Weights of x's dtype or fp32: any other dtype comes to the kernel of single elements, N == 1.
  if constexpr (N > 1) {
    if (dtype_of<T> != DType::kFloat32 && weights_are_fp32(p)) {
      finish(0.0f);
    } else {
      finish(T{});
    }
  } else {
    h.each(load_again, [&](std::int64_t i, float(&values)[N]) {
      const float weight = p.weight ? load_typed(p.weight.data, p.weight.dtype, column + i) : 1.0f;
      const float bias = p.bias ? load_typed(p.bias.data, p.bias.dtype, column + i) : 0.0f;
      out[i] = from_float<T>(fmaf((values[0] - mean) * rstd, weight, bias));
    });
  }
}

}  // namespace flashkernel::cuda
