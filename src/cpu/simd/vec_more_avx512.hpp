// What the ops other than attention need beyond simd/vec_avx512.hpp: full-width stores of every type, masks, rounding.
// Included by the files under avx512/ and amx/ through simd/vec_math.hpp. Invariant: internal linkage only (see
// vec_common.hpp).
#pragma once

#include "cpu/simd/vec_avx512.hpp"

namespace flashkernel::cpu {
namespace {

struct Simd : Vec {
  using Mask = __mmask16;
  static constexpr const char* kIsa = "avx512";

  static inline void save(float* p, Reg x) { _mm512_storeu_ps(p, x); }
  static inline void save(Half* p, Reg x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static inline void save(BFloat* p, Reg x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bfloat(x)); }

  static inline Reg min(Reg a, Reg b) { return _mm512_min_ps(a, b); }
  static inline Reg sqrt(Reg a) { return _mm512_sqrt_ps(a); }
  static inline Reg round(Reg a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static inline Reg negate(Reg a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
  static inline Reg fnma(Reg a, Reg b, Reg c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
  static inline Reg swap_pairs(Reg a) { return _mm512_permute_ps(a, 0xB1); }         // lanes 0 1 2 3 -> 1 0 3 2
  /// x * 2^n for whole n, with gradual underflow and overflow to infinity.
  static inline Reg times_power_of_two(Reg x, Reg n) { return _mm512_scalef_ps(x, n); }

  static inline Mask less(Reg a, Reg b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static inline Mask is_nan(Reg a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
  static inline Mask equal(Reg a, Reg b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  static inline Mask either(Mask a, Mask b) { return static_cast<Mask>(a | b); }
  static inline Mask lanes(int n) { return first(n); }  // the first n
  static inline Mask none() { return 0; }
  static inline bool any(Mask m) { return m != 0; }
  static inline unsigned bits(Mask m) { return m; }
  static inline Reg select(Mask m, Reg then, Reg otherwise) { return _mm512_mask_blend_ps(m, otherwise, then); }
};

}  // namespace
}  // namespace flashkernel::cpu
