// What a row of the table says about the Hopper forward kernel for e4m3 queries, keys and values. float8_plan.hpp tells
// how its values lie, float8.cuh has what differs from 16 bits, instances/float8_*.cu are the instances.
#pragma once

#include "cuda/attention/forward/sm90a/float8_plan.hpp"
#include "cuda/attention/forward/sm90a/variant.hpp"
#include "ops/attention_fp8_params.hpp"

namespace flashkernel::cuda::sm90a {

/// [batch, heads, tokens, head_dim] in boxes of `rows` tokens by a line of 128 columns.
inline TensorMapSpec float8_rows_map(const void* data, std::int64_t head_dim, std::int64_t tokens, std::int64_t heads,
                                     std::int64_t batch, std::int64_t stride_token, std::int64_t stride_head,
                                     std::int64_t stride_batch, std::uint32_t rows) {
  return {data,
          DType::kFloat8E4M3,
          4,
          {{head_dim, 1, 128}, {tokens, stride_token, rows}, {heads, stride_head, 1}, {batch, stride_batch, 1}},
          128};
}
inline TensorMapSpec float8_q_map(const AttentionParams& p, std::uint32_t rows) {
  return float8_rows_map(p.q, p.head_dim, p.is_varlen_q() ? p.total_q : p.seq_q, p.heads_q,
                         p.is_varlen_q() ? 1 : p.batch, p.stride_q_token, p.stride_q_head, p.stride_q_batch, rows);
}
inline TensorMapSpec float8_k_map(const AttentionParams& p, std::uint32_t rows) {
  return float8_rows_map(p.k, p.head_dim, p.is_varlen_k() ? p.total_k : p.seq_k, p.heads_kv,
                         p.is_varlen_k() ? 1 : p.batch, p.stride_k_token, p.stride_k_head, p.stride_k_batch, rows);
}
/// In boxes of a line of keys by `columns` columns of V.
inline TensorMapSpec transposed_map(const AttentionParams& p, const TransposedValues& values, const void* data,
                                    std::uint32_t line, std::uint32_t columns) {
  return {data,
          DType::kFloat8E4M3,
          4,
          {{values.keys, 1, line},
           {p.head_dim_v, values.keys, columns},
           {p.heads_kv, p.head_dim_v * values.keys, 1},
           {values.batch, p.heads_kv * p.head_dim_v * values.keys, 1}},
          static_cast<int>(line)};
}
inline TensorMapSpec float8_out_map(const Float8AttentionParams& p) {
  AttentionParams of_out = p.attention;
  of_out.dtype = p.dtype_out;
  return out_map(of_out, 64);
}

template <DType kOut, int kDim>
Verdict attention_fp8_supports(const Float8AttentionParams& call) {
  const AttentionParams& p = call.attention;
  if (call.dtype_out != kOut) return "it is built for another dtype of the output";
  if (!HeadDims{kDim, kDim}.hold(p.head_dim, p.head_dim_v)) return kTooSmallHeadDims;
  if (p.softcap > 0) return "it takes no softcap";
  if (p.alibi_slopes) return "it takes no ALiBi slopes";
  if (p.seq_k == 0) return "there are no keys";
  if (p.seq_q > kMostTokens || p.seq_k > kMostTokens) return "seq_q or seq_k is over 2^29";
  if (p.total_q > 0x7fffffff || p.total_k > kMostTokens) return "there are over 2^31 rows";
  if (p.batch * p.heads_q * (p.seq_q / 64 + 1) > 0x7fffffff) return "too many tiles for 32 bits";
  if (p.batch > 0xffff || p.heads_kv > 0xffff) return "batch or heads_kv is over 65535";
  if (!fits_tensor_map(float8_q_map(p, 64)) || !fits_tensor_map(float8_k_map(p, 64)) ||
      !fits_tensor_map(float8_out_map(call)))
    return "its copy engine needs data and rows at multiples of 16 bytes, and positive strides";
  return Verdict::ok();
}

template <int kDim>
std::size_t attention_fp8_workspace(const Float8AttentionParams& p);

/// Launches both kernels: an entry of the table.
template <DType kOut, int kDim>
void attention_fp8(const Float8AttentionParams& p, void* workspace, Stream stream);

}  // namespace flashkernel::cuda::sm90a
