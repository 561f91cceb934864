// Q, K, V and probabilities as bf16 tiles. bf16 goes in as it is; an fp16 value is exactly the sum of two bf16 parts,
// an fp32 value of three (8 + 8 + 8 bits), so that products of parts keep the input's accuracy on bf16 hardware. Used
// by amx/attention_fwd.cpp. Invariant: tiles of K rows and values that the split cannot carry (infinities, NaNs,
// magnitudes near the ends of the range) hold 0 there, and the caller is told so that it adds them in fp32. Paper:
// Henry, Tang, Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision computations"
// (2019).
#pragma once

#include "cpu/amx/tiles.hpp"
#include "cpu/simd/attention_common.hpp"

namespace flashkernel::cpu {
namespace {

// How values of a type stand in tiles: in how many parts, and whether a tile holds bf16 or fp16.
template <class T>
struct Split;
template <>
struct Split<BFloat> {
  using Element = BFloat;
  static constexpr int kParts = 1;
  static constexpr bool kHalf = false;
};
template <>
struct Split<Half> {
  using Element = Half;
  static constexpr int kParts = 2;
  static constexpr bool kHalf = false;
};
template <>
struct Split<float> {
  using Element = float;
  static constexpr int kParts = 3;
  static constexpr bool kHalf = false;
};
// fp16 as it is, on processors with AMX-FP16.
struct WholeHalf {
  using Element = Half;
  static constexpr int kParts = 1;
  static constexpr bool kHalf = true;
};

// Products of two magnitudes below 2^60 neither overflow nor lose anything by flushed denormals that a logit would
// feel. V is summed with weights up to 1: its parts must not round up to infinity, nor its third part be flushed
// (2^-102 * 2^-24).
constexpr float kLargestFactor = 0x1p60f;
constexpr float kLargestValue = 0x1p126f, kSmallestValue = 0x1p-102f;

inline bool is_irregular_value(float v) {
  const float a = __builtin_fabsf(v);
  return !(a <= kLargestValue) || (a < kSmallestValue && a > 0.0f);
}

inline __mmask16 irregular_factors(__m512 x) {
  return _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(kLargestFactor), _CMP_NLE_UQ);
}
inline __mmask16 irregular_values(__m512 x) {
  const __m512 a = _mm512_abs_ps(x);
  const __mmask16 tiny = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(a, _mm512_set1_ps(kSmallestValue), _CMP_LT_OQ), a,
                                                 _mm512_setzero_ps(), _CMP_GT_OQ);
  return _mm512_cmp_ps_mask(a, _mm512_set1_ps(kLargestValue), _CMP_NLE_UQ) | tiny;
}

// The 32 values (low, high) as kParts registers of 32 bf16 whose sums they are.
template <int kParts>
inline void split(__m512 low, __m512 high, __m512i (&part)[kParts]) {
#pragma GCC unroll 3
  for (int i = 0; i < kParts; ++i) {
    part[i] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    if (i + 1 == kParts) break;
    low = _mm512_sub_ps(
        low, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(part[i])), 16)));
    high = _mm512_sub_ps(
        high, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(part[i], 1)), 16)));
  }
}

inline __m512 load_up_to(const float* p, int n) {
  return n >= 16 ? Vec::load(p) : n > 0 ? Vec::load_first(p, n) : Vec::zero();
}
inline __m512 load_up_to(const Half* p, int n) {
  return n >= 16 ? Vec::load(p) : n > 0 ? Vec::load_first(p, n) : Vec::zero();
}

// 32 factors of a Q or K row from `p` on, `left` of them real.
inline __mmask32 first32(int n) { return n >= 32 ? ~__mmask32{0} : n > 0 ? (__mmask32{1} << n) - 1 : 0; }

template <class S>
inline bool split_factors(const typename S::Element* p, int left, __m512i (&part)[S::kParts]) {
  if constexpr (S::kParts == 1) {
    part[0] = _mm512_maskz_loadu_epi16(first32(left), p);  // the hardware multiplies infinities and NaNs as it should
    return false;
  } else {
    const __m512 low = load_up_to(p, left), high = load_up_to(p + 16, left - 16);
    const __mmask16 bad_low = irregular_factors(low), bad_high = irregular_factors(high);
    split<S::kParts>(_mm512_maskz_mov_ps(static_cast<__mmask16>(~bad_low), low),
                     _mm512_maskz_mov_ps(static_cast<__mmask16>(~bad_high), high), part);
    return (bad_low | bad_high) != 0;
  }
}

// 32 values of a V row.
template <class S>
inline bool split_values(const typename S::Element* p, int left, __m512i (&part)[S::kParts]) {
  if constexpr (S::kParts == 1) {
    const __m512i x = _mm512_maskz_loadu_epi16(first32(left), p);
    const __m512i exponent = _mm512_set1_epi16(S::kHalf ? 0x7C00 : 0x7F80);
    const __mmask32 bad = _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
    part[0] = _mm512_maskz_mov_epi16(~bad, x);
    return bad != 0;
  } else {
    const __m512 low = load_up_to(p, left), high = load_up_to(p + 16, left - 16);
    const __mmask16 bad_low = irregular_values(low), bad_high = irregular_values(high);
    split<S::kParts>(_mm512_maskz_mov_ps(static_cast<__mmask16>(~bad_low), low),
                     _mm512_maskz_mov_ps(static_cast<__mmask16>(~bad_high), high), part);
    return (bad_low | bad_high) != 0;
  }
}

// Probabilities of 32 keys.
template <class S>
inline void split_probabilities(__m512 low, __m512 high, __m512i (&part)[S::kParts]) {
  if constexpr (S::kHalf) {
    part[0] =
        _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)),
                           _mm512_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), 1);
  } else {
    split<S::kParts>(low, high, part);
  }
}

// Row r of a left operand: 32 values to tile (r / 16, x / 32), part after part `part_stride` values apart.
// A null row is zeros.
template <class S>
inline bool pack_row(const typename S::Element* row, int d, std::uint16_t* to, std::int64_t part_stride) {
  constexpr int kParts = S::kParts;
  bool bad = false;
  for (int x = 0; x < d; x += 32) {
    __m512i part[kParts];
    for (int i = 0; i < kParts; ++i) part[i] = _mm512_setzero_si512();
    if (row) bad |= split_factors<S>(row + x, d - x, part);
    for (int i = 0; i < kParts; ++i) _mm512_store_si512(to + i * part_stride + x / 32 * kTileValues, part[i]);
  }
  return bad;
}

// Sixteen keys from key0 on, `n` of them real, as right tiles [d / 32][16 pairs][16 keys][2]; bad[i] says that key i is
// irregular.
template <class S>
inline bool pack_k_tile(const KeyRows<typename S::Element>& rows, std::int64_t key0, int n, int d, std::uint16_t* to,
                        std::int64_t part_stride, std::uint8_t* bad) {
  constexpr int kParts = S::kParts;
  using T = typename S::Element;
  const T* row[16];
  for (int i = 0; i < 16; ++i) {
    row[i] = i < n ? rows.row(key0 + i) : nullptr;
    bad[i] = 0;
  }
  for (int x = 0; x < d; x += 32) {
    __m512i key[16][kParts];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      for (int part = 0; part < kParts; ++part) key[i][part] = _mm512_setzero_si512();
      if (i < n && split_factors<S>(row[i] + x, d - x, key[i])) bad[i] = 1;
    }
#pragma GCC unroll 3
    for (int part = 0; part < kParts; ++part) {
      __m512 r[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) r[i] = _mm512_castsi512_ps(key[i][part]);
      Vec::transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) _mm512_store_ps(to + part * part_stride + x / 32 * kTileValues + i * 32, r[i]);
    }
  }
  bool any = false;
  for (int i = 0; i < 16; ++i) any |= bad[i] != 0;
  return any;
}

// Thirty-two keys of V from key0 on, `n` of them real, as right tiles: the tile of columns 16 c .. at to + c *
// column_stride.
template <class S>
inline bool pack_v_tile(const KeyRows<typename S::Element>& rows, std::int64_t key0, int n, int d, std::uint16_t* to,
                        std::int64_t part_stride, std::int64_t column_stride) {
  constexpr int kParts = S::kParts;
  using T = typename S::Element;
  alignas(64) static constexpr std::uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  bool bad = false;
  for (int j = 0; j < 32; j += 2) {
    const T* row0 = j < n ? rows.row(key0 + j) : nullptr;
    const T* row1 = j + 1 < n ? rows.row(key0 + j + 1) : nullptr;
    for (int x = 0; x < d; x += 32) {
      __m512i a[kParts], b[kParts];
      for (int i = 0; i < kParts; ++i) a[i] = b[i] = _mm512_setzero_si512();
      if (row0) bad |= split_values<S>(row0 + x, d - x, a);
      if (row1) bad |= split_values<S>(row1 + x, d - x, b);
      std::uint16_t* out = to + x / 16 * column_stride + j / 2 * 32;
      for (int i = 0; i < kParts; ++i) {
        _mm512_store_si512(out + i * part_stride, _mm512_permutex2var_epi16(a[i], low, b[i]));
        _mm512_store_si512(out + i * part_stride + column_stride, _mm512_permutex2var_epi16(a[i], high, b[i]));
      }
    }
  }
  return bad;
}

}  // namespace
}  // namespace flashkernel::cpu
