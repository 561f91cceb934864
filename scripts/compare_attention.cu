// What scripts/compare_attention.py builds once for each source tree: the Hopper attention kernels of one op and
// head_dim behind a C function, without the registry. -DFLASHKERNEL_BACKWARD=0|1 -DFLASHKERNEL_DIM=64|96|128|...
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>

#if FLASHKERNEL_BACKWARD
#include "cuda/attention/backward/sm90a/kernel.cuh"
#else
#include "cuda/attention/forward/sm90a/kernel.cuh"
#endif

/// Tensors [batch, seq, heads, head_dim], contiguous; lse [batch, heads_q, seq], null: not wanted.
struct Call {
  void *q, *k, *v, *out, *lse, *grad_out, *grad_q, *grad_k, *grad_v, *workspace, *stream;
  std::int64_t batch, heads_q, heads_kv, seq, causal, deterministic, bfloat16;
};

namespace {

using namespace flashkernel;

constexpr int kDim = FLASHKERNEL_DIM;

AttentionParams forward_params(const Call& call) {
  AttentionParams p;
  p.dtype = p.dtype_q = call.bfloat16 ? DType::kBFloat16 : DType::kFloat16;
  p.device = Device::cuda(0);
  p.batch = call.batch, p.heads_q = call.heads_q, p.heads_kv = call.heads_kv;
  p.seq_q = p.seq_k = call.seq;
  p.head_dim = p.head_dim_v = kDim;
  p.q = call.q, p.k = call.k, p.v = call.v, p.out = call.out;
  p.lse = static_cast<float*>(call.lse);
  p.stride_q_head = p.stride_k_head = p.stride_v_head = p.stride_out_head = kDim;
  p.stride_q_token = p.stride_out_token = call.heads_q * kDim;
  p.stride_k_token = p.stride_v_token = call.heads_kv * kDim;
  p.stride_q_batch = p.stride_out_batch = call.seq * p.stride_q_token;
  p.stride_k_batch = p.stride_v_batch = call.seq * p.stride_k_token;
  p.stride_lse_token = 1, p.stride_lse_head = call.seq, p.stride_lse_batch = call.heads_q * call.seq;
  p.scale = 1.0f / std::sqrt(static_cast<float>(kDim));
  p.causal = call.causal;
  if (call.causal) p.window_right = 0;
  return p;
}

#if FLASHKERNEL_BACKWARD
AttentionBackwardParams backward_params(const Call& call) {
  AttentionBackwardParams p;
  const AttentionParams& f = p.forward = forward_params(call);
  p.grad_out = call.grad_out, p.grad_q = call.grad_q, p.grad_k = call.grad_k, p.grad_v = call.grad_v;
  p.stride_grad_out_batch = p.stride_grad_q_batch = f.stride_q_batch;
  p.stride_grad_out_token = p.stride_grad_q_token = f.stride_q_token;
  p.stride_grad_k_batch = p.stride_grad_v_batch = f.stride_k_batch;
  p.stride_grad_k_token = p.stride_grad_v_token = f.stride_k_token;
  p.stride_grad_out_head = p.stride_grad_q_head = p.stride_grad_k_head = p.stride_grad_v_head = kDim;
  p.deterministic = call.deterministic;
  return p;
}
#endif

template <class T>
void run(const Call& call) {
  Stream stream{};
  stream.handle = call.stream;
#if FLASHKERNEL_BACKWARD
  cuda::sm90a::attention_bwd<cuda::dtype_of<T>, kDim>(backward_params(call), call.workspace, stream);
#else
  cuda::sm90a::attention_fwd<cuda::dtype_of<T>, kDim>(forward_params(call), nullptr, stream);
#endif
}

}  // namespace

extern "C" __attribute__((visibility("default"))) std::int64_t workspace_bytes([[maybe_unused]] const Call* call) {
#if FLASHKERNEL_BACKWARD
  return static_cast<std::int64_t>(cuda::sm90a::attention_bwd_workspace<kDim>(backward_params(*call)));
#else
  return 0;
#endif
}

extern "C" __attribute__((visibility("default"))) int run_call(const Call* call) {
  try {
    call->bfloat16 ? run<__nv_bfloat16>(*call) : run<__half>(*call);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
