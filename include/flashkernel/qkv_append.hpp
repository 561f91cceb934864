// The projection of queries, keys and values of a decode step, with the norm before it, RoPE, and keys and values into
// their pages.
#pragma once

#include <optional>

#include "flashkernel/execution.hpp"
#include "flashkernel/kv_ops.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

/// The projection to queries, keys and values with what follows it: norm(x) W^T + bias, RoPE of q and k, and
/// `kv_append` of k and v. Queries are written to q_out.
/// - x [tokens, in_features]
/// - weight [(heads_q + 2 heads_kv) head_dim, in_features] (either dim contiguous): heads of q, then of k, then of v
/// - bias, norm_weight, norm_bias, centred, eps, constant_weights: as in `fused_linear`
/// - k_pages, v_pages [num_pages, page_size, heads_kv, head_dim] of x's dtype
/// - slots int32 or int64 [tokens]
/// - rope: without q and q_out; absent: nothing is rotated
/// - q_out [tokens, heads_q, head_dim], heads side by side: written
///
/// Sums are fp32; a kernel may round them to x's dtype before it rotates them.
FK_API void qkv_append(const TensorView& x, const TensorView& weight, const TensorView& bias,
                       const TensorView& norm_weight, const TensorView& norm_bias, const TensorView& k_pages,
                       const TensorView& v_pages, const TensorView& slots, const std::optional<KvAppendRope>& rope,
                       const TensorView& q_out, bool centred = false, float eps = 1e-6f, bool constant_weights = false,
                       const ExecutionContext& context = {});

}  // namespace flashkernel
