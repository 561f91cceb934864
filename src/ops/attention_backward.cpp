// The front doors of attention's gradients: check every argument, fill the params, let the registry choose a kernel.
// Called by users and by the bindings. Invariant: an error leaves every gradient untouched.
#include <iterator>

#include "flashkernel/attention.hpp"
#include "ops/attention_check.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

// Strides of [batch, heads, seq, *] or [batch, heads, seq] (dense), [rows, heads, *] (variable-length, `rows_first`) or
// [heads, rows] (its lse).
void set_strides(const TensorView& view, int trailing, bool varlen, bool rows_first, std::int64_t* batch,
                 std::int64_t* head, std::int64_t* token) {
  if (varlen) {
    *batch = 0;
    *head = view.strides[rows_first ? 1 : 0];
    *token = view.strides[rows_first ? 0 : 1];
    return;
  }
  const TensorView full = with_leading_dims(view, 3 + trailing);
  *batch = full.strides[0];
  *head = full.strides[1];
  *token = full.strides[2];
}

void check_grad_bias(const Checker& check, const TensorView& grad, const TensorView& bias, AttentionBackwardParams& p) {
  if (!bias.defined()) check.fail("grad_bias is given but bias is absent; it is the gradient of a bias");
  check.floating("grad_bias", grad);
  if (grad.dtype != DType::kFloat32 && grad.dtype != bias.dtype)
    check.fail(std::string("grad_bias is ") + dtype_name(grad.dtype) + "; needs float32 or the bias's dtype, " +
               dtype_name(bias.dtype));
  check.same_shape("grad_bias", grad, "bias", bias);
  check.writable("grad_bias", grad);
  p.grad_bias = grad.data;
  p.grad_bias_dtype = grad.dtype;
  for (int d = 0; d < grad.ndim; ++d) {
    p.grad_bias_shape[4 - grad.ndim + d] = grad.shape[d];
    p.stride_grad_bias[4 - grad.ndim + d] = grad.strides[d];
  }
}

void check_and_run(const Checker& check, const TensorView& grad_out, const TensorView& q, const TensorView& k,
                   const TensorView& v, const TensorView& out, const TensorView& lse, const TensorView& grad_lse,
                   const AttentionGradients& gradients, const AttentionOptions& options, bool deterministic,
                   const ExecutionContext& context, AttentionBackwardParams& p) {
  check_options(check, options, p.forward);
  const bool varlen = p.forward.is_varlen_q();
  p.invariant = is_invariant_call(context);
  p.deterministic = deterministic || p.invariant;
  check_mirror(check, "grad_out", grad_out, "out", out);
  check.last_dim_contiguous("grad_out", grad_out);
  p.grad_out = grad_out.data;
  set_strides(grad_out, 1, varlen, true, &p.stride_grad_out_batch, &p.stride_grad_out_head, &p.stride_grad_out_token);
  if (grad_lse.defined()) {
    check_mirror(check, "grad_lse", grad_lse, "lse", lse);
    p.grad_lse = static_cast<const float*>(grad_lse.data);
    set_strides(grad_lse, 0, varlen, false, &p.stride_grad_lse_batch, &p.stride_grad_lse_head,
                &p.stride_grad_lse_token);
  }

  const auto gradient = [&](const char* name, const TensorView& view, const char* of_name, const TensorView& of,
                            void** data, std::int64_t* batch, std::int64_t* head, std::int64_t* token) {
    if (!view.defined()) return;
    check_mirror(check, name, view, of_name, of);
    check.last_dim_contiguous(name, view);
    check.writable(name, view);
    *data = view.data;
    set_strides(view, 1, varlen, true, batch, head, token);
  };
  gradient("grad_q", gradients.q, "q", q, &p.grad_q, &p.stride_grad_q_batch, &p.stride_grad_q_head,
           &p.stride_grad_q_token);
  gradient("grad_k", gradients.k, "k", k, &p.grad_k, &p.stride_grad_k_batch, &p.stride_grad_k_head,
           &p.stride_grad_k_token);
  gradient("grad_v", gradients.v, "v", v, &p.grad_v, &p.stride_grad_v_batch, &p.stride_grad_v_head,
           &p.stride_grad_v_token);
  if (gradients.bias.defined()) check_grad_bias(check, gradients.bias, options.bias, p);
  if (gradients.sinks.defined()) {
    if (!options.sinks.defined()) check.fail("grad_sinks is given but sinks is absent; it is the gradient of sinks");
    check_mirror(check, "grad_sinks", gradients.sinks, "sinks", options.sinks);
    check.contiguous("grad_sinks", gradients.sinks);
    p.grad_sinks = static_cast<float*>(gradients.sinks.data);
  }

  const NamedView written[] = {{"grad_q", gradients.q},
                               {"grad_k", gradients.k},
                               {"grad_v", gradients.v},
                               {"grad_bias", gradients.bias},
                               {"grad_sinks", gradients.sinks}};
  const NamedView read[] = {{"q", q},
                            {"k", k},
                            {"v", v},
                            {"out", out},
                            {"lse", lse},
                            {"grad_out", grad_out},
                            {"grad_lse", grad_lse},
                            {"bias", options.bias},
                            {"mask", options.mask},
                            {"block_mask", options.block_mask},
                            {"alibi_slopes", options.alibi_slopes},
                            {"sinks", options.sinks},
                            {"seqused_q", options.seqused_q},
                            {"seqused_k", options.seqused_k}};
  bool anything = false;
  for (std::size_t i = 0; i < std::size(written); ++i) {
    anything = anything || (written[i].view.defined() && written[i].view.numel() > 0);
    for (const NamedView& input : read) check.no_overlap(written[i].name, written[i].view, input.name, input.view);
    for (std::size_t j = 0; j < i; ++j)
      check.no_overlap(written[i].name, written[i].view, written[j].name, written[j].view);
  }
  if (!anything && !context.explain) return;
  dispatch(p, p.forward.device, context);
}

}  // namespace

void attention_backward(const TensorView& grad_out, const TensorView& q, const TensorView& k, const TensorView& v,
                        const TensorView& out, const TensorView& lse, const TensorView& grad_lse,
                        const AttentionGradients& gradients, const AttentionOptions& options, bool deterministic,
                        const ExecutionContext& context) {
  const Checker check("attention_backward", q.device);
  AttentionBackwardParams params;
  check_dense(check, q, k, v, out, lse, AttentionPass::kBackward, params.forward);
  check_and_run(check, grad_out, q, k, v, out, lse, grad_lse, gradients, options, deterministic, context, params);
}

void attention_varlen_backward(const TensorView& grad_out, const TensorView& q, const TensorView& k,
                               const TensorView& v, const TensorView& out, const TensorView& lse,
                               const TensorView& grad_lse, const TensorView& cu_seqlens_q,
                               const TensorView& cu_seqlens_k, std::int64_t max_seqlen_q, std::int64_t max_seqlen_k,
                               const AttentionGradients& gradients, const AttentionOptions& options, bool deterministic,
                               const ExecutionContext& context) {
  const Checker check("attention_varlen_backward", q.device);
  AttentionBackwardParams params;
  IndexCopies copies(check.device());
  check_varlen(check, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, out, lse,
               AttentionPass::kBackward, copies, params.forward);
  check_bounds(check, options, copies, params.forward);
  for (const NamedView& grad : {NamedView{"grad_q", gradients.q}, NamedView{"grad_k", gradients.k},
                                NamedView{"grad_v", gradients.v}, NamedView{"grad_sinks", gradients.sinks}})
    check.apart(grad.name, grad.view, {{"cu_seqlens_q", cu_seqlens_q}, {"cu_seqlens_k", cu_seqlens_k}});
  check_and_run(check, grad_out, q, k, v, out, lse, grad_lse, gradients, options, deterministic, context, params);
}

}  // namespace flashkernel
