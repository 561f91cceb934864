// Attention of 8-bit floating point queries, keys and values with scales beside them, and a 16-bit output.
#pragma once

#include "flashkernel/attention.hpp"

namespace flashkernel {

/// softmax(scale * Q K^T) V where Q, K and V are float8_e4m3fn elements times a scale. Dense without cu_seqlens: q
/// [batch, heads_q, seq_q, head_dim], k and v [batch, heads_kv, seq_k, *], out as q with v's head dim, lse fp32 [batch,
/// heads_q, seq_q] (may be absent); 2 to 4 dims. With cu_seqlens_q and cu_seqlens_k (both): layouts and lengths of
/// `attention_varlen`. out is float16 or bfloat16.
///
/// q_scale, k_scale and v_scale are fp32, each absent (1), one number (0 dims or one element; on q's device, or on the
/// host, where it is read during the call), or broadcastable to [batch, heads_kv]: a query head has the scale of its kv
/// head. Options: causal, window, softcap, scale, ALiBi, sinks, seqused. There is no gradient.
///
/// Kernels on 8-bit tensor cores round the weights of keys to e4m3 before the second product (docs/low_precision.md).
FK_API void attention_fp8(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& q_scale,
                          const TensorView& k_scale, const TensorView& v_scale, const TensorView& cu_seqlens_q,
                          const TensorView& cu_seqlens_k, std::int64_t max_seqlen_q, std::int64_t max_seqlen_k,
                          const TensorView& out, const TensorView& lse, const AttentionOptions& options = {},
                          const ExecutionContext& context = {});

}  // namespace flashkernel
