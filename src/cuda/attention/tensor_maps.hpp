// The tensor maps of the arrays of attention, for GPUs with a copy engine (9.0 and later). Forward, backward and decode
// use them in `supports`, which asks whether they fit, and in launches.
#pragma once

#include "cuda/pipeline/tensor_map.hpp"
#include "ops/attention_params.hpp"

namespace flashkernel::cuda {

/// [batch, heads, tokens, head_dim] in boxes of `rows` tokens by 64 columns (one line of the 128-byte swizzle).
/// Variable-length: one batch of all rows. Pages: `tokens` is the page size and `batch` their number.
inline TensorMapSpec rows_map(const void* data, DType dtype, std::int64_t head_dim, std::int64_t tokens,
                              std::int64_t heads, std::int64_t batch, std::int64_t stride_token,
                              std::int64_t stride_head, std::int64_t stride_batch, std::uint32_t rows) {
  return {data,
          dtype,
          4,
          {{head_dim, 1, 64}, {tokens, stride_token, rows}, {heads, stride_head, 1}, {batch, stride_batch, 1}},
          128};
}

inline TensorMapSpec q_map(const AttentionParams& p, std::uint32_t rows) {
  return rows_map(p.q, p.dtype, p.head_dim, p.is_varlen_q() ? p.total_q : p.seq_q, p.heads_q,
                  p.is_varlen_q() ? 1 : p.batch, p.stride_q_token, p.stride_q_head, p.stride_q_batch, rows);
}
inline TensorMapSpec out_map(const AttentionParams& p, std::uint32_t rows) {
  return rows_map(p.out, p.dtype, p.head_dim_v, p.is_varlen_q() ? p.total_q : p.seq_q, p.heads_q,
                  p.is_varlen_q() ? 1 : p.batch, p.stride_out_token, p.stride_out_head, p.stride_out_batch, rows);
}
inline TensorMapSpec kv_map(const AttentionParams& p, bool of_v, std::uint32_t rows) {
  const std::int64_t tokens = p.is_paged() ? p.page_size : p.is_varlen_k() ? p.total_k : p.seq_k;
  const std::int64_t batch = p.is_paged() ? p.num_pages : p.is_varlen_k() ? 1 : p.batch;
  return of_v ? rows_map(p.v, p.dtype, p.head_dim_v, tokens, p.heads_kv, batch, p.stride_v_token, p.stride_v_head,
                         p.stride_v_batch, rows)
              : rows_map(p.k, p.dtype, p.head_dim, tokens, p.heads_kv, batch, p.stride_k_token, p.stride_k_head,
                         p.stride_k_batch, rows);
}

}  // namespace flashkernel::cuda
