// Which row of the table multiplies a call fastest, with which tiles, and into how many parts its k is cut: a function
// of the call's shape and of what the device runs at once, tested without a GPU.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "cuda/host/ceil_div.hpp"

namespace flashkernel::cuda::sm90a {

/// Columns of a tile of 128 rows. Cooperative: two warpgroups share a tile; ping-pong: each has a tile of its own and
/// one's epilogue runs under the other's products. Cluster: cooperative, and the blocks of a cluster share a tile's k.
enum class GemmVariant {
  kPingPong192,
  kPingPong176,  // this one to 144, and 112 to 64: where takes_neighbours
  kPingPong168,
  kPingPong160,
  kPingPong144,
  kPingPong128,
  kPingPong112,
  kPingPong80,  // this one and 64 in one wave alone
  kPingPong64,
  kCooperative128,
  kCooperative96,  // k-major operands only
  kCluster128,
  kCluster96,  // k-major operands only
};

/// How k and tiles are dealt out: the rows of the table. Of ways that take equally long the first one serves.
enum class GemmWork {
  kCooperative,  // a tile a block at a time, all of k
  kCluster,      // the blocks of a cluster share a tile's k
  kSplitK,       // cooperative tiles of parts of k, whose sums meet in the workspace
  kPingPong,     // two tiles a block at a time, all of k
};
inline constexpr std::size_t kGemmWorks = 4;

inline constexpr std::int64_t kGemmTileK = 64;

struct GemmPlan {
  GemmVariant variant = GemmVariant::kCooperative128;
  int parts = 1;  // of k: through the workspace, or the blocks of a cluster
};

inline constexpr bool in_clusters(GemmVariant variant) {
  return variant == GemmVariant::kCluster128 || variant == GemmVariant::kCluster96;
}

/// The parts that the cluster variants know: 8 blocks are the largest portable cluster.
inline constexpr int kClusterParts[] = {2, 3, 4, 5, 6, 8};
inline constexpr int kMostClusterParts = 8;

/// A B^T, A [m, k] and B [n, k].
struct GemmExtent {
  std::int64_t m = 0, n = 0, k = 0;
  bool k_major_a = true, k_major_b = true;
  bool bulk_bias = true;  // there is none, or one that bulk copies can fetch
};

struct GemmDevice {
  int num_sms = 0;
  std::array<int, kMostClusterParts + 1> clusters = {};  // [i]: clusters of i blocks that run at once
};

namespace gemm_plan {

constexpr std::int64_t tiles(const GemmExtent& p, std::int64_t columns) {
  return ceil_div(p.m, 128) * ceil_div(p.n, columns);
}

/// Whether threads can store their own neighbours (GemmShape::kNeighbours): k-major operands, a tile's columns, k-tiles
/// for every slot of the ring, a bias that comes beside them.
inline constexpr int kMostSlots = 7;
constexpr bool takes_neighbours(const GemmExtent& p, std::int64_t columns) {
  return p.k_major_a && p.k_major_b && p.bulk_bias && p.n >= columns && ceil_div(p.k, kGemmTileK) >= kMostSlots;
}

struct PingPong {
  GemmVariant variant;
  std::int64_t columns;
  std::int64_t k_tile = 0;  // clocks: 4 a column, or what its 67 bytes a clock take to come
  std::int64_t change = 0;  // clocks that one tile's results hold the next one's products up
  std::int64_t ends = 0;    // clocks that have nothing to run beside: the start, and the last tile's results
  bool any_way = false;     // whether there is a kernel for what takes no neighbours
};
// Measured on an H200, k 768 to 6400.
inline constexpr PingPong kPingPong[] = {
    // the widest first
    {GemmVariant::kPingPong192, 192, 768, 600, 7200, true}, {GemmVariant::kPingPong176, 176, 704, 600, 7200},
    {GemmVariant::kPingPong168, 168, 672, 600, 7200},       {GemmVariant::kPingPong160, 160, 640, 500, 7300},
    {GemmVariant::kPingPong144, 144, 576, 650, 7000},       {GemmVariant::kPingPong128, 128, 512, 700, 5500, true},
    {GemmVariant::kPingPong112, 112, 459, 700, 5500},
};

/// Clocks of the multiprocessor with the most tiles.
inline std::int64_t ping_pong_clocks(const GemmExtent& p, const PingPong& tile, int num_sms) {
  const std::int64_t products = ceil_div(p.k, kGemmTileK) * tile.k_tile;
  return ceil_div(tiles(p, tile.columns), num_sms) * (products + tile.change) + tile.ends;
}

/// Whether a multiprocessor gets one tile at most: then both of its warpgroups work on it, and k may be shared. With
/// more tiles ping-pong is faster than the other ways.
constexpr bool is_one_wave(const GemmExtent& p, int num_sms) { return tiles(p, 128) <= num_sms; }

/// The tile of several waves: the fewest clocks.
inline GemmVariant ping_pong_by_clocks(const GemmExtent& p, int num_sms) {
  const auto serves = [&](const PingPong& tile) { return tile.any_way || takes_neighbours(p, tile.columns); };
  std::int64_t least = ping_pong_clocks(p, kPingPong[0], num_sms);
  for (const PingPong& tile : kPingPong)
    if (serves(tile)) least = std::min(least, ping_pong_clocks(p, tile, num_sms));
  // The widest that is within 1 % of the fewest clocks: it moves less, and takes less power for it. (Where operands
  // come from memory again and again, narrower ones have been 4 to 25 % slower than their clocks.)
  for (const PingPong& tile : kPingPong)
    if (serves(tile) && 99 * ping_pong_clocks(p, tile, num_sms) / 100 <= least) return tile.variant;
  return GemmVariant::kPingPong192;  // not reached: the fewest clocks are some tile's
}

/// Weights of more than this pass through the L2 cache (of an H100 or H200: half of it).
inline constexpr std::int64_t kHalfOfL2 = 25 << 20;

/// What the time of one wave of tiles is made of, us, less what all ways have in common. Rates: MB in a microsecond.
struct WaveCosts {
  double k_tile[5];                                  // products, at 64, 80, 96, 112 and 128 columns
  double from_memory;                                // what any of the parts asks for, once
  double l2_whole, l2_in_clusters, l2_in_workspace;  // what all blocks ask for
  double stream, stream_in_clusters;                 // what a block asks for, where weights come from memory
  double cluster, cluster_block, kilobyte;           // kilobyte: of the largest share's mail
  double workspace, megabyte;                        // megabyte: of the parts' sums, which a second kernel adds
};
/// Fitted to an H200's calls of 100 shapes with weights in the cache (128 to 3072 rows, k 768 to 13824, bf16) and of 51
/// with weights in memory, in 4 to 15 ways each: what they choose is 0.6 % slower than the best of these in the mean,
/// 17 % at most. Blocks that want the same lines at one time are served by one read; those of a cluster never do.
inline constexpr WaveCosts kAlongK{
    {0.165, 0.205, 0.248, 0.279, 0.338}, 4.5, 13.25, 10.8, 15, 0.077, 0.09, -0.36, 0.154, 0.011, 4.6, 0.48};
/// Weights along out, and gradients: of 128 to 1024 rows, tiles of 128 columns.
inline constexpr WaveCosts kOtherLayouts{
    {0.35, 0.35, 0.35, 0.35, 0.35}, 1e3, 1e3, 1e3, 1e3, 1e3, 1e3, 0.25, 0.15, 0.025, 4.5, 0.4};

struct OneWave {
  const WaveCosts& costs;
  std::int64_t columns, tiles, k_tiles;
  bool passes;         // the weights through the cache, for few rows of tiles to share them
  double asked, sums;  // MB: of a k-tile of all of m and n; of fp32

  OneWave(const GemmExtent& p, std::int64_t columns)
      : costs(p.k_major_a && p.k_major_b ? kAlongK : kOtherLayouts),
        columns(columns),
        tiles(gemm_plan::tiles(p, columns)),
        k_tiles(ceil_div(p.k, kGemmTileK)),
        passes(2 * p.n * p.k > kHalfOfL2 && ceil_div(p.m, 128) <= 4),
        asked(128e-6 * static_cast<double>(128 * ceil_div(p.m, 128) + p.n)),
        sums(4e-6 * static_cast<double>(p.m * p.n)) {}

  double products(std::int64_t parts, double l2_rate, double stream) const {
    const double block = 128e-6 * static_cast<double>(128 + columns);
    const double l2 = block * static_cast<double>(tiles * parts) / l2_rate;
    const double memory = std::max(asked * static_cast<double>(parts) / costs.from_memory, passes ? block / stream : 0);
    const double k_tile = costs.k_tile[static_cast<std::size_t>((columns - 64) / 16)];
    return std::max({k_tile, l2, memory}) * static_cast<double>(ceil_div(k_tiles, parts));
  }
  double whole() const { return products(1, costs.l2_whole, costs.stream); }
  double in_clusters(std::int64_t parts) const {
    const std::int64_t kilobytes = 4 * (parts - 1) * ceil_div(columns / 8, parts);
    return products(parts, costs.l2_in_clusters, costs.stream_in_clusters) + costs.cluster +
           costs.cluster_block * static_cast<double>(parts) + costs.kilobyte * static_cast<double>(kilobytes);
  }
  double in_workspace(std::int64_t parts) const {
    return products(parts, costs.l2_in_workspace, costs.stream) + costs.workspace +
           costs.megabyte * sums * static_cast<double>(parts);
  }
};

/// k of a part in a cluster, at least, in k-tiles; of one that meets the others in the workspace, where both operands
/// lie along k and where they do not (which pays from kLeastSplitK on).
inline constexpr std::int64_t kLeastClusterTiles = 4, kLeastPart = 256, kLeastOtherPart = 512, kLeastSplitK = 2048;

/// Not in this way's range: another one is faster, by how much nobody has measured.
inline constexpr double kNever = std::numeric_limits<double>::infinity();

}  // namespace gemm_plan

/// What one row would do with a call, and its time in one wave, us, less what all ways have in common.
struct GemmOffer {
  GemmPlan plan;
  double us = gemm_plan::kNever;

  void take(GemmVariant variant, std::int64_t parts, double time) {
    if (time < us) us = time, plan = {variant, static_cast<int>(parts)};
  }
};

/// Each row's offer, and whose is the best.
struct GemmOffers {
  std::array<GemmOffer, kGemmWorks> by;
  GemmWork best = GemmWork::kPingPong;

  GemmOffer& of(GemmWork work) { return by[static_cast<std::size_t>(work)]; }
  const GemmOffer& of(GemmWork work) const { return by[static_cast<std::size_t>(work)]; }
  const GemmPlan& plan() const { return of(best).plan; }
};

/// Plans that run wherever their kernels do come first; what is faster takes their place.
inline GemmOffers offer_gemm(const GemmExtent& p, const GemmDevice& device) {
  using namespace gemm_plan;
  GemmOffers offers;
  GemmOffer &cooperative = offers.of(GemmWork::kCooperative), &cluster = offers.of(GemmWork::kCluster),
            &split_k = offers.of(GemmWork::kSplitK), &ping_pong = offers.of(GemmWork::kPingPong);
  cooperative.plan = {GemmVariant::kCooperative128, 1};
  cluster.plan = {GemmVariant::kCluster128, kClusterParts[0]};
  split_k.plan = {GemmVariant::kCooperative128, 2};
  if (!is_one_wave(p, device.num_sms)) {
    ping_pong.plan = {ping_pong_by_clocks(p, device.num_sms), 1};
    return offers;
  }

  const bool k_major = p.k_major_a && p.k_major_b;
  for (const std::int64_t columns : {96, 128}) {
    const OneWave wave(p, columns);
    if (wave.tiles > device.num_sms || (columns == 96 && !k_major)) continue;
    const GemmVariant whole = columns == 96 ? GemmVariant::kCooperative96 : GemmVariant::kCooperative128;
    cooperative.take(whole, 1, wave.whole());
    for (const int parts : kClusterParts)
      if (wave.tiles <= device.clusters[static_cast<std::size_t>(parts)] && kLeastClusterTiles * parts <= wave.k_tiles)
        cluster.take(columns == 96 ? GemmVariant::kCluster96 : GemmVariant::kCluster128, parts,
                     wave.in_clusters(parts));
    if (!k_major && p.k < kLeastSplitK) continue;
    const std::int64_t most = std::min(device.num_sms / std::max<std::int64_t>(1, wave.tiles),
                                       p.k / (k_major ? kLeastPart : kLeastOtherPart));
    for (std::int64_t parts = 2; parts <= most; ++parts) split_k.take(whole, parts, wave.in_workspace(parts));
  }
  // Ping-pong tiles, of which a block has one: each warpgroup finishes half of it.
  constexpr PingPong kNarrow[] = {
      {GemmVariant::kPingPong112, 112}, {GemmVariant::kPingPong80, 80}, {GemmVariant::kPingPong64, 64}};
  for (const PingPong& tile : kNarrow)
    if (takes_neighbours(p, tile.columns) && tiles(p, tile.columns) <= device.num_sms)
      ping_pong.take(tile.variant, 1, OneWave(p, tile.columns).whole());
  if (ping_pong.us == kNever) ping_pong.plan = {ping_pong_by_clocks(p, device.num_sms), 1};

  const auto least = std::min_element(offers.by.begin(), offers.by.end(),
                                      [](const GemmOffer& a, const GemmOffer& b) { return a.us < b.us; });
  offers.best = static_cast<GemmWork>(least - offers.by.begin());
  return offers;
}

/// The best plan, whatever its row.
inline GemmPlan plan_gemm(const GemmExtent& p, const GemmDevice& device) { return offer_gemm(p, device).plan(); }

/// The best plan that adds all of k in its order: such plans give the same bits, whatever their tiles.
inline GemmPlan plan_gemm_of_whole_k(const GemmExtent& p, const GemmDevice& device) {
  const GemmOffers offers = offer_gemm(p, device);
  const GemmOffer &cooperative = offers.of(GemmWork::kCooperative), &ping_pong = offers.of(GemmWork::kPingPong);
  return (cooperative.us < ping_pong.us ? cooperative : ping_pong).plan;
}

}  // namespace flashkernel::cuda::sm90a
