// What a launch of the sm80 forward kernels works out once: the order of blocks, and how rows are aligned. Used by
// kernel.cuh and wide.cuh.
#pragma once

#include <algorithm>

#include "cuda/attention/lane_biases.cuh"
#include "cuda/host/ceil_div.hpp"
#include "cuda/host/device.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/divisor.cuh"
#include "ops/attention_params.hpp"

namespace flashkernel::cuda::sm80 {

struct ForwardPlan {
  int q_tiles;  // of the longest sequence
  // Heads of a group, whose blocks alternate, and of the last group; blocks of a group; query heads; query heads of a
  // kv head.
  Divisor at_once, last_at_once, group_blocks, heads_q, group;
  unsigned groups;
  bool page_holds_tiles;                              // pages are whole tiles of keys
  bool vectors_q, vectors_k, vectors_v, vectors_out;  // rows start at multiples of 16 bytes
  BiasReads biases;
};

/// For tiles of block_m queries and block_n keys.
inline ForwardPlan forward_plan(const AttentionParams& p, int block_m, int block_n) {
  const auto fits = [](const void* data, std::int64_t a, std::int64_t b, std::int64_t c) {
    return is_aligned(data, 16) && a % 8 == 0 && b % 8 == 0 && c % 8 == 0;
  };
  ForwardPlan plan;
  plan.q_tiles = static_cast<int>(ceil_div(p.seq_q, block_m));
  plan.biases = BiasReads(p);
  plan.page_holds_tiles = p.is_paged() && p.page_size % block_n == 0;
  plan.vectors_q = fits(p.q, p.is_varlen_q() ? 0 : p.stride_q_batch, p.stride_q_head, p.stride_q_token);
  plan.vectors_k = fits(p.k, p.is_varlen_k() ? 0 : p.stride_k_batch, p.stride_k_head, p.stride_k_token);
  plan.vectors_v = fits(p.v, p.is_varlen_k() ? 0 : p.stride_v_batch, p.stride_v_head, p.stride_v_token);
  plan.vectors_out = fits(p.out, p.is_varlen_q() ? 0 : p.stride_out_batch, p.stride_out_head, p.stride_out_token);
  // Half of the L2 cache for K and V of the heads under way. Under a causal mask the heavy tiles of more heads first,
  // or those of the last group are still under way when all else is done; with 32 MB of L2 or more that costs nothing.
  const std::int64_t group = p.heads_q / p.heads_kv, heads = p.batch * p.heads_q;
  const std::int64_t bytes_per_head = std::max<std::int64_t>(1, (p.head_dim + p.head_dim_v) * 2 * p.seq_k / group);
  const auto& device = cuda_device_properties(p.device.index);
  std::int64_t at_once = std::max<std::int64_t>(1, std::min(heads, device.l2_bytes / 2 / bytes_per_head));
  const bool causal = p.window_left < 0 && p.window_right >= 0;
  if (causal && device.l2_bytes >= std::int64_t{32} << 20)
    at_once = std::max<std::int64_t>(1, std::min<std::int64_t>(heads, device.num_sms));
  at_once = ceil_div(heads, ceil_div(heads, at_once));  // groups alike in size
  const std::int64_t groups = ceil_div(heads, at_once);
  plan.groups = static_cast<unsigned>(groups);
  plan.at_once = Divisor(at_once);
  plan.last_at_once = Divisor(heads - (groups - 1) * at_once);
  plan.group_blocks = Divisor(at_once * plan.q_tiles);
  plan.heads_q = Divisor(p.heads_q);
  plan.group = Divisor(group);
  return plan;
}

}  // namespace flashkernel::cuda::sm80
