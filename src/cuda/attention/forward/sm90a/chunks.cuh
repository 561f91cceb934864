// How states of chunks of keys are folded together (chunks.hpp): the operations, and a tile's total.
#pragma once

#include "cuda/attention/forward/sm90a/softmax.cuh"

namespace flashkernel::cuda::sm90a {

/// A row that has seen nothing is the start of a fold, and changes no total: one of -0 plus any number is that number.
inline constexpr float kEmptyTotal = -0.0f;

/// What a fold multiplies by. `seen`: the part holds something (a NaN is something).
struct Fold {
  float of_total, of_part;
  bool seen;

  /// `before` and `after`: the total's maximum without the part and with it, before scale_log2.
  __device__ Fold(float before, float after, float part_maximum, float part_sum, float scale_log2)
      : of_total(before == -INFINITY ? 1.0f : ptx::exp2_approx((before - after) * scale_log2)),
        of_part(ptx::exp2_approx((part_maximum - after) * scale_log2)),
        seen(!(part_sum == 0.0f)) {}
  __device__ float operator()(float total, float part) const {
    return fmaf(total, of_total, seen ? part * of_part : kEmptyTotal);
  }
};

/// The sum of a row, of whose columns each of four threads has added its own.
__device__ inline float row_sum(float sum) {
  sum += __shfl_xor_sync(kFullMask, sum, 1);
  return sum + __shfl_xor_sync(kFullMask, sum, 2);
}

/// The total of a tile's chunks so far: a thread's part of it. The maxima and whole sums of its rows lie in shared
/// memory at `place`, in turns with those of the other threads of the warpgroup; behind them the output, or in
/// registers.
template <int kOut, bool kInShared>
struct ChunkTotal {
  float out[kInShared ? 1 : kOut];

  /// Of one of the thread's two rows: its maximum and sum, then pairs of the output.
  __device__ static float2& pair(std::uint32_t place, int half, int i) {
    return static_cast<float2*>(__cvta_shared_to_generic(place))[(2 * i + half) * 128 + threadIdx.x % 128];
  }
  __device__ void clear(std::uint32_t place) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      pair(place, half, 0) = float2{-INFINITY, 0.0f};
      if constexpr (kInShared)
#pragma unroll
        for (int c = 0; c < kOut / 4; ++c) pair(place, half, c + 1) = float2{kEmptyTotal, kEmptyTotal};
    }
    if constexpr (!kInShared)
#pragma unroll
      for (int i = 0; i < kOut; ++i) out[i] = kEmptyTotal;
  }
  /// Folds a chunk into the total; with kLast the result goes to where the chunk's state was.
  template <bool kLast>
  __device__ void add(float (&part)[kOut], RunningRows& rows, float scale_log2, std::uint32_t place) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 before = pair(place, half, 0);
      const float sum = row_sum(rows.sum[half]), after = fmaxf(before.x, rows.maximum[half]);
      const Fold fold(before.x, after, rows.maximum[half], sum, scale_log2);
      rows.maximum[half] = after;
      rows.sum[half] = fold(before.y, sum);
      if (!kLast) pair(place, half, 0) = float2{after, rows.sum[half]};
#pragma unroll
      for (int c = 0; c < kOut / 4; ++c) {
        float* const of_part = part + 4 * c + 2 * half;
        if constexpr (kInShared) {
          float2 both = pair(place, half, c + 1);
          both = float2{fold(both.x, of_part[0]), fold(both.y, of_part[1])};
          if constexpr (kLast)
            of_part[0] = both.x, of_part[1] = both.y;
          else
            pair(place, half, c + 1) = both;
        } else {
          float* const of_total = out + 4 * c + 2 * half;
#pragma unroll
          for (int e = 0; e < 2; ++e) (kLast ? of_part : of_total)[e] = fold(of_total[e], of_part[e]);
        }
      }
    }
  }
};
struct NoTotal {};
/// What a consumer keeps of the chunks before, where keys come in chunks.
template <class Shape>
using TotalOf = std::conditional_t<Shape::kFolds, ChunkTotal<Shape::kVDim / 2, Shape::kTotalShared>, NoTotal>;

}  // namespace flashkernel::cuda::sm90a
