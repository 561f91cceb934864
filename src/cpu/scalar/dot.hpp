// The sum that attention and linear are made of.
#pragma once

#include "cpu/scalar/element.hpp"

namespace flashkernel::cpu_scalar {

/// <a, b>, of b the elements from `offset` on. Many sums side by side: an addition waits for the one before, and
/// compilers make vectors of a long run.
template <class T>
double dot(const double* a, const void* b, std::int64_t offset, std::int64_t count) {
  constexpr std::int64_t kSums = 16;
  double sums[kSums] = {};
  std::int64_t d = 0;
  for (; d + kSums <= count; d += kSums)
    for (std::int64_t n = 0; n < kSums; ++n) sums[n] += a[d + n] * load<T>(b, offset + d + n);
  for (; d < count; ++d) sums[0] += a[d] * load<T>(b, offset + d);
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

}  // namespace flashkernel::cpu_scalar
