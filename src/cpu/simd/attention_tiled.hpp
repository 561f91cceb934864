// Attention forward for many rows a kv head, any input type, fp32 arithmetic: K and V of a key block are converted and
// packed into panels once per task, then strips of rows run scores -> softmax -> output while their scores sit in L1.
// Included by avx2/attention_fwd.cpp and avx512/attention_fwd.cpp after a vector type.
// Invariants: at most one task's panels per thread exist at a time (memory O(threads), not O(seq)); key blocks lie at
// fixed multiples of kKeyBlock; V is packed with its infinities and NaNs set to 0, and rows that do see such a value
// get it back. Paper: FlashAttention-2 (Dao 2023), algorithm 1; the register tiles follow Goto & van de Geijn (2008).
#pragma once

#include "cpu/simd/attention_common.hpp"

namespace flashkernel::cpu {
namespace {

// 14 x 2 accumulators + 2 operands + 1 broadcast = 31 of 32 registers (AVX-512); 6 x 2 + 2 + 1 = 15 of 16 (AVX2).
constexpr int kStripRows = Vec::kWidth == 16 ? 14 : 6;
constexpr int kPanel = 2 * Vec::kWidth;
constexpr int kKeyBlock = 256;                     // 256 keys x 64 x 4 B x 2 = 128 KiB of panels: stays in L2
constexpr int kScoreStride = kKeyBlock + 16;       // not a power of two: rows fall into different cache sets
constexpr int kMostStrips = 20, kLeastStrips = 4;  // packing costs about 8 / rows of the arithmetic

struct TiledScratch {
  float* q;      // [strips][head_dim][kStripRows]
  float* o;      // [strips * kStripRows][o_stride]
  float* m;      // [strips * kStripRows], units of the scores
  float* l;      // [strips * kStripRows]
  float* k;      // [kKeyBlock / kPanel][head_dim][kPanel]
  float* v;      // [o_stride / kPanel][kKeyBlock][kPanel]
  float* s;      // [kStripRows][kScoreStride]
  float* alpha;  // [kStripRows]
  std::int64_t o_stride;
};

inline TiledScratch tiled_scratch(const AttentionParams& p, int strips, void* memory, std::int64_t* bytes) {
  Arena arena{static_cast<char*>(memory)};
  TiledScratch w;
  const std::int64_t rows = strips * kStripRows;
  w.o_stride = round_up(p.head_dim_v, kPanel);
  w.q = arena.take<float>(rows * p.head_dim);
  w.o = arena.take<float>(rows * w.o_stride);
  w.m = arena.take<float>(rows);
  w.l = arena.take<float>(rows);
  w.k = arena.take<float>(kKeyBlock * p.head_dim);
  w.v = arena.take<float>(kKeyBlock * w.o_stride);
  w.s = arena.take<float>(kStripRows * kScoreStride);
  w.alpha = arena.take<float>(kStripRows);
  *bytes = arena.at - static_cast<char*>(memory);
  return w;
}

// k[x][c] = K[key0 + c][x] for a panel of keys; keys from `n` on are 0.
template <class T, class K>
inline void pack_k_panel(const Sequence<T, K>& seq, std::int64_t key0, int n, int d, float* out) {
  constexpr int W = Vec::kWidth;
  float scales[kPanel];
  if constexpr (kQuantized<K>) load_scales(seq, seq.p->quantization.k, key0, 0, n, scales);
  for (int half = 0; half < 2; ++half) {
    const K* row[W];
    for (int i = 0; i < W; ++i) row[i] = half * W + i < n ? seq.k.row(key0 + half * W + i) : nullptr;
    for (int x = 0; x < d; x += W) {
      Vec::Reg r[W];
      const int left = d - x;
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) {
        r[i] = !row[i] ? Vec::zero() : left >= W ? Vec::load(row[i] + x) : Vec::load_first(row[i] + x, left);
        if constexpr (kQuantized<K>) {
          if (row[i]) r[i] = Vec::mul(r[i], Vec::set1(scales[half * W + i]));
        }
      }
      Vec::transpose(r);
      for (int i = 0; i < imin(W, left); ++i) Vec::store(out + (x + i) * kPanel + half * W, r[i]);
    }
  }
}

// v[c / kPanel][j][c % kPanel] = V[key0 + j][c] for j in [from, to); returns whether a value was not finite.
template <class T, class K>
inline bool pack_v(const Sequence<T, K>& seq, std::int64_t key0, int from, int to, int d, float* out) {
  constexpr int W = Vec::kWidth;
  Vec::Flags bad = 0;
  float scales[kKeyBlock];
  if constexpr (kQuantized<K>) load_scales(seq, seq.p->quantization.v, key0, from, to, scales);
  for (int j = from; j < to; ++j) {
    const K* row = seq.v.row(key0 + j);
    for (int x = 0; x < d; x += kPanel) {
      float* to_row = out + (x / kPanel * kKeyBlock + j) * kPanel;
      for (int half = 0; half < 2; ++half) {
        const int left = d - x - half * W;
        Vec::Reg r = left >= W  ? Vec::load(row + x + half * W)
                     : left > 0 ? Vec::load_first(row + x + half * W, left)
                                : Vec::zero();
        if constexpr (kQuantized<K>) r = Vec::mul(r, Vec::set1(scales[j]));
        Vec::store(to_row + half * W, Vec::drop_non_finite(r, &bad));
      }
    }
  }
  return bad != 0;
}

// s[r][c] = sum over x of q[x][r] * k[x][c], one strip by one panel.
template <int kRows>
inline void score_tile(const float* __restrict q, const float* __restrict k, int d, float* __restrict s) {
  constexpr int W = Vec::kWidth;
  Vec::Reg acc[kRows][2];
#pragma GCC unroll 14
  for (int r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = Vec::zero();
#pragma GCC unroll 1
  for (int x = 0; x < d; ++x) {
    const Vec::Reg k0 = Vec::load(k), k1 = Vec::load(k + W);
#pragma GCC unroll 14
    for (int r = 0; r < kRows; ++r) {
      const Vec::Reg a = Vec::set1(q[r]);
      acc[r][0] = Vec::fma(a, k0, acc[r][0]);
      acc[r][1] = Vec::fma(a, k1, acc[r][1]);
    }
    q += kStripRows;
    k += kPanel;
  }
#pragma GCC unroll 14
  for (int r = 0; r < kRows; ++r) {
    Vec::store(s + r * kScoreStride, acc[r][0]);
    Vec::store(s + r * kScoreStride + W, acc[r][1]);
  }
}

// o[r][c] = alpha[r] * o[r][c] + sum over j in [from, to) of p[r][j] * v[j][c], one strip by one panel.
template <int kRows>
inline void output_tile(const float* __restrict p, const float* __restrict v, int from, int to,
                        const float* __restrict alpha, float* __restrict o, std::int64_t o_stride) {
  constexpr int W = Vec::kWidth;
  Vec::Reg acc[kRows][2];
#pragma GCC unroll 14
  for (int r = 0; r < kRows; ++r) {
    const Vec::Reg a = Vec::set1(alpha[r]);
    acc[r][0] = Vec::mul(a, Vec::load(o + r * o_stride));
    acc[r][1] = Vec::mul(a, Vec::load(o + r * o_stride + W));
  }
  v += from * kPanel;
  p += from;
#pragma GCC unroll 1
  for (int j = from; j < to; ++j) {
    const Vec::Reg v0 = Vec::load(v), v1 = Vec::load(v + W);
#pragma GCC unroll 14
    for (int r = 0; r < kRows; ++r) {
      const Vec::Reg a = Vec::set1(p[r * kScoreStride]);
      acc[r][0] = Vec::fma(a, v0, acc[r][0]);
      acc[r][1] = Vec::fma(a, v1, acc[r][1]);
    }
    v += kPanel;
    ++p;
  }
#pragma GCC unroll 14
  for (int r = 0; r < kRows; ++r) {
    Vec::store(o + r * o_stride, acc[r][0]);
    Vec::store(o + r * o_stride + W, acc[r][1]);
  }
}

// One row of scores becomes probabilities in place; [from, to) (multiples of the panel) is what the output tiles will
// read, [lo, hi) what the row sees, both relative to the block.
template <class T, class K>
inline void softmax_row(const Sequence<T, K>& seq, std::int64_t row, std::int64_t key0, float* s, int from, int to,
                        int lo, int hi, bool plain, float factor, float* m, float* l, float* alpha) {
  constexpr int W = Vec::kWidth;
  lo = imax(lo, from);
  hi = imin(hi, to);
  if (lo >= hi) {
    for (int x = from; x < to; x += W) Vec::store(s + x, Vec::zero());
    *alpha = 1.0f;
    return;
  }
  const int a = lo / W * W, e = static_cast<int>(round_up(hi, W));
  for (int x = from; x < a; x += W) Vec::store(s + x, Vec::zero());
  for (int x = e; x < to; x += W) Vec::store(s + x, Vec::zero());
  if (!plain) modify_scores(seq, row, key0, s, a, e);
  mask_scores(s, a, lo, hi, e);
  const Exponent exponent = exponent_of(s, a, e, factor, advance_max(row_max(s, a, e), m, alpha, factor));
  const Vec::Reg reference = Vec::set1(-exponent.reference);
  const Vec::Reg f = Vec::set1(exponent.factor);
  Vec::Reg sum0 = Vec::zero(), sum1 = Vec::zero();
  int x = a;
  for (; x + 2 * W <= e; x += 2 * W) {
    const Vec::Reg p0 = Vec::exp2<6>(Vec::fma(Vec::load(s + x), f, reference));
    const Vec::Reg p1 = Vec::exp2<6>(Vec::fma(Vec::load(s + x + W), f, reference));
    Vec::store(s + x, p0);
    Vec::store(s + x + W, p1);
    sum0 = Vec::add(sum0, p0);
    sum1 = Vec::add(sum1, p1);
  }
  if (x < e) {
    const Vec::Reg p0 = Vec::exp2<6>(Vec::fma(Vec::load(s + x), f, reference));
    Vec::store(s + x, p0);
    sum0 = Vec::add(sum0, p0);
  }
  *l = *l * *alpha + Vec::sum(Vec::add(sum0, sum1));
}

inline float widen(float x) { return x; }
inline float widen(BFloat x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}
template <class K>
inline float widen(K x) {
  float lanes[Vec::kWidth];
  Vec::store(lanes, Vec::load_first(&x, 1));
  return lanes[0];
}
inline bool is_finite(float x) { return __builtin_fabsf(x) < __builtin_inff(); }

// The infinities and NaNs of V that packing left out, added to the one row that sees them. Rare, so nothing is hurried.
template <class T, class K, class Probability>
inline void add_non_finite(const Sequence<T, K>& seq, std::int64_t row, std::int64_t key0, int lo, int hi,
                           Probability p, float* o) {
  for (int j = lo; j < hi; ++j) {
    if (score_hides(seq, row, key0 + j)) continue;
    const K* values = seq.v.row(key0 + j);
    float scale = 1.0f;
    if constexpr (kQuantized<K>) load_scales(seq, seq.p->quantization.v, key0 + j, 0, 1, &scale);
    for (std::int64_t x = 0; x < seq.p->head_dim_v; ++x) {
      const float v = widen(values[x]) * scale;
      if (!is_finite(v)) o[x] += imax(p(j), kLeastWeight) * v;
    }
  }
}

template <int kRows>
inline void strip_scores(const TiledScratch& w, const float* q, int d, int from, int to) {
  for (int c = from; c < to; c += kPanel) score_tile<kRows>(q, w.k + c * d, d, w.s + c);
}
template <int kRows>
inline void strip_outputs(const TiledScratch& w, float* o, int from, int to) {
  for (std::int64_t c = 0; c < w.o_stride; c += kPanel) {
    output_tile<kRows>(w.s, w.v + c * kKeyBlock, from, to, w.alpha, o + c, w.o_stride);
  }
}

// Rows [row0, row1) of one sequence and kv head.
template <class T, class K>
void tiled_task(const Sequence<T, K>& seq, std::int64_t row0, std::int64_t row1, const TiledScratch& w) {
  const AttentionParams& p = *seq.p;
  const int d = static_cast<int>(p.head_dim), dv = static_cast<int>(p.head_dim_v);
  const int rows = static_cast<int>(row1 - row0);
  const bool plain = plain_scores(p);
  const float factor = log2_factor(p);

  for (int r = 0; r < round_up(rows, kStripRows); ++r) {  // rows past the end: zeros, so that tiles need no edges
    float* to = w.q + r / kStripRows * kStripRows * d + r % kStripRows;
    const T* from = r < rows ? seq.q_row(row0 + r) : nullptr;
    for (int x = 0; x < d; x += Vec::kWidth) {
      float lanes[Vec::kWidth] = {};
      const int n = imin(Vec::kWidth, d - x);
      if (from) Vec::store(lanes, Vec::load_first(from + x, n));
      for (int i = 0; i < n; ++i) to[(x + i) * kStripRows] = lanes[i];
    }
    w.m[r] = kNegInf;
    w.l[r] = 0.0f;
    for (std::int64_t x = 0; x < w.o_stride; x += Vec::kWidth) Vec::store(w.o + r * w.o_stride + x, Vec::zero());
  }

  const std::int64_t first = seq.first_key(row0), last = seq.last_key(row1 - 1);
  for (std::int64_t key0 = first / kKeyBlock * kKeyBlock; key0 < last; key0 += kKeyBlock) {
    const int block_from = static_cast<int>(imax<std::int64_t>(first - key0, 0)) / kPanel * kPanel;
    const int block_to = static_cast<int>(imin<std::int64_t>(last - key0, kKeyBlock));
    if (mask_hides_block(seq, row0, row1, key0 + block_from, key0 + block_to)) continue;
    for (int c = block_from; c < block_to; c += kPanel)
      pack_k_panel(seq, key0 + c, imin(kPanel, block_to - c), d, w.k + c * d);
    const bool bad_v = pack_v(seq, key0, block_from, block_to, dv, w.v);

    for (int r0 = 0; r0 < rows; r0 += kStripRows) {
      const int n = imin(kStripRows, rows - r0);
      const int from = static_cast<int>(imax<std::int64_t>(seq.first_key(row0 + r0) - key0, 0)) / kPanel * kPanel;
      const int to = static_cast<int>(imin<std::int64_t>(seq.last_key(row0 + r0 + n - 1) - key0, kKeyBlock));
      if (from >= to || mask_hides_block(seq, row0 + r0, row0 + r0 + n, key0 + from, key0 + to)) continue;
      const int padded = static_cast<int>(round_up(to, kPanel));
      const float* q = w.q + static_cast<std::int64_t>(r0) * d;
      if (n > kStripRows / 2) {
        strip_scores<kStripRows>(w, q, d, from, padded);
      } else {
        strip_scores<kStripRows / 2>(w, q, d, from, padded);
      }
      for (int r = 0; r < n; ++r) {
        const std::int64_t row = row0 + r0 + r;
        const int lo = static_cast<int>(imax<std::int64_t>(seq.first_key(row) - key0, 0));
        const int hi = static_cast<int>(imin<std::int64_t>(seq.last_key(row) - key0, kKeyBlock));
        softmax_row(seq, row, key0, w.s + r * kScoreStride, from, padded, lo, hi, plain, factor, &w.m[r0 + r],
                    &w.l[r0 + r], &w.alpha[r]);
      }
      float* o = w.o + r0 * w.o_stride;
      if (n > kStripRows / 2) {
        strip_outputs<kStripRows>(w, o, from, to);
      } else {
        strip_outputs<kStripRows / 2>(w, o, from, to);
      }
      if (!bad_v) continue;
      for (int r = 0; r < n; ++r) {
        const std::int64_t row = row0 + r0 + r;
        const int lo = static_cast<int>(imax<std::int64_t>(seq.first_key(row) - key0, 0));
        const int hi = static_cast<int>(imin<std::int64_t>(seq.last_key(row) - key0, kKeyBlock));
        const float* probability = w.s + r * kScoreStride;
        add_non_finite(
            seq, row, key0, lo, hi, [=](int j) { return probability[j]; }, o + r * w.o_stride);
      }
    }
  }
  for (int r = 0; r < rows; ++r) finish_row(seq, row0 + r, w.o + r * w.o_stride, w.m[r], w.l[r]);
}

// What attention_entry.hpp asks of a many-row kernel.
struct TiledPath {
  static constexpr int kStrip = kStripRows, kLeast = kLeastStrips;
  static int most(const AttentionParams&) { return kMostStrips; }
  static std::int64_t scratch_bytes(const AttentionParams& p) {
    std::int64_t bytes;
    tiled_scratch(p, kMostStrips, nullptr, &bytes);
    return bytes;
  }
  template <class T, class K>
  static void run(const Sequence<T, K>& seq, std::int64_t row0, std::int64_t row1, char* memory) {
    std::int64_t bytes;
    tiled_task(seq, row0, row1, tiled_scratch(*seq.p, kMostStrips, memory, &bytes));
  }
};

}  // namespace
}  // namespace flashkernel::cpu
