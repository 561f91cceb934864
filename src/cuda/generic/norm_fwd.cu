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
  const auto load_sum = [&](std::int64_t first, float(&values)[N]) {
    load_floats(values, x + first);
    if (!residual) return;
    float addend[N];
    load_floats(addend, residual + first);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = to_float(from_float<T>(values[i] + addend[i]));
    if (residual_out) store_floats(residual_out + first, values);
  };
  const auto load_again = [&](std::int64_t first, float(&values)[N]) {
    load_floats(values, (residual_out ? residual_out : x) + first);
  };
  Row<kThreads, kVectors, N> h(p.features, threadIdx.x, load_sum);

  const float inverse_features = 1.0f / static_cast<float>(p.features);
  float sum = 0.0f;
  h.each(load_sum, [&](std::int64_t, float(&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) sum += values[i];
  });
  const bool centred = p.kind == NormKind::kLayerNorm;
  const float mean = centred ? block_reduce<kThreads>(sum, scratch[threadIdx.y], Sum{}) * inverse_features : 0.0f;
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

  h.each(load_again, [&](std::int64_t first, float(&values)[N]) {
    float weight[N], bias[N], result[N];
    if (p.weight) load_typed_floats(weight, p.weight.data, p.weight.dtype, first);
    if (p.bias) load_typed_floats(bias, p.bias.data, p.bias.dtype, first);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      result[i] = (values[i] - mean) * rstd;
      if (p.weight) result[i] *= weight[i];
      if (p.bias) result[i] += bias[i];
    }
    store_floats(out + first, result);
  });
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
  return p.features * bytes % 16 == 0 && fits(p.x, p.stride_x_row) && fits(p.residual, p.stride_residual_row) &&
         fits(p.out, p.stride_out_row) && fits(p.residual_out, p.stride_residual_out_row);
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
    with_row_shape(p.features / N, [&](auto threads, auto rows, auto vectors) {
      launch_instance<T, threads.value, rows.value, vectors.value, N>(p, native(stream));
    });
  });
}

}  // namespace flashkernel::cuda
