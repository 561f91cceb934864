// Gradients of linear by the same tiled product: grad_x = g W, grad_weight = g^T x, grad_bias = column sums of g, where
// g = grad_out * activation'(preactivation) is formed as it is loaded. Every sum runs in a fixed order.
#include "cuda/linear/generic/gemm.cuh"
#include "cuda/linear/generic/linear.hpp"
#include "cuda/linear/gradient.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/activation.cuh"
#include "cuda/tile/convert.cuh"

namespace flashkernel::cuda {
namespace {

template <class T>
__device__ inline float gradient(const LinearBackwardParams& p, std::int64_t row, std::int64_t feature) {
  float g = to_float(static_cast<const T*>(p.grad_out)[row * p.stride_grad_out_row + feature]);
  if (p.activation != Activation::kNone)
    g *= activation_gradient(
        p.activation, to_float(static_cast<const T*>(p.preactivation)[row * p.stride_preactivation_row + feature]));
  return g;
}

template <class T, bool kInFast>
__global__ void __launch_bounds__(kGemmThreads) grad_x_kernel(const LinearBackwardParams p) {
  const T* weight = static_cast<const T*>(p.weight);
  gemm_tile<true, kInFast>(
      p.rows, p.in_features, p.out_features, [&](std::int64_t m, std::int64_t k) { return gradient<T>(p, m, k); },
      [&](std::int64_t k, std::int64_t n) {
        return to_float(weight[k * p.stride_weight_out + n * p.stride_weight_in]);
      },
      [&](std::int64_t m, std::int64_t n, float value) {
        static_cast<T*>(p.grad_x)[m * p.stride_grad_x_row + n] = from_float<T>(value);
      });
}

template <class T>
__global__ void __launch_bounds__(kGemmThreads) grad_weight_kernel(const LinearBackwardParams p) {
  const T* x = static_cast<const T*>(p.x);
  gemm_tile<false, true>(
      p.out_features, p.in_features, p.rows, [&](std::int64_t m, std::int64_t k) { return gradient<T>(p, k, m); },
      [&](std::int64_t k, std::int64_t n) { return to_float(x[k * p.stride_x_row + n]); },
      [&](std::int64_t m, std::int64_t n, float value) {
        static_cast<T*>(p.grad_weight)[m * p.stride_grad_weight_out + n * p.stride_grad_weight_in] =
            from_float<T>(value);
      });
}

constexpr int kColumns = 32, kLanes = 32;

template <class T>
__global__ void __launch_bounds__(kColumns* kLanes) grad_bias_kernel(const LinearBackwardParams p) {
  __shared__ float sums[kLanes][kColumns + 1];
  const std::int64_t feature = static_cast<std::int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  float sum = 0.0f;
  if (feature < p.out_features)
    for (std::int64_t row = threadIdx.y; row < p.rows; row += kLanes) sum += gradient<T>(p, row, feature);
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || feature >= p.out_features) return;
#pragma unroll
  for (int lane = 1; lane < kLanes; ++lane) sum += sums[lane][threadIdx.x];
  store_typed(p.grad_bias, p.grad_bias_dtype, feature, sum);
}

dim3 gemm_grid(std::int64_t rows, std::int64_t columns) {
  return dim3(static_cast<unsigned>(ceil_div(columns, kTileN)), static_cast<unsigned>(ceil_div(rows, kTileM)));
}

}  // namespace

Verdict linear_bwd_supports(const LinearBackwardParams& p) {
  return p.rows <= 65535LL * kTileM && p.out_features <= 65535LL * kTileM ? Verdict::ok()
                                                                          : Verdict("more than 4194240 rows");
}

void linear_bwd(const LinearBackwardParams& p, void*, Stream stream) {
  const CudaDeviceGuard guard(p.device.index);
  const cudaStream_t s = native(stream);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (p.grad_x && p.rows * p.in_features > 0) {
      if (p.stride_weight_in == 1) {
        launch("linear_bwd: grad_x", grad_x_kernel<T, true>, {gemm_grid(p.rows, p.in_features), kGemmThreads, 0, s}, p);
      } else {
        launch("linear_bwd: grad_x", grad_x_kernel<T, false>, {gemm_grid(p.rows, p.in_features), kGemmThreads, 0, s},
               p);
      }
    }
    if (p.grad_weight && p.out_features * p.in_features > 0) {
      launch("linear_bwd: grad_weight", grad_weight_kernel<T>,
             {gemm_grid(p.out_features, p.in_features), kGemmThreads, 0, s}, p);
    }
    if (p.grad_bias && p.out_features > 0) {
      launch("linear_bwd: grad_bias", grad_bias_kernel<T>,
             {static_cast<unsigned>(ceil_div(p.out_features, kColumns)), dim3(kColumns, kLanes), 0, s}, p);
    }
  });
}

}  // namespace flashkernel::cuda
