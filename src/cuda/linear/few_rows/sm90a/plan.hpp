// Which of the kernels for few rows serves a call of linear, and how it is cut: a function of the call's shape and of
// what the device runs at once, tested without a GPU. Measured on H200s: lab/notebooks/linear_few_rows.md.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
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

/// in_order.cuh: as many blocks, which share the features evenly.
struct FewRowsInOrderPlan {
  int blocks = 0;
};

/// blocks.cuh with all of k in a block, whose order is that of in_order.cuh.
struct FewRowsBlocksInOrderPlan {
  FewRowsBlocksPlan blocks;
};

using FewRowsPlan = std::variant<FewRowsDirectPlan, FewRowsStreamPlan, FewRowsBlocksPlan>;
using FewRowsPlanInOrder = std::variant<FewRowsInOrderPlan, FewRowsBlocksInOrderPlan>;

namespace few_rows_plan {

/// Weights that memory reads in 2 us: longer calls are a stream, which the other kernels keep going.
inline constexpr std::int64_t kMostDirectWeights = std::int64_t{1} << 22;
/// Chunks of k that the registers of a block hold, at 1, 2 and 3 tiles.
inline constexpr int kMostDirectChunks[] = {16, 8, 4};

inline std::int64_t direct_blocks(const FewRowsExtent& p, int tiles) { return ceil_div(p.features, 8 * tiles); }

/// Whether the kernel can run it: all of k must fit the registers.
inline bool takes_direct(const FewRowsExtent& p) {
  return p.k_major && p.rows <= kDirectMostRows && p.k % kFewRowsChunk == 0 &&
         p.k <= 8 * kFewRowsChunk * kMostDirectChunks[0];
}

/// The plan of a call that the kernel takes: one block for each multiprocessor, with as few features as that allows.
inline FewRowsDirectPlan direct(const FewRowsExtent& p, int num_sms) {
  FewRowsDirectPlan plan;
  plan.chunks = static_cast<int>(ceil_div(p.k, 8 * kFewRowsChunk));
  plan.tiles = direct_blocks(p, 1) <= num_sms ? 1 : direct_blocks(p, 2) <= num_sms ? 2 : 3;
  while (plan.chunks > kMostDirectChunks[plan.tiles - 1]) --plan.tiles;
  return plan;
}

/// Whether the kernel is the best one: few weights, in one round of blocks.
inline bool is_direct(const FewRowsExtent& p, int num_sms) {
  return takes_direct(p) && p.features * p.k <= kMostDirectWeights &&
         direct_blocks(p, direct(p, num_sms).tiles) <= num_sms;
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

/// k that the stream's shapes are built for, at most, of up to 4 rows and of up to 8 (whose k is copied 2 KB at a
/// time).
inline constexpr std::int64_t kLeastStreamK = 1280, kMostStreamK = 16384, kMostStreamKOfEight = 8192;
/// Bytes of weights of a multiprocessor from which on memory is all that counts: of more than 4 rows; of up to 4; of up
/// to 4 where halves of k would leave half of the multiprocessors without a block.
inline constexpr std::int64_t kStreamFromOfEight = 384 * 1024, kStreamFrom = 136 * 1024, kStreamFromAlone = 80 * 1024;

/// Whether the kernel can run it: k fits the registers.
inline bool takes_stream(const FewRowsExtent& p) {
  if (!p.k_major || p.rows > kStreamMostRows || p.k % kFewRowsChunk != 0 || p.k < kLeastStreamK) return false;
  return p.rows > 4 ? p.k <= kMostStreamKOfEight && p.k % 1024 == 0 : p.k <= kMostStreamK;
}

/// Whether a multiprocessor's weights are so many that memory is all that counts: the stream takes rows of 2 KB faster
/// than boxes, but x costs more there.
inline bool is_stream(const FewRowsExtent& p, int num_sms, const FewRowsBlocksPlan& instead) {
  if (!takes_stream(p)) return false;
  const std::int64_t weights = p.features * p.k / num_sms;
  if (p.rows > 4) return weights >= kStreamFromOfEight;
  const std::int64_t least = halves_leave_half(p, instead.splits, num_sms) ? kStreamFromAlone : kStreamFrom;
  return instead.splits <= 2 && weights >= least;
}

/// Whether in_order.cuh can run it.
inline bool takes_in_order(const FewRowsExtent& p) { return p.k_major && p.k % kGemmTileK == 0; }

/// Features of a multiprocessor up to which in_order.cuh is the faster one for more than 32 rows. Measured with 64 rows
/// and 8, 16 and 24 features, where it was 3 to 12 % faster, and 31 and more, where it was 2 to 16 % slower
/// (lab/notebooks/invariance.md). Up to 32 rows it was level or faster with any number of features.
inline constexpr std::int64_t kMostFeaturesInOrder = 24, kFewRowsInOrder = 32;

/// Whether in_order.cuh is the faster of the two kernels that add in the order of the tiles.
inline bool is_in_order(const FewRowsExtent& p, int num_sms) {
  return takes_in_order(p) && (p.rows <= kFewRowsInOrder || p.features <= num_sms * kMostFeaturesInOrder);
}

/// Features are shared by eights.
inline FewRowsInOrderPlan in_order(const FewRowsExtent& p, int num_sms) {
  return {static_cast<int>(std::min<std::int64_t>(num_sms, ceil_div(p.features, 8)))};
}

}  // namespace few_rows_plan

/// The best of the three kernels that add in orders of their own.
inline FewRowsPlan plan_few_rows(const FewRowsExtent& p, const GemmDevice& device) {
  if (few_rows_plan::is_direct(p, device.num_sms)) return few_rows_plan::direct(p, device.num_sms);
  const FewRowsBlocksPlan blocks = few_rows_plan::blocks(p, device);
  if (few_rows_plan::is_stream(p, device.num_sms, blocks)) return FewRowsStreamPlan{device.num_sms};
  return blocks;
}

/// The best of the two that add in the order of many rows' tiles, for weights along in. It was ahead of the tiles, or
/// level, in every shape that was measured.
inline FewRowsPlanInOrder plan_few_rows_in_order(const FewRowsExtent& p, int num_sms) {
  if (few_rows_plan::is_in_order(p, num_sms)) return few_rows_plan::in_order(p, num_sms);
  return FewRowsBlocksInOrderPlan{few_rows_plan::whole(p, num_sms)};
}

/// The plan of one of the five, for calls that it takes.
template <class Kernel>
Kernel plan_few_rows_by(const FewRowsExtent& p, const GemmDevice& device) {
  if constexpr (std::is_same_v<Kernel, FewRowsDirectPlan>)
    return few_rows_plan::direct(p, device.num_sms);
  else if constexpr (std::is_same_v<Kernel, FewRowsStreamPlan>)
    return {device.num_sms};
  else if constexpr (std::is_same_v<Kernel, FewRowsInOrderPlan>)
    return few_rows_plan::in_order(p, device.num_sms);
  else if constexpr (std::is_same_v<Kernel, FewRowsBlocksInOrderPlan>)
    return {few_rows_plan::whole(p, device.num_sms)};
  else
    return few_rows_plan::blocks(p, device);
}

}  // namespace flashkernel::cuda::sm90a
