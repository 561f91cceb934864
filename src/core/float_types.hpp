// fp16, bf16 and the 8-bit elements of a KV-cache as bits, with conversions that round to nearest even; plain C++ for
// any processor. All but int8 keep NaN.
// Used by the scalar kernels and by tests; not by files that are compiled for newer instruction sets (they convert with
// instructions, and an inline function must not be compiled twice with different flags).
#pragma once

#include <cmath>
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
struct Float8E4M3 {
  std::uint8_t bits;
};
struct Int8 {
  std::int8_t value;
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
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
  // Exponent and mantissa in fp32's places are a number 2^112 too small (biases 15 and 127), subnormals included.
  const std::uint32_t finite = float_to_bits(bits_to_float(rest << 13) * 0x1p112f);
  // A choice between two numbers, no branch: so that compilers make vectors of a loop over elements.
  return bits_to_float(sign | (rest >= 0x7c00u ? 0x7f800000u | rest << 13 : finite));
}

static inline float to_float(Int8 value) { return value.value; }
static inline float to_float(Float8E4M3 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x80u) << 24, rest = value.bits & 0x7fu;
  if (rest == 0x7f) return bits_to_float(sign | 0x7fc00000u);
  // As above, by 2^120 (biases 7 and 127).
  return bits_to_float(sign | rest << 20) * 0x1p120f;
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

/// Saturates: infinities become 127 and -127, which keeps the range symmetric. NaN becomes 0.
template <>
inline Int8 from_float<Int8>(float value) {
  if (value != value) return {0};
  const float bounded = value > 127.0f ? 127.0f : value < -127.0f ? -127.0f : value;
  return {static_cast<std::int8_t>(std::nearbyint(bounded))};
}
/// Saturates: infinities become 448 and -448. NaN stays NaN.
template <>
inline Float8E4M3 from_float<Float8E4M3>(float value) {
  const std::uint32_t bits = float_to_bits(value), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint8_t>(sign | 0x7fu)};
  if (magnitude >= 0x43e80000u) return {static_cast<std::uint8_t>(sign | 0x7eu)};  // 464 is half way to 480
  if (magnitude < 0x3c800000u) {  // below 2^-6: subnormal; adding 2^14 aligns the last place to 2^-9 and rounds
    return {static_cast<std::uint8_t>(sign | (float_to_bits(bits_to_float(magnitude) + 16384.0f) - 0x46800000u))};
  }
  const std::uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return {static_cast<std::uint8_t>(sign | ((rounded - 0x3c000000u) >> 20))};
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

/// The same for the elements of an 8-bit KV-cache.
template <class F>
static inline void visit_quantized(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat8E4M3: f(Float8E4M3{}); return;
    case DType::kInt8: f(Int8{}); return;
    default: return;
  }
}

}  // namespace flashkernel
