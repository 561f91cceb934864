// LayerNorm and RMSNorm of one row: held in registers, or walked from memory. Called by the norm kernels.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/tile/held_row.cuh"
#include "cuda/norm/moments.cuh"
#include "cuda/norm/norm_weight.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/row.cuh"
#include "cuda/tile/vector.cuh"
#include "ops/norm_params.hpp"

namespace flashkernel::cuda {

/// Whether weight and bias, where there are any, are of `dtype`.
__host__ __device__ inline bool weights_are(const NormParams& p, DType dtype) {
  return (!p.weight || p.weight.dtype == dtype) && (!p.bias || p.bias.dtype == dtype);
}

/// Whether every row starts on a 16-byte boundary (an output of 8 bits where a vector of x has its elements) and is
/// whole vectors, and weight and bias start on one.
inline bool norm_rows_are_vectors(const NormParams& p) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(p.dtype));
  const auto aligned = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; };
  const auto fits = [&](const void* data, std::int64_t stride) {
    return !data || (aligned(data) && (p.rows == 1 || stride * bytes % 16 == 0));
  };
  const std::int64_t elements = 16 / bytes;
  const bool out_fits = !p.is_quantized() ? fits(p.out, p.stride_out_row)
                                          : is_aligned(p.out, static_cast<std::size_t>(elements)) &&
                                                (p.rows == 1 || p.stride_out_row % elements == 0);
  return p.features * bytes % 16 == 0 && aligned(p.weight.data) && aligned(p.bias.data) && fits(p.x, p.stride_x_row) &&
         fits(p.residual, p.stride_residual_row) && out_fits && fits(p.residual_out, p.stride_residual_out_row);
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
  const bool mixed = !weights_are(p, dtype_of<T>);
  const auto load_weight = [&](auto& to, int j) {
    to.load(static_cast<const T*>(p.weight.data), j, p.weight && !mixed);
  };
  const auto load_bias = [&](auto& to, int j) { to.load(static_cast<const T*>(p.bias.data), j, p.bias && !mixed); };
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
  if (mixed) {
    h.change([&](int j, float(&values)[N]) {
      if (!h.holds(j)) return;
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        float w[4], b[4];
        read_norm_weight(p.weight, p.weight_offset, h.first(j) + i, w);
        read_norm_vector(p.bias, h.first(j) + i, 0.0f, b);
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
      for (int i = 0; i < N; ++i) values[i] = result(values[i], w[i] + p.weight_offset, b[i]);
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
    for (int i = 0; i < N; ++i) {
      w[i] += p.weight_offset;
      values[i] = kLayerNorm ? fmaf((values[i] - m.mean) * rstd, w[i], b[i]) : values[i] * rstd * w[i];
    }
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

  // kStep weights at a time: those of another dtype than the rows leave no registers for all.
  const auto finish = [&](auto step, auto read) {
    constexpr int kStep = step.value;
    h.each(load_again, [&](std::int64_t first, float(&values)[N]) {
      float result[N];
#pragma unroll
      for (int i = 0; i < N; i += kStep) {
        float weight[kStep], bias[kStep];
        read(p.weight, first + i, 1.0f, weight);
        read(p.bias, first + i, 0.0f, bias);
#pragma unroll
        for (int k = 0; k < kStep; ++k)
          result[i + k] = fmaf((values[i + k] - mean) * rstd, weight[k] + p.weight_offset, bias[k]);
      }
      store(out + first, pack_vector<T>(result));
    });
  };
  if constexpr (N > 1) {
    if (weights_are(p, dtype_of<T>)) {
      finish(Constant<N>{}, [](const TypedPointer& from, std::int64_t first, float missing, float(&values)[N]) {
#pragma unroll
        for (float& value : values) value = missing;
        if (from) load_wide(values, static_cast<const T*>(from.data) + first);
      });
    } else {
      finish(Constant<4>{}, [](const TypedPointer& from, std::int64_t first, float missing, float(&values)[4]) {
        read_norm_vector(from, first, missing, values);
      });
    }
  } else {
    h.each(load_again, [&](std::int64_t i, float(&values)[N]) {
      const float weight = p.weight ? load_typed(p.weight.data, p.weight.dtype, i) + p.weight_offset : 1.0f;
      const float bias = p.bias ? load_typed(p.bias.data, p.bias.dtype, i) : 0.0f;
      out[i] = from_float<T>(fmaf((values[0] - mean) * rstd, weight, bias));
    });
  }
}

}  // namespace flashkernel::cuda
