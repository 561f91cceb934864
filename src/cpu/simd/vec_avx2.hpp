// Eight fp32 lanes of AVX2 with FMA and F16C: the vector type of the kernels under avx2/.
// Same interface as simd/vec_avx512.hpp. Invariant: internal linkage only (see vec_common.hpp).
#pragma once

#include <immintrin.h>

#include "cpu/simd/vec_common.hpp"

namespace flashkernel::cpu {
namespace {

struct Vec {
  using Reg = __m256;
  static constexpr int kWidth = 8;

  static inline __m256i first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }

  static inline Reg zero() { return _mm256_setzero_ps(); }
  static inline Reg set1(float x) { return _mm256_set1_ps(x); }
  static inline Reg load(const float* p) { return _mm256_loadu_ps(p); }
  static inline Reg load(const Half* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static inline Reg load(const BFloat* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
  }
  static inline Reg load(const Int8* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  // One 16-bit number in every lane.
  static inline Reg broadcast(const Half* p) { return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<short>(p->bits))); }
  static inline Reg broadcast(const BFloat* p) {
    return _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(p->bits) << 16)));
  }
  // 16 bytes as 32 numbers of 0 to 15: the low halves of all, then the high ones.
  static inline void load_halves_of_bytes(const std::uint8_t* p, Reg (&q)[4]) {
    for (int i = 0; i < 2; ++i) {
      const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i)));
      q[i] = _mm256_cvtepi32_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(15)));
      q[2 + i] = _mm256_cvtepi32_ps(_mm256_srli_epi32(bytes, 4));
    }
  }
  // Exponent and mantissa in fp32's places are a number 2^120 too small (biases 7 and 127), subnormals included.
  static inline Reg load(const Float8* p) {
    const __m256i all = _mm256_set1_epi32(0x07F00000);
    const __m256i bits = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m256i small = _mm256_and_si256(_mm256_slli_epi32(bits, 20), all);
    const __m256i nan = _mm256_cmpeq_epi32(small, all);
    const __m256i placed = _mm256_or_si256(small, _mm256_and_si256(bits, _mm256_set1_epi32(INT32_MIN)));
    const Reg value = _mm256_mul_ps(_mm256_castsi256_ps(placed), _mm256_set1_ps(0x1p120f));
    return _mm256_or_ps(value, _mm256_castsi256_ps(nan));  // all ones are a NaN
  }
  // The first n lanes, the rest zero; reads nothing behind them.
  static inline Reg load_first(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
  template <class T>
  static inline Reg load_first(const T* p, int n) {
    T padded[8] = {};
    for (int i = 0; i < n; ++i) padded[i] = p[i];
    return load(padded);
  }
  // Two registers of consecutive elements in an order of the type's own (the cheapest to widen): bf16 gives the even
  // ones, then the odd ones. `natural_order` puts a pair of fp32 registers back.
  template <class T>
  static inline void load_pair(const T* p, Reg* a, Reg* b) {
    *a = load(p);
    *b = load(p + kWidth);
  }
  static inline void load_pair(const BFloat* p, Reg* a, Reg* b) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    *a = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
    *b = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }
  template <class T>
  static inline void natural_order(Reg*, Reg*) {}

  static inline void store(float* p, Reg x) { _mm256_storeu_ps(p, x); }
  static inline void store_first(float* p, Reg x, int n) { _mm256_maskstore_ps(p, first(n), x); }
  static inline void store_first(Half* p, Reg x, int n) {
    Half out[8];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    for (int i = 0; i < n; ++i) p[i] = out[i];
  }
  static inline void store_first(BFloat* p, Reg x, int n) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));  // a NaN stays one, made quiet
    rounded = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan));
    std::uint32_t out[8];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), rounded);
    for (int i = 0; i < n; ++i) p[i].bits = static_cast<std::uint16_t>(out[i] >> 16);
  }

  static inline Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
  static inline Reg sub(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
  static inline Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
  static inline Reg div(Reg a, Reg b) { return _mm256_div_ps(a, b); }
  static inline Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
  static inline Reg max(Reg a, Reg b) { return _mm256_max_ps(a, b); }
  static inline Reg abs(Reg a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static inline Reg copy_sign(Reg magnitude, Reg sign) {
    return _mm256_or_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), magnitude), _mm256_and_ps(_mm256_set1_ps(-0.0f), sign));
  }
  static inline Reg select_less(Reg a, Reg b, Reg then, Reg otherwise) {
    return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  static inline Reg iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }

  // Horizontal sum and maximum by halves: a fixed order, so that results repeat bit for bit.
  static inline float sum(Reg x) {
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
  }
  static inline float max_lane(Reg x) {
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
  }

  // 2^x = 2^floor(x) * 2^(x - floor(x)), the power of two added to the exponent bits. Results below 2^-126 become 0
  // (also for -inf); the comparison lets NaN through. x <= 0 but for rounding, so the top end cannot overflow.
  template <int kDegree>
  static inline Reg exp2(Reg x) {
    const Reg clamped = _mm256_max_ps(set1(-126.0f), x);  // a NaN in the second operand comes through
    const Reg whole = _mm256_floor_ps(clamped);
    const Reg f = sub(clamped, whole);
    Reg p = set1(Exp2Coefficients<kDegree>::c[kDegree - 1]);
    for (int i = kDegree - 2; i >= 0; --i) p = fma(p, f, set1(Exp2Coefficients<kDegree>::c[i]));
    p = fma(p, f, set1(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
    const Reg scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), power));
    // NaN: p is NaN, but the exponent arithmetic above may have damaged it; take p itself.
    const Reg kept = _mm256_blendv_ps(scaled, p, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_and_ps(kept, _mm256_cmp_ps(x, set1(-126.0f), _CMP_NLT_UQ));
  }

  // x with its infinities and NaNs replaced by 0; `*bad` collects that any lane was replaced.
  using Flags = int;
  static inline Reg drop_non_finite(Reg x, Flags* bad) {
    const Reg finite = _mm256_cmp_ps(abs(x), set1(__builtin_inff()), _CMP_LT_OQ);
    *bad |= ~_mm256_movemask_ps(finite) & 0xFF;
    return _mm256_and_ps(x, finite);
  }

  // r[i] lane j <-> r[j] lane i.
  static inline void transpose(Reg (&r)[8]) {
    Reg t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
      t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
      r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xEE);
      r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
      r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xEE);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
      t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) r[i] = t[i];
  }

  // Lane i of the result is the sum over the lanes of r[i].
  __attribute__((always_inline)) static inline Reg sum_rows(Reg (&r)[8]) {
    const Reg a = _mm256_hadd_ps(_mm256_hadd_ps(r[0], r[1]), _mm256_hadd_ps(r[2], r[3]));
    const Reg b = _mm256_hadd_ps(_mm256_hadd_ps(r[4], r[5]), _mm256_hadd_ps(r[6], r[7]));
    return add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }
};

template <>
inline void Vec::natural_order<BFloat>(Reg* a, Reg* b) {
  const Reg low = _mm256_unpacklo_ps(*a, *b), high = _mm256_unpackhi_ps(*a, *b);
  *a = _mm256_permute2f128_ps(low, high, 0x20);
  *b = _mm256_permute2f128_ps(low, high, 0x31);
}

}  // namespace
}  // namespace flashkernel::cpu
