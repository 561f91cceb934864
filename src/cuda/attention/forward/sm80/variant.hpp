// What a row of the table says about an instance of the sm80 forward kernel. kernel.cuh defines the instances,
// which are compiled in instances/.
#pragma once

#include "cuda/attention/limits.hpp"
#include "flashkernel/stream.hpp"
#include "ops/attention_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda::sm80 {

template <DType kDtype, int kQkDim, int kVDim>
Verdict attention_fwd_supports(const AttentionParams& p) {
  if (p.dtype != kDtype) return "it is built for another dtype";
  if (!HeadDims{kQkDim, kVDim}.hold(p.head_dim, p.head_dim_v)) return kTooSmallHeadDims;
  // Lengths are 32-bit in the kernel, with room for windows; so is the number of blocks.
  if (p.seq_q > kMostTokens || p.seq_k > kMostTokens) return "seq_q or seq_k is over 2^29";
  if (p.batch * p.heads_q * (p.seq_q / 64 + 1) > 0x7fffffff) return "too many blocks for one grid";
  return Verdict::ok();
}

/// Launches the kernel: an entry of the table.
template <DType kDtype, int kQkDim, int kVDim>
void attention_fwd(const AttentionParams& p, void* workspace, Stream stream);

/// The same in tiles of 64 queries by 64 keys, for short sequences: an entry of the table.
template <DType kDtype, int kQkDim, int kVDim>
void attention_fwd_short(const AttentionParams& p, void* workspace, Stream stream);

/// Launches the kernel for head dims over 256 (wide.cuh): an entry of the table.
template <DType kDtype, int kDim>
void attention_fwd_wide(const AttentionParams& p, void* workspace, Stream stream);

/// Launches the kernel: an entry of the table.
template <int kQkDim, int kVDim>
void attention_fwd_f32(const AttentionParams& p, void* workspace, Stream stream);

}  // namespace flashkernel::cuda::sm80
