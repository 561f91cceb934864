// What a row of the table says about an instance of the fp32 backward kernel of sm80 (kernel_f32.cuh).
#pragma once

#include <algorithm>

#include "cuda/attention/limits.hpp"
#include "flashkernel/stream.hpp"
#include "ops/attention_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda::sm80 {

template <int kQkDim, int kVDim>
Verdict attention_bwd_f32_supports(const AttentionBackwardParams& p) {
  const AttentionParams& f = p.forward;
  if (f.dtype != DType::kFloat32) return "it is built for another dtype";
  if (!HeadDims{kQkDim, kVDim}.hold(f.head_dim, f.head_dim_v)) return kTooSmallHeadDims;
  if (f.is_paged()) return "it takes no paged keys and values";
  if (f.seq_q > kMostTokens || f.seq_k > kMostTokens) return "seq_q or seq_k is over 2^29";
  if (f.batch > 65535 || f.heads_q > 65535) return "batch or heads_q is over 65535";
  if (f.batch * f.heads_q * (std::max(f.seq_q, f.seq_k) / 8 + 1) > 0x7fffffff) return "too many blocks for one grid";
  return Verdict::ok();
}

/// -D in fp32, [batch, heads_q, seq_q]; the generic kernel leaves its D there first.
inline std::size_t attention_bwd_f32_workspace(const AttentionBackwardParams& p) {
  return static_cast<std::size_t>(p.forward.batch * p.forward.heads_q * p.forward.seq_q) * 4;
}

/// Launches the kernel: an entry of the table.
template <int kQkDim, int kVDim>
void attention_bwd_f32(const AttentionBackwardParams& p, void* workspace, Stream stream);

}  // namespace flashkernel::cuda::sm80
