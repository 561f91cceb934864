// Scales of an 8-bit KV-cache: what turns the elements of its pages (float8_e4m3fn or int8) into numbers.
#pragma once

#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

/// number = element * scale. Both views float32 and of one kind: [heads_kv], one scale a kv head, which the caller
/// chooses; or [num_pages, heads_kv, page_size], one a token and head, which `kv_append` writes and which lie beside
/// the pages (`KvPagePool::scales`). Last dim contiguous. Absent: pages hold float32, float16 or bfloat16.
struct KvScales {
  TensorView k, v;
};

}  // namespace flashkernel
