// What a warpgroup does with tiles of 64 keys for up to 32 query heads: S = Q K^T, softmax, O += P V by wgmma. The 64
// rows of an instruction are 8 query heads for each warp in the upper half of that warp's 16 rows, and zeros: so a warp
// has its heads' maxima alone, a thread one head's, and P goes from registers to the tensor core. Used by
// group.cuh.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/attention/score.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "ops/attention_params.hpp"

namespace flashkernel::cuda::sm90a {

/// A warpgroup's softmax and output over the tiles that it has seen. Thread of warp w, lane l: query head 8 w + l / 4,
/// columns 8 c + 2 (l % 4) + {0, 1} in out[4 c + {0, 1}]. The other half of each fragment are rows of zeros.
///
/// A tile is start_scores, end_scores, weigh, start_values, end_values. The products of one tile's values and of the
/// next one's scores run one behind the other, while the other warpgroup weighs.
template <class T, class Shape>
struct GroupSums {
  static constexpr int kSlices = Shape::kQkDim / 16, kSteps = Shape::kKeys / 16;
  static constexpr float kMostExponent = 8.0f;
  float out[Shape::kVDim / 2], score[Shape::kKeys / 2], maximum, sum;
  float bound;  // an exponent above it moves the maximum: kMostExponent, or -inf as long as there is no maximum
  std::uint32_t query[kSlices][4], weights[kSteps][4];

  __device__ GroupSums() {
#pragma unroll
    for (int n = 0; n < kSteps; ++n) weights[n][1] = weights[n][3] = 0;
#pragma unroll
    for (int n = 0; n < kSteps; ++n) ptx::hold(weights[n][1]), ptx::hold(weights[n][3]);
  }

  /// A sequence's queries, and nothing seen of it.
  __device__ void begin(const AttentionParams& p, int b, int head, int rows) {
    const int row = static_cast<int>(threadIdx.x) % 128 / 4, lane = static_cast<int>(threadIdx.x % kWarp);
    const T* const from = static_cast<const T*>(p.q) + b * p.stride_q_batch +
                          (static_cast<std::int64_t>(head) * rows + min(row, rows - 1)) * p.stride_q_head +
                          lane % 4 * 2;
#pragma unroll
    for (int d = 0; d < kSlices; ++d) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        query[d][2 * half] = row < rows ? *reinterpret_cast<const std::uint32_t*>(from + 16 * d + 8 * half) : 0;
      query[d][1] = query[d][3] = 0;
      ptx::hold(query[d]);
    }
#pragma unroll
    for (int i = 0; i < Shape::kVDim / 2; ++i) out[i] = 0.0f;
    maximum = bound = -INFINITY, sum = 0.0f;
  }

  __device__ void start_scores(std::uint32_t tile) {
    const std::uint64_t keys = ptx::matrix_descriptor(tile, 16, 1024);
    ptx::hold(score);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kSlices; ++d)
      ptx::wgmma_rs<T>(score, query[d], keys + (d / 4 * Shape::kBlockBytes + d % 4 * 32) / 16, d > 0);
    ptx::wgmma_commit();
  }
  __device__ void end_scores() {
    ptx::wgmma_wait<0>();
    ptx::hold(score);
  }

  /// From scores to weights, of the tile's first `keys` keys.
  __device__ void weigh(float scale_log2, int keys) {
    const int first = 2 * static_cast<int>(threadIdx.x % 4);
    float x[kSteps * 4];
    const auto exponents = [&](float shift) {
#pragma unroll
      for (int i = 0; i < kSteps * 4; ++i) x[i] = fmaf(score[i / 2 * 4 + i % 2], scale_log2, -shift);
      if (keys < Shape::kKeys) {
#pragma unroll
        for (int i = 0; i < kSteps * 4; ++i)
          if (i / 2 * 8 + i % 2 + first >= keys) x[i] = -INFINITY;
      }
    };
    float shift = SoftmaxState::shift(maximum), highest[4];
    exponents(shift);
#pragma unroll
    for (int i = 0; i < kSteps * 4; ++i) highest[i % 4] = i < 4 ? x[i] : fmaxf(highest[i % 4], x[i]);
    highest[0] = fmaxf(fmaxf(highest[0], highest[1]), fmaxf(highest[2], highest[3]));
    // The shift is the maximum so far, or an older one while no exponent passes kMostExponent.
    if (__any_sync(kFullMask, highest[0] > bound)) {
      float all = fmaxf(maximum, highest[0] + shift);
#pragma unroll
      for (int step = 1; step < 4; step *= 2) all = fmaxf(all, __shfl_xor_sync(kFullMask, all, step));
      shift = SoftmaxState::shift(all);
      const float factor = ptx::exp2_approx(maximum - shift);
      maximum = all, bound = all == -INFINITY ? -INFINITY : kMostExponent, sum *= factor;
#pragma unroll
      for (int c = 0; c < Shape::kVDim / 8; ++c) out[4 * c] *= factor, out[4 * c + 1] *= factor;
      exponents(shift);
    }
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kSteps * 4; i += 2) {
      const float a = ptx::exp2_approx(x[i]), b = ptx::exp2_approx(x[i + 1]);
      sums[i % 4] += a, sums[i % 4 + 1] += b;
      weights[i / 4][i % 4] = pack<T>(a, b);
    }
    sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  __device__ void start_values(std::uint32_t tile) {
    const std::uint64_t values = ptx::matrix_descriptor(tile + Shape::kKBytes, Shape::kBlockBytes, 1024);
    hold_values();
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kSteps; ++n) ptx::wgmma_rs<T, true>(out, weights[n], values + n * 2048 / 16, true);
    ptx::wgmma_commit();
  }
  /// `kLater`: products that were started behind these and may still run.
  template <int kLater>
  __device__ void end_values() {
    ptx::wgmma_wait<kLater>();
    hold_values();
  }

  /// After the last tile: a row's sum, which its four threads have in parts.
  __device__ void finish() {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
  }

 private:
  __device__ void hold_values() {
    ptx::hold(out);
#pragma unroll
    for (int n = 0; n < kSteps; ++n) ptx::hold(weights[n]);
  }
};

/// Zeroes the values past a sequence's end: what lies there would be multiplied by 0. By a warpgroup.
template <class Shape>
__device__ inline void clear_values(std::uint32_t tile, int first, std::uint32_t barrier) {
#pragma unroll 1
  for (int at = first * 8 + static_cast<int>(threadIdx.x % 128); at < Shape::kKeys * 8; at += 128)
    for (int c = 0; c < Shape::kVBlocks; ++c)
      *static_cast<uint4*>(__cvta_shared_to_generic(tile + Shape::kKBytes + c * Shape::kBlockBytes + at * 16)) =
          uint4{0, 0, 0, 0};
  ptx::fence_proxy_async_shared();
  ptx::barrier_sync(barrier, 128);
}

}  // namespace flashkernel::cuda::sm90a
