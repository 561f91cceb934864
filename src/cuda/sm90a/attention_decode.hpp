// One query a sequence over a cache, at few microseconds: what a row of the table says about an instance
// (cmake/FlashkernelCudaInstances.cmake makes them from attention_decode.cuh), and how a call is spread over the
// device. Invariant: the spread depends on shapes only, never on lengths, so that a captured graph replays with other
// lengths.
#pragma once

#include "cuda/host/device.hpp"
#include "flashkernel/stream.hpp"
#include "ops/attention_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda::sm90a {

using attention_decode_params = AttentionParams;  // what the generated instances call it

inline constexpr int kGranule = 16;           // keys that a warp takes at a time; they lie in one page
inline constexpr int kMostRows = 8;           // query heads a kv head: the columns of one matrix instruction
inline constexpr int kMostDecodeBlocks = 16;  // of a cluster, the most that 9.0 has
inline constexpr int kMostSequences = 32;     // a lane each

/// How a call is spread over the device: a cluster a kv head.
struct ClusterPlan {
  int blocks = 1, log2_blocks = 0;  // of a cluster
  int rows = 0;                     // query heads of a kv head
  int log2_granules_of_page = 0;
};

inline ClusterPlan plan_cluster(const AttentionParams& p) {
  ClusterPlan plan;
  const int num_sms = cuda_device_properties(p.device.index).num_sms;
  while (2 * plan.blocks <= kMostDecodeBlocks && p.heads_kv * 2 * plan.blocks <= num_sms)
    plan.blocks *= 2, ++plan.log2_blocks;
  plan.rows = static_cast<int>(p.heads_q / p.heads_kv);
  while (p.is_paged() && (std::int64_t{kGranule} << plan.log2_granules_of_page) < p.page_size)
    ++plan.log2_granules_of_page;
  return plan;
}

template <DType kDtype, int kDim>
Verdict attention_decode_supports(const AttentionParams& p) {
  if (p.dtype != kDtype) return "another dtype";
  if (p.head_dim != kDim || p.head_dim_v != kDim) return "another head_dim";
  if (p.seq_q != 1 || p.is_varlen_q()) return "for one query a sequence";
  if (p.is_varlen_k()) return "for dense or paged keys";
  if (p.heads_q / p.heads_kv > kMostRows) return "more than 8 query heads a kv head";
  if (p.heads_kv > 64) return "more than 64 kv heads";
  if (p.batch > kMostSequences) return "more than 32 sequences";
  if (p.has_score_modifier() || p.window_left >= 0) return "no bias, ALiBi, softcap or window";
  if (p.is_paged() && (p.page_size % kGranule != 0 || (p.page_size & (p.page_size - 1)) != 0))
    return "page_size is not a power of two from 16 on";
  const auto rows_of = [](std::uintptr_t bytes, const void* data, std::int64_t a, std::int64_t b, std::int64_t c) {
    const auto elements = static_cast<std::int64_t>(bytes / 2);
    return reinterpret_cast<std::uintptr_t>(data) % bytes == 0 && a % elements == 0 && b % elements == 0 &&
           c % elements == 0;
  };
  if (!rows_of(16, p.k, p.stride_k_batch, p.stride_k_head, p.stride_k_token) ||
      !rows_of(16, p.v, p.stride_v_batch, p.stride_v_head, p.stride_v_token) ||
      !rows_of(4, p.q, p.stride_q_batch, p.stride_q_head, 0) ||
      !rows_of(8, p.out, p.stride_out_batch, p.stride_out_head, 0))
    return "rows of k or v, q or out do not start at multiples of 16, 4 and 8 bytes";
  if (p.seq_k > std::int64_t{1} << 29 || p.batch * (p.seq_k / kGranule + 1) >= std::int64_t{1} << 30)
    return "too many keys";  // granules are counted in 32 bits
  return Verdict::ok();
}

}  // namespace flashkernel::cuda::sm90a
