// Emulates src/cuda/ptx/math.cuh. The approximations are exact here, except that results below 2^-126 are flushed to 0
// as .ftz does.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "half_bits.h"

namespace flashkernel::cuda::ptx {

inline float flush_to_zero(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

inline float exp2_approx(float x) { return flush_to_zero(exp2f(flush_to_zero(x))); }
inline float reciprocal_approx(float x) { return flush_to_zero(1.0f / flush_to_zero(x)); }
inline float sqrt_approx(float x) { return flush_to_zero(std::sqrt(flush_to_zero(x))); }

inline std::uint32_t max3_u16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const std::uint32_t low = std::max({a & 0xffff, b & 0xffff, c & 0xffff});
  return std::max({a >> 16, b >> 16, c >> 16}) << 16 | low;
}

inline std::uint32_t and_or(std::uint32_t bits, std::uint32_t mask, std::uint32_t others) {
  return (bits & mask) | others;
}

// Exact in double for what fp32 cannot hold: one rounding, as the instruction's.
inline std::uint32_t fma_f16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const auto one = [](std::uint32_t x, std::uint32_t y, std::uint32_t z) {
    const auto wide = [](std::uint32_t bits) {
      return static_cast<double>(simt::fp16_to_float(static_cast<unsigned short>(bits)));
    };
    return static_cast<std::uint32_t>(simt::float_to_fp16(static_cast<float>(wide(x) * wide(y) + wide(z))));
  };
  return one(a >> 16, b >> 16, c >> 16) << 16 | one(a & 0xffff, b & 0xffff, c & 0xffff);
}
inline std::uint32_t fma_bf16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const auto one = [](std::uint32_t x, std::uint32_t y, std::uint32_t z) {
    const auto wide = [](std::uint32_t bits) {
      return static_cast<double>(simt::bf16_to_float(static_cast<unsigned short>(bits)));
    };
    return static_cast<std::uint32_t>(simt::float_to_bf16(static_cast<float>(wide(x) * wide(y) + wide(z))));
  };
  return one(a >> 16, b >> 16, c >> 16) << 16 | one(a & 0xffff, b & 0xffff, c & 0xffff);
}

}  // namespace flashkernel::cuda::ptx
