// Decode of 9 to 32 query heads a kv head by a cluster for each sequence and kv head (decode_group.cuh): which calls
// are, and how a call's clusters are made.
// Invariant: both follow from shapes and the device only, never from lengths, so that a captured graph replays with
// other lengths.
#pragma once

#include <algorithm>

#include "cuda/host/device.hpp"
#include "cuda/sm90a/attention_fwd.hpp"
#include "ops/attention_params.hpp"

namespace flashkernel::cuda::sm90a {

inline constexpr int kGroupRows = 32;                   // query heads of a kv head, 8 for each warp of a warpgroup
inline constexpr int kGroupKeys = 64;                   // of a tile
inline constexpr int kGroupWarpgroups = 2;              // of a block, which take its tiles in turn
inline constexpr int kMostGroupBlocks = 6;              // of a cluster
inline constexpr std::int64_t kMostGroupKeys = 262144;  // of all sequences and kv heads: 128 MB
// Of attention_decode.cuh's clusters: query heads that read a key once, and sequences where query heads are in parts.
inline constexpr std::int64_t kRowsOfOnePart = 16, kSequencesInParts = 32;

/// What the kernel is told.
struct GroupPlan {
  int blocks = 1;    // of a cluster
  int rows = 0;      // query heads of a kv head
  int log2_box = 0;  // keys that one copy brings: of one page, and of one tile
  int log2_page = 0;
};

/// Whether a call that the row accepts otherwise is for clusters of its groups. Measured on an H200, of 132
/// multiprocessors, beside attention_decode.cuh's clusters (docs/kernels/attention_decode.md):
/// - A cluster for each, all of them from the first moment: as many as there are multiprocessors at most.
/// - Clusters of kMostGroupBlocks have a third of the multiprocessors at least, which is from 8 on (8 x 4096 of 32/1
///   heads: 10.1 us for 13.1). Fewer would leave the device to blocks that read some 70 GB/s each.
/// - Up to 16 heads the other kernel reads each key once, too. It is behind where clusters are of 3 and more blocks,
///   three tenths of the multiprocessors (32 x 4096 of 16/1 heads: 22.8 us for 24.1), level where they are of two (of
///   32/2 heads: 37.8 us for 37.5), and has more blocks where they are few. In parts it takes 32 sequences.
/// - A sequence that alone is long is read by its cluster alone, and lengths are not known here. kMostGroupKeys bounds
///   that: 32768 keys of one of 8 are 40 us for 6 blocks, and 56 for sm80's kernel, which shares everything.
inline bool takes_group(const AttentionParams& p) {
  if (p.head_dim != 128 || p.heads_kv < 1 || p.heads_q % p.heads_kv != 0) return false;
  const std::int64_t rows = p.heads_q / p.heads_kv, clusters = p.batch * p.heads_kv;
  const std::int64_t num_sms = cuda_device_properties(p.device.index).num_sms;
  if (rows <= kRowsOfOnePart / 2 || rows > kGroupRows || clusters * p.seq_k > kMostGroupKeys) return false;
  if (clusters > num_sms || 3 * kMostGroupBlocks * clusters < num_sms) return false;
  const bool is_level = 10 * clusters < num_sms || 10 * clusters > 3 * num_sms;
  if (rows <= kRowsOfOnePart && p.batch <= kSequencesInParts && is_level) return false;
  return p.num_pages <= 0x7fffffff && fits_tensor_map(kv_map(p, false, kGroupKeys)) &&
         fits_tensor_map(kv_map(p, true, kGroupKeys));
}

/// `at_once(blocks)`: clusters of so many blocks that the device runs at once. The largest clusters that all run from
/// the first moment, as a second round costs as much as the first: an H200 has room for 66 of 2, 39 of 3, 30 of 4, 22
/// of 5, 17 of 6 (its GPCs have 16 or 18 multiprocessors), so 64 sequences take 2 blocks each, 32 take 3 and 16 take 6.
/// Not more than give each warpgroup a tile (64 x 128 of 32/1 heads: 5.2 us in clusters of one, 6.0 of two), and not
/// more than kMostGroupBlocks: 8 clusters of 8 are slower than 8 of 6 (10.4 us for 10.1 at 4096 keys, 28.0 for 25.6 at
/// 16384), call after call, as the next call's find no place beside them.
///
/// 32 sequences of equal lengths are 3 % faster by twos (23.1 us for 23.8), of 0 to 8192 keys 28 % slower (33.4 for
/// 26.1): by threes.
template <class AtOnce>
GroupPlan plan_group(const AttentionParams& p, AtOnce at_once) {
  GroupPlan plan;
  const std::int64_t clusters = p.batch * p.heads_kv, num_sms = cuda_device_properties(p.device.index).num_sms;
  constexpr std::int64_t kKeys = kGroupWarpgroups * kGroupKeys;  // of a tile for each warpgroup
  plan.rows = static_cast<int>(p.heads_q / p.heads_kv);
  plan.blocks = static_cast<int>(std::max<std::int64_t>(
      1, std::min({std::int64_t{kMostGroupBlocks}, (p.seq_k + kKeys - 1) / kKeys, num_sms / clusters})));
  while (plan.blocks > 1 && at_once(plan.blocks) < clusters) --plan.blocks;
  const auto log2 = [](std::int64_t n) {
    int result = 0;
    while (std::int64_t{2} << result <= n) ++result;
    return result;
  };
  plan.log2_page = p.is_paged() ? log2(p.page_size) : 0;
  plan.log2_box = log2(p.is_paged() ? std::min<std::int64_t>(p.page_size, kGroupKeys) : kGroupKeys);
  return plan;
}

}  // namespace flashkernel::cuda::sm90a
