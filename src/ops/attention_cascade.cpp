// Front door of attention_cascade: paged attention over common prefixes, over what follows them, and the union of both.
// The queries of a group are those of one sequence for the first part, so that kernels which share a key among queries
// read a prefix once. Called by users and by the bindings. Invariant: an error leaves out and lse untouched.
// Sources: Juravsky et al., Hydragen (2024); Ye et al., FlashInfer (2025).
#include "flashkernel/attention_cascade.hpp"

#include <algorithm>
#include <cstddef>

#include "ops/attention_check.hpp"
#include "ops/page_table.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

constexpr PagedNames kPrefixNames{"prefix_table", "prefix_lens"};

// What would change what a query sees of its prefix, or where it stands.
void check_options_taken(const Checker& check, const AttentionOptions& options) {
  const char* const needed = "; it is for attention_paged: a prefix is seen as a whole";
  if (options.window_left != -1 || options.window_right != -1) check.fail(std::string("a window is given") + needed);
  if (options.mask.defined()) check.fail(std::string("mask is given") + needed);
  for (const NamedView& other :
       {NamedView{"alibi_slopes", options.alibi_slopes}, NamedView{"k_starts", options.k_starts}})
    if (other.view.defined()) check.fail(std::string(other.name) + " are given" + needed);
}

// The rows of q in the order of sequences: how many, and the elements between two.
struct Rows {
  std::int64_t count, stride;
};
Rows rows_of(const Checker& check, const AttentionParams& p) {
  if (p.is_varlen_q()) return {p.total_q, p.stride_q_token};
  if (p.seq_q == 1) return {p.batch, p.stride_q_batch};
  if (p.batch > 1 && p.stride_q_batch != p.seq_q * p.stride_q_token)
    check.fail("q's strides of batch and seq are " + std::to_string(p.stride_q_batch) + " and " +
               std::to_string(p.stride_q_token) + " elements; rows at one stride are needed: pass a transposed " +
               "[batch, seq_q, heads_q, head_dim], or cu_seqlens_q");
  return {p.batch * p.seq_q, p.stride_q_token};
}

// Where each group's rows begin; returns the most rows of one.
std::int64_t check_groups(const Checker& check, const TensorView& cu_prefix_q, std::int64_t rows, IndexCopies& copies,
                          AttentionParams& p) {
  if (!cu_prefix_q.defined()) {
    if (p.batch != 1)
      check.fail("prefix_table.shape[0]=" + std::to_string(p.batch) +
                 " and cu_prefix_q is absent; it says which rows of q each prefix is for, unless there is one prefix");
    return rows;
  }
  p.cu_seqlens_q = check.index_array("cu_prefix_q", cu_prefix_q, p.batch + 1, copies);
  p.total_q = rows;
  if (!check.device().is_cpu()) return rows;
  const auto fail = [&](std::int64_t g, const std::string& needed) {
    check.fail("cu_prefix_q[" + std::to_string(g) + "]=" + std::to_string(p.cu_seqlens_q[g]) + "; " + needed);
  };
  if (p.cu_seqlens_q[0] != 0) fail(0, "the first group's rows start at 0");
  std::int64_t most = 0;
  for (std::int64_t g = 0; g < p.batch; ++g) {
    const std::int64_t count = p.cu_seqlens_q[g + 1] - p.cu_seqlens_q[g];
    if (count < 0) fail(g + 1, "the starts of groups must not decrease");
    most = std::max(most, count);
  }
  if (p.cu_seqlens_q[p.batch] != rows) fail(p.batch, "q has " + std::to_string(rows) + " rows, and groups end there");
  return most;
}

// The call over the prefixes: a group is a sequence whose queries are all of its rows. Where the results go is not
// said.
AttentionParams prefix_params(const Checker& check, const AttentionParams& own, const TensorView& prefix_table,
                              const TensorView& prefix_lens, const TensorView& cu_prefix_q, Rows rows,
                              IndexCopies& copies) {
  AttentionParams p = own;
  check.dtype("prefix_table", prefix_table, DType::kInt32);
  check.ndim("prefix_table", prefix_table, 2, 2);
  check.last_dim_contiguous("prefix_table", prefix_table);
  p.batch = prefix_table.shape[0];
  p.cu_seqlens_q = {};
  p.total_q = 0;
  p.stride_q_batch = 0;
  p.stride_q_token = rows.stride;
  p.seq_lens = check.index_array("prefix_lens", prefix_lens, p.batch, copies);
  set_block_table(prefix_table, p);
  check_lengths(check, p, kPrefixNames);
  p.seq_q = check_groups(check, cu_prefix_q, rows.count, copies, p);
  p.causal = false;
  p.window_right = -1;
  p.sinks = nullptr;  // joins the denominator once: with a sequence's own keys
  check_page_ids(check, copies, p, kPrefixNames);
  return p;
}

void check_causal(const Checker& check, const AttentionParams& p) {
  if (!p.causal || !check.device().is_cpu()) return;
  for (std::int64_t b = 0; b < p.batch; ++b)
    if (p.k_length(b) < p.q_length(b))
      check.fail("seq_lens[" + std::to_string(b) + "]=" + std::to_string(p.k_length(b)) + " but the sequence has " +
                 std::to_string(p.q_length(b)) + " queries; with causal it has a key of its own for each");
}

void check_tables(const TensorView& table, const TensorView& lengths, const AttentionParams& p, IndexCopies& copies,
                  const ExecutionContext& context) {
  FindBadPageParams params =
      page_table_params(Checker("check_block_table", table.device), table, lengths, p.num_pages, p.page_size, copies);
  params.seq_q = p.seq_q;
  params.cu_seqlens_q = p.cu_seqlens_q;
  check_page_table(params, context);
}

// Of both parts together: each row of the table was asked about both.
Explanation explanation_of(const AttentionParams& prefix, const AttentionParams& own, std::size_t workspace_bytes,
                           const ExecutionContext& context) {
  Explanation first, second;
  ExecutionContext asking = context;
  asking.explain = &first;
  dispatch(prefix, prefix.device, asking);
  asking.explain = &second;
  dispatch(own, own.device, asking);
  for (std::size_t i = 0; i < first.candidates.size(); ++i) {
    KernelVerdict& both = first.candidates[i];
    const KernelVerdict& other = second.candidates[i];
    both.modelled_us = both.accepted && other.accepted ? both.modelled_us + other.modelled_us : 0;
    if (both.accepted && !other.accepted) both.accepted = false, both.reason = other.reason;
  }
  if (second.kernel.empty()) first.kernel.clear();
  first.workspace_bytes = std::max(first.workspace_bytes, second.workspace_bytes) + workspace_bytes;
  first.modelled_us += second.modelled_us;
  return first;
}

}  // namespace

void attention_cascade(const TensorView& q, const TensorView& k_pages, const TensorView& v_pages,
                       const TensorView& prefix_table, const TensorView& prefix_lens, const TensorView& cu_prefix_q,
                       const TensorView& block_table, const TensorView& seq_lens, const TensorView& cu_seqlens_q,
                       std::int64_t max_seqlen_q, const TensorView& out, const TensorView& lse,
                       const AttentionOptions& options, const ExecutionContext& context) {
  const Checker check("attention_cascade", q.device);
  AttentionParams own;
  IndexCopies copies(check.device());
  check_paged(check, q, k_pages, v_pages, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, out, lse,
              options.kv_scales, copies, own);
  check_options_taken(check, options);
  check_options(check, options, own);
  for (const auto& [name, view] : {NamedView{"out", out}, NamedView{"lse", lse}})
    check.apart(name, view,
                {{"sinks", options.sinks},
                 {"k_scales", options.kv_scales.k},
                 {"v_scales", options.kv_scales.v},
                 {"prefix_table", prefix_table},
                 {"prefix_lens", prefix_lens},
                 {"cu_prefix_q", cu_prefix_q}});
  check_page_ids(check, copies, own);
  check_causal(check, own);
  const Rows rows = rows_of(check, own);
  AttentionParams prefix = prefix_params(check, own, prefix_table, prefix_lens, cu_prefix_q, rows, copies);

  // Workspace: results over the prefixes, [rows, heads_q, head_dim_v], their LSE [rows, heads_q], and the LSE over own
  // keys where the caller does not ask for one.
  const std::int64_t heads = own.heads_q, dim = own.head_dim_v, count = rows.count * heads;
  const auto lse_bytes = static_cast<std::size_t>(count) * sizeof(float);
  const std::size_t out_bytes =
      (static_cast<std::size_t>(count * dim) * static_cast<std::size_t>(dtype_bytes(out.dtype)) + 255) / 256 * 256;
  const std::size_t bytes = out_bytes + lse_bytes * (lse.defined() ? 1 : 2);
  prefix.stride_out_batch = 0;
  prefix.stride_out_token = heads * dim;
  prefix.stride_out_head = dim;
  prefix.stride_lse_batch = 0;
  prefix.stride_lse_token = heads;
  prefix.stride_lse_head = 1;
  if (context.explain) {
    *context.explain = explanation_of(prefix, own, bytes, context);
    return;
  }
  if (options.check_pages && own.device.is_cuda()) {
    check_tables(block_table, seq_lens, own, copies, context);
    check_tables(prefix_table, prefix_lens, prefix, copies, context);
  }
  if (out.numel() == 0) return;
  const Workspace workspace(bytes, own.device, context);
  auto* const lses = reinterpret_cast<float*>(static_cast<unsigned char*>(workspace.data()) + out_bytes);
  prefix.out = workspace.data();
  prefix.lse = lses;

  // Both parts as [rows..., heads, dim] by the strides of each.
  const std::int64_t seq_q = own.is_varlen_q() ? rows.count : own.seq_q, batch = own.is_varlen_q() ? 1 : own.batch;
  const auto view = [&](void* data, DType dtype, std::int64_t of_batch, std::int64_t of_token, std::int64_t of_head,
                        bool with_dim) {
    return with_dim ? TensorView(data, dtype, {batch, seq_q, heads, dim}, {of_batch, of_token, of_head, 1}, own.device)
                    : TensorView(data, dtype, {batch, seq_q, heads}, {of_batch, of_token, of_head}, own.device);
  };
  if (!lse.defined()) {
    own.lse = lses + count;
    own.stride_lse_batch = seq_q * heads;
    own.stride_lse_token = heads;
    own.stride_lse_head = 1;
  }
  const TensorView own_out =
      view(out.data, out.dtype, own.stride_out_batch, own.stride_out_token, own.stride_out_head, true);
  const TensorView own_lse =
      view(own.lse, DType::kFloat32, own.stride_lse_batch, own.stride_lse_token, own.stride_lse_head, false);
  const TensorView prefix_out = view(prefix.out, out.dtype, seq_q * heads * dim, heads * dim, dim, true);
  const TensorView prefix_lse = view(prefix.lse, DType::kFloat32, seq_q * heads, heads, 1, false);
  dispatch(prefix, prefix.device, context);
  dispatch(own, own.device, context);
  merge_states(own_out, own_lse, prefix_out, prefix_lse, own_out, own_lse, context);
}

}  // namespace flashkernel
