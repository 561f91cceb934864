// Rounding between fp32 and the 16-bit formats, to nearest even; NaN becomes 0x7fff as on the device. For the
// emulator's cuda_fp16.h and cuda_bf16.h, and for its tensor cores, which read the 8-bit formats as well.
#pragma once

#ifdef __F16C__
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace simt {

inline float float_from_bits(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline std::uint32_t bits_from_float(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof(x));
  return bits;
}

inline float bf16_to_float(std::uint16_t bits) { return float_from_bits(static_cast<std::uint32_t>(bits) << 16); }
inline std::uint16_t float_to_bf16(float x) {
  if (x != x) return 0x7fff;
  const std::uint32_t bits = bits_from_float(x);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float fp16_to_float(std::uint16_t bits) {
#ifdef __F16C__
  return _cvtsh_ss(bits);
#else
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000) << 16, rest = bits & 0x7fff;
  if (rest >= 0x7c00) return float_from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest >= 0x400) return float_from_bits(sign | ((rest << 13) + (112u << 23)));
  const float magnitude = static_cast<float>(rest) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
#endif
}
inline std::uint16_t float_to_fp16(float x) {
  if (x != x) return 0x7fff;
#ifdef __F16C__
  return static_cast<std::uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  const std::uint32_t bits = bits_from_float(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest >= 0x47800000) return static_cast<std::uint16_t>(sign | 0x7c00);  // 65536 and above
  if (rest < 0x38800000) {  // below 2^-14: the addition rounds at the last place of a subnormal, 2^-24
    const float rounded = float_from_bits(rest) + 0.5f;
    return static_cast<std::uint16_t>(sign | (bits_from_float(rounded) - bits_from_float(0.5f)));
  }
  return static_cast<std::uint16_t>(sign | ((rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13));
#endif
}

/// E5M2 is the upper byte of fp16. E4M3FN has no infinity, and NaN where all bits but the sign are ones.
inline float e5m2_to_float(std::uint8_t bits) { return fp16_to_float(static_cast<std::uint16_t>(bits << 8)); }
inline float e4m3_to_float(std::uint8_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80) << 24, rest = bits & 0x7f;
  if (rest == 0x7f) return float_from_bits(sign | 0x7fffffff);
  const float magnitude = rest < 8 ? static_cast<float>(rest) * 0x1p-9f : float_from_bits((rest << 20) + (120u << 23));
  return sign ? -magnitude : magnitude;
}

}  // namespace simt
