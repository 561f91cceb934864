// What a row of the table says about attention_fp8 by way of 16 bits: the row of a kernel for the output's dtype,
// behind the kernel that widens queries, keys and values into the workspace (float8.cu).
#pragma once

#include "cuda/costs.hpp"
#include "flashkernel/stream.hpp"
#include "ops/attention_fp8_params.hpp"
#include "ops/kernel_entry.hpp"
#include "cuda/attention/widened/variant.hpp"

namespace flashkernel::cuda {

/// The numbers of a call in the workspace, in the dtype of its output.
struct Float8Workspace {
  WidenedOperands widened;
  void *q, *k, *v;

  Float8Workspace(const Float8AttentionParams& p, void* workspace) : widened(p.attention, p.dtype_out) {
    auto* const at = static_cast<unsigned char*>(workspace);
    q = at;
    k = at + widened.q_bytes();
    v = at + widened.q_bytes() + widened.k_bytes();
  }
  std::size_t bytes() const { return widened.q_bytes() + widened.k_bytes() + widened.v_bytes(); }
  AttentionParams call(const Float8AttentionParams& p) const { return widened.call(p.attention, q, k, v); }
};

void widen_float8(const Float8AttentionParams& params, const Float8Workspace& to, Stream stream);

template <DType kDtype, Verdict (*kInner)(const AttentionParams&)>
Verdict attention_fp8_widened_supports(const Float8AttentionParams& p) {
  if (kDtype != DType::kFloat32 && p.dtype_out != kDtype) return "it is built for another dtype of the output";
  const Float8Workspace to(p, reinterpret_cast<void*>(256));  // an address that tensor maps take
  if (to.bytes() > kMostWidenedBytes) return "there are too many elements to be widened";
  return kInner(to.call(p));
}

/// Two launches, the elements, and what the kernel behind takes.
template <RowFunctions<AttentionParams>::Cost kInner>
float attention_fp8_widened_cost_us(const Float8AttentionParams& p, const DeviceFacts& facts) {
  const Float8Workspace to(p, nullptr);
  return static_cast<float>(kInner(to.call(p), facts) + kLaunchUs + static_cast<double>(to.bytes()) / 2 / kWidenRate);
}

inline std::size_t attention_fp8_widened_workspace(const Float8AttentionParams& p) {
  return Float8Workspace(p, nullptr).bytes();
}

template <void (*kInner)(const AttentionParams&, void*, Stream)>
void attention_fp8_widened(const Float8AttentionParams& p, void* workspace, Stream stream) {
  const Float8Workspace to(p, workspace);
  widen_float8(p, to, stream);
  kInner(to.call(p), nullptr, stream);
}

}  // namespace flashkernel::cuda
