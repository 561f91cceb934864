// The plan of the group kernel (group.cuh): decode in which one cluster serves all query heads, up to 32, of one kv
// head of one sequence. This file says which calls that kernel is chosen for, and how many blocks a cluster has. It is
// host code and is tested without a GPU. Invariant: the plan follows from shapes and the device only, never from
// sequence lengths. So a captured graph can replay with other lengths.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/attention_params.hpp"

namespace flashkernel::cuda::sm90a {

inline constexpr int kGroupRows = 32;       // most query heads of a kv head: 8 for each warp of a warpgroup
inline constexpr int kGroupKeys = 64;       // keys of a tile
inline constexpr int kGroupWarpgroups = 2;  // consumer warpgroups of a block; they take its tiles in turn
inline constexpr int kMostGroupBlocks = 6;  // most blocks of a cluster
inline constexpr int kClusterRows = 8;      // query heads of a kv head that the kernel of clusters takes at once
// Keys over all sequences and kv heads, in units of d128: the most for this kernel, and what counts as a long call.
inline constexpr std::int64_t kMostGroupKeys = 262144, kLongGroupKeys = 131072;

/// Limits on the keys of a sequence.
/// beside: up to here, clusters are so small that the clusters of the next call fit beside them.
/// alone: up to here, a call of one sequence is for this kernel.
struct GroupLimits {
  std::int64_t beside, alone;
  explicit GroupLimits(const AttentionParams& p)
      : beside(p.head_dim == 128 ? 4096 : 1024), alone(p.head_dim == 128 ? 256 : 1024) {}
};

/// The plan that the kernel gets.
struct GroupPlan {
  int blocks = 1;     // blocks of a cluster
  int rows = 0;       // query heads of a kv head
  int log2_box = 0;   // log2 of the keys that one copy brings; they lie in one page and one tile
  int log2_page = 0;  // log2 of the page size
};

/// Whether this kernel is the faster one for a call of such shapes. The other one is the kernel of clusters
/// (kernel.cuh). All times were measured on an H200, which has 132 multiprocessors (lab/notebooks/attention_decode.md).
///
/// Required of every call:
/// - At most two clusters a multiprocessor. With more than one, a cluster has one block: clusters of the second half
///   start when others end, so that short sequences leave their time to long ones. 32 sequences of 0 to 1024 keys with
///   32/8 heads take 19.6 us, against 25.5 us of the other kernel; if all have 1024 keys, 35.0 against 33.8.
/// - Enough clusters that, with kMostGroupBlocks blocks each, they fill a third of the multiprocessors: 8 clusters or
///   more. A block reads some 90 GB/s, so fewer would leave the device idle. 8 x 4096 of 32/1 heads: 8.6 us, against
///   13.1.
/// - At most kMostGroupKeys keys. One cluster reads a sequence alone, however long it is, and lengths are unknown here.
///   32768 keys in one of 8 sequences take 40 us with 6 blocks; kernels that share all keys take 56.
///
/// With up to kClusterRows query heads a kv head, the other kernel also reads each key once. This kernel is still
/// faster nearly everywhere (32/8 heads: 8 x 1024 11.1 us against 11.9, 12 x 1024 16.7 against 20.9), except for:
/// - One sequence that is not short. There the warps of the other kernel know their keys when they start (1 x 1024: 4.8
///   us against 5.2 here), unless there are so many kv heads that two blocks for each suffice.
/// - Long calls whose clusters of one or two blocks leave a fifth of the multiprocessors idle. 9 x 2048 takes 29.2 us
///   here and 22.8 us where blocks share all keys. Shorter calls stay here: they lose at equal lengths what they gain
///   at mixed ones (5 x 2048 16.6 us against 14.6; 5 x 0 to 2048 10.3 against 11.6).
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

/// How many blocks a cluster has. `at_once(blocks)` is the number of clusters of that size that the device runs at
/// once.
///
/// The rule: the largest clusters that all run from the first moment, because a second round costs as much as the
/// first. An H200 has room for 66 clusters of 2, 39 of 3, 30 of 4, 22 of 5 and 17 of 6 (its GPCs have 16 or 18
/// multiprocessors). So 64 sequences get 2 blocks each, and 16 get 6. There are two upper limits:
/// - One tile for each warpgroup. 64 x 128 keys of 32/1 heads take 4.65 us in clusters of one and 4.87 us of two.
/// - kMostGroupBlocks. 8 clusters of 8 blocks are slower than 8 of 6 (10.1 us against 8.6 at 4096 keys) when calls
/// follow
///   one another, because the clusters of the next call find no room beside them.
///
/// Up to GroupLimits::beside keys, clusters are made smaller, by a third of the blocks at most, so that those of the
/// next call fit beside them. They are then in place when their turn comes, and they are spread over both halves of the
/// chip. Each half reads at half of the full rate; with clusters of three, 63 of 96 blocks lay in one half in every
/// second call (19.4 us, against 13.1). 32 x 4096 of 32/1 heads: 20.5 us by twos, 22.2 by threes. 10 x 4096: 9.7 by
/// fives, 11.4 by sixes. The price is paid where lengths are far apart: 32 sequences of 0 to 4096 keys take 15.8 us
/// instead of 14.0. At d64 a row is half as long and no half of the chip reaches its rate, so the limit is lower there
/// (4 x 4096 of 32/8 heads: 11.7 us by threes, 12.5 by twos).
template <class AtOnce>
GroupPlan plan_group(const AttentionParams& p, std::int64_t num_sms, AtOnce at_once) {
  GroupPlan plan;
  const std::int64_t clusters = p.batch * p.heads_kv;
  constexpr std::int64_t kKeys = kGroupWarpgroups * kGroupKeys;  // keys of one tile for each warpgroup
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
