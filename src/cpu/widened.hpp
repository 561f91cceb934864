// Attention over 4-bit pages on the CPU: keys and values are widened to the dtype of the queries, some sequences at a
// time, and a kernel for pages of that dtype runs over them. Rows are in kernels.cpp, one for each such kernel.
#pragma once

#include <algorithm>
#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/widened_plan.hpp"

namespace flashkernel::cpu {

/// Widens the keys and values that `call`, of `plan.sequences` sequences at most, may see; writes its table and
/// lengths.
void widen_pages(const AttentionParams& call, const WidenedPlan& plan, const WidenedPages& pages);

inline Verdict widened_supports(const AttentionParams& p) {
  if (!p.quantization.packed) return "it is for pages of 4-bit elements";
  if (plan_widened(p).workspace_bytes(p.heads_kv) > kMostWidenedBytes)
    return "a sequence's keys are too many to be widened";
  return Verdict::ok();
}

inline std::size_t own_bytes(const WidenedPlan& plan, std::int64_t heads_kv) {
  return (plan.workspace_bytes(heads_kv) + 4095) / 4096 * 4096;
}

template <std::size_t (*kInnerBytes)(const AttentionParams&)>
std::size_t widened_workspace(const AttentionParams& p) {
  const WidenedPlan plan = plan_widened(p);
  const AttentionParams call = sequences_of(p, 0, std::min(plan.sequences, p.batch));
  return own_bytes(plan, p.heads_kv) + kInnerBytes(over_widened(call, plan, WidenedPages(plan, p.heads_kv, nullptr)));
}

template <void (*kInner)(const AttentionParams&, void*, Stream)>
void attention_widened(const AttentionParams& p, void* workspace, Stream stream) {
  const WidenedPlan plan = plan_widened(p);
  const WidenedPages pages(plan, p.heads_kv, workspace);
  void* const rest = static_cast<unsigned char*>(workspace) + own_bytes(plan, p.heads_kv);
  for (std::int64_t first = 0; first < p.batch; first += plan.sequences) {
    const AttentionParams call = sequences_of(p, first, std::min(plan.sequences, p.batch - first));
    widen_pages(call, plan, pages);
    kInner(over_widened(call, plan, pages), rest, stream);
  }
}

}  // namespace flashkernel::cpu
