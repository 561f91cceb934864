// LayerNorm and RMSNorm forward with an optional fused residual add: one block (or warp) per row, one pass over memory.
// The row stays in registers between the load and the store, so the variance is a true second pass at no extra bytes.
// Bound by memory: reads x (and residual), writes out (and residual_out).
#include "cuda/generic/kernels.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/norm_row.cuh"
#include "cuda/tile/turn.cuh"

namespace flashkernel::cuda {
namespace {

template <class T, int kThreads, int kRowsPerBlock, int kVectors, int N, bool kPassing>
__global__ void __launch_bounds__(kThreads* kRowsPerBlock) norm_kernel(const NormParams p) {
  [[maybe_unused]] __shared__ float scratch[kRowsPerBlock][kThreads / kWarp];
  take_turn();
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.y;
  if (kRowsPerBlock > 1 && row >= p.rows) return;  // whole warps: rows share a block only when a row is one warp
  norm_row<T, kThreads, kVectors, N, kPassing>(
      p, row, 0, p.features, [&](float value) { return block_reduce<kThreads>(value, scratch[threadIdx.y], Sum{}); });
}

template <class T, int kThreads, int kRowsPerBlock, int kVectors, int N, bool kPassing>
void launch_instance(const NormParams& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(p.rows, kRowsPerBlock));
  launch("norm", norm_kernel<T, kThreads, kRowsPerBlock, kVectors, N, kPassing>,
         {blocks, dim3(kThreads, kRowsPerBlock), 0, stream, true}, p);
}

/// f(threads, rows a block, vectors a thread, whether rows pass by the caches), as constants. Many rows of 16-bit
/// elements have shapes of their own (an H200, docs/kernels/cuda_memory_bound.md), others those of tile/row.cuh.
template <class T, class F>
void with_norm_shape(const NormParams& p, F f) {
  constexpr int N = kVectorElements<T>;
  const std::int64_t vectors = p.features / N;
  const int num_sms = cuda_device_properties(p.device.index).num_sms;
  if constexpr (N == 8) {
    const bool many = p.rows >= 4 * static_cast<std::int64_t>(num_sms);
    if (many && vectors > 64 && vectors <= 96) {
      if (p.residual) return f(Constant<96>{}, Constant<1>{}, Constant<1>{}, Constant<1>{});
      return f(Constant<32>{}, Constant<4>{}, Constant<3>{}, Constant<0>{});
    }
  }
  with_row_shape<N>(vectors, p.rows, num_sms,
                    [&](auto threads, auto rows, auto held) { f(threads, rows, held, Constant<0>{}); });
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
    if (!norm_rows_are_vectors(p)) return launch_instance<T, 256, 1, 0, 1, false>(p, native(stream));
    with_norm_shape<T>(p, [&](auto threads, auto rows, auto vectors, auto passing) {
      launch_instance<T, threads.value, rows.value, vectors.value, kVectorElements<T>, passing.value != 0>(
          p, native(stream));
    });
  });
}

}  // namespace flashkernel::cuda
