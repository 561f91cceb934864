// Gradients of attention, element by element of the result: the oracle of attention_bwd.
//   P = exp(S - lse), D = <dO, O> - dLSE, dS = P * (dO V^T - D)
//   dV = P^T dO, dbias = dS, d(scale Q K^T) = dS * softcap', dQ = scale * d K, dK = scale * d^T Q, dsink = -sum
//   exp(sink - lse) D
// Called through src/cpu/kernels.cpp. Everything is computed again for each result (dK and dV: for eight keys): slow,
// deterministic, no extra memory. Paper: FlashAttention-2 (arXiv 2307.08691), section 2.3.2.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/thread_pool.hpp"
#include "cpu/scalar/attention_score.hpp"
#include "cpu/scalar/kernels.hpp"

namespace flashkernel::cpu_scalar {
namespace {

template <class T>
struct Gradient {
  const AttentionBackwardParams& p;
  const AttentionParams& f = p.forward;
  std::vector<double> lse_rests{};  // [batch, heads_q, seq_q]; empty: all 0
  std::int64_t group = f.heads_q / f.heads_kv;

  // Rows of a gradient lie as those of its tensor: a batch stride, or rows counted through all sequences.
  static std::int64_t offset(bool varlen, std::int64_t first_row, std::int64_t b, std::int64_t h, std::int64_t i,
                             std::int64_t stride_batch, std::int64_t stride_head, std::int64_t stride_token) {
    return (varlen ? (first_row + i) * stride_token : b * stride_batch + i * stride_token) + h * stride_head;
  }
  std::int64_t grad_out_offset(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return offset(f.is_varlen_q(), f.q_begin(b), b, h, i, p.stride_grad_out_batch, p.stride_grad_out_head,
                  p.stride_grad_out_token);
  }

  // What every pair of a query has in common.
  struct Query {
    std::int64_t b, h, i;
    double lse, lse_rest = 0, delta;  // LSE + rest is exact; delta: what every dS of the row has subtracted
    Row q, grad_out;
  };

  Query load_query(std::int64_t b, std::int64_t h, std::int64_t i) const {
    Query query;
    query.b = b, query.h = h, query.i = i;
    query.lse = f.lse[f.lse_offset(b, h, i)];
    query.q.template load_from<T>(f.q, f.q_offset(b, h, i), f.head_dim);
    query.grad_out.template load_from<T>(p.grad_out, grad_out_offset(b, h, i), f.head_dim_v);
    query.delta = dot<T>(query.grad_out.values, f.out, f.out_offset(b, h, i), f.head_dim_v);
    if (p.grad_lse)
      query.delta -= p.grad_lse[offset(f.is_varlen_q(), f.q_begin(b), b, h, i, p.stride_grad_lse_batch,
                                       p.stride_grad_lse_head, p.stride_grad_lse_token)];
    query.lse_rest = lse_rests.empty() ? 0 : lse_rests[static_cast<std::size_t>((b * f.heads_q + h) * f.seq_q + i)];
    return query;
  }

  // Next to an LSE of -3.4e38 the logarithm of the number of keys is nothing: what fp32 has lost comes from the scores.
  double make_lse_rest(std::int64_t b, std::int64_t h, std::int64_t i) const {
    const Query query = load_query(b, h, i);
    if (!(std::abs(query.lse) >= kLargeLse && std::isfinite(query.lse))) return 0;
    double sum = f.sinks ? std::exp(f.sinks[h] - query.lse) : 0;
    const Range keys = visible(b, i);
    for (std::int64_t j = keys.first; j < keys.last; ++j)
      sum += std::exp(attention_score<T>(f, query.q, b, h, i, j, f.q_length(b), f.k_length(b)).value - query.lse);
    return std::log(sum);
  }

  // The keys [first, last) of query i that it sees.
  struct Range {
    std::int64_t first, last;
  };
  Range visible(std::int64_t b, std::int64_t i) const {
    const std::int64_t q_length = f.q_length(b), k_length = f.k_length(b);
    return {f.first_key(i, q_length, k_length), f.last_key(i, q_length, k_length)};
  }

  struct Pair {
    double probability = 0;
    double grad_score = 0;  // before bias and after softcap: the bias's gradient
    double grad_dot = 0;    // by <q, k>
  };

  // Of a key that the query sees.
  Pair pair(const Query& query, std::int64_t j) const {
    const std::int64_t b = query.b, h = query.h;
    if (query.lse == kMinusInfinity) return {};
    const Score score = attention_score<T>(f, query.q, b, h, query.i, j, f.q_length(b), f.k_length(b));
    if (score.value == kMinusInfinity) return {};
    Pair pair;
    pair.probability = std::exp(score.value - query.lse - query.lse_rest);
    const double grad_probability = dot<T>(query.grad_out.values, f.v, f.v_offset(b, h / group, j), f.head_dim_v);
    pair.grad_score = pair.probability * (grad_probability - query.delta);
    pair.grad_dot = f.scale * score.derivative * pair.grad_score;
    return pair;
  }

  void grad_q(std::int64_t b, std::int64_t h, std::int64_t i) const {
    double sum[kMaxHeadDim] = {};
    const Query query = load_query(b, h, i);
    const Range keys = visible(b, i);
    for (std::int64_t j = keys.first; j < keys.last; ++j) {
      const double weight = pair(query, j).grad_dot;
      if (weight == 0) continue;  // a masked key may hold NaN
      const std::int64_t row = f.k_offset(b, h / group, j);
      for (std::int64_t d = 0; d < f.head_dim; ++d) sum[d] += weight * load<T>(f.k, row + d);
    }
    const std::int64_t row = offset(f.is_varlen_q(), f.q_begin(b), b, h, i, p.stride_grad_q_batch, p.stride_grad_q_head,
                                    p.stride_grad_q_token);
    for (std::int64_t d = 0; d < f.head_dim; ++d) store<T>(p.grad_q, row + d, sum[d]);
  }

  // Of up to kKeys keys from `begin`: they share what is loaded of a query.
  static constexpr std::int64_t kKeys = 8;
  void grad_k_and_v(std::int64_t b, std::int64_t h_kv, std::int64_t begin) const {
    const std::int64_t end = std::min(begin + kKeys, f.k_length(b));
    double sum_k[kKeys][kMaxHeadDim] = {}, sum_v[kKeys][kMaxHeadDim] = {};
    for (std::int64_t h = h_kv * group; h < (h_kv + 1) * group; ++h) {
      for (std::int64_t i = 0; i < f.q_length(b); ++i) {
        const Range keys = visible(b, i);
        const std::int64_t first = std::max(keys.first, begin), last = std::min(keys.last, end);
        if (first >= last) continue;
        const Query query = load_query(b, h, i);
        for (std::int64_t j = first, n = first - begin; j < last; ++j, ++n) {
          const Pair weight = pair(query, j);
          if (weight.grad_dot != 0)
            for (std::int64_t d = 0; d < f.head_dim; ++d) sum_k[n][d] += weight.grad_dot * query.q.values[d];
          if (weight.probability != 0)
            for (std::int64_t d = 0; d < f.head_dim_v; ++d)
              sum_v[n][d] += weight.probability * query.grad_out.values[d];
        }
      }
    }
    const bool varlen = f.is_varlen_k();
    const std::int64_t first_row = f.k_begin(b);
    for (std::int64_t j = begin, n = 0; j < end; ++j, ++n) {
      if (p.grad_k) {
        const std::int64_t row =
            offset(varlen, first_row, b, h_kv, j, p.stride_grad_k_batch, p.stride_grad_k_head, p.stride_grad_k_token);
        for (std::int64_t d = 0; d < f.head_dim; ++d) store<T>(p.grad_k, row + d, sum_k[n][d]);
      }
      if (p.grad_v) {
        const std::int64_t row =
            offset(varlen, first_row, b, h_kv, j, p.stride_grad_v_batch, p.stride_grad_v_head, p.stride_grad_v_token);
        for (std::int64_t d = 0; d < f.head_dim_v; ++d) store<T>(p.grad_v, row + d, sum_v[n][d]);
      }
    }
  }

  // One element of the bias's gradient: the sum over everything that the element was broadcast to.
  void grad_bias(const std::int64_t index[4]) const {
    const std::int64_t full[4] = {f.batch, f.heads_q, f.seq_q, f.seq_k};
    std::int64_t begin[4], end[4], row = 0;
    for (int d = 0; d < 4; ++d) {
      const bool broadcast = p.grad_bias_shape[d] == 1;
      begin[d] = broadcast ? 0 : index[d];
      end[d] = broadcast ? full[d] : index[d] + 1;
      row += index[d] * p.stride_grad_bias[d];
    }
    double sum = 0;
    for (std::int64_t b = begin[0]; b < end[0]; ++b)
      for (std::int64_t h = begin[1]; h < end[1]; ++h)
        for (std::int64_t i = begin[2]; i < end[2]; ++i) {
          const Range keys = visible(b, i);
          const std::int64_t first = std::max(keys.first, begin[3]), last = std::min(keys.last, end[3]);
          if (first >= last) continue;
          const Query query = load_query(b, h, i);
          for (std::int64_t j = first; j < last; ++j) sum += pair(query, j).grad_score;
        }
    store_as(p.grad_bias_dtype, p.grad_bias, row, sum);
  }

  void grad_sink(std::int64_t h) const {
    double sum = 0;
    for (std::int64_t b = 0; b < f.batch; ++b) {
      for (std::int64_t i = 0; i < f.q_length(b); ++i) {
        const Query query = load_query(b, h, i);
        if (f.sinks[h] == kMinusInfinity || query.lse == kMinusInfinity) continue;
        sum -= std::exp(f.sinks[h] - query.lse - query.lse_rest) * query.delta;
      }
    }
    p.grad_sinks[h] = static_cast<float>(sum);
  }
};

template <class F>
void for_each(std::int64_t count, F f) {
  auto task = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) f(i);
  };
  parallel_for(count, 4, task);
}

template <class T>
void run(const AttentionBackwardParams& p) {
  Gradient<T> gradient{p};
  const AttentionParams& f = p.forward;
  if (f.bias.data) {
    std::vector<double> rests(static_cast<std::size_t>(f.batch * f.heads_q * f.seq_q));
    for_each(f.batch * f.heads_q * f.seq_q, [&](std::int64_t row) {
      const std::int64_t i = row % f.seq_q, b = row / f.seq_q / f.heads_q;
      if (i < f.q_length(b))
        rests[static_cast<std::size_t>(row)] = gradient.make_lse_rest(b, row / f.seq_q % f.heads_q, i);
    });
    gradient.lse_rests = std::move(rests);
  }
  if (p.grad_q)
    for_each(f.batch * f.heads_q * f.seq_q, [&](std::int64_t row) {
      const std::int64_t i = row % f.seq_q, b = row / f.seq_q / f.heads_q;
      if (i < f.q_length(b)) gradient.grad_q(b, row / f.seq_q % f.heads_q, i);
    });
  const std::int64_t blocks = (f.seq_k + gradient.kKeys - 1) / gradient.kKeys;
  if (p.grad_k || p.grad_v)
    for_each(f.batch * f.heads_kv * blocks, [&](std::int64_t n) {
      const std::int64_t begin = n % blocks * gradient.kKeys, b = n / blocks / f.heads_kv;
      if (begin < f.k_length(b)) gradient.grad_k_and_v(b, n / blocks % f.heads_kv, begin);
    });
  if (p.grad_bias) {
    const std::int64_t* shape = p.grad_bias_shape;
    for_each(shape[0] * shape[1] * shape[2] * shape[3], [&](std::int64_t n) {
      const std::int64_t index[4] = {n / shape[3] / shape[2] / shape[1], n / shape[3] / shape[2] % shape[1],
                                     n / shape[3] % shape[2], n % shape[3]};
      gradient.grad_bias(index);
    });
  }
  if (p.grad_sinks) for_each(f.heads_q, [&](std::int64_t h) { gradient.grad_sink(h); });
}

}  // namespace

void attention_bwd(const AttentionBackwardParams& p, void*, Stream) {
  visit_floating(p.forward.dtype, [&](auto zero) { run<decltype(zero)>(p); });
}

}  // namespace flashkernel::cpu_scalar
