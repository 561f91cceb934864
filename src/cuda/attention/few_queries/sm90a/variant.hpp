// Attention of few queries over many keys on Hopper: speculative verification, chunked prefill, cross-attention, and
// one query of many heads that share a kv head. What a row of the table says about an instance (instances/, from
// kernel.cuh).
#pragma once

#include "cuda/attention/few_queries/sm90a/plan.hpp"
#include "cuda/attention/limits.hpp"
#include "cuda/attention/tensor_maps.hpp"
#include "flashkernel/stream.hpp"

namespace flashkernel::cuda::sm90a {

template <DType kDtype, int kQkDim, int kVDim>
Verdict few_queries_supports(const AttentionParams& p) {
  if (p.dtype != kDtype) return "it is built for another dtype";
  if (!HeadDims{kQkDim, kVDim}.hold(p.head_dim, p.head_dim_v)) return kTooSmallHeadDims;
  if (p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0) return "head_dim must be a multiple of 8";
  if (p.softcap > 0 || p.bias.data || p.alibi_slopes || p.mask.blocks.data)
    return "it takes no bias, ALiBi, softcap or block mask";
  if (p.mask.data && !p.is_paged()) return "it takes a packed mask over pages only, where most keys are seen by all";
  if (!(p.scale > 0.0f)) return "its scale must be positive";
  if (p.heads_kv <= 0 || p.heads_q % p.heads_kv != 0) return "each kv head needs the same number of query heads";
  if (p.seq_q > kMostTokens || p.seq_k > kMostTokens) return "seq_q or seq_k is over 2^29";
  if (p.total_k > 0x7fffffff || p.num_pages > 0x7fffffff) return "there are over 2^31 rows or pages";
  if (p.heads_q * (p.seq_q / 64 + 1) > 0xffff || p.batch > 0xffff) return "the grid has no room for so many rows";
  const auto vectors = [](const void* data, std::int64_t a, std::int64_t b, std::int64_t c) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && a % 8 == 0 && b % 8 == 0 && c % 8 == 0;
  };
  if (!vectors(p.q, p.is_varlen_q() ? 0 : p.stride_q_batch, p.stride_q_head, p.stride_q_token) ||
      !vectors(p.out, p.is_varlen_q() ? 0 : p.stride_out_batch, p.stride_out_head, p.stride_out_token))
    return "rows of q and out must start at multiples of 16 bytes";
  if (!fits_tensor_map(kv_map(p, false, 8)) || !fits_tensor_map(kv_map(p, true, 8)))
    return "its copy engine needs keys and values at multiples of 16 bytes, and positive strides";
  return Verdict::ok();
}

/// Launches the kernel of a FewQueriesPlan.
template <DType kDtype, int kQkDim, int kVDim>
void attention_few_queries(const AttentionParams& p, const Plan& plan, void* workspace, Stream stream);

}  // namespace flashkernel::cuda::sm90a
