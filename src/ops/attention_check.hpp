// The argument checks of the attention ops, shared by their front doors: views in, a filled AttentionParams out.
// Called by attention.cpp and attention_backward.cpp. Invariant: nothing is written through any view here, and index
// tensors (lengths, page tables) are read only where the host can read them.
#pragma once

#include "flashkernel/attention.hpp"
#include "ops/attention_params.hpp"
#include "ops/check.hpp"

namespace flashkernel {

/// Forward writes out and lse; backward reads them, and needs both. Forward of float8 has q, k and v of 8 bits, and out
/// of 16.
enum class AttentionPass { kForward, kBackward, kForwardFloat8 };

/// q, k, v, out, lse of a dense call (2 to 4 dims, all the same number).
void check_dense(const Checker& check, const TensorView& q, const TensorView& k, const TensorView& v,
                 const TensorView& out, const TensorView& lse, AttentionPass pass, AttentionParams& params);

/// The same for sequences side by side; `max_seqlen_*` are tightened to the longest length where the host can read it.
/// `copies` holds the lengths that the params point to.
void check_varlen(const Checker& check, const TensorView& q, const TensorView& k, const TensorView& v,
                  const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k, std::int64_t max_seqlen_q,
                  std::int64_t max_seqlen_k, const TensorView& out, const TensorView& lse, AttentionPass pass,
                  IndexCopies& copies, AttentionParams& params);

/// Keys and values in pages.
void check_paged(const Checker& check, const TensorView& q, const TensorView& k_pages, const TensorView& v_pages,
                 const TensorView& block_table, const TensorView& seq_lens, const TensorView& cu_seqlens_q,
                 std::int64_t max_seqlen_q, const TensorView& out, const TensorView& lse, const KvScales& scales,
                 IndexCopies& copies, AttentionParams& params);

/// The table of a paged call, checked before.
void set_block_table(const TensorView& block_table, AttentionParams& params);

/// What messages call a page table and the lengths of its rows.
struct PagedNames {
  const char* table = "block_table";
  const char* lengths = "seq_lens";
};

/// `seq_lens` of a paged call, where the host reads them, and the longest of them; after set_block_table.
void check_lengths(const Checker& check, AttentionParams& params, const PagedNames& names = {});

/// Per-sequence bounds of a paged or variable-length call: first keys, and tokens in use. Before check_options.
void check_bounds(const Checker& check, const AttentionOptions& options, IndexCopies& copies, AttentionParams& params);

/// Scale, softcap, masks, bias, slopes and sinks; after one of the above. `causal` is folded into the window, and a
/// window bound that hides nothing becomes -1, so that kernels need not tell it from "no mask".
void check_options(const Checker& check, const AttentionOptions& options, AttentionParams& params);

/// Where the host reads them, the page ids that some query may look at: those wholly before the window of a sequence's
/// first query, and past its last key, are free. After check_paged and check_options; the params then name a copy.
void check_page_ids(const Checker& check, IndexCopies& copies, AttentionParams& params, const PagedNames& names = {});

/// `view`'s shape is `like`'s, except that dim by dim nothing else is said: for gradients and tensors that mirror
/// another.
void check_mirror(const Checker& check, const char* name, const TensorView& view, const char* like_name,
                  const TensorView& like);

}  // namespace flashkernel
