// The kernels that move keys and values into and out of pages.
#pragma once

#include <optional>

#include "flashkernel/execution.hpp"
#include "flashkernel/kv_scales.hpp"
#include "flashkernel/rope.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

/// RoPE fused into `kv_append`: rotates k (and q, if given) by `positions` [tokens] on the way, normed before if there
/// are weights for that.
struct KvAppendRope {
  TensorView positions;  ///< int32 or int64 [tokens]
  RopeOptions options;
  TensorView q, q_out;  ///< [tokens, heads_q, head_dim]; absent: only k is rotated
  /// Tables [max_positions, rotary_dim / 2], both float32, float16 or bfloat16: row `positions[t]` turns token t, and
  /// rotary_dim comes from them (`theta` is not used). A position outside is InvalidArgument where positions are on the
  /// host, NaN on a GPU. Absent: in-kernel sin and cos.
  TensorView cos, sin;
  /// RMSNorm of each head, as `rms_norm` gives it: weights [head_dim] of q's heads and of k's, of any floating dtype.
  /// What is rotated is rounded to k's dtype. Absent: not normed. Unsupported with 8-bit pages, and on a GPU for heads
  /// of more than 512 elements.
  TensorView q_norm, k_norm;
  float norm_eps = 1e-6f;  ///< added to the mean of squares
};

/// Writes the keys and values of new tokens into pages, with RoPE and RMSNorm of heads on the way if `rope` asks for
/// them.
/// - k [tokens, heads_kv, head_dim], v [tokens, heads_kv, head_dim_v]
/// - k_pages [num_pages, page_size, heads_kv, head_dim], v_pages [num_pages, page_size, heads_kv, head_dim_v]: written
/// - slots int32 or int64 [tokens]: token t goes to slot slots[t] = page * page_size + offset; a negative slot is
///   skipped. A slot past the last page: InvalidArgument where slots are on the host, skipped on a GPU
FK_API void kv_append(const TensorView& k, const TensorView& v, const TensorView& k_pages, const TensorView& v_pages,
                      const TensorView& slots, const std::optional<KvAppendRope>& rope = std::nullopt,
                      const ExecutionContext& context = {});
/// The same into pages of 8 or 4 bits, whose scales are `scales` (kv_scales.hpp). k, v and q are float32, float16 or
/// bfloat16; k and v are rotated in float32 and not rounded to their dtype first.
/// - Pages of float8_e4m3fn or int8 get x / scale, rounded to nearest even and saturated to 448 or 127 (infinities
///   too). Scales [heads_kv] are read. Scales [num_pages, heads_kv, page_size] are written: the largest magnitude of
///   the token's head over 448 or 127
/// - NaN stays NaN in float8_e4m3fn. int8 has none: a scale of the token's own becomes NaN, and with it the token's
///   whole head; under a scale [heads_kv] a NaN is stored as 0
/// - Pages of int4 [num_pages, page_size, heads_kv, head_dim / 2] in bytes get (x - zero) / scale, rounded to nearest
///   even and bounded to 0 to 15. zero, the least of a group of 32, and scale, a fifteenth of its range, are written as
///   float16. Numbers are bounded to +-65024 first, and a group with a NaN becomes NaN
FK_API void kv_append(const TensorView& k, const TensorView& v, const TensorView& k_pages, const TensorView& v_pages,
                      const KvScales& scales, const TensorView& slots,
                      const std::optional<KvAppendRope>& rope = std::nullopt, const ExecutionContext& context = {});

/// Sequences that get tokens: token n of those for sequence b goes to position seq_lens[b] + n of it.
struct KvAppendPlaces {
  TensorView block_table;  ///< int32 [batch, max_pages]
  TensorView seq_lens;     ///< int32 or int64 [batch]: how many tokens each sequence has before the call
  /// int32 or int64 [batch + 1]: sequence b gets tokens [cu_seqlens[b], cu_seqlens[b + 1]) of k and v. Absent: every
  /// sequence gets tokens / batch of them.
  TensorView cu_seqlens;
  /// int32 or int64 [batch]: RoPE's position of the first token that a sequence gets. Absent: seq_lens.
  TensorView positions;
  TensorView seq_lens_after;  ///< int32 [batch], written: how many tokens each sequence has after the call; or absent
};

/// `kv_append` of tokens that follow those of their sequences. The kernel works out slots and positions of RoPE from
/// `places`, so rope.positions must be absent. There is at least one token.
///
/// A token past the end of block_table, or a page id outside the pool: InvalidArgument on the host, skipped on a GPU.
FK_API void kv_append_to_sequences(const TensorView& k, const TensorView& v, const TensorView& k_pages,
                                   const TensorView& v_pages, const KvScales& scales, const KvAppendPlaces& places,
                                   const std::optional<KvAppendRope>& rope = std::nullopt,
                                   const ExecutionContext& context = {});

/// Gathers sequences back: k_out [batch, max_seq, heads_kv, head_dim], v_out [batch, max_seq, heads_kv, head_dim_v];
/// tokens past seq_lens[b] are written as 0. block_table int32 [batch, max_pages], seq_lens int32 or int64 [batch].
/// Table entries past a sequence's last page are not used: any value is allowed there.
FK_API void kv_read(const TensorView& k_pages, const TensorView& v_pages, const TensorView& block_table,
                    const TensorView& seq_lens, const TensorView& k_out, const TensorView& v_out,
                    const ExecutionContext& context = {});
/// The same from pages of 8 and 4 bits: their numbers, rounded to the dtype of k_out and v_out (float32, float16 or
/// bfloat16).
FK_API void kv_read(const TensorView& k_pages, const TensorView& v_pages, const KvScales& scales,
                    const TensorView& block_table, const TensorView& seq_lens, const TensorView& k_out,
                    const TensorView& v_out, const ExecutionContext& context = {});

/// Copies page src[i] to page dst[i] in both k_pages and v_pages; src, dst int32 or int64 [n]; no page may be in both.
FK_API void kv_copy_pages(const TensorView& k_pages, const TensorView& v_pages, const TensorView& src,
                          const TensorView& dst, const ExecutionContext& context = {});
/// The same for pages of 8 and 4 bits; scales of tokens and of groups go along.
FK_API void kv_copy_pages(const TensorView& k_pages, const TensorView& v_pages, const KvScales& scales,
                          const TensorView& src, const TensorView& dst, const ExecutionContext& context = {});

/// Finds the first entry of a page table that leads out of a pool of `num_pages` pages.
/// - block_table int32 [batch, max_pages], seq_lens int32 or int64 [batch]: the entries that a sequence's length needs
///   are looked at
/// - fault int64 [3]: written: sequence, slot and page id of the entry, or {-1, -1, -1} if there is none. A length
///   below 0 or past the table gives {sequence, -1, length}
///
/// It is asynchronous like every op, and legal while a CUDA graph is captured.
FK_API void find_bad_page(const TensorView& block_table, const TensorView& seq_lens, std::int64_t num_pages,
                          std::int64_t page_size, const TensorView& fault, const ExecutionContext& context = {});

/// Throws BadBlockTable with what `find_bad_page` finds. On a GPU it waits for `context.stream`: for debugging, and for
/// tables from elsewhere. Unsupported while that stream is being captured.
FK_API void check_block_table(const TensorView& block_table, const TensorView& seq_lens, std::int64_t num_pages,
                              std::int64_t page_size, const ExecutionContext& context = {});

}  // namespace flashkernel
