// What the ops other than attention need beyond simd/vec_avx2.hpp: full-width stores of every type, masks, rounding.
// Included by the files under avx2/ through simd/vec_math.hpp. Invariant: internal linkage only (see vec_common.hpp).
#pragma once

#include "cpu/simd/vec_avx2.hpp"

namespace flashkernel::cpu {
namespace {

struct Simd : Vec {
  using Mask = __m256;
  static constexpr const char* kIsa = "avx2";

  static inline void save(float* p, Reg x) { _mm256_storeu_ps(p, x); }
  static inline void save(Half* p, Reg x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static inline void save(BFloat* p, Reg x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));  // a NaN stays one
    const __m256i chosen =
        _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), is_nan(x)));
    const __m256i high = _mm256_srli_epi32(chosen, 16);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
  }

  static inline Reg min(Reg a, Reg b) { return _mm256_min_ps(a, b); }
  static inline Reg sqrt(Reg a) { return _mm256_sqrt_ps(a); }
  static inline Reg round(Reg a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static inline Reg negate(Reg a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
  static inline Reg fnma(Reg a, Reg b, Reg c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a * b
  static inline Reg swap_pairs(Reg a) { return _mm256_permute_ps(a, 0xB1); }         // lanes 0 1 2 3 -> 1 0 3 2
  /// x * 2^n for whole n in [-252, 254]: two factors, so that neither leaves the range of normal numbers.
  static inline Reg times_power_of_two(Reg x, Reg n) {
    const __m256i whole = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(whole, 1);
    const __m256i bias = _mm256_set1_epi32(127);
    const Reg first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    const Reg second =
        _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23));
    return mul(mul(x, first), second);
  }

  static inline Mask less(Reg a, Reg b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  static inline Mask is_nan(Reg a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
  static inline Mask equal(Reg a, Reg b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
  static inline Mask either(Mask a, Mask b) { return _mm256_or_ps(a, b); }
  static inline Mask lanes(int n) { return _mm256_castsi256_ps(first(n)); }  // the first n
  static inline Mask none() { return _mm256_setzero_ps(); }
  static inline bool any(Mask m) { return _mm256_movemask_ps(m) != 0; }
  static inline unsigned bits(Mask m) { return static_cast<unsigned>(_mm256_movemask_ps(m)); }
  static inline Reg select(Mask m, Reg then, Reg otherwise) { return _mm256_blendv_ps(otherwise, then, m); }
};

}  // namespace
}  // namespace flashkernel::cpu
