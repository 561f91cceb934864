// What a row of the table says about an instance of the fp32 backward kernel of sm80 (attention_bwd_f32.cuh).
#pragma once

#include <algorithm>

#include "flashkernel/stream.hpp"
#include "ops/attention_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda::sm80 {

using attention_bwd_params = AttentionBackwardParams;  // what the generated instances call it

template <int kDim>
Verdict attention_bwd_f32_supports(const AttentionBackwardParams& p) {
  const AttentionParams& f = p.forward;
  if (f.dtype != DType::kFloat32) return "it is built for another dtype";
  const std::int64_t dim = std::max(f.head_dim, f.head_dim_v);
  if (dim > kDim) return "head_dim is larger than what it is built for";
  for (const std::int64_t bucket : {32, 64, 96, 128})
    if (bucket < kDim && dim <= bucket) return "a kernel with a smaller head_dim serves the call";
  if (f.is_paged()) return "it takes no paged keys and values";
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 29;
  if (f.seq_q > kMostTokens || f.seq_k > kMostTokens) return "seq_q or seq_k is over 2^29";
  if (f.batch > 65535 || f.heads_q > 65535) return "batch or heads_q is over 65535";
  if (f.batch * f.heads_q * (std::max(f.seq_q, f.seq_k) / 8 + 1) > 0x7fffffff) return "too many blocks for one grid";
  return Verdict::ok();
}

/// -D in fp32, [batch, heads_q, seq_q]; the generic kernel leaves its D there first.
inline std::size_t attention_bwd_f32_workspace(const AttentionBackwardParams& p) {
  return static_cast<std::size_t>(p.forward.batch * p.forward.heads_q * p.forward.seq_q) * 4;
}

}  // namespace flashkernel::cuda::sm80
