// qkv_append for up to 4 rows (decode) on 8.0 and later: the functions that its rows in cuda/kernels.cpp name.
#pragma once

#include "cuda/linear/fused/sm80/few_rows.hpp"
#include "ops/qkv_append_params.hpp"

namespace flashkernel::cuda::sm80 {

inline std::int64_t append_tiles(const QkvAppendParams& p) { return p.linear.out_features / 8; }

template <DType kDtype>
Verdict append_few_rows_supports(const QkvAppendParams& p) {
  constexpr std::int64_t kMostDim = 256;  // its frequencies are a kernel's argument
  const std::int64_t dim = p.append.pages.head_dim;
  if (p.append.pages.head_dim_v != dim || dim == 0 || dim % 8 != 0 || dim > kMostDim)
    return "it takes head dims that are multiples of 8, up to 256";
  if (p.append.has_rope && (p.append.rope.interleaved || p.append.rope.inverse || p.append.rope.rotary_dim != dim))
    return "it takes RoPE of whole heads, their halves as pairs";
  if (p.append.has_norm()) return "it norms no heads before it turns them";
  return fused_few_rows_supports<kDtype>(p.linear);
}

inline Plan plan_of_append_few_rows(const QkvAppendParams& p, const DeviceFacts& facts) {
  return plan_of_fused_few_rows(p.linear, facts);
}

void append_few_rows(const QkvAppendParams&, const Plan&, void* workspace, Stream);

}  // namespace flashkernel::cuda::sm80
