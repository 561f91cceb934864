// quantized_linear for few rows (decode) on 8.0 and later: what its rows in cuda/kernels.cpp name, and how a call is
// cut. Host code; tests_cpp/quantized_few_rows_plan_test.cpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/host/ceil_div.hpp"
#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/quantized_linear_params.hpp"

namespace flashkernel::cuda::sm80 {

inline constexpr int kQuantizedChunk = 256;  // of k: what a warp has copied at a time
inline constexpr int kQuantizedChunkBlocks = kQuantizedChunk / static_cast<int>(quantized::kBlock);

/// Where a chunk of a weight's row lies in shared memory.
template <WeightFormat kFormat>
struct QuantizedRow {
  static constexpr int kBlockBytes = quantized::block_bytes(kFormat);
  static constexpr int kBytes = kQuantizedChunkBlocks * kBlockBytes;
  /// Bytes from row to row: the words that the lanes of a warp read at a time lie in different banks.
  static constexpr int kPitch = quantized::is_int8(kFormat) ? 288 : kFormat == WeightFormat::kQ4_1 ? 176 : 144;
  static_assert(kBytes <= kPitch && kBytes % 16 == 0 && kPitch % 16 == 0);
};

/// Rows of x of a block: 8 tokens8, and features: 16 frags. With more rows a warp has twice the features for what it
/// reads of x.
FK_HOST_DEVICE constexpr int quantized_frags(int tokens8) { return tokens8 == 1 ? 1 : 2; }
/// The most warps of a block. There are fewer with more sums, which are registers.
FK_HOST_DEVICE constexpr int quantized_most_warps(int tokens8) { return tokens8 == 1 ? 8 : 4; }
/// Chunks of a warp under way: about 9 KB of 4 bits, 14 of 8 bits; twice the features take nearly as much again.
FK_HOST_DEVICE constexpr int quantized_stages(WeightFormat format, int tokens8) {
  return (quantized::is_int8(format) ? 3 : 4) - (quantized_frags(tokens8) - 1);
}
FK_HOST_DEVICE constexpr int quantized_pitch(WeightFormat format) {
  switch (format) {
    case WeightFormat::kInt4: return QuantizedRow<WeightFormat::kInt4>::kPitch;
    case WeightFormat::kInt8: return QuantizedRow<WeightFormat::kInt8>::kPitch;
    case WeightFormat::kQ4_0: return QuantizedRow<WeightFormat::kQ4_0>::kPitch;
    case WeightFormat::kQ4_1: return QuantizedRow<WeightFormat::kQ4_1>::kPitch;
    case WeightFormat::kQ8_0: return QuantizedRow<WeightFormat::kQ8_0>::kPitch;
  }
  return 0;
}
/// Shared memory of a warp.
FK_HOST_DEVICE constexpr std::size_t quantized_warp_bytes(WeightFormat format, int tokens8) {
  return static_cast<std::size_t>(quantized_stages(format, tokens8) * 16 * quantized_frags(tokens8) *
                                  quantized_pitch(format));
}

/// Blocks of 8 tokens8 rows, whose `warps` split k.
struct QuantizedFewRowsPlan {
  int tokens8 = 1, warps = 2;
};

/// Blocks of up to 32 rows where each multiprocessor gets one, else of 8, which read the weight again (from L2). Then
/// the fewest warps a block that give each multiprocessor 12 of them, each with a long part of k: 2, 4 or 8, no more
/// than k has chunks, nor than shared memory holds.
inline QuantizedFewRowsPlan plan_quantized_few_rows(const QuantizedLinearParams& p, int num_sms,
                                                    std::size_t shared_bytes) {
  const auto blocks = [&](int tokens8) {
    return ceil_div(p.out_features, 16 * quantized_frags(tokens8)) * ceil_div(p.rows, 8 * tokens8);
  };
  QuantizedFewRowsPlan plan;
  plan.tokens8 = p.rows <= 8 ? 1 : p.rows <= 16 ? 2 : 4;
  if (10 * blocks(plan.tokens8) < 9 * num_sms) plan.tokens8 = 1;
  const std::int64_t chunks = ceil_div(p.in_features, kQuantizedChunk);
  while (plan.warps < quantized_most_warps(plan.tokens8) && plan.warps < chunks &&
         blocks(plan.tokens8) * plan.warps < 12 * num_sms &&
         2 * static_cast<std::size_t>(plan.warps) * quantized_warp_bytes(p.format, plan.tokens8) <= shared_bytes)
    plan.warps *= 2;
  return plan;
}

/// Rows of x and of the weight start at multiples of 16 bytes; groups are a power of two of blocks, or the whole row.
template <DType kDtype>
Verdict quantized_few_rows_supports(const QuantizedLinearParams& p) {
  constexpr std::int64_t kMostElements = std::int64_t{1} << 30;  // indices are 32-bit
  constexpr std::int64_t kMostRowBytes = std::int64_t{1} << 26;  // offsets within 32 rows too
  if (p.dtype != kDtype) return "it is built for another dtype";
  if (p.tiles) return "it takes no tiles of 16 rows";
  if (p.in_features > kMostElements || p.out_features > kMostElements || p.rows > kMostElements / 1024)
    return "in_features or out_features is over 2^30, or rows over 2^20";
  if (p.in_features % quantized::kBlock != 0) return "in_features must be a multiple of 32";
  if (p.stride_weight_row < 0 || p.stride_weight_row > kMostRowBytes) return "a row of weight is over 2^26 bytes";
  const auto aligned = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; };
  if (!aligned(p.x) || !aligned(p.weight) || (p.rows > 1 && p.stride_x_row % 8 != 0) ||
      (p.out_features > 1 && p.stride_weight_row % 16 != 0))
    return "rows of x and weight must start at multiples of 16 bytes";
  const std::int64_t blocks = p.group / quantized::kBlock;
  if (!quantized::is_gguf(p.format) && p.group != p.in_features && (blocks & (blocks - 1)) != 0)
    return "a group must be 32, 64, 128, ... elements, or the whole row";
  if (p.zeros && p.stride_zeros_row != p.stride_scales_row)
    return "rows of zeros must lie as far apart as those of scales";
  if (p.stride_scales_row < 0 || p.stride_scales_row * p.out_features > kMostElements) return "scales are over 2^30";
  return Verdict::ok();
}

template <DType kDtype>
void quantized_few_rows(const QuantizedLinearParams&, const Plan&, void* workspace, Stream);

}  // namespace flashkernel::cuda::sm80
