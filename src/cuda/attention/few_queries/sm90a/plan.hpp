// Attention of few queries over many keys on Hopper: how a call is spread over the device, and how long that takes by a
// model. Host code; tests_cpp/few_queries_plan_test.cpp.
// Invariant: the spread depends on shapes only, never on sequence lengths. So a captured graph can replay with other
// lengths.
#pragma once

#include <algorithm>
#include <cstdint>

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
/// Keys and values from so many bytes on leave the L2 cache first, where they are read once: about the size of the
/// cache.
inline constexpr std::int64_t kLeavesFrom = std::int64_t{48} << 20;
/// Keys that a block of 64 rows, or of 128, takes at a time.
inline constexpr int few_queries_block_keys(int consumers) { return consumers == 1 ? 64 : 128; }
/// Multiprocessors whose blocks lie in clusters of so many at the same time. A cluster lies in one of the device's
/// parts, of 16 or 18 multiprocessors; an H200 has 132, and runs 30 clusters of four or 15 of eight.
inline constexpr std::int64_t sms_in_clusters(std::int64_t num_sms, int cluster) {
  return (cluster > 2 ? num_sms * 10 / 11 : num_sms) / cluster * cluster;
}
/// Blocks of 64 rows, or of 128, that share a multiprocessor.
inline constexpr int few_queries_residents(int consumers) { return consumers == 1 ? 2 : 1; }

// What the model of a call is made of. Microseconds, and bytes in a microsecond, of an H200.
inline constexpr double kFewQueriesStartUs = 1.5;   // Q, the first keys, and the output, beside a launch
inline constexpr double kKeyOf128RowsUs = 0.0155;   // 128 rows x 1 key at d128, products and softmax
inline constexpr double kForwardKeyUs = 0.0125;     // the same in the forward kernel
inline constexpr double kKeyOf64RowsUs = 0.0094;    // 64 rows x 1 key, alone on a multiprocessor
inline constexpr double kKeyOfTwo64RowsUs = 0.011;  // the same of each of two blocks on one
inline constexpr double kMemoryRate = 4.0e6, kSmRate = 57e3, kL2Rate = 5.5e6, kMergeRate = 40e3, kMergeUs = 2.0;
// Rates of the forward kernel over the same keys: with one tile for each multiprocessor, and with many.
inline constexpr double kForwardMemoryRate = 3.2e6, kForwardMemoryRateOfMany = 3.6e6;

/// Keys of the longest sequence that its queries see together.
inline std::int64_t keys_seen(const AttentionParams& p) {
  if (p.window_left < 0 || p.window_right < 0) return p.seq_k;
  return std::min(p.seq_k, p.window_left + p.window_right + p.seq_q);
}

/// How long the call takes in these tiles and parts.
inline double few_queries_us(const AttentionParams& p, const FewQueriesPlan& plan, std::int64_t num_sms) {
  const std::int64_t rows = plan.group * p.seq_q, block_keys = few_queries_block_keys(plan.consumers);
  const double items = static_cast<double>(plan.tiles * p.heads_kv * p.batch), blocks = items * plan.splits;
  const double slots = static_cast<double>(num_sms * few_queries_residents(plan.consumers));
  const double waves =
      static_cast<double>(ceil_div(static_cast<std::int64_t>(blocks), static_cast<std::int64_t>(slots)));
  const auto keys = static_cast<double>(ceil_div(ceil_div(keys_seen(p), block_keys), plan.splits) * block_keys);
  const bool two = blocks > static_cast<double>(num_sms);
  const double key_us = plan.consumers == 2 ? kKeyOf128RowsUs : two ? kKeyOfTwo64RowsUs : kKeyOf64RowsUs;
  const double products = waves * keys * key_us * static_cast<double>(p.head_dim + 64) / 192;
  const double bytes =
      work::product(p.batch * p.heads_kv, keys_seen(p)) * static_cast<double>(p.head_dim + p.head_dim_v) * 2;
  const double rate = std::min(kMemoryRate, std::min(blocks, static_cast<double>(num_sms)) * kSmRate);
  const double reads = std::max(bytes / rate, bytes * plan.tiles / kL2Rate);
  double merge = 0;
  if (plan.splits > 1) {  // a block reads as much as it has left, and again where there are several clusters
    const double part = static_cast<double>(std::min<std::int64_t>(rows, 64 * plan.consumers) * p.head_dim_v * 4);
    const int clusters = plan.splits / plan.cluster;
    merge = kMergeUs + part / kMergeRate;
    if (clusters > 1) merge += kMergeUs + part * clusters / plan.cluster / kMergeRate;
  }
  return kLaunchUs + kFewQueriesStartUs + std::max(products, reads) + merge;
}

/// Tiles of 128 rows where one of 64 has no room for all: keys are then read half as often. Of the numbers of parts,
/// the one that is the fastest by the model, and of equal ones the least.
inline FewQueriesPlan plan_few_queries(const AttentionParams& p, std::int64_t num_sms) {
  FewQueriesPlan plan;
  const std::int64_t group = p.heads_kv > 0 ? p.heads_q / p.heads_kv : 1, rows = group * p.seq_q;
  const std::int64_t bytes = p.batch * p.heads_kv * keys_seen(p) * (p.head_dim + p.head_dim_v) * 2;
  plan.consumers = rows > 64 ? 2 : 1;
  plan.group = static_cast<int>(group);
  const std::int64_t tiles = std::max<std::int64_t>(1, ceil_div(rows, std::int64_t{64} * plan.consumers));
  plan.tiles = static_cast<int>(tiles);
  plan.leaves = tiles == 1 && bytes > kLeavesFrom;
  // More parts than fill the device once serve nobody. Of equal ones larger clusters leave less to memory.
  const std::int64_t blocks = std::max<std::int64_t>(1, ceil_div(keys_seen(p), few_queries_block_keys(plan.consumers)));
  const std::int64_t items = std::max<std::int64_t>(1, tiles * p.heads_kv * p.batch);
  plan.modelled_us = static_cast<float>(few_queries_us(p, plan, num_sms));
  FewQueriesPlan best = plan;
  for (plan.cluster = kMostPartsOfCluster; plan.cluster > 1; plan.cluster /= 2) {
    const std::int64_t fill = sms_in_clusters(num_sms, plan.cluster) * few_queries_residents(plan.consumers) / items;
    const std::int64_t most = std::min({std::int64_t{kMostKeyParts}, blocks, fill});
    for (plan.splits = plan.cluster; plan.splits <= most; plan.splits += plan.cluster) {
      plan.modelled_us = static_cast<float>(few_queries_us(p, plan, num_sms));
      if (plan.modelled_us < best.modelled_us) best = plan;
    }
  }
  return best;
}

/// The most queries of a sequence, and the fewest keys, of the calls that the kernel was made for.
inline constexpr std::int64_t kMostFewQueries = 256, kFewestKeys = 512;
/// It must be ahead of the forward kernel by more than the models are wrong.
inline constexpr double kFewQueriesMargin = 0.9;

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
/// half of what 64 rows on wgmma do, but where a warp has to gather the keys. Beyond 32 rows the forward kernel stands
/// against this one. It has no parts of keys, and a tile of one head's queries, which few of them leave empty.
inline bool is_for_few_queries(const AttentionParams& p, std::int64_t num_sms) {
  if (p.seq_q > kMostFewQueries) return false;
  if (has_few_queries(p)) {
    if (p.is_paged() && p.page_size % 8 != 0) return false;
    return p.seq_q > 1 ? keys_seen(p) >= kFewestKeys : is_for_one_query(p, num_sms);
  }
  if (keys_seen(p) < kFewestKeys) return false;
  const std::int64_t tiles = p.batch * p.heads_q * ceil_div(p.seq_q, std::int64_t{128});
  const double products = static_cast<double>(ceil_div(tiles, num_sms) * keys_seen(p)) * kForwardKeyUs *
                          static_cast<double>(p.head_dim + 64) / 192;
  const double bytes =
      work::product(p.batch * p.heads_kv, keys_seen(p)) * static_cast<double>(p.head_dim + p.head_dim_v) * 2;
  const double forward = kLaunchUs + kFewQueriesStartUs +
                         std::max(products, bytes / (tiles <= num_sms ? kForwardMemoryRate : kForwardMemoryRateOfMany));
  return plan_few_queries(p, num_sms).modelled_us < kFewQueriesMargin * forward;
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
