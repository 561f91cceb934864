// What happens to a score between the two matrix products, and how a row's softmax ends.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/tile/convert.cuh"
#include "ops/attention_params.hpp"

namespace flashkernel::cuda {

/// Query i and key j of one sequence and head; the causal mask and the window are not applied here.
struct ScoreContext {
  std::int64_t b, h, q_len, k_len;
  float slope;  // ALiBi; 0 when absent

  __device__ ScoreContext(const AttentionParams& p, std::int64_t b, std::int64_t h)
      : b(b),
        h(h),
        q_len(p.q_length(b)),
        k_len(p.k_length(b)),
        slope(p.alibi_slopes ? p.alibi_slopes[b * p.stride_alibi_batch + h] : 0.0f) {}
};

/// Bit n says whether the packed mask shows key first_j + n to query i, for the kCount keys from first_j on, a multiple
/// of kCount, which lie in one block of a block mask. Without a mask all bits are set.
template <int kCount>
__device__ inline std::uint64_t mask_keys(const AttentionParams& p, std::int64_t b, std::int64_t h, std::int64_t i,
                                          int first_j) {
  static_assert(kCount == 64 || kCount == 32 || kCount == 16, "inside one word, or two whole ones");
  if (!p.mask.is_given()) return ~std::uint64_t{0};
  if (first_j >= p.seq_k) return 0;
  if (p.mask.blocks.data) {
    const std::uint8_t block = p.mask.blocks.at(b, h, i, first_j);
    if (block == kBlockHidden) return 0;
    if (block != kBlockShown || !p.mask.data) return ~std::uint64_t{0};
  }
  const std::uint32_t* const words = p.mask.row(b, h, i) + first_j / 32;
  if constexpr (kCount < 64)
    return words[0] >> first_j % 32 & static_cast<std::uint32_t>((std::uint64_t{1} << kCount) - 1);
  const std::uint32_t high = first_j + 32 < p.seq_k ? words[1] : 0;
  return static_cast<std::uint64_t>(high) << 32 | words[0];
}

/// The same of the forward kernels, whose keys may lie in pages: the mask then has the bits of a sequence's last keys,
/// from key `shift` = k_len - q_len on, and shows the keys before. first_j is a multiple of kCount, `shift` need not
/// be.
template <int kCount>
__device__ inline std::uint64_t mask_keys(const AttentionParams& p, std::int64_t b, std::int64_t h, std::int64_t i,
                                          int first_j, int shift) {
  if (!p.is_paged()) return mask_keys<kCount>(p, b, h, i, first_j);
  const int bit = first_j - shift;
  if (!p.mask.data || bit <= -kCount) return ~std::uint64_t{0};
  const std::uint32_t* const row = p.mask_row(b, h, i);
  const int words = static_cast<int>((p.seq_q + 31) / 32), first = bit >> 5;  // rounds down
  const auto word = [&](int w) { return w < 0 ? ~std::uint32_t{0} : w < words ? row[w] : 0u; };
  const std::uint32_t middle = word(first + 1), low = __funnelshift_r(word(first), middle, bit & 31);
  if constexpr (kCount <= 32) return low & static_cast<std::uint32_t>((std::uint64_t{1} << kCount) - 1);
  return static_cast<std::uint64_t>(__funnelshift_r(middle, word(first + 2), bit & 31)) << 32 | low;
}

/// Applies scale, softcap, bias, ALiBi and the packed mask, in the order of docs/numerics.md. `capped` gets the score
/// right after the softcap, for its gradient.
__device__ inline float modified_score(const AttentionParams& p, const ScoreContext& at, std::int64_t i, std::int64_t j,
                                       float dot, float* capped = nullptr) {
  float s = dot * p.scale;
  if (p.softcap > 0.0f) s = p.softcap * tanhf(s / p.softcap);
  if (capped) *capped = s;
  if (p.bias.data)
    s += load_typed(p.bias.data, p.bias.dtype,
                    at.b * p.bias.stride_batch + at.h * p.bias.stride_head + i * p.bias.stride_q + j * p.bias.stride_k);
  if (p.alibi_slopes) s += p.alibi_term(at.slope, static_cast<float>(i + at.k_len - at.q_len - j));
  if (p.mask_hides(at.b, at.h, i, j, at.q_len, at.k_len)) s = -INFINITY;
  return s;
}

/// A row's running softmax: `sum` = sum of exp(s - shift(maximum)) over the keys seen so far.
struct SoftmaxState {
  float maximum = -INFINITY, sum = 0.0f;

  /// exp never sees inf - inf for a row that has no finite score yet.
  __device__ static float shift(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

  /// Joins the sink to the denominator; returns the factor that turns the accumulated numerators into the output.
  __device__ float finish(const float* sinks, std::int64_t h, float* lse) {
    float factor = 1.0f;
    if (sinks) {
      const float joined = fmaxf(maximum, sinks[h]);
      factor = expf(maximum - shift(joined));
      sum = sum * factor + expf(sinks[h] - shift(joined));
      maximum = joined;
    }
    *lse = sum == 0.0f ? -INFINITY : shift(maximum) + logf(sum);
    return sum == 0.0f ? 0.0f : factor / sum;
  }
};

}  // namespace flashkernel::cuda
