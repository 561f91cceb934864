// What a RoPE kernel gets; both forms (in-kernel sin/cos, tables). Filled by ops/rope.cpp.
#pragma once

#include "ops/params_common.hpp"

namespace flashkernel {

/// The rotation itself; shared with kv_append.
struct RopeSpec {
  double theta = 10000.0;
  const float* inv_freq = nullptr;  // [rotary_dim / 2]; null: from theta
  std::int64_t rotary_dim = 0;
  bool interleaved = false;
  bool inverse = false;
};

struct RopeParams {
  static constexpr const char* kOp = "rope";

  DType dtype = DType::kFloat32;
  Device device{};
  std::int64_t batch = 0, heads_q = 0, heads_kv = 0, seq = 0, head_dim = 0;  // heads_kv 0: k absent
  const void* q = nullptr;                                                   // [batch, heads_q, seq, head_dim]
  const void* k = nullptr;                                                   // [batch, heads_kv, seq, head_dim]
  void* q_out = nullptr;
  void* k_out = nullptr;
  std::int64_t stride_q_batch = 0, stride_q_head = 0, stride_q_token = 0;
  std::int64_t stride_k_batch = 0, stride_k_head = 0, stride_k_token = 0;
  std::int64_t stride_q_out_batch = 0, stride_q_out_head = 0, stride_q_out_token = 0;
  std::int64_t stride_k_out_batch = 0, stride_k_out_head = 0, stride_k_out_token = 0;

  IndexArray positions;  // position of token t of batch b at b * stride_positions_batch + t; absent: t
  std::int64_t stride_positions_batch = 0;
  RopeSpec spec;

  // Table form: row r of cos and sin at r * stride_table_row (+ b * stride_table_batch); null: in-kernel.
  const void* cos = nullptr;
  const void* sin = nullptr;
  DType table_dtype = DType::kFloat32;
  std::int64_t table_rows = 0, stride_table_batch = 0, stride_table_row = 0, stride_sin_batch = 0, stride_sin_row = 0;
  bool table_is_per_token = false;  // true: row t of batch b as it is; false: row positions[t]

  FK_HOST_DEVICE std::int64_t position(std::int64_t b, std::int64_t t) const {
    return positions ? positions[b * stride_positions_batch + t] : t;
  }
};

/// What a call has to do (params_common.hpp).
inline double work_of(const RopeParams& p) {
  return work::product(p.batch * p.seq, (p.heads_q + p.heads_kv) * p.head_dim);
}

}  // namespace flashkernel
