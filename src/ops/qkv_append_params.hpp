// What a kernel of qkv_append gets: a fused_linear whose features are heads of
// q, k and v, and where those go. Filled by ops/qkv_append.cpp.
#pragma once

#include "ops/fused_linear_params.hpp"
#include "ops/kv_params.hpp"

namespace flashkernel {

struct QkvAppendParams {
  static constexpr const char* kOp = "qkv_append";

  /// `out` is memory for the product [rows, (heads_q + 2 heads_kv) head_dim]
  /// that kernels may use and nobody reads later.
  FusedLinearParams linear;
  /// k, v and, with RoPE, q are parts of that product; q_out is the call's
  /// result. `places` and quantized pages are not used.
  KvAppendParams append;
  std::int64_t heads_q = 0;
  void* q_out = nullptr;  // [rows, heads_q, head_dim]
  std::int64_t stride_q_out_token = 0, stride_q_out_head = 0;
};

/// What a call has to do (params_common.hpp).
inline double work_of(const QkvAppendParams& p) { return work_of(p.linear); }

/// The rows of both backends that compose the call of other ops
/// (ops/qkv_append_composed.cpp).
Plan plan_composed_qkv_append(const QkvAppendParams&, const DeviceFacts&);
void composed_qkv_append(const QkvAppendParams&, const Plan&, void* workspace, Stream);

}  // namespace flashkernel
