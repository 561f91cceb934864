// Rows of floats into elements of 8 bits, with a scale: the same bits as core/float_types.hpp makes. Included by
// <isa>/*.cpp through norm_impl.hpp. The elements are made one by one in loops without branches, of which compilers
// make vectors.
#pragma once

#include "cpu/simd/rows.hpp"
#include "ops/params_common.hpp"

namespace flashkernel::cpu {
namespace {

/// Nearest even; infinities become 448 and -448, NaN stays.
inline std::uint8_t to_e4m3(float x) {
  std::uint32_t bits, aligned;
  memcpy(&bits, &x, sizeof bits);
  const std::uint32_t sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  float positive;
  memcpy(&positive, &magnitude, sizeof positive);
  positive += 16384.0f;  // aligns the last place of a subnormal (below 2^-6) to 2^-9, and rounds
  memcpy(&aligned, &positive, sizeof aligned);
  const std::uint32_t normal = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u) - 0x3c000000u) >> 20;
  std::uint32_t rest = magnitude < 0x3c800000u ? aligned - 0x46800000u : normal;
  rest = magnitude >= 0x43e80000u ? 0x7eu : rest;  // 464 is half way to 480
  rest = magnitude > 0x7f800000u ? 0x7fu : rest;
  return static_cast<std::uint8_t>(sign | rest);
}

/// Nearest even; infinities become 127 and -127, NaN 0.
inline std::uint8_t to_int8(float x) {
  x = x < -127.0f ? -127.0f : x;
  x = x > 127.0f ? 127.0f : x;
  x = x == x ? x : 0.0f;
  const float shifted = x + 12582912.0f;  // 2^23 + 2^22: the integer, rounded to nearest even, in the low bits
  std::uint32_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  return static_cast<std::uint8_t>(bits);
}

/// The scale that a row of f(c, lanes) gets for itself (params_common.hpp).
template <class F>
inline float scale_of_row(std::int64_t n, DType dtype, F&& f) {
  Reg largest = Simd::zero();
  Simd::Mask has_nan = Simd::none();
  for_vectors(n, [&](std::int64_t c, int lanes) {
    Reg x = Simd::abs(f(c, lanes));
    if (lanes < Simd::kWidth) x = Simd::select(Simd::lanes(lanes), x, Simd::zero());
    has_nan = Simd::either(has_nan, Simd::is_nan(x));
    largest = Simd::max(x, largest);  // the second operand wins over a NaN
  });
  const float most = largest_element(dtype);
  return row_scale(dtype == DType::kInt8 && Simd::any(has_nan) ? __builtin_nanf("") : Simd::max_lane(largest), most);
}

/// The n elements f(c, lanes) / scale.
template <class F>
inline void quantize_row(std::int64_t n, DType dtype, float scale, std::uint8_t* out, F&& f) {
  const Reg inverse = Simd::set1(1.0f / scale);
  for_vectors(n, [&](std::int64_t c, int lanes) {
    float values[Simd::kWidth];
    std::uint8_t bytes[Simd::kWidth];
    Simd::save(values, Simd::mul(f(c, lanes), inverse));
    if (dtype == DType::kInt8) {
      for (int i = 0; i < Simd::kWidth; ++i) bytes[i] = to_int8(values[i]);
    } else {
      for (int i = 0; i < Simd::kWidth; ++i) bytes[i] = to_e4m3(values[i]);
    }
    memcpy(out + c, bytes, static_cast<std::size_t>(lanes));
  });
}

}  // namespace
}  // namespace flashkernel::cpu
