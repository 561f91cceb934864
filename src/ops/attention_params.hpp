// What an attention kernel gets: dense, variable-length and paged attention in one struct; pointers with their layouts.
// Filled and validated by ops/attention.cpp. Strides count elements; the last dim (head_dim) is contiguous everywhere.
#pragma once

#include <cmath>
#include <cstdint>

#include "flashkernel/alibi.hpp"
#include "ops/kv_packed_params.hpp"
#include "ops/large_lse.hpp"
#include "ops/params_common.hpp"

namespace flashkernel {

/// The largest head dim that the ops of attention take. Every backend has a kernel that takes it.
inline constexpr std::int64_t kMaxHeadDim = 512;

/// Additive bias [batch, heads_q, seq_q, seq_k]; a broadcast dim has stride 0.
struct AttentionBias {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t stride_batch = 0, stride_head = 0, stride_q = 0, stride_k = 0;
};

/// What a block of a block mask says of its pairs.
enum : std::uint8_t {
  kBlockHidden = 0,
  kBlockShown = 1,  // but for what the packed mask hides
  kBlockWhole = 2   // all pairs are shown, whatever the packed mask says (as is every higher number)
};

/// Block mask of dense attention, [batch, heads_q, blocks of queries, blocks of keys] in bytes. A block is 2^shift
/// queries, or keys, at least 2^6: 64 keys from a multiple of 64 on lie in one. A broadcast dim has stride 0.
struct AttentionBlocks {
  const std::uint8_t* data = nullptr;
  std::int64_t stride_batch = 0, stride_head = 0, stride_q = 0, stride_k = 0;
  int shift_q = 0, shift_k = 0;

  /// The entries of the blocks of keys of query i, stride_k apart.
  FK_HOST_DEVICE const std::uint8_t* row(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return data + b * stride_batch + h * stride_head + (i >> shift_q) * stride_q;
  }
  FK_HOST_DEVICE std::uint8_t at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return row(b, h, i)[(j >> shift_k) * stride_k];
  }
};

/// Packed boolean mask [batch, heads_q, seq_q, words], or [heads_q, total_q, words] of queries side by side: query i
/// may see key j where bit j % 32 of word j / 32 of its row is set. Over pages bit 0 is the first of the last q_len
/// keys of a sequence, and all keys before it are shown. A broadcast dim has stride 0; strides count words. `blocks`
/// is a mask of its own, or says in which blocks the bits count.
struct AttentionMask {
  const std::uint32_t* data = nullptr;
  std::int64_t stride_batch = 0, stride_head = 0, stride_q = 0;
  AttentionBlocks blocks;

  /// Whether there is a mask of either kind.
  FK_HOST_DEVICE bool is_given() const { return data || blocks.data; }
  FK_HOST_DEVICE const std::uint32_t* row(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return data + b * stride_batch + h * stride_head + i * stride_q;
  }
  /// Of dense keys.
  FK_HOST_DEVICE bool hides(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    if (blocks.data) {
      const std::uint8_t block = blocks.at(b, h, i, j);
      if (block != kBlockShown) return block == kBlockHidden;
    }
    return data && (row(b, h, i)[j / 32] >> (j % 32) & 1u) == 0;
  }
};

struct AttentionParams {
  static constexpr const char* kOp = "attention_fwd";

  DType dtype = DType::kFloat32;    // of k and v; of q and out too, unless k and v are quantized
  DType dtype_q = DType::kFloat32;  // of q and out. (So a kernel that asks for its dtype refuses 8-bit keys by that.)
  Device device{};
  std::int64_t batch = 0, heads_q = 0, heads_kv = 0;
  std::int64_t seq_q = 0, seq_k = 0;  // dense: exact; variable-length and paged: the largest
  std::int64_t head_dim = 0, head_dim_v = 0;

  const void* q =
      nullptr;  // [batch, heads_q, seq_q, head_dim], or [total_q, heads_q, head_dim] (stride_q_batch unused)
  const void* k = nullptr;  // [batch, heads_kv, seq_k, head_dim], [total_k, ...], or pages [num_pages, page_size,
                            // heads_kv, head_dim]
  const void* v = nullptr;  // as k with head_dim_v
  void* out = nullptr;      // as q with head_dim_v
  float* lse = nullptr;     // [batch, heads_q, seq_q] or [heads_q, total_q] by the strides below; may be null
  std::int64_t stride_q_batch = 0, stride_q_head = 0, stride_q_token = 0;
  std::int64_t stride_k_batch = 0, stride_k_head = 0,
               stride_k_token = 0;  // paged: stride_k_batch is the page's, token the slot's
  std::int64_t stride_v_batch = 0, stride_v_head = 0, stride_v_token = 0;
  std::int64_t stride_out_batch = 0, stride_out_head = 0, stride_out_token = 0;
  std::int64_t stride_lse_batch = 0, stride_lse_head = 0, stride_lse_token = 0;

  IndexArray cu_seqlens_q;                // [batch + 1]; absent: every sequence has seq_q queries
  IndexArray cu_seqlens_k;                // [batch + 1]; absent: dense or paged
  std::int64_t total_q = 0, total_k = 0;  // rows of q and k when variable-length

  const std::int32_t* block_table = nullptr;  // [batch, max_pages], rows `stride_block_table` apart; null: not paged
  std::int64_t stride_block_table = 0, max_pages = 0, num_pages = 0, page_size = 0;
  IndexArray seq_lens;              // [batch] keys per sequence when paged
  IndexArray k_starts;              // [batch] the first key of each that is seen; absent: 0
  IndexArray seqused_q, seqused_k;  // [batch] bounds of variable lengths; absent: none
  KvQuantization quantization;  // of pages of 8 or 4 bits; of 4 bits two elements are a byte, and strides of k and v
                                // count bytes

  float scale = 1.0f;
  float softcap = 0.0f;  // 0: off
  bool causal = false;   // already folded into window_right (min with 0); kept for kernels that specialise
  std::int64_t window_left = -1, window_right = -1;  // -1: unbounded
  AttentionBias bias;
  const float* alibi_slopes = nullptr;  // slope of (b, h) at b * stride_alibi_batch + h
  std::int64_t stride_alibi_batch = 0;
  const float* sinks = nullptr;  // [heads_q]
  AttentionMask mask;
  Alibi alibi = Alibi::kDistance;  // what the slopes are multiplied with

  FK_HOST_DEVICE bool is_varlen_q() const { return static_cast<bool>(cu_seqlens_q); }
  FK_HOST_DEVICE bool is_varlen_k() const { return static_cast<bool>(cu_seqlens_k); }
  FK_HOST_DEVICE bool is_paged() const { return block_table != nullptr; }
  /// Sequences have lengths of their own, which lie in memory.
  FK_HOST_DEVICE bool has_lengths() const { return is_varlen_q() || is_varlen_k() || is_paged(); }
  FK_HOST_DEVICE bool has_score_modifier() const { return softcap > 0 || bias.data || alibi_slopes || mask.is_given(); }
  /// The row of the mask of query i of sequence b.
  FK_HOST_DEVICE const std::uint32_t* mask_row(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return is_varlen_q() ? mask.row(0, h, q_begin(b) + i) : mask.row(b, h, i);
  }
  /// Whether the mask hides key j from query i of sequence b, which has these lengths.
  FK_HOST_DEVICE bool mask_hides(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j, std::int64_t q_len,
                                 std::int64_t k_len) const {
    if (!is_paged()) return mask.hides(b, h, i, j);
    const std::int64_t bit = j - (k_len - q_len);
    return mask.data && bit >= 0 && (mask_row(b, h, i)[bit / 32] >> (bit % 32) & 1u) == 0;
  }
  /// Scores of -inf hide pairs that neither the causal mask nor the window hides.
  FK_HOST_DEVICE bool hides_by_score() const { return bias.data || mask.is_given(); }
  /// What ALiBi adds to a score; `distance` is i + k_len - q_len - j, above 0 for keys before the query's position.
  FK_HOST_DEVICE float alibi_term(float slope, float distance) const {
    if (alibi == Alibi::kDistance) return -slope * fabsf(distance);
    if (alibi == Alibi::kSigned) return -slope * distance;
    return distance > 0 ? -slope * sqrtf(distance) : 0.0f;
  }

  // First query row of sequence b in q, and its number of queries.
  FK_HOST_DEVICE std::int64_t q_begin(std::int64_t b) const { return cu_seqlens_q ? cu_seqlens_q[b] : 0; }
  FK_HOST_DEVICE std::int64_t q_length(std::int64_t b) const {
    return cu_seqlens_q ? used(cu_seqlens_q[b + 1] - cu_seqlens_q[b], seqused_q, b) : seq_q;
  }
  FK_HOST_DEVICE std::int64_t k_begin(std::int64_t b) const { return cu_seqlens_k ? cu_seqlens_k[b] : 0; }
  FK_HOST_DEVICE std::int64_t k_length(std::int64_t b) const {
    if (cu_seqlens_k) return used(cu_seqlens_k[b + 1] - cu_seqlens_k[b], seqused_k, b);
    if (!is_paged()) return seq_k;
    return within(seq_lens[b], max_pages * page_size);
  }
  // Element offset of the head_dim row of query i of sequence b. Variable-length sequences ignore the batch stride.
  FK_HOST_DEVICE std::int64_t q_offset(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return (cu_seqlens_q ? (q_begin(b) + i) * stride_q_token : b * stride_q_batch + i * stride_q_token) +
           h * stride_q_head;
  }
  FK_HOST_DEVICE std::int64_t out_offset(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return (cu_seqlens_q ? (q_begin(b) + i) * stride_out_token : b * stride_out_batch + i * stride_out_token) +
           h * stride_out_head;
  }
  FK_HOST_DEVICE std::int64_t lse_offset(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return (cu_seqlens_q ? (q_begin(b) + i) * stride_lse_token : b * stride_lse_batch + i * stride_lse_token) +
           h * stride_lse_head;
  }
  // Element offset of the row of key j of sequence b; h counts kv heads.
  FK_HOST_DEVICE std::int64_t k_offset(std::int64_t b, std::int64_t h, std::int64_t j) const {
    return kv_offset(b, h, j, stride_k_batch, stride_k_head, stride_k_token);
  }
  FK_HOST_DEVICE std::int64_t v_offset(std::int64_t b, std::int64_t h, std::int64_t j) const {
    return kv_offset(b, h, j, stride_v_batch, stride_v_head, stride_v_token);
  }
  // The scales of key j of sequence b (quantized, so paged); h counts kv heads.
  FK_HOST_DEVICE float k_scale(std::int64_t b, std::int64_t h, std::int64_t j) const {
    return *quantization.k.at(page_of(b, j), h, j % page_size);
  }
  FK_HOST_DEVICE float v_scale(std::int64_t b, std::int64_t h, std::int64_t j) const {
    return *quantization.v.at(page_of(b, j), h, j % page_size);
  }
  // Key and value j of sequence b as rows of 4-bit elements.
  FK_HOST_DEVICE PackedRow k_packed(std::int64_t b, std::int64_t h, std::int64_t j) const {
    return {static_cast<const unsigned char*>(k) + k_offset(b, h, j),
            quantization.k,
            page_of(b, j),
            h,
            j % page_size,
            dtype};
  }
  FK_HOST_DEVICE PackedRow v_packed(std::int64_t b, std::int64_t h, std::int64_t j) const {
    return {static_cast<const unsigned char*>(v) + v_offset(b, h, j),
            quantization.v,
            page_of(b, j),
            h,
            j % page_size,
            dtype};
  }
  // The first key that sequence b lets any query see, at most its length.
  FK_HOST_DEVICE std::int64_t k_start(std::int64_t b, std::int64_t k_len) const {
    return k_starts ? within(k_starts[b], k_len) : 0;
  }
  // Keys [first, last) that query i of sequence b, with these lengths, may see.
  FK_HOST_DEVICE std::int64_t first_key(std::int64_t b, std::int64_t i, std::int64_t q_len, std::int64_t k_len) const {
    const std::int64_t start = k_start(b, k_len), first = first_key(i, q_len, k_len);
    return first < start ? start : first;
  }
  // By the window alone, where no sequence starts later.
  FK_HOST_DEVICE std::int64_t first_key(std::int64_t i, std::int64_t q_len, std::int64_t k_len) const {
    if (window_left < 0) return 0;
    const std::int64_t first = i + k_len - q_len - window_left;
    return first < 0 ? 0 : first;
  }
  FK_HOST_DEVICE std::int64_t last_key(std::int64_t i, std::int64_t q_len, std::int64_t k_len) const {
    if (window_right < 0) return k_len;
    const std::int64_t last = i + k_len - q_len + window_right + 1;
    return last < 0 ? 0 : (last > k_len ? k_len : last);
  }

 private:
  // Numbers on a GPU are not checked by the host: a bad one must not lead out of a sequence.
  FK_HOST_DEVICE static std::int64_t within(std::int64_t value, std::int64_t most) {
    return value < 0 ? 0 : (value > most ? most : value);
  }
  FK_HOST_DEVICE static std::int64_t used(std::int64_t length, const IndexArray& bounds, std::int64_t b) {
    return bounds ? within(bounds[b], length) : length;
  }
  FK_HOST_DEVICE std::int64_t page_of(std::int64_t b, std::int64_t j) const {
    const std::int64_t page = block_table[b * stride_block_table + j / page_size];
    return page < 0 || page >= num_pages ? 0 : page;  // nor may a bad page id lead out of the pool
  }
  FK_HOST_DEVICE std::int64_t kv_offset(std::int64_t b, std::int64_t h, std::int64_t j, std::int64_t stride_batch,
                                        std::int64_t stride_head, std::int64_t stride_token) const {
    if (block_table) return page_of(b, j) * stride_batch + (j % page_size) * stride_token + h * stride_head;
    return (cu_seqlens_k ? (k_begin(b) + j) * stride_token : b * stride_batch + j * stride_token) + h * stride_head;
  }
};

/// Backward: `forward` describes the same call (its out and lse are read); gradients follow its layouts.
struct AttentionBackwardParams {
  static constexpr const char* kOp = "attention_bwd";

  AttentionParams forward;
  const void* grad_out = nullptr;   // layout of out by its own strides
  const float* grad_lse = nullptr;  // layout of lse by its own strides; may be null
  std::int64_t stride_grad_out_batch = 0, stride_grad_out_head = 0, stride_grad_out_token = 0;
  std::int64_t stride_grad_lse_batch = 0, stride_grad_lse_head = 0, stride_grad_lse_token = 0;

  void* grad_q = nullptr;  // layouts of q, k, v by their own strides; any may be null
  void* grad_k = nullptr;
  void* grad_v = nullptr;
  std::int64_t stride_grad_q_batch = 0, stride_grad_q_head = 0, stride_grad_q_token = 0;
  std::int64_t stride_grad_k_batch = 0, stride_grad_k_head = 0, stride_grad_k_token = 0;
  std::int64_t stride_grad_v_batch = 0, stride_grad_v_head = 0, stride_grad_v_token = 0;

  // Gradient of the bias: its own shape with dims of 1 where the bias broadcasts (those are summed over); null: not
  // wanted.
  void* grad_bias = nullptr;
  DType grad_bias_dtype = DType::kFloat32;
  std::int64_t grad_bias_shape[4] = {1, 1, 1, 1};  // each 1 or the full extent
  std::int64_t stride_grad_bias[4] = {0, 0, 0, 0};
  float* grad_sinks = nullptr;  // [heads_q]
  bool deterministic = true;
  bool invariant = false;  // in the invariant mode: how sums are made follows from no other sequence's length
};

/// merge_states: rows are merged to [d0, d1, d2, head_dim]. The parts are a and b, or `parts` of them one after another
/// in a, stride_*_part apart.
struct MergeStatesParams {
  static constexpr const char* kOp = "merge_states";

  DType dtype = DType::kFloat32, out_dtype = DType::kFloat32;  // equal, or the parts are fp32
  Device device{};
  std::int64_t shape[3] = {1, 1, 1};
  std::int64_t head_dim = 0;
  const void* out_a = nullptr;
  const void* out_b = nullptr;
  const float* lse_a = nullptr;
  const float* lse_b = nullptr;
  void* out = nullptr;
  float* lse = nullptr;
  std::int64_t stride_out_a[3] = {}, stride_out_b[3] = {}, stride_out[3] = {};
  std::int64_t stride_lse_a[3] = {}, stride_lse_b[3] = {}, stride_lse[3] = {};
  bool is_pair = true;
  std::int64_t parts = 2, stride_out_part = 0, stride_lse_part = 0;
};

/// What a call has to do (params_common.hpp).
inline double work_of(const AttentionParams& p) {
  return work::product(p.batch * p.heads_q, p.seq_q) * work::product(p.seq_k, p.head_dim + p.head_dim_v);
}
inline double work_of(const AttentionBackwardParams& p) { return 2.5 * work_of(p.forward); }
inline double work_of(const MergeStatesParams& p) {
  return work::volume(p.shape, 3) * static_cast<double>(p.head_dim) * (static_cast<double>(p.parts) / 2);
}

}  // namespace flashkernel
