// Division of numbers below 2^31 by a number that the host knows before the launch: a product and a shift where the
// hardware would need twenty instructions that wait for each other. Granlund and Montgomery, 1994, figure 4.1.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flashkernel::cuda {

struct Divisor {
  std::uint32_t value = 1, multiplier = 0, shift = 0;

  Divisor() = default;
  explicit Divisor(std::int64_t divisor) : value(static_cast<std::uint32_t>(divisor)) {  // 1 .. 2^31
    while ((std::uint64_t{1} << shift) < value) ++shift;
    // 2^shift >= value > 2^(shift - 1): the quotient is in [2^32, 2^33), and its first bit is left out.
    multiplier = static_cast<std::uint32_t>(((std::uint64_t{1} << (32 + shift)) + value - 1) / value);
  }
  __device__ std::uint32_t divide(std::uint32_t number) const {
    const auto high = static_cast<std::uint32_t>(static_cast<std::uint64_t>(number) * multiplier >> 32);
    return (high + number) >> shift;
  }
};

}  // namespace flashkernel::cuda
