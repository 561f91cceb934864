// The rotation of one RoPE pair, shared by rope and kv_append. Angles are position * frequency in double: exact to fp32
// at any position below 2^31 (Su et al., 2021).
#pragma once

#include <cmath>

#include "cpu/scalar/element.hpp"
#include "ops/rope_params.hpp"

namespace flashkernel::cpu_scalar {

struct Rotation {
  double cos, sin;
};

inline Rotation rotation_at(const RopeSpec& spec, std::int64_t pair, std::int64_t position) {
  const double frequency =
      spec.inv_freq ? static_cast<double>(spec.inv_freq[pair])
                    : std::pow(spec.theta, -2.0 * static_cast<double>(pair) / static_cast<double>(spec.rotary_dim));
  const double angle = static_cast<double>(position) * frequency;
  return {std::cos(angle), std::sin(angle)};
}

/// Rotates pair `pair` of the head at `in` into `out` (which may be `in`).
template <class T, class Out>
inline void rotate_pair(const RopeSpec& spec, std::int64_t pair, Rotation rotation, const T* in, Out* out) {
  const std::int64_t first = spec.interleaved ? 2 * pair : pair;
  const std::int64_t second = spec.interleaved ? 2 * pair + 1 : pair + spec.rotary_dim / 2;
  const double sine = spec.inverse ? -rotation.sin : rotation.sin;
  const double a = load<T>(in, first), b = load<T>(in, second);
  store<Out>(out, first, a * rotation.cos - b * sine);
  store<Out>(out, second, b * rotation.cos + a * sine);
}

/// The elements past rotary_dim pass through bit for bit.
template <class T>
inline void copy_unrotated(const RopeSpec& spec, std::int64_t head_dim, const T* in, T* out) {
  if (in == out) return;
  for (std::int64_t i = spec.rotary_dim; i < head_dim; ++i) out[i] = in[i];
}

}  // namespace flashkernel::cpu_scalar
