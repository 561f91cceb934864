// One score of attention and what it is made of, as include/flashkernel/attention.hpp defines it; shared by the scalar
// forward and backward kernels so that both stand on the same words.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "cpu/scalar/dot.hpp"
#include "cpu/scalar/element.hpp"
#include "ops/attention_params.hpp"

namespace flashkernel::cpu_scalar {

inline constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

/// A row of up to kMaxHeadDim elements in double: converted once, read for every row of the other tensor.
struct Row {
  double values[kMaxHeadDim];

  template <class T>
  void load_from(const void* data, std::int64_t offset, std::int64_t count) {
    for (std::int64_t d = 0; d < count; ++d) values[d] = load<T>(data, offset + d);
  }
};

/// In place of an element's type: pages of 4-bit elements.
struct Packed {};

struct Score {
  double value;             // after scale, softcap, bias, ALiBi and the boolean mask
  double derivative = 1.0;  // of value by scale * <q, k>: what softcap leaves
};

/// The score of query i, whose row is `q`, and key j, which must be visible to it. K: the elements of k.
template <class K>
Score attention_score(const AttentionParams& p, const Row& q, std::int64_t b, std::int64_t h, std::int64_t i,
                      std::int64_t j, std::int64_t q_length, std::int64_t k_length) {
  const std::int64_t h_kv = h / (p.heads_q / p.heads_kv);
  Score score{0};
  if constexpr (std::is_same_v<K, Packed>) {
    const PackedRow row = p.k_packed(b, h_kv, j);
    for (std::int64_t d = 0; d < p.head_dim; ++d) score.value += q.values[d] * row[d];
    score.value *= p.scale;
  } else {
    score.value = p.scale * dot<K>(q.values, p.k, p.k_offset(b, h_kv, j), p.head_dim);
  }
  if (p.quantization && !p.quantization.packed) score.value *= p.k_scale(b, h_kv, j);
  if (p.softcap > 0) {
    const double t = std::tanh(score.value / p.softcap);
    score.value = p.softcap * t;
    score.derivative = 1 - t * t;
  }
  if (p.bias.data) {
    const std::int64_t offset =
        b * p.bias.stride_batch + h * p.bias.stride_head + i * p.bias.stride_q + j * p.bias.stride_k;
    // Rounded: scores are fp32, and next to a bias of -1e9 or -3.4e38 little or nothing is left of a dot product.
    score.value = static_cast<float>(score.value + load_as(p.bias.dtype, p.bias.data, offset));
  }
  if (p.alibi_slopes) {
    const double slope = p.alibi_slopes[b * p.stride_alibi_batch + h];
    const double distance = static_cast<double>(i + k_length - q_length - j);
    switch (p.alibi) {
      case Alibi::kDistance: score.value -= slope * std::abs(distance); break;
      case Alibi::kSigned: score.value -= slope * distance; break;
      case Alibi::kSqrt: score.value -= slope * std::sqrt(distance > 0 ? distance : 0.0); break;
    }
  }
  if (p.mask_hides(b, h, i, j, q_length, k_length)) score.value = kMinusInfinity;
  return score;
}

}  // namespace flashkernel::cpu_scalar
