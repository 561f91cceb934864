// What the kernels of attention_fp8 get. Filled by ops/attention_fp8.cpp.
#pragma once

#include "ops/attention_params.hpp"

namespace flashkernel {

/// One scale for all elements, or one for each sequence and kv head: number * data[...].
struct HeadScale {
  float number = 1.0f;
  const float* data = nullptr;  // null: 1
  std::int64_t stride_batch = 0, stride_head = 0;

  FK_HOST_DEVICE float at(std::int64_t b, std::int64_t h_kv) const {
    return data ? number * data[b * stride_batch + h_kv * stride_head] : number;
  }
};

/// The call as attention of 8-bit elements (`attention.dtype` and `dtype_q` are theirs) that does not know the scales;
/// `attention.out` holds `dtype_out`.
struct Float8AttentionParams {
  static constexpr const char* kOp = "attention_fp8";

  AttentionParams attention;
  DType dtype_out = DType::kBFloat16;
  HeadScale q, k, v;

  FK_HOST_DEVICE std::int64_t kv_head(std::int64_t h) const { return h / (attention.heads_q / attention.heads_kv); }
};

/// What a call has to do (params_common.hpp).
inline double work_of(const Float8AttentionParams& p) { return work_of(p.attention); }

/// Where a call's elements lie once they have become numbers of a wider dtype: rows [batch or 1, tokens, heads, pitch],
/// side by side.
struct WidenedOperands {
  DType dtype = DType::kFloat32;
  std::int64_t pitch = 0, pitch_v = 0;  // elements from one head's row to the next
  std::int64_t rows_q = 0, rows_k = 0;  // of all tokens and heads; the values' are rows_k

  WidenedOperands() = default;
  WidenedOperands(const AttentionParams& p, DType as) : dtype(as) {
    const std::int64_t vector = 16 / static_cast<std::int64_t>(dtype_bytes(as));
    pitch = (p.head_dim + vector - 1) / vector * vector;
    pitch_v = (p.head_dim_v + vector - 1) / vector * vector;
    rows_q = (p.is_varlen_q() ? p.total_q : p.batch * p.seq_q) * p.heads_q;
    rows_k = (p.is_varlen_k() ? p.total_k : p.batch * p.seq_k) * p.heads_kv;
  }
  std::size_t q_bytes() const { return bytes(rows_q * pitch); }
  std::size_t k_bytes() const { return bytes(rows_k * pitch); }
  std::size_t v_bytes() const { return bytes(rows_k * pitch_v); }
  std::size_t out_bytes() const { return bytes(rows_q * pitch_v); }

  /// The call over them, which writes `out` as its params say.
  AttentionParams call(AttentionParams p, const void* q, const void* k, const void* v) const {
    p.dtype = p.dtype_q = dtype;
    p.q = q, p.k = k, p.v = v;
    p.stride_q_head = p.stride_k_head = pitch, p.stride_v_head = pitch_v;
    p.stride_q_token = p.heads_q * pitch;
    p.stride_k_token = p.heads_kv * pitch, p.stride_v_token = p.heads_kv * pitch_v;
    p.stride_q_batch = p.seq_q * p.stride_q_token;
    p.stride_k_batch = p.seq_k * p.stride_k_token, p.stride_v_batch = p.seq_k * p.stride_v_token;
    return p;
  }

 private:
  std::size_t bytes(std::int64_t elements) const {
    return (static_cast<std::size_t>(elements) * dtype_bytes(dtype) + 255) / 256 * 256;
  }
};

}  // namespace flashkernel
