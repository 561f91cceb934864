// Attention forward for few rows a kv head (decoding): bound by memory, so K and V stream through once for all rows of
// the group, nothing is packed, and keys may be split over threads. Where the heads of a token are neighbours (pages,
// [batch, seq, heads, dim]), a task takes several kv heads and walks tokens in the outer loop, so that it reads memory
// in order. Included by the architectures' attention_fwd.cpp after a vector type. Invariant: a row's result is the left
// fold of partial results over chunks of kChunk keys at fixed positions, whoever computed them and with whatever other
// heads, so that it is the same bit for bit however the work was cut. Paper: Dao et al., "Flash-Decoding for
// long-context inference" (2023).
#pragma once

#include "cpu/simd/attention_common.hpp"

namespace flashkernel::cpu {
namespace {

constexpr int kChunk = 1024;                // keys whose scores wait for their values: 32 rows x 1024 x 4 B = 128 KiB
constexpr int kDecodeStride = kChunk + 16;  // not a power of two: rows fall into different cache sets
constexpr int kTaskRows = 32;               // rows of all heads of a task
constexpr int kTokenBytes = 4096;  // of all heads of a task; the hardware's prefetchers stop at a page's end as well
constexpr int kValueBlock = 32;    // keys that stay in L1 while all rows and columns use them: 32 x 256 x 4 B = 32 KiB

constexpr int kPrefetchBytes = 8192;  // measured: 1 KiB is too late, from 4 KiB on it makes no difference

// The kv heads that a task takes for a sequence of `rows` rows a head: several if those of a token are neighbours.
inline int heads_together(const AttentionParams& p, std::int64_t rows) {
  if (p.stride_k_head >= p.stride_k_token || p.stride_v_head >= p.stride_v_token) return 1;
  const std::int64_t row_bytes = imax(p.head_dim, p.head_dim_v) * (p.dtype == DType::kFloat32 ? 4 : 2);
  const std::int64_t most = imin(kTaskRows / imax<std::int64_t>(rows, 1), kTokenBytes / row_bytes);
  return static_cast<int>(imax<std::int64_t>(1, imin(most, p.heads_kv)));
}

struct DecodeScratch {  // rows: kTaskRows, or kDecodeRows where tasks take one head only
  float* q;             // [rows][q_stride]
  float* s;             // [rows][kDecodeStride]
  float* o;             // [rows][o_stride], of one chunk
  float* m;             // [rows]
  float* l;             // [rows]
  float* total_o;       // the same, of the chunks so far
  float* total_m;
  float* total_l;
  std::int64_t q_stride, o_stride;

  // That of the rows from `row` on.
  DecodeScratch from(std::int64_t row) const {
    DecodeScratch w = *this;
    w.q += row * q_stride;
    w.s += row * kDecodeStride;
    w.o += row * o_stride;
    w.m += row;
    w.l += row;
    w.total_o += row * o_stride;
    w.total_m += row;
    w.total_l += row;
    return w;
  }
};

inline DecodeScratch decode_scratch(const AttentionParams& p, void* memory, std::int64_t* bytes) {
  const std::int64_t rows = heads_together(p, 1) > 1 ? kTaskRows : kDecodeRows;
  Arena arena{static_cast<char*>(memory)};
  DecodeScratch w;
  w.q_stride = round_up(p.head_dim, 2 * Vec::kWidth);
  w.o_stride = round_up(p.head_dim_v, 4 * Vec::kWidth);
  w.q = arena.take<float>(rows * w.q_stride);
  w.s = arena.take<float>(rows * kDecodeStride);
  w.o = arena.take<float>(rows * w.o_stride);
  w.m = arena.take<float>(rows);
  w.l = arena.take<float>(rows);
  w.total_o = arena.take<float>(rows * w.o_stride);
  w.total_m = arena.take<float>(rows);
  w.total_l = arena.take<float>(rows);
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
  for (int r = 0; r < kRows; ++r) __builtin_memcpy(s + r * kDecodeStride, lanes + r * kKeys, kKeys * sizeof(float));
}

// The keys (or values) of a chunk, for the kv heads of a task.
template <class T>
struct TaskKeys {
  const KeyRows<T>* rows;  // of the first head
  std::int64_t head_stride;
  int heads, d;
  std::int64_t key0;

  // The tokens that lie `stride` apart from j on, at most `most`.
  int run(int j, int most) const { return static_cast<int>(imin<std::int64_t>(most, rows->run(key0 + j))); }
  const T* row(int j) const { return rows->row(key0 + j); }
  // Fetches what comes after head h of the n tokens from j on, up to token `end`: the next head's rows, of the next
  // tokens behind the last head. One head alone is too short a step: kPrefetchBytes further on then.
  // Always inline: to GCC a function that only prefetches has no effect, and it drops calls of it.
  __attribute__((always_inline)) void fetch_next(int j, int n, int h, int end) const {
    const int ahead = heads > 1 ? n : imax(1, kPrefetchBytes / (d * static_cast<int>(sizeof(T))));
    const int next = (h + 1) % heads, first = next ? j : j + ahead;
    if (first >= end) return;
    const T* at = row(first) + next * head_stride;
    for (int i = run(first, imin(n, end - first)); i > 0; --i, at += rows->stride) {
      for (int x = 0; x < d; x += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(at + x);
    }
  }
};

// Scores of `n` keys `stride` apart for kRows rows. The last group of keys repeats key n - 1: same sums, kept within s.
template <int kRows, class T>
inline void score_run(const float* q, std::int64_t q_stride, const T* k, std::int64_t stride, int n, int d, float* s) {
  constexpr int kKeys = Vec::kWidth / kRows;
  const T* key[Vec::kWidth];
  int j = 0;
  for (; j + kKeys <= n; j += kKeys) {
    for (int i = 0; i < kKeys; ++i) key[i] = k + (j + i) * stride;
    score_keys<kRows>(q, q_stride, key, d, s + j);
  }
  if (j < n) {
    float rest[(kRows - 1) * kDecodeStride + kKeys];
    for (int i = 0; i < kKeys; ++i) key[i] = k + imin(j + i, n - 1) * stride;
    score_keys<kRows>(q, q_stride, key, d, rest);
    for (int r = 0; r < kRows; ++r) {
      for (int i = j; i < n; ++i) s[r * kDecodeStride + i] = rest[r * kDecodeStride + i - j];
    }
  }
}

// Scores of keys [from, to) of the chunk for all heads of the task, `rows` rows each.
template <class T>
inline void score_chunk(const TaskKeys<T>& k, int from, int to, int rows, const DecodeScratch& w) {
  const std::int64_t stride = k.rows->stride;
  for (int j = from; j < to;) {
    const int n = k.run(j, imin(Vec::kWidth, to - j));
    const T* base = k.row(j);
    for (int h = 0; h < k.heads; ++h, base += k.head_stride) {
      k.fetch_next(j, n, h, to);
      const float* q = w.q + h * rows * w.q_stride;
      float* s = w.s + h * rows * kDecodeStride + j;
      int r = 0;
      for (; r + 4 <= rows; r += 4)
        score_run<4>(q + r * w.q_stride, w.q_stride, base, stride, n, k.d, s + r * kDecodeStride);
      if (r + 2 <= rows) {
        score_run<2>(q + r * w.q_stride, w.q_stride, base, stride, n, k.d, s + r * kDecodeStride);
        r += 2;
      }
      if (r < rows) score_run<1>(q + r * w.q_stride, w.q_stride, base, stride, n, k.d, s + r * kDecodeStride);
    }
    j += n;
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
      const Vec::Reg a = Vec::set1(p[r * kDecodeStride + j]);
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

// o[r] += sum over keys [from, to) of the chunk of p[r][j] * V[j] for all heads of the task, `rows` rows each.
template <class T>
inline void output_chunk(const TaskKeys<T>& v, int from, int to, const float* p, int rows, float* o,
                         std::int64_t o_stride) {
  const std::int64_t stride = v.rows->stride;
  for (int j = from; j < to;) {
    const int n = v.run(j, imin(kValueBlock, to - j));
    const T* base = v.row(j);
    for (int h = 0; h < v.heads; ++h, base += v.head_stride) {
      v.fetch_next(j, n, h, to);
      const float* weight = p + h * rows * kDecodeStride + j;
      float* sum = o + h * rows * o_stride;
      int r = 0;
      for (; r + 4 <= rows; r += 4)
        output_rows<4>(weight + r * kDecodeStride, base, stride, n, v.d, sum + r * o_stride, o_stride);
      if (r + 2 <= rows) {
        output_rows<2>(weight + r * kDecodeStride, base, stride, n, v.d, sum + r * o_stride, o_stride);
        r += 2;
      }
      if (r < rows) output_rows<1>(weight + r * kDecodeStride, base, stride, n, v.d, sum + r * o_stride, o_stride);
    }
    j += n;
  }
}

// Scores of keys [from, to) become weights, for all rows of a head: w.s, w.m and w.l.
template <class T>
inline void weigh_chunk(const Sequence<T>& seq, std::int64_t key0, int from, int to, const DecodeScratch& w) {
  constexpr int W = Vec::kWidth;
  const AttentionParams& p = *seq.p;
  const bool plain = plain_scores(p);
  const float factor = log2_factor(p);
  for (int r = 0; r < seq.rows(); ++r) {
    float* s = w.s + r * kDecodeStride;
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
}

// A value that is infinite, or that a row must not see (probability 0 times NaN), shows in the result: then each row of
// the head goes over its own keys, none with the weight 0.
template <class T>
inline void repair_outputs(const Sequence<T>& seq, std::int64_t key0, int from, int to, const DecodeScratch& w) {
  constexpr int W = Vec::kWidth;
  const int rows = static_cast<int>(seq.rows()), dv = static_cast<int>(seq.p->head_dim_v);
  Vec::Reg check = Vec::zero();
  for (int r = 0; r < rows; ++r) {
    for (int x = 0; x < dv; x += W) check = Vec::fma(Vec::load(w.o + r * w.o_stride + x), Vec::zero(), check);
  }
  if (Vec::sum(check) == 0.0f) return;
  const TaskKeys<T> v{&seq.v, 0, 1, dv, key0};
  for (int r = 0; r < rows; ++r) {
    float* o = w.o + r * w.o_stride;
    for (std::int64_t x = 0; x < w.o_stride; x += W) Vec::store(o + x, Vec::zero());
    const int lo = static_cast<int>(imin<std::int64_t>(to, imax<std::int64_t>(seq.first_key(r) - key0, from)));
    const int hi = static_cast<int>(imin<std::int64_t>(seq.last_key(r) - key0, to));
    for (int j = lo; j < hi; ++j) w.s[r * kDecodeStride + j] = imax(w.s[r * kDecodeStride + j], kLeastWeight);
    for (int j = lo; j < hi;) {
      if (bias_hides(seq, r, key0 + j)) {
        ++j;
        continue;
      }
      int end = j + 1;
      while (end < hi && !bias_hides(seq, r, key0 + end)) ++end;
      output_chunk(v, j, end, w.s + r * kDecodeStride, 1, o, w.o_stride);
      j = end;
    }
  }
}

// The partial result (w.o, w.m, w.l) of one chunk of keys for all rows of a sequence and `heads` kv heads from its own.
template <class T>
inline void decode_chunk(const Sequence<T>& seq, int heads, std::int64_t key0, const DecodeScratch& w) {
  const AttentionParams& p = *seq.p;
  const int rows = static_cast<int>(seq.rows());
  const int from = static_cast<int>(imin<std::int64_t>(kChunk, imax<std::int64_t>(seq.first_key(0) - key0, 0)));
  const int to = static_cast<int>(imin<std::int64_t>(seq.last_key(rows - 1) - key0, kChunk));
  for (int r = 0; r < heads * rows; ++r) {
    w.m[r] = kNegInf;
    w.l[r] = 0.0f;
    for (std::int64_t x = 0; x < w.o_stride; x += Vec::kWidth) Vec::store(w.o + r * w.o_stride + x, Vec::zero());
  }
  if (from >= to) return;
  score_chunk(TaskKeys<T>{&seq.k, p.stride_k_head, heads, static_cast<int>(p.head_dim), key0}, from, to, rows, w);
  for (int h = 0; h < heads; ++h) weigh_chunk(seq.other_head(h), key0, from, to, w.from(h * rows));
  output_chunk(TaskKeys<T>{&seq.v, p.stride_v_head, heads, static_cast<int>(p.head_dim_v), key0}, from, to, w.s, rows,
               w.o, w.o_stride);
  for (int h = 0; h < heads; ++h) repair_outputs(seq.other_head(h), key0, from, to, w.from(h * rows));
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

// All keys of a sequence and `heads` kv heads in one task.
template <class T>
void decode_task(const Sequence<T>& seq, int heads, const DecodeScratch& w) {
  const std::int64_t rows = seq.rows();
  for (int h = 0; h < heads; ++h) load_queries(seq.other_head(h), w.from(h * rows));
  start_total(w, heads * rows);
  const std::int64_t last = seq.last_key(rows - 1);
  for (std::int64_t key0 = seq.first_key(0) / kChunk * kChunk; key0 < last; key0 += kChunk) {
    decode_chunk(seq, heads, key0, w);
    for (std::int64_t r = 0; r < heads * rows; ++r) {
      fold_row(w.o + r * w.o_stride, w.m[r], w.l[r], w.total_o + r * w.o_stride, &w.total_m[r], &w.total_l[r],
               w.o_stride);
    }
  }
  for (int h = 0; h < heads; ++h) finish_total(seq.other_head(h), w.from(h * rows));
}

// Split keys: each chunk's partial result goes to `part` as [rows][o_stride + 2] (o, m, l), that of the next head to
// `head_stride` behind it; then one task folds each head's.
inline std::int64_t part_floats(const AttentionParams& p, std::int64_t rows) {
  return rows * (round_up(p.head_dim_v, 4 * Vec::kWidth) + 2);
}

template <class T>
void decode_part(const Sequence<T>& seq, int heads, std::int64_t key0, const DecodeScratch& w, float* part,
                 std::int64_t head_stride) {
  const std::int64_t rows = seq.rows();
  for (int h = 0; h < heads; ++h) load_queries(seq.other_head(h), w.from(h * rows));
  decode_chunk(seq, heads, key0, w);
  for (std::int64_t r = 0; r < heads * rows; ++r) {
    float* to = part + r / rows * head_stride + r % rows * (w.o_stride + 2);
    for (std::int64_t x = 0; x < w.o_stride; x += Vec::kWidth) Vec::store(to + x, Vec::load(w.o + r * w.o_stride + x));
    to[w.o_stride] = w.m[r];
    to[w.o_stride + 1] = w.l[r];
  }
}

template <class T>
void decode_fold(const Sequence<T>& seq, const DecodeScratch& w, const float* parts, std::int64_t part_stride) {
  const std::int64_t rows = seq.rows();
  start_total(w, rows);
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
