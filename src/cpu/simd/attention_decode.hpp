// Attention forward for few rows a kv head (decoding): bound by memory, so K and V stream through once for all rows of
// the group, nothing is packed, and keys may be split over threads. Memory is read as several streams, which is faster
// than one: where the heads of a token are neighbours (pages, [batch, seq, heads, dim]), a task takes several kv heads
// for 16 or 32 tokens at a time; where heads lie apart, 16 keys that lie 16 apart. Every row that is read fetches one
// that comes kAheadBytes later. Included by the architectures' attention_fwd.cpp after a vector type. Invariant: a
// row's result is the left fold of partial results over chunks of kChunk keys at fixed positions, whoever computed them
// and with whatever other heads, so that it is the same bit for bit however the work was cut. Paper: Dao et al.,
// "Flash-Decoding for long-context inference" (2023).
#pragma once

#include "cpu/simd/attention_common.hpp"

namespace flashkernel::cpu {
namespace {

constexpr int kChunk = 1024;                // keys whose scores wait for their values: 32 rows x 1024 x 4 B = 128 KiB
constexpr int kDecodeStride = kChunk + 16;  // not a power of two: rows fall into different cache sets
constexpr int kTaskRows = 32;               // rows of all heads of a task
constexpr int kTokenBytes = 4096;  // of all heads of a task; the hardware's prefetchers stop at a page's end as well
constexpr int kValueBlock = 32;    // keys that stay in L1 while all rows and columns use them: 32 x 256 x 4 B = 32 KiB

constexpr int kStreams = 16;       // keys read side by side where heads lie apart
constexpr int kAheadBytes = 8192;  // measured: 1 KiB is too late, from 4 KiB on it makes no difference

inline bool heads_apart(const AttentionParams& p) {
  return p.stride_k_head >= p.stride_k_token || p.stride_v_head >= p.stride_v_token;
}

inline int element_bytes(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? 2 : 1;
}

// The kv heads that a task takes for a sequence of `rows` rows a head: several if those of a token are neighbours.
inline int heads_together(const AttentionParams& p, std::int64_t rows) {
  if (heads_apart(p)) return 1;
  const std::int64_t row_bytes = imax(p.head_dim, p.head_dim_v) * element_bytes(p.dtype);
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

  // The scratch memory of the rows from `row` on.
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

// Rows of keys or values `stride` bytes apart from `base` on; what comes kAheadBytes later lies `ahead` bytes on.
struct RowRun {
  const char* base;
  std::int64_t stride, ahead;
};

// Addresses of kKeys rows. kWhole: a pointer for every fourth row, since GCC keeps 16 of them on the stack; otherwise
// there are n rows, and the last one stands in for those behind it.
template <int kKeys, bool kWhole>
struct RowPointers {
  static constexpr int kCount = kWhole ? (kKeys + 3) / 4 : kKeys;
  const char* row[kCount];
  std::int64_t stride, three_strides;

  RowPointers(const RowRun& run, int n) : stride(run.stride), three_strides(3 * run.stride) {
    for (int i = 0; i < kCount; ++i) row[i] = run.base + (kWhole ? 4 * i : imin(i, n - 1)) * run.stride;
  }
  __attribute__((always_inline)) const char* at(int j) const {
    if (!kWhole) return row[j];
    return row[j / 4] + (j % 4 == 3 ? three_strides : j % 4 * stride);
  }
  __attribute__((always_inline)) void step(int bytes) {
    for (int i = 0; i < kCount; ++i) row[i] += bytes;
  }
};

// sums[r][j] for kRows rows and W / kRows keys (kWhole) or n of them, the last sum repeated: each sum in its own
// register, all reduced together at the end.
template <int kRows, class T, bool kWhole>
inline void score_keys(const float* q, std::int64_t q_stride, const RowRun& run, int n, int d, float* sums) {
  constexpr int W = Vec::kWidth, kKeys = W / kRows, kStepBytes = 2 * W * static_cast<int>(sizeof(T));
  RowPointers<kKeys, kWhole> key(run, n);
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
      const char* at = key.at(j);
      for (int line = 0; line < kStepBytes; line += 64) __builtin_prefetch(at + run.ahead + line);
      Vec::Reg k0, k1;
      Vec::load_pair(reinterpret_cast<const T*>(at), &k0, &k1);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) acc[r * kKeys + j] = Vec::fma(b[r], k1, Vec::fma(a[r], k0, acc[r * kKeys + j]));
    }
    key.step(kStepBytes);
  }
  for (; x < d; x += W) {
#pragma GCC unroll 16
    for (int j = 0; j < kKeys; ++j) {
      const Vec::Reg k = Vec::load_first(reinterpret_cast<const T*>(key.at(j)), imin(W, d - x));
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
        acc[r * kKeys + j] = Vec::fma(Vec::load(q + r * q_stride + x), k, acc[r * kKeys + j]);
    }
    key.step(kStepBytes / 2);
  }
  Vec::store(sums, Vec::sum_rows(acc));
}

// The keys (or values) of a chunk, for the kv heads of a task.
template <class T>
struct TaskKeys {
  const KeyRows<T>* rows;  // of the first head
  std::int64_t head_stride;
  int heads, d;
  std::int64_t key0;
  int end;      // of the keys that may be fetched, from key0 on
  bool spread;  // read kStreams keys side by side: a property of the layout, so that the order of sums is one as well

  // The tokens that lie `stride` apart from j on, at most `most`.
  int run(int j, int most) const { return static_cast<int>(imin<std::int64_t>(most, rows->run(key0 + j))); }
  const T* row(int j) const { return rows->row(key0 + j); }

  // Calls f(h, j, n, step, run) for all keys [from, to) of each head h: n keys, j, j + step, ... at a time.
  template <class F>
  __attribute__((always_inline)) void visit(int from, int to, int most, F f) const {
    constexpr int kBytes = static_cast<int>(sizeof(T)), kBlock = kStreams * kStreams;
    for (int j = from; j < to;) {
      int n = run(j, to - j);
      if (spread && n >= kBlock) {
        const int later = 1 + (kAheadBytes - 1) / (kStreams * d * kBytes);
        for (int i = 0; i < kStreams; ++i) {
          const T* at = row(j + i);
          const int next = i + later < kStreams ? later : later + kBlock - kStreams;
          const std::int64_t ahead = j + i + next < end ? row(j + i + next) - at : 0;
          f(0, j + i, kStreams, kStreams,
            RowRun{reinterpret_cast<const char*>(at), kStreams * rows->stride * kBytes, ahead * kBytes});
        }
        j += kBlock;
        continue;
      }
      n = imin(n, most);
      const T* first = row(j);
      for (int h = 0; h < heads; ++h) {  // all heads for n tokens, then for the next n
        const int later = h + 1 + (kAheadBytes - 1) / (n * d * kBytes), token = j + later / heads * n;
        const T* at = first + h * head_stride;
        const std::int64_t ahead = token < end ? row(token) + later % heads * head_stride - at : 0;
        f(h, j, n, 1, RowRun{reinterpret_cast<const char*>(at), rows->stride * kBytes, ahead * kBytes});
      }
      j += n;
    }
  }
  // Fetches what is visited first. Always inline: to GCC a function that only prefetches has no effect, and it drops
  // calls of it.
  __attribute__((always_inline)) void fetch_start(int from, int to) const {
    const int bytes = d * static_cast<int>(sizeof(T));
    int left = kAheadBytes;
    visit(from, imin(to, from + kStreams * kStreams), Vec::kWidth, [&](int, int, int n, int, const RowRun& run) {
      for (int i = 0; i < n && left > 0; ++i, left -= bytes) {
        for (int x = 0; x < bytes; x += 64) __builtin_prefetch(run.base + i * run.stride + x);
      }
    });
  }
};

// Scores of n keys for kRows rows, `step` apart in s.
template <int kRows, class T>
inline void score_run(const float* q, std::int64_t q_stride, RowRun run, int n, int step, int d, float* s) {
  constexpr int kKeys = Vec::kWidth / kRows;
  for (int j = 0; j < n; j += kKeys, run.base += kKeys * run.stride) {
    float sums[Vec::kWidth];
    if (n - j >= kKeys) {
      score_keys<kRows, T, true>(q, q_stride, run, kKeys, d, sums);
    } else {
      score_keys<kRows, T, false>(q, q_stride, run, n - j, d, sums);
    }
    const int count = imin(kKeys, n - j);
    for (int r = 0; r < kRows; ++r) {
      float* to = s + r * kDecodeStride + j * step;
      if (step == 1 && count == kKeys) {
        __builtin_memcpy(to, sums + r * kKeys, kKeys * sizeof(float));
      } else {
        for (int i = 0; i < count; ++i) to[i * step] = sums[r * kKeys + i];
      }
    }
  }
}

// Scores of keys [from, to) of the chunk for all heads of the task, `rows` rows each.
template <class T>
inline void score_chunk(const TaskKeys<T>& k, int from, int to, int rows, const DecodeScratch& w) {
  k.visit(from, to, Vec::kWidth, [&](int h, int j, int n, int step, const RowRun& run) {
    const float* q = w.q + h * rows * w.q_stride;
    float* s = w.s + h * rows * kDecodeStride + j;
    int r = 0;
    for (; r + 4 <= rows; r += 4)
      score_run<4, T>(q + r * w.q_stride, w.q_stride, run, n, step, k.d, s + r * kDecodeStride);
    if (r + 2 <= rows) {
      score_run<2, T>(q + r * w.q_stride, w.q_stride, run, n, step, k.d, s + r * kDecodeStride);
      r += 2;
    }
    if (r < rows) score_run<1, T>(q + r * w.q_stride, w.q_stride, run, n, step, k.d, s + r * kDecodeStride);
  });
}

// Two registers of a row that may end within them, in the order of load_pair only if it does not.
template <class T>
inline void load_columns(const T* row, int left, Vec::Reg* a, Vec::Reg* b) {
  constexpr int W = Vec::kWidth;
  if (left >= 2 * W) return Vec::load_pair(row, a, b);
  *a = left > 0 ? Vec::load_first(row, imin(W, left)) : Vec::zero();
  *b = left > W ? Vec::load_first(row + W, left - W) : Vec::zero();
}

// o[r][c] += sum over j < n of p[r][j * step] * v[j][c] for kRows rows and kCols registers of columns, of which d are
// real.
template <int kRows, int kCols, class T>
inline void output_run(const float* p, const RowRun& v, int n, int step, int d, float* o, std::int64_t o_stride) {
  constexpr int W = Vec::kWidth, kBytes = kCols * W * static_cast<int>(sizeof(T));
  Vec::Reg acc[kRows][kCols];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) acc[r][c] = Vec::load(o + r * o_stride + c * W);
  }
  const bool whole = d >= kCols * W;
#pragma GCC unroll 1
  for (int j = 0; j < n; ++j) {
    const char* at = v.base + j * v.stride;
    for (int line = 0; line < kBytes; line += 64) __builtin_prefetch(at + v.ahead + line);
    const T* row = reinterpret_cast<const T*>(at);
    Vec::Reg x[kCols];
    if (whole) {
#pragma GCC unroll 4
      for (int c = 0; c < kCols; c += 2) Vec::load_pair(row + c * W, &x[c], &x[c + 1]);
    } else {
#pragma GCC unroll 4
      for (int c = 0; c < kCols; c += 2) load_columns(row + c * W, d - c * W, &x[c], &x[c + 1]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec::Reg a = Vec::set1(p[r * kDecodeStride + j * step]);
#pragma GCC unroll 8
      for (int c = 0; c < kCols; ++c) acc[r][c] = Vec::fma(a, x[c], acc[r][c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) Vec::store(o + r * o_stride + c * W, acc[r][c]);
  }
}

template <int kRows, class T>
inline void output_rows(const float* p, RowRun v, int n, int step, int d, float* o, std::int64_t o_stride) {
  constexpr int W = Vec::kWidth;
  constexpr int kCols = W == 16 || kRows < 4 ? 4 : 2;  // accumulators: 16 of 32 registers, or 8 of 16
  int c = 0;
  if constexpr (W == 16 && kRows <= 2) {  // twice as many while they fit: a row is read in one go
    for (; c + 2 * kCols * W <= d; c += 2 * kCols * W, v.base += 2 * kCols * W * sizeof(T))
      output_run<kRows, 2 * kCols, T>(p, v, n, step, d - c, o + c, o_stride);
  }
  for (; c < d; c += kCols * W, v.base += kCols * W * sizeof(T))
    output_run<kRows, kCols, T>(p, v, n, step, d - c, o + c, o_stride);
}

// o[r] += sum over keys [from, to) of the chunk of p[r][j] * V[j] for all heads of the task, `rows` rows each.
template <class T>
inline void output_chunk(const TaskKeys<T>& v, int from, int to, const float* p, int rows, float* o,
                         std::int64_t o_stride) {
  v.visit(from, to, kValueBlock, [&](int h, int j, int n, int step, const RowRun& run) {
    const float* weight = p + h * rows * kDecodeStride + j;
    float* sum = o + h * rows * o_stride;
    int r = 0;
    for (; r + 4 <= rows; r += 4)
      output_rows<4, T>(weight + r * kDecodeStride, run, n, step, v.d, sum + r * o_stride, o_stride);
    if (r + 2 <= rows) {
      output_rows<2, T>(weight + r * kDecodeStride, run, n, step, v.d, sum + r * o_stride, o_stride);
      r += 2;
    }
    if (r < rows) output_rows<1, T>(weight + r * kDecodeStride, run, n, step, v.d, sum + r * o_stride, o_stride);
  });
}

// Scores of keys [from, to) become weights, for all rows of a head: w.s, w.m and w.l.
template <class T, class K>
inline void weigh_chunk(const Sequence<T, K>& seq, std::int64_t key0, int from, int to, const DecodeScratch& w) {
  constexpr int W = Vec::kWidth;
  const AttentionParams& p = *seq.p;
  const bool plain = plain_scores(p);
  const float factor = log2_factor(p);
  // Scales of an 8-bit cache go along with the scores and with the weights; what is past the ends is masked.
  float k_scale[kQuantized<K> ? kDecodeStride : 1], v_scale[kQuantized<K> ? kDecodeStride : 1];
  if constexpr (kQuantized<K>) {
    for (int x = from / W * W; x < round_up(to, W); ++x) k_scale[x] = v_scale[x] = 1.0f;
    load_scales(seq, p.quantization.k, key0, from, to, k_scale);
    load_scales(seq, p.quantization.v, key0, from, to, v_scale);
  }
  for (int r = 0; r < seq.rows(); ++r) {
    float* s = w.s + r * kDecodeStride;
    const int lo = static_cast<int>(imin<std::int64_t>(to, imax<std::int64_t>(seq.first_key(r) - key0, from)));
    const int hi = static_cast<int>(imax<std::int64_t>(lo, imin<std::int64_t>(seq.last_key(r) - key0, to)));
    const int a = from / W * W, e = static_cast<int>(round_up(to, W));
    mask_scores(s, a, from, to, e);  // never written by the loops above
    if constexpr (kQuantized<K>) {
      for (int x = a; x < e; x += W) Vec::store(s + x, Vec::mul(Vec::load(s + x), Vec::load(k_scale + x)));
    }
    if (!plain) modify_scores(seq, r, key0, s, a, e);
    mask_scores(s, a, lo, hi, e);
    float alpha;
    const Exponent exponent = exponent_of(s, a, e, factor, advance_max(row_max(s, a, e), &w.m[r], &alpha, factor));
    const Vec::Reg reference = Vec::set1(-exponent.reference);
    const Vec::Reg f = Vec::set1(exponent.factor);
    Vec::Reg sum = Vec::zero();
    for (int x = a; x < e; x += W) {
      const Vec::Reg e2 = Vec::exp2<6>(Vec::fma(Vec::load(s + x), f, reference));
      if constexpr (kQuantized<K>) {
        Vec::store(s + x, Vec::mul(e2, Vec::load(v_scale + x)));  // 0 times NaN: repair_outputs sees to it
      } else {
        Vec::store(s + x, e2);
      }
      sum = Vec::add(sum, e2);
    }
    w.l[r] = Vec::sum(sum);
  }
}

// A value that is infinite, or that a row must not see (probability 0 times NaN), shows in the result: then each row of
// the head goes over its own keys, none with the weight 0.
template <class T, class K>
inline void repair_outputs(const Sequence<T, K>& seq, std::int64_t key0, int from, int to, const DecodeScratch& w) {
  constexpr int W = Vec::kWidth;
  const int rows = static_cast<int>(seq.rows()), dv = static_cast<int>(seq.p->head_dim_v);
  Vec::Reg check = Vec::zero();
  for (int r = 0; r < rows; ++r) {
    for (int x = 0; x < dv; x += W) check = Vec::fma(Vec::load(w.o + r * w.o_stride + x), Vec::zero(), check);
  }
  if (Vec::sum(check) == 0.0f) return;
  const TaskKeys<K> v{&seq.v, 0, 1, dv, key0, to, false};
  for (int r = 0; r < rows; ++r) {
    float* o = w.o + r * w.o_stride;
    for (std::int64_t x = 0; x < w.o_stride; x += W) Vec::store(o + x, Vec::zero());
    const int lo = static_cast<int>(imin<std::int64_t>(to, imax<std::int64_t>(seq.first_key(r) - key0, from)));
    const int hi = static_cast<int>(imin<std::int64_t>(seq.last_key(r) - key0, to));
    for (int j = lo; j < hi; ++j) w.s[r * kDecodeStride + j] = imax(w.s[r * kDecodeStride + j], kLeastWeight);
    for (int j = lo; j < hi;) {
      if (score_hides(seq, r, key0 + j)) {
        ++j;
        continue;
      }
      int end = j + 1;
      while (end < hi && !score_hides(seq, r, key0 + end)) ++end;
      output_chunk(v, j, end, w.s + r * kDecodeStride, 1, o, w.o_stride);
      j = end;
    }
  }
}

// The partial result (w.o, w.m, w.l) of one chunk of keys for all rows of a sequence and `heads` kv heads from its own.
template <class T, class K>
inline void decode_chunk(const Sequence<T, K>& seq, int heads, std::int64_t key0, const DecodeScratch& w) {
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
  // Keys of the next chunk may be fetched as well.
  const int end = static_cast<int>(imin<std::int64_t>(seq.last_key(rows - 1) - key0, 2 * kChunk));
  const bool spread = heads_apart(p);
  const TaskKeys<K> k{&seq.k, p.stride_k_head, heads, static_cast<int>(p.head_dim), key0, end, spread};
  const TaskKeys<K> v{&seq.v, p.stride_v_head, heads, static_cast<int>(p.head_dim_v), key0, end, spread};
  score_chunk(k, from, to, rows, w);
  v.fetch_start(from, to);
  for (int h = 0; h < heads; ++h) weigh_chunk(seq.other_head(h), key0, from, to, w.from(h * rows));
  output_chunk(v, from, to, w.s, rows, w.o, w.o_stride);
  for (int h = 0; h < heads; ++h) repair_outputs(seq.other_head(h), key0, from, to, w.from(h * rows));
}

template <class T, class K>
inline void load_queries(const Sequence<T, K>& seq, const DecodeScratch& w) {
  const int d = static_cast<int>(seq.p->head_dim);
  for (std::int64_t r = 0; r < seq.rows(); ++r) {
    const T* q = seq.q_row(r);
    for (int x = 0; x < d; x += 2 * Vec::kWidth) {
      Vec::Reg low, high;
      if constexpr (kQuantized<K>) {  // in the order of the keys
        low = Vec::load_first(q + x, imin(Vec::kWidth, d - x));
        high = d - x > Vec::kWidth ? Vec::load_first(q + x + Vec::kWidth, imin(Vec::kWidth, d - x - Vec::kWidth))
                                   : Vec::zero();
      } else {
        load_columns(q + x, d - x, &low, &high);
      }
      Vec::store(w.q + r * w.q_stride + x, low);
      Vec::store(w.q + r * w.q_stride + x + Vec::kWidth, high);
    }
  }
}

// total := total + part, for one row.
inline void fold_row(const float* o, float m, float l, float factor, float* total_o, float* total_m, float* total_l,
                     std::int64_t n) {
  float keep;
  const float reference = advance_max(m, total_m, &keep, factor);
  const float add = m == *total_m ? 1.0f : exp2_weight((m - reference) * factor);
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

template <class T, class K>
inline void finish_total(const Sequence<T, K>& seq, const DecodeScratch& w) {
  for (std::int64_t r = 0; r < seq.rows(); ++r) {
    float* o = w.total_o + r * w.o_stride;
    for (std::int64_t x = 0; x + 2 * Vec::kWidth <= seq.p->head_dim_v; x += 2 * Vec::kWidth) {
      Vec::Reg low = Vec::load(o + x), high = Vec::load(o + x + Vec::kWidth);
      Vec::natural_order<K>(&low, &high);
      Vec::store(o + x, low);
      Vec::store(o + x + Vec::kWidth, high);
    }
    finish_row(seq, r, o, w.total_m[r], w.total_l[r]);
  }
}

// All keys of a sequence and `heads` kv heads in one task.
template <class T, class K>
void decode_task(const Sequence<T, K>& seq, int heads, const DecodeScratch& w) {
  const std::int64_t rows = seq.rows();
  for (int h = 0; h < heads; ++h) load_queries(seq.other_head(h), w.from(h * rows));
  start_total(w, heads * rows);
  const float factor = log2_factor(*seq.p);
  const std::int64_t last = seq.last_key(rows - 1);
  for (std::int64_t key0 = seq.first_key(0) / kChunk * kChunk; key0 < last; key0 += kChunk) {
    decode_chunk(seq, heads, key0, w);
    for (std::int64_t r = 0; r < heads * rows; ++r) {
      fold_row(w.o + r * w.o_stride, w.m[r], w.l[r], factor, w.total_o + r * w.o_stride, &w.total_m[r], &w.total_l[r],
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

template <class T, class K>
void decode_part(const Sequence<T, K>& seq, int heads, std::int64_t key0, const DecodeScratch& w, float* part,
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

template <class T, class K>
void decode_fold(const Sequence<T, K>& seq, const DecodeScratch& w, const float* parts, std::int64_t part_stride) {
  const std::int64_t rows = seq.rows();
  start_total(w, rows);
  const float factor = log2_factor(*seq.p);
  const std::int64_t last = seq.last_key(rows - 1);
  for (std::int64_t key0 = seq.first_key(0) / kChunk * kChunk; key0 < last; key0 += kChunk) {
    const float* part = parts + key0 / kChunk * part_stride;
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* from = part + r * (w.o_stride + 2);
      fold_row(from, from[w.o_stride], from[w.o_stride + 1], factor, w.total_o + r * w.o_stride, &w.total_m[r],
               &w.total_l[r], w.o_stride);
    }
  }
  finish_total(seq, w);
}

}  // namespace
}  // namespace flashkernel::cpu
