// Softmax and log-softmax along one dim, forward and backward: one block (or warp) per row, the row in registers where
// its elements are neighbours. A row of -inf only gives 0 (log: -inf); a NaN makes its row NaN.
#include "cuda/generic/kernels.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/softmax_row.cuh"

namespace flashkernel::cuda {
namespace {

template <class T, int kThreads, int kRowsPerBlock, int kVectors, int N>
__global__ void __launch_bounds__(kThreads* kRowsPerBlock) softmax_kernel(const SoftmaxParams p) {
  [[maybe_unused]] __shared__ float scratch[kRowsPerBlock][kThreads / kWarp];
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.y;
  if (kRowsPerBlock > 1 && row >= p.rows) return;
  softmax_row<T, kThreads, kVectors, N>(p, row, 0, p.columns, [&](float value, auto op) {
    return block_reduce<kThreads>(value, scratch[threadIdx.y], op);
  });
}

template <class T, int kThreads, int kRowsPerBlock, int kVectors, int N>
__global__ void __launch_bounds__(kThreads* kRowsPerBlock) softmax_bwd_kernel(const SoftmaxBackwardParams p) {
  [[maybe_unused]] __shared__ float scratch[kRowsPerBlock][kThreads / kWarp];
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.y;
  if (kRowsPerBlock > 1 && row >= p.rows) return;
  softmax_bwd_row<T, kThreads, kVectors, N, kThreads <= 512>(p, row, 0, p.columns, [&](float value, auto op) {
    return block_reduce<kThreads>(value, scratch[threadIdx.y], op);
  });
}

}  // namespace

Verdict softmax_supports(const SoftmaxParams& p) {
  return p.rows <= 0x7fffffff ? Verdict::ok() : Verdict("more rows than a grid has blocks");
}

void softmax(const SoftmaxParams& p, void*, Stream stream) {
  if (p.rows == 0 || p.columns == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  const bool vectors = rows_are_vectors(p);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = kVectorElements<T>;
    if (!vectors) {
      launch("softmax", softmax_kernel<T, 128, 1, 0, 1>, {static_cast<unsigned>(p.rows), 128, 0, native(stream)}, p);
    } else {
      with_row_shape<N>(p.columns / N, p.rows, cuda_device_properties(p.device.index).num_sms,
                        [&](auto threads, auto rows, auto held) {
                          launch("softmax", softmax_kernel<T, threads.value, rows.value, held.value, N>,
                                 {static_cast<unsigned>(ceil_div(p.rows, rows.value)), dim3(threads.value, rows.value),
                                  0, native(stream)},
                                 p);
                        });
    }
  });
}

Verdict softmax_bwd_supports(const SoftmaxBackwardParams& p) {
  return p.rows <= 0x7fffffff ? Verdict::ok() : Verdict("more rows than a grid has blocks");
}

void softmax_bwd(const SoftmaxBackwardParams& p, void*, Stream stream) {
  if (p.rows == 0 || p.columns == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  const bool vectors = rows_are_vectors(p);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = kVectorElements<T>;
    if (!vectors) {
      launch("softmax_bwd", softmax_bwd_kernel<T, 128, 1, 0, 1>,
             {static_cast<unsigned>(p.rows), 128, 0, native(stream)}, p);
    } else {
      with_row_shape<N>(p.columns / N, p.rows, cuda_device_properties(p.device.index).num_sms,
                        [&](auto threads, auto rows, auto held) {
                          launch("softmax_bwd", softmax_bwd_kernel<T, threads.value, rows.value, held.value, N>,
                                 {static_cast<unsigned>(ceil_div(p.rows, rows.value)), dim3(threads.value, rows.value),
                                  0, native(stream)},
                                 p);
                        });
    }
  });
}

}  // namespace flashkernel::cuda
