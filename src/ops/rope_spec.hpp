// The checked form of RopeOptions, shared by rope and kv_append.
#pragma once

#include "flashkernel/rope.hpp"
#include "ops/check.hpp"
#include "ops/rope_params.hpp"

namespace flashkernel {

/// Throws InvalidArgument, in the name of the checker's op, for a rotary_dim or theta or inv_freq that cannot be.
RopeSpec rope_spec(const Checker& check, const RopeOptions& options, std::int64_t head_dim);

/// Positions are those that int32 holds: an angle in double is then exact to 2^-20, and to less and less beyond. Values
/// on a GPU are not read here; its kernels make NaN of others.
inline void check_positions(const Checker& check, const char* name, const IndexArray& positions, std::int64_t count) {
  if (!positions.is_int64) return;
  constexpr std::int64_t kEnd = std::int64_t{1} << 31;
  check.indices_in_range(name, positions, count, -kEnd, kEnd, "2^31");
}

}  // namespace flashkernel
