// Whether a call's groups of query heads are served by clusters (group_plan.hpp), and by TMA.
#pragma once

#include "cuda/host/device.hpp"
#include "cuda/attention/tensor_maps.hpp"
#include "cuda/attention/decode/sm90a/group_plan.hpp"

namespace flashkernel::cuda::sm90a {

/// Of a call that the row accepts otherwise.
inline bool takes_group(const AttentionParams& p) {
  return is_for_groups(p, cuda_device_properties(p.device.index).num_sms) && p.num_pages <= 0x7fffffff &&
         fits_tensor_map(kv_map(p, false, kGroupKeys)) && fits_tensor_map(kv_map(p, true, kGroupKeys));
}

}  // namespace flashkernel::cuda::sm90a
