// LayerNorm and RMSNorm of one row: held in registers, or walked from memory. Called by the norm kernels.
#pragma once

#include "cuda/tile/held_row.cuh"
#include "cuda/norm/moments.cuh"
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

/// What both ways of reading a row have in common.
__device__ inline void save_statistics(const NormParams& p, std::int64_t row, float mean, float rstd) {
  if (threadIdx.x != 0) return;
  if (p.mean && p.kind == NormKind::kLayerNorm) p.mean[row] = mean;
  if (p.rstd) p.rstd[row] = rstd;
}

/// By kThreads threads of kVectors vectors each; `scratch` is theirs. x and residual are asked for before the first of
/// them is waited for, and so are the weights where there are registers for them; else all at once after the sums.
template <class T, int kThreads, int kVectors, bool kWeightsFirst>
__device__ inline void norm_held_row(const NormParams& p, std::int64_t row, float (&scratch)[2][kThreads / kWarp]) {
  using Held = HeldRow<T, kThreads, kVectors>;
  constexpr int N = Held::N;
  const int columns = static_cast<int>(p.features);
  Held h(columns);
  h.load(static_cast<const T*>(p.x) + row * p.stride_x_row);
  if (p.residual) {
    Held addend(columns);
    addend.load(static_cast<const T*>(p.residual) + row * p.stride_residual_row);
    // Rounded to T as residual_out holds it, so that backward sees what forward normalised.
    h.change([&](int j, float(&values)[N]) {
      float more[N];
      addend.floats(j, more);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] += more[i];
    });
    if (p.residual_out) h.store(static_cast<T*>(p.residual_out) + row * p.stride_residual_out_row);
  }
  const bool wide = sizeof(T) == 2 && weights_are_fp32(p);
  const auto load_weight = [&](auto& to, int j) {
    to.load(static_cast<const T*>(p.weight.data), j, p.weight && !wide);
  };
  const auto load_bias = [&](auto& to, int j) { to.load(static_cast<const T*>(p.bias.data), j, p.bias && !wide); };
  Held weight(columns, kOnes<T>), bias(columns);
  if constexpr (kWeightsFirst) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) load_weight(weight, j), load_bias(bias, j);
  }

  const float inverse_features = 1.0f / static_cast<float>(columns);
  float mean = 0.0f;
  if (p.kind == NormKind::kLayerNorm) {
    float sum = 0.0f;
    h.each([&](int, const float(&values)[N]) {
#pragma unroll
      for (int i = 0; i < N; ++i) sum += values[i];
    });
    mean = block_reduce_once<kThreads>(sum, scratch[0], Sum{}) * inverse_features;
  }
  float squares = 0.0f;
  h.each([&](int j, const float(&values)[N]) {
    const float centre = h.holds(j) ? mean : 0.0f;  // past the row's end stand zeros
#pragma unroll
    for (int i = 0; i < N; ++i) squares += (values[i] - centre) * (values[i] - centre);
  });
  const float variance = block_reduce_once<kThreads>(squares, scratch[1], Sum{}) * inverse_features;
  const float rstd = rsqrtf(variance + p.eps);
  save_statistics(p, row, mean, rstd);

  const auto result = [&](float value, float w, float b) { return fmaf((value - mean) * rstd, w, b); };
  if (wide) {
    h.change([&](int j, float(&values)[N]) {
      if (!h.holds(j)) return;
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        float w[4] = {1.0f, 1.0f, 1.0f, 1.0f}, b[4] = {};
        if (p.weight) load_floats(w, static_cast<const float*>(p.weight.data) + h.first(j) + i);
        if (p.bias) load_floats(b, static_cast<const float*>(p.bias.data) + h.first(j) + i);
#pragma unroll
        for (int k = 0; k < 4; ++k) values[i + k] = result(values[i + k], w[k], b[k]);
      }
    });
  } else {
    h.change([&](int j, float(&values)[N]) {
      float w[N], b[N];
      if constexpr (!kWeightsFirst) load_weight(weight, j), load_bias(bias, j);
      weight.floats(j, w);
      bias.floats(j, b);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = result(values[i], w[i], b[i]);
    });
  }
  h.store(static_cast<T*>(p.out) + row * p.stride_out_row);
}

/// Weights (or biases) of W for a vector of T's, as the words that they are in memory.
template <class T, class W>
class Weights {
  static constexpr int N = kVectorElements<T>, kStep = kVectorElements<W>;

 public:
  /// Those from `first` on, if the row holds them and there are any; else `missing` words.
  __device__ void load(const W* all, int first, bool holds, std::uint32_t missing) {
#pragma unroll
    for (int k = 0; k < N / kStep; ++k) {
#pragma unroll
      for (auto& word : words_[k].words) word = missing;
      if (all && holds) words_[k] = *reinterpret_cast<const Words<W>*>(all + first + k * kStep);
    }
  }
  __device__ void floats(float (&out)[N]) {
#pragma unroll
    for (int k = 0; k < N / kStep; ++k) {
#pragma unroll
      for (auto& word : words_[k].words) ptx::settle(word);
      float values[kStep];
      words_[k].floats(values);
#pragma unroll
      for (int i = 0; i < kStep; ++i) out[k * kStep + i] = values[i];
    }
  }

 private:
  Words<W> words_[N / kStep];
};

/// The same without a residual, of one kind of norm and with weights and bias of W.
template <class T, class W, bool kLayerNorm, int kThreads, int kVectors, bool kWeightsFirst>
__device__ inline void norm_plain_row(const NormParams& p, std::int64_t row, float (&scratch)[2][kThreads / kWarp]) {
  using Held = HeldRow<T, kThreads, kVectors>;
  constexpr int N = Held::N;
  const int columns = static_cast<int>(p.features);
  Held h(columns);
  h.load(static_cast<const T*>(p.x) + row * p.stride_x_row);
  const auto* const weights = static_cast<const W*>(p.weight.data);
  const auto* const biases = static_cast<const W*>(p.bias.data);  // LayerNorm's
  Weights<T, W> weight[kVectors], bias[kVectors];
  const auto load_weights = [&](int j) {
    weight[j].load(weights, h.first(j), h.holds(j), kOnes<W>);
    if constexpr (kLayerNorm) bias[j].load(biases, h.first(j), h.holds(j), 0);
  };
  if constexpr (kWeightsFirst) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) load_weights(j);
  }

  const Moments m = RowMoments<kLayerNorm, T, kThreads, kVectors>::of(h, columns, scratch);
  const float rstd = rsqrtf(m.squares / static_cast<float>(columns) + p.eps);
  if (kLayerNorm && threadIdx.x == 0 && p.mean) p.mean[row] = m.mean;
  if (threadIdx.x == 0 && p.rstd) p.rstd[row] = rstd;

  T* const out = static_cast<T*>(p.out) + row * p.stride_out_row;
  // Each vector is stored before the weights of the next are asked for: all at once, they would take the registers of
  // another block on the multiprocessor, which hides more.
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if constexpr (!kWeightsFirst) load_weights(j);
    float values[N], w[N], b[N] = {};
    h.floats(j, values);
    weight[j].floats(w);
    if constexpr (kLayerNorm) bias[j].floats(b);
#pragma unroll
    for (int i = 0; i < N; ++i)
      values[i] = kLayerNorm ? fmaf((values[i] - m.mean) * rstd, w[i], b[i]) : values[i] * rstd * w[i];
    h.store(out, j, values);
  }
}

/// Longer rows: walked from memory (kVectors == 0, of any length, N elements at a time), or so much of one in a
/// thread's registers that no other loads may be under way with it. `add(value)`: the sum over all threads, for all of
/// them.
template <class T, int kThreads, int kVectors, int N, class Add>
__device__ inline void norm_row(const NormParams& p, std::int64_t row, Add add) {
  const T* x = static_cast<const T*>(p.x) + row * p.stride_x_row;
  const T* residual = p.residual ? static_cast<const T*>(p.residual) + row * p.stride_residual_row : nullptr;
  T* residual_out = p.residual_out ? static_cast<T*>(p.residual_out) + row * p.stride_residual_out_row : nullptr;
  T* out = static_cast<T*>(p.out) + row * p.stride_out_row;

  // h = x + residual, rounded to T as residual_out holds it, so that backward sees what forward normalised. A row that
  // is walked again takes h from residual_out: x or residual may be the same memory.
  const auto add_residual = [&](Packed<T, N>& values, const Packed<T, N>& addend) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      values.values[i] = from_float<T>(to_float(values.values[i]) + to_float(addend.values[i]));
  };
  const auto store = [](T* to, const Packed<T, N>& values) { *reinterpret_cast<Packed<T, N>*>(to) = values; };
  // Threads of 512 and more were 1 to 2 % slower with it (16384 columns). Their conditions stand outside of the loads:
  // by those inside 512 threads took 75 registers instead of 62, and a multiprocessor one block instead of two.
  constexpr bool kPlain = kThreads > 256;
  const auto load_once = [&](const T* from, bool there) {
    if constexpr (!kPlain) return load_kept<N>(from, there);
    return there ? load_vector<N>(from) : Packed<T, N>{};
  };
  const auto load = [&](std::int64_t first, bool there) { return load_once(x + first, there); };
  const auto load_sum = [&](std::int64_t first, bool) {  // of a row that is walked from memory
    auto values = load_vector<N>(x + first);
    if (!residual) return values;
    add_residual(values, load_vector<N>(residual + first));
    if (residual_out) *reinterpret_cast<Packed<T, N>*>(residual_out + first) = values;
    return values;
  };
  const auto load_again = [&](std::int64_t first, bool) {
    return load_vector<N>((residual_out ? residual_out : x) + first);
  };
  using RowOfT = Row<T, kThreads, kVectors, N, kPlain>;
  RowOfT h(p.features, threadIdx.x, load, [&](Packed<T, N>(&values)[RowOfT::kHeld]) {
    if (!residual) return;
    const auto first = [](int j) { return (j * kThreads + static_cast<int>(threadIdx.x)) * N; };
    const int features = static_cast<int>(p.features);
    Packed<T, N> addend[RowOfT::kHeld];
#pragma unroll
    for (int j = 0; j < RowOfT::kHeld; ++j) addend[j] = load_once(residual + first(j), first(j) < features);
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
  h.each([&](std::int64_t first, bool there) { return centred ? load_again(first, there) : load_sum(first, there); },
         [&](std::int64_t, float(&values)[N]) {
#pragma unroll
           for (int i = 0; i < N; ++i) squares += (values[i] - mean) * (values[i] - mean);
         });
  const float variance = add(squares) * inverse_features;
  const float rstd = rsqrtf(variance + p.eps);
  save_statistics(p, row, mean, rstd);

  const auto finish = [&](auto weight_type) {
    using W = decltype(weight_type);
    const W* const weights = p.weight ? static_cast<const W*>(p.weight.data) : nullptr;
    const W* const biases = p.bias ? static_cast<const W*>(p.bias.data) : nullptr;
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
      const float weight = p.weight ? load_typed(p.weight.data, p.weight.dtype, i) : 1.0f;
      const float bias = p.bias ? load_typed(p.bias.data, p.bias.dtype, i) : 0.0f;
      out[i] = from_float<T>(fmaf((values[0] - mean) * rstd, weight, bias));
    });
  }
}

}  // namespace flashkernel::cuda
