// The forms of ALiBi: what a head's slope is multiplied with. An option of attention.
#pragma once

#include <cstdint>

namespace flashkernel {

/// With d = i + seq_k - seq_q - j, the distance from key j to the position of query i, ALiBi adds to a score
enum class Alibi : std::uint8_t {
  kDistance,  ///< -slope * |d|
  kSigned,    ///< -slope * d: keys behind the position gain what those before it lose
  kSqrt,      ///< -slope * sqrt(d) for keys before the position, 0 for the others
};

}  // namespace flashkernel
