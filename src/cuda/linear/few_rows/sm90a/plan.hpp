// Which of the three kernels for few rows serves a call of linear, and how it is cut: a function of the call's shape
// and of what the device runs at once, tested without a GPU. Measured on H200s: lab/notebooks/linear_few_rows.md.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <variant>

#include "cuda/linear/tiles/sm90a/plan.hpp"

namespace flashkernel::cuda::sm90a {

inline constexpr std::int64_t kFewRows = 64;
inline constexpr int kFewRowsChunk = 32;  // of k: what the kernels on mma.sync give a warp at a time

/// Weights [features, k]; k_major: along in.
struct FewRowsExtent {
  std::int64_t rows = 0, features = 0, k = 0;
  bool k_major = true;
};

/// direct.cuh: 8 `tiles` features a block, whose 8 warps have k in registers, `chunks` of 32 each at most (or
/// 16 warps half as many).
struct FewRowsDirectPlan {
  int tiles = 0, chunks = 0;
};
inline constexpr int kDirectMostRows = 8;

/// stream.cuh: as many blocks, which share the features evenly.
struct FewRowsStreamPlan {
  int blocks = 0;
};
inline constexpr int kStreamMostRows = 8;

/// blocks.cuh: `splits` blocks (1, 2, 4 or 8) share block_features by splitting k, 64 or, two of them, 48; or one has
/// all of k and of features a multiple of 8 up to 128. 64 where weights lie along out. line_pairs: two lines of a
/// feature come together (whole k, a multiple of 64, in blocks of 64 features, one a multiprocessor).
struct FewRowsBlocksPlan {
  int splits = 1, blocks_per_sm = 2, block_features = 64;
  bool line_pairs = false;
};
inline constexpr int kMostBlockFeatures = 128;

using FewRowsPlan = std::variant<FewRowsDirectPlan, FewRowsStreamPlan, FewRowsBlocksPlan>;

namespace few_rows_plan {

/// No tiles: it does not serve.
inline FewRowsDirectPlan direct(const FewRowsExtent& p, int num_sms) {
  // Weights that memory reads in 2 us: longer calls are a stream, which the other kernels keep going.
  constexpr std::int64_t kMostWeights = std::int64_t{1} << 22;
  if (!p.k_major || p.rows > kDirectMostRows || p.k % kFewRowsChunk != 0 || p.features * p.k > kMostWeights) return {};
  const auto blocks = [&](int tiles) { return ceil_div(p.features, 8 * tiles); };
  FewRowsDirectPlan plan;
  plan.chunks = static_cast<int>(ceil_div(p.k, 8 * kFewRowsChunk));
  // A block a multiprocessor, with as few features as that takes. All of k must fit the registers.
  plan.tiles = blocks(1) <= num_sms ? 1 : blocks(2) <= num_sms ? 2 : 3;
  const int most_chunks = plan.tiles == 1 ? 16 : plan.tiles == 2 ? 8 : 4;
  if (plan.chunks > most_chunks || blocks(plan.tiles) > num_sms) return {};
  return plan;
}

/// All of k in each block. So that every multiprocessor has as much as the others: one block of up to 128 features, or
/// two at a time.
inline FewRowsBlocksPlan whole(const FewRowsExtent& p, int num_sms) {
  FewRowsBlocksPlan plan;
  // The call after this one begins where a multiprocessor has room. Of its blocks, though, two come to one that is free
  // and none to its neighbour, more of them with every call: so a long stream takes the whole multiprocessor.
  const bool is_long = p.k >= 2048;
  if (!p.k_major) {
    plan.blocks_per_sm = is_long && ceil_div(p.features, 64) <= num_sms ? 1 : 2;
    return plan;
  }
  constexpr std::int64_t kLeastFeatures = 24, kLeastOfTwo = 48;
  const std::int64_t eights = ceil_div(p.features, 8), slots = 2 * num_sms;
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  const auto offer = [&](int blocks_per_sm, std::int64_t features, bool ties) {
    const std::int64_t rounds = ceil_div(ceil_div(p.features, features), blocks_per_sm * num_sms);
    const std::int64_t most = rounds * blocks_per_sm * features;  // of a multiprocessor
    if (most > least || (most == least && !ties)) return;
    least = most;
    plan.blocks_per_sm = blocks_per_sm;
    plan.block_features = static_cast<int>(features);
  };
  if (8 * eights <= num_sms * kMostBlockFeatures)
    offer(1, std::max(kLeastFeatures, 8 * ceil_div(eights, num_sms)), true);
  // Two at a time, one's weights under the other one's results: with many rows as small as can be.
  const std::int64_t first = ceil_div(8 * eights, slots * kMostBlockFeatures);
  for (std::int64_t rounds = first; rounds < first + 8 && 8 * ceil_div(eights, slots * rounds) >= kLeastOfTwo; ++rounds)
    offer(2, 8 * ceil_div(eights, slots * rounds), rounds == first || p.rows > 32);
  if (plan.blocks_per_sm == 1 && plan.block_features <= 64 && !is_long && p.rows <= 32) plan.blocks_per_sm = 2;
  plan.line_pairs = plan.blocks_per_sm == 1 && plan.block_features == 64 && is_long && p.k % 64 == 0;
  return plan;
}

/// Whether halves of k leave half of the multiprocessors without a block.
inline bool halves_leave_half(const FewRowsExtent& p, int splits, int num_sms) {
  return splits == 2 && 4 * ceil_div(p.features, 64) <= num_sms;
}

/// Clusters of the most blocks that run at once share features; one block has them where there is no room for that, or
/// not k enough.
inline FewRowsBlocksPlan blocks(const FewRowsExtent& p, const GemmDevice& device) {
  FewRowsBlocksPlan plan;
  const std::int64_t tiles = ceil_div(p.features, 64);
  // A short k is not worth the exchange where each multiprocessor can have 32 features of its own.
  const bool is_short = p.k_major && 8 * tiles > 3 * device.num_sms && p.k <= (p.rows > 32 ? 2048 : 1280);
  for (const int splits : {2, 4, 8})
    if (!is_short && tiles <= device.clusters[static_cast<std::size_t>(splits)] && p.k >= 128 * splits)
      plan.splits = splits;
  if (plan.splits == 1) return whole(p, device.num_sms);
  // A short part leaves room for the next call's.
  const std::int64_t part = p.k / plan.splits;
  const bool early = p.rows > 32 || halves_leave_half(p, plan.splits, device.num_sms);
  const std::int64_t alone_from = early ? 1024 : plan.splits == 2 ? 2560 : 4096;
  if (part < alone_from) return plan;
  plan.blocks_per_sm = 1;
  // In halves, 48 features where that gives three multiprocessors in four a block, or more.
  const std::int64_t narrow = ceil_div(p.features, 48);
  if (p.k_major && plan.splits == 2 && narrow <= device.clusters[2] && 8 * narrow >= 3 * device.num_sms)
    plan.block_features = 48;
  return plan;
}

/// Whether k fits the registers, and a multiprocessor's weights are so many that memory is all that counts: it takes
/// rows of 2 KB faster than boxes, but x costs more there.
inline bool streams(const FewRowsExtent& p, int num_sms, const FewRowsBlocksPlan& instead) {
  if (!p.k_major || p.k % kFewRowsChunk != 0 || p.k < 1280) return false;
  const std::int64_t weights = p.features * p.k / num_sms;
  if (p.rows > 4) return p.rows <= kStreamMostRows && p.k <= 8192 && p.k % 1024 == 0 && weights >= 384 * 1024;
  const std::int64_t least = halves_leave_half(p, instead.splits, num_sms) ? 80 * 1024 : 136 * 1024;
  return p.k <= 16384 && instead.splits <= 2 && weights >= least;
}

}  // namespace few_rows_plan

inline FewRowsPlan plan_few_rows(const FewRowsExtent& p, const GemmDevice& device) {
  if (const FewRowsDirectPlan plan = few_rows_plan::direct(p, device.num_sms); plan.tiles > 0) return plan;
  const FewRowsBlocksPlan blocks = few_rows_plan::blocks(p, device);
  if (few_rows_plan::streams(p, device.num_sms, blocks)) return FewRowsStreamPlan{device.num_sms};
  return blocks;
}

}  // namespace flashkernel::cuda::sm90a
