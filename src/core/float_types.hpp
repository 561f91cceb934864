// fp16 and bf16 as bits, with conversions that round to nearest even and keep NaN; plain C++ for any processor.
// Used by the scalar kernels and by tests; not by files that are compiled for newer instruction sets (they convert with
// instructions, and an inline function must not be compiled twice with different flags).
#pragma once

#include <cstdint>
#include <cstring>

#include "flashkernel/dtype.hpp"

namespace flashkernel {

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

static inline float bits_to_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
static inline std::uint32_t float_to_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float to_float(float value) { return value; }
static inline float to_float(BFloat16 value) { return bits_to_float(static_cast<std::uint32_t>(value.bits) << 16); }
static inline float to_float(Half value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = value.bits & 0x3ffu;
  if (exponent == 0x1f) return bits_to_float(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return bits_to_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // subnormal: mantissa * 2^-24
  return sign ? -magnitude : magnitude;
}

template <class T>
static inline T from_float(float value);
template <>
inline float from_float<float>(float value) {
  return value;
}
template <>
inline BFloat16 from_float<BFloat16>(float value) {
  const std::uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};  // quiet NaN
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
inline Half from_float<Half>(float value) {
  const std::uint32_t bits = float_to_bits(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
  if (magnitude >= 0x47800000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // 65536 and up: infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: subnormal; adding 0.5 aligns the last place to 2^-24 and rounds
    const float aligned = bits_to_float(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (float_to_bits(aligned) - 0x3f000000u))};
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

/// Calls f with a value of the C++ type of a floating dtype: `visit_floating(dtype, [&](auto zero) { using T =
/// decltype(zero); })`.
template <class F>
static inline void visit_floating(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32: f(float{}); return;
    case DType::kFloat16: f(Half{}); return;
    case DType::kBFloat16: f(BFloat16{}); return;
    default: return;
  }
}

}  // namespace flashkernel
