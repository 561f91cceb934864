// One row of attention by one warp in plain fp32. The tensor-core kernels of fp32 accuracy fall back on it for blocks
// whose data or results are not finite. It is slow, and right whatever the rows hold, since it multiplies visible pairs
// only.
#pragma once

#include "cuda/attention/score.cuh"
#include "cuda/attention/key_range.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda {

/// The dot product of two rows, in every lane; a null row holds zeros.
__device__ inline float warp_dot(const float* a, const float* b, int dim) {
  float sum = 0.0f;
  for (int d = threadIdx.x % kWarp; d < dim; d += kWarp) sum = fmaf(a[d], b ? b[d] : 0.0f, sum);
  return warp_reduce(sum, Sum{});
}

/// Output and LSE of query i; head_dim_v is at most kVDim. `row_of_k(j)` and `row_of_v(j)` are rows of keys and values,
/// or null for zeros.
template <int kVDim, class RowOfK, class RowOfV>
__device__ void plain_forward_row(const AttentionParams& p, const ScoreContext& at, const KeyRange& range, int i,
                                  RowOfK row_of_k, RowOfV row_of_v) {
  const int lane = threadIdx.x % kWarp, dim_v = static_cast<int>(p.head_dim_v);
  const float* const q = static_cast<const float*>(p.q) + p.q_offset(at.b, at.h, i);
  SoftmaxState state;
  float out[kVDim / kWarp] = {};
  for (int j = range.first(i); j < range.last(i); ++j) {
    const float score = modified_score(p, at, i, j, warp_dot(q, row_of_k(j), static_cast<int>(p.head_dim)));
    if (p.hides_by_score() && score == -INFINITY) continue;  // it hides the key and whatever its value holds
    const float maximum = fmaxf(state.maximum, score), shift = SoftmaxState::shift(maximum);
    const float factor = expf(state.maximum - shift), probability = expf(score - shift);
    state.maximum = maximum;
    state.sum = state.sum * factor + probability;
    const float* const v = row_of_v(j);
#pragma unroll
    for (int c = 0; c < kVDim / kWarp; ++c) {
      const int column = lane + c * kWarp;
      if (column < dim_v) out[c] = out[c] * factor + probability * (v ? v[column] : 0.0f);
    }
  }
  float lse;
  const float factor = state.finish(p.sinks, at.h, &lse);
  if (p.lse && lane == 0) p.lse[p.lse_offset(at.b, at.h, i)] = lse;
  float* const to = static_cast<float*>(p.out) + p.out_offset(at.b, at.h, i);
#pragma unroll
  for (int c = 0; c < kVDim / kWarp; ++c)
    if (lane + c * kWarp < dim_v) to[lane + c * kWarp] = factor == 0.0f ? 0.0f : out[c] * factor;
}

}  // namespace flashkernel::cuda
