// The plain types that calls are described with, apart from the functions that take them: device code includes these,
// and not the containers and strings of the interface, which cost a compiler more than most kernels do.
#pragma once

#include <cstdint>

#include "flashkernel/dtype.hpp"

namespace flashkernel {

enum class DeviceType : std::uint8_t { kCpu, kCuda };

/// Where a tensor lives: the host, or one CUDA device.
struct Device {
  DeviceType type = DeviceType::kCpu;
  std::int32_t index = 0;

  static constexpr Device cpu() noexcept { return {DeviceType::kCpu, 0}; }
  static constexpr Device cuda(std::int32_t index) noexcept { return {DeviceType::kCuda, index}; }
  constexpr bool is_cpu() const noexcept { return type == DeviceType::kCpu; }
  constexpr bool is_cuda() const noexcept { return type == DeviceType::kCuda; }
  friend constexpr bool operator==(Device a, Device b) noexcept { return a.type == b.type && a.index == b.index; }
  friend constexpr bool operator!=(Device a, Device b) noexcept { return !(a == b); }
};

/// Most dims of a tensor.
inline constexpr int kMaxDims = 8;

/// Neighbouring 4-bit elements of a KV-cache that share a scale (kv_scales.hpp): of int4, and of float4_e2m1fn_x2.
inline constexpr int kInt4Group = 32, kNvfp4Group = 16;

/// What a linear layer applies to its result.
enum class Activation : std::uint8_t {
  kNone,
  kGeluTanh,  ///< 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
  kGelu,      ///< 0.5 x (1 + erf(x / sqrt(2)))
  kSilu,      ///< x / (1 + exp(-x))
};

/// How a row of weights in few bits lies in memory, in blocks of 32 elements.
enum class WeightFormat : std::uint8_t {
  kInt4,  ///< uint8 [out, in / 2]: byte i of a block's 16 has element i in its low half, element 16 + i in its high one
  kInt8,  ///< int8 [out, in]
  kQ4_0,  ///< uint8 [out, in / 32 * 18]: GGUF's Q4_0, an fp16 scale d before the 16 bytes of int4; d * (q - 8)
  kQ4_1,  ///< uint8 [out, in / 32 * 20]: GGUF's Q4_1, two fp16 numbers d and m before the 16 bytes; d * q + m
  kQ8_0,  ///< uint8 [out, in / 32 * 34]: GGUF's Q8_0, an fp16 scale d before 32 int8; d * q
};

/// What becomes of the losses of the rows.
enum class Reduction : std::uint8_t { kNone, kSum, kMean };

}  // namespace flashkernel
