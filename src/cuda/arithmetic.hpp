// The orders in which the CUDA rows add: rows of one op with the same name here give the same bits for the same call.
// A name belongs to a family of instances (its dtypes serve different calls) and, where a kernel is there in several
// variants that cut sums differently, to one variant: instances for other head dims have other tiles (`of_head_dims`).
#pragma once

#include <array>
#include <cstddef>

namespace flashkernel::cuda::arithmetic {

/// One kernel, whatever the call: its op's only row, or the plainest one.
inline constexpr const char* kGeneric = "generic";
/// Attention: keys one after the other, in tiles of a family's size.
inline constexpr const char* kNaive = "naive";
inline constexpr const char* kTiled = "tiled";
inline constexpr const char* kTiledSm75 = "tiled_sm75";
inline constexpr const char* kTiledSm80 = "tiled_sm80";
inline constexpr const char* kTiledShortSm80 = "tiled_short_sm80";
inline constexpr const char* kTiledSm80F32 = "tiled_sm80_f32";
inline constexpr const char* kTiledSm90a = "tiled_sm90a";
inline constexpr const char* kTiledScoredSm90a = "tiled_scored_sm90a";
inline constexpr const char* kTiledSparseSm90a = "tiled_sparse_sm90a";
/// The same over 8-bit pages that were rounded to the dtype of the queries before.
inline constexpr const char* kWidenedSm75 = "widened_sm75";
inline constexpr const char* kWidenedSm80 = "widened_sm80";
inline constexpr const char* kWidenedSm80F32 = "widened_sm80_f32";
inline constexpr const char* kWidenedSm90a = "widened_sm90a";
/// Attention of few queries: keys in parts, by the number of multiprocessors, which are merged.
inline constexpr const char* kSplit = "split";
inline constexpr const char* kSplitApartSm80 = "split_apart_sm80";
inline constexpr const char* kSplitWithinSm80 = "split_within_sm80";
inline constexpr const char* kSplitGroupSm90a = "split_group_sm90a";
inline constexpr const char* kSplitClustersSm90a = "split_clusters_sm90a";
inline constexpr const char* kSplitTilesSm90a = "split_tiles_sm90a";  // MLA: of 64 keys, parts by a second kernel
inline constexpr const char* kSplitRowsSm90a = "split_rows_sm90a";    // of all heads of a group in one tile
/// Linear: the order of its sums over in_features.
inline constexpr const char* kLanes = "lanes";  // of a warp, each every 32nd vector
inline constexpr const char* kLanesSm80 = "lanes_sm80";
inline constexpr const char* kDirectSm90a = "few_rows_direct";  // parts of a warp, one after the other
inline constexpr const char* kStreamSm90a = "few_rows_stream";
inline constexpr const char* kBlocksSm90a = "few_rows_blocks";  // parts of a cluster's blocks, in their order
inline constexpr const char* kTilesSm75 = "tiles_sm75";
inline constexpr const char* kTilesSm80 = "tiles_sm80";
inline constexpr const char* kTilesSm80F32 = "tiles_sm80_f32";
inline constexpr const char* kTilesSm90a = "tiles_sm90a";
inline constexpr const char* kWholeKSm90a = "tiles_whole_k_sm90a";      // k16 after k16, whatever the tile
inline constexpr const char* kClusterSm90a = "tiles_cluster_sm90a";     // k in as many parts as the cluster has blocks
inline constexpr const char* kSplitKSm90a = "tiles_split_k_sm90a";      // k in parts, by the number of multiprocessors
inline constexpr const char* kFusedSm80 = "fused_few_rows_sm80";        // chunks of a warp, one after the other
inline constexpr const char* kComposed = "composed";                    // of the ops that a call is made of
inline constexpr const char* kQuantizedSm80 = "quantized_blocks_sm80";  // of 32, each scaled; k in parts of a warp
inline constexpr const char* kFp8Sm90a = "fp8_sm90a";                   // 128 after 128, each scaled
inline constexpr const char* kFp8PartsSm90a = "fp8_parts_sm90a";        // the same in the parts of a cluster's blocks
inline constexpr const char* kDecodeStep = "decode_step_sm90a";  // k in parts of a warp, keys in parts of a block
/// Rows that a block holds, and rows that it reads twice.
inline constexpr const char* kHeldRow = "held_row";
inline constexpr const char* kWalkedRow = "walked_row";
/// Rows whose columns the blocks of a cluster share.
inline constexpr const char* kClusterOfARow = "cluster_of_a_row";
/// Sums of integers: no order matters.
inline constexpr const char* kIntegers = "integers";

template <const char* const& kFamily, int kQkDim, int kVDim>
constexpr std::array<char, 48> text_of_head_dims() {
  std::array<char, 48> text{};
  std::size_t end = 0;
  for (const char* at = kFamily; *at; ++at) text[end++] = *at;
  const auto add = [&](const char* before, int number) {
    for (; *before; ++before) text[end++] = *before;
    int digit = 1;
    while (digit <= number / 10) digit *= 10;
    for (; digit > 0; digit /= 10) text[end++] = static_cast<char>('0' + number / digit % 10);
  };
  add("_d", kQkDim);
  if (kVDim != kQkDim) add("_v", kVDim);
  return text;
}
template <const char* const& kFamily, int kQkDim, int kVDim>
inline constexpr std::array<char, 48> kTextOfHeadDims = text_of_head_dims<kFamily, kQkDim, kVDim>();
/// The name of a family's instance: "tiled_sm80_d128", or "tiled_sm80_d192_v128" where the head dim of values is
/// another one.
template <const char* const& kFamily, int kQkDim, int kVDim>
inline constexpr const char* of_head_dims = kTextOfHeadDims<kFamily, kQkDim, kVDim>.data();

}  // namespace flashkernel::cuda::arithmetic
