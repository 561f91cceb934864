// Attention forward for few rows a kv head (decoding): bound by memory, so K and V stream through once for all rows of
// the group, nothing is packed, and keys may be split over threads. Included by the architectures' attention_fwd.cpp
// after a vector type. Invariant: a row's result is the left fold of partial results over chunks of kChunk keys at
// fixed positions, whoever computed them, so that it is the same bit for bit whether the keys were split or not. Paper:
// Dao et al., "Flash-Decoding for long-context inference" (2023).
#pragma once

#include "cpu/simd/attention_common.hpp"

namespace flashkernel::cpu {
namespace {

constexpr int kChunk = 1024;     // keys whose scores wait for their values: 16 rows x 1024 x 4 B = 64 KiB
constexpr int kValueBlock = 32;  // keys that stay in L1 while all rows and columns use them: 32 x 256 x 4 B = 32 KiB

constexpr int kPrefetchBytes = 8192;  // measured: 1 KiB is too late, from 4 KiB on it makes no difference

struct DecodeScratch {
  float* q;        // [kDecodeRows][q_stride]
  float* s;        // [kDecodeRows][kChunk]
  float* o;        // [kDecodeRows][o_stride], of one chunk
  float* m;        // [kDecodeRows]
  float* l;        // [kDecodeRows]
  float* total_o;  // the same, of the chunks so far
  float* total_m;
  float* total_l;
  std::int64_t q_stride, o_stride;
};

inline DecodeScratch decode_scratch(const AttentionParams& p, void* memory, std::int64_t* bytes) {
  Arena arena{static_cast<char*>(memory)};
  DecodeScratch w;
  w.q_stride = round_up(p.head_dim, 2 * Vec::kWidth);
  w.o_stride = round_up(p.head_dim_v, 4 * Vec::kWidth);
  w.q = arena.take<float>(kDecodeRows * w.q_stride);
  w.s = arena.take<float>(kDecodeRows * kChunk);
  w.o = arena.take<float>(kDecodeRows * w.o_stride);
  w.m = arena.take<float>(kDecodeRows);
  w.l = arena.take<float>(kDecodeRows);
  w.total_o = arena.take<float>(kDecodeRows * w.o_stride);
  w.total_m = arena.take<float>(kDecodeRows);
  w.total_l = arena.take<float>(kDecodeRows);
  *bytes = arena.at - static_cast<char*>(memory);
  return w;
}

// s[r][j] for kRows rows and W / kRows keys at `row[]`: each sum in its own register, all reduced together at the end.
template <int kRows, class T>
inline void score_keys(const float* q, std::int64_t q_stride, const T* const* key, int d, float* s) {
  constexpr int W = Vec::kWidth, kKeys = W / kRows;
  Vec::Reg acc[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) acc[i] = Vec::zero();
  int x = 0;
#pragma GCC unroll 1
  for (; x + 2 * W <= d; x += 2 * W) {  // q lies in the order of load_pair, see load_queries
    Vec::Reg a[kRows], b[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      a[r] = Vec::load(q + r * q_stride + x);
      b[r] = Vec::load(q + r * q_stride + x + W);
    }
#pragma GCC unroll 16
    for (int j = 0; j < kKeys; ++j) {
      Vec::Reg k0, k1;
      Vec::load_pair(key[j] + x, &k0, &k1);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) acc[r * kKeys + j] = Vec::fma(b[r], k1, Vec::fma(a[r], k0, acc[r * kKeys + j]));
    }
  }
  for (; x < d; x += W) {
#pragma GCC unroll 16
    for (int j = 0; j < kKeys; ++j) {
      const Vec::Reg k = Vec::load_first(key[j] + x, imin(W, d - x));
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
        acc[r * kKeys + j] = Vec::fma(Vec::load(q + r * q_stride + x), k, acc[r * kKeys + j]);
    }
  }
  float lanes[W];
  Vec::store(lanes, Vec::sum_rows(acc));
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) __builtin_memcpy(s + r * kChunk, lanes + r * kKeys, kKeys * sizeof(float));
}

template <class T>
inline void fetch_row(const T* row, int d) {
  for (int x = 0; x < d; x += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(row + x);
}
// How many keys lie between what is computed and what is fetched.
template <class T>
inline std::int64_t keys_ahead(int d) {
  return imax<std::int64_t>(1, kPrefetchBytes / (d * static_cast<int>(sizeof(T))));
}

// Scores of `n` keys `stride` apart for kRows rows. The last group of keys repeats key n - 1: same sums, kept within s.
template <int kRows, class T>
inline void score_run(const float* q, std::int64_t q_stride, const T* k, std::int64_t stride, int n, int d, float* s,
                      std::int64_t ahead) {
  constexpr int kKeys = Vec::kWidth / kRows;
  const T* key[Vec::kWidth];
  int j = 0;
  for (; j + kKeys <= n; j += kKeys) {
    for (int i = 0; i < kKeys; ++i) {
      key[i] = k + (j + i) * stride;
      if (ahead) fetch_row(key[i] + ahead * stride, d);
    }
    score_keys<kRows>(q, q_stride, key, d, s + j);
  }
  if (j < n) {
    float rest[(kRows - 1) * kChunk + kKeys];
    for (int i = 0; i < kKeys; ++i) key[i] = k + imin(j + i, n - 1) * stride;
    score_keys<kRows>(q, q_stride, key, d, rest);
    for (int r = 0; r < kRows; ++r) {
      for (int i = j; i < n; ++i) s[r * kChunk + i] = rest[r * kChunk + i - j];
    }
  }
}

// Two registers of a row that may end within them, in the order of load_pair only if it does not.
template <class T>
inline void load_columns(const T* row, int left, Vec::Reg* a, Vec::Reg* b) {
  constexpr int W = Vec::kWidth;
  if (left >= 2 * W) return Vec::load_pair(row, a, b);
  *a = left > 0 ? Vec::load_first(row, imin(W, left)) : Vec::zero();
  *b = left > W ? Vec::load_first(row + W, left - W) : Vec::zero();
}

// o[r][c] += sum over j < n of p[r][j] * v[j][c] for kRows rows and kCols registers of columns.
template <int kRows, int kCols, class T>
inline void output_run(const float* p, const T* v, std::int64_t stride, int n, int d, float* o, std::int64_t o_stride) {
  constexpr int W = Vec::kWidth;
  Vec::Reg acc[kRows][kCols];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kCols; ++c) acc[r][c] = Vec::load(o + r * o_stride + c * W);
  }
  const bool whole = d >= kCols * W;
#pragma GCC unroll 1
  for (int j = 0; j < n; ++j) {
    Vec::Reg x[kCols];
    if (whole) {
#pragma GCC unroll 2
      for (int c = 0; c < kCols; c += 2) Vec::load_pair(v + j * stride + c * W, &x[c], &x[c + 1]);
    } else {
#pragma GCC unroll 2
      for (int c = 0; c < kCols; c += 2) load_columns(v + j * stride + c * W, d - c * W, &x[c], &x[c + 1]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec::Reg a = Vec::set1(p[r * kChunk + j]);
#pragma GCC unroll 4
      for (int c = 0; c < kCols; ++c) acc[r][c] = Vec::fma(a, x[c], acc[r][c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kCols; ++c) Vec::store(o + r * o_stride + c * W, acc[r][c]);
  }
}

template <int kRows, class T>
inline void output_rows(const float* p, const T* v, std::int64_t stride, int n, int d, float* o,
                        std::int64_t o_stride) {
  constexpr int kCols = Vec::kWidth == 16 || kRows < 4 ? 4 : 2;  // accumulators: 16 of 32 registers, or 8 of 16
  for (int c = 0; c < d; c += kCols * Vec::kWidth)
    output_run<kRows, kCols>(p, v + c, stride, n, d - c, o + c, o_stride);
}

// o[r] += sum over keys [from, to) of the chunk at key0 of p[r][j] * V[j], for `rows` rows.
template <class T>
inline void output_keys(const KeyRows<T>& v, std::int64_t key0, int from, int to, const float* p, int rows, int d,
                        float* o, std::int64_t o_stride) {
  const std::int64_t ahead = keys_ahead<T>(d);
  for (int j = from; j < to;) {
    const int n = static_cast<int>(imin<std::int64_t>(imin(kValueBlock, to - j), v.run(key0 + j)));
    const T* base = v.row(key0 + j);
    for (int i = 0; i < n; ++i) fetch_row(base + (i + ahead) * v.stride, d);
    int r = 0;
    for (; r + 4 <= rows; r += 4) output_rows<4>(p + r * kChunk + j, base, v.stride, n, d, o + r * o_stride, o_stride);
    if (r + 2 <= rows) {
      output_rows<2>(p + r * kChunk + j, base, v.stride, n, d, o + r * o_stride, o_stride);
      r += 2;
    }
    if (r < rows) output_rows<1>(p + r * kChunk + j, base, v.stride, n, d, o + r * o_stride, o_stride);
    j += n;
  }
}

// The partial result (w.o, w.m, w.l) of one chunk of keys for all rows of a sequence and kv head.
template <class T>
inline void decode_chunk(const Sequence<T>& seq, std::int64_t key0, const DecodeScratch& w) {
  constexpr int W = Vec::kWidth;
  const AttentionParams& p = *seq.p;
  const int rows = static_cast<int>(seq.rows()), d = static_cast<int>(p.head_dim), dv = static_cast<int>(p.head_dim_v);
  const int from = static_cast<int>(imin<std::int64_t>(kChunk, imax<std::int64_t>(seq.first_key(0) - key0, 0)));
  const int to = static_cast<int>(imin<std::int64_t>(seq.last_key(rows - 1) - key0, kChunk));
  for (int r = 0; r < rows; ++r) {
    w.m[r] = kNegInf;
    w.l[r] = 0.0f;
    for (std::int64_t x = 0; x < w.o_stride; x += W) Vec::store(w.o + r * w.o_stride + x, Vec::zero());
  }
  if (from >= to) return;

  const std::int64_t ahead = keys_ahead<T>(d);
  for (int j = from; j < to;) {
    const int n = static_cast<int>(imin<std::int64_t>(imin(W, to - j), seq.k.run(key0 + j)));
    const T* base = seq.k.row(key0 + j);
    int r = 0;
    for (; r + 4 <= rows; r += 4)
      score_run<4>(w.q + r * w.q_stride, w.q_stride, base, seq.k.stride, n, d, w.s + r * kChunk + j, r ? 0 : ahead);
    if (r + 2 <= rows) {
      score_run<2>(w.q + r * w.q_stride, w.q_stride, base, seq.k.stride, n, d, w.s + r * kChunk + j, r ? 0 : ahead);
      r += 2;
    }
    if (r < rows)
      score_run<1>(w.q + r * w.q_stride, w.q_stride, base, seq.k.stride, n, d, w.s + r * kChunk + j, r ? 0 : ahead);
    j += n;
  }

  const bool plain = plain_scores(p);
  const float factor = log2_factor(p);
  for (int r = 0; r < rows; ++r) {
    float* s = w.s + r * kChunk;
    const int lo = static_cast<int>(imin<std::int64_t>(to, imax<std::int64_t>(seq.first_key(r) - key0, from)));
    const int hi = static_cast<int>(imax<std::int64_t>(lo, imin<std::int64_t>(seq.last_key(r) - key0, to)));
    const int a = from / W * W, e = static_cast<int>(round_up(to, W));
    mask_scores(s, a, from, to, e);  // never written by the loops above
    if (!plain) modify_scores(seq, r, key0, s, a, e);
    mask_scores(s, a, lo, hi, e);
    float alpha;
    const Exponent exponent = exponent_of(s, a, e, factor, advance_max(row_max(s, a, e) * factor, &w.m[r], &alpha));
    const Vec::Reg reference = Vec::set1(-exponent.reference);
    const Vec::Reg f = Vec::set1(exponent.factor);
    Vec::Reg sum = Vec::zero();
    for (int x = a; x < e; x += W) {
      const Vec::Reg e2 = Vec::exp2<6>(Vec::fma(Vec::load(s + x), f, reference));
      Vec::store(s + x, e2);
      sum = Vec::add(sum, e2);
    }
    w.l[r] = Vec::sum(sum);
  }

  output_keys(seq.v, key0, from, to, w.s, rows, dv, w.o, w.o_stride);
  // A value that is infinite, or that a row must not see (probability 0 times NaN), shows in the result: then each row
  // goes over its own keys, none with the weight 0.
  Vec::Reg check = Vec::zero();
  for (int r = 0; r < rows; ++r) {
    for (int x = 0; x < dv; x += W) check = Vec::fma(Vec::load(w.o + r * w.o_stride + x), Vec::zero(), check);
  }
  if (Vec::sum(check) == 0.0f) return;
  for (int r = 0; r < rows; ++r) {
    float* o = w.o + r * w.o_stride;
    for (std::int64_t x = 0; x < w.o_stride; x += W) Vec::store(o + x, Vec::zero());
    const int lo = static_cast<int>(imin<std::int64_t>(to, imax<std::int64_t>(seq.first_key(r) - key0, from)));
    const int hi = static_cast<int>(imin<std::int64_t>(seq.last_key(r) - key0, to));
    for (int j = lo; j < hi; ++j) w.s[r * kChunk + j] = imax(w.s[r * kChunk + j], kLeastWeight);
    for (int j = lo; j < hi;) {
      if (bias_hides(seq, r, key0 + j)) {
        ++j;
        continue;
      }
      int end = j + 1;
      while (end < hi && !bias_hides(seq, r, key0 + end)) ++end;
      output_keys(seq.v, key0, j, end, w.s + r * kChunk, 1, dv, o, w.o_stride);
      j = end;
    }
  }
}

template <class T>
inline void load_queries(const Sequence<T>& seq, const DecodeScratch& w) {
  const int d = static_cast<int>(seq.p->head_dim);
  for (std::int64_t r = 0; r < seq.rows(); ++r) {
    const T* q = seq.q_row(r);
    for (int x = 0; x < d; x += 2 * Vec::kWidth) {
      Vec::Reg low, high;
      load_columns(q + x, d - x, &low, &high);
      Vec::store(w.q + r * w.q_stride + x, low);
      Vec::store(w.q + r * w.q_stride + x + Vec::kWidth, high);
    }
  }
}

// total := total + part, for one row.
inline void fold_row(const float* o, float m, float l, float* total_o, float* total_m, float* total_l, std::int64_t n) {
  float keep;
  const float reference = advance_max(m, total_m, &keep);
  const float add = m == *total_m ? 1.0f : exp2_weight(m - reference);
  const Vec::Reg a = Vec::set1(keep), b = Vec::set1(add);
  for (std::int64_t x = 0; x < n; x += Vec::kWidth) {
    Vec::store(total_o + x, Vec::fma(Vec::load(o + x), b, Vec::mul(Vec::load(total_o + x), a)));
  }
  *total_l = __builtin_fmaf(l, add, *total_l * keep);
}

template <class T>
inline void start_total(const DecodeScratch& w, std::int64_t rows) {
  for (std::int64_t r = 0; r < rows; ++r) {
    w.total_m[r] = kNegInf;
    w.total_l[r] = 0.0f;
    for (std::int64_t x = 0; x < w.o_stride; x += Vec::kWidth) Vec::store(w.total_o + r * w.o_stride + x, Vec::zero());
  }
}

template <class T>
inline void finish_total(const Sequence<T>& seq, const DecodeScratch& w) {
  for (std::int64_t r = 0; r < seq.rows(); ++r) {
    float* o = w.total_o + r * w.o_stride;
    for (std::int64_t x = 0; x + 2 * Vec::kWidth <= seq.p->head_dim_v; x += 2 * Vec::kWidth) {
      Vec::Reg low = Vec::load(o + x), high = Vec::load(o + x + Vec::kWidth);
      Vec::natural_order<T>(&low, &high);
      Vec::store(o + x, low);
      Vec::store(o + x + Vec::kWidth, high);
    }
    finish_row(seq, r, o, w.total_m[r], w.total_l[r]);
  }
}

// All keys of a sequence and kv head in one task.
template <class T>
void decode_task(const Sequence<T>& seq, const DecodeScratch& w) {
  const std::int64_t rows = seq.rows();
  load_queries(seq, w);
  start_total<T>(w, rows);
  const std::int64_t last = seq.last_key(rows - 1);
  for (std::int64_t key0 = seq.first_key(0) / kChunk * kChunk; key0 < last; key0 += kChunk) {
    decode_chunk(seq, key0, w);
    for (std::int64_t r = 0; r < rows; ++r) {
      fold_row(w.o + r * w.o_stride, w.m[r], w.l[r], w.total_o + r * w.o_stride, &w.total_m[r], &w.total_l[r],
               w.o_stride);
    }
  }
  finish_total(seq, w);
}

// Split keys: each chunk's partial result goes to `part` as [rows][o_stride + 2] (o, m, l); then one task folds them.
inline std::int64_t part_floats(const AttentionParams& p, std::int64_t rows) {
  return rows * (round_up(p.head_dim_v, 4 * Vec::kWidth) + 2);
}

template <class T>
void decode_part(const Sequence<T>& seq, std::int64_t key0, const DecodeScratch& w, float* part) {
  load_queries(seq, w);
  decode_chunk(seq, key0, w);
  for (std::int64_t r = 0; r < seq.rows(); ++r) {
    float* to = part + r * (w.o_stride + 2);
    for (std::int64_t x = 0; x < w.o_stride; x += Vec::kWidth) Vec::store(to + x, Vec::load(w.o + r * w.o_stride + x));
    to[w.o_stride] = w.m[r];
    to[w.o_stride + 1] = w.l[r];
  }
}

template <class T>
void decode_fold(const Sequence<T>& seq, const DecodeScratch& w, const float* parts, std::int64_t part_stride) {
  const std::int64_t rows = seq.rows();
  start_total<T>(w, rows);
  const std::int64_t last = seq.last_key(rows - 1);
  for (std::int64_t key0 = seq.first_key(0) / kChunk * kChunk; key0 < last; key0 += kChunk) {
    const float* part = parts + key0 / kChunk * part_stride;
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* from = part + r * (w.o_stride + 2);
      fold_row(from, from[w.o_stride], from[w.o_stride + 1], w.total_o + r * w.o_stride, &w.total_m[r], &w.total_l[r],
               w.o_stride);
    }
  }
  finish_total(seq, w);
}

}  // namespace
}  // namespace flashkernel::cpu
