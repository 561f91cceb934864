// Attention of few queries over many keys on Hopper: how a call is spread over the device, and how long that takes by a
// model. Host code; tests_cpp/few_queries_plan_test.cpp.
// Invariant: the spread depends on shapes only, never on sequence lengths. So a captured graph can replay with other
// lengths.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cuda/costs.hpp"
#include "cuda/host/ceil_div.hpp"
#include "ops/attention_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda::sm90a {

/// The rows of a kv head are its queries, each of all heads of the group: row = query * group + head. A block has the
/// rows of one tile and a part of the keys.
struct FewQueriesPlan {
  int consumers = 1;    // warpgroups of 64 rows in a block
  int splits = 1;       // parts that the keys of the longest sequence are cut into: blocks
  int cluster = 1;      // blocks that merge their parts in shared memory; divides `splits`
  int tiles = 1;        // of the rows of a kv head
  int group = 1;        // query heads of a kv head
  bool leaves = false;  // keys are read once and exceed the L2 cache: they leave it first
  float modelled_us = 0;
};

inline constexpr int kMostKeyParts = 32, kMostPartsOfCluster = 8;
/// Rows of a kv head up to which tiles of 64 may serve: beyond, keys would be read too often.
inline constexpr std::int64_t kMostRowsOf64 = 256;
/// Keys and values from so many bytes on leave the L2 cache first, where they are read once: about the size of the
/// cache.
inline constexpr std::int64_t kLeavesFrom = std::int64_t{48} << 20;
/// Keys that a block of 64 rows, or of 128, takes at a time.
inline constexpr int few_queries_block_keys(int consumers) { return consumers == 1 ? 64 : 128; }
/// Clusters of 1 to 8 blocks that run at the same time with one block on a multiprocessor. A cluster lies in one of the
/// device's parts, most of them of 16 or 18 multiprocessors; an H200 has 132 in all.
inline constexpr int kClustersOf132[kMostPartsOfCluster] = {132, 66, 39, 30, 22, 17, 15, 15};
inline constexpr std::int64_t clusters_at_once(std::int64_t num_sms, int cluster) {
  return num_sms * kClustersOf132[cluster - 1] / 132;
}
/// Blocks of 64 rows, or of 128, that share a multiprocessor.
inline constexpr int few_queries_residents(int consumers) { return consumers == 1 ? 2 : 1; }

// What the model of a call is made of: microseconds, and bytes in a microsecond, fitted to 35 calls in some 40 plans
// each on an H200. It is right to 7 %, and what it picks is 1.5 % behind the fastest
// (lab/notebooks/attention_few_queries.md).
inline constexpr double kFewQueriesStartUs = 2.9;    // lengths, pages, the first keys, and the output, beside a launch
inline constexpr double kKeyOf128RowsUs = 0.015;     // 128 rows x 1 key at d128, products and softmax
inline constexpr double kKeyOf64RowsUs = 0.012;      // 64 rows x 1 key, alone on a multiprocessor
inline constexpr double kKeyOfTwo64RowsUs = 0.0184;  // the same of each of two blocks on one
inline constexpr double kMemoryRate = 3.8e6;
// A key that warps gather for a block that is alone on a multiprocessor: microseconds, and bytes in one of them. Those
// of two blocks come as fast as memory has them. A producer that hands over registers takes longer.
inline constexpr double kGatherKeyUs = 0.0095, kGatherRate = 62e3, kGatherOfWarpgroup = 1.2;
inline constexpr double kMergeUs = 1.7, kMergeOfClustersUs = 2.7, kMergeRate = 23e3;
inline constexpr double kForwardStartUs = 1.5, kForwardKeyUs = 0.0125;  // of the forward kernel
// Rates of the forward kernel over the same keys: with one tile for each multiprocessor, and with many.
inline constexpr double kForwardMemoryRate = 3.4e6, kForwardMemoryRateOfMany = 3.8e6;

/// Keys of the longest sequence that its queries see together.
inline std::int64_t keys_seen(const AttentionParams& p) {
  if (p.window_left < 0 || p.window_right < 0) return p.seq_k;
  return std::min(p.seq_k, p.window_left + p.window_right + p.seq_q);
}

/// How long the call takes in these tiles and parts.
inline double few_queries_us(const AttentionParams& p, const FewQueriesPlan& plan, std::int64_t num_sms) {
  const std::int64_t rows = plan.group * p.seq_q, block_keys = few_queries_block_keys(plan.consumers);
  const std::int64_t clusters = plan.tiles * p.heads_kv * p.batch * (plan.splits / plan.cluster);
  // Blocks of the busiest multiprocessor: so many, of which `residents` at a time.
  const std::int64_t blocks = ceil_div(clusters, std::max<std::int64_t>(1, clusters_at_once(num_sms, plan.cluster)));
  const std::int64_t residents = few_queries_residents(plan.consumers), waves = ceil_div(blocks, residents);
  const auto keys = static_cast<double>(ceil_div(ceil_div(keys_seen(p), block_keys), plan.splits) * block_keys);
  const double key_us = plan.consumers == 2 ? kKeyOf128RowsUs : blocks > 1 ? kKeyOfTwo64RowsUs : kKeyOf64RowsUs;
  const int dim = p.head_dim > 64 ? 128 : 64;  // of the kernel
  const double products = static_cast<double>(waves) * keys * key_us * (dim + 64) / 192;
  const double bytes_of_key = static_cast<double>(p.head_dim + p.head_dim_v) * 2;
  double reads = work::product(p.batch * p.heads_kv, keys_seen(p)) * bytes_of_key / kMemoryRate;
  if (p.is_paged() && p.page_size % 8 != 0 && (plan.consumers == 2 || blocks == 1)) {
    const double key = kGatherKeyUs + bytes_of_key / kGatherRate;
    reads = std::max(reads, static_cast<double>(waves) * keys * key * (plan.consumers == 2 ? kGatherOfWarpgroup : 1));
  }
  double merge = 0;
  if (plan.splits > 1) {  // a block reads as much as it has left, and again where there are several clusters
    const double part = static_cast<double>(std::min<std::int64_t>(rows, 64 * plan.consumers) * p.head_dim_v * 4);
    const int parts = plan.splits / plan.cluster;
    merge = kMergeUs + part / kMergeRate;
    if (parts > 1) merge += kMergeOfClustersUs + part * parts / plan.cluster / kMergeRate;
  }
  return kLaunchUs + kFewQueriesStartUs + std::max(products, reads) + merge;
}

/// Of tiles of 64 and of 128 rows, and of the numbers of parts that fill the device at most once, what is the fastest
/// by the model. Of equal ones, the least parts.
inline FewQueriesPlan plan_few_queries(const AttentionParams& p, std::int64_t num_sms) {
  FewQueriesPlan best, plan;
  const std::int64_t group = p.heads_kv > 0 ? p.heads_q / p.heads_kv : 1, rows = group * p.seq_q;
  const std::int64_t bytes = p.batch * p.heads_kv * keys_seen(p) * (p.head_dim + p.head_dim_v) * 2;
  plan.group = static_cast<int>(group);
  best.modelled_us = std::numeric_limits<float>::infinity();
  for (plan.consumers = rows <= kMostRowsOf64 ? 1 : 2; plan.consumers <= (rows <= 64 ? 1 : 2); ++plan.consumers) {
    const std::int64_t tiles = std::max<std::int64_t>(1, ceil_div(rows, std::int64_t{64} * plan.consumers));
    plan.tiles = static_cast<int>(tiles);
    plan.leaves = tiles == 1 && bytes > kLeavesFrom;
    const std::int64_t blocks =
        std::max<std::int64_t>(1, ceil_div(keys_seen(p), few_queries_block_keys(plan.consumers)));
    const std::int64_t items = std::max<std::int64_t>(1, tiles * p.heads_kv * p.batch);
    for (plan.cluster = kMostPartsOfCluster; plan.cluster >= 1; --plan.cluster) {
      const std::int64_t room = clusters_at_once(num_sms, plan.cluster) * few_queries_residents(plan.consumers);
      const std::int64_t most = std::min({std::int64_t{kMostKeyParts}, blocks, room / items * plan.cluster});
      const std::int64_t last = plan.cluster > 1 ? most : 1;  // without clusters the keys are whole
      for (plan.splits = plan.cluster; plan.splits <= last; plan.splits += plan.cluster) {
        plan.modelled_us = static_cast<float>(few_queries_us(p, plan, num_sms));
        const bool equal = plan.modelled_us == best.modelled_us;
        if (plan.modelled_us < best.modelled_us || (equal && plan.splits < best.splits)) best = plan;
      }
    }
  }
  return best;
}

/// The most queries of a sequence, and the fewest keys, of the calls that the kernel was made for.
inline constexpr std::int64_t kMostFewQueries = 256, kFewestKeys = 512;

/// Sequences up to which sm90a/decode takes a call.
inline constexpr std::int64_t kMostSequencesOfDecode = 256;
/// Whether a call of one query and at most 32 heads a kv head is for this kernel: of those that sm90a/decode refuses.
/// Where heads share keys it is ahead of sm80/decode by a tenth to a third, for many sequences from 256 keys on; heads
/// with keys of their own leave 63 rows of 64 empty, which is level once the device is full.
inline bool is_for_one_query(const AttentionParams& p, std::int64_t num_sms) {
  if (p.window_left < 0 && p.batch <= kMostSequencesOfDecode && (p.head_dim == 64 || p.head_dim == 128)) return false;
  const std::int64_t items = p.batch * p.heads_kv;
  if (keys_seen(p) < kFewestKeys) return p.heads_q > p.heads_kv && items >= 8 * num_sms && keys_seen(p) >= 256;
  return p.heads_q > p.heads_kv || items <= num_sms;
}

/// Whether the call is for this kernel, of the calls that it takes. From two queries on, the kernels of decode reach
/// half of what 64 rows on wgmma do, and where keys have to be gathered less than that from one query on. Beyond 32
/// rows the forward kernel stands against this one. It has no parts of keys, and a tile of one head's queries, which
/// few of them leave empty.
inline bool is_for_few_queries(const AttentionParams& p, std::int64_t num_sms) {
  if (p.seq_q > kMostFewQueries) return false;
  if (has_few_queries(p)) {
    const bool gathers = p.is_paged() && p.page_size % 8 != 0;
    return p.seq_q > 1 || gathers ? keys_seen(p) >= kFewestKeys : is_for_one_query(p, num_sms);
  }
  if (keys_seen(p) < kFewestKeys) return false;
  const std::int64_t tiles = p.batch * p.heads_q * ceil_div(p.seq_q, std::int64_t{128});
  const double products = static_cast<double>(ceil_div(tiles, num_sms) * keys_seen(p)) * kForwardKeyUs *
                          static_cast<double>(p.head_dim + 64) / 192;
  const double bytes =
      work::product(p.batch * p.heads_kv, keys_seen(p)) * static_cast<double>(p.head_dim + p.head_dim_v) * 2;
  const double forward = kLaunchUs + kForwardStartUs +
                         std::max(products, bytes / (tiles <= num_sms ? kForwardMemoryRate : kForwardMemoryRateOfMany));
  return plan_few_queries(p, num_sms).modelled_us < forward;
}

inline float few_queries_cost_us(const AttentionParams& p, const DeviceFacts& facts) {
  const double us = attention_us(p, rates::kFewQueriesSm90a);
  return static_cast<float>(is_for_few_queries(p, facts.num_sms) ? us : kOutsideItsRange * us);
}

/// The workspace: numerators, maxima and sums of all clusters, if there are several for a tile.
inline Plan plan_attention_few_queries(const AttentionParams& p, const DeviceFacts& facts) {
  const FewQueriesPlan plan = plan_few_queries(p, facts.num_sms);
  const std::int64_t clusters = plan.splits / plan.cluster;
  const std::int64_t rows = clusters > 1 ? p.batch * p.heads_kv * plan.tiles * clusters * 64 * plan.consumers : 0;
  return Plan::of(plan, sizeof(float) * static_cast<std::size_t>(rows * (p.head_dim_v + 2)));
}

}  // namespace flashkernel::cuda::sm90a
