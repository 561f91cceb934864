// What happens to a score when a call has a softcap, a bias or ALiBi slopes: score.cuh with a faster tanh.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/attention/score.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda {

/// 1 - 2 / (1 + e^2x). The absolute error is 3e-7, and large |x| give exactly 1 and -1.
__device__ inline float tanh_exp2(float x) {
  constexpr float kTwoLog2E = 2.8853900817779268f;
  return 1.0f - 2.0f * ptx::reciprocal_approx(1.0f + ptx::exp2_approx(x * kTwoLog2E));
}

/// What the packed mask shows of a tile of kBlockN keys to the rows of a lane: `shown[s][half]` is for row
/// 16 s + 8 half of `lane_row`, and its bit 8 n + e for the key of the accumulator's column n, element e. False if no
/// row of the warp sees a key of the tile: then both products can be left out.
template <int kBlockN, int kSlices>
__device__ __forceinline__ bool read_mask(const AttentionParams& p, std::int64_t b, std::int64_t h, int lane_row,
                                          int last_query, int first_j, int shift, int lane,
                                          std::uint64_t (&shown)[kSlices][2]) {
  std::uint64_t any = 0;
#pragma unroll
  for (int s = 0; s < kSlices; ++s)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(lane_row + 16 * s + 8 * half, last_query);
      any |= shown[s][half] = mask_keys<kBlockN>(p, b, h, row, first_j, shift);
      shown[s][half] >>= 2 * (lane % 4);
    }
  return __any_sync(kFullMask, any != 0);
}

/// Applies scale, softcap, bias and ALiBi, in the order of docs/numerics.md. The packed mask is its caller's part,
/// since a word of it serves many keys (mask_keys).
__device__ inline float modified_score_fast(const AttentionParams& p, float slope, const char* bias_row, int i, int j,
                                            int shift, float dot, float* capped = nullptr) {
  float s = dot * p.scale;
  if (p.softcap > 0.0f) s = p.softcap * tanh_exp2(s * (1.0f / p.softcap));
  if (capped) *capped = s;
  if (p.bias.data) s += load_typed(bias_row, p.bias.dtype, j * p.bias.stride_k);
  if (p.alibi_slopes) s += p.alibi_term(slope, static_cast<float>(i + shift - j));
  return s;
}

}  // namespace flashkernel::cuda
