// MLA decoding on wgmma (9.0): which calls it takes. plan.hpp has the plan, kernel.cuh the kernel, instances/ compile
// it.
#pragma once

#include "cuda/attention/limits.hpp"
#include "cuda/attention/mla/sm90a/plan.hpp"
#include "cuda/attention/tensor_maps.hpp"
#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda::sm90a {

/// Pages in boxes of `rows` tokens by 64 columns.
inline TensorMapSpec mla_map(const AttentionParams& p, std::uint32_t rows) {
  return cuda::rows_map(p.k, p.dtype, kMlaDim, p.page_size, 1, p.num_pages, p.stride_k_token, p.stride_k_head,
                        p.stride_k_batch, rows);
}

inline Plan plan_of_mla_decode(const MlaDecodeParams& p, const DeviceFacts& device) {
  const MlaPlan plan = plan_mla_decode(p.attention, device);
  return Plan::of(plan, sizeof(float) * static_cast<std::size_t>(plan.partial_floats()));
}

/// kNarrow: of latent rows of 8 bits, which are rounded to kDtype.
template <DType kDtype, bool kNarrow>
Verdict mla_decode_supports(const MlaDecodeParams& params) {
  const AttentionParams& p = params.attention;
  if (params.format.is_narrow() != kNarrow)
    return kNarrow ? "it is for latent rows of 8 bits" : "it takes no latent rows of 8 bits";
  if ((kNarrow ? p.dtype_q : p.dtype) != kDtype) return "it is built for another dtype";
  if (p.head_dim != kMlaDim || p.head_dim_v != kMlaValueDim) return "it takes latent rows of 576 and values of 512";
  if (p.causal) return "it takes no causal mask: one query, or queries that see all keys";
  if (p.seq_q > kMlaRows) return "it takes at most 64 queries";
  if constexpr (kNarrow) {
    if (reinterpret_cast<std::uintptr_t>(p.k) % 16 != 0 || p.stride_k_batch % 16 != 0 || p.stride_k_token % 16 != 0)
      return "latent rows must start at multiples of 16 bytes";
  } else {
    if (p.page_size % 8 != 0) return "page_size must be a multiple of 8";
    if (p.num_pages > 0x7fffffff || !fits_tensor_map(mla_map(p, 8)))
      return "its copy engine needs latent rows at multiples of 16 bytes, and positive strides";
  }
  // The kernel counts in 32 bits: keys, and tiles of all sequences and groups.
  if (p.seq_k > kMostTokens || p.batch * p.heads_q * (p.seq_k / kMlaKeys + 1) >= std::int64_t{1} << 31)
    return "the call has more keys than it takes";
  return Verdict::ok();
}

/// Launches the kernels of an MlaPlan.
template <DType kDtype, bool kNarrow>
void mla_decode(const MlaDecodeParams& p, const Plan& plan, void* workspace, Stream stream);

}  // namespace flashkernel::cuda::sm90a
