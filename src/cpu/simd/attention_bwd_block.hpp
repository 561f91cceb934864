// One block of rows against one block of keys in attention's backward pass: S and dP by register tiles, P and dS from
// them, then what they add to dQ, dK and dV. Any input type, fp32 arithmetic. Included by simd/attention_bwd.hpp after
// a vector type. Rows are those of attention_common.hpp: the queries of all heads that share a kv head, token-major.
// Invariants: a pair that is hidden (mask, padding, LSE or score of -inf) has P = dS = 0 and adds nothing to anything,
// whatever its operands hold; each element of a gradient is one chain of additions in the order of keys (dQ) or rows
// (dK, dV), so results do not depend on how blocks are dealt to threads. Paper: FlashAttention-2 (Dao 2023),
// algorithm 2.
#pragma once

#include "cpu/simd/attention_common.hpp"

namespace flashkernel::cpu {
namespace {

// 14 x 2 accumulators + 2 operands + 1 broadcast = 31 of 32 registers (AVX-512); 6 x 2 + 2 + 1 = 15 of 16 (AVX2).
constexpr int kBwdStrip = Vec::kWidth == 16 ? 14 : 6;
constexpr int kBwdPanel = 2 * Vec::kWidth;
// Keys of a block: a multiple of the strip (dK, dV) and of the panel (S, dP): 16 x 14 = 7 x 32, 24 x 6 = 9 x 16.
// At head_dim 64 K twice, V, dK and dV take 5 x 224 x 64 x 4 B = 280 KiB of a 2 MiB L2 (AVX2: 180 KiB).
constexpr int kBwdKeys = Vec::kWidth == 16 ? 224 : 144;
// Rows of a block: dK and dV go through memory once per block, so more rows pay; P and dS (2 x 56 x 240 x 4 B = 105
// KiB) stay in L2.
constexpr int kBwdRows = Vec::kWidth == 16 ? 4 * kBwdStrip : 8 * kBwdStrip;
constexpr int kBwdStride = kBwdKeys + 16;  // not a power of two: rows fall into different cache sets

// c[i][..] (+)= sum over n of a[i * kRowStep + n * kStep] * b[n][..], kRows x one panel.
template <int kRows, int kRowStep, int kStep, bool kAdd>
inline void bwd_tile(const float* __restrict a, const float* __restrict b, int count, float* __restrict c,
                     std::int64_t c_stride) {
  constexpr int W = Vec::kWidth;
  Vec::Reg acc[kRows][2];
#pragma GCC unroll 14
  for (int i = 0; i < kRows; ++i) {
    acc[i][0] = kAdd ? Vec::load(c + i * c_stride) : Vec::zero();
    acc[i][1] = kAdd ? Vec::load(c + i * c_stride + W) : Vec::zero();
  }
#pragma GCC unroll 1
  for (int n = 0; n < count; ++n) {
    const Vec::Reg b0 = Vec::load(b), b1 = Vec::load(b + W);
#pragma GCC unroll 14
    for (int i = 0; i < kRows; ++i) {
      const Vec::Reg x = Vec::set1(a[i * kRowStep]);
      acc[i][0] = Vec::fma(x, b0, acc[i][0]);
      acc[i][1] = Vec::fma(x, b1, acc[i][1]);
    }
    a += kStep;
    b += kBwdPanel;
  }
#pragma GCC unroll 14
  for (int i = 0; i < kRows; ++i) {
    Vec::store(c + i * c_stride, acc[i][0]);
    Vec::store(c + i * c_stride + W, acc[i][1]);
  }
}

template <class T>
inline Vec::Reg load_lanes(const T* row, int left) {
  return left >= Vec::kWidth ? Vec::load(row) : left > 0 ? Vec::load_first(row, left) : Vec::zero();
}

// to[x][i] = row(i)[x] for `width` rows, `to_stride` apart; rows that are null are 0.
template <class T, class Rows>
inline void pack_columns(Rows row_of, int width, int columns, float* to, int to_stride) {
  constexpr int W = Vec::kWidth;
  for (int first = 0; first < width; first += W) {
    const int n = imin(W, width - first);
    for (int x = 0; x < columns; x += W) {
      Vec::Reg r[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) {
        const T* row = i < n ? row_of(first + i) : nullptr;
        r[i] = row ? load_lanes(row + x, columns - x) : Vec::zero();
      }
      Vec::transpose(r);
      for (int i = 0; i < imin(W, columns - x); ++i) Vec::store_first(to + (x + i) * to_stride + first, r[i], n);
    }
  }
}

// to[x / panel][at][x % panel] = row[x], `depth` rows a panel; a null row is 0. Notes infinities and NaNs.
template <class T>
inline void pack_row(const T* row, int columns, float* to, int depth, int at, Vec::Flags* bad) {
  for (int x = 0; x < columns; x += kBwdPanel) {
    float* panel = to + (x * depth + at * kBwdPanel);
    for (int half = 0; half < kBwdPanel; half += Vec::kWidth) {
      const Vec::Reg r = row ? load_lanes(row + x + half, columns - x - half) : Vec::zero();
      Vec::drop_non_finite(r, bad);
      Vec::store(panel + half, r);
    }
  }
}

// Panels of one block of keys.
struct KeyBlock {
  std::int64_t key0;
  int keys;    // in use
  bool bad;    // K holds an infinity or a NaN
  float* k_t;  // [panel of keys][head_dim][panel]
  float* v_t;  // [panel of keys][head_dim_v][panel]
  float* k;    // [panel of head_dim][kBwdKeys][panel]
  float* dk;   // [kBwdKeys][d_stride]
  float* dv;   // [kBwdKeys][dv_stride]
};

// Panels of one block of rows.
struct RowBlock {
  std::int64_t row0;
  int rows;    // in use
  bool bad;    // Q or dO holds an infinity or a NaN
  float* q_t;  // [strip][head_dim][kBwdStrip]
  float* g_t;  // [strip][head_dim_v][kBwdStrip]: dO
  float* q;    // [panel of head_dim][kBwdRows][panel]
  float* g;    // [panel of head_dim_v][kBwdRows][panel]
  float lse[kBwdRows], lse_rest[kBwdRows], delta[kBwdRows];
};

struct PairScratch {
  float* p;   // [kBwdRows][kBwdStride]: S, then P
  float* ds;  // [kBwdRows][kBwdStride]: dP, then dS by <q, k> (less the scale)
};

// One kv head's part of a backward call: the forward's sequence plus the gradients' rows.
template <class T>
struct BackwardSequence : Sequence<T> {
  const AttentionBackwardParams* bp;
  std::int64_t head_kv, k_begin;
  const float* lse_rests;  // [batch, heads_q, seq_q], see lse_rest; null: all 0

  std::int64_t row_offset(std::int64_t row, std::int64_t batch, std::int64_t head_stride,
                          std::int64_t token_stride) const {
    const std::int64_t i = this->q_begin + this->token(row);
    return (this->p->cu_seqlens_q.data ? 0 : this->b * batch) + i * token_stride + this->head(row) * head_stride;
  }
  const T* grad_out_row(std::int64_t row) const {
    return static_cast<const T*>(bp->grad_out) +
           row_offset(row, bp->stride_grad_out_batch, bp->stride_grad_out_head, bp->stride_grad_out_token);
  }
  T* grad_q_row(std::int64_t row) const {
    return static_cast<T*>(bp->grad_q) +
           row_offset(row, bp->stride_grad_q_batch, bp->stride_grad_q_head, bp->stride_grad_q_token);
  }
  float grad_lse(std::int64_t row) const {
    if (!bp->grad_lse) return 0.0f;
    return bp
        ->grad_lse[row_offset(row, bp->stride_grad_lse_batch, bp->stride_grad_lse_head, bp->stride_grad_lse_token)];
  }
  T* key_row(void* data, std::int64_t j, std::int64_t batch, std::int64_t head_stride,
             std::int64_t token_stride) const {
    return static_cast<T*>(data) + (this->p->cu_seqlens_k.data ? 0 : this->b * batch) + (k_begin + j) * token_stride +
           head_kv * head_stride;
  }
  T* grad_k_row(std::int64_t j) const {
    return key_row(bp->grad_k, j, bp->stride_grad_k_batch, bp->stride_grad_k_head, bp->stride_grad_k_token);
  }
  T* grad_v_row(std::int64_t j) const {
    return key_row(bp->grad_v, j, bp->stride_grad_v_batch, bp->stride_grad_v_head, bp->stride_grad_v_token);
  }

  // What an LSE far from 0 has lost: the exact one is LSE + rest. Next to -3.4e38 the logarithm of a count is nothing.
  std::int64_t rest_index(std::int64_t row) const {
    return (this->b * this->p->heads_q + this->head(row)) * this->p->seq_q + this->token(row);
  }
  float lse_rest(std::int64_t row) const { return lse_rests ? lse_rests[rest_index(row)] : 0.0f; }

  // <dO, O> - dLSE, which every dS of a row has subtracted.
  float delta(std::int64_t row) const {
    const T* g = grad_out_row(row);
    const T* o = this->out_row(row);
    const int n = static_cast<int>(this->p->head_dim_v);
    Vec::Reg sum = Vec::zero();
    for (int x = 0; x < n; x += Vec::kWidth) sum = Vec::fma(load_lanes(g + x, n - x), load_lanes(o + x, n - x), sum);
    return Vec::sum(sum) - grad_lse(row);
  }
};

template <class T>
inline BackwardSequence<T> backward_sequence(const AttentionBackwardParams& bp, std::int64_t b, std::int64_t head_kv) {
  BackwardSequence<T> s;
  static_cast<Sequence<T>&>(s) = sequence_of<T>(bp.forward, b, head_kv);
  s.bp = &bp;
  s.head_kv = head_kv;
  s.k_begin = bp.forward.cu_seqlens_k.data ? index_at(bp.forward.cu_seqlens_k, b) : 0;
  s.lse_rests = nullptr;
  return s;
}

template <class T>
inline void load_keys(const BackwardSequence<T>& seq, std::int64_t key0, KeyBlock* block) {
  const int d = static_cast<int>(seq.p->head_dim), dv = static_cast<int>(seq.p->head_dim_v);
  block->key0 = key0;
  block->keys = static_cast<int>(imin<std::int64_t>(kBwdKeys, seq.k_len - key0));
  Vec::Flags bad = 0;
  for (int c = 0; c < block->keys; c += kBwdPanel) {
    const auto k_row = [&](int i) { return c + i < block->keys ? seq.k.row(key0 + c + i) : nullptr; };
    const auto v_row = [&](int i) { return c + i < block->keys ? seq.v.row(key0 + c + i) : nullptr; };
    pack_columns<T>(k_row, kBwdPanel, d, block->k_t + c * d, kBwdPanel);
    pack_columns<T>(v_row, kBwdPanel, dv, block->v_t + c * dv, kBwdPanel);
  }
  for (int c = 0; c < kBwdKeys; ++c)
    pack_row<T>(c < block->keys ? seq.k.row(key0 + c) : nullptr, d, block->k, kBwdKeys, c, &bad);
  block->bad = bad != 0;
}

template <class T>
inline void load_rows(const BackwardSequence<T>& seq, std::int64_t row0, RowBlock* block) {
  const int d = static_cast<int>(seq.p->head_dim), dv = static_cast<int>(seq.p->head_dim_v);
  block->row0 = row0;
  block->rows = static_cast<int>(imin<std::int64_t>(kBwdRows, seq.rows() - row0));
  Vec::Flags bad = 0;
  for (int r = 0; r < block->rows; r += kBwdStrip) {
    const auto q_row = [&](int i) { return r + i < block->rows ? seq.q_row(row0 + r + i) : nullptr; };
    const auto g_row = [&](int i) { return r + i < block->rows ? seq.grad_out_row(row0 + r + i) : nullptr; };
    pack_columns<T>(q_row, kBwdStrip, d, block->q_t + r * d, kBwdStrip);
    pack_columns<T>(g_row, kBwdStrip, dv, block->g_t + r * dv, kBwdStrip);
  }
  for (int r = 0; r < kBwdRows; ++r) {
    const bool used = r < block->rows;
    pack_row<T>(used ? seq.q_row(row0 + r) : nullptr, d, block->q, kBwdRows, r, &bad);
    pack_row<T>(used ? seq.grad_out_row(row0 + r) : nullptr, dv, block->g, kBwdRows, r, &bad);
    block->lse[r] = used ? *seq.lse(row0 + r) : kNegInf;
    block->lse_rest[r] = used ? seq.lse_rest(row0 + r) : 0.0f;
    block->delta[r] = used ? seq.delta(row0 + r) : 0.0f;
  }
  block->bad = bad != 0;
}

// One row: s (raw dot products) becomes P, and dp becomes dS; both 0 outside [lo, hi). What dS is before the softcap's
// derivative goes to `grad_score` (the bias's gradient) where that is not null. [from, to): multiples of the vector
// width, to be defined.
template <class T>
inline void pair_row(const BackwardSequence<T>& seq, std::int64_t row, std::int64_t key0, float row_lse, float lse_rest,
                     float delta, float* s, float* dp, int from, int to, int lo, int hi, float* grad_score) {
  constexpr int W = Vec::kWidth;
  const AttentionParams& p = *seq.p;
  const auto clear = [&](int begin, int end) {
    for (int x = begin; x < end; ++x) {
      s[x] = dp[x] = 0.0f;
      if (grad_score) grad_score[x] = 0.0f;
    }
  };
  lo = imax(lo, from);
  hi = imin(hi, to);
  if (lo >= hi || row_lse == kNegInf) return clear(from, to);

  const std::int64_t i = seq.token(row), h = seq.head(row);
  const bool cap = p.softcap > 0;
  const Vec::Reg scale = Vec::set1(cap ? p.scale / p.softcap : p.scale);
  const Vec::Reg softcap = Vec::set1(p.softcap), one = Vec::set1(1.0f);
  const Vec::Reg minus_lse = Vec::set1(-row_lse), log2e = Vec::set1(kLog2E), minus_delta = Vec::set1(-delta);
  const Vec::Reg rest = Vec::set1(lse_rest), hidden = Vec::set1(kNegInf);
  const bool plain = !cap && !p.bias.data && !p.alibi_slopes && !p.mask.data && !p.mask.blocks.data;
  const std::int64_t bias_offset = seq.b * p.bias.stride_batch + h * p.bias.stride_head + i * p.bias.stride_q;
  const Vec::Reg slope = Vec::set1(p.alibi_slopes ? -p.alibi_slopes[seq.b * p.stride_alibi_batch + h] : 0.0f);
  const int a = lo / W * W, e = static_cast<int>(round_up(hi, W));
  clear(from, a);
  clear(e, to);
  for (int x = a; x < e; x += W) {
    // Score less LSE first, in natural units: close to each other where the weight counts, so that little is lost.
    Vec::Reg t, derivative = one;
    if (plain) {
      t = Vec::fma(Vec::load(s + x), scale, minus_lse);
    } else {
      t = Vec::mul(Vec::load(s + x), scale);
      if (cap) {
        t = tanh_lanes(t);
        derivative = Vec::sub(one, Vec::mul(t, t));
        t = Vec::mul(t, softcap);
      }
      if (p.bias.data) {
        const std::int64_t j = key0 + x, at = bias_offset + j * p.bias.stride_k;
        const int n = static_cast<int>(imin<std::int64_t>(W, seq.k_len - j));
        if (p.bias.dtype == DType::kFloat32) {
          t = Vec::add(t, bias_lanes(static_cast<const float*>(p.bias.data) + at, p.bias.stride_k, n));
        } else if (p.bias.dtype == DType::kFloat16) {
          t = Vec::add(t, bias_lanes(static_cast<const Half*>(p.bias.data) + at, p.bias.stride_k, n));
        } else {
          t = Vec::add(t, bias_lanes(static_cast<const BFloat*>(p.bias.data) + at, p.bias.stride_k, n));
        }
      }
      if (p.alibi_slopes) t = add_alibi(p, slope, i + seq.k_len - seq.q_len - key0 - x, t);
      t = Vec::sub(Vec::add(t, minus_lse), rest);
      if (p.mask.data || p.mask.blocks.data) {
        float lanes[W];
        Vec::store(lanes, t);
        hide_scores(shown_keys(seq, h, i, key0 + x), lanes);
        t = Vec::load(lanes);
      }
    }
    const Vec::Reg weight = Vec::exp2<6>(Vec::mul(t, log2e));
    Vec::Reg ds = Vec::mul(weight, Vec::add(Vec::load(dp + x), minus_delta));
    // A score of -inf hides the key: 0 even where dP is not finite.
    ds = Vec::select_less(hidden, t, ds, Vec::select_less(t, Vec::zero(), Vec::zero(), ds));
    Vec::store(s + x, weight);
    if (grad_score) Vec::store(grad_score + x, ds);
    Vec::store(dp + x, cap ? Vec::mul(ds, derivative) : ds);
  }
  clear(a, lo);
  clear(hi, e);
}

// Which columns of a pair's strips hold something: [from, to), multiples of the panel.
struct PairPlan {
  int from[kBwdRows / kBwdStrip], to[kBwdRows / kBwdStrip];
};

// P and dS of the pair. Returns false when no row of the block sees a key of the block.
template <class T>
inline bool pair_scores(const BackwardSequence<T>& seq, const KeyBlock& keys, const RowBlock& rows,
                        const PairScratch& w, PairPlan* plan, float* grad_score) {
  const int d = static_cast<int>(seq.p->head_dim), dv = static_cast<int>(seq.p->head_dim_v);
  const auto relative = [&](std::int64_t key) {
    return static_cast<int>(imin<std::int64_t>(imax<std::int64_t>(key - keys.key0, 0), keys.keys));
  };
  bool anything = false;
  for (int strip = 0; strip * kBwdStrip < kBwdRows; ++strip) {
    const int r0 = strip * kBwdStrip, n = imin(kBwdStrip, rows.rows - r0);
    int from = 0, to = 0;
    if (n > 0) {
      from = relative(seq.first_key(rows.row0 + r0)) / kBwdPanel * kBwdPanel;
      to = relative(seq.last_key(rows.row0 + r0 + n - 1));
    }
    if (from >= to || mask_hides_block(seq, rows.row0 + r0, rows.row0 + r0 + n, keys.key0 + from, keys.key0 + to))
      from = to = 0;
    plan->from[strip] = from;
    plan->to[strip] = to = static_cast<int>(round_up(to, kBwdPanel));
    anything = anything || from < to;
    float* s = w.p + r0 * kBwdStride;
    float* dp = w.ds + r0 * kBwdStride;
    for (int c = from; c < to; c += kBwdPanel) {
      bwd_tile<kBwdStrip, 1, kBwdStrip, false>(rows.q_t + r0 * d, keys.k_t + c * d, d, s + c, kBwdStride);
      bwd_tile<kBwdStrip, 1, kBwdStrip, false>(rows.g_t + r0 * dv, keys.v_t + c * dv, dv, dp + c, kBwdStride);
    }
    for (int r = 0; r < kBwdStrip; ++r) {
      const std::int64_t row = rows.row0 + r0 + r;
      float* const s_row = s + r * kBwdStride;
      float* const dp_row = dp + r * kBwdStride;
      for (int x = 0; x < kBwdStride; x += Vec::kWidth) {  // dK's and dV's tiles may read all of the row
        if (x >= from && x < to) continue;
        Vec::store(s_row + x, Vec::zero());
        Vec::store(dp_row + x, Vec::zero());
      }
      const int lo = r < n ? relative(seq.first_key(row)) : 0, hi = r < n ? relative(seq.last_key(row)) : 0;
      pair_row(seq, row, keys.key0, rows.lse[r0 + r], rows.lse_rest[r0 + r], rows.delta[r0 + r], s_row, dp_row, from,
               to, lo, hi, grad_score ? grad_score + (r0 + r) * kBwdStride : nullptr);
    }
  }
  return anything;
}

// Pair by pair, for blocks that hold infinities or NaNs: only what is not hidden adds anything.
inline void add_gradients_one_by_one(const KeyBlock& keys, const RowBlock& rows, const PairScratch& w, int d, int dv,
                                     float* dq, std::int64_t d_stride, std::int64_t dv_stride, bool want_keys) {
  for (int r = 0; r < rows.rows; ++r) {
    for (int c = 0; c < keys.keys; ++c) {
      const float p = w.p[r * kBwdStride + c], ds = w.ds[r * kBwdStride + c];
      if (p == 0 && ds == 0) continue;
      for (int x = 0; x < d; ++x) {
        const int panel = x / kBwdPanel * kBwdPanel, lane = x % kBwdPanel;
        if (dq) dq[r * d_stride + x] += ds * keys.k[panel * kBwdKeys + c * kBwdPanel + lane];
        if (want_keys) keys.dk[c * d_stride + x] += ds * rows.q[panel * kBwdRows + r * kBwdPanel + lane];
      }
      if (!want_keys) continue;
      for (int x = 0; x < dv; ++x) {
        const int panel = x / kBwdPanel * kBwdPanel, lane = x % kBwdPanel;
        keys.dv[c * dv_stride + x] += p * rows.g[panel * kBwdRows + r * kBwdPanel + lane];
      }
    }
  }
}

// dq (rows of the block, d_stride apart; may be null) += dS K, dk += dS^T Q and dv += P^T dO.
inline void add_gradients(const KeyBlock& keys, const RowBlock& rows, const PairScratch& w, const PairPlan& plan, int d,
                          int dv, float* dq, bool want_keys) {
  const std::int64_t d_stride = round_up(d, kBwdPanel), dv_stride = round_up(dv, kBwdPanel);
  if (keys.bad || rows.bad) {
    add_gradients_one_by_one(keys, rows, w, d, dv, dq, d_stride, dv_stride, want_keys);
    return;
  }
  constexpr int kStrips = kBwdRows / kBwdStrip;
  if (dq) {
    for (int strip = 0; strip < kStrips; ++strip) {
      const int from = plan.from[strip], to = imin(plan.to[strip], keys.keys);
      if (from >= to) continue;
      for (int x = 0; x < d; x += kBwdPanel)
        bwd_tile<kBwdStrip, kBwdStride, 1, true>(w.ds + strip * kBwdStrip * kBwdStride + from,
                                                 keys.k + x * kBwdKeys + from * kBwdPanel, to - from,
                                                 dq + strip * kBwdStrip * d_stride + x, d_stride);
    }
  }
  if (!want_keys) return;
  for (int c = 0; c < keys.keys; c += kBwdStrip) {
    int first = kStrips, last = 0;  // strips of rows that see one of these keys
    for (int strip = 0; strip < kStrips; ++strip) {
      if (plan.from[strip] >= c + kBwdStrip || plan.to[strip] <= c) continue;
      first = imin(first, strip);
      last = strip + 1;
    }
    if (first >= last) continue;
    const int r0 = first * kBwdStrip, count = imin(last * kBwdStrip, rows.rows) - r0;
    for (int x = 0; x < d; x += kBwdPanel)
      bwd_tile<kBwdStrip, 1, kBwdStride, true>(w.ds + r0 * kBwdStride + c, rows.q + x * kBwdRows + r0 * kBwdPanel,
                                               count, keys.dk + c * d_stride + x, d_stride);
    for (int x = 0; x < dv; x += kBwdPanel)
      bwd_tile<kBwdStrip, 1, kBwdStride, true>(w.p + r0 * kBwdStride + c, rows.g + x * kBwdRows + r0 * kBwdPanel, count,
                                               keys.dv + c * dv_stride + x, dv_stride);
  }
}

}  // namespace
}  // namespace flashkernel::cpu
