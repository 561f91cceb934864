// Sixteen fp32 lanes of AVX-512 (F, BW, DQ, VL): the vector type of the kernels under avx512/ and amx/.
// Same interface as simd/vec_avx2.hpp. Invariant: internal linkage only (see vec_common.hpp).
#pragma once

// GCC 12 takes its own intrinsics' deliberately undefined registers for mistakes (its bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "cpu/simd/vec_common.hpp"

namespace flashkernel::cpu {
namespace {

struct Vec {
  using Reg = __m512;
  static constexpr int kWidth = 16;

  static inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

  static inline Reg zero() { return _mm512_setzero_ps(); }
  static inline Reg set1(float x) { return _mm512_set1_ps(x); }
  static inline Reg load(const float* p) { return _mm512_loadu_ps(p); }
  static inline Reg load(const Half* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static inline Reg load(const BFloat* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
  }
  static inline Reg load(const Float8* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), p); }
  // One 16-bit number in every lane.
  static inline Reg broadcast(const Half* p) { return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(p->bits))); }
  static inline Reg broadcast(const BFloat* p) {
    return _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(p->bits) << 16)));
  }
  // 16 bytes as 32 numbers of 0 to 15: the low halves of all, then the high ones.
  static inline void load_halves_of_bytes(const std::uint8_t* p, Reg (&q)[2]) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    q[0] = _mm512_cvtepi32_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(15)));
    q[1] = _mm512_cvtepi32_ps(_mm512_srli_epi32(bytes, 4));
  }
  static inline Reg load(const Int8* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), p); }
  static inline Reg widen(__m128i x, const Int8*) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)); }
  // Exponent and mantissa in fp32's places are a number 2^120 too small (biases 7 and 127), subnormals included.
  static inline Reg widen(__m128i x, const Float8*) {
    const __m512i bits = _mm512_cvtepi8_epi32(x);  // the sign is where it belongs
    const __m512i small = _mm512_and_si512(_mm512_slli_epi32(bits, 20), _mm512_set1_epi32(0x07F00000));
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(small, _mm512_set1_epi32(0x07F00000));
    const __m512i placed = _mm512_or_si512(small, _mm512_and_si512(bits, _mm512_set1_epi32(INT32_MIN)));
    const Reg value = _mm512_mul_ps(_mm512_castsi512_ps(placed), _mm512_set1_ps(0x1p120f));
    return _mm512_mask_mov_ps(value, nan, _mm512_set1_ps(__builtin_nanf("")));
  }
  // The first n lanes, the rest zero; reads nothing behind them.
  static inline Reg load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static inline Reg load_first(const Half* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
  static inline Reg load_first(const BFloat* p, int n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p)), 16));
  }
  static inline Reg load_first(const Float8* p, int n) { return widen(_mm_maskz_loadu_epi8(first(n), p), p); }
  static inline Reg load_first(const Int8* p, int n) { return widen(_mm_maskz_loadu_epi8(first(n), p), p); }
  // Two registers of consecutive elements in an order of the type's own (the cheapest to widen): bf16 gives the even
  // ones, then the odd ones. `natural_order` puts a pair of fp32 registers back.
  template <class T>
  static inline void load_pair(const T* p, Reg* a, Reg* b) {
    *a = load(p);
    *b = load(p + kWidth);
  }
  static inline void load_pair(const BFloat* p, Reg* a, Reg* b) {
    const __m512i x = _mm512_loadu_si512(p);
    *a = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
    *b = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }
  template <class T>
  static inline void natural_order(Reg*, Reg*) {}

  static inline void store(float* p, Reg x) { _mm512_storeu_ps(p, x); }
  static inline void store_first(float* p, Reg x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
  static inline void store_first(Half* p, Reg x, int n) {
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static inline void store_first(BFloat* p, Reg x, int n) { _mm256_mask_storeu_epi16(p, first(n), to_bfloat(x)); }

  // Round to nearest even by integers: AVX512_BF16 would flush denormals and is not on every AVX-512 machine.
  static inline __m256i to_bfloat(Reg x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));  // a NaN stays one, made quiet
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }

  static inline Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
  static inline Reg sub(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
  static inline Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
  static inline Reg div(Reg a, Reg b) { return _mm512_div_ps(a, b); }
  static inline Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
  static inline Reg max(Reg a, Reg b) { return _mm512_max_ps(a, b); }
  static inline Reg abs(Reg a) { return _mm512_abs_ps(a); }
  static inline Reg copy_sign(Reg magnitude, Reg sign) {  // 0xE4: (a & mask) | (b & ~mask) over (sign, magnitude, mask)
    return _mm512_or_ps(_mm512_andnot_ps(_mm512_set1_ps(-0.0f), magnitude), _mm512_and_ps(_mm512_set1_ps(-0.0f), sign));
  }
  static inline Reg select_less(Reg a, Reg b, Reg then, Reg otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), otherwise, then);
  }
  static inline Reg iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

  // Horizontal sum and maximum by halves: a fixed order, so that results repeat bit for bit.
  static inline float sum(Reg x) {
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
  }
  static inline float max_lane(Reg x) {
    const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
  }

  // 2^x = 2^floor(x) * 2^(x - floor(x)): VREDUCEPS gives the fraction (0 for infinities), VSCALEFPS takes the floor
  // itself and underflows gradually, so -inf gives 0 and NaN stays NaN without a blend.
  template <int kDegree>
  static inline Reg exp2(Reg x) {
    const Reg f = _mm512_reduce_ps(x, 0x01 /* toward -inf, 0 fraction bits */);
    Reg p = set1(Exp2Coefficients<kDegree>::c[kDegree - 1]);
    for (int i = kDegree - 2; i >= 0; --i) p = fma(p, f, set1(Exp2Coefficients<kDegree>::c[i]));
    return _mm512_scalef_ps(fma(p, f, set1(1.0f)), x);
  }

  // x with its infinities and NaNs replaced by 0; `*bad` collects the lanes that were replaced.
  using Flags = __mmask16;
  static inline Reg drop_non_finite(Reg x, Flags* bad) {
    const __mmask16 m = _mm512_fpclass_ps_mask(x, 0x01 | 0x08 | 0x10 | 0x80);  // QNaN, +Inf, -Inf, SNaN
    *bad = static_cast<Flags>(*bad | m);
    return _mm512_maskz_mov_ps(static_cast<__mmask16>(~m), x);
  }

  // r[i] lane j <-> r[j] lane i, in four rounds of 16 shuffles.
  static inline void transpose(Reg (&r)[16]) {
    Reg t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
      t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[4 * i]), _mm512_castps_pd(t[4 * i + 2])));
      r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[4 * i]), _mm512_castps_pd(t[4 * i + 2])));
      r[4 * i + 2] =
          _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[4 * i + 1]), _mm512_castps_pd(t[4 * i + 3])));
      r[4 * i + 3] =
          _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[4 * i + 1]), _mm512_castps_pd(t[4 * i + 3])));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
      t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xDD);
      t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
      t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xDD);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
      r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xDD);
    }
  }

  // Lane i of the result is the maximum over the lanes of r[i].
  static inline Reg max_rows(Reg (&r)[16]) {
    Reg t[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
      t[i] = max(_mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]), _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]));
    Reg u[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512d a = _mm512_castps_pd(t[2 * i]), b = _mm512_castps_pd(t[2 * i + 1]);
      u[i] = max(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const Reg a = max(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xDD));
    const Reg b = max(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xDD));
    return max(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  }

  // Lane i of the result is the sum over the lanes of r[i].
  __attribute__((always_inline)) static inline Reg sum_rows(Reg (&r)[16]) {
    Reg t[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
      t[i] = add(_mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]), _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]));
    Reg u[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512d a = _mm512_castps_pd(t[2 * i]), b = _mm512_castps_pd(t[2 * i + 1]);
      u[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    // u[i]: four 128-bit lanes, each with partial sums of rows 4i .. 4i+3.
    const Reg a = add(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xDD));
    const Reg b = add(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xDD));
    return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  }
};

template <>
inline void Vec::natural_order<BFloat>(Reg* a, Reg* b) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const Reg first = _mm512_permutex2var_ps(*a, low, *b);
  *b = _mm512_permutex2var_ps(*a, _mm512_add_epi32(low, _mm512_set1_epi32(8)), *b);
  *a = first;
}

}  // namespace
}  // namespace flashkernel::cpu
