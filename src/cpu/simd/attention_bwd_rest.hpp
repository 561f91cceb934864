// What an LSE in fp32 has lost where it is far from 0, for the backward pass. The mask of all keys of a row by
// -FLT_MAX leaves scores of -3.4e38 and an LSE of -3.4e38: exp(score - LSE) is 1 for each of n keys, where it should be
// 1 / n. The rest is the logarithm of the sum of these exponentials; with it they add up to 1 again. Only calls with a
// bias look for such rows, and only they pay. Included by simd/attention_bwd.hpp after a vector type.
#pragma once

#include "core/thread_pool.hpp"
#include "cpu/simd/attention_bwd_block.hpp"

namespace flashkernel::cpu {
namespace {

inline float widen(float x) { return x; }
template <class T>
inline float widen(T x) {
  float lanes[Vec::kWidth];
  Vec::store(lanes, Vec::load_first(&x, 1));
  return lanes[0];
}

// A row whose gradient is 0 from the start, as that of padding is, gives nothing whatever its probabilities.
template <class T>
inline bool gives_nothing(const BackwardSequence<T>& seq, std::int64_t row) {
  const T* g = seq.grad_out_row(row);
  for (std::int64_t x = 0; x < seq.p->head_dim_v; ++x)
    if (!(widen(g[x]) == 0.0f)) return false;
  return seq.delta(row) == 0.0f;
}

// The scores are made in the order of the blocks' tiles and by the same operations, so that both round alike.
template <class T>
inline float make_lse_rest(const BackwardSequence<T>& seq, std::int64_t row) {
  constexpr int W = Vec::kWidth;
  const float lse = *seq.lse(row);
  const float size = __builtin_fabsf(lse);
  if (!(size >= kLargeLse && size < __builtin_inff()) || gives_nothing(seq, row)) return 0.0f;
  float q[kMaxHeadDim];
  const std::int64_t d = seq.p->head_dim;
  for (std::int64_t x = 0; x < d; ++x) q[x] = widen(seq.q_row(row)[x]);
  double sum = 0;
  const std::int64_t last = seq.last_key(row);
  for (std::int64_t key0 = seq.first_key(row); key0 < last; key0 += W) {
    const int n = static_cast<int>(imin<std::int64_t>(W, last - key0));
    float s[W] = {};
    for (int j = 0; j < n; ++j) {
      const T* k = seq.k.row(key0 + j);
      for (std::int64_t x = 0; x < d; ++x) s[j] = __builtin_fmaf(q[x], widen(k[x]), s[j]);
    }
    modify_scores(seq, row, key0, s, 0, W);
    for (int j = 0; j < n; ++j) sum += __builtin_exp(static_cast<double>(s[j]) - static_cast<double>(lse));
  }
  if (seq.p->sinks) sum += __builtin_exp(static_cast<double>(seq.p->sinks[seq.head(row)]) - static_cast<double>(lse));
  return static_cast<float>(__builtin_log(sum));
}

template <class T>
struct LseRests {
  const AttentionBackwardParams* bp;
  float* rests;  // [batch, heads_q, seq_q]

  static std::int64_t floats(const AttentionBackwardParams& bp) {
    const AttentionParams& p = bp.forward;
    return p.bias.data ? p.batch * p.heads_q * p.seq_q : 0;
  }

  BackwardSequence<T> sequence(std::int64_t b, std::int64_t h) const {
    auto seq = backward_sequence<T>(*bp, b, h / (bp->forward.heads_q / bp->forward.heads_kv));
    seq.head0 = h;
    seq.group = 1;
    return seq;
  }

  // Whether some row's LSE is large.
  bool any() const {
    const AttentionParams& p = bp->forward;
    for (std::int64_t b = 0; b < p.batch; ++b) {
      for (std::int64_t h = 0; h < p.heads_q; ++h) {
        const auto seq = sequence(b, h);
        for (std::int64_t row = 0; row < seq.rows(); ++row) {
          const float size = __builtin_fabsf(*seq.lse(row));
          if (size >= kLargeLse && size < __builtin_inff()) return true;
        }
      }
    }
    return false;
  }

  static void tasks(void* context, std::int64_t begin, std::int64_t end, int) {
    const LseRests& all = *static_cast<LseRests*>(context);
    const AttentionParams& p = all.bp->forward;
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t head = task / p.seq_q, row = task % p.seq_q;
      const auto seq = all.sequence(head / p.heads_q, head % p.heads_q);
      if (row < seq.rows()) all.rests[seq.rest_index(row)] = make_lse_rest(seq, row);
    }
  }

  // Fills the rests; null when no row needs one.
  const float* make(int threads) {
    if (!bp->forward.bias.data || !any()) return nullptr;
    parallel_for(floats(*bp), 16, threads, tasks, this);
    return rests;
  }
};

}  // namespace
}  // namespace flashkernel::cpu
