// The softmax of the Hopper forward kernel, on a warpgroup's 64 x kBlockN scores in registers: mask, running maximum,
// exp2, row sums. A thread holds rows l / 4 and l / 4 + 8 of its warp's 16 (ptx/wgmma.cuh has the fragment).
#pragma once

#include <type_traits>

#include "cuda/ptx/math.cuh"
#include "cuda/attention/forward/sm90a/shape.cuh"
#include "cuda/attention/score.cuh"
#include "cuda/attention/score_fast.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda::sm90a {

/// The state of the thread's two rows. `maximum` is the maximum of scores as the exponentials take them, before
/// scale_log2. `sum` is that of the thread's columns only; the four threads of a row add theirs at the end.
struct RunningRows {
  float maximum[2], sum[2];
  __device__ void clear() {
    maximum[0] = maximum[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
  }
};

/// Applies scale and softcap in calls that have more than a positive scale. The exponentials then take finished scores.
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

/// Sets scores to -inf where row i, or i + 8, does not see the key. `first_key` is the key of the thread's element 0.
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

/// The largest of `m` and a row's scores in a block.
template <int kCount>
__device__ inline float row_maximum(const float (&score)[kCount], int half, float m) {
#pragma unroll
  for (int c = 0; c < kCount / 4; ++c) m = fmaxf(m, fmaxf(score[4 * c + 2 * half], score[4 * c + 2 * half + 1]));
  m = fmaxf(m, __shfl_xor_sync(kFullMask, m, 1));
  return fmaxf(m, __shfl_xor_sync(kFullMask, m, 2));
}

/// Whether one of these pairs of 16-bit weights is over 2^8, infinite or NaN. As unsigned numbers they order as the
/// weights do, infinity and NaN last. 2^8 is 0x5c00, and 0x4380 in bfloat16. The distance to 0x8000 is added: a larger
/// number passes 0x8000 then. A NaN with a sign is beyond it already.
template <class T>
__device__ inline bool is_over(std::uint32_t largest) {
  constexpr std::uint32_t kRest = 0x8000 - (std::is_same_v<T, __half> ? 0x5c01 : 0x4381);
  return (((largest + kRest * 0x10001) | largest) & 0x80008000) != 0;
}

/// Whether a row of the thread has such a weight in the block.
template <class T, int kSteps>
__device__ inline bool row_is_over(const std::uint32_t (&weights)[kSteps][4], int half) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int n = 0; n < kSteps; ++n) largest = ptx::max3_u16x2(largest, weights[n][half], weights[n][half + 2]);
  int over = is_over<T>(largest);
  over |= __shfl_xor_sync(kFullMask, over, 1);
  return (over | __shfl_xor_sync(kFullMask, over, 2)) != 0;
}

/// Takes the scores of a block into the maxima of those rows that `moves` names. `factor` becomes what their sums and
/// outputs must be multiplied by. Each row moves for itself: its bits do not depend on its neighbours in the tile.
template <int kCount>
__device__ inline void renew_maxima(const float (&score)[kCount], RunningRows& rows, const bool (&moves)[2],
                                    float scale_log2, float (&factor)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float highest = row_maximum(score, half, rows.maximum[half]), m = moves[half] ? highest : rows.maximum[half];
    factor[half] = ptx::exp2_approx((rows.maximum[half] - SoftmaxState::shift(m)) * scale_log2);
    rows.maximum[half] = m;
  }
}

/// Computes the exponentials of a block's scores, shifted by the maxima of the rows so far, and rounds and packs them
/// as operands for the block's values. With kSum, `sum` gets their sums. The scores stay. Returns true in a thread that
/// has an exponential over 2^8, infinite or NaN; then it must be done again with new maxima. A row without a maximum is
/// shifted by -inf, so that all its exponentials become infinite or NaN; with `is_final` it is shifted by 0, since it
/// has seen no key up to here.
template <class T, bool kSum, int kCount>
__device__ inline bool fill_weights(const float (&score)[kCount], std::uint32_t (&weights)[kCount / 8][4],
                                    const RunningRows& rows, float scale_log2, bool is_final, float (&sum)[2]) {
  float shift[2];
  sum[0] = sum[1] = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    shift[half] = (is_final ? SoftmaxState::shift(rows.maximum[half]) : rows.maximum[half]) * scale_log2;
  std::uint32_t largest = 0;  // in each half
#pragma unroll
  for (int n = 0; n < kCount / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float low = ptx::exp2_approx(fmaf(score[8 * n + 2 * e], scale_log2, -shift[e % 2]));
      const float high = ptx::exp2_approx(fmaf(score[8 * n + 2 * e + 1], scale_log2, -shift[e % 2]));
      if constexpr (kSum) {
        sum[e % 2] += low;
        sum[e % 2] += high;
      }
      weights[n][e] = pack<T>(low, high);
    }
    largest = ptx::max3_u16x2(largest, weights[n][0], weights[n][1]);
    largest = ptx::max3_u16x2(largest, weights[n][2], weights[n][3]);
  }
  return is_over<T>(largest);
}

/// Turns modified scores into exponentials, after a look at their maxima. The shift is the maximum of the row, but an
/// older one serves while no exponential of the row passes 2^8. Returns true when the warp's output must be multiplied
/// by `factor`.
template <int kCount>
__device__ inline bool exponentials(float (&score)[kCount], RunningRows& rows, float scale_log2, float (&factor)[2]) {
  float highest[2];
  bool moved = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float m = row_maximum(score, half, rows.maximum[half]);
    const bool moves = (m - rows.maximum[half]) * scale_log2 > 8.0f;  // -inf - -inf is NaN: no
    highest[half] = moves ? m : rows.maximum[half];
    moved |= moves;
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
