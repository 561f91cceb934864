// Rows of 4-bit elements of a KV-cache as numbers: int4 with a scale and a zero for 32 neighbours, or NVFP4's e2m1 with
// an e4m3 scale for 16 neighbours and one for the tensor (flashkernel/kv_scales.hpp). One element at a time, in plain
// arithmetic, for host and device: what fast kernels do in bulk must give these numbers.
//
// How int4 is written: x is bounded to +-65024, which leaves room for rounding in float16; zero is the least of the
// group as float16; scale is (largest - zero) / 15 as float16; an element is (x - zero) / scale, rounded to nearest
// even and bounded to 0 to 15. A group with a NaN gets a scale that is NaN and elements of 0.
#pragma once

#include <cstring>

#include "ops/params_common.hpp"

namespace flashkernel {

inline constexpr float kInt4Largest = 65024.0f;  // a number of float16
inline constexpr float kFifteenth = 1.0f / 15.0f;
inline constexpr std::uint32_t kInt4NanWord = 0x7e007e00u;  // scale and zero of a group with a NaN

FK_HOST_DEVICE static inline float packed_float(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/// float16 in the low bits.
FK_HOST_DEVICE static inline float packed_half(std::uint32_t bits) {
  const std::uint32_t sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
  if (rest >= 0x7c00u) return packed_float(sign | 0x7f800000u | rest << 13);
  // Exponent and mantissa in fp32's places are a number 2^112 too small, subnormals included.
  const float magnitude = packed_float(rest << 13) * 5.192296858534828e33f;
  return sign != 0 ? -magnitude : magnitude;
}
FK_HOST_DEVICE static inline float packed_e4m3(std::uint32_t bits) {
  const std::uint32_t sign = (bits & 0x80u) << 24, rest = bits & 0x7fu;
  if (rest == 0x7f) return packed_float(sign | 0x7fc00000u);
  const float magnitude = packed_float(rest << 20) * 1.329227995784916e36f;  // 2^120
  return sign != 0 ? -magnitude : magnitude;
}
/// 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
FK_HOST_DEVICE static inline float packed_e2m1(std::uint32_t bits) {
  const std::uint32_t exponent = bits >> 1 & 3, mantissa = bits & 1;
  const float magnitude =
      exponent == 0 ? 0.5f * static_cast<float>(mantissa) : static_cast<float>((2 + mantissa) << exponent) * 0.25f;
  return (bits & 8u) != 0 ? -magnitude : magnitude;
}

/// The head of a token.
struct PackedRow {
  const unsigned char* elements;
  const KvScale& scale;
  std::int64_t page, head, slot;
  DType dtype;

  FK_HOST_DEVICE std::uint32_t element(std::int64_t i) const { return elements[i / 2] >> (i % 2 * 4) & 15u; }
  /// Of int4: the scale of element i's group in the low half, and its zero.
  FK_HOST_DEVICE std::uint32_t word(std::int64_t i) const {
    const std::int64_t at = page * scale.stride_page + head * scale.stride_head + slot * scale.stride_slot;
    std::uint32_t both;
    memcpy(&both, scale.data + at + i / kInt4Group, sizeof both);
    return both;
  }
  FK_HOST_DEVICE float operator[](std::int64_t i) const { return number(element(i), i); }
  /// What an element of these bits is as number i of the row.
  FK_HOST_DEVICE float number(std::uint32_t bits, std::int64_t i) const {
    const std::int64_t at = page * scale.stride_page + head * scale.stride_head + slot * scale.stride_slot;
    if (dtype == DType::kInt4x2) {
      std::uint32_t word;
      memcpy(&word, scale.data + at + i / kInt4Group, sizeof word);
      // The product is exact in fp32.
      return static_cast<float>(bits) * packed_half(word & 0xffffu) + packed_half(word >> 16);
    }
    const auto* const scales = reinterpret_cast<const unsigned char*>(scale.data) + at;
    return packed_e2m1(bits) * packed_e4m3(scales[i / kNvfp4Group]) * scale.tensor;
  }
};

}  // namespace flashkernel
