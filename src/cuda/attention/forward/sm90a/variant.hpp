// What a row of the table says about an instance of the Hopper forward kernel. The instances (instances/) are made from
// kernel.cuh.
#pragma once

#include "cuda/attention/forward/sm90a/chunks.hpp"
#include "cuda/attention/limits.hpp"
#include "cuda/attention/tensor_maps.hpp"
#include "flashkernel/stream.hpp"
#include "ops/attention_params.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/plan.hpp"

namespace flashkernel::cuda::sm90a {

template <DType kDtype, int kQkDim, int kVDim>
Verdict attention_fwd_supports(const AttentionParams& p) {
  if (p.dtype != kDtype) return "it is built for another dtype";
  if (!HeadDims{kQkDim, kVDim}.hold(p.head_dim, p.head_dim_v)) return kTooSmallHeadDims;
  if (p.bias.data) return "it takes no additive bias";
  if (p.mask.is_given()) return "it takes no packed mask or block mask";
  if (p.alibi_slopes) return "it takes no ALiBi slopes";
  // Coordinates and the number of tiles have 32 bits.
  if (p.seq_q > kMostTokens || p.seq_k > kMostTokens) return "seq_q or seq_k is over 2^29";
  if (p.total_q > 0x7fffffff || p.total_k > 0x7fffffff || p.num_pages > 0x7fffffff)
    return "there are over 2^31 rows or pages";
  if (p.batch * p.heads_q * (p.seq_q / 64 + 1) > 0x7fffffff) return "too many tiles for 32 bits";
  if (p.is_paged() && p.page_size % 8 != 0) return "page_size must be a multiple of 8";
  if (!fits_tensor_map(q_map(p, 64)) || !fits_tensor_map(out_map(p, 64)) || !fits_tensor_map(kv_map(p, false, 8)) ||
      !fits_tensor_map(kv_map(p, true, 8)))
    return "its copy engine needs data and rows at multiples of 16 bytes, and positive strides";
  return Verdict::ok();
}

/// Launches the kernel. In the invariant mode every call has the same tiles of keys.
template <DType kDtype, int kQkDim, int kVDim>
void attention_fwd(const AttentionParams& p, bool invariant, void* workspace, Stream stream);
/// The same for calls of the invariant mode whose keys come in chunks (chunks.hpp).
template <DType kDtype, int kQkDim, int kVDim>
void attention_fwd_in_chunks(const AttentionParams& p, int splits, void* workspace, Stream stream);

template <int kQkDim, int kVDim>
Plan attention_fwd_plan(const AttentionParams& p, const DeviceFacts& facts) {
  const ForwardMode mode = forward_mode<kQkDim, kVDim>(p, facts);
  return Plan::of(mode, mode.splits > 0 ? static_cast<std::size_t>(bytes_of_parts<kVDim>(p)) : 0);
}
/// An entry of the table.
template <DType kDtype, int kQkDim, int kVDim>
void launch_attention_fwd(const AttentionParams& p, const Plan& plan, void* workspace, Stream stream) {
  const ForwardMode& mode = plan.as<ForwardMode>();
  if constexpr (kInChunks<kQkDim, kVDim>)
    if (mode.invariant && has_plain_scores(p))
      return attention_fwd_in_chunks<kDtype, kQkDim, kVDim>(p, mode.splits, workspace, stream);
  attention_fwd<kDtype, kQkDim, kVDim>(p, mode.invariant, workspace, stream);
}

/// Launches the kernel for head dims over 256 (wide.cuh): an entry of the table.
template <DType kDtype>
void attention_fwd_wide(const AttentionParams& p, void* workspace, Stream stream);

}  // namespace flashkernel::cuda::sm90a
