// softmax(scale * Q K^T) V, one query at a time: the oracle of attention_fwd and attention_fp8.
// Called through src/cpu/kernels.cpp. A key whose score is -inf (a bias of -inf) counts as masked: its value is not
// read.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "core/thread_pool.hpp"
#include "cpu/scalar/attention_score.hpp"
#include "cpu/scalar/kernels.hpp"

namespace flashkernel::cpu_scalar {
namespace {

// T: the elements of out; K: of k and v; Q: of q. Values are `value_scale` times their elements.
template <class T, class K, class Q = T>
void attend_row(const AttentionParams& p, std::int64_t b, std::int64_t h, std::int64_t i, std::vector<double>& scores,
                double value_scale = 1) {
  const std::int64_t q_length = p.q_length(b), k_length = p.k_length(b);
  const std::int64_t first = p.first_key(b, i, q_length, k_length), last = p.last_key(i, q_length, k_length);
  const std::int64_t h_kv = h / (p.heads_q / p.heads_kv);

  double max = p.sinks ? p.sinks[h] : kMinusInfinity;
  Row q;
  q.load_from<Q>(p.q, p.q_offset(b, h, i), p.head_dim);
  scores.clear();
  for (std::int64_t j = first; j < last; ++j) {
    scores.push_back(attention_score<K>(p, q, b, h, i, j, q_length, k_length).value);
    max = std::max(max, scores.back());
  }
  double accumulator[kMaxHeadDim] = {};
  double sum = 0;
  if (p.sinks && p.sinks[h] != kMinusInfinity) sum += std::exp(p.sinks[h] - max);
  for (std::int64_t j = first; j < last; ++j) {
    const double score = scores[static_cast<std::size_t>(j - first)];
    if (score == kMinusInfinity) continue;
    const double weight = std::exp(score - max);
    sum += weight;
    if constexpr (std::is_same_v<K, Packed>) {
      const PackedRow row = p.v_packed(b, h_kv, j);
      for (std::int64_t d = 0; d < p.head_dim_v; ++d) accumulator[d] += weight * row[d];
      continue;
    } else {
      const std::int64_t row = p.v_offset(b, h_kv, j);
      const double factor = p.quantization ? weight * p.v_scale(b, h_kv, j) : weight * value_scale;
      for (std::int64_t d = 0; d < p.head_dim_v; ++d) accumulator[d] += factor * load<K>(p.v, row + d);
    }
  }
  const bool masked = sum == 0;  // no key and no sink: the largest term of any other sum is exp(0) or NaN
  const std::int64_t row = p.out_offset(b, h, i);
  for (std::int64_t d = 0; d < p.head_dim_v; ++d) store<T>(p.out, row + d, masked ? 0 : accumulator[d] / sum);
  if (p.lse) p.lse[p.lse_offset(b, h, i)] = static_cast<float>(masked ? kMinusInfinity : max + std::log(sum));
}

}  // namespace

void attention_fwd(const AttentionParams& p, void*, Stream) {
  auto task = [&](std::int64_t begin, std::int64_t end, int) {
    std::vector<double> scores;
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t i = row % p.seq_q, h = row / p.seq_q % p.heads_q, b = row / p.seq_q / p.heads_q;
      if (i >= p.q_length(b)) continue;
      visit_floating(p.dtype_q, [&](auto zero) {
        using T = decltype(zero);
        if (p.quantization.packed) return attend_row<T, Packed>(p, b, h, i, scores);
        if (!p.quantization) return attend_row<T, T>(p, b, h, i, scores);
        visit_quantized(p.dtype, [&](auto element) { attend_row<T, decltype(element)>(p, b, h, i, scores); });
      });
    }
  };
  parallel_for(p.batch * p.heads_q * p.seq_q, 8, task);
}

void attention_fp8(const Float8AttentionParams& call, void*, Stream) {
  const AttentionParams& p = call.attention;
  auto task = [&](std::int64_t begin, std::int64_t end, int) {
    std::vector<double> scores;
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t i = row % p.seq_q, h = row / p.seq_q % p.heads_q, b = row / p.seq_q / p.heads_q;
      if (i >= p.q_length(b)) continue;
      const std::int64_t h_kv = call.kv_head(h);
      AttentionParams scaled = p;
      scaled.scale *= call.q.at(b, h_kv) * call.k.at(b, h_kv);
      visit_floating(call.dtype_out, [&](auto zero) {
        attend_row<decltype(zero), Float8E4M3, Float8E4M3>(scaled, b, h, i, scores, call.v.at(b, h_kv));
      });
    }
  };
  parallel_for(p.batch * p.heads_q * p.seq_q, 8, task);
}

}  // namespace flashkernel::cpu_scalar
