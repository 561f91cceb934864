// Gradients of attention, element by element of the result: the oracle of attention_bwd.
//   P = exp(S - lse), D = <dO, O> - dLSE, dS = P * (dO V^T - D)
//   dV = P^T dO, dbias = dS, d(scale Q K^T) = dS * softcap', dQ = scale * d K, dK = scale * d^T Q, dsink = -sum
//   exp(sink - lse) D
// Called through src/cpu/kernels.cpp. Everything is computed again for each result: slow, deterministic, no extra
// memory. Paper: FlashAttention-2 (arXiv 2307.08691), section 2.3.2.
#include "core/thread_pool.hpp"
#include "cpu/scalar/attention_score.hpp"
#include "cpu/scalar/kernels.hpp"

namespace flashkernel::cpu_scalar {
namespace {

template <class T>
struct Gradient {
  const AttentionBackwardParams& p;
  const AttentionParams& f = p.forward;
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
  double lse(std::int64_t b, std::int64_t h, std::int64_t i) const { return f.lse[f.lse_offset(b, h, i)]; }

  // What every dS of a row has subtracted.
  double delta(std::int64_t b, std::int64_t h, std::int64_t i) const {
    double value = dot<T>(p.grad_out, grad_out_offset(b, h, i), f.out, f.out_offset(b, h, i), f.head_dim_v);
    if (p.grad_lse)
      value -= p.grad_lse[offset(f.is_varlen_q(), f.q_begin(b), b, h, i, p.stride_grad_lse_batch,
                                 p.stride_grad_lse_head, p.stride_grad_lse_token)];
    return value;
  }

  struct Pair {
    double probability = 0;
    double grad_score = 0;  // before bias and after softcap: the bias's gradient
    double grad_dot = 0;    // by <q, k>
  };

  Pair pair(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    const std::int64_t q_length = f.q_length(b), k_length = f.k_length(b);
    if (j < f.first_key(i, q_length, k_length) || j >= f.last_key(i, q_length, k_length)) return {};
    const double row_lse = lse(b, h, i);
    if (row_lse == kMinusInfinity) return {};
    const Score score = attention_score<T>(f, b, h, i, j, q_length, k_length);
    if (score.value == kMinusInfinity) return {};
    Pair pair;
    pair.probability = std::exp(score.value - row_lse);
    const double grad_probability =
        dot<T>(p.grad_out, grad_out_offset(b, h, i), f.v, f.v_offset(b, h / group, j), f.head_dim_v);
    pair.grad_score = pair.probability * (grad_probability - delta(b, h, i));
    pair.grad_dot = f.scale * score.derivative * pair.grad_score;
    return pair;
  }

  void grad_q(std::int64_t b, std::int64_t h, std::int64_t i) const {
    double sum[256] = {};
    for (std::int64_t j = 0; j < f.k_length(b); ++j) {
      const double weight = pair(b, h, i, j).grad_dot;
      if (weight == 0) continue;  // a masked key may hold NaN
      const std::int64_t row = f.k_offset(b, h / group, j);
      for (std::int64_t d = 0; d < f.head_dim; ++d) sum[d] += weight * load<T>(f.k, row + d);
    }
    const std::int64_t row = offset(f.is_varlen_q(), f.q_begin(b), b, h, i, p.stride_grad_q_batch, p.stride_grad_q_head,
                                    p.stride_grad_q_token);
    for (std::int64_t d = 0; d < f.head_dim; ++d) store<T>(p.grad_q, row + d, sum[d]);
  }

  void grad_k_and_v(std::int64_t b, std::int64_t h_kv, std::int64_t j) const {
    double sum_k[256] = {}, sum_v[256] = {};
    for (std::int64_t h = h_kv * group; h < (h_kv + 1) * group; ++h) {
      for (std::int64_t i = 0; i < f.q_length(b); ++i) {
        const Pair weight = pair(b, h, i, j);
        const std::int64_t q_row = f.q_offset(b, h, i), out_row = grad_out_offset(b, h, i);
        if (weight.grad_dot != 0)
          for (std::int64_t d = 0; d < f.head_dim; ++d) sum_k[d] += weight.grad_dot * load<T>(f.q, q_row + d);
        if (weight.probability != 0)
          for (std::int64_t d = 0; d < f.head_dim_v; ++d)
            sum_v[d] += weight.probability * load<T>(p.grad_out, out_row + d);
      }
    }
    const bool varlen = f.is_varlen_k();
    const std::int64_t first_row = f.k_begin(b);
    if (p.grad_k) {
      const std::int64_t row =
          offset(varlen, first_row, b, h_kv, j, p.stride_grad_k_batch, p.stride_grad_k_head, p.stride_grad_k_token);
      for (std::int64_t d = 0; d < f.head_dim; ++d) store<T>(p.grad_k, row + d, sum_k[d]);
    }
    if (p.grad_v) {
      const std::int64_t row =
          offset(varlen, first_row, b, h_kv, j, p.stride_grad_v_batch, p.stride_grad_v_head, p.stride_grad_v_token);
      for (std::int64_t d = 0; d < f.head_dim_v; ++d) store<T>(p.grad_v, row + d, sum_v[d]);
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
        for (std::int64_t i = begin[2]; i < end[2]; ++i)
          for (std::int64_t j = begin[3]; j < end[3]; ++j) sum += pair(b, h, i, j).grad_score;
    store_as(p.grad_bias_dtype, p.grad_bias, row, sum);
  }

  void grad_sink(std::int64_t h) const {
    double sum = 0;
    for (std::int64_t b = 0; b < f.batch; ++b) {
      for (std::int64_t i = 0; i < f.q_length(b); ++i) {
        const double row_lse = lse(b, h, i);
        if (f.sinks[h] == kMinusInfinity || row_lse == kMinusInfinity) continue;
        sum -= std::exp(f.sinks[h] - row_lse) * delta(b, h, i);
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
  const Gradient<T> gradient{p};
  const AttentionParams& f = p.forward;
  if (p.grad_q)
    for_each(f.batch * f.heads_q * f.seq_q, [&](std::int64_t row) {
      const std::int64_t i = row % f.seq_q, b = row / f.seq_q / f.heads_q;
      if (i < f.q_length(b)) gradient.grad_q(b, row / f.seq_q % f.heads_q, i);
    });
  if (p.grad_k || p.grad_v)
    for_each(f.batch * f.heads_kv * f.seq_k, [&](std::int64_t row) {
      const std::int64_t j = row % f.seq_k, b = row / f.seq_k / f.heads_kv;
      if (j < f.k_length(b)) gradient.grad_k_and_v(b, row / f.seq_k % f.heads_kv, j);
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
