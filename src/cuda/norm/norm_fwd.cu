// LayerNorm and RMSNorm forward with an optional fused residual add. One warp or one thread block computes a row.
// The kernels are bound by memory: each reads x (and residual) once and writes out (and residual_out) once. A row stays
// in registers between its load and its store, so that the variance is computed about the mean without a second read.
//
// Three kernels share the work:
//   plain_kernel  rows without a residual, whose dtypes and kind of norm are known at compile time
//   held_kernel   rows with any of the options, held in registers
//   norm_kernel   every other row: not aligned to vectors, or too long or too short for the others
// Two rows of the table: rows that a block holds, and rows that it walks, which norm_kernel reads again.
// with_plain_kernel and with_held_kernel choose among them and their block sizes by what was measured on an H200
// (lab/notebooks/cuda_memory_bound.md).
#include <type_traits>

#include "cuda/norm/norm.hpp"
#include "cuda/host/launch_rows.cuh"
#include "cuda/norm/norm_row.cuh"
#include "cuda/row_costs.hpp"
#include "cuda/pipeline/turn.cuh"

namespace flashkernel::cuda {
namespace {

/// kResident: the threads that a multiprocessor should hold at a time. It limits the registers of a thread.
template <class T, int kThreads, int kRowsPerBlock, int kVectors, int kResident, bool kWeightsFirst>
__global__ void __launch_bounds__(kThreads* kRowsPerBlock, blocks_of(kResident, kThreads* kRowsPerBlock))
    held_kernel(const NormParams p) {
  __shared__ float scratch[kRowsPerBlock][2][kThreads / kWarp];
  take_turn();
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.y;
  if (kRowsPerBlock > 1 && row >= p.rows) return;  // whole warps leave: rows share a block only if each is one warp
  norm_held_row<T, kThreads, kVectors, kWeightsFirst>(p, row, scratch[threadIdx.y]);
}

/// For rows without a residual. Options that are fixed at compile time save registers: a third more threads fit.
template <class T, class W, bool kLayerNorm, int kThreads, int kRowsPerBlock, int kVectors, int kResident,
          bool kWeightsFirst>
__global__ void __launch_bounds__(kThreads* kRowsPerBlock, blocks_of(kResident, kThreads* kRowsPerBlock))
    plain_kernel(const NormParams p) {
  __shared__ float scratch[kRowsPerBlock][2][kThreads / kWarp];
  take_turn();
  const unsigned team = kRowsPerBlock > 1 ? threadIdx.y : 0;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + team;
  if (kRowsPerBlock > 1 && row >= p.rows) return;
  norm_plain_row<T, W, kLayerNorm, kThreads, kVectors, kWeightsFirst>(p, row, scratch[team]);
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

/// Calls f(kernel, threads, rows per block) with the plain_kernel for rows of `vectors` vectors, and returns true,
/// where that was faster than held_kernel on an H200. Returns false otherwise.
template <class T, class W, bool kLayerNorm, class F>
bool with_plain_kernel(std::int64_t vectors, F f) {
  if constexpr (sizeof(T) == 2) {
    constexpr bool kSame = std::is_same_v<T, W>;  // weights in fp32 take twice the registers
    if (vectors > 96 && vectors <= 128) return f(plain_kernel<T, W, kLayerNorm, 32, 4, 4, 1024, kSame>, 32, 4), true;
    if constexpr (kLayerNorm && kSame) {
      if (vectors > 64 && vectors <= 96) return f(plain_kernel<T, W, true, 32, 4, 3, 1024, true>, 32, 4), true;
    }
    if constexpr (kLayerNorm) {
      if (vectors > 192 && vectors <= 256) return f(plain_kernel<T, W, true, 64, 1, 4, 1152, false>, 64, 1), true;
      if (vectors > 256 && vectors <= 512) return f(plain_kernel<T, W, true, 128, 1, 4, 1152, false>, 128, 1), true;
      if (vectors > 512 && vectors <= 1024) return f(plain_kernel<T, W, true, 256, 1, 4, 1024, false>, 256, 1), true;
    } else {
      constexpr int kResident = kSame ? 2048 : 1536;
      if (vectors > 256 && vectors <= 512)
        return f(plain_kernel<T, W, false, 256, 1, 2, kResident, false>, 256, 1), true;
    }
  }
  if (vectors > 1024 && vectors <= 2048) {
    constexpr int kResident = kLayerNorm && sizeof(T) == 2 && sizeof(W) == 2 ? 1536 : 1024;
    return f(plain_kernel<T, W, kLayerNorm, 512, 1, 4, kResident, false>, 512, 1), true;
  }
  if (vectors <= 2048 || vectors > 4096) return false;
  if constexpr (sizeof(T) == 4 && kLayerNorm) {
    f(plain_kernel<T, W, true, 512, 1, 8, 1024, false>, 512, 1);
  } else {
    constexpr int kResident = sizeof(T) == 4 ? 2048 : 1024;
    f(plain_kernel<T, W, kLayerNorm, 1024, 1, 4, kResident, false>, 1024, 1);
  }
  return true;
}

/// Calls f with the plain_kernel or held_kernel for the call. Returns false where norm_kernel was as fast.
template <class T, class F>
bool with_held_kernel(const NormParams& p, std::int64_t vectors, std::int64_t rows, int num_sms, F f) {
  constexpr int kMany = std::is_same_v<T, __half> ? 1280 : 1536;  // threads; fp16 needs the registers of fewer
  const bool few = rows < 4 * static_cast<std::int64_t>(num_sms);
  if (few && vectors <= 128) return f(held_kernel<T, 128, 1, 1, 1536, true>, 128, 1), true;
  if (few && vectors <= 512) return f(held_kernel<T, 256, 1, 2, 1024, true>, 256, 1), true;
  if (vectors <= 64 || (few && p.features > 8192)) return false;
  if (!p.residual) {
    const auto plain = [&](auto weight) {
      using W = decltype(weight);
      return p.kind == NormKind::kLayerNorm ? with_plain_kernel<T, W, true>(vectors, f)
                                            : with_plain_kernel<T, W, false>(vectors, f);
    };
    if (weights_are(p, p.dtype) ? plain(T{}) : weights_are(p, DType::kFloat32) && plain(0.0f)) return true;
    if (vectors <= 96) return f(held_kernel<T, 32, 4, 3, 1024, false>, 32, 4), true;
    if (vectors <= 128) return false;
    if (vectors <= 192) return f(held_kernel<T, 96, 1, 2, 1280, false>, 96, 1), true;
    if (vectors <= 256) return f(held_kernel<T, 128, 1, 2, kMany, false>, 128, 1), true;
    if constexpr (sizeof(T) == 4) {
      if (vectors <= 512) return f(held_kernel<T, 256, 1, 2, kMany, false>, 256, 1), true;
    }
    if (vectors <= 1024) return f(held_kernel<T, 256, 1, 4, 1024, false>, 256, 1), true;
    return false;
  }
  // A residual doubles the loads of a row: more threads help here, more registers do not.
  if (vectors <= 96) return f(held_kernel<T, 96, 1, 1, 2048, false>, 96, 1), true;
  if (vectors <= 128) return f(held_kernel<T, 128, 1, 1, 2048, false>, 128, 1), true;
  if (vectors <= 256) return f(held_kernel<T, 256, 1, 1, 2048, false>, 256, 1), true;
  if (vectors <= 512) return f(held_kernel<T, 512, 1, 1, 2048, false>, 512, 1), true;
  if (vectors <= 1024) return f(held_kernel<T, 512, 1, 2, 1024, true>, 512, 1), true;
  if (vectors <= 2048) return f(held_kernel<T, 512, 1, 4, 1024, false>, 512, 1), true;
  return false;
}

/// Whether norm_kernel is compiled for a shape of with_row_shape. The functions above leave it rows of up to 64
/// vectors, fp32 rows of 97 to 128 vectors, and long rows (a few rows of over 8192 features, or rows of over 2048
/// vectors with a residual).
constexpr bool left_to_norm_kernel(int threads) { return threads == 32 || threads == 1024; }

}  // namespace

namespace {

Plan plan_of(void (*kernel)(NormParams), int threads, int rows) {
  return Plan::of(BlockRows<NormParams>{kernel, threads, rows});
}

}  // namespace

void norm_fwd(const NormParams& p, const Plan& plan, void*, Stream stream) {
  if (p.rows == 0 || p.features == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  launch_block_rows("norm", plan.as<BlockRows<NormParams>>(), p, stream);
}

bool norm_walks_alike(const NormParams& p) {
  return row_bytes(p.dtype, p.features) % 16 != 0 || norm_rows_are_vectors(p);
}

Verdict norm_walked_supports(const NormParams& p) {
  if (p.is_quantized()) return kWrites8Bits;
  return p.rows <= 0x7fffffff ? Verdict::ok() : Verdict("more rows than a grid has blocks");
}

Plan plan_norm_walked(const NormParams& given, const DeviceFacts& facts) {
  NormParams p = given;
  p.rows = rows_planned_for(p.rows, facts);
  Plan plan;
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    plan = norm_rows_are_vectors(p) ? plan_of(norm_kernel<T, 1024, 1, 0, kVectorElements<T>>, 1024, 1)
                                    : plan_of(norm_kernel<T, 256, 1, 0, 1>, 256, 1);
  });
  return plan;
}

Verdict norm_held_supports(const NormParams& p) {
  if (!is_held_row(p.dtype, p.features)) return "a block holds rows of up to 64 KB, of fp32 128 KB";
  if (!norm_rows_are_vectors(p)) return "needs rows and weights on 16-byte boundaries";
  return norm_walked_supports(p);
}

Plan plan_norm_held(const NormParams& p, const DeviceFacts& facts) {
  Plan plan;
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = kVectorElements<T>;
    const auto take = [&](void (*kernel)(NormParams), int threads, int rows) { plan = plan_of(kernel, threads, rows); };
    const std::int64_t planned_for = rows_planned_for(p.rows, facts);
    if (with_held_kernel<T>(p, p.features / N, planned_for, facts.num_sms, take)) return;
    with_row_shape<N>(p.features / N, planned_for, facts.num_sms, [&](auto threads, auto rows, auto held) {
      if constexpr (left_to_norm_kernel(threads.value))
        take(norm_kernel<T, threads.value, rows.value, held.value, N>, threads.value, rows.value);
      else  // reads the row in steps, which works for any length
        take(norm_kernel<T, 1024, 1, 0, N>, 1024, 1);
    });
  });
  return plan;
}

}  // namespace flashkernel::cuda
