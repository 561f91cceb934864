// What a tensor-core backward kernel of attention leaves to the generic ones, and in which order they run. The rows of
// the table name after_sinks or with_repair, with the kernel as its argument.
#pragma once

#include "cuda/attention/generic.hpp"
#include "cuda/attention/limits.hpp"
#include "flashkernel/stream.hpp"
#include "ops/attention_params.hpp"

namespace flashkernel::cuda {

/// The workspace of an arch's backward kernels: their own, then that of the search for large rows (calls with a bias).
template <std::size_t (*own)(const AttentionBackwardParams&)>
std::size_t with_large_rows(const AttentionBackwardParams& p) {
  return own(p) + large_rows_workspace(p);
}
/// The call for a tensor-core kernel: its LSE marks the large rows that the search has found.
inline AttentionBackwardParams without_large_rows(const AttentionBackwardParams& p, const LargeRows& large) {
  AttentionBackwardParams others = p;
  if (!large.lse) return others;
  AttentionParams& f = others.forward;
  f.lse = const_cast<float*>(large.lse);  // read only: the forward pass's parameters serve both passes
  f.stride_lse_batch = f.heads_q * f.seq_q;
  f.stride_lse_head = f.seq_q;
  f.stride_lse_token = 1;
  return others;
}

/// A backward kernel that leaves the gradients of sinks and bias to the generic one, and all gradients where a large
/// row has some. The kernels use the workspace one after the other. `pitch`: of a head in -D, with which the workspace
/// begins.
template <std::size_t (*own)(const AttentionBackwardParams&), std::int64_t (*pitch)(const AttentionParams&),
          void (*kernel)(const AttentionBackwardParams&, void*, Stream)>
void after_sinks(const AttentionBackwardParams& p, void* workspace, Stream stream) {
  if (p.grad_sinks || p.grad_bias) {
    AttentionBackwardParams rest = p;
    rest.grad_q = rest.grad_k = rest.grad_v = nullptr;
    attention_bwd(rest, workspace, stream);
  }
  if (!p.grad_q && !p.grad_k && !p.grad_v) return;
  const LargeRows large = find_large_rows(p, static_cast<char*>(workspace) + own(p), false, stream);
  kernel(without_large_rows(p, large), workspace, stream);
  if (!large.found) return;
  AttentionBackwardParams again = p;
  again.grad_bias = nullptr;  // it is right already
  attention_bwd_repair(again, static_cast<const float*>(workspace), pitch(p.forward), large.found, large.num_found,
                       large.rest, stream);
}

/// The generic kernel computes the gradient of the sinks, then an arch's kernels compute the others. Where they find a
/// gradient that is not finite, as those of a large row never are, the generic kernels compute all of them again.
/// Workspace: the arch's layout, which begins with -D.
template <class Workspace, int kQkDim, int kVDim, void (*kernel)(const AttentionBackwardParams&, void*, Stream)>
void with_repair(const AttentionBackwardParams& p, void* workspace, Stream stream) {
  if (p.grad_sinks) {
    AttentionBackwardParams rest = p;
    rest.grad_q = rest.grad_k = rest.grad_v = rest.grad_bias = nullptr;
    attention_bwd(rest, workspace, stream);
  }
  if (!p.grad_q && !p.grad_k && !p.grad_v && !p.grad_bias) return;
  char* const bytes = static_cast<char*>(workspace);
  const Workspace layout(p, HeadDims{kQkDim, kVDim});
  const LargeRows large = find_large_rows(p, bytes + layout.bytes, true, stream);
  kernel(without_large_rows(p, large), workspace, stream);
  attention_bwd_repair(p, reinterpret_cast<const float*>(bytes), p.forward.seq_q,
                       reinterpret_cast<const int*>(bytes + layout.not_finite), 1, large.rest, stream);
}

}  // namespace flashkernel::cuda
