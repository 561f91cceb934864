// Decode of up to 32 query heads a kv head by a cluster for each sequence and kv head (group.cuh): which calls
// are, and how a call's clusters are made. Host code, tested without a GPU.
// Invariant: both follow from shapes and the device only, never from lengths, so that a captured graph replays with
// other lengths.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/attention_params.hpp"

namespace flashkernel::cuda::sm90a {

inline constexpr int kGroupRows = 32;       // query heads of a kv head, 8 for each warp of a warpgroup
inline constexpr int kGroupKeys = 64;       // of a tile
inline constexpr int kGroupWarpgroups = 2;  // of a block, which take its tiles in turn
inline constexpr int kMostGroupBlocks = 6;  // of a cluster
inline constexpr int kClusterRows = 8;      // query heads of a kv head that the other kernel takes at once
inline constexpr std::int64_t kMostGroupKeys = 262144, kLongGroupKeys = 131072;  // of all sequences and kv heads, d128

/// Keys of a sequence up to which: the next call's clusters get room beside this one's; one sequence is for clusters.
struct GroupLimits {
  std::int64_t beside, alone;
  explicit GroupLimits(const AttentionParams& p)
      : beside(p.head_dim == 128 ? 4096 : 1024), alone(p.head_dim == 128 ? 256 : 1024) {}
};

/// What the kernel is told.
struct GroupPlan {
  int blocks = 1;    // of a cluster
  int rows = 0;      // query heads of a kv head
  int log2_box = 0;  // keys that one copy brings: of one page, and of one tile
  int log2_page = 0;
};

/// Whether a call of such shapes is for clusters of its groups. Measured on an H200, of 132
/// multiprocessors, beside kernel.cuh's clusters (lab/notebooks/attention_decode.md):
/// - A cluster for each, up to two for each multiprocessor, of one block then: the second ones start where the first
///   ones end, so that short sequences leave their time to long ones (32 x 0 to 1024 of 32/8 heads: 19.6 us for 25.5;
///   all of 1024: 35.0 for 33.8).
/// - Clusters of kMostGroupBlocks have a third of the multiprocessors at least, which is from 8 on (8 x 4096 of 32/1
///   heads: 8.6 us for 13.1). Fewer would leave the device to blocks that read some 90 GB/s each.
/// - A sequence that alone is long is read by its cluster alone, and lengths are not known here. kMostGroupKeys bounds
///   that: 32768 keys of one of 8 are 40 us for 6 blocks, and 56 for sm80's kernel, which shares everything.
///
/// Up to kClusterRows, where the other kernel reads each key once, too, this one is ahead of it nearly everywhere (32/8
/// heads: 8 x 1024 11.1 us for 11.9, 12 x 1024 16.7 for 20.9, 8 x 0 to 2048 12.0 for 15.6), but for:
/// - One sequence that is not short, of which that one's warps know all when they start (1 x 1024: 4.8 us for 5.2),
///   until kv heads are so many that two blocks for each are enough.
/// - Long calls where blocks, one or two to a cluster, leave a fifth of the multiprocessors idle: 9 x 2048 takes 29.2
///   us, and 22.8 where blocks share all keys. Shorter ones gain where lengths are mixed as much as they lose where
///   they are equal (5 x 2048 16.6 us for 14.6, 5 x 0 to 2048 10.3 for 11.6).
inline bool is_for_groups(const AttentionParams& p, std::int64_t num_sms) {
  if ((p.head_dim != 128 && p.head_dim != 64) || p.heads_kv < 1 || p.heads_q % p.heads_kv != 0) return false;
  const std::int64_t rows = p.heads_q / p.heads_kv, clusters = p.batch * p.heads_kv;
  const std::int64_t keys = clusters * p.seq_k * p.head_dim / 128;  // of d128
  if (rows > kGroupRows || keys > kMostGroupKeys) return false;
  if (clusters > 2 * num_sms || 3 * kMostGroupBlocks * clusters < num_sms) return false;
  if (rows <= kClusterRows) {
    if (p.batch == 1 && 5 * clusters < num_sms && p.seq_k > GroupLimits(p).alone) return false;
    const std::int64_t blocks = 2 * clusters <= num_sms ? 2 * clusters : clusters;
    if (keys >= kLongGroupKeys && 4 * clusters > num_sms && 5 * blocks < 4 * num_sms) return false;
  }
  return true;
}

/// `at_once(blocks)`: clusters of so many blocks that the device runs at once. The largest clusters that all run from
/// the first moment, as a second round costs as much as the first: an H200 has room for 66 of 2, 39 of 3, 30 of 4, 22
/// of 5, 17 of 6 (its GPCs have 16 or 18 multiprocessors), so 64 sequences take 2 blocks each and 16 take 6. Not more
/// than give each warpgroup a tile (64 x 128 of 32/1 heads: 4.65 us in clusters of one, 4.87 of two), and not more than
/// kMostGroupBlocks: 8 clusters of 8 are slower than 8 of 6 (10.1 us for 8.6 at 4096 keys), call after call, as the
/// next call's find no place beside them.
///
/// Up to GroupLimits::beside keys as many that the next call's clusters find room beside this one's, where that costs a
/// third of the blocks at most: all of them are there when their turn comes, and spread over the chip, whose halves
/// read with half of its rate each (by threes 63 of 96 blocks are in one half every second call, which ends at 19.4 us,
/// the other one at 13.1). 32 x 4096 of 32/1 heads: 20.5 us by twos for 22.2 by threes, 10 x 4096 9.7 by fives for 11.4
/// by sixes. It costs where lengths are far apart: 32 of 0 to 4096 keys 15.8 us for 14.0, of 0 to 8192 27.7 for 23.8.
/// Rows of d64 are half as long, and no half of the chip is at its end: 4 x 4096 of 32/8 heads 11.7 us by threes, 12.5
/// by twos.
template <class AtOnce>
GroupPlan plan_group(const AttentionParams& p, std::int64_t num_sms, AtOnce at_once) {
  GroupPlan plan;
  const std::int64_t clusters = p.batch * p.heads_kv;
  constexpr std::int64_t kKeys = kGroupWarpgroups * kGroupKeys;  // of a tile for each warpgroup
  plan.rows = static_cast<int>(p.heads_q / p.heads_kv);
  plan.blocks = static_cast<int>(std::max<std::int64_t>(
      1, std::min({std::int64_t{kMostGroupBlocks}, (p.seq_k + kKeys - 1) / kKeys, num_sms / clusters})));
  while (plan.blocks > 1 && at_once(plan.blocks) < clusters) --plan.blocks;
  int beside = plan.blocks;
  while (beside > 1 && at_once(beside) < 2 * clusters) --beside;
  if (p.seq_k <= GroupLimits(p).beside && 3 * beside >= 2 * plan.blocks) plan.blocks = beside;
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
