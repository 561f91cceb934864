// LayerNorm and RMSNorm forward with an optional fused residual add: one block (or warp) per row, one pass over memory.
// The row stays in registers between the load and the store, so the variance is a true second pass at no extra bytes.
// Bound by memory: reads x (and residual), writes out (and residual_out).
#include <type_traits>

#include "cuda/generic/kernels.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/norm_row.cuh"
#include "cuda/tile/turn.cuh"

namespace flashkernel::cuda {
namespace {

/// kResident: threads that a multiprocessor shall hold, which sets their registers.
template <class T, int kThreads, int kRowsPerBlock, int kVectors, int kResident, bool kWeightsFirst>
__global__ void __launch_bounds__(kThreads* kRowsPerBlock, blocks_of(kResident, kThreads* kRowsPerBlock))
    held_kernel(const NormParams p) {
  __shared__ float scratch[kRowsPerBlock][2][kThreads / kWarp];
  take_turn();
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.y;
  if (kRowsPerBlock > 1 && row >= p.rows) return;  // whole warps: rows share a block only when a row is one warp
  norm_held_row<T, kThreads, kVectors, kWeightsFirst>(p, row, scratch[threadIdx.y]);
}

template <class T, int kThreads, int kRowsPerBlock, int kVectors, int N>
__global__ void __launch_bounds__(kThreads* kRowsPerBlock) norm_kernel(const NormParams p) {
  [[maybe_unused]] __shared__ float scratch[kRowsPerBlock][kThreads / kWarp];
  take_turn();
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.y;
  if (kRowsPerBlock > 1 && row >= p.rows) return;
  norm_row<T, kThreads, kVectors, N>(
      p, row, [&](float value) { return block_reduce<kThreads>(value, scratch[threadIdx.y], Sum{}); });
}

/// f(kernel, threads, rows a block) of held_kernel for rows of `vectors` vectors, as an H200 found them fastest
/// (docs/kernels/cuda_memory_bound.md). False where norm_kernel was as fast.
template <class T, class F>
bool with_held_kernel(const NormParams& p, std::int64_t vectors, int num_sms, F f) {
  constexpr int N = kVectorElements<T>;
  constexpr int kMany = std::is_same_v<T, __half> ? 1280 : 1536;  // threads; fp16 needs the registers of fewer
  const bool few = p.rows < 4 * static_cast<std::int64_t>(num_sms);
  if (few && vectors <= 128) return f(held_kernel<T, 128, 1, 1, 1536, true>, 128, 1), true;
  if (few && vectors <= 512) return f(held_kernel<T, 256, 1, 2, 1024, true>, 256, 1), true;
  if (vectors <= 64 || vectors > 2048 || (p.features > 8192 && (few || !p.residual))) return false;
  if (p.residual) {  // twice the loads of a row want more threads instead of more registers
    if (vectors <= 96) return f(held_kernel<T, 96, 1, 1, 2048, false>, 96, 1), true;
    if (vectors <= 128) return f(held_kernel<T, 128, 1, 1, 2048, false>, 128, 1), true;
    if (vectors <= 256) return f(held_kernel<T, 256, 1, 1, 2048, false>, 256, 1), true;
    if (vectors <= 512) return f(held_kernel<T, 512, 1, 1, 2048, false>, 512, 1), true;
    if (vectors <= 1024) return f(held_kernel<T, 512, 1, 2, 1024, true>, 512, 1), true;
  } else {
    if (vectors <= 96) return f(held_kernel<T, 32, 4, 3, 1024, false>, 32, 4), true;
    if (vectors <= 128) return false;
    if (vectors <= 192) return f(held_kernel<T, 96, 1, 2, 1280, false>, 96, 1), true;
    if (vectors <= 256) return f(held_kernel<T, 128, 1, 2, kMany, false>, 128, 1), true;
    if (vectors <= 512) {
      if (N == 8 && p.kind == NormKind::kLayerNorm) return false;
      return f(held_kernel<T, 256, 1, 2, kMany, false>, 256, 1), true;
    }
    if (vectors <= 1024) return f(held_kernel<T, 256, 1, 4, 1024, false>, 256, 1), true;
  }
  return f(held_kernel<T, 512, 1, 4, 1024, false>, 512, 1), true;
}

/// The shapes of with_row_shape that the above leaves: rows of up to 64 or 97 to 128 vectors, LayerNorm of 257 to 512
/// vectors of 16-bit elements, and more than 8192 features but some with a residual. norm_kernel is not compiled for
/// the others.
template <int N>
constexpr bool left_to_norm_kernel(int threads, int held) {
  return threads == 32 || threads == 1024 || (N == 8 && held == 4 && (threads == 128 || threads == 512));
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
    const auto run = [&](auto kernel, int threads, int rows) {
      const auto blocks = static_cast<unsigned>(ceil_div(p.rows, rows));
      launch("norm", kernel,
             {blocks, dim3(static_cast<unsigned>(threads), static_cast<unsigned>(rows)), 0, native(stream), true}, p);
    };
    if (!norm_rows_are_vectors(p)) return run(norm_kernel<T, 256, 1, 0, 1>, 256, 1);
    const int num_sms = cuda_device_properties(p.device.index).num_sms;
    if (with_held_kernel<T>(p, p.features / N, num_sms, run)) return;
    with_row_shape<N>(p.features / N, p.rows, num_sms, [&](auto threads, auto rows, auto held) {
      if constexpr (left_to_norm_kernel<N>(threads.value, held.value))
        run(norm_kernel<T, threads.value, rows.value, held.value, N>, threads.value, rows.value);
      else  // walked, as any row can be
        run(norm_kernel<T, 1024, 1, 0, N>, 1024, 1);
    });
  });
}

}  // namespace flashkernel::cuda
