// Arithmetic on byte counts that says so when it overflows. Used by every file of src/memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace flashkernel::detail {

/// No object is larger than this, so that pointer differences stay defined.
inline constexpr std::size_t kMaxBytes = static_cast<std::size_t>(std::numeric_limits<std::ptrdiff_t>::max());

constexpr bool is_power_of_two(std::size_t value) noexcept { return value != 0 && (value & (value - 1)) == 0; }

/// `value` up to a multiple of `unit`, a power of two. The caller makes sure that it fits.
constexpr std::size_t round_up(std::size_t value, std::size_t unit) noexcept {
  return (value + unit - 1) & ~(unit - 1);
}

/// `a * b` into `a`; false, leaving `a`, if that is more than kMaxBytes. Both are at least 0.
constexpr bool multiply(std::int64_t& a, std::int64_t b) noexcept {
  if (b != 0 && a > static_cast<std::int64_t>(kMaxBytes) / b) return false;
  a *= b;
  return true;
}

}  // namespace flashkernel::detail
