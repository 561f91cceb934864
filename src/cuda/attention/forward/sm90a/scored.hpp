// What a row of the table says about an instance of the Hopper forward kernel for calls with an additive bias, ALiBi
// slopes or a packed mask. scored.cuh has the code, instances/scored_*.cu the instances.
#pragma once

#include "cuda/attention/forward/sm90a/variant.hpp"

namespace flashkernel::cuda::sm90a {

inline constexpr int kBiasBoxKeys = 32;  // of a box of bias: a line of 64 bytes

/// Where the bias of a call comes from: nowhere, boxes of the copy engine, or one row for all queries.
enum class BiasFrom : int { kNowhere, kTiles, kRow };

/// [batch, heads_q, seq_q, seq_k] in boxes of 64 queries by kBiasBoxKeys keys. Dims that broadcast have the extent 1.
inline TensorMapSpec bias_map(const AttentionParams& p) {
  const auto extent = [](std::int64_t size, std::int64_t stride) { return stride == 0 ? 1 : size; };
  return {p.bias.data,
          p.bias.dtype,
          4,
          {{p.seq_k, 1, kBiasBoxKeys},
           {p.seq_q, p.bias.stride_q, 64},
           {extent(p.heads_q, p.bias.stride_head), p.bias.stride_head, 1},
           {extent(p.batch, p.bias.stride_batch), p.bias.stride_batch, 1}},
          64};
}

inline BiasFrom bias_from(const AttentionParams& p) {
  if (!p.bias.data) return BiasFrom::kNowhere;
  return p.bias.stride_q == 0 ? BiasFrom::kRow : BiasFrom::kTiles;
}

template <DType kDtype, int kQkDim, int kVDim>
Verdict attention_fwd_scored_supports(const AttentionParams& p) {
  if (!p.bias.data && !p.mask.data && !p.alibi_slopes) return "it takes calls with a bias, ALiBi or a packed mask only";
  if (p.bias.data) {
    if (p.bias.dtype != kDtype) return "it takes a bias of q's dtype only";
    if (p.bias.stride_k != 1) return "keys of the bias must be contiguous";
    if (bias_from(p) == BiasFrom::kTiles && !fits_tensor_map(bias_map(p)))
      return "its copy engine needs a bias and rows of it at multiples of 16 bytes, and positive strides";
  }
  if (p.mask.data && p.is_paged()) return "it takes no packed mask over pages";
  if (p.mask.blocks.data) return "it takes no block mask";
  AttentionParams rest = p;
  rest.bias.data = rest.mask.data = nullptr;
  rest.alibi_slopes = nullptr;
  return attention_fwd_supports<kDtype, kQkDim, kVDim>(rest);
}

/// Launches the kernel: an entry of the table.
template <DType kDtype, int kQkDim, int kVDim>
void attention_fwd_scored(const AttentionParams& p, void* workspace, Stream stream);

}  // namespace flashkernel::cuda::sm90a
