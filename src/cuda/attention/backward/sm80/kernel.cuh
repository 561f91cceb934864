// Launches the sm80 backward pass: prepare_kernel, attention_bwd_kernel, grad_q_kernel, and grad_bias_kernel where that
// gradient is wanted. instances/ has the files that instantiate it. The generic kernel computes the gradient of the
// sinks, and all gradients again when plan.not_finite says so; steps.hpp puts the kernels together.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/attention/backward/sm80/bias.cuh"
#include "cuda/attention/backward/sm80/grad_q.cuh"
#include "cuda/attention/backward/sm80/main.cuh"
#include "cuda/attention/backward/sm80/shape.cuh"
#include "cuda/attention/backward/sm80/prepare.cuh"

namespace flashkernel::cuda::sm80 {

template <class T, int kQkDim, int kVDim, BackwardKind kKind>
void launch_attention_bwd(const AttentionBackwardParams& p, void* workspace, cudaStream_t s) {
  using Shape = BackwardShape<kQkDim, kVDim, kKind>;
  const AttentionParams& f = p.forward;
  const BackwardWorkspace layout(p, HeadDims{kQkDim, kVDim});
  char* const bytes = static_cast<char*>(workspace);
  const auto fits = [](const void* data, std::int64_t a, std::int64_t b, std::int64_t c) {
    return is_aligned(data, 16) && a % 8 == 0 && b % 8 == 0 && c % 8 == 0;
  };
  BackwardPlan plan;
  plan.k_tiles = static_cast<int>(ceil_div(f.seq_k, Shape::kBlockN));
  plan.q_tiles = static_cast<int>(layout.tiles);
  const std::int64_t heads = f.batch * f.heads_kv;
  const int num_sms = cuda_device_properties(f.device.index).num_sms;
  // Where every tile sees every other and they are few, two tiles of keys of a head side by side: they read the same
  // queries. (Under a causal mask the second would wait for the first.)
  const bool pairs = Shape::kWidest <= 128 && plan.k_tiles <= 16 && f.window_left < 0 && f.window_right < 0;
  const std::int64_t at_once = std::max<std::int64_t>(1, std::min<std::int64_t>(heads, pairs ? num_sms / 2 : num_sms));
  const std::int64_t groups = ceil_div(heads, at_once);
  plan.groups = static_cast<unsigned>(groups);
  plan.at_once = Divisor(at_once);
  plan.last_at_once = Divisor(std::max<std::int64_t>(1, heads - (groups - 1) * at_once));
  plan.group_blocks = Divisor(std::max<std::int64_t>(1, at_once * plan.k_tiles));
  plan.chunk = Divisor(num_sms / at_once);
  plan.heads_kv = Divisor(std::max<std::int64_t>(1, f.heads_kv));
  plan.group = static_cast<int>(f.heads_q / std::max<std::int64_t>(1, f.heads_kv));
  plan.ordered = p.deterministic || plan.k_tiles <= Shape::kOrderedTiles;
  plan.vectors_q = fits(f.q, f.is_varlen_q() ? 0 : f.stride_q_batch, f.stride_q_head, f.stride_q_token);
  plan.vectors_k = fits(f.k, f.is_varlen_k() ? 0 : f.stride_k_batch, f.stride_k_head, f.stride_k_token);
  plan.vectors_v = fits(f.v, f.is_varlen_k() ? 0 : f.stride_v_batch, f.stride_v_head, f.stride_v_token);
  plan.vectors_out = fits(f.out, f.is_varlen_q() ? 0 : f.stride_out_batch, f.stride_out_head, f.stride_out_token);
  plan.vectors_grad_out =
      fits(p.grad_out, f.is_varlen_q() ? 0 : p.stride_grad_out_batch, p.stride_grad_out_head, p.stride_grad_out_token);
  plan.vectors_grad_q =
      fits(p.grad_q, f.is_varlen_q() ? 0 : p.stride_grad_q_batch, p.stride_grad_q_head, p.stride_grad_q_token);
  plan.vectors_grad_k =
      fits(p.grad_k, f.is_varlen_k() ? 0 : p.stride_grad_k_batch, p.stride_grad_k_head, p.stride_grad_k_token);
  plan.vectors_grad_v =
      fits(p.grad_v, f.is_varlen_k() ? 0 : p.stride_grad_v_batch, p.stride_grad_v_head, p.stride_grad_v_token);
  plan.scale_log2 = f.scale * 1.4426950408889634f;
  plan.delta = reinterpret_cast<float*>(bytes);
  plan.lse = reinterpret_cast<float*>(bytes + layout.lse);
  plan.sums = reinterpret_cast<float*>(bytes + layout.sums);
  plan.counters = reinterpret_cast<int*>(bytes + layout.counters);
  plan.ticket = reinterpret_cast<int*>(bytes + layout.ticket);
  plan.not_finite = reinterpret_cast<int*>(bytes + layout.not_finite);

  const auto q_blocks = static_cast<unsigned>(f.batch * f.heads_q * plan.q_tiles);
  if (q_blocks == 0) {
    // No queries: nothing but zeros for the keys, and the ticket and flag that prepare_kernel would have reset.
    cuda_check(cudaMemsetAsync(plan.ticket, 0, 2 * sizeof(int), s), "attention_bwd sm80: ticket");
  } else {
    launch("attention_bwd sm80: prepare", prepare_kernel<T, kQkDim, kVDim>, {q_blocks, 256, 0, s}, p, plan,
           Shape::kBlockM);
  }
  if (heads * plan.k_tiles > 0 && (p.grad_q || p.grad_k || p.grad_v)) {
    launch("attention_bwd sm80", attention_bwd_kernel<T, kQkDim, kVDim, kKind>,
           {static_cast<unsigned>(heads * plan.k_tiles), Shape::kThreads, Shape::kSharedBytes, s}, p, plan);
  }
  if (p.grad_q && q_blocks > 0) {
    // Modified and narrow tiles of queries are the same, and so is all that follows from them.
    static_assert(backward_block_m(Shape::kWidest, BackwardKind::kModified) ==
                  backward_block_m(Shape::kWidest, BackwardKind::kNarrow));
    constexpr BackwardKind kTiles = kKind == BackwardKind::kModified ? BackwardKind::kNarrow : kKind;
    launch("attention_bwd sm80: grad_q", grad_q_kernel<T, kQkDim, kVDim, kTiles>, {q_blocks, 256, 0, s}, p, plan);
  }
  if constexpr (Shape::kModified) {
    const BiasWalk walk(p);
    if (p.grad_bias && walk.elements > 0) {
      float* const parts = reinterpret_cast<float*>(bytes + layout.bias_parts);
      launch("attention_bwd sm80: grad_bias", grad_bias_kernel<T, kQkDim, kVDim>,
             {static_cast<unsigned>(walk.blocks()), BiasShape<kQkDim, kVDim>::kThreads,
              BiasShape<kQkDim, kVDim>::kSharedBytes, s},
             p, plan, walk, parts);
      if (walk.parts > 1) {
        launch("attention_bwd sm80: grad_bias parts", sum_bias_parts_kernel,
               {static_cast<unsigned>(ceil_div(walk.elements, 256)), 256, 0, s}, p, walk, parts);
      }
    }
  }
}

/// An entry of the table.
template <DType kDtype, int kQkDim, int kVDim>
void attention_bwd(const AttentionBackwardParams& p, void* workspace, Stream stream) {
  using T = Element<kDtype>;
  const CudaDeviceGuard guard(p.forward.device.index);
  switch (backward_kind(p.forward)) {
    case BackwardKind::kWide:
      return launch_attention_bwd<T, kQkDim, kVDim, BackwardKind::kWide>(p, workspace, native(stream));
    case BackwardKind::kNarrow:
      return launch_attention_bwd<T, kQkDim, kVDim, BackwardKind::kNarrow>(p, workspace, native(stream));
    case BackwardKind::kModified:
      return launch_attention_bwd<T, kQkDim, kVDim, BackwardKind::kModified>(p, workspace, native(stream));
  }
}

}  // namespace flashkernel::cuda::sm80
