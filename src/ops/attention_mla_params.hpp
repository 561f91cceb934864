// What the kernels of attention_mla_decode get. Filled by ops/attention_mla.cpp.
#pragma once

#include "ops/attention_params.hpp"

namespace flashkernel {

/// The call as paged attention of one kv head whose values are the first head_dim_v columns of its keys: k and v point
/// to the same rows, with the same strides. There are no modifiers, no window and no variable lengths of queries.
struct MlaDecodeParams {
  static constexpr const char* kOp = "attention_mla_decode";

  AttentionParams attention;
};

/// What a call has to do (params_common.hpp).
inline double work_of(const MlaDecodeParams& p) { return work_of(p.attention); }

}  // namespace flashkernel
