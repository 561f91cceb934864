// LayerNorm and RMSNorm forward with an optional fused residual add: one block (or warp) per row, one pass over memory.
// The row stays in registers between the load and the store, so the variance is a true second pass at no extra bytes.
// Bound by memory: reads x (and residual), writes out (and residual_out).
#include "cuda/generic/kernels.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/row.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda {
namespace {

__host__ __device__ inline bool weights_are_fp32(const NormParams& p) {
  return p.weight ? p.weight.dtype == DType::kFloat32 : p.bias && p.bias.dtype == DType::kFloat32;
}

template <class T, int kThreads, int kRowsPerBlock, int kVectors, int N>
__global__ void __launch_bounds__(kThreads* kRowsPerBlock) norm_kernel(const NormParams p) {
  __shared__ float scratch[kRowsPerBlock][kThreads / kWarp];
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.y;
  if (kRowsPerBlock > 1 && row >= p.rows) return;  // whole warps: rows share a block only when a row is one warp
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
  const auto load = [&](std::int64_t first) { return load_vector<N>(x + first); };
  const auto load_sum = [&](std::int64_t first) {  // of a row that is walked from memory
    auto values = load(first);
    if (!residual) return values;
    add_residual(values, load_vector<N>(residual + first));
    if (residual_out) *reinterpret_cast<Packed<T, N>*>(residual_out + first) = values;
    return values;
  };
  const auto load_again = [&](std::int64_t first) { return load_vector<N>((residual_out ? residual_out : x) + first); };
  using RowOfT = Row<T, kThreads, kVectors, N>;
  RowOfT h(p.features, threadIdx.x, load, [&](Packed<T, N>(&values)[RowOfT::kHeld]) {
    if (!residual) return;
    const auto first = [](int j) { return (j * kThreads + static_cast<int>(threadIdx.x)) * N; };
    const int features = static_cast<int>(p.features);
    Packed<T, N> addend[RowOfT::kHeld] = {};
#pragma unroll
    for (int j = 0; j < RowOfT::kHeld; ++j)
      if (first(j) < features) addend[j] = load_vector<N>(residual + first(j));
#pragma unroll
    for (int j = 0; j < RowOfT::kHeld; ++j) {
      add_residual(values[j], addend[j]);
      if (residual_out && first(j) < features) *reinterpret_cast<Packed<T, N>*>(residual_out + first(j)) = values[j];
    }
  });

  const float inverse_features = 1.0f / static_cast<float>(p.features);
  const bool centred = p.kind == NormKind::kLayerNorm;
  float mean = 0.0f;
  if (centred || kVectors == 0) {  // the first walk of a row in memory also stores the sum with the residual
    float sum = 0.0f;
    h.each(load_sum, [&](std::int64_t, float(&values)[N]) {
#pragma unroll
      for (int i = 0; i < N; ++i) sum += values[i];
    });
    if (centred) mean = block_reduce<kThreads>(sum, scratch[threadIdx.y], Sum{}) * inverse_features;
  }
  float squares = 0.0f;
  h.each(load_again, [&](std::int64_t, float(&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) squares += (values[i] - mean) * (values[i] - mean);
  });
  const float variance = block_reduce<kThreads>(squares, scratch[threadIdx.y], Sum{}) * inverse_features;
  const float rstd = rsqrtf(variance + p.eps);
  if (threadIdx.x == 0) {
    if (p.mean && centred) p.mean[row] = mean;
    if (p.rstd) p.rstd[row] = rstd;
  }

  const auto finish = [&](auto weight_type) {
    using W = decltype(weight_type);
    const W *weights = static_cast<const W*>(p.weight.data), *biases = static_cast<const W*>(p.bias.data);
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
      store_floats(out + first, result);
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

template <class T, int kThreads, int kRowsPerBlock, int kVectors, int N>
void launch_instance(const NormParams& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(p.rows, kRowsPerBlock));
  launch("norm", norm_kernel<T, kThreads, kRowsPerBlock, kVectors, N>,
         {blocks, dim3(kThreads, kRowsPerBlock), 0, stream}, p);
}

bool vectorizable(const NormParams& p) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(p.dtype));
  const auto fits = [&](const void* data, std::int64_t stride) {
    return !data || (is_aligned(data, 16) && (p.rows == 1 || stride * bytes % 16 == 0));
  };
  const DType weights = weights_are_fp32(p) ? DType::kFloat32 : p.dtype;
  const auto weights_fit = [&](const TypedPointer& w) { return !w || (w.dtype == weights && is_aligned(w.data, 16)); };
  return p.features * bytes % 16 == 0 && weights_fit(p.weight) && weights_fit(p.bias) && fits(p.x, p.stride_x_row) &&
         fits(p.residual, p.stride_residual_row) && fits(p.out, p.stride_out_row) &&
         fits(p.residual_out, p.stride_residual_out_row);
}

}  // namespace

Verdict norm_fwd_supports(const NormParams& p) {
  return p.rows <= 0x7fffffff ? Verdict::ok() : Verdict("more rows than a grid has blocks");
}

void norm_fwd(const NormParams& p, void*, Stream stream) {
  if (p.rows == 0 || p.features == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = kVectorElements<T>;
    if (!vectorizable(p)) return launch_instance<T, 256, 1, 0, 1>(p, native(stream));
    with_row_shape(p.features / N, p.rows, cuda_device_properties(p.device.index).num_sms,
                   [&](auto threads, auto rows, auto vectors) {
                     launch_instance<T, threads.value, rows.value, vectors.value, N>(p, native(stream));
                   });
  });
}

}  // namespace flashkernel::cuda
