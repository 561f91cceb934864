// Multi-head latent attention (MLA): all query heads attend to one latent row a token, whose first columns are its
// value too.
#pragma once

#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

/// softmax(scale * q L^T) L[:, :head_dim_v] over a cache of latent rows in pages. q [batch, heads_q, seq_q, head_dim]
/// (float32, float16 or bfloat16; head_dim 1..576), latent_pages [num_pages, page_size, head_dim] (q's dtype),
/// block_table int32 [batch, max_pages], seq_lens int32 or int64 [batch] (keys of each sequence, those of the queries
/// included), out [batch, heads_q, seq_q, head_dim_v] (q's dtype; head_dim_v 1..512 and at most head_dim), lse fp32
/// [batch, heads_q, seq_q] (may be absent). `scale` multiplies scores; it has no default, because it follows from the
/// head dim before the latent. `causal`: query i stands at position i + seq_lens[b] - seq_q. A row that sees no key
/// gives output 0 and LSE -inf. `check_pages`, and what is allowed in table entries that are not used: as in
/// attention_paged. Last dims are contiguous.
FK_API void attention_mla_decode(const TensorView& q, const TensorView& latent_pages, const TensorView& block_table,
                                 const TensorView& seq_lens, const TensorView& out, const TensorView& lse, float scale,
                                 bool causal = false, bool check_pages = false, const ExecutionContext& context = {});

}  // namespace flashkernel
