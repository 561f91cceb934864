// Attention: softmax(scale * Q K^T) V and its gradient; dense, variable-length and paged.
//
// Order of operations on a score s = scale * <q_i, k_j>: softcap (c * tanh(s / c)), then bias and ALiBi
// (-slope * |i + seq_k - seq_q - j|, or as AttentionOptions::alibi says), then masks; attention sinks join the
// softmax's denominator only. `causal` and `window` are aligned bottom-right: query i stands at position i + seq_k -
// seq_q. Softmax runs in fp32. LSE is the natural logarithm of the denominator, sink included. A row that sees no key
// gives output 0, LSE -inf (with a sink: LSE = sink) and gradient 0.
#pragma once

#include <cstdint>
#include <optional>

#include "flashkernel/alibi.hpp"
#include "flashkernel/execution.hpp"
#include "flashkernel/kv_scales.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

struct AttentionOptions {
  bool causal = false;
  std::int64_t window_left = -1;   ///< keys seen to the left of the query's position; -1: all
  std::int64_t window_right = -1;  ///< keys seen to the right; -1: all (causal: none)
  float softcap = 0.0f;            ///< c > 0; 0: off
  std::optional<float> scale;      ///< default 1 / sqrt(head_dim)
  /// Additive, fp32 or q's dtype, broadcastable to [batch, heads_q, seq_q, seq_k] (dims of size 1 broadcast; fewer dims
  /// are aligned right). Dense attention only.
  TensorView bias;
  TensorView alibi_slopes;  ///< fp32 [heads_q] or [batch, heads_q]
  TensorView sinks;         ///< fp32 [heads_q]: logits of a key without a value
  /// Paged attention on a GPU: look at the part of the page table that is used first, wait for the answer and throw
  /// BadBlockTable where it leads out of the pool (see check_block_table). Off, a bad id reads nothing that it should
  /// not. On the CPU always done.
  bool check_pages = false;
  KvScales kv_scales;  ///< of pages of 8 and 4 bits (kv_scales.hpp); paged attention only
  /// Packed boolean mask, int32, broadcastable to [batch, heads_q, seq_q, (seq_k + 31) / 32], but for its last dim
  /// (dims of size 1 broadcast; fewer dims are aligned right). Query i may see key j where bit j % 32 of word j / 32 is
  /// set; pack_mask makes it. Dense and paged attention. Over pages the bits are those of the last keys of a sequence,
  /// as many as it has queries, and all keys before are seen: a tree of drafts to verify. It is then broadcastable to
  /// [batch, heads_q, seq_q, (seq_q + 31) / 32], or with cu_seqlens_q to [heads_q, total_q, (max_seqlen_q + 31) / 32];
  /// rows may hold more words.
  TensorView mask;
  Alibi alibi = Alibi::kDistance;  ///< what alibi_slopes are multiplied with
  /// int32 or int64 [batch]: no query sees the keys of its sequence before this one (padding on the left). Positions
  /// and lengths count those keys all the same. Paged attention only.
  TensorView k_starts;
  /// int32 or int64 [batch]: how many tokens at the start of each sequence count, at most its length by cu_seqlens.
  /// Rows of out, lse and gradients past them are left as they are. Variable-length attention only.
  TensorView seqused_q, seqused_k;
  /// Block mask, uint8 [batch or 1, heads_q or 1, blocks of queries, blocks of keys] with any strides (fewer dims are
  /// aligned right; a boolean tensor's bytes will do): 0 hides all pairs of a block, 1 shows those that `mask` shows
  /// (all, without a mask), 2 shows all of them whatever `mask` says. It joins causal and window. Kernels leave hidden
  /// blocks out. Dense attention only.
  TensorView block_mask;
  std::int64_t block_size_q = 128, block_size_k = 128;  ///< tokens of a block: a power of two from 64 on
};

/// Dense attention: out = softmax(scale * Q K^T) V.
/// - q [batch, heads_q, seq_q, head_dim]
/// - k [batch, heads_kv, seq_k, head_dim], v [batch, heads_kv, seq_k, head_dim_v]; heads_q is a multiple of heads_kv
/// - out [batch, heads_q, seq_q, head_dim_v]: written
/// - lse fp32 [batch, heads_q, seq_q]: written; may be absent
///
/// Head dims are 1 to 512. Last dims are contiguous, the others have any strides.
FK_API void attention(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out,
                      const TensorView& lse, const AttentionOptions& options = {},
                      const ExecutionContext& context = {});

/// Attention of sequences of various lengths, which lie side by side.
/// - q [total_q, heads_q, head_dim], k [total_k, heads_kv, head_dim], v [total_k, heads_kv, head_dim_v]
/// - cu_seqlens_q, cu_seqlens_k int32 or int64 [batch + 1]: where each sequence begins: 0 first, never decreasing,
///   total last
/// - max_seqlen_q, max_seqlen_k: bounds of the lengths
/// - out [total_q, heads_q, head_dim_v]: written
/// - lse fp32 [heads_q, total_q]: written; may be absent
FK_API void attention_varlen(const TensorView& q, const TensorView& k, const TensorView& v,
                             const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k, std::int64_t max_seqlen_q,
                             std::int64_t max_seqlen_k, const TensorView& out, const TensorView& lse,
                             const AttentionOptions& options = {}, const ExecutionContext& context = {});

/// Attention over keys and values in pages.
/// - q and out [batch, heads_q, seq_q, *] with lse fp32 [batch, heads_q, seq_q]; or, with cu_seqlens_q and
///   max_seqlen_q, [total_q, heads_q, *] with lse [heads_q, total_q]
/// - k_pages [num_pages, page_size, heads_kv, head_dim], v_pages [num_pages, page_size, heads_kv, head_dim_v]: of q's
///   dtype, or of 8 or 4 bits with `options.kv_scales`
/// - block_table int32 [batch, max_pages]: the pages of each sequence, in order
/// - seq_lens int32 or int64 [batch]: keys of each sequence, the new ones included
/// - cu_seqlens_q int32 or int64 [batch + 1]: where the queries of each sequence begin; may be absent
///
/// A table entry is not used if it lies past a sequence's last page, or if its page lies wholly before the window of
/// the sequence's first query. Any value is allowed there. Kernels may read such entries, so each row must be memory of
/// max_pages entries.
///
/// On a GPU many blocks read the table and the lengths while the call runs. Another stream that writes them must wait
/// for it.
FK_API void attention_paged(const TensorView& q, const TensorView& k_pages, const TensorView& v_pages,
                            const TensorView& block_table, const TensorView& seq_lens, const TensorView& cu_seqlens_q,
                            std::int64_t max_seqlen_q, const TensorView& out, const TensorView& lse,
                            const AttentionOptions& options = {}, const ExecutionContext& context = {});

/// What the backward pass writes; an absent view is not computed.
struct AttentionGradients {
  TensorView q, k, v;  ///< shapes and dtype of q, k, v
  TensorView bias;     ///< shape of options.bias (broadcast dims are summed), its dtype or fp32
  TensorView sinks;    ///< fp32 [heads_q]
};

/// Gradients of `attention`, recomputed from q, k, v, out and lse, all as the forward pass took and gave them.
/// - grad_lse fp32, shape of lse; may be absent
/// - deterministic: gradients are the same bits in every run; false allows atomics
FK_API void attention_backward(const TensorView& grad_out, const TensorView& q, const TensorView& k,
                               const TensorView& v, const TensorView& out, const TensorView& lse,
                               const TensorView& grad_lse, const AttentionGradients& gradients,
                               const AttentionOptions& options = {}, bool deterministic = true,
                               const ExecutionContext& context = {});

/// Gradients of `attention_varlen`; lse and grad_lse [heads_q, total_q].
FK_API void attention_varlen_backward(const TensorView& grad_out, const TensorView& q, const TensorView& k,
                                      const TensorView& v, const TensorView& out, const TensorView& lse,
                                      const TensorView& grad_lse, const TensorView& cu_seqlens_q,
                                      const TensorView& cu_seqlens_k, std::int64_t max_seqlen_q,
                                      std::int64_t max_seqlen_k, const AttentionGradients& gradients,
                                      const AttentionOptions& options = {}, bool deterministic = true,
                                      const ExecutionContext& context = {});

/// Packs a boolean mask to the bits that `AttentionOptions::mask` wants: bit j % 32 of word j / 32 is key j; bits
/// behind the last key are 0.
/// - mask uint8 of 1 to 4 dims, a boolean tensor's bytes: what is not 0 is seen; any strides, 0 included
/// - out int32, mask's shape but for its last dim, which is (mask.shape[last] + 31) / 32 and contiguous: written
FK_API void pack_mask(const TensorView& mask, const TensorView& out, const ExecutionContext& context = {});

/// Attention over the union of disjoint sets of keys, from the results over each.
/// - out_a, out_b [..., head_dim] (up to 4 dims), lse_a, lse_b fp32, shape of out_a without the last dim: two parts.
///   Or, without out_b and lse_b, out_a [parts, ..., head_dim] and lse_a [parts, ...]: any number of parts
/// - out: written; out_a's dtype, or any of the three floating dtypes where the parts are float32
/// - lse fp32: written
///
/// A part whose LSE is -inf counts nothing; no part at all gives 0 and LSE -inf. Of two parts, out and lse may be out_a
/// and lse_a; of any number, they need memory of their own.
FK_API void merge_states(const TensorView& out_a, const TensorView& lse_a, const TensorView& out_b,
                         const TensorView& lse_b, const TensorView& out, const TensorView& lse,
                         const ExecutionContext& context = {});

}  // namespace flashkernel
