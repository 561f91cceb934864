// Attention of sequences that begin with the same tokens: the pages of a common prefix are read once for all of them.
#pragma once

#include "flashkernel/attention.hpp"

namespace flashkernel {

/// Attention over pages of sequences in groups, each of which has one prefix in common. Every query sees all keys of
/// its group's prefix, then those of its own sequence: one softmax over both.
/// - q, k_pages, v_pages, cu_seqlens_q, max_seqlen_q, out, lse: as in `attention_paged`. Rows of q lie at one stride:
///   of q [batch, heads_q, seq_q, head_dim] with more than one query, seq lies next to batch in memory
/// - prefix_table int32 [groups, max_prefix_pages]: pages of each prefix
/// - prefix_lens int32 or int64 [groups]: tokens of each prefix; any number, 0 too
/// - cu_prefix_q int32 or int64 [groups + 1]: which rows of q (batch * seq_q, or total_q of them, in order) each group
///   has: 0 first, never decreasing, the number of rows last; may be absent where there is one group. The queries of a
///   sequence belong to one group
/// - block_table, seq_lens: as in `attention_paged`, of what follows the prefix, the new keys included
/// - options: causal, softcap, scale, sinks, check_pages and kv_scales are taken. With `causal` a sequence has at least
///   as many keys of its own as queries
///
/// `explain` tells of the part over the prefixes. A kernel is a candidate if it takes both parts.
FK_API void attention_cascade(const TensorView& q, const TensorView& k_pages, const TensorView& v_pages,
                              const TensorView& prefix_table, const TensorView& prefix_lens,
                              const TensorView& cu_prefix_q, const TensorView& block_table, const TensorView& seq_lens,
                              const TensorView& cu_seqlens_q, std::int64_t max_seqlen_q, const TensorView& out,
                              const TensorView& lse, const AttentionOptions& options = {},
                              const ExecutionContext& context = {});

}  // namespace flashkernel
