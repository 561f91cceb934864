// What a warpgroup does with tiles of 64 keys for up to 32 query heads: S = Q K^T, softmax, O += P V by wgmma. The 64
// rows of an instruction are 8 query heads for each warp in the upper half of that warp's 16 rows, and zeros: so a warp
// has its heads' maxima alone, a thread one head's, and P goes from registers to the tensor core. Used by
// decode_group.cuh.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/attention_score.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "ops/attention_params.hpp"

namespace flashkernel::cuda::sm90a {

/// A warpgroup's softmax and output over the tiles that it has seen. Thread of warp w, lane l: query head 8 w + l / 4,
/// columns 8 c + 2 (l % 4) + {0, 1} in out[4 c + {0, 1}]. The other half of each fragment are rows of zeros.
template <class T, class Shape>
struct GroupSums {
  static constexpr int kSlices = Shape::kDim / 16, kSteps = Shape::kKeys / 16;
  float out[Shape::kDim / 2], score[Shape::kKeys / 2], maximum, sum;
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
    for (int i = 0; i < Shape::kDim / 2; ++i) out[i] = 0.0f;
    maximum = -INFINITY, sum = 0.0f;
  }

  /// `rows`: of the tile's keys, those that the sequence has.
  __device__ void add(std::uint32_t tile, float scale_log2, int rows) {
    const std::uint64_t keys = ptx::matrix_descriptor(tile, 16, 1024);
    const std::uint64_t values = ptx::matrix_descriptor(tile + Shape::kMatrixBytes, Shape::kBlockBytes, 1024);
    ptx::hold(score);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kSlices; ++d)
      ptx::wgmma_rs<T>(score, query[d], keys + (d / 4 * Shape::kBlockBytes + d % 4 * 32) / 16, d > 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(score);

    const int first = 2 * static_cast<int>(threadIdx.x % 4);
    float x[kSteps * 4];
#pragma unroll
    for (int i = 0; i < kSteps * 4; ++i) x[i] = score[i / 2 * 4 + i % 2] * scale_log2;
    if (rows < Shape::kKeys) {
#pragma unroll
      for (int i = 0; i < kSteps * 4; ++i)
        if (i / 2 * 8 + i % 2 + first >= rows) x[i] = -INFINITY;
    }
    // The shift of the exponentials is the maximum so far, or an older one while no exponential passes 2^8.
    float highest = x[0];
#pragma unroll
    for (int i = 1; i < kSteps * 4; ++i) highest = fmaxf(highest, x[i]);
    if (__any_sync(kFullMask, highest > maximum + 8.0f)) {
      highest = fmaxf(maximum, highest);
#pragma unroll
      for (int step = 1; step < 4; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(kFullMask, highest, step));
      const float factor = ptx::exp2_approx(maximum - SoftmaxState::shift(highest));
      maximum = highest;
      sum *= factor;
#pragma unroll
      for (int c = 0; c < Shape::kDim / 8; ++c) out[4 * c] *= factor, out[4 * c + 1] *= factor;
    }
    const float shift = SoftmaxState::shift(maximum);
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < kSteps * 4; i += 2) {
      const float a = ptx::exp2_approx(x[i] - shift), b = ptx::exp2_approx(x[i + 1] - shift);
      sums[0] += a, sums[1] += b;
      weights[i / 4][i % 4] = pack<T>(a, b);
    }
    sum += sums[0] + sums[1];

    ptx::hold(out);
#pragma unroll
    for (int n = 0; n < kSteps; ++n) ptx::hold(weights[n]);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kSteps; ++n) ptx::wgmma_rs<T, true>(out, weights[n], values + n * 2048 / 16, true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(out);
#pragma unroll
    for (int n = 0; n < kSteps; ++n) ptx::hold(weights[n]);
  }

  /// To shared memory: the result, and maximum and sum of each row.
  __device__ void put(float* result, float2* states) {
    const int row = static_cast<int>(threadIdx.x) % 128 / 4, lane = static_cast<int>(threadIdx.x % kWarp);
#pragma unroll
    for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
    if (lane % 4 == 0) states[row] = float2{maximum, sum};
#pragma unroll
    for (int c = 0; c < Shape::kDim / 8; ++c)
      *reinterpret_cast<float2*>(result + row * Shape::kPitch + 8 * c + 2 * (lane % 4)) =
          float2{out[4 * c], out[4 * c + 1]};
  }
};

/// Zeroes the values past a sequence's end: what lies there would be multiplied by 0. By a warpgroup.
template <class Shape>
__device__ inline void clear_values(std::uint32_t tile, int first, std::uint32_t barrier) {
#pragma unroll 1
  for (int at = first * 8 + static_cast<int>(threadIdx.x % 128); at < Shape::kKeys * 8; at += 128)
    for (int c = 0; c < Shape::kDim / 64; ++c)
      *static_cast<uint4*>(__cvta_shared_to_generic(tile + Shape::kMatrixBytes + c * Shape::kBlockBytes + at * 16)) =
          uint4{0, 0, 0, 0};
  ptx::fence_proxy_async_shared();
  ptx::barrier_sync(barrier, 128);
}

}  // namespace flashkernel::cuda::sm90a
