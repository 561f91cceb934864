// What a plan says, in words and numbers: the part of a golden record behind a kernel's id.
#pragma once

#include <initializer_list>
#include <string>

#include "cuda/attention/decode/sm80/variant.hpp"
#include "cuda/attention/decode/sm90a/variant.hpp"
#include "cuda/attention/few_queries/sm90a/plan.hpp"
#include "cuda/linear/few_rows/sm90a/plan.hpp"
#include "cuda/linear/tiles/sm90a/plan.hpp"
#include "ops/op_list.hpp"
#include "ops/plan.hpp"

namespace flashkernel::choices {

inline std::string numbers(std::initializer_list<std::int64_t> values) {
  std::string text = "#";
  for (const std::int64_t value : values) text += std::to_string(value) + ".";
  return text;
}

inline bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

/// Whether a plan has something to say beyond the kernel's id.
inline bool says_more(const std::string& kernel) {
  for (const char* const family : {"linear/cuda/sm90a/", "attention_fwd/cuda/sm90a/decode/",
                                   "attention_fwd/cuda/sm90a/few_queries/", "attention_fwd/cuda/sm80/decode"})
    if (kernel.rfind(family, 0) == 0) return true;
  return false;
}

template <class Params>
std::string detail_text(const Params&, const std::string&, const Plan&) {
  return "";
}
inline std::string detail_text(const AttentionParams&, const std::string& kernel, const Plan& plan) {
  using namespace cuda::sm90a;
  if (ends_with(kernel, "/group")) {
    const auto& g = plan.as<GroupPlan>();
    return numbers({g.blocks, g.rows, g.log2_box, g.log2_page});
  }
  if (ends_with(kernel, "/apart") || ends_with(kernel, "/within")) {
    const auto& d = plan.as<cuda::sm80::DecodePlan>();
    return numbers({d.blocks, d.warps, d.heads, d.key_lanes, d.head_groups, d.rows, d.shared_bytes, d.combine_items,
                    d.combine_by_pair, d.modified, d.vectors_q, d.vectors_out});
  }
  if (kernel.find("/few_queries/") != std::string::npos) {
    const auto& few = plan.as<FewQueriesPlan>();
    return numbers({few.consumers, few.splits, few.tiles, few.group, few.leaves});
  }
  if (!ends_with(kernel, "/clusters")) return "";
  const auto& c = plan.as<ClusterPlan>();
  return numbers({c.blocks, c.log2_blocks, c.groups, c.parts, c.rows, c.tiles, c.log2_granules_of_page, c.wide,
                  c.shared, c.pieces, c.late, c.leaves});
}
inline std::string detail_text(const LinearParams&, const std::string& kernel, const Plan& plan) {
  using namespace cuda::sm90a;
  if (ends_with(kernel, "/few_rows/direct")) {
    const auto& direct = plan.as<FewRowsDirectPlan>();
    return numbers({direct.tiles, direct.chunks});
  }
  if (ends_with(kernel, "/few_rows/stream")) return numbers({plan.as<FewRowsStreamPlan>().blocks});
  if (ends_with(kernel, "/few_rows/blocks")) {
    const auto& blocks = plan.as<FewRowsBlocksPlan>();
    return numbers({blocks.splits, blocks.blocks_per_sm, blocks.block_features, blocks.line_pairs});
  }
  if (kernel.find("/large/") == std::string::npos) return "";
  const auto& gemm = plan.as<GemmPlan>();
  return numbers({static_cast<int>(gemm.variant), gemm.parts});
}

}  // namespace flashkernel::choices
