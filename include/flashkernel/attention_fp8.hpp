// Attention of 8-bit floating point queries, keys and values with scales beside them, and a 16-bit output.
#pragma once

#include "flashkernel/attention.hpp"

namespace flashkernel {

/// softmax(scale * Q K^T) V where Q, K and V are float8_e4m3fn elements times a scale.
/// - q, k, v, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: without cu_seqlens the layouts of
///   `attention` (2 to 4 dims), with both of them those of `attention_varlen`
/// - q_scale, k_scale, v_scale fp32: absent (1), one number (0 dims or one element; on q's device, or on the host,
///   where it is read during the call), or broadcastable to [batch, heads_kv]: a query head has the scale of its kv
///   head
/// - out float16 or bfloat16, shape of q with v's head dim: written
/// - options: causal, window, softcap, scale, ALiBi, sinks, seqused_q and seqused_k are taken
///
/// There is no gradient. Kernels on 8-bit tensor cores, which run only where they are forced, round the weights of keys
/// to e4m3 before the second product (docs/low_precision.md).
FK_API void attention_fp8(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& q_scale,
                          const TensorView& k_scale, const TensorView& v_scale, const TensorView& cu_seqlens_q,
                          const TensorView& cu_seqlens_k, std::int64_t max_seqlen_q, std::int64_t max_seqlen_k,
                          const TensorView& out, const TensorView& lse, const AttentionOptions& options = {},
                          const ExecutionContext& context = {});

}  // namespace flashkernel
