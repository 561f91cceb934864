// Multi-head latent attention (MLA): all query heads attend to one latent row a token, whose first columns are its
// value too.
#pragma once

#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

/// softmax(scale * q L^T) L[:, :head_dim_v] over a cache of latent rows in pages. q [batch, heads_q, seq_q, head_dim]
/// (float32, float16 or bfloat16; head_dim 1..576), latent_pages [num_pages, page_size, head_dim] (q's dtype, or of 8
/// bits as below), block_table int32 [batch, max_pages], seq_lens int32 or int64 [batch] (keys of each sequence, those
/// of the queries included), out [batch, heads_q, seq_q, head_dim_v] (q's dtype; head_dim_v 1..512 and at most
/// head_dim), lse fp32 [batch, heads_q, seq_q] (may be absent). `scale` multiplies scores; it has no default, because
/// it follows from the head dim before the latent. `causal`: query i stands at position i + seq_lens[b] - seq_q. A row
/// that sees no key gives output 0 and LSE -inf. `check_pages`, and what is allowed in table entries that are not used:
/// as in attention_paged. Last dims are contiguous.
///
/// Latent rows of 8 bits (uint8 or float8_e4m3fn) are numbers in float32, element times scale, rounded to q's dtype.
/// They come in two forms, which their last dim tells. Of head_dim_v + 4 * groups + 2 * (head_dim - head_dim_v) bytes:
/// a row is head_dim_v float8_e4m3fn elements, a float32 scale for each 128 of them (the last group may be shorter),
/// and the other columns in bfloat16; 656 bytes for 512 and 576. head_dim_v is a multiple of 4, and rows begin at
/// multiples of 4 bytes. Of head_dim bytes: float8_e4m3fn elements with one scale, `latent_scale`: float32, one number
/// on q's device or on the host; absent: 1.
FK_API void attention_mla_decode(const TensorView& q, const TensorView& latent_pages, const TensorView& block_table,
                                 const TensorView& seq_lens, const TensorView& latent_scale, const TensorView& out,
                                 const TensorView& lse, float scale, bool causal = false, bool check_pages = false,
                                 const ExecutionContext& context = {});

/// Rounds latent rows to 8 bits on their way into the pages of attention_mla_decode, of either form: latent [tokens,
/// rank] and key [tokens, turned] (float32, float16 or bfloat16, one dtype; last dims contiguous; rank 1..512, both
/// together 1..576) go to slot slots[t] = page * page_size + offset (int32 or int64 [tokens]); a negative slot is
/// skipped. latent_pages [num_pages, page_size, rank + 4 * groups + 2 * turned] (uint8 or float8_e4m3fn): a group's
/// scale is its largest magnitude over 448, at least 2^-126, and the key is rounded to bfloat16. latent_pages
/// [num_pages, page_size, rank + turned]: `latent_scale` is read. An element is x / scale, rounded to nearest even and
/// bounded to +-448; NaN stays NaN and leaves the scale alone. A slot past the last page: InvalidArgument where slots
/// are on the host, skipped on a GPU.
FK_API void latent_append(const TensorView& latent, const TensorView& key, const TensorView& latent_pages,
                          const TensorView& slots, const TensorView& latent_scale = {},
                          const ExecutionContext& context = {});

}  // namespace flashkernel
