// The emulator's cuda_bf16.h: the type, its conversions and the arithmetic that the kernels use. See emulator/README.md.
#pragma once

#include <type_traits>

#include "half_bits.h"
#include "vector_types.h"

struct __nv_bfloat16 {
  unsigned short __x;
  __nv_bfloat16() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  __nv_bfloat16(T x) : __x(simt::float_to_bf16(static_cast<float>(x))) {}
  operator float() const { return simt::bf16_to_float(__x); }
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline __nv_bfloat16 operator-(__nv_bfloat16 a) {
  a.__x ^= 0x8000;
  return a;
}
#define SIMT_OPERATOR(op)                                              \
  inline __nv_bfloat16 operator op(__nv_bfloat16 a, __nv_bfloat16 b) { \
    return static_cast<float>(a) op static_cast<float>(b);             \
  }                                                                    \
  inline __nv_bfloat16& operator op##=(__nv_bfloat16& a, __nv_bfloat16 b) { return a = a op b; }
SIMT_OPERATOR(+)
SIMT_OPERATOR(-)
SIMT_OPERATOR(*)
SIMT_OPERATOR(/)
#undef SIMT_OPERATOR

inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return {low, high}; }
inline __nv_bfloat162 __float2bfloat162_rn(float both) { return {both, both}; }
inline float2 __bfloat1622float2(__nv_bfloat162 both) { return {both.x, both.y}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 both) { return {both.x, both.y}; }
inline float __low2float(__nv_bfloat162 both) { return both.x; }
inline float __high2float(__nv_bfloat162 both) { return both.y; }
/// Of each half; a NaN loses.
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {std::fmax(static_cast<float>(a.x), static_cast<float>(b.x)),
          std::fmax(static_cast<float>(a.y), static_cast<float>(b.y))};
}
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) { return {low, high}; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  __nv_bfloat16 x;
  x.__x = bits;
  return x;
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.__x; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
