// What the Hopper forward kernel does for e4m3 queries, keys and values that it does not do for 16 bits. Weights are
// e4m3 too, and lie in registers as the scores did: V's keys are in the order that this asks for (float8_plan.hpp).
//
// e4m3 has the numbers 2^-9 to 448. The largest weight of a row is 2^kWeightLog2, so that weights down to 2^-15 of it
// are not lost, and a later score may be 2.7 larger (in powers of two) before the row needs another maximum.
#pragma once

#include <type_traits>

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/attention/forward/sm90a/epilogue.cuh"
#include "cuda/attention/forward/sm90a/float8.hpp"
#include "cuda/attention/forward/sm90a/softmax.cuh"
#include "cuda/tile/quantized.cuh"

namespace flashkernel::cuda::sm90a {

inline constexpr int kWeightLog2 = 6;

/// The scales of a call.
struct Float8Plan : ForwardPlan {
  HeadScale q, k, v;
};

template <class Tile>
struct Float8Shape : ForwardShape<Tile> {
  using Plan = Float8Plan;
};

/// The scales of a tile, where elements have such.
template <class Shape, bool = Shape::kEightBits>
struct ScalesOf {};
template <class Shape>
struct ScalesOf<Shape, true> {
  float score_scale;  // from scores to powers of two, above 0
  float first;        // what scores are multiplied with before anything else: 1, or a scale that is not above 0
  float value_scale;

  template <int kCount>
  __device__ void scale_first(float (&score)[kCount]) const {
    if (first == 1.0f) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) score[i] *= first;
  }
};

/// The exponentials rely on a scale above 0: then the largest score is the maximum. Any other one is taken first.
template <class Shape>
__device__ inline ScalesOf<Shape> scales_of_tile(const Float8Plan& plan, const TileRecord& tile) {
  const float scale = plan.scale_log2 * plan.q.at(tile.b, tile.g) * plan.k.at(tile.b, tile.g);
  const bool usual = scale > 0.0f;
  return {usual ? scale : 1.0f, usual ? 1.0f : scale, plan.v.at(tile.b, tile.g)};
}

/// O += P V for values in lines of Shape::kVLine keys; only issues.
template <class Shape, int kOut, int kSteps>
__device__ inline void issue_transposed_values(float (&out)[kOut], const std::uint32_t (&weights)[kSteps][4],
                                               std::uint32_t slot, bool accumulate) {
  constexpr int kLine = Shape::kVLine, kStepsOfLine = kLine / 32;
  const std::uint64_t v = ptx::matrix_descriptor(slot, 16, 8 * kLine,
                                                 kLine == 128  ? ptx::Swizzle::k128
                                                 : kLine == 64 ? ptx::Swizzle::k64
                                                               : ptx::Swizzle::k32);
#pragma unroll
  for (int n = 0; n < kSteps; ++n)
    ptx::wgmma_fp8_rs<ptx::E4m3>(out, weights[n],
                                 v + (n / kStepsOfLine * Shape::kVDim * kLine + n % kStepsOfLine * 32) / 16,
                                 n > 0 || accumulate);
}

/// Whether one of four weights is 416 or more, or NaN: weights are not negative, and such a byte passes 0x80 then.
/// Results of several words may be joined by `or`.
__device__ inline std::uint32_t add_to_over(std::uint32_t four) { return four + 0x03030303u; }
inline constexpr std::uint32_t kOverBits = 0x80808080u;

template <int kSteps>
__device__ inline bool eight_bit_row_is_over(const std::uint32_t (&weights)[kSteps][4], int half) {
  std::uint32_t sums = 0;
#pragma unroll
  for (int n = 0; n < kSteps; ++n) sums |= add_to_over(weights[n][half]) | add_to_over(weights[n][half + 2]);
  int over = (sums & kOverBits) != 0;
  over |= __shfl_xor_sync(kFullMask, over, 1);
  return (over | __shfl_xor_sync(kFullMask, over, 2)) != 0;
}

/// Four weights in e4m3, beyond 448 and infinite ones as 448; NaN stays NaN.
__device__ inline std::uint32_t pack_e4m3(const float (&w)[4]) {
#if __CUDA_ARCH__ >= 890
  return ptx::f32x2_to_e4m3x2(w[0], w[1]) | ptx::f32x2_to_e4m3x2(w[2], w[3]) << 16;
#else  // other than on Hopper: the host's pass of the compiler, the emulated GPU
  std::uint32_t four = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) four |= static_cast<std::uint32_t>(from_float<Float8>(w[i]).bits) << 8 * i;
  return four;
#endif
}

/// As fill_weights, in e4m3: a thread's pairs of 32 keys, in the order of their places, are its four operands. Sums are
/// those of weights before they are rounded.
template <bool kSum, int kCount>
__device__ inline bool fill_eight_bit_weights(const float (&score)[kCount], std::uint32_t (&weights)[kCount / 16][4],
                                              const RunningRows& rows, float scale_log2, bool is_final,
                                              float (&sum)[2]) {
  float shift[2];
  sum[0] = sum[1] = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    shift[half] = (is_final ? SoftmaxState::shift(rows.maximum[half]) : rows.maximum[half]) * scale_log2 - kWeightLog2;
  std::uint32_t sums = 0;
#pragma unroll
  for (int n = 0; n < kCount / 16; ++n) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int half = r % 2, first = 16 * n + 8 * (r / 2) + 2 * half;
      float w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[i] = ptx::exp2_approx(fmaf(score[first + i / 2 * 4 + i % 2], scale_log2, -shift[half]));
        if constexpr (kSum) sum[half] += w[i];
      }
      weights[n][r] = pack_e4m3(w);
      sums |= add_to_over(weights[n][r]);
    }
  }
  return (sums & kOverBits) != 0;
}

/// As finish_factors: the factors of a thread's two rows, with the scale of V, and the LSE.
template <class Shape>
__device__ inline void finish_eight_bit_factors(const AttentionParams& p, const TileRecord& tile,
                                                const RunningRows& rows, const ScalesOf<Shape>& scales,
                                                float (&factor)[2]) {
  constexpr float kLn2 = 0.6931471805599453f, kUnit = 1.0f / (1 << kWeightLog2);
  float total[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    total[half] = rows.sum[half];
    total[half] += __shfl_xor_sync(kFullMask, total[half], 1);
    total[half] += __shfl_xor_sync(kFullMask, total[half], 2);
    total[half] *= kUnit;
    factor[half] = total[half] == 0.0f ? 0.0f : ptx::reciprocal_approx(total[half]);
  }
  if (p.lse || p.sinks) {
    RunningRows natural = rows;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (rows.maximum[half] != -INFINITY) natural.maximum[half] = rows.maximum[half] * (scales.score_scale * kLn2);
    apply_sinks_and_store_lse(p, tile, natural, true, total, factor);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) factor[half] *= kUnit * scales.value_scale;
}

}  // namespace flashkernel::cuda::sm90a
