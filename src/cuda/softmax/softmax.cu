// Softmax and log-softmax along one dim, forward and backward: one block (or warp) per row, the row in registers where
// its elements are neighbours. A row of -inf only gives 0 (log: -inf); a NaN makes its row NaN.
#include <type_traits>

#include "cuda/softmax/softmax.hpp"
#include "cuda/host/launch_rows.cuh"
#include "cuda/row_costs.hpp"
#include "cuda/tile/softmax_row.cuh"
#include "cuda/pipeline/turn.cuh"

namespace flashkernel::cuda {
namespace {

// A row's exponentials are worked out a second time where that lets a multiprocessor hold a block more.
template <class T, int kThreads, int kVectors>
inline constexpr bool kAgain = sizeof(T) == 2 && kThreads == 512 && kVectors == 4;

template <class T, int kThreads, int kRowsPerBlock, int kVectors, int N>
__global__ void __launch_bounds__(kThreads* kRowsPerBlock,
                                  kAgain<T, kThreads, kVectors> ? blocks_of(1536, kThreads) : 0)
    softmax_kernel(const SoftmaxParams p) {
  [[maybe_unused]] __shared__ float2 scratch[kRowsPerBlock][kThreads / kWarp];
  take_turn();
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.y;
  if (kRowsPerBlock > 1 && row >= p.rows) return;
  if constexpr (kAgain<T, kThreads, kVectors>) {
    softmax_held_row_again<T, kThreads, kVectors>(p, row, scratch[0]);
  } else if constexpr (kVectors > 0 && kThreads * kVectors * N <= 16384) {
    softmax_held_row<T, kThreads, kVectors>(p, row, scratch[threadIdx.y]);
  } else {
    softmax_row<T, kThreads, kVectors, N>(p, row, 0, p.columns, [&](float value, auto op) {
      return block_reduce<kThreads>(value, &scratch[threadIdx.y][0].x, op);
    });
  }
}

template <class T, int kThreads, int kRowsPerBlock, int kVectors, int N>
__global__ void __launch_bounds__(kThreads* kRowsPerBlock) softmax_bwd_kernel(const SoftmaxBackwardParams p) {
  [[maybe_unused]] __shared__ float scratch[kRowsPerBlock][kThreads / kWarp];
  take_turn();
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.y;
  if (kRowsPerBlock > 1 && row >= p.rows) return;
  if constexpr (kVectors > 0 && kThreads <= 512) {  // which have 128 registers each
    softmax_bwd_held_row<T, kThreads, kVectors>(p, row, scratch[threadIdx.y]);
  } else {
    softmax_bwd_row<T, kThreads, kVectors, N>(p, row, 0, p.columns, [&](float value, auto op) {
      return block_reduce<kThreads>(value, scratch[threadIdx.y], op);
    });
  }
}

/// Long rows that are on no 16-byte boundary. Shorter ones have too little for a block of as many threads.
constexpr int kShiftedThreads = 512;
constexpr std::int64_t kShortestShifted = 4096, kMostShifted = 0x40000000;  // 32 bits count them, and a batch more
template <class T>
__global__ void __launch_bounds__(kShiftedThreads, blocks_of(2048, kShiftedThreads))
    softmax_shifted_kernel(const SoftmaxParams p) {
  __shared__ float2 scratch[kShiftedThreads / kWarp];
  take_turn();
  softmax_shifted_row<T, kShiftedThreads>(p, blockIdx.x, scratch);
}
template <class T>
__global__ void __launch_bounds__(kShiftedThreads, blocks_of(1536, kShiftedThreads))
    softmax_bwd_shifted_kernel(const SoftmaxBackwardParams p) {
  __shared__ float scratch[kShiftedThreads / kWarp];
  take_turn();
  softmax_bwd_shifted_row<T, kShiftedThreads>(p, blockIdx.x, scratch);
}

/// walked: read again for the results, else held in registers. kernel_of(T{}, threads, rows a block, vectors a thread,
/// elements of a vector), all but the first as constants.
template <class P, class KernelOf>
Plan plan_rows(const P& p, bool walked, const DeviceFacts& facts, KernelOf kernel_of) {
  BlockRows<P> plan;
  const bool vectors = rows_are_vectors(p, facts.invariant);
  visit_floating(p.dtype, [&](auto zero) {
    constexpr int N = kVectorElements<decltype(zero)>;
    const auto take = [&](auto threads, auto rows, auto held, auto elements) {
      plan = {kernel_of(zero, threads, rows, held, elements), threads.value, rows.value};
    };
    // Not in the invariant mode: whether all arrays lie alike may differ between a row and the row among others.
    if (!vectors && !facts.invariant && p.columns >= kShortestShifted && p.columns <= kMostShifted &&
        rows_begin_alike(p)) {
      using T = decltype(zero);
      if constexpr (std::is_same_v<P, SoftmaxParams>)
        plan = {softmax_shifted_kernel<T>, kShiftedThreads, 1};
      else
        plan = {softmax_bwd_shifted_kernel<T>, kShiftedThreads, 1};
      return;
    }
    if (!vectors) return take(Constant<128>{}, Constant<1>{}, Constant<0>{}, Constant<1>{});
    if (walked) return take(Constant<1024>{}, Constant<1>{}, Constant<0>{}, Constant<N>{});
    const std::int64_t planned_for = rows_planned_for(p.rows, facts);
    const auto take_vectors = [&](auto threads, auto rows, auto held) { take(threads, rows, held, Constant<N>{}); };
    if constexpr (std::is_same_v<P, SoftmaxParams>) {
      with_held_shape<N>(p.columns / N, planned_for, facts.num_sms, take_vectors);
    } else {  // one vector of each row a thread, where a warp would hold four
      const std::int64_t held = p.columns / N;
      if (held > 96 && held <= 128) return take_vectors(Constant<128>{}, Constant<1>{}, Constant<1>{});
      with_row_shape<N>(held, planned_for, facts.num_sms, take_vectors);
    }
  });
  return Plan::of(plan);
}

}  // namespace

namespace {

template <class P>
Verdict walked_supports(const P& p) {
  return p.rows <= 0x7fffffff ? Verdict::ok() : Verdict("more rows than a grid has blocks");
}
template <class P>
bool walks_alike(const P& p) {
  return row_bytes(p.dtype, p.columns) % 16 != 0 || rows_are_vectors(p, true);
}
template <class P>
Verdict held_supports(const P& p) {
  if (!is_held_row(p.dtype, p.columns)) return "a block holds rows of up to 64 KB, of fp32 128 KB";
  if (!rows_are_vectors(p)) return "needs neighbouring elements and rows on 16-byte boundaries";
  return walked_supports(p);
}
Plan plan(const SoftmaxParams& p, bool walked, const DeviceFacts& facts) {
  return plan_rows(p, walked, facts, [](auto zero, auto threads, auto rows, auto held, auto elements) {
    return softmax_kernel<decltype(zero), threads.value, rows.value, held.value, elements.value>;
  });
}
Plan plan(const SoftmaxBackwardParams& p, bool walked, const DeviceFacts& facts) {
  return plan_rows(p, walked, facts, [](auto zero, auto threads, auto rows, auto held, auto elements) {
    return softmax_bwd_kernel<decltype(zero), threads.value, rows.value, held.value, elements.value>;
  });
}
template <class P>
void run(const char* name, const P& p, const Plan& plan, Stream stream) {
  if (p.rows == 0 || p.columns == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  launch_block_rows(name, plan.as<BlockRows<P>>(), p, stream);
}

}  // namespace

Verdict softmax_held_supports(const SoftmaxParams& p) { return held_supports(p); }
Plan plan_softmax_held(const SoftmaxParams& p, const DeviceFacts& facts) { return plan(p, false, facts); }
Verdict softmax_walked_supports(const SoftmaxParams& p) { return walked_supports(p); }
Plan plan_softmax_walked(const SoftmaxParams& p, const DeviceFacts& facts) { return plan(p, true, facts); }
bool softmax_walks_alike(const SoftmaxParams& p) { return walks_alike(p); }
void softmax(const SoftmaxParams& p, const Plan& plan, void*, Stream stream) { run("softmax", p, plan, stream); }

Verdict softmax_bwd_held_supports(const SoftmaxBackwardParams& p) { return held_supports(p); }
Plan plan_softmax_bwd_held(const SoftmaxBackwardParams& p, const DeviceFacts& facts) { return plan(p, false, facts); }
Verdict softmax_bwd_walked_supports(const SoftmaxBackwardParams& p) { return walked_supports(p); }
Plan plan_softmax_bwd_walked(const SoftmaxBackwardParams& p, const DeviceFacts& facts) { return plan(p, true, facts); }
bool softmax_bwd_walks_alike(const SoftmaxBackwardParams& p) { return walks_alike(p); }
void softmax_bwd(const SoftmaxBackwardParams& p, const Plan& plan, void*, Stream stream) {
  run("softmax_bwd", p, plan, stream);
}

}  // namespace flashkernel::cuda
