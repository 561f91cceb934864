// attention_fp8 on the CPU: elements become fp32 numbers in the workspace, and a kernel of attention_fwd runs over
// them. Used by kernels.cpp; compiled for any processor.
#pragma once

#include <algorithm>
#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/attention_fp8_params.hpp"

namespace flashkernel::cpu {

/// The call that the kernel behind gets, over a workspace: q, k, v and its output in fp32, and what it takes itself.
struct Float8Over {
  WidenedOperands widened;
  AttentionParams call;
  void* rest;

  Float8Over(const Float8AttentionParams& p, void* workspace)
      : widened(p.attention, DType::kFloat32), call(p.attention) {
    auto* const q = static_cast<unsigned char*>(workspace);
    unsigned char* const k = q + widened.q_bytes();
    unsigned char* const v = k + widened.k_bytes();
    unsigned char* const out = v + widened.v_bytes();
    rest = out + widened.out_bytes();
    call = widened.call(call, q, k, v);
    call.out = out;
    call.stride_out_head = widened.pitch_v;
    call.stride_out_token = call.heads_q * widened.pitch_v;
    call.stride_out_batch = call.seq_q * call.stride_out_token;
  }
  std::size_t bytes() const { return widened.q_bytes() + widened.k_bytes() + widened.v_bytes() + widened.out_bytes(); }
};

/// Writes q, k and v of `over`.
void widen_float8(const Float8AttentionParams& params, const Float8Over& over);
/// Rounds the output of `over` to the call's.
void round_float8_output(const Float8AttentionParams& params, const Float8Over& over);

template <std::size_t (*kBytes)(const AttentionParams&)>
std::size_t attention_fp8_workspace(const Float8AttentionParams& params) {
  const Float8Over over(params, nullptr);
  return over.bytes() + kBytes(over.call);
}

template <void (*kLaunch)(const AttentionParams&, void*, Stream)>
void attention_fp8(const Float8AttentionParams& params, void* workspace, Stream stream) {
  const Float8Over over(params, workspace);
  widen_float8(params, over);
  kLaunch(over.call, over.rest, stream);
  round_float8_output(params, over);
}

}  // namespace flashkernel::cpu
