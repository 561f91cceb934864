// MLA decoding over latent rows of 8 bits on the CPU: rows are widened to the dtype of the queries, some sequences at a
// time, and a kernel for rows of that dtype runs over them. Rows are in kernels.cpp, one for each such kernel.
#pragma once

#include <algorithm>
#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/attention_mla_params.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/widened_plan.hpp"

namespace flashkernel::cpu {

/// Widens the rows of `call`, of `plan.sequences` sequences at most; writes its table and lengths.
void widen_latent(const MlaDecodeParams& call, const WidenedPlan& plan, const WidenedPages& pages);

inline Verdict plain_latent_supports(const MlaDecodeParams& p) {
  return p.format.is_narrow() ? Verdict("it takes no latent rows of 8 bits") : Verdict::ok();
}

/// Values are a part of the keys, and have no place of their own.
inline WidenedPlan plan_latent(const AttentionParams& p) {
  WidenedPlan plan = plan_widened(p);
  plan.dim_v = 0;
  return plan;
}
inline std::size_t latent_own_bytes(const WidenedPlan& plan) { return (plan.workspace_bytes(1) + 4095) / 4096 * 4096; }

inline Verdict widened_latent_supports(const MlaDecodeParams& p) {
  if (!p.format.is_narrow()) return "it is for latent rows of 8 bits";
  if (plan_latent(p.attention).workspace_bytes(1) > kMostWidenedBytes)
    return "a sequence's rows are too many to be widened";
  return Verdict::ok();
}

inline AttentionParams over_widened_latent(const AttentionParams& call, const WidenedPlan& plan,
                                           const WidenedPages& pages) {
  AttentionParams p = over_widened(call, plan, pages);
  p.v = p.k;
  p.stride_v_head = p.stride_k_head, p.stride_v_token = p.stride_k_token, p.stride_v_batch = p.stride_k_batch;
  return p;
}

template <std::size_t (*kInnerBytes)(const AttentionParams&)>
std::size_t widened_latent_workspace(const MlaDecodeParams& params) {
  const AttentionParams& p = params.attention;
  const WidenedPlan plan = plan_latent(p);
  const AttentionParams call = sequences_of(p, 0, std::min(plan.sequences, p.batch));
  return latent_own_bytes(plan) + kInnerBytes(over_widened_latent(call, plan, WidenedPages(plan, 1, nullptr)));
}

template <void (*kInner)(const AttentionParams&, void*, Stream)>
void latent_widened(const MlaDecodeParams& params, void* workspace, Stream stream) {
  const AttentionParams& p = params.attention;
  const WidenedPlan plan = plan_latent(p);
  const WidenedPages pages(plan, 1, workspace);
  void* const rest = static_cast<unsigned char*>(workspace) + latent_own_bytes(plan);
  for (std::int64_t first = 0; first < p.batch; first += plan.sequences) {
    MlaDecodeParams call = params;
    call.attention = sequences_of(p, first, std::min(plan.sequences, p.batch - first));
    widen_latent(call, plan, pages);
    kInner(over_widened_latent(call.attention, plan, pages), rest, stream);
  }
}

}  // namespace flashkernel::cpu
