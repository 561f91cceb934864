// activation(x W^T + b): a tiled FFMA product for many rows, and for few rows (decode) a product that streams the
// weights once. Any dtype and layout; the tensor-core kernels stand above this one.
#include "cuda/linear/generic/gemm.cuh"
#include "cuda/linear/generic/linear.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/activation.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda {
namespace {

template <class T>
__device__ inline void finish(const LinearParams& p, std::int64_t row, std::int64_t feature, float value) {
  if (p.bias) value += load_typed(p.bias.data, p.bias.dtype, feature);
  if (p.preactivation)
    static_cast<T*>(p.preactivation)[row * p.stride_preactivation_row + feature] = from_float<T>(value);
  static_cast<T*>(p.out)[row * p.stride_out_row + feature] = from_float<T>(activate(p.activation, value));
}

template <class T, bool kInFast>
__global__ void __launch_bounds__(kGemmThreads) gemm_kernel(const LinearParams p) {
  const T* x = static_cast<const T*>(p.x);
  const T* weight = static_cast<const T*>(p.weight);
  gemm_tile<true, !kInFast>(
      p.rows, p.out_features, p.in_features,
      [&](std::int64_t m, std::int64_t k) { return to_float(x[m * p.stride_x_row + k]); },
      [&](std::int64_t k, std::int64_t n) {
        return to_float(weight[n * p.stride_weight_out + k * p.stride_weight_in]);
      },
      [&](std::int64_t m, std::int64_t n, float value) { finish<T>(p, m, n, value); });
}

// Few rows, weights [out, in] with neighbours along in: one warp per output feature; N weights a lane and load.
constexpr int kFewRows = 8;
constexpr int kWarpsPerBlock = 8;

template <class T, int kRows, int N>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock) few_rows_kernel(const LinearParams p) {
  const std::int64_t feature = static_cast<std::int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.y;
  if (feature >= p.out_features) return;
  const T* weight = static_cast<const T*>(p.weight) + feature * p.stride_weight_out;
  const T* x = static_cast<const T*>(p.x);
  float sums[kRows] = {};
#pragma unroll 4
  for (std::int64_t k = static_cast<std::int64_t>(threadIdx.x) * N; k < p.in_features; k += kWarp * N) {
    float w[N];
    load_floats(w, weight + k);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row >= p.rows) break;
      float values[N];
      load_floats(values, x + row * p.stride_x_row + k);
#pragma unroll
      for (int i = 0; i < N; ++i) sums[row] = fmaf(values[i], w[i], sums[row]);
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const float sum = warp_reduce(sums[row], Sum{});
    if (threadIdx.x == 0 && row < p.rows) finish<T>(p, row, feature, sum);
  }
}

// Few rows, weights with neighbours along out (a transposed view): a thread per feature, kSplits warps share its
// inputs.
constexpr int kSplits = 8;

template <class T, int kRows>
__global__ void __launch_bounds__(kWarp* kSplits) few_rows_transposed_kernel(const LinearParams p) {
  __shared__ float partial[kSplits][kRows][kWarp];
  const std::int64_t feature = static_cast<std::int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  const T* weight = static_cast<const T*>(p.weight);
  const T* x = static_cast<const T*>(p.x);
  float sums[kRows] = {};
  if (feature < p.out_features) {
#pragma unroll 8
    for (std::int64_t k = threadIdx.y; k < p.in_features; k += kSplits) {
      const float w = to_float(weight[k * p.stride_weight_in + feature]);
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        if (row < p.rows) sums[row] = fmaf(to_float(x[row * p.stride_x_row + k]), w, sums[row]);
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) partial[threadIdx.y][row][threadIdx.x] = sums[row];
  __syncthreads();
  if (threadIdx.y != 0 || feature >= p.out_features) return;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    float sum = 0.0f;
#pragma unroll
    for (int split = 0; split < kSplits; ++split) sum += partial[split][row][threadIdx.x];
    if (row < p.rows) finish<T>(p, row, feature, sum);
  }
}

template <class T, int kRows>
void launch_few_rows(const LinearParams& p, cudaStream_t stream) {
  if (p.stride_weight_in == 1 || p.in_features == 1) {
    constexpr int N = kVectorElements<T>;
    const auto fits = [](const void* data, std::int64_t stride) { return is_aligned(data, 16) && stride % N == 0; };
    const auto blocks = static_cast<unsigned>(ceil_div(p.out_features, kWarpsPerBlock));
    const dim3 threads(kWarp, kWarpsPerBlock);
    if (p.in_features % N == 0 && fits(p.weight, p.stride_weight_out) && fits(p.x, p.stride_x_row)) {
      launch("linear", few_rows_kernel<T, kRows, N>, {blocks, threads, 0, stream}, p);
    } else {
      launch("linear", few_rows_kernel<T, kRows, 1>, {blocks, threads, 0, stream}, p);
    }
  } else {
    launch("linear", few_rows_transposed_kernel<T, kRows>,
           {static_cast<unsigned>(ceil_div(p.out_features, kWarp)), dim3(kWarp, kSplits), 0, stream}, p);
  }
}

}  // namespace

Verdict linear_supports(const LinearParams& p) {
  return p.rows <= 65535LL * kTileM ? Verdict::ok() : Verdict("more than 4194240 rows");
}

Verdict linear_few_rows_supports(const LinearParams& p) {
  return p.rows <= kFewRows ? Verdict::ok() : Verdict("more than 8 rows");
}

void linear_few_rows(const LinearParams& p, void*, Stream stream) {
  if (p.rows == 0 || p.out_features == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (p.rows == 1) return launch_few_rows<T, 1>(p, native(stream));
    launch_few_rows<T, kFewRows>(p, native(stream));
  });
}

void linear_tiles(const LinearParams& p, void*, Stream stream) {
  if (p.rows == 0 || p.out_features == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const cudaStream_t s = native(stream);
    const dim3 grid(static_cast<unsigned>(ceil_div(p.out_features, kTileN)),
                    static_cast<unsigned>(ceil_div(p.rows, kTileM)));
    if (p.stride_weight_in == 1) {
      launch("linear", gemm_kernel<T, true>, {grid, kGemmThreads, 0, s}, p);
    } else {
      launch("linear", gemm_kernel<T, false>, {grid, kGemmThreads, 0, s}, p);
    }
  });
}

}  // namespace flashkernel::cuda
