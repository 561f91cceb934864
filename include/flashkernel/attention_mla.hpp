// Multi-head latent attention (MLA): all query heads attend to one latent row a token, whose first columns are its
// value too.
#pragma once

#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

/// Attention over a cache of latent rows in pages: softmax(scale * q L^T) L[:, :head_dim_v].
/// - q [batch, heads_q, seq_q, head_dim]: float32, float16 or bfloat16; head_dim 1..576
/// - latent_pages [num_pages, page_size, head_dim] of q's dtype, or of 8 bits (below)
/// - block_table int32 [batch, max_pages], seq_lens int32 or int64 [batch]: as in `attention_paged`, with what is
///   allowed in entries that are not used
/// - latent_scale: of rows of 8 bits with one scale (below); else absent
/// - out [batch, heads_q, seq_q, head_dim_v] of q's dtype: written; head_dim_v is 1..512 and at most head_dim
/// - lse fp32 [batch, heads_q, seq_q]: written; may be absent
/// - scale: the factor of scores. It has no default, because it follows from the head dim before the latent
/// - causal: query i stands at position i + seq_lens[b] - seq_q
/// - check_pages: as in `attention_paged`
///
/// A row that sees no key gives output 0 and LSE -inf. Last dims are contiguous.
///
/// Latent rows of 8 bits (uint8 or float8_e4m3fn) stand for element times scale in float32, rounded to q's dtype. The
/// last dim of latent_pages tells which of two forms they have:
/// - head_dim_v + 4 * groups + 2 * (head_dim - head_dim_v) bytes: a row is head_dim_v float8_e4m3fn elements, a float32
///   scale for each 128 of them (the last group may be shorter), and the other columns in bfloat16: 656 bytes for 512
///   and 576. head_dim_v is a multiple of 4, and rows begin at multiples of 4 bytes
/// - head_dim bytes: float8_e4m3fn elements with one scale, `latent_scale`: one float32 number on q's device or on the
///   host; absent: 1
FK_API void attention_mla_decode(const TensorView& q, const TensorView& latent_pages, const TensorView& block_table,
                                 const TensorView& seq_lens, const TensorView& latent_scale, const TensorView& out,
                                 const TensorView& lse, float scale, bool causal = false, bool check_pages = false,
                                 const ExecutionContext& context = {});

/// Rounds latent rows to 8 bits and writes them into the pages of `attention_mla_decode`, in either form.
/// - latent [tokens, rank], key [tokens, turned]: float32, float16 or bfloat16, one dtype; last dims contiguous; rank
///   1..512, both together 1..576. The key has been rotated by the caller
/// - latent_pages uint8 or float8_e4m3fn: [num_pages, page_size, rank + 4 * groups + 2 * turned], where a group's scale
///   is its largest magnitude over 448, at least 2^-126, and the key is rounded to bfloat16; or [num_pages, page_size,
///   rank + turned], where `latent_scale` is read
/// - slots int32 or int64 [tokens]: row t goes to slot slots[t] = page * page_size + offset; a negative slot is skipped
/// - latent_scale: as in `attention_mla_decode`
///
/// An element is x / scale, rounded to nearest even and bounded to +-448. NaN stays NaN and leaves the scale alone. A
/// slot past the last page: InvalidArgument where slots are on the host, skipped on a GPU.
FK_API void latent_append(const TensorView& latent, const TensorView& key, const TensorView& latent_pages,
                          const TensorView& slots, const TensorView& latent_scale = {},
                          const ExecutionContext& context = {});

}  // namespace flashkernel
