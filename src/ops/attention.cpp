// The front doors of attention, forward: check every argument, fill the params, let the registry choose a kernel.
// Called by users and by the bindings. Invariant: an error leaves out and lse untouched.
#include "flashkernel/attention.hpp"

#include "ops/attention_check.hpp"
#include "ops/page_table.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

void check_written(const Checker& check, const TensorView& out, const TensorView& lse,
                   const AttentionOptions& options) {
  const std::initializer_list<NamedView> inputs = {{"bias", options.bias},
                                                   {"mask", options.mask},
                                                   {"block_mask", options.block_mask},
                                                   {"alibi_slopes", options.alibi_slopes},
                                                   {"sinks", options.sinks},
                                                   {"k_starts", options.k_starts},
                                                   {"seqused_q", options.seqused_q},
                                                   {"seqused_k", options.seqused_k},
                                                   {"k_scales", options.kv_scales.k},
                                                   {"v_scales", options.kv_scales.v}};
  check.apart("out", out, inputs);
  check.apart("lse", lse, inputs);
}

// No query: nothing to write. No key still writes zeros and -inf, which is the kernel's part.
void run(const AttentionParams& params, const TensorView& out, const ExecutionContext& context) {
  if (out.numel() == 0 && !context.explain) return;
  dispatch(params, params.device, context);
}

}  // namespace

void attention(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out,
               const TensorView& lse, const AttentionOptions& options, const ExecutionContext& context) {
  const Checker check("attention", q.device);
  AttentionParams params;
  check_dense(check, q, k, v, out, lse, AttentionPass::kForward, params);
  check_options(check, options, params);
  check_written(check, out, lse, options);
  run(params, out, context);
}

void attention_varlen(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& cu_seqlens_q,
                      const TensorView& cu_seqlens_k, std::int64_t max_seqlen_q, std::int64_t max_seqlen_k,
                      const TensorView& out, const TensorView& lse, const AttentionOptions& options,
                      const ExecutionContext& context) {
  const Checker check("attention_varlen", q.device);
  AttentionParams params;
  IndexCopies copies(check.device());
  check_varlen(check, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, out, lse,
               AttentionPass::kForward, copies, params);
  check_bounds(check, options, copies, params);
  check_options(check, options, params);
  check_written(check, out, lse, options);
  run(params, out, context);
}

void attention_paged(const TensorView& q, const TensorView& k_pages, const TensorView& v_pages,
                     const TensorView& block_table, const TensorView& seq_lens, const TensorView& cu_seqlens_q,
                     std::int64_t max_seqlen_q, const TensorView& out, const TensorView& lse,
                     const AttentionOptions& options, const ExecutionContext& context) {
  const Checker check("attention_paged", q.device);
  AttentionParams params;
  IndexCopies copies(check.device());
  check_paged(check, q, k_pages, v_pages, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, out, lse,
              options.kv_scales, copies, params);
  check_bounds(check, options, copies, params);
  check_options(check, options, params);
  check_written(check, out, lse, options);
  check_page_ids(check, copies, params);
  if (options.check_pages && params.device.is_cuda() && !context.explain) {
    FindBadPageParams table = page_table_params(Checker("check_block_table", block_table.device), block_table, seq_lens,
                                                params.num_pages, params.page_size, copies);
    table.window_left = params.window_left;
    table.seq_q = params.seq_q;
    table.cu_seqlens_q = params.cu_seqlens_q;
    table.k_starts = params.k_starts;
    check_page_table(table, context);
  }
  run(params, out, context);
}

}  // namespace flashkernel
