// What a row of the table says about an instance of the sm80 forward kernel; the instances themselves are generated
// (cmake/FlashkernelCudaInstances.cmake) and defined through attention_fwd.cuh.
#pragma once

#include "flashkernel/stream.hpp"
#include "ops/attention_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda::sm80 {

using attention_fwd_params = AttentionParams;  // what the generated instances call it

/// Buckets of head_dim, each filled with zeros up to its size: the smallest one that holds both head dims serves.
inline constexpr std::int64_t kHeadDims[] = {32, 64, 96, 128, 192, 256};

template <DType kDtype, int kDim>
Verdict attention_fwd_supports(const AttentionParams& p) {
  if (p.dtype != kDtype) return "it is built for another dtype";
  const std::int64_t dim = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  if (dim > kDim) return "head_dim is larger than what it is built for";
  for (const std::int64_t bucket : kHeadDims)
    if (bucket < kDim && dim <= bucket) return "a kernel with a smaller head_dim serves the call";
  // Lengths are 32-bit in the kernel, with room for windows; so is the number of blocks.
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 29;
  if (p.seq_q > kMostTokens || p.seq_k > kMostTokens) return "seq_q or seq_k is over 2^29";
  if (p.batch * p.heads_q * (p.seq_q / 64 + 1) > 0x7fffffff) return "too many blocks for one grid";
  return Verdict::ok();
}

}  // namespace flashkernel::cuda::sm80
