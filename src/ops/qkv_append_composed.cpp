// qkv_append as the ops that it stands for: the rows `qkv_append/cpu/composed` and `qkv_append/cuda/generic`.
#include "ops/qkv_append_params.hpp"
#include "ops/select.hpp"

namespace flashkernel {

Plan plan_composed_qkv_append(const QkvAppendParams& p, const DeviceFacts& facts) {
  return plan_composed_fused_linear(p.linear, facts);
}

void composed_qkv_append(const QkvAppendParams& p, const Plan& plan, void* workspace, Stream stream) {
  ExecutionContext context;
  context.stream = stream;
  context.invariant = plan.as<bool>();
  if (p.append.has_rope) {
    composed_fused_linear(p.linear, plan, workspace, stream);
  } else {  // nothing turns the queries on their way: their rows of the product go where they belong
    const std::int64_t queries = p.heads_q * p.append.pages.head_dim, size = dtype_bytes(p.linear.dtype);
    FusedLinearParams q = p.linear, kv = p.linear;
    q.out_features = queries;
    q.out = p.q_out;
    q.stride_out_row = p.stride_q_out_token;
    kv.out_features -= queries;
    kv.out = static_cast<char*>(kv.out) + queries * size;
    kv.weight = static_cast<const char*>(kv.weight) + queries * kv.stride_weight_out * size;
    if (kv.bias) kv.bias.data = static_cast<const char*>(kv.bias.data) + queries * dtype_bytes(kv.bias.dtype);
    if (queries > 0) composed_fused_linear(q, plan, workspace, stream);
    if (kv.out_features > 0) composed_fused_linear(kv, plan, workspace, stream);
  }
  dispatch(p.append, p.linear.device, context);
}

}  // namespace flashkernel
