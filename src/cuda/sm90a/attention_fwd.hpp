// What a row of the table says about an instance of the Hopper forward kernel, and the tensor maps that both the answer
// and the launch are made of. Instances are generated (cmake/FlashkernelCudaInstances.cmake) from attention_fwd.cuh.
#pragma once

#include "cuda/host/tensor_map.hpp"
#include "flashkernel/stream.hpp"
#include "ops/attention_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda::sm90a {

using attention_fwd_params = AttentionParams;  // what the generated instances call it

/// Of a sequence: lengths have 32 bits in the kernel, with room for a window. No window is one of so many.
inline constexpr std::int64_t kMostTokens = std::int64_t{1} << 29;

/// Buckets of head_dim, each filled with zeros up to its size: the smallest one that holds both head dims serves.
inline constexpr std::int64_t kHeadDims[] = {64, 96, 128, 192, 256};

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

template <DType kDtype, int kDim>
Verdict attention_fwd_supports(const AttentionParams& p) {
  if (p.dtype != kDtype) return "it is built for another dtype";
  const std::int64_t dim = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  if (dim > kDim) return "head_dim is larger than what it is built for";
  for (const std::int64_t bucket : kHeadDims)
    if (bucket < kDim && dim <= bucket) return "a kernel with a smaller head_dim serves the call";
  if (p.bias.data) return "it takes no additive bias";
  if (p.alibi_slopes) return "it takes no ALiBi slopes";
  // Coordinates and the number of tiles have 32 bits.
  if (p.seq_q > kMostTokens || p.seq_k > kMostTokens) return "seq_q or seq_k is over 2^29";
  if (p.total_q > 0x7fffffff || p.total_k > 0x7fffffff || p.num_pages > 0x7fffffff)
    return "there are over 2^31 rows or pages";
  if (p.batch * p.heads_q * (p.seq_q / 64 + 1) > 0x7fffffff) return "too many tiles for 32 bits";
  if (p.is_paged() && p.page_size % 8 != 0) return "page_size must be a multiple of 8";
  if (!fits_tensor_map(q_map(p, 64)) || !fits_tensor_map(out_map(p, 64)) || !fits_tensor_map(kv_map(p, false, 8)) ||
      !fits_tensor_map(kv_map(p, true, 8)))
    return "its copy engine needs data and rows at multiples of 16 bytes, and positive strides";
  return Verdict::ok();
}

}  // namespace flashkernel::cuda::sm90a
