// What a row of the table says about an instance of the sm80 backward kernel; the instances themselves are generated
// (cmake/FlashkernelCudaInstances.cmake) and defined through attention_bwd.cuh.
#pragma once

#include <algorithm>

#include "flashkernel/stream.hpp"
#include "ops/attention_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda::sm80 {

using attention_bwd_params = AttentionBackwardParams;  // what the generated instances call it

/// Queries a step; the sum of dQ lies in tiles of this many rows.
constexpr int backward_block_m(int dim) { return dim <= 64 ? 128 : 64; }

/// The workspace: -D and then -LSE in base 2, [batch, heads_q, seq_q] in fp32 each (the generic kernel leaves its D in
/// the first), then the sum of dQ in fp32 tiles [batch, heads_q, tiles][block_m * dim], one counter a tile, and the
/// ticket.
struct BackwardWorkspace {
  std::int64_t tiles = 0, lse = 0, sums = 0, counters = 0, bytes = 0;  // tiles a head; then byte offsets

  BackwardWorkspace(const AttentionParams& f, int dim) {
    const std::int64_t block_m = backward_block_m(dim), heads = f.batch * f.heads_q;
    tiles = (f.seq_q + block_m - 1) / block_m;
    lse = heads * f.seq_q * 4;
    sums = (2 * lse + 255) / 256 * 256;
    counters = sums + heads * tiles * block_m * dim * 4;
    bytes = counters + (heads * tiles + 1) * 4;
  }
};

template <DType kDtype, int kDim>
Verdict attention_bwd_supports(const AttentionBackwardParams& p) {
  const AttentionParams& f = p.forward;
  if (f.dtype != kDtype) return "another dtype";
  const std::int64_t dim = std::max(f.head_dim, f.head_dim_v);
  if (dim > kDim) return "head_dim is larger";
  for (const std::int64_t bucket : {32, 64, 96, 128})
    if (bucket < kDim && dim <= bucket) return "a smaller head_dim bucket holds it";
  if (f.is_paged()) return "keys and values are in pages";
  if (f.has_score_modifier()) return "softcap, bias and ALiBi are not in this kernel";
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 29;
  if (f.seq_q > kMostTokens || f.seq_k > kMostTokens) return "seq_q or seq_k is over 2^29";
  if (f.batch > 65535 || f.heads_q > 65535) return "batch or heads_q is over 65535";
  if (f.batch * f.heads_q * (std::max(f.seq_q, f.seq_k) / 64 + 1) > 0x7fffffff) return "too many blocks for one grid";
  return Verdict::ok();
}

template <int kDim>
std::size_t attention_bwd_workspace(const AttentionBackwardParams& p) {
  return static_cast<std::size_t>(BackwardWorkspace(p.forward, kDim).bytes);
}

}  // namespace flashkernel::cuda::sm80
