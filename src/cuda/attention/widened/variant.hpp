// What a row of the table says about attention over widened pages: the row of a kernel for pages of the queries' dtype,
// behind the kernel that widens (widen.cu).
#pragma once

#include "cuda/attention/limits.hpp"
#include "cuda/costs.hpp"
#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/widened_plan.hpp"

namespace flashkernel::cuda {

/// Elements that are widened in a microsecond: three bytes each, read and written.
inline constexpr double kWidenRate = 1200000;

/// Widens the keys and values that `call`, of `plan.sequences` sequences at most, may see; writes its table and
/// lengths.
void widen_pages(const AttentionParams& call, const WidenedPlan& plan, const WidenedPages& pages, Stream stream);

template <DType kDtype, Verdict (*kInner)(const AttentionParams&)>
Verdict attention_widened_supports(const AttentionParams& p) {
  if (!p.quantization || !p.is_paged()) return "it is for pages of 8-bit and 4-bit elements";
  if (p.dtype_q != kDtype) return "it is built for another dtype of queries";
  const WidenedPlan plan = plan_widened(p);
  if (plan.workspace_bytes(p.heads_kv) > kMostWidenedBytes) return "a sequence's keys are too many to be widened";
  if (p.heads_kv > 0xffff || plan.sequences > 0xffff) return "the grid has no room for so many heads or sequences";
  return kInner(over_widened(p, plan, WidenedPages(plan, p.heads_kv, nullptr)));
}

/// Two launches for each time, the elements, and what the kernel behind takes.
template <RowFunctions<AttentionParams>::Cost kInner>
float attention_widened_cost_us(const AttentionParams& p, const DeviceFacts& facts) {
  const WidenedPlan plan = plan_widened(p);
  const double times = static_cast<double>((p.batch + plan.sequences - 1) / plan.sequences);
  const double elements = work::product(p.batch * p.heads_kv, p.seq_k) * static_cast<double>(p.head_dim + p.head_dim_v);
  return static_cast<float>(kInner(p, facts) + 2 * kLaunchUs * times + elements / kWidenRate);
}

inline Plan plan_attention_widened(const AttentionParams& p, const DeviceFacts&) {
  const WidenedPlan plan = plan_widened(p);
  return Plan::of(plan, plan.workspace_bytes(p.heads_kv));
}

template <void (*kInner)(const AttentionParams&, void*, Stream)>
void attention_widened(const AttentionParams& p, const Plan& made, void* workspace, Stream stream) {
  const auto& plan = made.as<WidenedPlan>();
  const WidenedPages pages(plan, p.heads_kv, workspace);
  for (std::int64_t first = 0; first < p.batch; first += plan.sequences) {
    const AttentionParams call = sequences_of(p, first, std::min(plan.sequences, p.batch - first));
    widen_pages(call, plan, pages, stream);
    kInner(over_widened(call, plan, pages), nullptr, stream);
  }
}

}  // namespace flashkernel::cuda
