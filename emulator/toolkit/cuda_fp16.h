// The emulator's cuda_fp16.h: the type, its conversions and the arithmetic that the kernels use. See
// emulator/README.md.
#pragma once

#include <type_traits>

#include "half_bits.h"
#include "vector_types.h"

struct __half {
  unsigned short __x;
  __half() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  __half(T x) : __x(simt::float_to_fp16(static_cast<float>(x))) {}
  operator float() const { return simt::fp16_to_float(__x); }
};
struct alignas(4) __half2 {
  __half x, y;
};

inline __half operator-(__half a) {
  a.__x ^= 0x8000;
  return a;
}
#define SIMT_OPERATOR(op)                                                                                  \
  inline __half operator op(__half a, __half b) { return static_cast<float>(a) op static_cast<float>(b); } \
  inline __half& operator op##=(__half& a, __half b) { return a = a op b; }
SIMT_OPERATOR(+)
SIMT_OPERATOR(-)
SIMT_OPERATOR(*)
SIMT_OPERATOR(/)
#undef SIMT_OPERATOR

inline float __half2float(__half x) { return x; }
inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline __half2 __floats2half2_rn(float low, float high) { return {low, high}; }
inline __half2 __float2half2_rn(float both) { return {both, both}; }
inline float2 __half22float2(__half2 both) { return {both.x, both.y}; }
inline __half2 __float22half2_rn(float2 both) { return {both.x, both.y}; }
inline float __low2float(__half2 both) { return both.x; }
inline float __high2float(__half2 both) { return both.y; }
inline __half2 __halves2half2(__half low, __half high) { return {low, high}; }
inline __half __ushort_as_half(unsigned short bits) {
  __half x;
  x.__x = bits;
  return x;
}
inline unsigned short __half_as_ushort(__half x) { return x.__x; }
inline __half2 __half2half2(__half x) { return {x, x}; }

inline __half __hadd(__half a, __half b) { return a + b; }
inline __half __hmul(__half a, __half b) { return a * b; }
inline __half2 __hadd2(__half2 a, __half2 b) { return {a.x + b.x, a.y + b.y}; }
/// Of each half; a NaN loses.
inline __half2 __hmax2(__half2 a, __half2 b) {
  return {std::fmax(static_cast<float>(a.x), static_cast<float>(b.x)),
          std::fmax(static_cast<float>(a.y), static_cast<float>(b.y))};
}
inline __half2 __hmul2(__half2 a, __half2 b) { return {a.x * b.x, a.y * b.y}; }
/// Rounded once: the product of two fp16 numbers is exact in double.
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  const auto fused = [](__half x, __half y, __half z) {
    const double product = static_cast<double>(static_cast<float>(x)) * static_cast<float>(y);
    return __half(static_cast<float>(product + static_cast<float>(z)));
  };
  return {fused(a.x, b.x, c.x), fused(a.y, b.y, c.y)};
}
