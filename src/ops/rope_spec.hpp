// The checked form of RopeOptions, shared by rope and kv_append.
#pragma once

#include "flashkernel/rope.hpp"
#include "ops/check.hpp"
#include "ops/rope_params.hpp"

namespace flashkernel {

/// Throws InvalidArgument, in the name of the checker's op, for a rotary_dim or theta or inv_freq that cannot be.
RopeSpec rope_spec(const Checker& check, const RopeOptions& options, std::int64_t head_dim);

}  // namespace flashkernel
