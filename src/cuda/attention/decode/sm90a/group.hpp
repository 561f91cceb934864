// Whether a call's groups of query heads are served by clusters (group_plan.hpp), and by TMA.
#pragma once

#include "cuda/attention/tensor_maps.hpp"
#include "cuda/attention/decode/sm90a/group_plan.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda::sm90a {

/// What a cluster for each sequence and kv head asks of a call that decode takes in other ways.
inline Verdict check_group(const AttentionParams& p) {
  if (p.heads_kv < 1 || p.heads_q % p.heads_kv != 0 || p.heads_q / p.heads_kv > kGroupRows || p.batch < 1)
    return "it takes 1 to 32 query heads for each kv head";
  if (p.num_pages > 0x7fffffff) return "there are over 2^31 pages";
  if (!fits_tensor_map(kv_map(p, false, kGroupKeys)) || !fits_tensor_map(kv_map(p, true, kGroupKeys)))
    return "its copy engine needs data and rows at multiples of 16 bytes, and positive strides";
  return Verdict::ok();
}

/// Whether such a call runs there.
inline bool takes_group(const AttentionParams& p, std::int64_t num_sms) {
  return is_for_groups(p, num_sms) && check_group(p);
}

}  // namespace flashkernel::cuda::sm90a
