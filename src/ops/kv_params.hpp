// What the kernels that move keys and values get. Filled by ops/kv_ops.cpp.
#pragma once

#include "ops/rope_params.hpp"

namespace flashkernel {

/// Pages [num_pages, page_size, heads_kv, head_dim]; the last dim is contiguous.
struct KvPages {
  DType dtype = DType::kFloat32;  // the op's, or float8_e4m3fn or int8 with `quantization`
  KvQuantization quantization;
  void* k = nullptr;
  void* v = nullptr;
  std::int64_t num_pages = 0, page_size = 0, heads_kv = 0, head_dim = 0, head_dim_v = 0;
  std::int64_t stride_k_page = 0, stride_k_slot = 0, stride_k_head = 0;
  std::int64_t stride_v_page = 0, stride_v_slot = 0, stride_v_head = 0;
};

/// Cosines and sines [rows, rotary_dim / 2], looked up by position.
struct RopeTable {
  const void* cos = nullptr;
  const void* sin = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t rows = 0, stride_cos = 0, stride_sin = 0;
  FK_HOST_DEVICE explicit operator bool() const { return cos != nullptr; }
};

/// Tokens in the order of their sequences, `tokens_each` of each or by cu_seqlens. They go behind those that are there.
/// For kernels on a GPU: on the host the front door works out slots and positions.
struct KvPlaces {
  const std::int32_t* block_table = nullptr;  // [batch, max_pages]; null: a token's slot is in `slots`
  std::int64_t stride_block_table = 0, max_pages = 0, batch = 0, tokens_each = 0;
  IndexArray seq_lens;                     // [batch] tokens that are there
  IndexArray cu_seqlens;                   // [batch + 1], or absent
  IndexArray positions;                    // [batch] of each sequence's first token; absent: seq_lens
  std::int32_t* seq_lens_after = nullptr;  // [batch] written, or null
  FK_HOST_DEVICE explicit operator bool() const { return block_table != nullptr; }

  FK_HOST_DEVICE std::int64_t begin(std::int64_t b) const { return cu_seqlens ? cu_seqlens[b] : b * tokens_each; }
  /// The last sequence that begins at or before the token: of those, all but the last are empty.
  FK_HOST_DEVICE std::int64_t sequence_of(std::int64_t token) const {
    if (!cu_seqlens) return token / tokens_each;
    std::int64_t low = 0, high = batch;
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      (cu_seqlens[middle] <= token ? low : high) = middle;
    }
    return low;
  }
  /// -1 for a token that does not fit into the table, and for a page id below 0.
  FK_HOST_DEVICE std::int64_t slot(std::int64_t token, std::int64_t page_size) const {
    const std::int64_t b = sequence_of(token), at = seq_lens[b] + token - begin(b), block = at / page_size;
    if (at < 0 || block >= max_pages) return -1;
    const std::int64_t page = block_table[b * stride_block_table + block];
    return page < 0 ? -1 : page * page_size + at - block * page_size;
  }
  FK_HOST_DEVICE std::int64_t position(std::int64_t token) const {
    const std::int64_t b = sequence_of(token);
    return (positions ? positions : seq_lens)[b] + token - begin(b);
  }
};

struct KvAppendParams {
  static constexpr const char* kOp = "kv_append";

  DType dtype = DType::kFloat32;
  Device device{};
  std::int64_t tokens = 0;
  const void* k = nullptr;  // [tokens, heads_kv, head_dim]
  const void* v = nullptr;  // [tokens, heads_kv, head_dim_v]
  std::int64_t stride_k_token = 0, stride_k_head = 0, stride_v_token = 0, stride_v_head = 0;
  KvPages pages;
  IndexArray slots;  // [tokens]; negative: skip
  KvPlaces places;   // on a GPU, in place of slots and positions

  bool has_rope = false;
  RopeSpec rope;
  RopeTable table;           // in place of rope's frequencies, where it is given
  IndexArray positions;      // [tokens]
  std::int64_t heads_q = 0;  // 0: q absent
  const void* q = nullptr;   // [tokens, heads_q, head_dim]
  void* q_out = nullptr;
  std::int64_t stride_q_token = 0, stride_q_head = 0, stride_q_out_token = 0, stride_q_out_head = 0;
  TypedPointer q_norm, k_norm;  // [head_dim] weights of RMSNorm before the rotation; null: none
  float norm_eps = 0.0f;
  FK_HOST_DEVICE bool has_norm() const { return q_norm || k_norm; }

  FK_HOST_DEVICE std::int64_t slot(std::int64_t token) const {
    return places ? places.slot(token, pages.page_size) : slots[token];
  }
  FK_HOST_DEVICE std::int64_t position(std::int64_t token) const {
    return places && !positions ? places.position(token) : positions[token];
  }
};

struct KvReadParams {
  static constexpr const char* kOp = "kv_read";

  DType dtype = DType::kFloat32;
  Device device{};
  std::int64_t batch = 0, max_seq = 0;
  KvPages pages;
  const std::int32_t* block_table = nullptr;  // [batch, max_pages]
  std::int64_t stride_block_table = 0, max_pages = 0;
  IndexArray seq_lens;    // [batch]
  void* k_out = nullptr;  // [batch, max_seq, heads_kv, head_dim]
  void* v_out = nullptr;
  std::int64_t stride_k_out_batch = 0, stride_k_out_token = 0, stride_k_out_head = 0;
  std::int64_t stride_v_out_batch = 0, stride_v_out_token = 0, stride_v_out_head = 0;
};

struct KvCopyParams {
  static constexpr const char* kOp = "kv_copy_pages";

  DType dtype = DType::kFloat32;
  Device device{};
  std::int64_t count = 0;
  KvPages pages;
  IndexArray src, dst;  // [count]
};

struct FindBadPageParams {
  static constexpr const char* kOp = "find_bad_page";

  Device device{};
  std::int64_t batch = 0;
  const std::int32_t* block_table = nullptr;  // [batch, max_pages]
  std::int64_t stride_block_table = 0, max_pages = 0, num_pages = 0, page_size = 0;
  IndexArray seq_lens;  // [batch]
  // For attention with a window: slots wholly before the keys that a sequence's first query sees are not looked at.
  std::int64_t window_left = -1, seq_q = 0;
  IndexArray cu_seqlens_q;  // [batch + 1], or absent: seq_q queries each
  IndexArray k_starts;      // [batch] first keys that are seen, or absent: nor slots wholly before those
  // The entry of least sequence, then least slot: sequence, slot, page; or -1, -1, -1.
  std::int64_t* fault = nullptr;       // [3] on the device; or null:
  std::int64_t* host_fault = nullptr;  // [3] on the host, there when the launch returns

  FK_HOST_DEVICE std::int64_t first_slot(std::int64_t b, std::int64_t length) const {
    std::int64_t first = k_starts ? k_starts[b] : 0;
    if (window_left >= 0) {
      const std::int64_t queries = cu_seqlens_q ? cu_seqlens_q[b + 1] - cu_seqlens_q[b] : seq_q;
      if (first < length - queries - window_left) first = length - queries - window_left;
    }
    return first < 0 ? 0 : first / page_size;
  }
};

/// What a call has to do (params_common.hpp).
inline double work_of(const KvAppendParams& p) {
  return work::product(p.tokens, p.pages.heads_kv * (p.pages.head_dim + p.pages.head_dim_v));
}
inline double work_of(const KvReadParams& p) {
  return work::product(p.batch * p.max_seq, p.pages.heads_kv * (p.pages.head_dim + p.pages.head_dim_v));
}
inline double work_of(const KvCopyParams& p) {
  return work::product(p.count * p.pages.page_size, p.pages.heads_kv * (p.pages.head_dim + p.pages.head_dim_v));
}
inline double work_of(const FindBadPageParams& p) { return work::product(p.batch, p.max_pages); }

}  // namespace flashkernel
