// The end of norm backward: partial column sums of chunks of rows become grad_weight and grad_bias. Launched by
// generic/norm_bwd.cu and sm90a/norm_bwd_rows.cu. Invariant: the order of the additions follows from the number of
// chunks and of columns alone.
#pragma once

#include <cstdint>

#include "cuda/tile/convert.cuh"
#include "cuda/tile/row.cuh"
#include "cuda/pipeline/turn.cuh"
#include "cuda/tile/vector.cuh"
#include "ops/norm_params.hpp"

namespace flashkernel::cuda::norm_bwd_combine {

inline constexpr int kThreads = 32;  // side by side

/// kLanesOf lanes share a column, a thread takes kWidthOf neighbouring columns.
template <int kLanesOf, int kWidthOf>
struct Lanes {
  static constexpr int kLanes = kLanesOf, kWidth = kWidthOf;
};

/// f(Lanes): 32 of one column, or 4 where many columns fill a GPU by themselves and a lane still adds few chunks, five
/// batches of loads at most. Four columns a thread where a quarter of the threads is enough: an H200 takes 2 us less at
/// 131072 columns, but 3 more at 16384.
template <class F>
void with_lanes(std::int64_t features, int chunks, F f) {
  if (features >= 8192 && chunks <= 4 * 40) {
    if (features >= 131072 && features % 4 == 0) return f(Lanes<4, 4>{});
    return f(Lanes<4, 1>{});
  }
  f(Lanes<32, 1>{});
}

template <class L>
dim3 grid(const NormBackwardParams& p, L) {
  constexpr int kColumns = kThreads * L::kWidth;
  const unsigned sums = (p.grad_weight ? 1 : 0) + (p.grad_bias ? 1 : 0);
  return dim3(static_cast<unsigned>((p.features + kColumns - 1) / kColumns), sums);
}

/// A block takes kThreads * kWidth columns, by y of grad_weight or of grad_bias; lane y of kLanes adds a run of chunks,
/// then the lanes are added in order. `partial`: [chunks, features] of the weight's, of the bias's, each where it is
/// wanted.
template <class L>
__global__ void __launch_bounds__(kThreads* L::kLanes)
    kernel(const NormBackwardParams p, int chunks, const float* partial_weight, const float* partial_bias) {
  constexpr int kLanes = L::kLanes, kWidth = L::kWidth;
  __shared__ float sums[kLanes][kWidth][kThreads];
  take_turn();
  const bool of_weight = blockIdx.y == 0 && partial_weight;
  const float* const partial = of_weight ? partial_weight : partial_bias;
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  const int run = (chunks + kLanes - 1) / kLanes;
  const int first = static_cast<int>(threadIdx.y) * run, last = min(chunks, first + run);
  float sum[kWidth] = {};
  if (column < p.features) {
#pragma unroll 8
    for (int chunk = first; chunk < last; ++chunk) {
      float more[kWidth];
      load_wide(more, partial + chunk * p.features + column);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] += more[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sums[threadIdx.y][i][threadIdx.x] = sum[i];
  __syncthreads();
  if (threadIdx.y > 0 || column >= p.features) return;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    float total = 0.0f;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) total += sums[lane][i][threadIdx.x];
    if (of_weight) {
      store_typed(p.grad_weight, p.grad_weight_dtype, column + i, total);
    } else {
      store_typed(p.grad_bias, p.grad_bias_dtype, column + i, total);
    }
  }
}

}  // namespace flashkernel::cuda::norm_bwd_combine
