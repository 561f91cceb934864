// What a row of the table says about an instance of the Hopper forward kernel for calls with a block mask. sparse.cuh
// has the code, instances/sparse_*.cu the instances.
#pragma once

#include "cuda/attention/forward/sm90a/variant.hpp"

namespace flashkernel::cuda::sm90a {

template <DType kDtype, int kQkDim, int kVDim>
Verdict attention_fwd_sparse_supports(const AttentionParams& p) {
  if (!p.mask.blocks.data) return "it takes calls with a block mask only";
  if (p.softcap > 0.0f || !(p.scale > 0.0f)) return "it takes no softcap, and scales above 0 only";
  AttentionParams rest = p;
  rest.mask = {};
  return attention_fwd_supports<kDtype, kQkDim, kVDim>(rest);
}

/// A number for each tile of 128 queries.
inline std::size_t attention_fwd_sparse_workspace(const AttentionParams& p) {
  return static_cast<std::size_t>(p.batch * p.heads_q * ((p.seq_q + 127) / 128)) * sizeof(int);
}

/// Launches the kernel: an entry of the table.
template <DType kDtype, int kQkDim, int kVDim>
void attention_fwd_sparse(const AttentionParams& p, void* workspace, Stream stream);

}  // namespace flashkernel::cuda::sm90a
