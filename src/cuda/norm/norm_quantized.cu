// LayerNorm and RMSNorm forward with an output of 8 bits (float8_e4m3fn or int8), with an optional fused residual add.
// The scale is one number of the caller's, or the largest magnitude of a row over 448 or 127, which each row writes.
// Bound by memory: x (and residual) are read once, one byte an element is written; the norm itself never goes to
// memory. Two kernels: held_kernel keeps a row in registers, walked_kernel reads it again for each of its sums. Their
// plans are BlockRows, which norm_fwd launches. Invariant: the order of all additions follows from the number of
// features.
#include "cuda/norm/norm.hpp"
#include "cuda/host/row_plan.hpp"
#include "cuda/norm/norm_row.cuh"
#include "cuda/pipeline/turn.cuh"
#include "cuda/row_costs.hpp"
#include "cuda/tile/quantized.cuh"

namespace flashkernel::cuda {
namespace {

/// The larger of two numbers that are not negative; a NaN is larger than all others.
struct LargerOrNan {
  static constexpr float kIdentity = 0.0f;
  __device__ float operator()(float a, float b) const {
    return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b)));
  }
};

/// What a result counts in its row's scale: int8 passes a NaN on, float8 has an element for it.
__device__ inline float magnitude(float value, DType dtype) {
  return dtype == DType::kInt8 || value == value ? fabsf(value) : 0.0f;
}

/// 1 / scale of a row whose largest magnitude is `largest`; the first thread writes a scale that is the row's own.
__device__ inline float inverse_scale(const NormParams& p, std::int64_t row, float largest) {
  const float scale = p.scales ? row_scale(largest, largest_element(p.out_dtype)) : *p.scale;
  if (p.scales && threadIdx.x == 0) p.scales[row] = scale;
  return 1.0f / scale;
}

/// N elements from `first` of a row of the output on.
template <int N>
__device__ inline void store_quantized(const NormParams& p, std::int64_t row, std::int64_t first,
                                       const float (&values)[N]) {
  auto* const to = static_cast<std::uint8_t*>(p.out) + row * p.stride_out_row + first;
  const bool is_int8 = p.out_dtype == DType::kInt8;
  if constexpr (N == 1) {
    *to = is_int8 ? static_cast<std::uint8_t>(from_float<Int8>(values[0]).value) : from_float<Float8>(values[0]).bits;
  } else {
    float eight[8] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) eight[i] = values[i];
    const uint2 packed = is_int8 ? pack_eight<Int8>(eight) : pack_eight<Float8>(eight);
    if constexpr (N == 8)
      *reinterpret_cast<uint2*>(to) = packed;
    else
      *reinterpret_cast<std::uint32_t*>(to) = packed.x;
  }
}

/// kThreads threads hold a row, kVectors vectors each.
template <class T, int kThreads, int kRowsPerBlock, int kVectors>
__global__ void __launch_bounds__(kThreads* kRowsPerBlock) held_kernel(const NormParams p) {
  using Held = HeldRow<T, kThreads, kVectors>;
  constexpr int N = Held::N;
  // Results are kept from the search for the largest to their elements where there are registers for them.
  constexpr bool kKeep = kVectors * N <= 16;
  __shared__ float scratch[kRowsPerBlock][2][kThreads / kWarp], maxima[kRowsPerBlock][kThreads / kWarp];
  take_turn();
  const unsigned team = kRowsPerBlock > 1 ? threadIdx.y : 0;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + team;
  if (kRowsPerBlock > 1 && row >= p.rows) return;  // whole warps leave: rows share a block only if each is one warp
  const int columns = static_cast<int>(p.features);
  Held h(columns);
  h.load(static_cast<const T*>(p.x) + row * p.stride_x_row);
  if (p.residual) {
    Held addend(columns);
    addend.load(static_cast<const T*>(p.residual) + row * p.stride_residual_row);
    // Rounded to T as residual_out holds it: what is normalised is what the next layer adds to.
    h.change([&](int j, float(&values)[N]) {
      float more[N];
      addend.floats(j, more);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] += more[i];
    });
    if (p.residual_out) h.store(static_cast<T*>(p.residual_out) + row * p.stride_residual_out_row);
  }
  const Moments m = p.kind == NormKind::kLayerNorm
                        ? RowMoments<true, T, kThreads, kVectors>::of(h, columns, scratch[team])
                        : RowMoments<false, T, kThreads, kVectors>::of(h, columns, scratch[team]);
  const float mean = p.kind == NormKind::kLayerNorm ? m.mean : 0.0f;
  const float rstd = rsqrtf(m.squares / static_cast<float>(columns) + p.eps);
  save_statistics(p, row, mean, rstd);

  const auto results = [&](int j, float(&values)[N]) {
    float w[N], b[N];
    h.floats(j, values);
    const bool there = h.holds(j);
    read_norm_weight(there ? p.weight : TypedPointer{}, p.weight_offset, h.first(j), w);
    read_norm_vector(there ? p.bias : TypedPointer{}, h.first(j), 0.0f, b);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = there ? fmaf((values[i] - mean) * rstd, w[i], b[i]) : 0.0f;
  };
  float kept[kKeep ? kVectors : 1][N];
  float largest = 0.0f;
  if constexpr (kKeep) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) results(j, kept[j]);
  }
  if (p.scales) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float values[N];
      if constexpr (!kKeep) results(j, values);
#pragma unroll
      for (int i = 0; i < N; ++i)
        largest = LargerOrNan{}(largest, magnitude(kKeep ? kept[kKeep ? j : 0][i] : values[i], p.out_dtype));
    }
    largest = block_reduce_once<kThreads>(largest, maxima[team], LargerOrNan{});
  }
  const float inverse = inverse_scale(p, row, largest);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    float values[N];
    if constexpr (!kKeep) results(j, values);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = (kKeep ? kept[kKeep ? j : 0][i] : values[i]) * inverse;
    if (h.holds(j)) store_quantized(p, row, h.first(j), values);
  }
}

/// Rows of any length, N elements of a thread at a time. What a thread reads again it has read or written itself.
template <class T, int kThreads, int N>
__global__ void __launch_bounds__(kThreads) walked_kernel(const NormParams p) {
  __shared__ float scratch[kThreads / kWarp];
  take_turn();
  const std::int64_t row = blockIdx.x;
  const T* h = static_cast<const T*>(p.x) + row * p.stride_x_row;
  const auto walk = [&](auto f) {
    for (std::int64_t first = static_cast<std::int64_t>(threadIdx.x) * N; first < p.features; first += kThreads * N)
      f(first);
  };
  if (p.residual) {
    const T* const residual = static_cast<const T*>(p.residual) + row * p.stride_residual_row;
    T* const sum = static_cast<T*>(p.residual_out) + row * p.stride_residual_out_row;
    walk([&](std::int64_t first) {
      float values[N], more[N];
      load_floats(values, h + first);
      load_floats(more, residual + first);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] += more[i];
      store_floats(sum + first, values);
    });
    h = sum;
  }
  const auto add = [&](float value) { return block_reduce<kThreads>(value, scratch, Sum{}); };
  const float inverse_features = 1.0f / static_cast<float>(p.features);
  float mean = 0.0f;
  if (p.kind == NormKind::kLayerNorm) {
    float sum = 0.0f;
    walk([&](std::int64_t first) {
      float values[N];
      load_floats(values, h + first);
#pragma unroll
      for (int i = 0; i < N; ++i) sum += values[i];
    });
    mean = add(sum) * inverse_features;
  }
  float squares = 0.0f;
  walk([&](std::int64_t first) {
    float values[N];
    load_floats(values, h + first);
#pragma unroll
    for (int i = 0; i < N; ++i) squares += (values[i] - mean) * (values[i] - mean);
  });
  const float rstd = rsqrtf(add(squares) * inverse_features + p.eps);
  save_statistics(p, row, mean, rstd);

  const auto results = [&](std::int64_t first, float(&values)[N]) {
    float w[N], b[N];
    load_floats(values, h + first);
    read_norm_weight(p.weight, p.weight_offset, first, w);
    read_norm_vector(p.bias, first, 0.0f, b);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = fmaf((values[i] - mean) * rstd, w[i], b[i]);
  };
  float largest = 0.0f;
  if (p.scales) {
    walk([&](std::int64_t first) {
      float values[N];
      results(first, values);
#pragma unroll
      for (int i = 0; i < N; ++i) largest = LargerOrNan{}(largest, magnitude(values[i], p.out_dtype));
    });
    largest = block_reduce<kThreads>(largest, scratch, LargerOrNan{});
  }
  const float inverse = inverse_scale(p, row, largest);
  walk([&](std::int64_t first) {
    float values[N];
    results(first, values);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] *= inverse;
    store_quantized(p, row, first, values);
  });
}

/// f(threads, rows a block, vectors a thread) of a row of `vectors` vectors.
template <class F>
void with_shape(std::int64_t vectors, F f) {
  if (vectors <= 64) return f(Constant<32>{}, Constant<4>{}, Constant<2>{});
  if (vectors <= 128) return f(Constant<128>{}, Constant<1>{}, Constant<1>{});
  if (vectors <= 256) return f(Constant<128>{}, Constant<1>{}, Constant<2>{});
  if (vectors <= 512) return f(Constant<256>{}, Constant<1>{}, Constant<2>{});
  if (vectors <= 1024) return f(Constant<512>{}, Constant<1>{}, Constant<2>{});
  if (vectors <= 2048) return f(Constant<512>{}, Constant<1>{}, Constant<4>{});
  f(Constant<1024>{}, Constant<1>{}, Constant<4>{});
}
constexpr std::int64_t kMostHeld = 1024 * 4;  // vectors

Plan plan_of(void (*kernel)(NormParams), int threads, int rows) {
  return Plan::of(BlockRows<NormParams>{kernel, threads, rows});
}

}  // namespace

Verdict norm_quantized_walked_supports(const NormParams& p) {
  if (!p.is_quantized()) return "writes elements of 8 bits alone";
  return p.rows <= 0x7fffffff ? Verdict::ok() : Verdict("more rows than a grid has blocks");
}

Plan plan_norm_quantized_walked(const NormParams& p, const DeviceFacts&) {
  Plan plan;
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    plan = norm_rows_are_vectors(p) ? plan_of(walked_kernel<T, 1024, kVectorElements<T>>, 1024, 1)
                                    : plan_of(walked_kernel<T, 256, 1>, 256, 1);
  });
  return plan;
}

Verdict norm_quantized_held_supports(const NormParams& p) {
  if (row_bytes(p.dtype, p.features) > kMostHeld * 16) return "a block holds rows of up to 64 KB";
  if (!norm_rows_are_vectors(p)) return "needs rows and weights on 16-byte boundaries";
  return norm_quantized_walked_supports(p);
}

Plan plan_norm_quantized_held(const NormParams& p, const DeviceFacts&) {
  Plan plan;
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_shape(p.features / kVectorElements<T>, [&](auto threads, auto rows, auto vectors) {
      plan = plan_of(held_kernel<T, threads.value, rows.value, vectors.value>, threads.value, rows.value);
    });
  });
  return plan;
}

}  // namespace flashkernel::cuda
