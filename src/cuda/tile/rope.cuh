// The angle of a rotary pair, accurate to fp32 at any position; shared by rope and kv_append.
#pragma once

#include <cstdint>

#include "ops/rope_params.hpp"

namespace flashkernel::cuda {

inline constexpr double kInversePi = 0.31830988618379067154;

/// Of a position at a frequency given in half turns per token (frequency / pi).
__device__ inline void rope_angle(std::int64_t position, double half_turns_per_token, float* cosine, float* sine) {
  const double half_turns = static_cast<double>(position) * half_turns_per_token;
  const float rest = static_cast<float>(half_turns - 2.0 * rint(0.5 * half_turns));  // in [-1, 1] half turns
  sincospif(rest, sine, cosine);
}

/// cos and sin of position * frequency(pair). The product and the whole turns are taken in fp64: at position 10^6 an
/// fp32 product would already be off by 0.03 radians.
__device__ inline void rope_angle(const RopeSpec& spec, std::int64_t position, std::int64_t pair, float* cosine,
                                  float* sine) {
  const double frequency =
      spec.inv_freq ? static_cast<double>(spec.inv_freq[pair])
                    : exp2(-2.0 * static_cast<double>(pair) / static_cast<double>(spec.rotary_dim) * log2(spec.theta));
  rope_angle(position, frequency * kInversePi, cosine, sine);
}

}  // namespace flashkernel::cuda
