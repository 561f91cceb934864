// Front door of attention_fp8: checks every argument, fills the params, lets the registry choose a kernel.
// Called by users and by the bindings. Invariant: an error leaves out and lse untouched.
#include "flashkernel/attention_fp8.hpp"

#include "ops/attention_check.hpp"
#include "ops/attention_fp8_params.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

// One number on the host is read here; what lies on the op's device is left to the kernel.
HeadScale check_scale(const Checker& check, const char* name, const TensorView& scale, const AttentionParams& p) {
  if (!scale.defined()) return {};
  if (scale.device.is_cpu() && scale.ndim <= 2 && scale.numel() == 1) {
    Checker("attention_fp8", scale.device).dtype(name, scale, DType::kFloat32);
    return {*static_cast<const float*>(scale.data), nullptr, 0, 0};
  }
  check.dtype(name, scale, DType::kFloat32);
  check.ndim(name, scale, 0, 2);
  const std::int64_t full[2] = {p.batch, p.heads_kv};
  std::int64_t strides[2] = {0, 0};
  for (int d = 0; d < scale.ndim; ++d) {
    const int full_d = 2 - scale.ndim + d;
    if (scale.shape[d] != full[full_d] && scale.shape[d] != 1)
      check.fail(shape_text(name, scale, d) + "; needs 1 or " + std::to_string(full[full_d]) +
                 " to broadcast to [batch, heads_kv]");
    strides[full_d] = scale.shape[d] == 1 ? 0 : scale.strides[d];
  }
  return {1.0f, static_cast<const float*>(scale.data), strides[0], strides[1]};
}

}  // namespace

void attention_fp8(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& q_scale,
                   const TensorView& k_scale, const TensorView& v_scale, const TensorView& cu_seqlens_q,
                   const TensorView& cu_seqlens_k, std::int64_t max_seqlen_q, std::int64_t max_seqlen_k,
                   const TensorView& out, const TensorView& lse, const AttentionOptions& options,
                   const ExecutionContext& context) {
  const Checker check("attention_fp8", q.device);
  Float8AttentionParams params;
  AttentionParams& p = params.attention;
  IndexCopies copies(check.device());
  if (cu_seqlens_q.defined() != cu_seqlens_k.defined())
    check.fail(std::string(cu_seqlens_q.defined() ? "cu_seqlens_k" : "cu_seqlens_q") +
               " is absent; sequences side by side have both");
  if (cu_seqlens_q.defined())
    check_varlen(check, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, out, lse,
                 AttentionPass::kForwardFloat8, copies, p);
  else
    check_dense(check, q, k, v, out, lse, AttentionPass::kForwardFloat8, p);
  if (options.bias.defined()) check.fail("bias is given; it is for attention of wider elements");
  if (options.mask.defined()) check.fail("mask is given; it is for attention of wider elements");
  if (options.block_mask.defined()) check.fail("block_mask is given; it is for attention of wider elements");
  check_bounds(check, options, copies, p);
  check_options(check, options, p);
  params.dtype_out = out.dtype;
  params.q = check_scale(check, "q_scale", q_scale, p);
  params.k = check_scale(check, "k_scale", k_scale, p);
  params.v = check_scale(check, "v_scale", v_scale, p);
  const std::initializer_list<NamedView> inputs = {{"q_scale", q_scale},
                                                   {"k_scale", k_scale},
                                                   {"v_scale", v_scale},
                                                   {"alibi_slopes", options.alibi_slopes},
                                                   {"sinks", options.sinks},
                                                   {"seqused_q", options.seqused_q},
                                                   {"seqused_k", options.seqused_k}};
  check.apart("out", out, inputs);
  check.apart("lse", lse, inputs);
  if (out.numel() == 0 && !context.explain) return;
  dispatch(params, p.device, context);
}

}  // namespace flashkernel
