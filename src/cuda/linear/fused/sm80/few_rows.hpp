// fused_linear for up to 4 rows (decode) on 8.0 and later: the functions that its rows in cuda/kernels.cpp name, and
// how a call is cut into blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/host/ceil_div.hpp"
#include "ops/fused_linear_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda::sm80 {

inline constexpr int kFusedMostRows = 4;            // columns of mma.sync, each of which has half of its k
inline constexpr int kFusedChunk = 32;              // of k: what a warp multiplies at a time
inline constexpr int kFusedMostShared = 96 * 1024;  // a block's, of the 99 KB that every GPU from 8.0 on has

/// Of a block's `warps` warps each keeps `chunks` chunks of k in registers. The block walks `tiles` tiles of 8 rows of
/// the weight.
struct FusedFewRowsPlan {
  int warps = 4, chunks = 16, tiles = 1;
};

/// Bytes of x's rows in shared memory: 32 more than they are long, so that
/// neighbours lie in other banks.
inline std::int64_t fused_x_pitch(std::int64_t k) { return 2 * k + 32; }
inline std::int64_t fused_shared_bytes(const FusedLinearParams& p) {
  const std::int64_t norms = (p.norm_weight ? 1 : 0) + (p.norm_bias ? 1 : 0);
  return p.rows * fused_x_pitch(p.in_features) + 4 * norms * p.in_features;
}
/// Tiles of 8 rows of the weight: 4 of the gate and 4 of up where there is one.
inline std::int64_t fused_tiles(const FusedLinearParams& p) { return ceil_div(p.out_features, p.gated ? 4 : 8); }

/// Short k leaves room for more blocks, a long one wants more warps. A block walks some tiles where there are more than
/// run at once: with one each, the blocks' beginnings and ends cost as much as the weights.
inline FusedFewRowsPlan plan_fused_few_rows(const FusedLinearParams& p, int num_sms) {
  FusedFewRowsPlan plan;
  const std::int64_t chunks = p.in_features / kFusedChunk;
  plan.warps = chunks <= 64 ? 4 : 8;
  plan.chunks = chunks <= 32 ? 8 : 16;
  constexpr std::int64_t kMostTiles = 4, kBlocksPerSm = 4;
  plan.tiles = static_cast<int>(
      std::clamp<std::int64_t>(ceil_div(fused_tiles(p), kBlocksPerSm * std::max(num_sms, 1)), 1, kMostTiles));
  return plan;
}

/// Where layers of these ops were faster than of the ops one after the other on an H200
/// (lab/notebooks/linear_fused.md): one row, and few weights. Longer streams come faster through linear's kernels.
inline bool is_fused_best(const FusedLinearParams& p) {
  constexpr std::int64_t kMostNumbers = std::int64_t{1} << 24, kMostNumbersOfShortK = std::int64_t{1} << 25;
  const std::int64_t numbers = p.in_features * p.weight_rows();
  return p.rows <= 1 && numbers <= (p.in_features <= 2048 ? kMostNumbersOfShortK : kMostNumbers);
}

inline Plan plan_of_fused_few_rows(const FusedLinearParams& p, const DeviceFacts& facts) {
  return Plan::of(plan_fused_few_rows(p, facts.num_sms));
}

template <DType kDtype>
Verdict fused_few_rows_supports(const FusedLinearParams& p) {
  if (p.dtype != kDtype) return "it is built for another dtype";
  if (p.rows > kFusedMostRows) return "it takes at most 4 rows";
  if (p.in_features > (1 << 20) || p.out_features > (1 << 28)) return "in_features is over 2^20, or out_features 2^28";
  if (p.in_features == 0 || p.in_features % kFusedChunk != 0 || p.stride_weight_in != 1)
    return "it takes weights along in_features, a multiple of 32";
  const auto aligned = [](const void* data, std::int64_t stride) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
  };
  if (!aligned(p.x, p.rows > 1 ? p.stride_x_row : 0) || !aligned(p.weight, p.stride_weight_out))
    return "rows of x and weight must start at multiples of 16 bytes";
  if (fused_shared_bytes(p) > kFusedMostShared) return "the rows of x, and the norm's weight, are over 96 KB";
  return Verdict::ok();
}

void fused_few_rows(const FusedLinearParams&, const Plan&, void* workspace, Stream);

}  // namespace flashkernel::cuda::sm80
