// Attention over pages of 8-bit or 4-bit elements by kernels for others: keys and values are widened to the dtype of
// the queries, some sequences at a time, and a kernel for pages of that dtype runs over them. Here: how many at a time,
// where they lie in the workspace, and what that kernel is called with. For cuda/attention/widened (many queries) and
// cpu/widened.cpp; tests_cpp/widened_plan_test.cpp.
#pragma once

#include <algorithm>
#include <cstddef>

#include "ops/attention_params.hpp"

namespace flashkernel {

/// Tokens of a page of the workspace: a multiple of what every kernel's tiles and copy engine ask for.
inline constexpr std::int64_t kWidenedPage = 256;
/// Bytes of the workspace that are filled with whole sequences; a longer sequence gets what it needs, by itself.
inline constexpr std::size_t kWidenedBytes = std::size_t{256} << 20;
/// A sequence that needs more is left to the kernels that read 8-bit elements themselves.
inline constexpr std::size_t kMostWidenedBytes = std::size_t{8} << 30;

struct WidenedPlan {
  std::int64_t sequences = 0;       // at a time
  std::int64_t pages = 0;           // of kWidenedPage tokens, of each
  std::int64_t dim = 0, dim_v = 0;  // head dims as they lie in the workspace: rows of whole 16 bytes
  DType dtype = DType::kFloat16;

  std::size_t k_bytes(std::int64_t heads_kv) const { return bytes(heads_kv, dim); }
  std::size_t v_bytes(std::int64_t heads_kv) const { return bytes(heads_kv, dim_v); }
  std::size_t table_bytes() const { return whole_lines(static_cast<std::size_t>(sequences * pages) * 4); }
  std::size_t lengths_bytes() const { return whole_lines(static_cast<std::size_t>(sequences) * 8); }
  std::size_t workspace_bytes(std::int64_t heads_kv) const {
    return k_bytes(heads_kv) + v_bytes(heads_kv) + table_bytes() + lengths_bytes();
  }

 private:
  static std::size_t whole_lines(std::size_t bytes) { return (bytes + 255) / 256 * 256; }
  std::size_t bytes(std::int64_t heads_kv, std::int64_t columns) const {
    return static_cast<std::size_t>(sequences * pages * kWidenedPage * heads_kv * columns) * dtype_bytes(dtype);
  }
};

inline WidenedPlan plan_widened(const AttentionParams& p) {
  WidenedPlan plan;
  plan.dtype = p.dtype_q;
  const std::int64_t vector = 16 / static_cast<std::int64_t>(dtype_bytes(p.dtype_q));
  plan.dim = (p.head_dim + vector - 1) / vector * vector;
  plan.dim_v = (p.head_dim_v + vector - 1) / vector * vector;
  plan.pages = std::max<std::int64_t>(1, (p.seq_k + kWidenedPage - 1) / kWidenedPage);
  plan.sequences = 1;
  const std::size_t each = plan.k_bytes(p.heads_kv) + plan.v_bytes(p.heads_kv);
  const auto fit = static_cast<std::int64_t>(kWidenedBytes / std::max<std::size_t>(each, 1));
  plan.sequences = std::clamp<std::int64_t>(fit, 1, std::max<std::int64_t>(p.batch, 1));
  return plan;
}

/// Where the plan's parts lie from `workspace` on.
struct WidenedPages {
  void *k, *v;
  std::int32_t* table;
  std::int64_t* lengths;

  WidenedPages(const WidenedPlan& plan, std::int64_t heads_kv, void* workspace) {
    auto* at = static_cast<unsigned char*>(workspace);
    k = at;
    v = at += plan.k_bytes(heads_kv);
    table = reinterpret_cast<std::int32_t*>(at += plan.v_bytes(heads_kv));
    lengths = reinterpret_cast<std::int64_t*>(at + plan.table_bytes());
  }
};

inline const void* moved(const void* data, std::int64_t bytes) {
  return data ? static_cast<const unsigned char*>(data) + bytes : nullptr;
}
inline void* moved(void* data, std::int64_t bytes) {
  return data ? static_cast<unsigned char*>(data) + bytes : nullptr;
}

/// The call of sequences [first, first + count) alone.
inline AttentionParams sequences_of(AttentionParams p, std::int64_t first, std::int64_t count) {
  const auto skip = [&](IndexArray& array) { array.data = moved(array.data, first * (array.is_int64 ? 8 : 4)); };
  const auto element = static_cast<std::int64_t>(dtype_bytes(p.dtype_q));
  if (!p.is_varlen_q()) {
    p.q = moved(p.q, first * p.stride_q_batch * element);
    p.out = moved(p.out, first * p.stride_out_batch * element);
    if (p.lse) p.lse += first * p.stride_lse_batch;
  }
  for (IndexArray* array : {&p.cu_seqlens_q, &p.seq_lens, &p.k_starts, &p.seqused_q, &p.seqused_k}) skip(*array);
  p.block_table += first * p.stride_block_table;
  p.bias.data = moved(p.bias.data, first * p.bias.stride_batch * static_cast<std::int64_t>(dtype_bytes(p.bias.dtype)));
  if (p.mask.data) p.mask.data += first * p.mask.stride_batch;
  if (p.alibi_slopes) p.alibi_slopes += first * p.stride_alibi_batch;
  p.batch = count;
  return p;
}

/// That call over the widened pages: what the kernel for 16-bit (or fp32) pages gets.
inline AttentionParams over_widened(const AttentionParams& call, const WidenedPlan& plan, const WidenedPages& pages) {
  AttentionParams p = call;
  p.dtype = p.dtype_q;
  p.quantization = {};
  p.k = pages.k, p.v = pages.v;
  p.stride_k_head = plan.dim, p.stride_v_head = plan.dim_v;
  p.stride_k_token = p.heads_kv * plan.dim, p.stride_v_token = p.heads_kv * plan.dim_v;
  p.stride_k_batch = kWidenedPage * p.stride_k_token, p.stride_v_batch = kWidenedPage * p.stride_v_token;
  p.block_table = pages.table;
  p.stride_block_table = p.max_pages = plan.pages;
  p.num_pages = plan.sequences * plan.pages;
  p.page_size = kWidenedPage;
  p.seq_k = plan.pages * kWidenedPage;
  p.seq_lens = {pages.lengths, true};
  return p;
}

/// Writes the table and the lengths of `call` over widened pages in host memory: the pages of each sequence in turn.
inline void list_pages(const AttentionParams& call, const WidenedPlan& plan, const WidenedPages& pages) {
  for (std::int64_t b = 0; b < call.batch; ++b) {
    for (std::int64_t i = 0; i < plan.pages; ++i)
      pages.table[b * plan.pages + i] = static_cast<std::int32_t>(b * plan.pages + i);
    pages.lengths[b] = call.k_length(b);
  }
}

}  // namespace flashkernel
