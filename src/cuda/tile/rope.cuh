// The angle of a rotary pair, accurate to fp32 at any position, and the turn of N pairs; shared by rope and kv_append.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/tile/vector.cuh"
#include "ops/rope_params.hpp"

namespace flashkernel::cuda {

inline constexpr double kInversePi = 0.31830988618379067154;

/// Frequencies in half turns per token, worked out by the host: exp2 in fp64 for every thread would cost as much as the
/// rotation. A kernel's argument.
inline constexpr int kMostFrequencies = 128;
struct RopeFrequencies {
  double half_turns[kMostFrequencies];
};

/// The frequencies of the pairs from `first_pair` on, as many as there are and fit. All are zero where `inv_freq` gives
/// them.
inline RopeFrequencies rope_frequencies(const RopeSpec& spec, std::int64_t first_pair = 0) {
  struct Last {
    RopeFrequencies table{};
    std::int64_t rotary_dim = 0, first_pair = 0;
    double theta = 0.0;
  };
  if (spec.inv_freq) return {};
  static thread_local Last last;  // a model asks for the same ones again and again
  if (last.rotary_dim != spec.rotary_dim || last.theta != spec.theta || last.first_pair != first_pair) {
    const auto rotary_dim = static_cast<double>(spec.rotary_dim);
    for (int i = 0; i < kMostFrequencies && first_pair + i < spec.rotary_dim / 2; ++i)
      last.table.half_turns[i] =
          std::exp2(-2.0 * static_cast<double>(first_pair + i) / rotary_dim * std::log2(spec.theta)) * kInversePi;
    last.rotary_dim = spec.rotary_dim;
    last.first_pair = first_pair;
    last.theta = spec.theta;
  }
  return last.table;
}

/// The frequency of pair `first_pair + at`. `frequencies` was made for first_pair.
__device__ inline double half_turns_per_token(const RopeSpec& spec, const RopeFrequencies& frequencies, int at,
                                              int first_pair = 0) {
  return spec.inv_freq ? static_cast<double>(spec.inv_freq[first_pair + at]) * kInversePi : frequencies.half_turns[at];
}

/// Cosine and sine of a position's angle. The frequency is in half turns per token (frequency / pi).
__device__ inline void rope_angle(std::int64_t position, double half_turns_per_token, float* cosine, float* sine) {
  // Past int32 nothing would be left of the angle's precision. The host reads no positions here: NaN says it.
  const double in_range = position == static_cast<std::int32_t>(position) ? static_cast<double>(position) : NAN;
  const double half_turns = in_range * half_turns_per_token;
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

/// Turns N pairs: (x[i], y[i]), or, interleaved, neighbours in the 2 N elements that x and y hold in order.
template <bool kInterleaved, class T, int N>
__device__ inline void rotate_pairs(Packed<T, N>& x, Packed<T, N>& y, const float (&cosine)[N],
                                    const float (&sine)[N]) {
  const auto turn = [&](int i, T& first, T& second, float& to_first, float& to_second) {
    const float u = to_float(first), v = to_float(second);
    to_first = u * cosine[i] - v * sine[i];
    to_second = u * sine[i] + v * cosine[i];
  };
  const auto put = [](T& a, T& b, float to_a, float to_b) {
    if constexpr (sizeof(T) == 2)
      round_two(a, b, to_a, to_b);
    else
      a = to_a, b = to_b;
  };
  float a, b, c, d;
  if constexpr (N == 1) {
    turn(0, x.values[0], y.values[0], a, b);
    put(x.values[0], y.values[0], a, b);
  } else if constexpr (kInterleaved) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      Packed<T, N>& of = 2 * i < N ? x : y;
      turn(i, of.values[2 * i % N], of.values[2 * i % N + 1], a, b);
      put(of.values[2 * i % N], of.values[2 * i % N + 1], a, b);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      turn(i, x.values[i], y.values[i], a, b);
      turn(i + 1, x.values[i + 1], y.values[i + 1], c, d);
      put(x.values[i], x.values[i + 1], a, c);
      put(y.values[i], y.values[i + 1], b, d);
    }
  }
}

}  // namespace flashkernel::cuda
