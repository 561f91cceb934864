// Scales of an 8-bit or 4-bit KV-cache: what turns the elements of its pages into numbers.
#pragma once

#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

/// Pages of float8_e4m3fn or int8: number = element * scale. Both views float32 and of one kind: [heads_kv], one scale
/// a kv head, which the caller chooses; or [num_pages, heads_kv, page_size], one a token and head, which `kv_append`
/// writes and which lie beside the pages (`KvPagePool::scales`). Last dim contiguous. Absent: pages hold float32,
/// float16 or bfloat16.
///
/// Pages of int4, head_dim / 2 bytes a row: number = element * scale + zero, element 0 to 15. Both views float16
/// [num_pages, heads_kv, page_size, groups, 2], the last two dims contiguous: scale and zero of each 32 neighbouring
/// elements of a token's head (groups = ceil(head_dim / 32); the last one may be shorter). `kv_append` writes them.
///
/// Pages of float4_e2m1fn_x2 (NVFP4): number = element * scale * tensor scale. Both views float8_e4m3fn [num_pages,
/// heads_kv, page_size, ceil(head_dim / 16)], last dim contiguous: a scale for 16 neighbouring elements. `kv_append`
/// does not write them.
struct KvScales {
  TensorView k, v;
  float k_tensor = 1, v_tensor = 1;  ///< the scales of the whole tensors; pages of float4_e2m1fn_x2 alone
};

}  // namespace flashkernel
