// What kv_append checks, for ops that append what they have computed
// themselves. Called by ops/kv_ops.cpp and ops/qkv_append.cpp.
#pragma once

#include <optional>

#include "flashkernel/kv_ops.hpp"
#include "ops/check.hpp"
#include "ops/kv_params.hpp"

namespace flashkernel {

/// Throws InvalidArgument in the name of the checker's op. `copies` holds the
/// indices that the params point to.
KvAppendParams check_kv_append(const Checker& check, const TensorView& k, const TensorView& v,
                               const TensorView& k_pages, const TensorView& v_pages, const KvScales& scales,
                               const TensorView& slots, const std::optional<KvAppendRope>& rope, IndexCopies& copies);

}  // namespace flashkernel
