// The softmax of the Hopper forward kernel, on a warpgroup's 64 x kBlockN scores in registers: mask, running maximum,
// exp2, row sums. A thread holds rows l / 4 and l / 4 + 8 of its warp's 16 (ptx/wgmma.cuh has the fragment).
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/sm90a/attention_fwd_shape.cuh"
#include "cuda/tile/attention_score.cuh"
#include "cuda/tile/attention_score_fast.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda::sm90a {

/// Of this thread's two rows. `maximum` is of scores as the exponentials take them (before scale_log2), `sum` of this
/// thread's columns only; the four threads of a row meet at the end.
struct RunningRows {
  float maximum[2], sum[2];
  __device__ void clear() {
    maximum[0] = maximum[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
  }
};

/// Scale and softcap of a call that has more than a positive scale; the exponentials then start from finished scores.
template <int kCount>
__device__ inline void modify_scores(float (&score)[kCount], float scale, float softcap) {
  if (softcap > 0.0f) {
    const float inner = scale / softcap;
#pragma unroll
    for (int i = 0; i < kCount; ++i) score[i] = softcap * tanh_exp2(score[i] * inner);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) score[i] *= scale;
  }
}

/// -inf where row i (and i + 8) does not see a key; `first_key` is the key of this thread's element 0.
template <int kCount>
__device__ inline void mask_scores(float (&score)[kCount], const KeyRange& range, int i, int first_key) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int end = range.last(i + 8 * half) - first_key;
#pragma unroll
    for (int c = 0; c < kCount / 4; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (8 * c + e >= end) score[4 * c + 2 * half + e] = -INFINITY;
    const int begin = range.first(i + 8 * half) - first_key;
    if (begin <= 0) continue;
#pragma unroll
    for (int c = 0; c < kCount / 4; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (8 * c + e < begin) score[4 * c + 2 * half + e] = -INFINITY;
  }
}

/// Scores become exponentials. The shift is the row's maximum, but an older one serves while no exponential passes
/// 2^8: true when this warp's output must be multiplied by `factor`.
template <int kCount>
__device__ inline bool exponentials(float (&score)[kCount], RunningRows& rows, float scale_log2, float (&factor)[2]) {
  float highest[2];
  bool moved = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float m = rows.maximum[half];
#pragma unroll
    for (int c = 0; c < kCount / 4; ++c) m = fmaxf(m, fmaxf(score[4 * c + 2 * half], score[4 * c + 2 * half + 1]));
    m = fmaxf(m, __shfl_xor_sync(kFullMask, m, 1));
    m = fmaxf(m, __shfl_xor_sync(kFullMask, m, 2));
    highest[half] = m;
    moved |= (m - rows.maximum[half]) * scale_log2 > 8.0f;  // -inf - -inf is NaN: no
  }
  const bool rescale = __any_sync(kFullMask, moved);
  if (rescale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor[half] = ptx::exp2_approx((rows.maximum[half] - SoftmaxState::shift(highest[half])) * scale_log2);
      rows.maximum[half] = highest[half];
      rows.sum[half] *= factor[half];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float shift = SoftmaxState::shift(rows.maximum[half]) * scale_log2;
    float sum[2] = {rows.sum[half], 0.0f};
#pragma unroll
    for (int c = 0; c < kCount / 4; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = score[4 * c + 2 * half + e];
        x = ptx::exp2_approx(fmaf(x, scale_log2, -shift));
        sum[e] += x;
      }
    rows.sum[half] = sum[0] + sum[1];
  }
  return rescale;
}

}  // namespace flashkernel::cuda::sm90a
