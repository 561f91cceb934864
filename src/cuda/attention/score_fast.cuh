// What happens to a score when a call has a softcap, a bias or ALiBi slopes: score.cuh with a faster tanh.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/attention/score.cuh"

namespace flashkernel::cuda {

/// 1 - 2 / (1 + e^2x). The absolute error is 3e-7, and large |x| give exactly 1 and -1.
__device__ inline float tanh_exp2(float x) {
  constexpr float kTwoLog2E = 2.8853900817779268f;
  return 1.0f - 2.0f * ptx::reciprocal_approx(1.0f + ptx::exp2_approx(x * kTwoLog2E));
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
