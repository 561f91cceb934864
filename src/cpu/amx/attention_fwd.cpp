// Attention forward on AMX bf16 tiles: bf16 directly, fp16 and fp32 as sums of two and three bf16 parts (3 and 6 tile
// products for one), with an fp32 softmax. A row of cpu/kernels.cpp; few-row sequences take simd/attention_decode.hpp
// as with AVX-512. Invariants: as simd/attention_tiled.hpp; what the tiles cannot carry (see pack.hpp) is added in fp32
// to the pairs it touches. Papers: FlashAttention-2 (Dao 2023), algorithm 1; Henry, Tang, Heinecke (2019) for the
// split.
#include "cpu/amx/attention_fwd.hpp"

#include "cpu/simd/vec_avx512.hpp"
// The vector type comes first.
#include "cpu/amx/pack.hpp"
#include "cpu/simd/attention_entry.hpp"

namespace flashkernel::cpu::amx {
namespace {

constexpr int kStripRows = 32;                // two row tiles
constexpr int kKeyBlock = 256;                // K and V of a block: 2 x 256 x 64 x 2 B = 64 KiB a part, in L2
constexpr int kScoreStride = kKeyBlock + 16;  // in floats; not a power of two: rows fall into different cache sets

template <int kParts>
struct Scratch {
  std::uint16_t* q;     // [kParts][row tiles][d tiles] left tiles
  std::uint16_t* k;     // [kParts][kKeyBlock / 16][d tiles] right tiles
  std::uint16_t* v;     // [kParts][o_stride / 16][kKeyBlock / 32] right tiles
  std::uint16_t* p;     // [kParts][2][kKeyBlock / 32] left tiles
  float* s;             // [kStripRows][kScoreStride]
  float* o;             // [rows][o_stride]
  float* m;             // [rows], units of the scores
  float* l;             // [rows]
  std::uint8_t* bad_q;  // [rows]
  std::uint8_t* bad_k;  // [kKeyBlock]
  std::int64_t o_stride, d_tiles, q_part, k_part, v_part, p_part;
};

inline int most_strips(const AttentionParams& p) { return p.head_dim > 128 || p.head_dim_v > 128 ? 8 : 16; }

template <int kParts>
inline Scratch<kParts> make_scratch(const AttentionParams& p, void* memory, std::int64_t* bytes) {
  Arena arena{static_cast<char*>(memory)};
  const std::int64_t rows = std::int64_t{most_strips(p)} * kStripRows;
  Scratch<kParts> w;
  w.o_stride = round_up(p.head_dim_v, 32);
  w.d_tiles = ceil_div(p.head_dim, 32);
  w.q_part = rows * w.d_tiles * 32;
  w.k_part = kKeyBlock * w.d_tiles * 32;
  w.v_part = kKeyBlock * w.o_stride;
  w.p_part = kStripRows * kKeyBlock;
  w.q = arena.take<std::uint16_t>(kParts * w.q_part);
  w.k = arena.take<std::uint16_t>(kParts * w.k_part);
  w.v = arena.take<std::uint16_t>(kParts * w.v_part);
  w.p = arena.take<std::uint16_t>(kParts * w.p_part);
  w.s = arena.take<float>(kStripRows * kScoreStride);
  w.o = arena.take<float>(rows * w.o_stride);
  w.m = arena.take<float>(rows);
  w.l = arena.take<float>(rows);
  w.bad_q = arena.take<std::uint8_t>(rows);
  w.bad_k = arena.take<std::uint8_t>(kKeyBlock);
  *bytes = arena.at - static_cast<char*>(memory);
  return w;
}

inline float widen(float x) { return x; }
inline float widen(BFloat x) { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(x.bits << 16))); }
inline float widen(Half x) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x.bits))); }

// s = Q K^T for a strip and keys [from, to) of the block, both multiples of 32.
template <class S>
inline void strip_scores(const Scratch<S::kParts>& w, const std::uint16_t* q, int from, int to) {
  const std::int64_t tile_row = w.d_tiles * kTileValues;
  fence();
  for (int c = from; c < to; c += 32) {
    const std::uint16_t* k = w.k + c / 16 * tile_row;
    zero_accumulators();
    for (std::int64_t x = 0; x < w.d_tiles; ++x) {
      multiply_tiles<S::kParts, S::kHalf>(q + x * kTileValues, w.q_part, tile_row, k + x * kTileValues, w.k_part,
                                          tile_row);
    }
    store_accumulators(w.s + c, kScoreStride * 4);
  }
  fence();
}

// o += P V for a strip and keys [from, to) of the block.
template <class S>
inline void strip_outputs(const Scratch<S::kParts>& w, float* o, int from, int to) {
  constexpr std::int64_t kBlockTiles = kKeyBlock / 32 * kTileValues;
  fence();
  for (std::int64_t c = 0; c < w.o_stride; c += 32) {
    load_accumulators(o + c, w.o_stride * 4);
    for (int j = from; j < to; j += 32) {
      multiply_tiles<S::kParts, S::kHalf>(w.p + j / 32 * kTileValues, w.p_part, kBlockTiles,
                                          w.v + c / 16 * kBlockTiles + j / 32 * kTileValues, w.v_part, kBlockTiles);
    }
    store_accumulators(o + c, w.o_stride * 4);
  }
  fence();
}

// The keys of a block that a row sees, in its own range and rounded to whole pairs of registers.
struct RowRange {
  int lo, hi, first, last;
};

// Sixteen rows of scores become probabilities in w.p, the rows' maxima, sums and outputs move along. Rows go side by
// side because the horizontal steps (maximum, sum, the state's few scalars) cost more than a row's exponentials
// otherwise.
template <class S>
inline void softmax_rows(const Sequence<typename S::Element>& seq, std::int64_t row0, int r0, int n, std::int64_t key0,
                         int from, int to, bool plain, float factor, const Scratch<S::kParts>& w, float* m, float* l,
                         float* o) {
  // Half inputs round the output to 2^-9 or 2^-12: a polynomial good to 2.9e-6 is far below.
  constexpr int kParts = S::kParts, kDegree = kParts == 3 ? 6 : 4;
  constexpr int kRows = 16;
  float* s = w.s + r0 * kScoreStride;
  std::uint16_t* p = w.p + r0 / 16 * (kKeyBlock / 32 * kTileValues);
  RowRange range[kRows];
  __m512 lanes[kRows];
  for (int r = 0; r < kRows; ++r) {
    RowRange& x = range[r];
    const std::int64_t row = row0 + imin(r, n - 1);
    x.lo = static_cast<int>(imax<std::int64_t>(seq.first_key(row) - key0, from));
    x.hi = static_cast<int>(imin<std::int64_t>(seq.last_key(row) - key0, to));
    const bool any = r < n && x.lo < x.hi;
    x.first = any ? x.lo / 32 * 32 : to;
    x.last = any ? static_cast<int>(round_up(x.hi, 32)) : to;
    __m512 top0 = _mm512_set1_ps(kNegInf), top1 = top0;
    if (any) {
      float* scores = s + r * kScoreStride;
      if (!plain) modify_scores(seq, row, key0, scores, x.first, x.last);
      mask_scores(scores, x.first, x.lo, x.hi, x.last);
      for (int j = x.first; j < x.last; j += 32) {  // a NaN is dropped here and comes back through exp2 into the sum
        top0 = Vec::max(Vec::load(scores + j), top0);
        top1 = Vec::max(Vec::load(scores + j + 16), top1);
      }
    }
    lanes[r] = Vec::max(top0, top1);
  }

  // As advance_max does for one row.
  const __m512 old_m = Vec::load(m);
  const __m512 new_m = Vec::max(Vec::max_rows(lanes), old_m);
  const __mmask16 unseen = _mm512_cmp_ps_mask(new_m, _mm512_set1_ps(kNegInf), _CMP_EQ_OQ);
  const __m512 reference = _mm512_mask_mov_ps(new_m, unseen, _mm512_setzero_ps());
  const __mmask16 moved = _mm512_cmp_ps_mask(old_m, new_m, _CMP_NEQ_UQ);
  const __m512 weight = Vec::max(_mm512_set1_ps(kLeastWeight),
                                 Vec::exp2<6>(Vec::mul(Vec::sub(old_m, reference), _mm512_set1_ps(factor))));
  const __m512 alpha = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), moved, weight);
  Vec::store(m, new_m);
  alignas(64) float references[kRows], alphas[kRows];
  _mm512_store_ps(references, reference);
  _mm512_store_ps(alphas, alpha);

  for (int r = 0; r < kRows; ++r) {
    const RowRange& x = range[r];
    float* scores = s + r * kScoreStride;
    std::uint16_t* out = p + r * 32;
    __m512 sum0 = _mm512_setzero_ps(), sum1 = sum0;
    for (int j = from; j < x.first; j += 32) {
      for (int i = 0; i < kParts; ++i)
        _mm512_store_si512(out + i * w.p_part + j / 32 * kTileValues, _mm512_setzero_si512());
    }
    if (x.first < x.last) {
      const Exponent exponent = exponent_of(scores, x.first, x.last, factor, references[r]);
      const __m512 shift = _mm512_set1_ps(-exponent.reference), f = _mm512_set1_ps(exponent.factor);
      for (int j = x.first; j < x.last; j += 32) {
        const __m512 p0 = Vec::exp2<kDegree>(Vec::fma(Vec::load(scores + j), f, shift));
        const __m512 p1 = Vec::exp2<kDegree>(Vec::fma(Vec::load(scores + j + 16), f, shift));
        sum0 = Vec::add(sum0, p0);
        sum1 = Vec::add(sum1, p1);
        __m512i part[kParts];
        split_probabilities<S>(p0, p1, part);
#pragma GCC unroll 3
        for (int i = 0; i < kParts; ++i) _mm512_store_si512(out + i * w.p_part + j / 32 * kTileValues, part[i]);
      }
    }
    for (int j = x.last; j < to; j += 32) {
      for (int i = 0; i < kParts; ++i)
        _mm512_store_si512(out + i * w.p_part + j / 32 * kTileValues, _mm512_setzero_si512());
    }
    lanes[r] = Vec::add(sum0, sum1);
  }
  Vec::store(l, Vec::fma(Vec::load(l), alpha, Vec::sum_rows(lanes)));

  for (unsigned left = moved; left; left &= left - 1) {
    const int r = __builtin_ctz(left);
    const __m512 a = _mm512_set1_ps(alphas[r]);
    float* to_row = o + r * w.o_stride;
    for (std::int64_t x = 0; x < w.o_stride; x += 16) Vec::store(to_row + x, Vec::mul(Vec::load(to_row + x), a));
  }
}

// Scores of the pairs whose query or key the tiles could not carry. Rare, so nothing is hurried.
template <class T, int kParts>
inline void repair_scores(const Sequence<T>& seq, std::int64_t row, int r, bool bad_row, std::int64_t key0, int lo,
                          int hi, const Scratch<kParts>& w) {
  const T* q = seq.q_row(row);
  for (int j = lo; j < hi; ++j) {
    if (!bad_row && !w.bad_k[j]) continue;
    const T* k = seq.k.row(key0 + j);
    float sum = 0.0f;
    for (std::int64_t x = 0; x < seq.p->head_dim; ++x) sum += widen(q[x]) * widen(k[x]);
    w.s[r * kScoreStride + j] = sum;
  }
}

// The values that packing left out, added to a row that sees them.
template <class S>
inline void repair_outputs(const Sequence<typename S::Element>& seq, std::int64_t row, int r, std::int64_t key0, int lo,
                           int hi, const Scratch<S::kParts>& w, float* o) {
  const std::uint16_t* p = w.p + r / 16 * (kKeyBlock / 32 * kTileValues) + r % 16 * 32;
  for (int j = lo; j < hi; ++j) {
    if (score_hides(seq, row, key0 + j)) continue;
    const typename S::Element* v = seq.v.row(key0 + j);
    float probability = 0.0f;
    for (int i = 0; i < S::kParts; ++i) {
      const std::uint16_t bits = p[i * w.p_part + j / 32 * kTileValues + j % 32];
      probability += S::kHalf ? widen(Half{bits}) : widen(BFloat{bits});
    }
    for (std::int64_t x = 0; x < seq.p->head_dim_v; ++x) {
      if (is_irregular_value(widen(v[x]))) o[x] += imax(probability, kLeastWeight) * widen(v[x]);
    }
  }
}

// Rows [row0, row1) of one sequence and kv head.
template <class S>
void amx_task(const Sequence<typename S::Element>& seq, std::int64_t row0, std::int64_t row1, void* memory) {
  constexpr int kParts = S::kParts;
  const AttentionParams& p = *seq.p;
  std::int64_t bytes;
  const Scratch<kParts> w = make_scratch<kParts>(p, memory, &bytes);
  const int d = static_cast<int>(p.head_dim), dv = static_cast<int>(p.head_dim_v);
  const int rows = static_cast<int>(row1 - row0);
  const bool plain = plain_scores(p);
  const float factor = log2_factor(p);
  configure_tiles();

  bool any_bad_q = false;
  for (int r = 0; r < round_up(rows, kStripRows); ++r) {  // rows past the end: zeros, so that tiles need no edges
    std::uint16_t* to = w.q + r / 16 * w.d_tiles * kTileValues + r % 16 * 32;
    w.bad_q[r] = pack_row<S>(r < rows ? seq.q_row(row0 + r) : nullptr, d, to, w.q_part);
    any_bad_q |= w.bad_q[r] != 0;
    w.m[r] = kNegInf;
    w.l[r] = 0.0f;
    for (std::int64_t x = 0; x < w.o_stride; x += 16) Vec::store(w.o + r * w.o_stride + x, Vec::zero());
  }

  const std::int64_t first = seq.first_key(row0), last = seq.last_key(row1 - 1);
  for (std::int64_t key0 = first / kKeyBlock * kKeyBlock; key0 < last; key0 += kKeyBlock) {
    const int block_from = static_cast<int>(imax<std::int64_t>(first - key0, 0)) / 32 * 32;
    const int block_to = static_cast<int>(imin<std::int64_t>(last - key0, kKeyBlock));
    if (mask_hides_block(seq, row0, row1, key0 + block_from, key0 + block_to)) continue;
    bool bad_k = false, bad_v = false;
    for (int c = block_from; c < block_to; c += 32) {
      for (int half = 0; half < 32; half += 16) {
        bad_k |= pack_k_tile<S>(seq.k, key0 + c + half, imin(16, block_to - c - half), d,
                                w.k + (c + half) / 16 * w.d_tiles * kTileValues, w.k_part, w.bad_k + c + half);
      }
      bad_v |= pack_v_tile<S>(seq.v, key0 + c, imin(32, block_to - c), dv, w.v + c / 32 * kTileValues, w.v_part,
                              kKeyBlock / 32 * kTileValues);
    }

    for (int r0 = 0; r0 < rows; r0 += kStripRows) {
      const int n = imin(kStripRows, rows - r0);
      const int from = static_cast<int>(imax<std::int64_t>(seq.first_key(row0 + r0) - key0, 0)) / 32 * 32;
      const int to =
          static_cast<int>(round_up(imin<std::int64_t>(seq.last_key(row0 + r0 + n - 1) - key0, kKeyBlock), 32));
      if (from >= to) continue;
      strip_scores<S>(w, w.q + r0 / 16 * w.d_tiles * kTileValues, from, to);
      for (int r = 0; r < n && (bad_k || any_bad_q); ++r) {
        const std::int64_t row = row0 + r0 + r;
        const int lo = static_cast<int>(imax<std::int64_t>(seq.first_key(row) - key0, 0));
        const int hi = static_cast<int>(imin<std::int64_t>(seq.last_key(row) - key0, kKeyBlock));
        if (bad_k || w.bad_q[r0 + r]) repair_scores(seq, row, r, w.bad_q[r0 + r] != 0, key0, lo, hi, w);
      }
      for (int r = 0; r < n; r += 16) {
        softmax_rows<S>(seq, row0 + r0 + r, r, imin(16, n - r), key0, from, to, plain, factor, w, w.m + r0 + r,
                        w.l + r0 + r, w.o + (r0 + r) * w.o_stride);
      }
      strip_outputs<S>(w, w.o + r0 * w.o_stride, from, to);
      if (!bad_v) continue;
      for (int r = 0; r < n; ++r) {
        const std::int64_t row = row0 + r0 + r;
        const int lo = static_cast<int>(imax<std::int64_t>(seq.first_key(row) - key0, 0));
        const int hi = static_cast<int>(imin<std::int64_t>(seq.last_key(row) - key0, kKeyBlock));
        repair_outputs<S>(seq, row, r, key0, lo, hi, w, w.o + (r0 + r) * w.o_stride);
      }
    }
  }
  for (int r = 0; r < rows; ++r) finish_row(seq, row0 + r, w.o + r * w.o_stride, w.m[r], w.l[r]);
  release_tiles();
}

// kWhole: fp16 in one part, on AMX-FP16.
template <bool kWhole>
struct Path {
  static constexpr int kStrip = kStripRows, kLeast = 2;
  static int most(const AttentionParams& p) { return most_strips(p); }
  static std::int64_t scratch_bytes(const AttentionParams& p) {
    std::int64_t bytes;
    if (p.dtype == DType::kFloat32) {
      make_scratch<3>(p, nullptr, &bytes);
    } else if (p.dtype == DType::kFloat16 && !kWhole) {
      make_scratch<2>(p, nullptr, &bytes);
    } else {
      make_scratch<1>(p, nullptr, &bytes);
    }
    return bytes;
  }
  template <class T>
  static void run(const Sequence<T>& seq, std::int64_t row0, std::int64_t row1, char* memory) {
    if constexpr (kWhole) {
      amx_task<WholeHalf>(seq, row0, row1, memory);
    } else {
      amx_task<Split<T>>(seq, row0, row1, memory);
    }
  }
};

void launch_fp16(const AttentionParams& p, void* workspace, FewRows few_rows) {
  if (p.batch == 0 || p.heads_q == 0 || p.seq_q == 0) return;
  launch_typed<Path<true>, Half>(p, workspace, few_rows);
}

}  // namespace

std::size_t attention_fwd_workspace(const AttentionParams& p) {
  return attention_workspace<Path<false>>(p, FewRows::kStream);
}
void attention_fwd(const AttentionParams& p, void* workspace, Stream) {
  launch_attention<Path<false>>(p, workspace, FewRows::kStream);
}
std::size_t attention_fwd_packed_workspace(const AttentionParams& p) {
  return attention_workspace<Path<false>>(p, FewRows::kPack);
}
void attention_fwd_packed(const AttentionParams& p, void* workspace, Stream) {
  launch_attention<Path<false>>(p, workspace, FewRows::kPack);
}

std::size_t attention_fwd_fp16_workspace(const AttentionParams& p) {
  return attention_workspace<Path<true>>(p, FewRows::kStream);
}
void attention_fwd_fp16(const AttentionParams& p, void* workspace, Stream) {
  launch_fp16(p, workspace, FewRows::kStream);
}
std::size_t attention_fwd_fp16_packed_workspace(const AttentionParams& p) {
  return attention_workspace<Path<true>>(p, FewRows::kPack);
}
void attention_fwd_fp16_packed(const AttentionParams& p, void* workspace, Stream) {
  launch_fp16(p, workspace, FewRows::kPack);
}

}  // namespace flashkernel::cpu::amx
