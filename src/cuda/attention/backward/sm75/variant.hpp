// What a row of the table says about an instance of the sm75 backward kernels. kernel.cuh defines the instances,
// which are compiled in instances/.
#pragma once

#include <algorithm>

#include "cuda/attention/limits.hpp"
#include "flashkernel/stream.hpp"
#include "ops/attention_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda::sm75 {

/// The workspace: -D and then -LSE in base 2, [batch, heads_q, pitch] in fp32 each, in whole tiles of queries. (The
/// generic kernel leaves its D, [batch, heads_q, seq_q], in the same place when the sinks want a gradient.)
struct BackwardWorkspace {
  static constexpr std::int64_t kTile = 64;
  std::int64_t tiles, pitch, floats;  // of a head; of a head; of each of the two

  explicit BackwardWorkspace(const AttentionParams& f)
      : tiles((f.seq_q + kTile - 1) / kTile), pitch(tiles * kTile), floats(f.batch * f.heads_q * pitch) {}
};

template <DType kDtype, int kQkDim, int kVDim>
Verdict attention_bwd_supports(const AttentionBackwardParams& p) {
  const AttentionParams& f = p.forward;
  if (f.dtype != kDtype) return "it takes float16 only, as the tensor cores of compute capability 7.5 do";
  if (!HeadDims{kQkDim, kVDim}.hold(f.head_dim, f.head_dim_v)) return kTooSmallHeadDims;
  if (f.is_paged()) return "it takes no paged keys and values";
  if (p.grad_bias) return "it does not compute the gradient of the bias";
  if (f.seq_q > kMostTokens || f.seq_k > kMostTokens) return "seq_q or seq_k is over 2^29";
  if (f.batch * f.heads_q * (std::max(f.seq_q, f.seq_k) / 64 + 1) > 0x7fffffff) return "too many blocks for one grid";
  return Verdict::ok();
}

template <int kQkDim, int kVDim>
std::size_t attention_bwd_workspace(const AttentionBackwardParams& p) {
  return static_cast<std::size_t>(2 * BackwardWorkspace(p.forward).floats * 4);
}

/// Launches the kernel: an entry of the table.
template <DType kDtype, int kQkDim, int kVDim>
void attention_bwd(const AttentionBackwardParams& p, void* workspace, Stream stream);

}  // namespace flashkernel::cuda::sm75
