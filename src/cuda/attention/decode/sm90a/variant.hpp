// Decode on Hopper: one query a sequence over a cache, in a few microseconds. What the rows of the table say about the
// instances (instances/, from kernel.cuh), and how a call is spread over the device.
// Invariant: the spread depends on shapes only, never on sequence lengths. So a captured graph can replay with other
// lengths.
#pragma once

#include <algorithm>

#include "cuda/costs.hpp"
#include "cuda/host/device.hpp"
#include "cuda/attention/decode/sm90a/group.hpp"
#include "flashkernel/stream.hpp"
#include "ops/attention_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda::sm90a {

inline constexpr int kGranule = 16;           // keys that a warp takes at a time; they lie in one page
inline constexpr int kTileRows = 8;           // query heads of a tile: the columns of one matrix instruction
inline constexpr int kMostTiles = 2;          // most tiles of query heads in a cluster
inline constexpr int kMostParts = 4;          // most parts that the query heads of a kv head are split into
inline constexpr int kMostDecodeBlocks = 16;  // most blocks of a cluster on 9.0
inline constexpr int kMostSequences = 32;     // most sequences of a call: one for each lane of a warp
inline constexpr int kMostShared = 256;       // the same where blocks share sequences: 2 KB of shared memory
inline constexpr int kSharedFrom = 16;        // a long call of as many sequences is shared by all blocks
// A call is long from so many keys on, over all sequences and kv heads: 64 MB at d128.
inline constexpr std::int64_t kWideFrom = 131072;
// Two tiles serve a call if parts of 8 heads would read more keys than kTilesFrom in all, and its sequences may have
// kTilesFromLength keys or more.
inline constexpr std::int64_t kTilesFrom = 98304, kTilesFromLength = 2048;
inline constexpr std::int64_t kPiecesFrom = 16384;     // a sequence of as many keys is cut into pieces
inline constexpr std::int64_t kMostKeysOfOne = 32768;  // most keys of a call's only sequence in parts of 8 heads

/// How a call is spread over the device: `groups` clusters for each kv head, or for each part of its query heads.
struct ClusterPlan {
  int blocks = 1, log2_blocks = 0;  // blocks of a cluster
  int groups = 1;                   // groups that the sequences are dealt to; at most one for each sequence
  int parts = 1;                    // parts of the query heads of a kv head
  int rows = 0;                     // query heads of a part
  int tiles = 1;                    // tiles of 8 query heads in a part
  int log2_granules_of_page = 0;
  bool wide = false;    // a block has twice the warps and a multiprocessor to itself
  bool shared = false;  // a group is one block; all groups read equally much, and sequences may be cut between them
  int pieces = 1;       // pieces of a sequence; each has a result of its own, and another kernel merges them
  bool late = false;    // the next kernel may start only when all keys have been read
  bool leaves = false;  // the keys exceed the L2 cache and are read once: they leave the cache first

  /// Wide blocks in clusters of 4 and more do not start early. Some would find a place and others would wait behind the
  /// kernel before (72 us against 66 at 65536 keys in pages of 256, when calls follow one another).
  FK_HOST_DEVICE bool early() const { return !wide || blocks <= 2 || late; }
};

/// Makes the plan. All times were measured on an H200.
///
/// Blocks: at most one a multiprocessor. Two would fit, but those that share one finish last (192 or 240 blocks are
/// slower than 128 at every length).
///
/// Several sequences: whole sequences are dealt to small clusters, so that nothing has to be merged between clusters:
/// with 8 heads, 64 clusters of 2 blocks, or 32 of 4 where the number of sequences is no multiple of 8. (The group
/// kernel serves most such calls now: group_plan.hpp.)
///
/// Long calls (64 MB of keys and more at d128) take wide blocks.
/// - One sequence, or a few in one group: some 64 blocks of 8 warps read faster than as many of 4 (68 us against 76 at
///   65536 keys), and one long sequence among short ones is shared by all blocks of a head (80 us against 158).
/// - 16 sequences and more, calls of few kv heads, and any call of over 32 sequences are shared by single blocks, one a
///   multiprocessor, which all read equally much whatever the lengths (128 x 4096 takes 480 us, and 498 by the kernel
///   of 8.0; at mixed lengths 492 and 685). The last block to arrive merges a sequence that was cut, which costs 3 us.
///
/// Parts: if a kv head has more than 8 query heads, each part of them has a cluster of its own. With several sequences
/// these are wide blocks, in as many clusters as fit (32 x 1024 of 32/1 heads: 12.0 us in 128 clusters of one
/// block, 17.0 us in 32 of two). In long calls a part has 16 query heads in two tiles, which halves the reads of keys
/// (32 x 4096 of 32/1 heads: 27.7 us, and 31.1 in parts of 8). If such a call has only few and long sequences, or too
/// few kv heads to fill the device, each sequence is cut into pieces, and a second kernel merges their results (1 x
/// 65536 of 32/1 heads: 19.6 us, and 29.8 without).
inline ClusterPlan plan_cluster(const AttentionParams& p, std::int64_t num_sms) {
  ClusterPlan plan;
  const std::int64_t group = p.heads_kv > 0 ? p.heads_q / p.heads_kv : 0, keys = p.batch * p.seq_k * p.heads_kv;
  const auto parts_of = [&](std::int64_t most_rows) {
    int parts = 1;
    while (parts < kMostParts && (group > parts * most_rows || group % parts != 0)) ++parts;
    return parts;
  };
  const auto fill = [&](std::int64_t clusters, std::int64_t blocks) {
    plan.blocks = 1;
    while (2 * plan.blocks <= kMostDecodeBlocks && clusters * 2 * plan.blocks <= blocks) plan.blocks *= 2;
  };
  plan.parts = parts_of(kTileRows);
  fill(std::max<std::int64_t>(1, p.heads_kv * plan.parts), num_sms * 3 / 4);
  const bool fills = 5 * p.heads_kv * plan.parts * plan.blocks >= 2 * num_sms;  // blocks without groups and pieces
  if (p.head_dim == 128 && group <= kMostParts * kTileRows) {
    const int parts = parts_of(kMostTiles * kTileRows);
    const bool fewer = parts < plan.parts && p.seq_k >= kTilesFromLength &&
                       (keys * plan.parts > kTilesFrom || (p.batch == 1 && keys > kMostKeysOfOne));
    const bool few_heads = p.batch == 1 && plan.parts == 1 && !fills && p.seq_k >= kPiecesFrom && keys >= kWideFrom / 2;
    if (fewer || few_heads) plan.tiles = kMostTiles, plan.parts = parts;
  }
  plan.rows = static_cast<int>(group / plan.parts);
  const std::int64_t heads = std::max<std::int64_t>(1, p.heads_kv * plan.parts);
  const bool whole = plan.parts == 1 && plan.tiles == 1, is_long = whole && keys * p.head_dim >= kWideFrom * 128;
  plan.shared = (whole && p.batch > kMostSequences) ||
                (is_long && p.batch > 1 && (p.batch >= kSharedFrom || plan.blocks > kMostDecodeBlocks / 2));
  plan.wide = p.head_dim == 128 && (plan.shared || (is_long && fills));
  plan.leaves = is_long;
  const auto deal = [&](std::int64_t at_once) {  // whole sequences, or pieces, to groups
    const std::int64_t all = p.batch * plan.pieces;
    at_once = std::max<std::int64_t>(1, std::min(all, at_once));
    const std::int64_t sequences = (all + at_once - 1) / at_once;  // of a group
    plan.groups = static_cast<int>((all + sequences - 1) / sequences);
  };
  if (plan.shared) {
    plan.blocks = 1;
    plan.groups = static_cast<int>(std::max<std::int64_t>(1, num_sms / heads));
  } else if (plan.tiles > 1 || (p.batch > 1 && plan.parts > 1 && p.head_dim == 128)) {
    plan.wide = true;
    if (plan.tiles > 1 && p.seq_k >= kPiecesFrom)
      plan.pieces = static_cast<int>(
          std::max<std::int64_t>(1, std::min<std::int64_t>(kMostSequences, num_sms / (2 * heads)) / p.batch));
    deal(num_sms / heads);
    fill(heads * plan.groups, num_sms);
    // Clusters of 4 and more leave some multiprocessors of a GPC unused: an H200 runs 30 of 4 or 15 of 8 at a time.
    if (plan.blocks > 2) fill(heads * plan.groups, num_sms * 9 / 10);
    plan.late = plan.tiles > 1 && (plan.blocks > 2 || plan.pieces > 1);
  } else if (p.batch > 1 && !plan.wide) {
    fill(heads * (p.batch % 8 == 0 ? 8 : std::min<std::int64_t>(p.batch, 4)), num_sms);
    if (plan.blocks == 1 && heads * 2 <= num_sms) plan.blocks = 2;
    deal(num_sms / (heads * plan.blocks));
  }
  plan.log2_blocks = 0;
  while (1 << plan.log2_blocks < plan.blocks) ++plan.log2_blocks;
  while (p.is_paged() && (std::int64_t{kGranule} << plan.log2_granules_of_page) < p.page_size)
    ++plan.log2_granules_of_page;
  return plan;
}

/// Up to so many keys, over all sequences and heads, clusters are faster than the kernel of 8.0, whose blocks share all
/// keys.
/// Every part of a kv head's query heads reads all of them, from the L2 cache after the first one: up to 32 MB at d128
/// (16 MB of one sequence) that costs less than what the other kernel spends on starting and merging. In parts of 16
/// rows, up to 128 MB; in one, up to 256 MB, where the other kernel has caught up or, with sequences of any length,
/// shares them better.
inline constexpr std::int64_t kMostKeysOfTiles = 262144, kMostKeysOfOneTile = 524288, kMostKeysOfParts = 65536;
/// Keys of a block up to which few blocks are enough. 64 blocks read 3.6 TB/s on an H200, 57 GB/s each: 512 keys of
/// d128 take 5 us, what the other kernel starts later.
inline constexpr std::int64_t kMostKeysOfFewBlocks = 512;

/// Whether a call that the kernel takes is for it, where it is not for the clusters of groups.
inline bool is_for_clusters(const AttentionParams& p, const ClusterPlan& plan, std::int64_t num_sms) {
  const std::int64_t keys = p.batch * p.seq_k * p.heads_kv;
  const std::int64_t blocks = p.heads_kv * plan.parts * plan.blocks * plan.groups;
  const std::int64_t most = plan.tiles > 1    ? (plan.parts > 1 ? kMostKeysOfTiles : kMostKeysOfOneTile)
                            : plan.parts == 1 ? keys
                            : p.batch == 1    ? kMostKeysOfOne
                                              : kMostKeysOfParts;
  return keys <= most && (5 * blocks >= 2 * num_sms || keys * plan.parts <= kMostKeysOfFewBlocks * blocks);
}

/// What both kernels take.
template <DType kDtype, int kQkDim, int kVDim>
Verdict attention_decode_supports(const AttentionParams& p) {
  if (p.dtype != kDtype) return "it is built for another dtype";
  if (p.head_dim != kQkDim || p.head_dim_v != kVDim) return "it is built for another head_dim";
  if (p.seq_q != 1 || p.is_varlen_q()) return "it takes one query for each sequence";
  if (p.is_varlen_k()) return "it takes dense or paged keys only";
  if (p.heads_kv > 64) return "it takes at most 64 kv heads";
  if (p.batch > kMostShared) return "it takes at most 256 sequences";
  if (p.has_score_modifier() || p.window_left >= 0) return "it takes no bias, ALiBi, softcap or window";
  if (p.k_starts) return "it takes no sequences that start behind their first key";
  if (p.is_paged() && (p.page_size % kGranule != 0 || (p.page_size & (p.page_size - 1)) != 0))
    return "page_size must be a power of two, 16 or more";
  const auto rows_of = [](std::uintptr_t bytes, const void* data, std::int64_t a, std::int64_t b, std::int64_t c) {
    const auto elements = static_cast<std::int64_t>(bytes / 2);
    return reinterpret_cast<std::uintptr_t>(data) % bytes == 0 && a % elements == 0 && b % elements == 0 &&
           c % elements == 0;
  };
  if (!rows_of(16, p.k, p.stride_k_batch, p.stride_k_head, p.stride_k_token) ||
      !rows_of(16, p.v, p.stride_v_batch, p.stride_v_head, p.stride_v_token) ||
      !rows_of(4, p.q, p.stride_q_batch, p.stride_q_head, 0) ||
      !rows_of(8, p.out, p.stride_out_batch, p.stride_out_head, 0))
    return "rows must start at multiples of 16 bytes (k, v), 4 bytes (q) and 8 bytes (out)";
  if (p.seq_k > std::int64_t{1} << 29 || p.batch * (p.seq_k / kGranule + 1) >= std::int64_t{1} << 30)
    return "the call has more keys than it takes";  // granules are counted in 32 bits
  return Verdict::ok();
}

/// A cluster for each sequence and kv head (group.cuh); the plan is a GroupPlan.
template <DType kDtype, int kQkDim, int kVDim>
Verdict decode_group_supports(const AttentionParams& p) {
  if (const Verdict verdict = attention_decode_supports<kDtype, kQkDim, kVDim>(p); !verdict) return verdict;
  return check_group(p);
}
inline float decode_group_cost_us(const AttentionParams& p, const DeviceFacts& facts) {
  const double us = attention_us(p, rates::kDecodeSm90a);
  return static_cast<float>(is_for_groups(p, facts.num_sms) ? us : kOutsideItsRange * us);
}
/// Clusters of so many blocks of its kernel that a device runs at once. Instantiated beside the kernel.
template <DType kDtype, int kQkDim, int kVDim>
int decode_groups_at_once(int blocks, int device);
template <DType kDtype, int kQkDim, int kVDim>
Plan plan_decode_group(const AttentionParams& p, const DeviceFacts& facts) {
  return Plan::of(plan_group(p, facts.num_sms, [&](int blocks) {
    return facts.clusters ? (*facts.clusters)[static_cast<std::size_t>(blocks)]
                          : decode_groups_at_once<kDtype, kQkDim, kVDim>(blocks, facts.index);
  }));
}
template <DType kDtype, int kQkDim, int kVDim>
void decode_group(const AttentionParams& p, const Plan& plan, void* workspace, Stream stream);

/// Clusters, or blocks, that sequences are dealt to; the plan is a ClusterPlan.
template <DType kDtype, int kQkDim, int kVDim>
Verdict decode_clusters_supports(const AttentionParams& p) {
  if (const Verdict verdict = attention_decode_supports<kDtype, kQkDim, kVDim>(p); !verdict) return verdict;
  const ClusterPlan plan = plan_cluster(p, cuda_device_properties(p.device.index).num_sms);
  if (plan.rows * plan.parts * p.heads_kv != p.heads_q || plan.rows > plan.tiles * kTileRows)
    return "it takes 1 to 32 query heads for each kv head, in equal parts of at most 8";
  if (p.batch > kMostSequences && !plan.shared)
    return "it takes at most 32 sequences with more than 8 query heads for each kv head";
  return Verdict::ok();
}
inline float decode_clusters_cost_us(const AttentionParams& p, const DeviceFacts& facts) {
  const bool best = !takes_group(p, facts.num_sms) && is_for_clusters(p, plan_cluster(p, facts.num_sms), facts.num_sms);
  const double us = attention_us(p, rates::kDecodeSm90a);
  return static_cast<float>(best ? us : kOutsideItsRange * us);
}
/// The workspace: the results of pieces, or what blocks that share sequences leave each other: two parts each.
inline Plan plan_decode_clusters(const AttentionParams& p, const DeviceFacts& facts) {
  const ClusterPlan plan = plan_cluster(p, facts.num_sms);
  const std::int64_t parts = plan.shared ? 2 * plan.groups : plan.pieces > 1 ? p.batch * plan.pieces : 0;
  return Plan::of(plan, sizeof(float) * static_cast<std::size_t>(parts * p.heads_q * (p.head_dim_v + 2)));
}
template <DType kDtype, int kQkDim, int kVDim>
void decode_clusters(const AttentionParams& p, const Plan& plan, void* workspace, Stream stream);

}  // namespace flashkernel::cuda::sm90a
