// The end of norm backward: partial column sums of chunks of rows become grad_weight and grad_bias. Launched by
// generic/norm_bwd.cu and sm90a/norm_bwd_rows.cu. Invariant: the order of the additions follows from the number of
// chunks and of columns alone.
#pragma once

#include <cstdint>

#include "cuda/tile/convert.cuh"
#include "cuda/tile/row.cuh"
#include "ops/norm_params.hpp"

namespace flashkernel::cuda::norm_bwd_combine {

inline constexpr int kColumns = 32;

/// f(Constant<lanes of a column>): 32, or 4 where many columns fill a GPU by themselves and a lane still adds few
/// chunks, five batches of loads at most.
template <class F>
void with_lanes(std::int64_t features, int chunks, F f) {
  if (features >= 8192 && chunks <= 4 * 40) return f(Constant<4>{});
  f(Constant<32>{});
}

inline dim3 grid(const NormBackwardParams& p) {
  const unsigned sums = (p.grad_weight ? 1 : 0) + (p.grad_bias ? 1 : 0);
  return dim3(static_cast<unsigned>((p.features + kColumns - 1) / kColumns), sums);
}

/// A block takes kColumns columns, by y of grad_weight or of grad_bias; lane y of kLanes adds a run of chunks, then the
/// lanes are added in order. `partial`: [chunks, features] of the weight's, of the bias's, each where it is wanted.
template <int kLanes>
__global__ void __launch_bounds__(kColumns* kLanes)
    kernel(const NormBackwardParams p, int chunks, const float* partial_weight, const float* partial_bias) {
  __shared__ float sums[kLanes][kColumns];
  const bool of_weight = blockIdx.y == 0 && partial_weight;
  const float* const partial = of_weight ? partial_weight : partial_bias;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  const int run = (chunks + kLanes - 1) / kLanes;
  const int first = static_cast<int>(threadIdx.y) * run, last = min(chunks, first + run);
  float sum = 0.0f;
  if (column < p.features) {
#pragma unroll 8
    for (int chunk = first; chunk < last; ++chunk) sum += partial[chunk * p.features + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= p.features) return;
  float total = 0.0f;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) total += sums[lane][threadIdx.x];
  if (of_weight) {
    store_typed(p.grad_weight, p.grad_weight_dtype, column, total);
  } else {
    store_typed(p.grad_bias, p.grad_bias_dtype, column, total);
  }
}

}  // namespace flashkernel::cuda::norm_bwd_combine
